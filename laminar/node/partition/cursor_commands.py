"""Changes of a partition's cursors: compare-and-set, ownership and limits, checked by the leader.

A change is checked against the cursors as of the log's end, committed or not. So of two requests that race,
the second sees the change of the first.
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
    """Reads and changes of one partition's cursors, for requests."""

    def __init__(self, context: PartitionContext, appends: AppendPath) -> None:
        self._context = context
        self._appends = appends

    def get(self, name: str) -> Cursor | None:
        """Return a cursor as of the last commit that this replica knows of, or None."""
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
        """Propose a cursor's position and owner; a position of None deletes the cursor. Leader only.

        The future is resolved when that is committed. With `check` the cursor must be at `expected` (None: it
        must not exist), or at `position` already, as after a retry. An owned cursor is changed for its owner
        alone: it must be owned by `expected_owner` now ("": by no one), or, without that, by `owner` or no
        one. A cursor that `owner` owns already passes, too. Deleting needs no ownership.

        Raises:
            Problem: 412 when the cursor is at another position, 409 `fenced` with the present owner, 416 for
                a position after the log's end, 429 when there are too many cursors, 503 `not_leader` when
                this replica does not lead, and the refusals of `AppendPath.check_room`.
        """
        context = self._context
        context.check_leads()
        self._appends.check_room()
        cursors, end = context.state.cursors, context.log.next_offset
        current = cursors.get(name)
        present = current.position if current is not None else None
        if position is not None:
            self._check_owner(name, current.owner if current is not None else "", owner, expected_owner)
        # If the cursor is at the wanted position already, this is a retry of a change that was made, not a
        # race that was lost.
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
        """Raise 409 `fenced` unless `present`, the cursor's owner now ("": none), lets `owner` change it."""
        if present in (("", owner) if expected_owner is None else (expected_owner,)):
            return
        # If `owner` owns the cursor already, this is a retry of a change that was made: no two owners have
        # the same name.
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
