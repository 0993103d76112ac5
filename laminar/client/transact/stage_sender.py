"""The sender of stages (records stored in their partitions, invisible until the sink's batch is committed).

It sends the stages of one writer of a batch, several at a time; `policy.staging` makes the decisions. A stage
gets its number before it is sent, so it can be sent again until its deadline, for example after an election,
and a partition stores it once. If a stage fails for good, the whole batch fails: a part of the appended
records is never committed.

A sender runs on the session's loop. The synchronous face adds records from other threads, under `guard`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol
from urllib.parse import quote

from laminar.batch import BATCH_TYPE, BatchError, build
from laminar.client.codecs import Codec, not_bytes
from laminar.client.errors import Error, TimedOut
from laminar.client.net.attempts import now_ms
from laminar.client.net.session import Session
from laminar.client.policy.partition_queue import Pending, padded
from laminar.client.policy.retry import Backoff
from laminar.client.policy.staging import Row, Stages
from laminar.client.produce.named_producer import lineage_of
from laminar.client.produce.sender import unbuildable
from laminar.client.records import Staged
from laminar.client.trace_id import TraceId, trace_id_bytes

# Number of stages in flight: while a partition replicates one, others are on their way.
WIDTH = 16


class Named(Protocol):
    """A topic object, of the asynchronous or the synchronous face: a name and a codec."""

    name: str

    @property
    def codec(self) -> Codec[Any] | None:
        """The codec of the topic's values; None for bytes."""


