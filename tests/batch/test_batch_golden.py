"""The frozen bytes: what was stored once is read for ever, and is what is still written.

Each ``golden/*.hex`` is one frame, described in docs/format.md. A change of these files is a change of the
format: it needs a new version number, not a new file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.batch import Batch, Codec, Column, Kind, build, build_control, check_directory, split, stamp

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> bytes:
    lines = (GOLDEN / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex("".join(line.partition("#")[0] for line in lines))


def made(name: str) -> bytearray:
    """The frame of a golden file as today's code builds it."""
    if name == "one-value":
        return build([b"hello"])
    if name == "stamped":
        frame = build([b"hello", b"", b"world"], producer_id=bytes(range(16)), producer_epoch=2, sequence=77)
    elif name == "noop":
        frame = build_control(Kind.NOOP)
    elif name == "command":
        frame = build_control(Kind.COMMAND, b"payload")
    else:
        assert name == "every-column"
        frame = build(
            [b"one", b"", b"three"],
            keys=[b"k", None, b""],
            timestamps=[5, None, -5],
            tags=["red", None, "ü"],
            headers=[{"h": b"v"}, None, None],
            delivery_times=[None, 9, None],
            trace_ids=[None, None, b"t" * 16],
        )
    stamp(
        frame,
        index=258,
        term=3,
        prev_term=2,
        base_offset=1000,
        append_time_ms=1_700_000_000_000,
        committed_index=257,
        opens_segment=name == "stamped",
    )
    return frame


@pytest.mark.parametrize("name", ["one-value", "stamped", "every-column", "noop", "command"])
def test_todays_bytes_are_the_frozen_ones(name: str) -> None:
    assert golden(name).hex() == made(name).hex()


def test_every_column_is_read_from_its_frozen_bytes() -> None:
    frame = golden("every-column")
    batch = Batch(frame)

    check_directory(frame, max_records=3, max_record_bytes=100, max_plain_bytes=1000)
    assert batch.values == [b"one", b"", b"three"]
    assert batch.keys == [b"k", None, b""]
    assert batch.timestamps == [5, 1_700_000_000_000, -5]
    assert batch.tags == ["red", None, "ü"]
    assert batch.headers == [{"h": b"v"}, {}, {}]
    assert batch.delivery_times == [None, 9, None]
    assert batch.trace_ids == [None, None, b"t" * 16]
    assert [record.offset for record in batch] == [1000, 1001, 1002]


def test_compressed_bytes_are_read() -> None:
    """Only read: another version of zstd may write other bytes for the same column."""
    batch = Batch(golden("zstd"))
    entry = batch.entry(Column.VALUE)

    assert entry is not None and entry.codec == Codec.ZSTD
    assert batch.values == [b"laminar " * 20] * 3


def test_a_column_of_the_future_is_skipped() -> None:
    """A frozen frame with a column 200, of 4 bytes a record, behind those we know."""
    frame = golden("unknown-column")
    batch = Batch(frame)

    check_directory(frame, max_records=2, max_record_bytes=100, max_plain_bytes=1000)
    assert batch.values == [b"a", b"b"]
    assert batch.columns == {Column.VALUE, 200}


def test_all_of_them_back_to_back_are_split() -> None:
    names = sorted(path.stem for path in GOLDEN.glob("*.hex"))
    frames = [golden(name) for name in names]

    assert len(names) == 7
    assert frames == [bytes(frame) for frame in split(b"".join(frames))]
