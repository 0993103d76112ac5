"""The append path of one partition: propose appends to the group, and resolve the futures of their receipts.

Records without a producer id go through the `AppendBatcher`. Batches with a producer's sequence number or an
idempotency key are proposed as they are. A receipt means that the records are committed, and on as many
replicas as the topic asks for. A `Problem` means that the records are refused or, with outcome ``unknown``,
that this replica cannot tell whether they will be committed. Every future is resolved, by the commit or the
truncation of its entry, also after this replica has lost leadership.

After a `seal` entry, which ends the partition, no entry that adds a record is proposed. An append that
arrives after the seal waits until the seal can no longer be lost (`PartitionContext.final_seal`), and is
refused then. If it were refused earlier and the seal were lost, its client would append the records to the
partitions that follow, while a late copy of the request could still be appended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from laminar.batch import NO_PRODUCER, Batch, Column, Header, Kind, has_column, kind_of
from laminar.batch.header import fields
from laminar.http.api.problems import Outcome, Problem
from laminar.http.api.records import Records
from laminar.http.api.timestamps import EARLIEST_MS, LATEST_MS
from laminar.log.disk.errors import StorageError
from laminar.node.partition.append_batcher import AppendBatcher
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.deduplication import find_duplicate
from laminar.node.partition.min_replicas import Copies
from laminar.node.partition.problems import (
    FROM_TABLES,
    entry_too_large,
    in_doubt,
    not_delayed,
    not_leader,
    not_open,
    seal_uncommitted,
    sealed,
    too_much_delayed,
    too_much_uncommitted,
    truncated,
    with_keepers,
)
from laminar.node.partition.receipts import Appends, Receipt, Waiter, Window, fail
from laminar.node.partition.state.delayed_records import Added, delayed_change, delayed_entry
from laminar.wire.delayed import NUMBERS
from raft.values import EntryTooLarge, NotLeader, TooMuchUncommitted

# More appends are refused while a partition has more bytes than this that are not committed yet.
UNCOMMITTED_BYTES = 64 * 1024 * 1024
# Most bytes of entries with delayed records that one partition holds.
DELAYED_BYTES = 16 << 30
_KIND_AND_COUNT = fields("kind", "count")
# The code version from which on all nodes know delayed records.
DELAYED_SINCE = 5


class AppendPath:
    """The appends of one partition's leader, from proposal to commit."""

    def __init__(
        self,
        context: PartitionContext,
        copies: Copies,
        *,
        refusal: Callable[[], Problem | None],
        consumer_refusal: Callable[[], Problem | None],
    ) -> None:
        """Create the append path of one replica.

        `refusal` returns the problem for which the storage takes no appends now (a full disk, for example),
        or None. `consumer_refusal` does so for the entries of consumers (cursors, acknowledgements). These
        are taken for longer while the disk fills, because they let retention delete records.
        """
        self.refusal = refusal
        self.consumer_refusal = consumer_refusal
        self.uncommitted_bytes = 0
        self.appended_batches = 0
        self.appended_records = 0
        self.appended_bytes = 0
        # Called when delayed records were appended.
        self.on_delayed: Callable[[], None] | None = None
        # By the index of the entry: the appends that wait for its commit, and its size.
        self.waiters: dict[int, list[Waiter]] = {}
        self._sizes: dict[int, int] = {}
        # Appends that came after a `seal` and so were not proposed: the future, and since when it waits
        # (the loop's time).
        self._after_seal: list[tuple[asyncio.Future[Receipt], float]] = []
        self._context = context
        self._copies = copies
        self._batcher = AppendBatcher(self._propose_batch, before_turn_end=context.driver.before_turn_end)
        self._loop = asyncio.get_running_loop()

    # -- commands --------------------------------------------------------------------------

    def append_records(self, records: Records) -> asyncio.Future[Receipt]:
        """Append records without a producer id, batched with other appends of this loop turn.

        Call it only in a loop turn in which `PartitionContext.leads` was found True. The room on the disk and
        the number of replicas in sync are checked later, once for the whole batch.
        """
        if not self._context.state.succession.takes_records and (closed := self.closed()) is not None:
            return closed
        if records.delivery_times is not None:
            frame = records.build()
            return self.append_frame(frame, Header.unpack(frame))
        self._check_uncommitted()
        future = self._batcher.add(records)
        if self._context.trace is not None:
            self._context.trace.waits(future)
        return future

    def append_frame(
        self, frame: bytearray | memoryview, header: Header, *, key_made_ms: int | None = None
    ) -> asyncio.Future[Receipt]:
        """Append a verified batch that has no offset, term and append time yet (is unstamped).

        If the batch was appended before, its first receipt is returned and nothing is appended.
        `key_made_ms` is the time at which the client says that it created the idempotency key.

        Raises:
            Problem: 503 `not_leader` or `changing`, the problems of `find_duplicate` and of `check_room`, or
                422 `invalid` for wrong delivery times. In these cases nothing was proposed.
        """
        self._context.check_leads()
        if not self._context.state.succession.takes_records:
            self._check_open()
        # Recognise a retry before any check of room: it needs none, and a refusal would say "not applied" of
        # records that are in the log.
        known = find_duplicate(self._context, header, key_made_ms=key_made_ms)
        if known is not None:
            if known[1].delayed is not None:
                given = [time or 0 for time in Batch(frame, verified=True).delivery_times or ()]
                return self._loop.create_task(self.delayed_before(*known, given))
            return self.when_committed(*known)
        if has_column(frame, Column.DELIVERY_TIME):
            times = self._times_ahead(frame)
            if times is not None:
                return self._append_delayed(frame, header, times)
        return self._append(frame, header.count)

    async def delayed_before(self, index: int, receipt: Receipt, given: Sequence[int]) -> Receipt:
        """Return the receipt of delayed records that an earlier request appended as entry `index`.

        Waits until the entry is committed. The ids of delayed records contain their delivery times, which are
        read from the entry. `given` are the times of the present request, used only if the entry cannot be
        read; they may differ, because a delay counts from the arrival of its request.

        Raises:
            Problem: if the entry is truncated, or not committed in time.
        """
        receipt = await self.when_committed(index, receipt)
        receipt.due_ms = given
        try:
            frames = await self._context.log.read_promptly(index, index, max_bytes=1)
        except StorageError:
            # Usually the entry was trimmed, after its pending records were copied to a later entry.
            return receipt
        change = delayed_change(frames[0]) if frames and kind_of(frames[0]) == Kind.DELAYED else None
        if isinstance(change, Added) and change.first == receipt.delayed:
            times = Batch(change.frame, verified=True).delivery_times
            receipt.due_ms = [time or 0 for time in times or ()]
        return receipt

    def accept_frame(self, frame: bytearray | memoryview, header: Header) -> Receipt:
        """Append a producer's batch and return its receipt without waiting for the commit.

        The batch is only in this leader's log and is lost if the leader fails: the receipt promises nothing.

        Raises:
            Problem: as `append_frame`; 422 `invalid` if its records are delayed.
        """
        assert header.producer_id != NO_PRODUCER, "a repetition could not be recognised"
        self._context.check_leads()
        takes_records = self._context.state.succession.takes_records
        if not takes_records:
            self._check_open()
        known = find_duplicate(self._context, header)
        if known is not None:
            return known[1]
        if not takes_records:
            self._check_unsealed()
            # Its receipt is returned at once or not at all: it cannot wait for the seal as others do.
            raise seal_uncommitted(self._context.name)
        if has_column(frame, Column.DELIVERY_TIME) and self._times_ahead(frame) is not None:
            raise not_delayed(
                self._context.name, "ack", "delayed records are acknowledged when committed", value="accepted"
            )
        self._check_and_flush()
        receipt = Receipt(self._context.number, self._context.log.next_offset, header.count)
        self.propose(frame, [], copied=True)
        return receipt

    async def confirmed(self, refusal: Problem) -> Problem:
        """Return the problem to answer with: `refusal` once it is certain to be right, else `not_leader`.

        A refusal that was derived from the tables of this replica (`FROM_TABLES`) is wrong if another replica
        leads. It is right if a majority confirms that this replica leads, and then every entry of its log is
        committed: no entry was missing from the tables, and none can be rolled back. Other refusals are
        returned as they are.
        """
        context = self._context
        if refusal.code in FROM_TABLES:
            last = context.log.last_index
            try:
                await context.driver.confirm(context.replica)
                await self.when_committed(last, Receipt(context.number, 0, 0), copied=False)
            except (ConnectionError, Problem):
                return not_leader(context.name, outcome="not_applied")
        return refusal

    def refused(self, refusal: Problem) -> asyncio.Future[Receipt]:
        """Return a future that fails with the problem that `confirmed` returns for this refusal."""

        async def refuse() -> Receipt:
            raise await self.confirmed(refusal)

        return self._loop.create_task(refuse())

    def append_control(
        self, frame: bytearray | memoryview, *, count: int = 0, even_if_full: bool = False
    ) -> asyncio.Future[Receipt]:
        """Append an unstamped entry of a kind other than `DATA`, which takes `count` offsets.

        Use `even_if_full` for entries that finish or delete something: they are taken on a full disk, too.

        Raises:
            Problem: 503 `not_leader`, and the refusals of `check_room`. Then nothing was proposed.
        """
        self._context.check_leads()
        return self._append(frame, count, even_if_full=even_if_full)

    def closed(self) -> asyncio.Future[Receipt] | None:
        """Return None if this partition takes records; otherwise raise or return a failure. Leader only.

        While the partition's seal may still be lost, the failure is a future. It fails with `sealed` once the
        seal is final, or with `not_leader` if another leader may have truncated the seal.

        Raises:
            Problem: 409 `sealed` if the seal is final; 503 `changing` if the partition is not opened yet, or
                while this leader asks the catalog whether its log has lost a seal.
        """
        if self._context.state.succession.takes_records:
            return None
        self._check_open()
        self._check_unsealed()
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._after_seal.append((future, self._loop.time()))
        return future

    async def until_sealed(self) -> None:
        """Wait until the seal of this partition is final. Leader only.

        Raises:
            Problem: 503 `not_leader` if the seal may have been lost; 503 `changing` if it is not final in
                time.
        """
        try:
            closed = self.closed()
            assert closed is not None, f"{self._context.name} is not sealed"
            await closed
        except Problem as problem:
            if problem.code != "sealed":
                raise

    def _check_open(self) -> None:
        """Raise 503 `changing` if this partition is not opened yet, or if its log may have lost a seal."""
        succession = self._context.state.succession
        if succession.status == "waiting":
            raise not_open(self._context.name)
        if succession.status == "open" and succession.in_doubt:
            raise in_doubt(self._context.name)

    def _check_unsealed(self) -> None:
        """Raise 409 `sealed` if the partition's seal is final."""
        seal = self._context.final_seal
        if seal is not None:
            raise sealed(self._context.name, seal.record.version)

    def would_start_at(self, offset: int) -> bool:
        """Return whether a record appended now would get this offset; False while appends are queued."""
        return not self._batcher and self._context.log.next_offset == offset

    def when_committed(self, index: int, receipt: Receipt, *, copied: bool = True) -> asyncio.Future[Receipt]:
        """Return a future that is resolved with `receipt` once entry `index` is committed and copied.

        Copied: on as many replicas as the topic's `min_replicas`. With `copied=False` only the commit is
        awaited. The future fails with the same problems as the append of that entry.
        """
        context = self._context
        future: asyncio.Future[Receipt] = self._loop.create_future()
        now_s = self._loop.time()
        if index <= context.committed_index:
            waiter = Waiter(future, receipt, 0, now_s)
            if not copied or self._copies.are_there(index):
                waiter.acknowledge(self._copies.window())
            else:
                self._copies.await_them(index, waiter)
            return future
        term = context.log.term(index)
        assert term is not None, f"{context.name}: entry {index} has no term"
        self.waiters.setdefault(index, []).append(Waiter(future, receipt, term, now_s, copied=copied))
        return future

    # -- changes of the log and of the leader ------------------------------------------------

    def truncated(self, index: int) -> None:
        """Fail the appends whose entries are truncated, from `index` on."""
        outcome = self._outcome_of_truncated
        for lost in [waiting for waiting in self.waiters if waiting >= index]:
            for waiter in self.waiters.pop(lost):
                fail(waiter.future, truncated(self._context.name, outcome))
            self.uncommitted_bytes -= self._sizes.pop(lost, 0)
        self._batcher.truncated(index)

    @property
    def _outcome_of_truncated(self) -> Outcome:
        """Outcome to report for an entry that this replica proposed as leader and later truncated.

        The new leader lacks the entry, as does the majority that elected it, and none of these voters takes
        entries of an older term afterwards. With three voters only the deposed leader is left, which has
        truncated the entry: the entry is gone. With five voters, a follower outside that majority may still
        have the entry, and lead later.
        """
        return "not_applied" if self._context.voters <= 3 else "unknown"

    def committed(self, before: int, index: int) -> None:
        """Resolve the appends of the entries after `before` up to `index`, which are committed now."""
        if self._after_seal:
            self.seal_is_final()
        if not self.waiters:
            return
        log = self._context.log
        acknowledged = self._copies.acknowledged_index
        window: Window | None = None
        now_s = self._loop.time()
        commit_times = self._context.driver.commit_times
        for done in range(before + 1, index + 1):
            waiters = self.waiters.pop(done, None)
            if waiters is None:
                continue
            self.uncommitted_bytes -= self._sizes.pop(done, 0)
            if not waiters:
                continue
            if window is None and done <= acknowledged:
                window = self._copies.window_up_to(acknowledged)
            term = log.term(done)
            commit_times.observe(now_s - waiters[0].since_s)
            for waiter in waiters:
                if waiter.term != term:
                    fail(waiter.future, truncated(self._context.name, self._outcome_of_truncated))
                elif not waiter.copied:
                    waiter.acknowledge(None)
                elif done <= acknowledged:
                    waiter.acknowledge(window)
                elif not waiter.future.done():
                    self._copies.await_them(done, waiter)
        self._batcher.committed(index)

    def seal_is_final(self) -> None:
        """If the seal is final now, fail the appends that waited to learn that (see `closed`)."""
        seal = self._context.final_seal
        if seal is not None:
            self._refuse_after_seal(sealed(self._context.name, seal.record.version))

    def lost_leadership(self) -> None:
        """Refuse appends that are not proposed yet; proposed ones wait for their commit or truncation."""
        self._copies.lost_leadership()
        # If the next leader has the seal, it refuses these appends; otherwise it takes them.
        self._refuse_after_seal(not_leader(self._context.name, outcome="not_applied"))
        self._batcher.reject_all(not_leader(self._context.name, outcome="not_applied"))

    def failed(self, error: Exception) -> None:
        """Fail all appends because the log failed: `outcome_unknown` if proposed, else `not_leader`."""
        self.lost_leadership()
        for waiters in self.waiters.values():
            for waiter in waiters:
                fail(waiter.future, Problem("outcome_unknown", f"this replica has stopped: {error}"))
        self.waiters.clear()

    @property
    def waits(self) -> bool:
        """Whether any append waits here for its commit, copies or a seal, so that `expire` must be called."""
        return bool(self.waiters or self._after_seal or self._copies.waits)

    def expire(self, *, older_than_s: float) -> None:
        """Fail appends that have waited longer than this for their commit, copies, or a seal's commit.

        Proposed ones fail with `outcome_unknown`, those that came after the seal with `changing`.
        """
        latest = self._loop.time() - older_than_s
        self._copies.expire(latest_s=latest)
        if self._after_seal:
            for future, since_s in self._after_seal:
                if since_s <= latest:
                    fail(future, seal_uncommitted(self._context.name))
            self._after_seal = [waiting for waiting in self._after_seal if not waiting[0].done()]
        if not self.waiters:
            return
        for waiters in list(self.waiters.values()):
            for waiter in waiters:
                if waiter.since_s <= latest:
                    detail = f"not committed within {older_than_s:g} s: a majority does not answer"
                    fail(waiter.future, Problem("outcome_unknown", detail))

    def residue(self) -> tuple[object, ...]:
        """Return all state that an append could leave behind here, for tests that compare it."""
        return (
            *(dict(self.waiters), dict(self._sizes), self.uncommitted_bytes),
            *(tuple(self._after_seal), self._batcher.residue()),
        )

    def _refuse_after_seal(self, problem: Problem) -> None:
        """Fail the appends that wait for the fate of a seal; none of them was proposed."""
        waiting, self._after_seal = self._after_seal, []
        for future, _ in waiting:
            fail(future, problem)

    # -- proposing -------------------------------------------------------------------------

    def check_room(self, *, of_consumers: bool = False) -> None:
        """Raise `Problem` while the storage, or this partition, takes no further appends.

        With `of_consumers` check for an entry that records the progress of consumers: part of the disk is
        reserved for these, so they are taken for longer.
        """
        refusal = self.no_room(of_consumers=of_consumers)
        if refusal is not None:
            raise refusal
        self._check_uncommitted()

    def _check_uncommitted(self) -> None:
        """Raise 503 `overloaded` while too many bytes of this partition wait to be committed."""
        used = self.uncommitted_bytes + self._batcher.size_bytes
        if used > UNCOMMITTED_BYTES:
            raise too_much_uncommitted(self._context.name, used, UNCOMMITTED_BYTES)

    def no_room(self, *, of_consumers: bool = False) -> Problem | None:
        """Return the problem for which the storage takes no appends now; None if it takes them.

        For a full disk the problem names the channels that keep this log. `of_consumers` as in `check_room`.
        """
        refusal = self.consumer_refusal() if of_consumers else self.refusal()
        return refusal and with_keepers(refusal, self._context.name, self._context.kept_log)

    def _check_and_flush(self, *, even_if_full: bool = False) -> None:
        """Prepare to propose an entry directly: check room and copies, then propose the batcher's appends.

        With `even_if_full` room and copies are not checked. Raises `Problem` if a check fails.
        """
        if not even_if_full:
            self._check_takes()
        self.flush()

    def _check_takes(self) -> None:
        """Raise `Problem` while the storage has no room, or fewer than `min_replicas` voters are in sync."""
        self.check_room()
        if self._copies.wanted > 1:
            self._copies.check()

    def flush(self) -> None:
        """Propose the appends that wait in the batcher.

        Raises 503 `not_leader` if the proposal showed that this replica has lost leadership.
        """
        if self._batcher:
            # The batcher's appends came first, and one of them may have been accepted only for the offset
            # that it gets now (`would_start_at`).
            self._batcher.flush()
            self._context.check_leads()

    def _append(
        self, frame: bytearray | memoryview, count: int, *, even_if_full: bool = False
    ) -> asyncio.Future[Receipt]:
        succession = self._context.state.succession
        if not succession.takes_records and not succession.takes(frame):
            closed = self.closed()
            assert closed is not None, f"{self._context.name} is open and takes no entry {frame[:8]!r}"
            return closed
        self._check_and_flush(even_if_full=even_if_full)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self.propose(frame, [(future, count)], copied=True)
        return future

    def _times_ahead(self, frame: bytearray | memoryview) -> list[int] | None:
        """Return the delivery times (ms) of a batch's records; None if none of them lies in the future.

        A batch is delayed as a whole: a record without a time would be delayed by its neighbours.

        Raises:
            Problem: 422 `invalid` if only some records have a time, or a time is outside the years 1 to 9999,
                which the id of a delayed record cannot hold; 503 `not_enabled` until all nodes run a version
                that supports delayed records.
        """
        context = self._context
        times = Batch(frame, verified=True).delivery_times
        if times is None:
            return None
        known = [time for time in times if time is not None]
        if max(known, default=0) <= context.replica.wall_ms():
            return None
        if len(known) < len(times):
            field = f"records[{times.index(None)}].deliver_at"
            raise not_delayed(context.name, field, "all records of a batch are delayed, or none is")
        for row, time in enumerate(known):
            if not EARLIEST_MS <= time <= LATEST_MS:
                field = f"records[{row}].deliver_at"
                raise not_delayed(context.name, field, "a time is in the years 1 to 9999", value=time)
        context.check_knows(DELAYED_SINCE, "delayed records")
        return known

    def _append_delayed(
        self, frame: bytearray | memoryview, header: Header, times: Sequence[int]
    ) -> asyncio.Future[Receipt]:
        """Append a batch of records to be delivered at these times (ms). Raises as `append_frame`."""
        context = self._context
        if not context.state.succession.takes_records:
            closed = self.closed()
            assert closed is not None, f"{context.name} is open and takes no delayed records"
            return closed
        self._check_and_flush()
        held = context.state.delayed
        if held.size_bytes + len(frame) > DELAYED_BYTES:
            raise too_much_delayed(context.name, "delayed_bytes", held.size_bytes + len(frame), DELAYED_BYTES)
        first = context.number * NUMBERS + held.next_count
        change = Added(first, header.count, min(times), max(times), bytes(frame))
        entry = delayed_entry(change, producer=header)
        receipt = Receipt(context.number, 0, header.count, delayed=first, due_ms=times)
        future = self.when_committed(self.propose(entry, []), receipt)
        if self.on_delayed is not None:
            self.on_delayed()
        return future

    def propose(
        self,
        frame: bytearray | memoryview,
        appends: Appends,
        *,
        copied: bool = False,
        opens_segment: bool = False,
        not_before_ms: int = 0,
    ) -> int:
        """Propose an entry and return its index; the futures in `appends` resolve when it is committed.

        With `copied` they resolve only when `min_replicas` replicas have the entry, too. With `opens_segment`
        the entry is the first of a new segment. The append time of the entry is `not_before_ms` or later.

        Raises:
            Problem: 503 `not_leader`; 413 `too_large` for the entry; 503 `overloaded` if too many bytes are
                not committed yet. In each case nothing was proposed.
        """
        context = self._context
        # Callers have checked that a seal allows this entry: a record after it would be lost or duplicated.
        succession = context.state.succession
        assert succession.takes_records or succession.takes(frame), f"{context.name} is {succession.status}"
        trace = context.trace
        if trace is not None:
            trace.begin(appends)
        try:
            index, term, offset = context.driver.propose(
                context.replica, frame, opens_segment=opens_segment, not_before_ms=not_before_ms
            )
        except TooMuchUncommitted as error:
            raise too_much_uncommitted(context.name, error.uncommitted_bytes, error.limit_bytes) from None
        except EntryTooLarge as error:
            raise entry_too_large(context.name, error.entry_bytes, error.limit_bytes) from None
        except NotLeader:  # or it is handing leadership over
            raise not_leader(context.name, outcome="not_applied") from None
        finally:
            if trace is not None:
                trace.end()
        kind, records = _KIND_AND_COUNT.unpack_from(frame)
        self.appended_batches += 1
        self.appended_bytes += len(frame)
        if kind != Kind.SKIP:
            self.appended_records += records
        # A commit needs a sync, and so comes in a later pass of the loop, also with one voter.
        assert index > context.state.committed_index, f"{context.name}: entry {index} is committed already"
        waiters = []
        now_s = self._loop.time()
        for future, count in appends:
            waiters.append(Waiter(future, Receipt(context.number, offset, count), term, now_s, copied=copied))
            offset += count
        self.waiters[index] = waiters
        self._sizes[index] = len(frame)
        self.uncommitted_bytes += len(frame)
        if context.replica.failure is not None:  # Writing this entry failed: it is not known how far it got.
            self.failed(context.replica.failure)
        return index

    def _propose_batch(self, frame: bytearray, appends: Appends) -> int:
        self._check_takes()
        return self.propose(frame, appends, copied=True)
