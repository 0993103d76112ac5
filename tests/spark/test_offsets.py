"""Offsets have one way to be written, and a symbolic start says what it will become."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.spark.read.offsets import (
    EARLIEST,
    LATEST,
    Offset,
    OffsetSpec,
    Positions,
    decode,
    encode,
    parse_offsets,
    spec_of_symbol,
)

PARTITIONS = st.tuples(st.text("aZ09._-", min_size=1, max_size=8), st.integers(0, 999))
POSITIONS = st.dictionaries(PARTITIONS, st.integers(0, 2**53 - 1), max_size=8)


@given(POSITIONS, st.randoms(use_true_random=False))
def test_equal_positions_are_the_same_text(positions: Positions, random: object) -> None:
    """However a dictionary was filled, Spark sees one text: another order would be an endless query."""
    items = list(positions.items())
    random.shuffle(items)  # type: ignore[attr-defined]  # hypothesis' own Random

    assert json.dumps(encode(positions)) == json.dumps(encode(dict(items)))


@given(POSITIONS)
def test_positions_survive_the_journal(positions: Positions) -> None:
    """What is decoded from the journal's text is what was encoded, and encodes to the same text again."""
    text = json.dumps(encode(positions))

    assert positions == decode(json.loads(text)).positions
    assert text == json.dumps(encode(decode(json.loads(text)).positions))


def test_the_form_of_an_offset_is_fixed() -> None:
    """Checkpoints hold it: keys sorted, positions, ids, a version; of the first batch also its begin."""
    positions = {("b", 10): 7, ("b", 2): 5, ("a.x", 0): 1}
    ids = {("b", 10): "02", ("a.x", 0): "01"}

    assert '{"a.x:0": 1, "b:10": 7, "b:2": 5, "v": 2}' == json.dumps(encode(positions))
    assert (
        '{"a.x:0": 1, "b:10": 7, "b:2": 5, "ids": {"a.x:0": "01", "b:10": "02"}, "since": {"b:2": 4}, "v": 2}'
    ) == json.dumps(encode(positions, ids, since={("b", 2): 4}))
    assert Offset(positions, ids, {("b", 2): 4}) == decode(encode(positions, ids, since={("b", 2): 4}))


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused(version: int) -> None:
    """No newer checkpoint is guessed at; an older one does not say which partitions it belongs to."""
    with pytest.raises(ValueError, match=f"version {version}.*new checkpoint"):
        decode({"a:0": 1, "v": version})


def test_unknown_keys_are_skipped() -> None:
    """A later release may add to the offset without a new version."""
    assert {("a", 0): 1} == decode({"a:0": 1, "hint": "x", "v": 2}).positions


@pytest.mark.parametrize(
    "place",
    [
        OffsetSpec("earliest"),
        OffsetSpec("latest"),
        OffsetSpec("timestamp", time_ms=17),
        OffsetSpec("offsets", values={("t", 1): EARLIEST, ("t", 0): 9}),
        OffsetSpec("timestamps", values={("t", 0): 1_700_000_000_000}),
    ],
)
def test_a_symbolic_start_names_its_place(place: OffsetSpec) -> None:
    """Through the journal's text and back it is the same place; a concrete offset is none."""
    assert place == spec_of_symbol(json.loads(json.dumps(place.symbol())))
    assert spec_of_symbol(encode({("t", 0): 1})) is None


def test_a_symbolic_start_is_the_same_text_each_time() -> None:
    """Spark asks for the first offset twice, and again after a restart."""
    one = OffsetSpec("offsets", values={("t", 1): 4, ("t", 0): 9})
    other = OffsetSpec("offsets", values={("t", 0): 9, ("t", 1): 4})

    assert json.dumps(one.symbol()) == json.dumps(other.symbol())


NAMES = {"latest": LATEST, "earliest": EARLIEST}


def test_offsets_are_given_as_to_kafka() -> None:
    """Topics, then partitions as strings; -1 and -2 stand for the ends."""
    found = parse_offsets('{"t": {"0": 23, "1": -2}, "u": {"0": -1}}', option="o", names=NAMES)

    assert {("t", 0): 23, ("t", 1): EARLIEST, ("u", 0): LATEST} == found


@pytest.mark.parametrize(
    "text", ["soon", "[]", '{"t": 4}', '{"t": {"x": 4}}', '{"t": {"0": -3}}', '{"t": {"-1": 3}}']
)
def test_what_is_no_offsets_is_refused(text: str) -> None:
    """With the option's name in the message."""
    with pytest.raises(ValueError, match="startingOffsets"):
        parse_offsets(text, option="startingOffsets", names=NAMES)
