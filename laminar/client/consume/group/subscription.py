"""Subscriptions: a program as a member of a consumer group, and how partitions change owners.

Two tasks run beside the reader. One renews this member's session at the group's leader every second, and
receives the list of live members. The other claims and releases partitions as `policy.assignment` says. When
a partition is to be released, its reading stops, and it is released once the records handed out are
committed. A partition that is to be read is claimed as soon as no other member owns it. The partitions of a
member that died are claimed by others when its session has expired.

A change of the topic's route (a split, merge or move) ends partitions, and new ones replace them. Members do
not claim an ended partition whose records are all acknowledged, nor a new one before those that it replaced
are acknowledged: the cluster would refuse. In a new partition the group's cursor begins at 0. Nor do they
claim partitions while the cursor is being rewound.

A member reads only partitions that it owns according to the partition's log, and the partition refuses
commits by other clients. A member that could not renew its session stops handing out records before others
may count it as dead. It then continues under a new name with the partitions that it can claim again. So no
member hands out a record that another one has committed.

`membership` has the session and its task, `cursor_view` what is known of the group's cursor,
`held_partitions` what becomes of a partition that this member holds, `ownership` the task that claims and
releases. What may be handed out is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Generic, TypeVar

from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, Fetchers, OnDamage, OnExpired
from laminar.client.consume.group.cursor_view import CursorView
from laminar.client.consume.group.held_partitions import HeldPartitions
from laminar.client.consume.group.membership import Membership, Mode
from laminar.client.consume.group.ownership import Ownership
from laminar.client.consume.group.partition_leases import NOT_NOW, STEP_TIMEOUT_S, Lease, Leases
from laminar.client.consume.row_filter import RowFilter
from laminar.client.errors import ConfigError, Fenced
from laminar.client.net.session import Session
from laminar.client.records import ReadBatch, Record

T = TypeVar("T")

SESSION_S = 6.0
HANDOVER_S = 30.0


class Subscription(Generic[T]):
    """This program's membership in a consumer group: it reads the partitions that the group assigns to it.

    ``async with topic.subscribe(group="billing") as records: async for record in records: ...``. If the
    block ends without an exception, the records that the loop's body has got are committed. In any case the
    partitions are released.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        *,
        group: str,
        mode: Mode,
        member: str | None,
        start: str,
        decode: Callable[[bytes], T],
        session_s: float,
        handover_s: float,
        on_expired: OnExpired,
        on_damage: OnDamage = "error",
        keep: RowFilter | None = None,
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        commit_ends: bool = True,
    ) -> None:
        if mode not in ("clustering", "broadcast"):
            raise ConfigError(f"there is no mode {mode!r}", code="bad_mode", field="mode", value=mode)
        if mode == "broadcast" and member is None:
            raise ConfigError(
                "a member of a broadcast group needs a name (member=), under which its position is kept",
                code="no_member",
                field="member",
                hint="subscribe(mode='broadcast', member=NAME)",
            )
        self.group = group
        self.mode: Mode = mode
        self.member = member
        self._session = session
        self._topic = topic
        # Set when partitions may be claimed or released, and when it may be known who owns one.
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        cursor = group if mode == "clustering" else f"{group}.{member}"
        leases = Leases(session, topic, cursor)
        self._fetchers: Fetchers[T] = Fetchers(
            session,
            topic,
            decode=decode,
            follow=True,
            endless=True,
            cursor=cursor,
            on_expired=on_expired,
            on_damage=on_damage,
            keep=keep,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
            skipped=self._skipped,
        )
        self._membership = Membership(
            session,
            topic,
            group=group,
            mode=mode,
            member=member,
            session_s=session_s,
            wake=self._wake,
            changed=self._changed,
            on_new_route=self._look_at_once,
        )
        self._view = CursorView(session, topic, cursor=leases, membership=self._membership, start=start)
        self._held: HeldPartitions[T] = HeldPartitions(
            topic,
            cursor=leases,
            fetchers=self._fetchers,
            membership=self._membership,
            view=self._view,
            start=start,
            handover_s=handover_s,
            commit_ends=commit_ends,
            changed=self._changed,
        )
        self._ownership = Ownership(
            membership=self._membership, view=self._view, held=self._held, wake=self._wake
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._records: AsyncIterator[Record[T]] | None = None

    @property
    def partitions(self) -> frozenset[int]:
        """Partitions that this member reads now."""
        return frozenset(self._held.leases)

    async def __aenter__(self) -> Subscription[T]:
        places = await self._session.topic_map(self._topic)
        self._view.partitions, self._membership.route = frozenset(places.numbers), places.route.version
        self._membership.rename()
        await self._membership.renew(timeout_s=self._session.timeout_s)
        with contextlib.suppress(*NOT_NOW):
            await self._ownership.move()
        self._tasks = [
            self._session.loop.create_task(work)
            for work in (self._membership.keep_renewing(), self._ownership.keep_moving())
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.commit()
        finally:
            await self.close()

    def _check_entered(self) -> None:
        """Raise `ConfigError` if the block was not entered.

        Without the block no task would renew the membership, so no partition would ever be read.
        """
        if not self._tasks:
            raise ConfigError(
                f"the subscription to {self._topic} by group {self.group} is not open",
                code="not_open",
                hint="`with topic.subscribe(...) as records: for record in records: ...`, or `async with`",
            )

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        self._check_entered()
        # One iterator for all loops: after a ``break`` the next loop continues within the same batch.
        if self._records is None:
            self._records = self._iterate()
        return self._records

    async def _iterate(self) -> AsyncIterator[Record[T]]:
        try:
            while True:
                lease, batch = await self.take()
                next_offset, last = batch.next_offset, batch.last_offset
                for record in batch.records():
                    if not self.may_hand_out(lease) and not await self.still_owned(lease):
                        break
                    offset = record.offset
                    lease.seen = next_offset if offset == last else offset + 1
                    yield record
        finally:
            self._records = None

    async def batches(self) -> AsyncIterator[ReadBatch[T]]:
        """Yield whole batches, without making an object for each record."""
        self._check_entered()
        while True:
            lease, batch = await self.take()
            if self.may_hand_out(lease) or await self.still_owned(lease):
                lease.seen = batch.next_offset
                yield batch

    async def commit(self) -> None:
        """Commit the cursor after the records handed out so far.

        Raises:
            Fenced: other members took partitions from this one before all records handed out were committed;
                they read these records again. It is raised once for each loss. The other partitions are
                committed, and reading continues.
        """
        due = [lease for lease in self._held.leases.values() if lease.seen > lease.committed]
        failures = await asyncio.gather(
            *(self._held.commit_seen(lease) for lease in due), return_exceptions=True
        )
        self._wake.set()
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure
        if self._held.lost:
            lost, self._held.lost = self._held.lost, []
            numbers = ", ".join(str(partition) for partition, _, _ in lost)
            raise Fenced(
                f"partitions {numbers} of {self._topic} were taken from this member of {self.group!r} before "
                f"{sum(seen - committed for _, committed, seen in lost)} records were committed",
                code="fenced",
                field="partitions",
                value=numbers,
                hint="another member reads these again; this one goes on with what it owns",
            )

    async def close(self) -> None:
        """Stop reading, and release the owned partitions at their last committed positions. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.remove_done_callback(self._ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetchers.close()
        await self._held.release_all()
        if tasks:
            await self._membership.leave(timeout_s=STEP_TIMEOUT_S)

    # -- what may be handed out ----------------------------------------------------------------

    async def take(self) -> tuple[Lease, ReadBatch[T]]:
        """Wait for the next batch with records; return it with the lease of its partition.

        The partition is not released before the batch is committed or the time for that is over.
        """
        self._held.waits_since_s = time.monotonic()
        try:
            while True:
                batch = await self._fetchers.take()
                assert batch is not None, "an endless reader ended"
                lease = self._held.leases[batch.partition]
                if batch.start_offset != lease.seen:
                    # The caller never processed the batch before this one: it was interrupted while it
                    # waited. Read it again.
                    lease.handed = lease.given = lease.seen
                    self._held.read_from(lease)
                elif batch:
                    lease.handed = lease.given = batch.next_offset
                    return lease, batch
                else:
                    lease.handed = lease.seen = batch.next_offset
        finally:
            self._held.waits_since_s = None

    def may_hand_out(self, lease: Lease) -> bool:
        """Return whether no other member can own the lease's partition at this moment."""
        if self.mode == "broadcast":
            return lease.valid
        membership = self._membership
        return lease.valid and lease.owner == membership.id and time.monotonic() < membership.valid_until_s

    async def still_owned(self, lease: Lease) -> bool:
        """Wait until it is certain who owns the lease's partition; return whether this member still does."""
        while lease.valid and not self.may_hand_out(lease):
            self._changed.clear()
            if self._fetchers.failure is not None:
                raise self._fetchers.failure
            await self._changed.wait()
        return lease.valid

    def _skipped(self, partition: int, offset: int, earliest: int) -> None:
        lease = self._held.leases.get(partition)
        if lease is not None and lease.handed == offset:
            if lease.seen == offset:
                lease.seen = earliest
                if lease.committed == offset:
                    self._wake.set()
            lease.handed = earliest

    # -- the two tasks -------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the reading if one of the two tasks ended with an error, which is permanent."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fetchers.fail(failure)
            self._changed.set()

    def _look_at_once(self) -> None:
        self._view.look_at_once()
