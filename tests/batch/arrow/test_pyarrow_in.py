"""Frames made of Arrow's columns are the frames that `build` makes of the same records, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Batch, BatchError, build, verify

pyarrow = pytest.importorskip("pyarrow")

from laminar.batch.arrow.pyarrow_in import frame  # noqa: E402  # only where pyarrow is

TYPES = {"keys": pyarrow.binary(), "tags": pyarrow.utf8(), "timestamps": pyarrow.timestamp("ms", tz="UTC")}


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `build`, with and without holes."""
    count = draw(st.integers(1, 20))
    every: dict[str, st.SearchStrategy[Any]] = {
        "values": st.binary(max_size=30),
        "keys": st.none() | st.binary(max_size=12),
        "tags": st.none() | st.text(max_size=5),
        "timestamps": st.none() | st.integers(-(2**40), 2**40),
        "trace_ids": st.none() | st.binary(min_size=16, max_size=16),
        "headers": st.none() | st.dictionaries(st.text(max_size=4), st.binary(max_size=8), max_size=3),
    }
    wanted = ["values", *(name for name in every if name != "values" and draw(st.booleans()))]
    return {name: draw(st.lists(every[name], min_size=count, max_size=count)) for name in wanted}


@given(records(), st.integers(0, 9), st.integers(0, 9))
def test_a_frame_is_that_of_the_same_records(given: dict[str, Any], before: int, behind: int) -> None:
    """Also of slices, which begin within their bytes and bits."""
    columns: dict[str, Any] = {}
    count = len(given["values"])
    for name, cells in given.items():
        if name == "headers":
            columns[name] = cells
            continue
        padded = [cells[0]] * before + cells + [cells[-1]] * behind
        columns[name] = pyarrow.array(padded, TYPES.get(name, pyarrow.binary())).slice(before, count)

    made = frame(columns.pop("values"), **columns)

    assert build(**given) == made
    verify(made)


def test_bytes_below_a_null_are_left_out() -> None:
    """Arrow allows them, and some of its kernels leave them."""
    keys = pyarrow.Array.from_buffers(
        pyarrow.binary(),
        2,
        [pyarrow.py_buffer(b"\x02"), pyarrow.array([0, 3, 4], pyarrow.int32()).buffers()[1]]
        + [pyarrow.py_buffer(b"xxxk")],
    )

    made = frame(pyarrow.array([b"1", b"2"], pyarrow.binary()), keys=keys)

    assert [None, b"k"] == Batch(made).keys
    assert build([b"1", b"2"], keys=[None, b"k"]) == made


@pytest.mark.parametrize("values", [[], [b"1", None]])
def test_no_records_and_null_values_are_refused(values: list[bytes | None]) -> None:
    """A record has a value, a batch a record."""
    with pytest.raises(BatchError):
        frame(pyarrow.array(values, pyarrow.binary()))
