"""The partitions that a member holds: reading them, committing what was read, and giving them back.

A partition that is to be released is not read any further. It is released once the records handed out are
committed, or the time for that is over.
"""

from __future__ import annotations

import asyncio
import time
from typing import Generic, TypeVar

from laminar.client.consume.fetchers import Fetchers
from laminar.client.consume.group.cursor_view import CursorView
from laminar.client.consume.group.membership import RENEW_S, Membership
from laminar.client.consume.group.partition_leases import (
    NOT_NOW,
    STEP_TIMEOUT_S,
    Lease,
    Leases,
    is_gone,
)
from laminar.client.errors import Error, Fenced, NotDrained, NotFound, PreconditionFailed
from laminar.client.policy.assignment import REWIND, Place

T = TypeVar("T")


class HeldPartitions(Generic[T]):
    """A member's leases by partition, and the steps that change one of them.

    `changed` is set when a lease has ended or has another owner's name.
    """

    def __init__(
        self,
        topic: str,
        *,
        cursor: Leases,
        fetchers: Fetchers[T],
        membership: Membership,
        view: CursorView,
        start: str,
        handover_s: float,
        commit_ends: bool,
        changed: asyncio.Event,
    ) -> None:
        self._topic = topic
        self._cursor = cursor
        self._fetchers = fetchers
        self._membership = membership
        self._view = view
        self._start = start
        self._handover_s = handover_s
        self._commit_ends = commit_ends
        self._changed = changed
        self.leases: dict[int, Lease] = {}
        # Partitions that were lost with records that were handed out and not committed, until `commit`
        # reports them: (partition, committed position, seen position).
        self.lost: list[tuple[int, int, int]] = []
        # When the loop's body began to wait for its next record, in seconds of the monotonic clock; else
        # None.
        self.waits_since_s: float | None = None

    # -- reading -------------------------------------------------------------------------------

    async def claim(self, partition: int, place: Place, owner: str, me: str) -> None:
        """Claim a partition that `owner` has at this place, and read it if that succeeds."""
        wanted_from = Place(position=place.position, owner=owner)
        lease = await self._cursor.claim(partition, wanted_from, me=me, start=self._start)
        if lease is not None:
            lease.end = self._view.known.ends.get(partition)
            self.leases[partition] = lease
            self.read_from(lease)

    def read_from(self, lease: Lease) -> None:
        """Fetch the lease's partition again, from the first record on that was not handed out."""
        self._fetchers.drop(lease.partition)
        self._fetchers.add(lease.partition, lease.handed, lease.end)

    def note_end(self, lease: Lease) -> None:
        """Note the final end of a leased partition that has ended, and read up to there only."""
        end = self._view.known.ends.get(lease.partition)
        if end is not None and lease.end is None:
            lease.end = end
            if lease.leaving_s is None:
                self.read_from(lease)

    def leave(self, release: frozenset[int]) -> None:
        """Stop reading the partitions in `release`; read those again that are not to be released any more."""
        for partition, lease in self.leases.items():
            if partition in release and lease.leaving_s is None:
                lease.leaving_s = time.monotonic()
                self._fetchers.drop(partition)
            elif partition not in release and lease.leaving_s is not None:
                lease.leaving_s = None
                self.read_from(lease)

    # -- committing ----------------------------------------------------------------------------

    async def commit_seen(self, lease: Lease) -> None:
        """Commit what the program has got of a partition."""
        try:
            await self._cursor.move(lease, lease.seen)
        except (Fenced, PreconditionFailed) as error:
            self.lose(lease, error)

    async def commit_passed(self, lease: Lease) -> None:
        """Commit records that were trimmed or filtered out, if the program has none to commit itself.

        At most once a second, but at once if the partition has ended or is to be released.
        """
        seen = lease.seen
        if not lease.valid or seen <= lease.committed or lease.committed < lease.given:
            return
        now_s = time.monotonic()
        ends = lease.leaving_s is not None or (lease.end is not None and seen >= lease.end)
        if now_s < lease.pass_at_s and not ends:
            return
        lease.pass_at_s = now_s + RENEW_S
        try:
            await self._cursor.move(lease, seen, timeout_s=STEP_TIMEOUT_S)
        except (Fenced, PreconditionFailed) as error:
            self.lose(lease, error)
        except NOT_NOW:
            return

    async def commit_end(self, lease: Lease) -> None:
        """Commit a partition that has ended, if the program got all of it but does not commit.

        The partitions that replaced it can be read only after that. A program that commits after every 100
        records, say, would wait for them for ever: so commit once it has waited for a record for `session_s`.
        """
        since_s = self.waits_since_s
        if not self._commit_ends or lease.end is None or since_s is None:
            return
        if lease.seen < lease.end or lease.committed >= lease.end:
            return
        if time.monotonic() >= since_s + self._membership.session_s:
            try:
                await self._cursor.move(lease, lease.seen, timeout_s=STEP_TIMEOUT_S)
            except (Fenced, PreconditionFailed) as error:
                self.lose(lease, error)
            except NOT_NOW:
                return
            self._view.look_at_once()

    # -- giving back ---------------------------------------------------------------------------

    async def give_back(self, lease: Lease) -> None:
        """Release a partition once all records handed out of it are committed, or the time for that is over.

        The time is `handover_s` from the beginning of the release. But while the loop's body waits for its
        next record, it is at most `session_s`: such a program will hardly commit its last record, and its
        partition should not be blocked for longer than that of a dead member.
        """
        assert lease.leaving_s is not None
        until_s = lease.leaving_s + self._handover_s
        if self.waits_since_s is not None:
            until_s = min(until_s, max(self.waits_since_s, lease.leaving_s) + self._membership.session_s)
        if lease.committed < lease.handed and time.monotonic() < until_s:
            return
        try:
            await self._cursor.hand(lease, "", timeout_s=STEP_TIMEOUT_S)
        except (Fenced, PreconditionFailed) as error:
            self.lose(lease, error)
        except NOT_NOW:
            return
        except NotFound as error:
            if not is_gone(error):
                raise
            self.drop(lease)
        else:
            self.drop(lease)

    async def own_again(self, lease: Lease) -> None:
        """Transfer the lease to this member's present name, if it was claimed under an earlier one."""
        if lease.owner == self._membership.id:
            return
        try:
            await self._cursor.hand(lease, self._membership.id, timeout_s=STEP_TIMEOUT_S)
        except (Fenced, NotDrained, PreconditionFailed) as error:
            self.lose(lease, error)
        except NOT_NOW:
            return
        except NotFound as error:
            if not is_gone(error):
                raise
            self.drop(lease)
        self._changed.set()

    async def release_all(self) -> None:
        """Release all partitions at their last committed positions, as far as that succeeds."""
        leases = list(self.leases.values())
        self.leases.clear()
        handed = (self._cursor.hand(lease, "", timeout_s=STEP_TIMEOUT_S) for lease in leases)
        await asyncio.gather(*handed, return_exceptions=True)

    def drop(self, lease: Lease) -> None:
        """Drop a lease that was released, or that is not this member's any more."""
        if self.leases.get(lease.partition) is not lease:
            return
        lease.valid = False
        del self.leases[lease.partition]
        self._fetchers.drop(lease.partition)
        if lease.seen > lease.committed < lease.given:
            self.lost.append((lease.partition, lease.committed, lease.seen))
        self._changed.set()

    def lose(self, lease: Lease, error: Error | None) -> None:
        """Drop a lease that another member took; `error` is its refusal, if any."""
        if self.leases.get(lease.partition) is not lease:
            return
        self.drop(lease)
        self._view.look_at_once()
        rewound = isinstance(error, Fenced) and str(error.limit or "").startswith(REWIND)
        membership = self._membership
        if membership.mode == "broadcast" and not rewound:
            taken = Fenced(
                f"another client reads {self._topic} as member {membership.member!r} of {membership.group!r}",
                code="fenced",
                field="member",
                value=membership.member,
            )
            taken.__cause__ = error
            self._fetchers.fail(taken)
            self._changed.set()
