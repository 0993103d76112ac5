"""The table of delayed records is a function of the log; each number is pending, or has ended in one way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Header, Kind, build, stamp
from laminar.node.partition.state import delayed_records
from laminar.node.partition.state.delayed_records import (
    CANCELLED,
    Added,
    Change,
    Changed,
    Copied,
    DelayedBatch,
    DelayedRecords,
    Moved,
    Place,
    Received,
    Sent,
    delayed_change,
    delayed_entry,
)
from laminar.wire.delayed import NUMBERS

PARTITION = 3
FIRST = PARTITION * NUMBERS


def header(index: int, frame: bytearray) -> Header:
    stamp(
        frame,
        index=index,
        term=1,
        prev_term=1,
        base_offset=0,
        append_time_ms=1_000 * index,
        committed_index=0,
    )
    return Header.unpack(frame)


def apply(table: DelayedRecords, index: int, change: Change | list[int]) -> None:
    """Apply an entry as the log has it, encoded and decoded."""
    if isinstance(change, list):
        table.published(header(index, delayed_entry(Changed([]))), change)
        return
    frame = delayed_entry(change)
    table.appended(header(index, frame), delayed_change(frame))


def added(count: int, *, first: int = 0, due_ms: int = 5_000) -> Added:
    return Added(FIRST + first, count, due_ms, due_ms + count, b"frame")


def test_a_record_is_pending_until_it_is_published_or_cancelled() -> None:
    """A batch is forgotten with its last record, and the log may begin after it then."""
    table = DelayedRecords()
    apply(table, 4, added(3))
    assert (len(table), table.next_count, table.possible_start(9)) == (3, 3, 3)
    assert table.find(FIRST + 1) == Place(4, 1)

    apply(table, 5, [4, 1])
    apply(table, 6, Changed([FIRST, CANCELLED, 5_000]))

    assert (table.find(FIRST + 1), table.find(FIRST), len(table)) == (None, None, 1)
    assert table.cancelled == {FIRST: 5_000}
    apply(table, 7, [4, 1, 4, 2, 9, 0])
    assert (len(table), table.size_bytes, table.possible_start(9)) == (0, 0, 9)


def test_a_producer_batch_is_known_by_its_header() -> None:
    """The header of the entry has what that of the batch had: a retry is recognised by it."""
    frame = build([b"a"], producer_id=b"p" * 16, producer_epoch=2, sequence=7, checkpoint=9, floor=3)
    entry = delayed_entry(added(1), producer=Header.unpack(frame))

    found = header(5, entry)

    assert (found.kind, found.count, found.next_offset) == (Kind.DELAYED, 0, 0)
    assert (found.producer_id, found.producer_epoch, found.sequence) == (b"p" * 16, 2, 7)
    assert (found.checkpoint, found.floor) == (9, 3)


def test_a_copy_leaves_out_what_ended_since_it_was_made() -> None:
    """It keeps the others' numbers and times, and lets the log begin after their first entries."""
    table = DelayedRecords()
    apply(table, 4, added(3))
    apply(table, 5, added(1, first=3))
    apply(table, 6, Changed([FIRST + 2, 77, 5_000]))
    apply(table, 7, [4, 0])

    apply(table, 8, Copied([5, 0, 4, 0, 4, 2], 77, 5_003, b"frame"))

    assert table.possible_start(9) == 3, "row 1 of entry 4 was not copied"
    assert table.find(FIRST + 3) == Place(8, 0)
    assert (table.find(FIRST), len(table)) == (None, 3)
    assert table.moved == {FIRST + 2: Moved(77, Place(8, 2))}
    apply(table, 9, [4, 1, 8, 1])
    assert (table.possible_start(9), len(table)) == (7, 2)


def test_the_first_record_of_the_first_partition_is_found_in_a_copy() -> None:
    """Its number is 0, which also stands in a copy for a record that ended while the copy was made."""
    table = DelayedRecords()
    apply(table, 4, Added(0, 3, 5_000, 5_000, b"frame"))
    apply(table, 5, [4, 1])
    apply(table, 6, Copied([4, 1, 4, 0, 4, 2], 5_000, 5_000, b"frame"))

    assert [table.find(number) for number in range(3)] == [Place(6, 1), None, Place(6, 2)]
    apply(table, 7, Changed([0, CANCELLED, 5_000]))
    assert (table.cancelled, table.find(0), len(table)) == ({0: 5_000}, None, 1)


