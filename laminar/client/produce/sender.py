"""The sender of appends over HTTP: it sends each batch of an accumulator until it has a receipt.

Each producer has a `Sender`, and each topic has one for plain appends. It runs on the session's loop by
callbacks, without a task for each batch. The decisions are made in `policy.record_accumulator` and
`policy.retry`. The asynchronous producer uses it on the loop. The synchronous one uses it from other threads,
which only call `wake_from_thread` and `hurry`, and fill the accumulator under its lock.

Answers name the version of the topic's route (which partition takes which keys). If it is newer than the
accumulator's, or a partition has ended, the sender requests the route, and the accumulator adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from laminar.batch import BATCH_TYPE, BatchError, build
from laminar.client.errors import Error, OutcomeUnknown, TimedOut, Unavailable, from_problem, untrusted
from laminar.client.net.attempts import judged, now_ms, origin_of
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.lineage import Lineage
from laminar.client.policy.partition_queue import PartitionQueue, Pending, padded
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.policy.retry import OUT_OF_SEQUENCE, Backoff, Step, Verdict, judge_loss
from laminar.client.produce.append_answers import read_accepted, read_appended
from laminar.client.produce.durability_probes import DurabilityProbes
from laminar.client.produce.leader_watchdog import LeaderWatchdog
from laminar.client.produce.named_producer import begin_in, lineage_of
from laminar.http.api.deadlines import CLIENT_ATTEMPT_S
from laminar.http.protocol.answer import Answer, ConnectionFailed, TlsFailed
from laminar.wire.key_route import Route

# In requests: the version of the route by which the partition was chosen.
ROUTE = "Laminar-Route"
# How often a route that an answer named is asked for, while nothing waits for it.
MOST_QUESTIONS = 20


class Sender:
    """A sender of the batches in `accumulator`; `guard` is its lock, if other threads add records.

    A sender with an `epoch` is that of a named producer: a leader answers as soon as a batch is in its log,
    before it is durable. Later answers say which batches are durable; `DurabilityProbes` asks if none comes.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        accumulator: RecordAccumulator,
        *,
        producer_id: bytes,
        timeout_s: float,
        guard: contextlib.AbstractContextManager[Any] | None = None,
        epoch: int | None = None,
    ) -> None:
        assert len(producer_id) == 16, f"a producer id has 16 bytes, not {len(producer_id)}"
        self.session = session
        self.topic = topic
        self.accumulator = accumulator
        self.closed = False
        self.on_progress: Callable[[], None] = _nothing
        self._producer_id = producer_id
        self._timeout_ms = int(timeout_s * 1000)
        self._timeout_s = timeout_s
        self._guard = guard if guard is not None else contextlib.nullcontext()
        self._loop = session.loop
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._urls: dict[int, str] = {}  # by partition, the URL that appends are sent to now
        self._heads: dict[tuple[int, str, bool], bytes] = {}
        self._heads_version = session.heads_version
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._backoffs: dict[int, Backoff] = {}
        self._redirects: dict[int, int] = {}
        self._last: dict[int, str] = {}
        self._epoch = epoch
        self._accepts = epoch is not None
        self._learning: asyncio.Task[None] | None = None
        self._missing: set[asyncio.Task[None]] = set()
        self._wanted_route = 0  # the newest version that an answer named
        self._probes = DurabilityProbes(
            session,
            topic,
            accumulator,
            producer_id=producer_id,
            guard=self._guard,
            leaders=self._urls,
            on_lost=self._hold,
            on_asked=self._asked,
        )
        self._watchdog = LeaderWatchdog(
            session, topic, accumulator, guard=self._guard, on_moved=self._urls.__setitem__
        )

    # -- waking --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule sending; on the loop's thread. It is cheap enough to be called for every record."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def wake_from_thread(self) -> None:
        """Schedule sending, from another thread. The loop is woken once for all records put meanwhile."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._pump)

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Within the block, ask leaders at once whether accepted batches are durable. From any thread."""
        with self._probes.hurried():
            self.wake_from_thread()
            yield

    def _pump(self) -> None:
        """Send all batches of the accumulator that may be sent now; nothing else takes batches from it."""
        # Cleared first, so that a record that is put while this runs schedules it again.
        self._woken = False
        if self.closed:
            return
        now = now_ms()
        with self._guard:
            for queue in list(self.accumulator.active.values()):
                self._pump_queue(queue, now)
                if self._accepts:
                    self._probes.look_after(queue, now)
            self._set_timer(now)

    def _pump_queue(self, queue: PartitionQueue, now: int) -> None:
        """Send the batches that are due in `queue`; if there is no connection to its leader, open one."""
        if queue.open is not None and queue.open.deadline_ms < 0:
            queue.open.deadline_ms = now + self._timeout_ms
        if queue.recovering or not queue.sends or queue.partition not in self._urls:
            self._expire(queue, now)
        if queue.partition in self._connecting or not queue.sends:
            return
        url = self._urls.get(queue.partition)
        connection = self.session.pool.shared_nowait(url) if url is not None else None
        if connection is None or url is None:
            if not queue.idle() and not (queue.recovering and now < queue.resume_ms):
                self._connecting[queue.partition] = self._loop.create_task(self._connect(queue))
            return
        while not connection.closed:
            pending = self.accumulator.take(queue, now_ms=now)
            if pending is None:
                return
            if pending.deadline_ms < 0:
                pending.deadline_ms = now + self._timeout_ms
            try:
                frame = self._frame(pending)
            except (BatchError, TypeError, ValueError) as fault:
                self.accumulator.failed(queue, pending, unbuildable(fault), maybe_applied=False)
                self.on_progress()
                return
            head = self._head(queue, url, len(frame), accepts=self._accepts and not pending.delayed)
            connection.request(
                head,
                (frame,),
                self._on_answer(queue, pending, url, token=self._heads_version[0]),
                timeout_s=min(CLIENT_ATTEMPT_S, max(0.001, (pending.deadline_ms - now) / 1000)),
            )
            self._watchdog.sent(queue.partition, connection)

    def _frame(self, pending: Pending) -> bytearray:
        count = len(pending.values)
        return build(
            pending.values,
            keys=pending.keys if pending.keyed else None,
            timestamps=padded(pending.timestamps, count),
            tags=padded(pending.tags, count),
            headers=padded(pending.headers, count),
            delivery_times=pending.delivery_times or None,
            trace_ids=padded(pending.trace_ids, count),
            producer_id=self._producer_id,
            producer_epoch=pending.epoch,
            sequence=pending.sequence,
            checkpoint=pending.last_number,
            floor=self.accumulator.checkpoint() if pending.last_number else 0,
        )

    def _head(self, queue: PartitionQueue, url: str, length: int, *, accepts: bool) -> bytes:
        # Everything but the length is the same for all batches of a queue that are answered at the same time:
        # delayed ones always when they are durable.
        version = self.session.heads_version
        if version != self._heads_version:
            self._heads.clear()
            self._heads_version = version
        known = self._heads.get((queue.partition, url, accepts))
        if known is None:
            target = f"{topic_path(self.topic)}/partitions/{queue.partition}/records"
            target += "?ack=accepted" if accepts else ""
            headers = {"Content-Type": BATCH_TYPE, ROUTE: str(self.accumulator.route.version)}
            known = self.session.head(url, "POST", target, headers)[:-2]
            self._heads[(queue.partition, url, accepts)] = known
        return b"%bContent-Length: %d\r\n\r\n" % (known, length)

    # -- finding the leader --------------------------------------------------------------------

    async def _connect(self, queue: PartitionQueue) -> None:
        """Open a connection to the queue's leader; if that fails, pause the queue for a while.

        A leader that closed its connection and accepts no new one is shutting down and has transferred its
        leadership, so other nodes are asked at once who leads now.
        """
        partition = queue.partition
        try:
            known = self._urls.get(partition)
            if known is not None:
                try:
                    await self.session.pool.shared(known)
                except ConnectionFailed as failure:
                    self._last[partition] = str(failure)
                    self.session.balancer.failed(known, now_ms=now_ms(), started=False)
                    self._leave(partition, known)
            if partition not in self._urls:
                self._urls[partition] = await self.session.leader_connection(self.topic, partition)
                self._compare_map()
        except TlsFailed as failure:
            self._urls.pop(partition, None)
            self._fail_waiting(queue, untrusted(failure))
        except ConnectionFailed as failure:
            self._urls.pop(partition, None)
            self._hold(queue, str(failure))
        except Error as error:
            self._urls.pop(partition, None)
            if isinstance(error, Unavailable):
                self._compare_map()
                self._hold(queue, str(error))
            else:
                self._fail_waiting(queue, error)
        finally:
            self._connecting.pop(partition, None)
        self.wake()

    def _hold(self, queue: PartitionQueue, why: str) -> None:
        self._last[queue.partition] = why
        self.session.retries += 1
        backoff = self._backoffs.setdefault(queue.partition, Backoff(rng=self.session.rng))
        with self._guard:
            queue.hold(until_ms=now_ms() + backoff.next_ms())

    def _asked(self) -> None:
        self.on_progress()
        self.wake()

    def _fail_waiting(self, queue: PartitionQueue, error: Error) -> None:
        """Fail all records of the queue, because the topic is gone or the client may not append to it."""
        with self._guard:
            for pending in queue.waiting():
                if not pending.settled and not pending.under_way:
                    self.accumulator.fail(queue, pending, error)
            if queue.open is not None and queue.open.settled:
                queue.open = None
        self.on_progress()

    # -- the route -----------------------------------------------------------------------------

    def _compare_map(self) -> None:
        """Adopt the route of the session's map of the topic, if it is newer."""
        places = self.session.topic_map_nowait(self.topic)
        if places is not None:
            self._want_route(places.route.version)

    def _want_route(self, version: int) -> None:
        """Request and adopt the route of this version or a newer one, unless that is done or under way."""
        self._wanted_route = max(self._wanted_route, version)
        if self._wanted_route > self.accumulator.route.version and self._learning is None and not self.closed:
            self._learning = self._loop.create_task(self._learn_route())

    async def _learn_route(self) -> None:
        """Request the topic's route until it is of the wanted version or newer; adopt each newer one.

        A node that is asked may not know it yet. Batches that wait for it have deadlines of their own.
        """
        backoff = Backoff(rng=self.session.rng)
        try:
            while self._wanted_route > self.accumulator.route.version and not self.closed:
                try:
                    lineage = await lineage_of(self.session, self.topic)
                    if lineage.route.version > self.accumulator.route.version:
                        await self._go_over(lineage)
                        continue
                    if backoff.attempts > MOST_QUESTIONS and not self.accumulator.active:
                        self._wanted_route = 0  # the next answer that names it begins again
                except Unavailable as error:
                    for partition in self.accumulator.active:
                        self._last[partition] = str(error)
                await asyncio.sleep(backoff.next_ms() / 1000)
                self.wake()  # so that records whose deadline has passed fail
        except Error as error:
            self._fail_all(error)
        finally:
            self._learning = None

    async def _go_over(self, lineage: Lineage) -> None:
        numbers, reached = self.accumulator.numbers, {}
        if numbers is not None and self._epoch is not None:
            reached = await begin_in(
                self.session,
                self.topic,
                lineage,
                known=numbers.partitions,
                ended=[number for number in self.accumulator.route.numbers if number not in lineage.route],
                producer_id=self._producer_id,
                epoch=self._epoch,
            )
        places = self.session.topic_map_nowait(self.topic)
        if places is not None and places.route.version < lineage.route.version:
            places.stale = True
        with self._guard:
            if numbers is not None:
                for partition, each in reached.items():
                    numbers.learn(partition, each)
            self.accumulator.adopt(lineage)
            self._heads.clear()
        self.on_progress()
        self.wake()

    async def _find_missing(self, queue: PartitionQueue, pending: Pending, error: Error) -> None:
        """Decide what becomes of a batch that was refused with `error`: the node knows no such partition.

        If the partition is in the topic's route, the node lags behind, and the batch is sent again. Else the
        partition has ended and was deleted since: the batch goes to its successors, or fails if an earlier
        attempt may have appended it.
        """
        route: Route | None = None
        again = False
        try:
            route = (await lineage_of(self.session, self.topic)).route
        except Error as failure:
            again = isinstance(failure, Unavailable)
            error = error if again else failure
        with self._guard:
            if again or (route is not None and queue.partition in route):
                until_ms = now_ms() + self._next_backoff_ms(queue.partition)
                self.accumulator.retry(queue, pending, until_ms=until_ms, maybe_applied=False)
            elif route is not None and self._is_newer(route, queue) and not pending.maybe_applied:
                self._sealed(queue, pending, route.version)
            else:
                self.accumulator.failed(queue, pending, error, maybe_applied=False)
        self.on_progress()
        self.wake()

    def _is_newer(self, route: Route, queue: PartitionQueue) -> bool:
        return queue.ended or route.version > self.accumulator.route.version

    def _fail_all(self, error: Error) -> None:
        with self._guard:
            for queue in list(self.accumulator.active.values()):
                for pending in queue.waiting():
                    if not pending.settled and not pending.under_way:
                        self.accumulator.fail(queue, pending, error)
        self.on_progress()

    def _sealed(self, queue: PartitionQueue, pending: Pending, version: int) -> None:
        """Note that the partition has ended without `pending`; the route of `version` replaces it."""
        self.accumulator.sealed(queue, pending)
        if queue.partition in self.accumulator.route:
            self._want_route(max(version, self.accumulator.route.version + 1))

    # -- answers -------------------------------------------------------------------------------

    def _on_answer(
        self, queue: PartitionQueue, pending: Pending, url: str, *, token: int
    ) -> Callable[[Answer | None, ConnectionFailed | None], None]:
        def on_answer(answer: Answer | None, failure: ConnectionFailed | None) -> None:
            with self._guard:
                if answer is None:
                    assert failure is not None
                    self._lost(queue, pending, url, failure)
                elif answer.status == 202:
                    self._accepted(queue, pending, answer)
                elif 200 <= answer.status < 300:
                    self._acknowledged(queue, pending, answer)
                else:
                    self._refused(queue, pending, url, answer, token=token)
            if answer is not None:
                self._want_route(self.session.learn_route(self.topic, answer))
            self.on_progress()
            if not self._woken:
                self.wake()

        return on_answer

    def _accepted(self, queue: PartitionQueue, pending: Pending, answer: Answer) -> None:
        """Note that the leader has the batch in its log; its records are kept until it is durable."""
        partition = queue.partition
        try:
            taken = read_accepted(answer.body, pending)
        except ValueError as fault:
            error = OutcomeUnknown(
                f"{self.topic}/{partition}: an answer that cannot be read: {fault}",
                code="bad_receipt",
                outcome="unknown",
            )
            self.accumulator.failed(queue, pending, error, maybe_applied=True)
            return
        if partition in self._backoffs:
            self._backoffs[partition].reset()
            self._redirects.pop(partition, None)
            self._last.pop(partition, None)
        self.accumulator.accepted(
            queue,
            pending,
            base_offset=taken.offset,
            term=taken.term,
            replicas=taken.when_durable.replicas,
            synced=taken.when_durable.synced,
        )
        self._probes.learned(queue, taken.term, taken.committed)

    def _acknowledged(self, queue: PartitionQueue, pending: Pending, answer: Answer) -> None:
        partition = queue.partition
        try:
            receipt, offset = read_appended(answer.body, pending)
        except ValueError as fault:
            error = OutcomeUnknown(
                f"{self.topic}/{partition}: a receipt that cannot be read: {fault}",
                code="bad_receipt",
                outcome="unknown",
            )
            self.accumulator.failed(queue, pending, error, maybe_applied=True)
            return
        if offset >= 0:
            self.session.seen.advance(self.topic, partition, offset + len(pending.values))
        if partition in self._backoffs:
            self._backoffs[partition].reset()
            self._redirects.pop(partition, None)
            self._last.pop(partition, None)
        self.accumulator.acknowledged(
            queue,
            pending,
            base_offset=offset,
            replicas=receipt.durable.replicas,
            synced=receipt.durable.synced,
            scheduled=receipt.scheduled,
        )

    def _refused(
        self, queue: PartitionQueue, pending: Pending, url: str, answer: Answer, *, token: int
    ) -> None:
        partition = queue.partition
        redirects = self._redirects.get(partition, 0)
        verdict, problem = judged(answer, repeatable=True, redirects=redirects)
        detail = str(problem.get("detail") or f"{url} answered {answer.status}")
        if problem.get("code") in OUT_OF_SEQUENCE:
            # Often only a consequence of the refusal of the batch before it; then that one's reason is kept.
            self._last.setdefault(partition, detail)
        else:
            self._last[partition] = detail
        if answer.status == 401 and self.session.authorization.may_pass(url, token):
            verdict = Verdict(step=Step.RETRY)
        location = verdict.location
        if location is not None and not self.session.may_ask(origin_of(location)):
            verdict = Verdict(step=Step.RETRY)
        if verdict.location is not None and self.session.is_silent(origin_of(verdict.location)):
            # The answer names a node that is silent: the answering node has not noticed that yet. Ask again.
            verdict = Verdict(step=Step.RETRY)
        elif verdict.location is not None:
            self._redirects[partition] = redirects + 1
            self.session.redirects += 1
            leader = origin_of(verdict.location)
            self._urls[partition] = leader
            places = self.session.topic_map_nowait(self.topic)
            if places is not None:
                places.learn_leader(partition, leader)
        elif verdict.stale:
            self._leave(partition, url)
        code = problem.get("code")
        limit = problem.get("limit")
        version = limit if isinstance(limit, int) else 0
        if code == "sealed":
            self._sealed(queue, pending, version)
        elif code == "stale_route":
            # With the newer version it is sent again. If the partition has ended, that is the answer then.
            self._want_route(version)
            until_ms = now_ms() + self._next_backoff_ms(partition)
            self.accumulator.retry(queue, pending, until_ms=until_ms, maybe_applied=False)
        elif code == "no_such_partition":
            asked = f"appending to {self.topic}/{partition}"
            missing = self._find_missing(queue, pending, from_problem(answer.status, problem, asked=asked))
            task = self._loop.create_task(missing)
            self._missing.add(task)
            task.add_done_callback(self._missing.discard)
        elif verdict.step is Step.FOLLOW:
            self.accumulator.retry(queue, pending, until_ms=0, maybe_applied=False)
        elif verdict.step is Step.RETRY:
            until_ms = now_ms() + max(verdict.wait_ms, self._next_backoff_ms(partition))
            self.accumulator.retry(queue, pending, until_ms=until_ms, maybe_applied=verdict.maybe_applied)
        elif code not in OUT_OF_SEQUENCE or not self.accumulator.renumber(queue, pending):
            error = from_problem(answer.status, problem, asked=f"appending to {self.topic}/{partition}")
            error = self.session.authorization.explain(url, error)
            self.accumulator.failed(queue, pending, error, maybe_applied=error.outcome == "unknown")

    def _lost(self, queue: PartitionQueue, pending: Pending, url: str, failure: ConnectionFailed) -> None:
        verdict = judge_loss(sent=failure.sent, repeatable=True)
        self._last[queue.partition] = str(failure)
        self.session.balancer.failed(url, now_ms=now_ms(), started=False)
        self._leave(queue.partition, url)
        until_ms = now_ms() + self._next_backoff_ms(queue.partition)
        self.accumulator.retry(queue, pending, until_ms=until_ms, maybe_applied=verdict.maybe_applied)

    def _leave(self, partition: int, url: str) -> None:
        """Forget that `url` leads the partition, so that the leader is looked up again."""
        if self._urls.get(partition) == url:
            del self._urls[partition]
        places = self.session.topic_map_nowait(self.topic)
        if places is not None:
            places.forget_leader(partition, url)

    def _next_backoff_ms(self, partition: int) -> int:
        self.session.retries += 1
        return self._backoffs.setdefault(partition, Backoff(rng=self.session.rng)).next_ms()

    # -- time ----------------------------------------------------------------------------------

    def _expire(self, queue: PartitionQueue, now: int) -> None:
        """Fail the batches whose deadline has passed and whose request is not under way, oldest first."""
        for pending in queue.waiting():
            if pending.settled or pending.under_way:
                continue
            if pending.deadline_ms < 0:
                pending.deadline_ms = now + self._timeout_ms
            if now < pending.deadline_ms:
                continue
            message = (
                f"{self.topic}/{queue.partition}: no receipt within {self._timeout_s:g} s; "
                f"last: {self._last.get(queue.partition, 'nothing was answered')}"
            )
            if queue.open is pending:
                queue.close_open()
            error: Error = (
                OutcomeUnknown(message, code="outcome_unknown", outcome="unknown")
                if pending.maybe_applied
                else TimedOut(message, code="timed_out", retriable=True, outcome="not_applied")
            )
            self.accumulator.fail(queue, pending, error)
            self._loop.call_soon(self.on_progress)

    def _set_timer(self, now: int) -> None:
        resume_ms = self.accumulator.next_resume_ms()
        probe_ms = self._probes.next_ms() if self._accepts else None
        if probe_ms is not None:
            resume_ms = probe_ms if resume_ms is None else min(resume_ms, probe_ms)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if resume_ms is not None:
            self._timer = self._loop.call_later(max(0, resume_ms - now + 1) / 1000, self.wake)

    @property
    def resent(self) -> int:
        """Number of times a batch was sent again."""
        return self.accumulator.resent

    async def end(self, error: Error) -> None:
        """Close the sender, because the session is closed with `error`."""
        self.close(error)

    def close(self, error: Error) -> None:
        """Stop sending. Records without a receipt fail with `error`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.session.ended(self)
        if self._timer is not None:
            self._timer.cancel()
        self._watchdog.close()
        self._probes.close()
        for task in [*self._connecting.values(), *self._missing]:
            task.cancel()
        if self._learning is not None:
            self._learning.cancel()
        with self._guard:
            for queue in list(self.accumulator.active.values()):
                for pending in queue.waiting():
                    if not pending.settled:
                        pending.maybe_applied |= pending.attempts > 0
                        self.accumulator.fail(queue, pending, error)
        self.on_progress()


def _nothing() -> None:
    return None


def unbuildable(fault: Exception) -> Error:
    """Return the error of records that cannot be encoded as a batch; `fault` is the reason."""
    return Error(
        f"the records cannot be made a batch: {fault}",
        code="invalid",
        outcome="not_applied",
        field="value",
    )
