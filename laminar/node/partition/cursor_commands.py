"""Changes of a partition's cursors: compare-and-set, ownership and limits, checked by the leader.

They are compared with the log's end, committed or not: of two that race, the second sees the first.
"""

from __future__ import annotations

import asyncio

import msgspec

from laminar.batch import Kind, build_control
from laminar.http.api.problems import Problem
from laminar.node.partition.append_path import AppendPath
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.cursors import MAX_CURSORS, Cursor, CursorChange


class CursorCommands:
    """The cursors of one partition, for requests."""

    def __init__(self, context: PartitionContext, appends: AppendPath) -> None:
        self._context = context
        self._appends = appends

    def get(self, name: str) -> Cursor | None:
        """Return a cursor as it is committed here: a later change may still be lost."""
        return self._context.state.cursors.committed_at(name)

    def set(
        self,
        name: str,
        position: int | None,
        *,
        expected: int | None,
        check: bool,
        owner: str,
        now_ms: int,
        expected_owner: str | None = None,
    ) -> asyncio.Future[Receipt]:
        """Commit a cursor's position; None deletes it. With `check` only if it is at `expected`.

        A cursor with an owner is changed by that owner alone: `expected_owner` is who must own it now, ""
        for an unowned one; without it, `owner` must own it, or no one. Deleting needs no ownership.

        Raises:
            Problem: 412 when it is elsewhere, 409 `fenced` with the present owner, 416 for a position after
                the log's end, 429 for one cursor too many.
        """
        context = self._context
        context.check_leads()
        self._appends.check_room()
        cursors, end = context.state.cursors, context.log.next_offset
        current = cursors.get(name)
        present = current.position if current is not None else None
        if position is not None:
            self._check_owner(name, current.owner if current is not None else "", owner, expected_owner)
        # A cursor that is at the wanted position already is a retry of what went through, not a race lost.
        if check and present not in (expected, position):
            raise Problem(
                "precondition_failed",
                f"cursor {name!r} of {context.name} is not where it was expected",
                field=f"expected.{context.number}",
                value=expected,
                limit=present,
                outcome="not_applied",
            )
        if position is not None and not 0 <= position <= end:
            raise Problem(
                "offset_beyond_end",
                f"cursor {name!r} of {context.name} cannot be set to a position after the end",
                field=f"positions.{context.number}",
                value=position,
                limit=end,
                outcome="not_applied",
            )
        if current is None and position is not None and len(cursors) >= MAX_CURSORS:
            raise Problem(
                "quota",
                f"{context.name} has as many cursors as a partition may have",
                field="cursor",
                value=len(cursors),
                limit=MAX_CURSORS,
                hint="DELETE cursors that are no longer used.",
                outcome="not_applied",
            )
        change = CursorChange(name=name, position=position, changed_ms=now_ms, owner=owner)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._appends.propose(build_control(Kind.CURSOR, msgspec.msgpack.encode(change)), [(future, 0)])
        return future

    def _check_owner(self, name: str, present: str, owner: str, expected_owner: str | None) -> None:
        """Raise 409 `fenced` for a change of a cursor that `present` owns by another owner."""
        if present in (("", owner) if expected_owner is None else (expected_owner,)):
            return
        # Owning it already is a retry of what went through: no two owners have one name.
        if owner and present == owner:
            return
        raise Problem(
            "fenced",
            f"cursor {name!r} of {self._context.name} is owned by "
            + (repr(present) if present else "no one"),
            field="owner" if expected_owner is None else "expected_owner",
            value=owner if expected_owner is None else expected_owner,
            limit=present,
            outcome="not_applied",
        )
