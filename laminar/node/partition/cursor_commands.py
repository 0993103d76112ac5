"""Changes of a partition's cursors: compare-and-set, ownership and limits, checked by the leader.

A change is checked against the cursors as of the log's end, committed or not. So of two requests that race,
the second sees the change of the first.

A change of the topic's route creates and ends partitions, and once a group's cursor is at the end of an ended
partition, a member may own the partitions that follow. So in a created or ended partition each change of a
cursor counts only when it is synced, also in a log with the flush policy `interval`. And only a *rewind*,
which owns the cursors of one name in all partitions while it moves them, may move a cursor back from the end
of a sealed partition (`docs/routes.md#consumers`).
"""

from __future__ import annotations

import asyncio

import msgspec

from laminar.batch import Kind, build_control
from laminar.batch.header import Flag
from laminar.http.api.problems import Problem
from laminar.node.partition.append_path import AppendPath
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.problems import NO_MAKER, Maker
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.cursors import MAX_CURSORS, Cursor, CursorChange

REWIND = "~"
"""First character of a cursor's owner that is a rewind; members do not claim such a cursor."""


FENCE = "~reclaim"
"""Name of the cursor that marks a partition as being reclaimed (deleted); no client is shown it."""


def is_rewind(owner: str) -> bool:
    """Return whether this owner of a cursor is a rewind, not a member of a group."""
    return owner.startswith(REWIND)


