"""Cursors are a function of the log, like the producer table."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Header, Kind, build_control, stamp
from laminar.node.partition.state.cursors import Cursor, CursorChange, Cursors


def entry(index: int, name: str, position: int | None, made_by: str = "") -> tuple[Header, memoryview]:
    change = CursorChange(name=name, position=position, changed_ms=index, made_by=made_by)
    frame = build_control(Kind.CURSOR, msgspec.msgpack.encode(change))
    stamp(frame, index=index, term=1, prev_term=1, base_offset=0, append_time_ms=index, committed_index=0)
    return Header.unpack(frame), memoryview(frame)[128:]


def test_a_cursor_stands_where_the_last_entry_put_it() -> None:
    """A change without a position takes the cursor away."""
    cursors = Cursors()
    cursors.appended(*entry(1, "billing", 5))
    cursors.appended(*entry(2, "billing", 9))
    assert cursors.get("billing") == Cursor(9, 2)

    cursors.appended(*entry(3, "billing", None))

    assert cursors.get("billing") is None
    assert cursors.names() == []
    assert cursors.known() == ["billing"], "until that is committed"


def test_a_cursor_is_of_who_made_it_until_it_is_deleted() -> None:
    """Who changes it later takes it over no more than a restart does."""
    cursors, restored = Cursors(), Cursors()
    cursors.appended(*entry(1, "billing", 5, "maker"))
    cursors.appended(*entry(2, "billing", 9, "other"))
    cursors.appended(*entry(3, "audit", 9, "other"))
    restored.restore(cursors.stored())
    assert [(1, 1)] * 2 == [(each.made_by("maker"), each.made_by("other")) for each in (cursors, restored)]
    cursors.appended(*entry(4, "billing", None, "other"))
    cursors.appended(*entry(5, "billing", 0, "other"))
    assert (0, 2) == (cursors.made_by("maker"), cursors.made_by("other"))
    cursors.truncated(4)
    assert (1, 1) == (cursors.made_by("maker"), cursors.made_by("other"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 9)), max_size=30), st.data())
def test_truncation_leaves_what_a_rebuild_would_give(
    changes: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    """Rolled back to any entry, the cursors are those of the log that is left."""
    cursors = Cursors()
    entries = [
        entry(index, name, position, f"principal {index % 3}")
        for index, (name, position) in enumerate(changes, start=1)
    ]
    for each in entries:
        cursors.appended(*each)
    kept = data.draw(st.integers(0, len(entries)))

    cursors.truncated(kept + 1)

    rebuilt = Cursors()
    for each in entries[:kept]:
        rebuilt.appended(*each)
    assert {name: rebuilt.get(name) for name in rebuilt.names()} == {
        name: cursors.get(name) for name in cursors.names()
    }
