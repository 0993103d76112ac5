"""The state of a partition as a whole: what its tables learn from the log that they share."""

from __future__ import annotations

import msgspec

from laminar.batch import Header, Kind, build_control
from laminar.node.partition.state.cursors import Cursor, CursorChange
from laminar.node.partition.state.state import PartitionState
from tests.node.entries import stamped


def test_a_table_is_told_when_what_changed_it_is_committed() -> None:
    """Until then a read that may not see what can be rolled back gets the value from before."""
    state = PartitionState(0)
    for index, position in enumerate((5, 9), start=1):
        change = CursorChange(name="billing", position=position, changed_ms=index)
        frame = stamped(build_control(Kind.CURSOR, msgspec.msgpack.encode(change)), index)
        state.appended(Header.unpack(frame), frame)

    assert state.cursors.committed_at("billing") is None
    state.committed(1)
    assert Cursor(5, 1) == state.cursors.committed_at("billing")
    state.committed(2)
    assert Cursor(9, 2) == state.cursors.committed_at("billing")