def test_a_record_is_looked_for_only_where_its_number_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be millions of copied records: all their numbers one by one take a second."""
    table = DelayedRecords()
    for place in range(20):
        apply(table, place + 1, added(10, first=10 * place))
        apply(table, place + 101, Copied([place + 1, 5, place + 1, 2], 5_000, 5_000, b"frame"))
    looked_at: list[int] = []
    pending_row = DelayedBatch.pending_row

    def counted(batch: DelayedBatch, number: int) -> int | None:
        looked_at.append(batch.index)
        return pending_row(batch, number)

    monkeypatch.setattr(DelayedBatch, "pending_row", counted)
    assert table.find(FIRST + 72) == Place(108, 1)
    assert table.find(FIRST + 73) == Place(8, 3)
    restored = DelayedRecords()
    restored.restore(table.stored())
    assert restored.find(FIRST + 72) == Place(108, 1)
    assert set(looked_at) == {8, 108}


def test_what_another_partition_sends_is_taken_once() -> None:
    """Batches count from 0 in each stream. One that comes again changes nothing; a gap was lost here."""
    table = DelayedRecords()
    numbers = [9 * NUMBERS + 4, 9 * NUMBERS + 1]
    batch = Received(b"g" * 20, 0, numbers, 5, 6, [1, 99], b"frame")
    apply(table, 4, batch)
    apply(table, 5, batch)

    assert (len(table), table.received) == (2, {b"g" * 20: 1})
    assert table.find(numbers[1]) == Place(4, 1)
    assert table.moved == {numbers[1]: Moved(99, Place(4, 1))}
    apply(table, 7, Received(b"g" * 20, 2, [7], 5, 6, [], b"frame"))
    apply(table, 8, Received(b"g" * 20, 1, [8], 5, 6, [], b"frame"))
    assert (len(table), table.received) == (3, {b"g" * 20: 3})


def test_what_was_sent_is_not_pending_any_more() -> None:
    """The partition knows to which it sent how many batches."""
    table = DelayedRecords()
    apply(table, 4, added(2))
    apply(table, 5, Sent(8, 8, 0, [4, 1]))
    apply(table, 6, Sent(9, 11, 0, [4, 0]))

    assert (len(table), table.sent) == (0, {(8, 8): 1, (9, 11): 1})


def test_cancelled_records_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those due first; the table says up to which time it does not know."""
    monkeypatch.setattr(delayed_records, "MAX_CANCELLED", 20)
    table = DelayedRecords()
    apply(table, 1, added(30))
    for row in range(21):
        assert table.forgotten_ms == -1
        apply(table, row + 2, Changed([FIRST + row, CANCELLED, 100 + row]))

    assert (len(table.cancelled), table.forgotten_ms) == (19, 101)
    assert min(table.cancelled.values()) == 102
    table.truncated(22)
    assert (len(table.cancelled), table.forgotten_ms) == (20, -1)


def test_what_is_truncated_has_the_time_again_that_it_was_given() -> None:
    """Also where the entry that is truncated ended the record."""
    for entry in (Changed([FIRST, CANCELLED, 5_000]), [4, 0], Sent(8, 8, 0, [4, 0])):
        table = DelayedRecords()
        apply(table, 4, added(2))
        apply(table, 5, Changed([FIRST, 77, 5_000]))
        apply(table, 6, entry)
        assert (table.moved, table.find(FIRST)) == ({}, None)

        table.truncated(6)

        assert table.moved == {FIRST: Moved(77, Place(4, 0))}


@st.composite
def _logs(draw: st.DrawFn) -> list[Change | list[int]]:
    """Draw entries 1, 2, ... that name places and numbers which may exist, or not."""
    entries: list[Change | list[int]] = []
    count = 0
    place = st.tuples(st.integers(1, 12), st.integers(0, 3)).map(list)
    rows = st.lists(place, max_size=4, unique_by=tuple).map(
        lambda places: [value for each in places for value in each]
    )
    for _ in range(draw(st.integers(0, 12))):
        what = draw(st.integers(0, 5))
        if what == 0:
            size = draw(st.integers(1, 4))
            entries.append(added(size, first=count))
            count += size
        elif what == 1:
            number = FIRST + draw(st.integers(0, 12))
            entries.append(Changed([number, draw(st.sampled_from([CANCELLED, 7, 8_000])), 5_000]))
        elif what == 2:
            entries.append(draw(rows))
        elif what == 3:
            entries.append(Copied(draw(rows), 1, 2, b"frame"))
        elif what == 4:
            numbers = draw(
                st.lists(st.integers(5 * NUMBERS, 5 * NUMBERS + 9), min_size=1, max_size=3, unique=True)
            )
            moved = [0, 9] if draw(st.booleans()) else []
            entries.append(Received(b"g" * 20, draw(st.integers(0, 2)), numbers, 1, 2, moved, b""))
        else:
            entries.append(Sent(4, draw(st.integers(4, 5)), draw(st.integers(0, 2)), draw(rows)))
    return entries


@given(_logs(), st.data())
def test_truncation_leaves_what_a_rebuild_would_give(
    entries: list[Change | list[int]], data: st.DataObject
) -> None:
    """Rolled back to any entry, or asked for its state then, it is what it was; stored, it is restored."""
    table = DelayedRecords()
    states = [table.stored()]
    for index, entry in enumerate(entries, start=1):
        apply(table, index, _valid(table, entry))
        states.append(table.stored())
        assert len(table) == sum(batch.left for batch in table.batches.values())
        assert table.size_bytes == sum(batch.size_bytes for batch in table.batches.values())
        assert all(table.is_pending(moved.place) for moved in table.moved.values())
    kept = data.draw(st.integers(0, len(entries)))
    before = data.draw(st.integers(0, kept))
    table.committed(before)

    assert table.stored_at(kept) == states[kept]
    assert table.stored() == states[-1], "to be asked changes nothing"
    table.truncated(kept + 1)

    assert table.stored() == states[kept]
    restored = DelayedRecords()
    restored.restore(table.stored())
    assert restored.stored() == states[kept]
    assert (len(restored), restored.size_bytes) == (len(table), table.size_bytes)
    table.truncated(before + 1)
    assert table.stored() == states[before]


def _valid(table: DelayedRecords, entry: Change | list[int]) -> Change | list[int]:
    """Return the entry without rows that no batch ever had: a leader names what its table has."""
    if isinstance(entry, (Copied, Sent)):
        rows = _known(table, entry.rows)
        return type(entry)(
            **{**{name: getattr(entry, name) for name in entry.__struct_fields__}, "rows": rows}
        )
    return _known(table, entry) if isinstance(entry, list) else entry


def _known(table: DelayedRecords, rows: list[int]) -> list[int]:
    return [
        value
        for entry, row in zip(rows[::2], rows[1::2], strict=True)
        if entry not in table.batches or row < table.batches[entry].count
        for value in (entry, row)
    ]