class StageSender:
    """A sender of the stages for batch `number` of a sink, under `epoch`.

    `failure` is the error that stopped it, if any. `on_progress` is called on the loop each time a request
    has ended.
    """

    def __init__(
        self,
        session: Session,
        stages: Stages,
        *,
        sink: str,
        number: int,
        epoch: int,
        timeout_s: float,
        guard: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self.stages = stages
        self.failure: BaseException | None = None
        # A partition has published this batch: records that are staged for it now never become visible.
        self.already = False
        self.closed = False
        self.on_progress: Callable[[], None] = _nothing
        self._session = session
        self._sink = sink
        self._number = number
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._guard = guard if guard is not None else contextlib.nullcontext()
        self._loop = session.loop
        self._woken = False
        self._learning: set[str] = set()
        self._renewing: set[str] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self._progress: asyncio.Event = asyncio.Event()

    # -- records in --------------------------------------------------------------------------

    def put(
        self,
        topic: str | Named,
        value: Any,
        key: str | bytes | None,
        *,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
        trace_id: TraceId | None,
        partition: int | None,
    ) -> bool:
        """Add a record; return whether the caller must call `wake` now. The caller holds the guard.

        Raises:
            Error: staging has failed before, or the record cannot be staged.
        """
        if self.failure is not None:
            raise self.failure
        name = topic
        if not isinstance(name, str):
            assert not isinstance(topic, str)
            name = topic.name
            if topic.codec is not None:
                value = topic.codec.encode(value)
        if type(value) is not bytes and (wrong := not_bytes(value)) is not None:
            raise wrong
        if self.already:
            return False
        raw = key.encode() if isinstance(key, str) else key
        return self.stages.put(
            name, Row(value, raw, partition, tag, headers, timestamp_ms, trace_id_bytes(trace_id))
        )

    @property
    def full(self) -> bool:
        """Whether the buffer is full, so that further records have to wait."""
        return self.stages.buffered_bytes >= self.stages.buffer_bytes and self._going

    @property
    def _going(self) -> bool:
        return self.failure is None and not self.already and not self.closed

    def wake(self) -> None:
        """Schedule sending, on the loop's thread."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._pump)

    def wake_from_thread(self) -> None:
        """Schedule sending, from another thread."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._pump)

    # -- stages out --------------------------------------------------------------------------

    def _pump(self) -> None:
        # Cleared first, so that a record that is put while this runs schedules it again.
        self._woken = False
        if not self._going:
            return
        try:
            with self._guard:
                for topic in self.stages.unknown():
                    if topic not in self._learning:
                        self._learning.add(topic)
                        self._spawn(self._learn(topic))
                while len(self._under_way) < WIDTH and (taken := self.stages.take()) is not None:
                    self._spawn(self._send(*taken))
        except Error as error:
            self._fail(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task that sent a stage or requested a topic; if it failed, the batch fails."""
        self._under_way.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Error) and error.code == "already_committed":
            self.already = True
            self._drop()
        elif isinstance(error, (BatchError, TypeError, ValueError)):
            self._fail(unbuildable(error))
        elif error is not None:
            self._fail(error)
        self._pump()
        self._progress.set()
        self.on_progress()

    async def _learn(self, topic: str) -> None:
        places = await self._session.topic_map(topic, timeout_s=self._timeout_s)
        with self._guard:
            self.stages.know(topic, places.route)

    async def _renew(self, topic: str, version: int) -> None:
        """Divide the records that ended partitions refused by the topic's next route, once it is known.

        First wait until no stage of the topic is under way, so that the order is kept.
        """
        deadline_s = self._loop.time() + self._timeout_s
        backoff = Backoff(rng=self._session.rng)
        try:
            while True:
                lineage = await lineage_of(self._session, topic, timeout_s=self._timeout_s)
                if lineage.route.version >= version:
                    break
                if self._loop.time() > deadline_s:
                    what = f"{topic} has ended partitions, and no node knows what follows"
                    raise TimedOut(what, code="timed_out", retriable=True, outcome="not_applied")
                await asyncio.sleep(backoff.next_ms() / 1000)
            while self._going and not self.stages.waits_for_route(topic):
                await self._answered(topic)
            if not self._going:
                return
            places = self._session.topic_map_nowait(topic)
            if places is not None and places.route.version < lineage.route.version:
                places.stale = True
            with self._guard:
                self.stages.renew(topic, lineage.route)
        finally:
            self._renewing.discard(topic)

    async def _answered(self, topic: str) -> None:
        """Wait until some request that is under way has ended."""
        others = [task for task in self._under_way if task is not asyncio.current_task()]
        assert others, f"nothing of {topic} is under way"
        await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # their own callbacks come first

    async def _send(self, topic: str, pending: Pending) -> None:
        route = self.stages.route_version(topic)
        count = len(pending.values)
        frame = build(
            pending.values,
            keys=pending.keys if pending.keyed else None,
            timestamps=padded(pending.timestamps, count),
            trace_ids=padded(pending.trace_ids, count),
            tags=padded(pending.tags, count),
            headers=padded(pending.headers, count),
        )
        try:
            await post_stage(
                self._session,
                topic,
                pending.partition,
                frame,
                sink=self._sink,
                number=self._number,
                epoch=self._epoch,
                stage=pending.sequence,
                route=route,
                timeout_s=self._timeout_s,
            )
        except Error as error:
            follows = error.limit if error.code in ("sealed", "stale_route") else None
            if not isinstance(follows, int) or follows <= route:
                raise
            with self._guard:
                self.stages.refused(topic, pending)
            if topic not in self._renewing:
                self._renewing.add(topic)
                self._spawn(self._renew(topic, follows))
            return
        with self._guard:
            self.stages.staged(topic, pending)

    # -- the end -----------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until the buffer has room for more; raise the error that stopped the staging, if any."""
        while self.full:
            await self._wait()
        if self.failure is not None:
            raise self.failure

    async def finish(self) -> Staged:
        """Stage all remaining records; return a description of all that was staged, or raise the failure."""
        closed_all = False
        while self._going:
            if not closed_all and not self.stages.unknown():
                with self._guard:
                    self.stages.close_all()
                closed_all = True
            if closed_all and self.stages.buffered_bytes == 0:
                break
            self.wake()
            await self._wait()
        if self.failure is not None:
            raise self.failure
        if self.already:
            self._drop()
        return self.stages.result(self._sink, self._number, self._epoch)

    async def _wait(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._drop()

    def _drop(self) -> None:
        with self._guard:
            self.stages.drop()

    def close(self) -> None:
        """Stop sending, and cancel the requests of stages in flight. Idempotent."""
        self.closed = True
        for task in self._under_way:
            task.cancel()
        self._progress.set()
        self.on_progress()


async def post_stage(
    session: Session,
    topic: str,
    partition: int,
    frame: bytes | bytearray | memoryview,
    *,
    sink: str,
    number: int,
    epoch: int,
    stage: int,
    route: int,
    timeout_s: float | None = None,
) -> None:
    """Send `frame` to its partition as stage `stage` of batch `number`; return when it is replicated.

    `route` is the version of the route by which the partition was chosen.

    The request is repeated until its deadline. The partition takes the stage once: it recognises a repetition
    by the stage's number.

    Raises:
        Error: the cluster refused the stage; (`already_committed`) the batch was committed before.
    """
    await session.call(
        "POST",
        f"{batch_path(sink, number)}/stages?topic={quote(topic, safe='')}"
        f"&partition={partition}&stage={stage}&epoch={epoch}",
        body=frame,
        headers={"Content-Type": BATCH_TYPE, "Laminar-Route": str(route)},
        timeout_s=timeout_s,
        first=await _leader(session, topic, partition, timeout_s),
    )


async def _leader(session: Session, topic: str, partition: int, timeout_s: float | None) -> str | None:
    """Return the URL of the partition's leader; None if the leader is not known or failed lately.

    A stage sent to any other node would be forwarded, and its bytes sent twice.
    """
    places = await session.topic_map(topic, timeout_s=timeout_s)
    url = places.leader(partition)
    if url is not None and session.balancer.is_avoided(url, now_ms=now_ms()):
        places.forget_leader(partition, url)
        return None
    return url


def sink_path(sink: str) -> str:
    """Return the path of a sink's resource."""
    return f"/v1/sinks/{quote(sink, safe='')}"


def batch_path(sink: str, number: int) -> str:
    """Return the path of a batch's resource."""
    return f"{sink_path(sink)}/batches/{number}"


def _nothing() -> None:
    return None
