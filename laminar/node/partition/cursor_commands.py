"""Changes of a partition's cursors: compare-and-set, ownership and limits, checked by the leader.

A change is checked against the cursors as of the log's end, committed or not. So of two requests that race,
the second sees the change of the first.

In a partition that a change of the topic's route made or ended, others act on what a cursor says: a member
may own the partitions that follow when it is at the end. So there each change of a cursor counts only when it
is synced, in an `interval` log too; and only a *rewind*, which holds all cursors of its name, takes one off
the end of a sealed partition (`docs/routes.md#consumers`).
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
"""The owner of a cursor that is held by a rewind begins with this; members leave it alone."""


FENCE = "~reclaim"
"""The name of the cursor that says that a partition is being reclaimed; it is shown to no client."""


def is_rewind(owner: str) -> bool:
    """Return whether this owner of a cursor is a rewind, and no member of a group."""
    return owner.startswith(REWIND)


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
        maker: Maker = NO_MAKER,
    ) -> asyncio.Future[Receipt]:
        """Propose a cursor's position and owner; a position of None deletes the cursor. Leader only.

        The future is resolved when that is committed. With `check` the cursor must be at `expected` (None: it
        must not exist), or at `position` already, as after a retry. An owned cursor is changed for its owner
        alone: it must be owned by `expected_owner` now ("": by no one), or, without that, by `owner` or no
        one. A cursor that `owner` owns already passes, too. Deleting needs no ownership. A new one counts for
        the limits of its `maker`.

        Raises:
            Problem: 412 when the cursor is at another position, 409 `fenced` with the present owner, 416 for
                a position after the log's end, 429 when there are too many cursors, 503 `not_leader` when
                this replica does not lead, and the refusals of `AppendPath.check_room`.
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
                # A reclaim may just begin it in the partitions that follow, where it was deleted before.
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
        """Propose a cursor's owner alone, where `set` with the same arguments would be allowed. Leader only.

        The cursor stays where it is, and one that does not exist begins at 0: whether `owner` may have it is
        asked afterwards.

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

        A cursor that the claim made stays, at 0: a partition before this one may be reclaimed because it is
        there. Return None if there is nothing to undo.

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
        """Propose that a rewind holds the cursor, also if it is owned; one that is not there begins at 0.

        `synced`: it counts only when it is synced, as a member that owned the cursor would own it again. True
        wherever all nodes of the cluster know such entries; without that no topic has changed its route.

        Raises:
            Problem: 429 when there are too many cursors, 503 `not_leader`, and the refusals of
                `AppendPath.check_room`.
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
        """Propose that no cursor begins here, goes back, or is deleted at the end, until `unfence`.

        Others follow this partition. A cursor that is behind may be deleted: with it there is no reclaim.

        Raises:
            Problem: 503 `not_leader`, and the refusals of `AppendPath.check_room`.
        """
        self._context.check_leads()
        self._appends.check_room(of_consumers=True)
        return self._propose(FENCE, 0, "", now_ms)

    def unfence(self, *, now_ms: int) -> asyncio.Future[Receipt]:
        """Propose that the fence is over. Leader only."""
        self._context.check_leads()
        return self._propose(FENCE, None, "", now_ms)

    def is_fenced(self) -> bool:
        """Return whether there is a fence, committed or not. No clock ends it: two leaders' differ."""
        return self.latest(FENCE) is not None

    def names(self) -> list[str]:
        """Return the names of the cursors at the log's end or as of the last commit, sorted."""
        return [name for name in self._context.state.cursors.known() if name != FENCE]

    def latest(self, name: str) -> Cursor | None:
        """Return a cursor as of the log's end, committed or not: another object after each change of it."""
        return self._context.state.cursors.get(name)

    def is_drained(self, name: str) -> bool:
        """Return whether a cursor is at the end of a partition that takes no more records, for good.

        False while a rewind holds it, which will set it back. Call it after a majority has confirmed that
        this replica leads. No loss of power takes back what it says: a majority has synced the seal, and so
        all before it; and a change of a cursor behind it is committed only when it is synced.
        """
        seal, cursor = self._context.final_seal, self.get(name)
        if seal is None or cursor is None or is_rewind(cursor.owner):
            return False
        return cursor.position >= seal.end

    def _is_at_end(self, cursor: Cursor) -> bool:
        """Return whether a cursor does not keep this partition from being reclaimed."""
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
        """Return the present cursor, if it may be changed so."""
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
        """Raise 503 `changing` while the partition is being reclaimed: it goes, or is as before."""
        if self.is_fenced():
            raise Problem("changing", f"{self._context.name} is being reclaimed", outcome="not_applied")

    def _check_final(self, name: str, current: Cursor | None, position: int, owner: str) -> None:
        """Raise 422 `invalid` for a step off the end of a sealed partition, unless a rewind holds the cursor.

        A member may own the partitions that follow.
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
        # A topic's route changes only where all nodes know such entries.
        synced = synced or succession.successor_of > 0 or succession.sealed is not None
        made_by = maker.principal if self.latest(name) is None else ""
        change = CursorChange(name, position, now_ms, owner, made_by)
        frame = build_control(Kind.CURSOR, msgspec.msgpack.encode(change), flags=Flag.SYNCED if synced else 0)
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._appends.propose(frame, [(future, 0)])
        return future
