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
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import msgspec

from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, Fetchers, OnDamage, OnExpired
from laminar.client.consume.partition_leases import (
    LEASE_ATTEMPT_S,
    STEP_TIMEOUT_S,
    Lease,
    Leases,
    is_gone,
)
from laminar.client.consume.row_filter import RowFilter
from laminar.client.errors import (
    ConfigError,
    Error,
    Fenced,
    NotDrained,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
)
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.assignment import REWIND, Members, Place, Places, moves, wanted
from laminar.client.records import ReadBatch, Record

T = TypeVar("T")

Mode = Literal["clustering", "broadcast"]

SESSION_S = 6.0
HANDOVER_S = 30.0
RENEW_S = 1.0
RETRY_S = 0.1
# How often a member that waits for a partition checks whether another has released it.
HANDOVER_CHECK_S = 0.2
# How long a member waits before it looks again whether it may read what follows partitions that others read,
# and tries a claim again that was refused: at first, and at most.
GATE_PAUSE_S = 0.1
LONGEST_GATE_PAUSE_S = 2.0
_NOT_NOW = (Unavailable, OutcomeUnknown)


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
        self._start = start
        self._session_s = session_s
        self._handover_s = handover_s
        self._commit_ends = commit_ends
        cursor = group if mode == "clustering" else f"{group}.{member}"
        self._cursor = Leases(session, topic, cursor)
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
        self._leases: dict[int, Lease] = {}
        # Partitions that were lost with records that were handed out and not committed, until `commit`
        # reports them: (partition, committed position, seen position).
        self._lost: list[tuple[int, int, int]] = []
        self._id = ""
        # Earlier names of this member. A name is removed from the group once no lease is held under it.
        self._former: set[str] = set()
        # When the loop's body began to wait for its next record, in seconds of the monotonic clock; else
        # None.
        self._waits_since_s: float | None = None
        self._partitions: frozenset[int] = frozenset()
        # The version of the topic's route, as the group's leader said last, and what is known of the cursor.
        self._route = 0
        self._known = Places()
        self._gate_pause_s = GATE_PAUSE_S
        self._members = Members(live=frozenset())
        self._valid_until_s = 0.0
        # When (the monotonic clock) the cursor is looked at in any case; until when not for what was refused.
        self._looks_at_s = 0.0
        self._try_at_s = 0.0
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._records: AsyncIterator[Record[T]] | None = None

    @property
    def partitions(self) -> frozenset[int]:
        """Partitions that this member reads now."""
        return frozenset(self._leases)

    async def __aenter__(self) -> Subscription[T]:
        places = await self._session.topic_map(self._topic)
        self._partitions, self._route = frozenset(places.numbers), places.route.version
        self._rename()
        await self._renew(timeout_s=self._session.timeout_s)
        with contextlib.suppress(*_NOT_NOW):
            await self._move()
        self._tasks = [
            self._session.loop.create_task(work) for work in (self._keep_renewing(), self._keep_moving())
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
        due = [lease for lease in self._leases.values() if lease.seen > lease.committed]
        failures = await asyncio.gather(*(self._commit(lease) for lease in due), return_exceptions=True)
        self._wake.set()
        for failure in failures:
            if isinstance(failure, BaseException):
                raise failure
        if self._lost:
            lost, self._lost = self._lost, []
            numbers = ", ".join(str(partition) for partition, _, _ in lost)
            raise Fenced(
                f"partitions {numbers} of {self._topic} were taken from this member of {self.group!r} before "
                f"{sum(seen - committed for _, committed, seen in lost)} records were committed",
                code="fenced",
                field="partitions",
                value=numbers,
                hint="another member reads these again; this one goes on with what it owns",
            )

    async def _commit(self, lease: Lease) -> None:
        try:
            await self._cursor.move(lease, lease.seen)
        except (Fenced, PreconditionFailed) as error:
            self._lose(lease, error)

    async def close(self) -> None:
        """Stop reading, and release the owned partitions at their last committed positions. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.remove_done_callback(self._ended)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetchers.close()
        leases, self._leases = list(self._leases.values()), {}
        handed = (self._cursor.hand(lease, "", timeout_s=STEP_TIMEOUT_S) for lease in leases)
        await asyncio.gather(*handed, return_exceptions=True)
        if tasks:
            # If the request fails, the group notices that this member is gone when its session expires.
            with contextlib.suppress(Error):
                await self._session.call("DELETE", self._member_path(), timeout_s=STEP_TIMEOUT_S)

    # -- what may be handed out ----------------------------------------------------------------

    async def take(self) -> tuple[Lease, ReadBatch[T]]:
        """Wait for the next batch with records; return it with the lease of its partition.

        The partition is not released before the batch is committed or the time for that is over.
        """
        self._waits_since_s = time.monotonic()
        try:
            while True:
                batch = await self._fetchers.take()
                assert batch is not None, "an endless reader ended"
                lease = self._leases[batch.partition]
                if batch.start_offset != lease.seen:
                    # The caller never processed the batch before this one: it was interrupted while it
                    # waited. Read it again.
                    lease.handed = lease.given = lease.seen
                    self._read_from(lease)
                elif batch:
                    lease.handed = lease.given = batch.next_offset
                    return lease, batch
                else:
                    lease.handed = lease.seen = batch.next_offset
        finally:
            self._waits_since_s = None

    def may_hand_out(self, lease: Lease) -> bool:
        """Return whether no other member can own the lease's partition at this moment."""
        if self.mode == "broadcast":
            return lease.valid
        return lease.valid and lease.owner == self._id and time.monotonic() < self._valid_until_s

    async def still_owned(self, lease: Lease) -> bool:
        """Wait until it is certain who owns the lease's partition; return whether this member still does."""
        while lease.valid and not self.may_hand_out(lease):
            self._changed.clear()
            if self._fetchers.failure is not None:
                raise self._fetchers.failure
            await self._changed.wait()
        return lease.valid

    def _skipped(self, partition: int, offset: int, earliest: int) -> None:
        lease = self._leases.get(partition)
        if lease is not None and lease.handed == offset:
            if lease.seen == offset:
                lease.seen = earliest
                if lease.committed == offset:
                    self._wake.set()
            lease.handed = earliest

    # -- membership ----------------------------------------------------------------------------

    def _rename(self) -> None:
        self._id = f"{self.member}.{secrets.token_hex(8)}" if self.member else secrets.token_hex(8)

    def _member_path(self, member: str = "") -> str:
        group, member = quote(self.group, safe=""), quote(member or self._id, safe="")
        return f"{topic_path(self._topic)}/groups/{group}/members/{member}"

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            # Without an answer for half a session, ask again at once: when the whole session has passed,
            # others may count this member as dead. It must then take a new name, and under a new name other
            # partitions are assigned to it.
            while True:
                try:
                    await self._renew(timeout_s=self._session_s / 2)
                    break
                except _NOT_NOW:
                    await asyncio.sleep(RETRY_S)

    async def _renew(self, *, timeout_s: float) -> None:
        if 0 < self._valid_until_s <= time.monotonic() and self.mode == "clustering":
            # Others may count this member as dead, and be about to claim what it owns. Their claims name the
            # old name as expected owner, so they fail for what this member has claimed again under a new one.
            self._former.add(self._id)
            self._rename()
            self._valid_until_s = 0.0
        asked_s = time.monotonic()
        try:
            document = await self._ask_to_renew(timeout_s)
        except Error as error:
            if error.code != "stale_route" or self._route:
                raise
            self._route = 1  # the answer has the version
            document = await self._ask_to_renew(timeout_s)
        live = frozenset(str(each["member"]) for each in document["members"])
        members = Members(live=live, forming=bool(document["forming"]))
        # Counted from before the request was sent, so the session ends here before it ends at the leader.
        self._valid_until_s = asked_s + self._session_s
        route = int(document.get("route", 0))
        if members != self._members or route > self._route:
            self._members = members
            self._wake.set()
        if route > self._route:
            self._route, self._looks_at_s = route, 0.0
            places = self._session.topic_map_nowait(self._topic)
            if places is not None and places.route.version < route:
                places.stale = True
        self._changed.set()

    async def _ask_to_renew(self, timeout_s: float) -> dict[str, Any]:
        body: dict[str, object] = {"mode": self.mode, "session_ms": int(self._session_s * 1000)}
        if self._route:
            body["routes"] = True  # a node of an older program, which has no such topic, would refuse it
        answer = await self._session.call(
            "PUT",
            self._member_path(),
            body=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout_s,
            attempt_timeout_s=max(LEASE_ATTEMPT_S, self._session_s / 4),
        )
        document: dict[str, Any] = answer.json()
        return document

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the reading if one of the two tasks ended with an error, which is permanent."""
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fetchers.fail(failure)
            self._changed.set()

    # -- ownership of partitions ---------------------------------------------------------------

    async def _keep_moving(self) -> None:
        while True:
            waits = False
            self._wake.clear()
            with contextlib.suppress(*_NOT_NOW):
                waits = await self._move()
            pause_s = HANDOVER_CHECK_S if waits else min(RENEW_S, self._looks_at_s - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, GATE_PAUSE_S)):
                    await self._wake.wait()

    async def _move(self) -> bool:
        """Claim and release partitions as far as possible now; return whether more is to be done soon."""
        if time.monotonic() >= self._valid_until_s:
            return False
        me = self._id
        if self.mode == "clustering":
            await asyncio.gather(*(self._own_again(lease) for lease in list(self._leases.values())))
            await self._leave_as_former()
        looked = await self._is_due(me)
        if looked:
            await self._look(me)
            self._compare(me)
        await asyncio.gather(*(self._pass(lease) for lease in list(self._leases.values())))
        known, wants = self._known, self._wanted(me, self._known.readable(self._partitions))
        if self.mode == "broadcast":
            claims = {each: known.place(each).owner for each in wants - self._leases.keys()}
            waits = False
            self._leave(frozenset(each for each in self._leases if known.is_drained(each)))
        else:
            # Partitions that this member owns without knowing it, by a claim whose answer was lost. No other
            # member can release them.
            strays = {each for each, place in known.places.items() if place.owner == me}
            strays -= self._leases.keys()
            plan = moves(
                me, held=self._leases, wants=wants | strays, places=known.places, members=self._members
            )
            claims, waits = dict(plan.claim) if looked else {}, plan.waits
            self._leave(plan.release)
        for lease in self._leases.values():
            self._note_end(lease)
        await asyncio.gather(*(self._commit_end(lease) for lease in list(self._leases.values())))
        steps = [self._claim(each, known.place(each), owner, me) for each, owner in claims.items()]
        steps += [
            self._give_back(lease) for lease in list(self._leases.values()) if lease.leaving_s is not None
        ]
        await asyncio.gather(*steps)
        refused = bool(claims.keys() - self._leases.keys())
        self._plan_next_look(me, refused=refused)
        leaving = any(lease.leaving_s for lease in self._leases.values())
        return waits or leaving or (len(claims) > 0 and not (refused and self._route))

    # -- what is known of the cursor -------------------------------------------------------------

    def _wanted(self, me: str, partitions: frozenset[int]) -> frozenset[int]:
        """Return those of these partitions that are assigned to this member."""
        if self.mode == "broadcast":
            return partitions
        return wanted(me, self._topic, partitions, self._members)

    async def _is_due(self, me: str) -> bool:
        """Return whether to read the cursor from the cluster now; update the list of partitions before."""
        places = self._session.topic_map_nowait(self._topic)
        if places is None or places.stale:
            places = await self._session.topic_map(self._topic, timeout_s=STEP_TIMEOUT_S)
        self._partitions = self._known.numbers or frozenset(places.numbers)
        now_s = time.monotonic()
        if self.mode == "broadcast" or now_s >= self._looks_at_s:
            return True
        if now_s < self._try_at_s:
            return False
        if any(lease.committed >= lease.end for lease in self._leases.values() if lease.end is not None):
            return True  # what follows may be read now
        return bool(self._wanted(me, self._known.readable(self._partitions)) - self._leases.keys())

    async def _look(self, me: str) -> None:
        """Read the cursor from the cluster; give it a position in new partitions that have none."""
        known = await self._cursor.places()
        partitions = known.numbers or self._partitions
        absent = frozenset(each for each in partitions if known.place(each).position is None)
        if (self._route or known.ends) and self._wanted(me, absent):
            known = await self._cursor.begin(self._start, timeout_s=2 * STEP_TIMEOUT_S)
        if known != self._known:
            self._gate_pause_s = GATE_PAUSE_S
        self._known = known
        # A partition that is reclaimed is in no later description.
        self._partitions = known.numbers or self._partitions
        # A look asks the leader of each partition. Of hundreds it takes long: leave time for records.
        now_s, took_s = time.monotonic(), self._cursor.look_s
        self._looks_at_s = now_s + max(self._session_s, 4 * took_s)
        self._try_at_s = now_s + took_s

    def _plan_next_look(self, me: str, *, refused: bool) -> None:
        """Plan to read the cursor again soon, if an assigned partition may not be read yet."""
        known, now_s = self._known, time.monotonic()
        if not self._route:
            return
        undrained = frozenset(each for each in self._partitions if not known.is_drained(each))
        if not refused and not self._wanted(me, undrained) - known.readable(undrained):
            return
        next_s = now_s + max(self._gate_pause_s, self._cursor.look_s)
        if refused:
            self._try_at_s = next_s
        if self._looks_at_s > next_s:
            self._looks_at_s = next_s
            self._gate_pause_s = min(2 * self._gate_pause_s, LONGEST_GATE_PAUSE_S)

    def _compare(self, me: str) -> None:
        """Drop leases of partitions that have another owner by now. Call it right after `_look`."""
        for lease in list(self._leases.values()):
            place = self._known.place(lease.partition)
            if place.owner in (lease.owner, me):
                continue
            if self.mode == "broadcast" and (place.position is None or not _is_free(place)):
                self._lose(lease, None)
            else:
                self._drop(lease)

    def _note_end(self, lease: Lease) -> None:
        """Note the final end of a leased partition that has ended, and read up to there only."""
        end = self._known.ends.get(lease.partition)
        if end is not None and lease.end is None:
            lease.end = end
            if lease.leaving_s is None:
                self._read_from(lease)

    async def _commit_end(self, lease: Lease) -> None:
        """Commit a partition that has ended, if the program got all of it but does not commit.

        The partitions that replaced it can be read only after that. A program that commits after every 100
        records, say, would wait for them for ever: so commit once it has waited for a record for `session_s`.
        """
        since_s = self._waits_since_s
        if not self._commit_ends or lease.end is None or since_s is None:
            return
        if lease.seen < lease.end or lease.committed >= lease.end:
            return
        if time.monotonic() >= since_s + self._session_s:
            try:
                await self._cursor.move(lease, lease.seen, timeout_s=STEP_TIMEOUT_S)
            except (Fenced, PreconditionFailed) as error:
                self._lose(lease, error)
            except _NOT_NOW:
                return
            self._looks_at_s = 0.0

    def _read_from(self, lease: Lease) -> None:
        """Fetch the lease's partition again, from the first record on that was not handed out."""
        self._fetchers.drop(lease.partition)
        self._fetchers.add(lease.partition, lease.handed, lease.end)

    async def _pass(self, lease: Lease) -> None:
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
            self._lose(lease, error)
        except _NOT_NOW:
            return

    def _leave(self, release: frozenset[int]) -> None:
        """Stop reading the partitions in `release`; read those again that are not to be released any more."""
        for partition, lease in self._leases.items():
            if partition in release and lease.leaving_s is None:
                lease.leaving_s = time.monotonic()
                self._fetchers.drop(partition)
            elif partition not in release and lease.leaving_s is not None:
                lease.leaving_s = None
                self._read_from(lease)

    async def _claim(self, partition: int, place: Place, owner: str, me: str) -> None:
        wanted_from = Place(position=place.position, owner=owner)
        lease = await self._cursor.claim(partition, wanted_from, me=me, start=self._start)
        if lease is not None:
            lease.end = self._known.ends.get(partition)
            self._leases[partition] = lease
            self._read_from(lease)

    async def _give_back(self, lease: Lease) -> None:
        """Release a partition once all records handed out of it are committed, or the time for that is over.

        The time is `handover_s` from the beginning of the release. But while the loop's body waits for its
        next record, it is at most `session_s`: such a program will hardly commit its last record, and its
        partition should not be blocked for longer than that of a dead member.
        """
        assert lease.leaving_s is not None
        until_s = lease.leaving_s + self._handover_s
        if self._waits_since_s is not None:
            until_s = min(until_s, max(self._waits_since_s, lease.leaving_s) + self._session_s)
        if lease.committed < lease.handed and time.monotonic() < until_s:
            return
        try:
            await self._cursor.hand(lease, "", timeout_s=STEP_TIMEOUT_S)
        except (Fenced, PreconditionFailed) as error:
            self._lose(lease, error)
        except _NOT_NOW:
            return
        except NotFound as error:
            if not is_gone(error):
                raise
            self._drop(lease)
        else:
            self._drop(lease)

    async def _leave_as_former(self) -> None:
        """Remove this member's former names from the group, so that no partition is assigned to them."""
        for name in self._former - {lease.owner for lease in self._leases.values()}:
            self._former.discard(name)
            with contextlib.suppress(Error):  # then the name is removed when its session expires
                await self._session.call("DELETE", self._member_path(name), timeout_s=LEASE_ATTEMPT_S)

    async def _own_again(self, lease: Lease) -> None:
        """Transfer the lease to this member's present name, if it was claimed under an earlier one."""
        if lease.owner == self._id:
            return
        try:
            await self._cursor.hand(lease, self._id, timeout_s=STEP_TIMEOUT_S)
        except (Fenced, NotDrained, PreconditionFailed) as error:
            self._lose(lease, error)
        except _NOT_NOW:
            return
        except NotFound as error:
            if not is_gone(error):
                raise
            self._drop(lease)
        self._changed.set()

    def _drop(self, lease: Lease) -> None:
        """Drop a lease that was released, or that is not this member's any more."""
        if self._leases.get(lease.partition) is not lease:
            return
        lease.valid = False
        del self._leases[lease.partition]
        self._fetchers.drop(lease.partition)
        if lease.seen > lease.committed < lease.given:
            self._lost.append((lease.partition, lease.committed, lease.seen))
        self._changed.set()

    def _lose(self, lease: Lease, error: Error | None) -> None:
        """Drop a lease that another member took; `error` is its refusal, if any."""
        if self._leases.get(lease.partition) is not lease:
            return
        self._drop(lease)
        self._looks_at_s = 0.0
        rewound = isinstance(error, Fenced) and str(error.limit or "").startswith(REWIND)
        if self.mode == "broadcast" and not rewound:
            taken = Fenced(
                f"another client reads {self._topic} as member {self.member!r} of {self.group!r}",
                code="fenced",
                field="member",
                value=self.member,
            )
            taken.__cause__ = error
            self._fetchers.fail(taken)
            self._changed.set()


def _is_free(place: Place) -> bool:
    """Return whether no member owns the partition: it has no owner, or a rewind owns it."""
    return place.rewound or not place.owner