class CursorCommands:
    """The commands by which requests read and change the cursors of one partition."""

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
        maker: Maker = NO_MAKER,
    ) -> asyncio.Future[Receipt]:
        """Propose a cursor's position and owner; a position of None deletes the cursor. Leader only.

        The returned future is resolved when the change is committed. With `check` the cursor must be at
        `expected` (None: it must not exist), or at `position` already, as after a retry. The present owner
        must be `expected_owner` ("": no owner) or, if `expected_owner` is None, `owner` or no one; a cursor
        that `owner` owns already may always be changed. Deleting a cursor needs no ownership. A new cursor
        counts towards the limit of `maker`, the principal that creates it.

        Raises:
            Problem: 412 if the cursor is at another position; 409 `fenced` if another owner has it; 416 if
                the position is after the log's end; 429 if there are too many cursors; 422 if it would move
                back from the end of a sealed partition; 503 `changing` while the partition is reclaimed; 503
                `not_leader`; and the refusals of `AppendPath.check_room`.
        """
        current = self._checked(
            name,
            position,
            expected=expected,
            check=check,
            owner=owner,
            expected_owner=expected_owner,
            maker=maker,
        )
        if position is None:
            if current is not None and self._is_at_end(current):
                # The reclaim may be creating this cursor in the partitions that follow right now, where it
                # was deleted before.
                self._check_fence()
        else:
            if current is None or position < current.position:
                self._check_fence()
            self._check_final(name, current, position, owner)
        return self._propose(name, position, owner, now_ms, maker=maker)

    def claim(
        self,
        name: str,
        position: int,
        *,
        expected: int | None,
        check: bool,
        owner: str,
        now_ms: int,
        expected_owner: str | None = None,
        maker: Maker = NO_MAKER,
    ) -> asyncio.Future[Receipt]:
        """Propose only the owner of a cursor, if `set` would be allowed with these arguments. Leader only.

        The position does not change, and a cursor that does not exist is created at 0. The caller then checks
        whether `owner` may have the partition, and calls `set` or `undo_claim`.

        Raises:
            Problem: as `set` does.
        """
        current = self._checked(
            name,
            position,
            expected=expected,
            check=check,
            owner=owner,
            expected_owner=expected_owner,
            maker=maker,
        )
        if current is None:
            self._check_fence()
        position = 0 if current is None else current.position
        return self._propose(name, position, owner, now_ms, maker=maker)

    def undo_claim(self, name: str, claimed: Cursor, *, now_ms: int) -> asyncio.Future[Receipt] | None:
        """Propose that a claimed cursor has no owner again, if nothing has changed it since. Leader only.

        A cursor that the claim created is not deleted but stays at 0, because a partition before this one may
        have been reclaimed on the ground that this cursor exists. Return None if there is nothing to undo.

        Raises:
            Problem: 503 `not_leader`.
        """
        self._context.check_leads()
        if self.latest(name) is not claimed or not claimed.owner:
            return None
        return self._propose(name, claimed.position, "", now_ms)

    def take(
        self, name: str, owner: str, *, now_ms: int, synced: bool, maker: Maker = NO_MAKER
    ) -> asyncio.Future[Receipt]:
        """Propose a rewind as the cursor's owner, also if a member owns the cursor now. Leader only.

        A cursor that does not exist is created at 0. With `synced` the entry counts only once it is synced:
        if a power loss took it, the member that owned the cursor before would own it again. Pass True
        wherever all nodes of the cluster know such entries; where they do not, no topic has changed its
        route.

        Raises:
            Problem: 429 if there are too many cursors; 503 `changing` while the partition is reclaimed; 503
                `not_leader`; and the refusals of `AppendPath.check_room`.
        """
        assert is_rewind(owner), f"{owner!r} is no rewind"
        self._context.check_leads()
        self._appends.check_room(of_consumers=True)
        self._check_fence()
        current = self.latest(name)
        if current is None:
            self._check_count(maker)
        position = 0 if current is None else current.position
        return self._propose(name, position, owner, now_ms, synced=synced, maker=maker)

    def fence(self, *, now_ms: int) -> asyncio.Future[Receipt]:
        """Propose the fence of a reclaim, which keeps all cursors at the end of this sealed partition.

        Until `unfence` no cursor is created here or moved back, and none at the end is deleted. A cursor
        before the end may be deleted: while there is one, the partition is not reclaimed anyway.

        Raises:
            Problem: 503 `not_leader`, and the refusals of `AppendPath.check_room`.
        """
        self._context.check_leads()
        self._appends.check_room(of_consumers=True)
        return self._propose(FENCE, 0, "", now_ms)

    def unfence(self, *, now_ms: int) -> asyncio.Future[Receipt]:
        """Propose to remove the fence. Leader only."""
        self._context.check_leads()
        return self._propose(FENCE, None, "", now_ms)

    def is_fenced(self) -> bool:
        """Return whether there is a fence, committed or not.

        A fence does not expire by time, because the clocks of two leaders differ.
        """
        return self.latest(FENCE) is not None

    def names(self) -> list[str]:
        """Return the names of cursors that exist at the log's end or as of the last commit, sorted."""
        return [name for name in self._context.state.cursors.known() if name != FENCE]

    def latest(self, name: str) -> Cursor | None:
        """Return a cursor as of the log's end, committed or not; each change makes a new object."""
        return self._context.state.cursors.get(name)

    def is_drained(self, name: str) -> bool:
        """Return whether a cursor is drained: at the end of this partition, whose seal is final.

        False while a rewind owns the cursor, because it will move the cursor back. Call it after a majority
        has confirmed that this replica leads. No power loss makes the answer wrong: a majority has synced the
        seal and everything before it, and after the seal a change of a cursor is committed only when it is
        synced.
        """
        seal, cursor = self._context.final_seal, self.get(name)
        if seal is None or cursor is None or is_rewind(cursor.owner):
            return False
        return cursor.position >= seal.end

    def _is_at_end(self, cursor: Cursor) -> bool:
        """Return whether a cursor is at the log's end, so that the partition may be reclaimed."""
        return cursor.position >= self._context.log.next_offset and not is_rewind(cursor.owner)

    # -- what a change compares --------------------------------------------------------------

    def _checked(
        self,
        name: str,
        position: int | None,
        *,
        expected: int | None,
        check: bool,
        owner: str,
        expected_owner: str | None,
        maker: Maker,
    ) -> Cursor | None:
        """Return the present cursor, or None if it is new, after the checks that `set` describes."""
        context = self._context
        context.check_leads()
        self._appends.check_room(of_consumers=True)
        end, current = context.log.next_offset, self.latest(name)
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
        if current is None and position is not None:
            self._check_count(maker)
        return current

    def _check_count(self, maker: Maker) -> None:
        known = len(self._context.state.cursors)
        if known >= MAX_CURSORS:
            raise Problem(
                "quota",
                f"{self._context.name} has as many cursors as a partition may have",
                field="cursor",
                value=known,
                limit=MAX_CURSORS,
                hint="DELETE cursors that are no longer used.",
                outcome="not_applied",
            )
        maker.check("cursors", self._context.state.cursors.made_by)

    def _check_fence(self) -> None:
        """Raise 503 `changing` while the partition is being reclaimed; a retry finds it deleted or open."""
        if self.is_fenced():
            raise Problem("changing", f"{self._context.name} is being reclaimed", outcome="not_applied")

    def _check_final(self, name: str, current: Cursor | None, position: int, owner: str) -> None:
        """Raise 422 `invalid` if a cursor would move back from the end of a sealed partition.

        Only the rewind that owns the cursor may do so: a member may own the partitions that follow already.
        """
        seal = self._context.state.succession.sealed
        if seal is None or current is None or not position < seal.end <= current.position:
            return
        if is_rewind(current.owner) and current.owner == owner:
            return
        raise Problem(
            "invalid",
            f"cursor {name!r} is at the end of {self._context.name}, which takes no more records: members "
            "may own what follows",
            field=f"positions.{self._context.number}",
            value=position,
            limit=seal.end,
            hint='PUT the cursor with {"rewind": PLACE}, or `laminar cursor set`.',
            outcome="not_applied",
        )

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

    def _propose(
        self,
        name: str,
        position: int | None,
        owner: str,
        now_ms: int,
        *,
        synced: bool = False,
        maker: Maker = NO_MAKER,
    ) -> asyncio.Future[Receipt]:
        succession = self._context.state.succession
        # A topic's route changes only in a cluster whose nodes all know entries with the flag SYNCED.
        synced = synced or succession.successor_of > 0 or succession.sealed is not None
        made_by = maker.principal if self.latest(name) is None else ""
        change = CursorChange(name, position, now_ms, owner, made_by)
        frame = build_control(Kind.CURSOR, msgspec.msgpack.encode(change), flags=Flag.SYNCED if synced else 0)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._appends.propose(frame, [(future, 0)])
        return future
