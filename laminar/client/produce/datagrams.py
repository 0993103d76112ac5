"""Appends by datagram: a small batch is sent, its receipt comes back, and no connection is kept.

For large numbers of programs that append a little now and then, such as sensors. Each partition has one batch
in flight. Records that are appended meanwhile wait and are sent with the next batch, up to the size of a
datagram. A datagram is sent again until it is answered. The node recognises copies by the producer's id and
the sequence number, so the batch is appended once, and every copy is answered with the same receipt.

If no answer comes before the deadline, a copy may still be on the network, so the outcome is unknown. The
next batch then begins a new epoch of the producer, so that the partition cannot take an old copy for the new
batch: a copy that arrives later is refused, unless it was appended before.

A partition that has ended (was replaced by others) refuses the batch, and its answer has the topic's next
route. The records are then sent to the partitions that replaced it (`datagram_queues`).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

from laminar.batch import BatchError, build
from laminar.client.codecs import Codec, not_bytes
from laminar.client.errors import (
    ConfigError,
    Error,
    OutcomeUnknown,
    TimedOut,
    Unauthorized,
    Unavailable,
    from_problem,
)
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.retry import REDIRECTS_AT_ONCE, Backoff, Step, judge_answer
from laminar.client.policy.routing import newest_route
from laminar.client.produce.datagram_proof import DatagramProof
from laminar.client.produce.datagram_queues import DatagramQueue, DatagramQueues, DatagramRecord
from laminar.client.produce.datagram_sockets import Address, DatagramSockets
from laminar.client.produce.named_producer import lineage_of
from laminar.client.records import Receipt
from laminar.client.trace_id import TraceId, trace_id_bytes
from laminar.http.api.problems import CODES
from laminar.wire.datagram import (
    NUMBER_BYTES,
    Answer,
    Forged,
    Leader,
    NextRoute,
    Question,
)
from laminar.wire.datagram import Receipt as Placed
from laminar.wire.key_route import Route

T = TypeVar("T")

# The pause before a datagram is sent again, at first and at most: a commit takes some milliseconds, an
# election a second or two.
RESEND_MS = 200
LONGEST_RESEND_MS = 1_000
# After this number of copies without an answer, another node is asked.
SILENT_COPIES = 2


class _Forgotten(Exception):
    """Raised if the partition has forgotten this producer; the batch is sent again under the next epoch.

    A partition forgets a producer after days, or when it remembers too many newer ones. The next epoch is
    safe: all earlier batches have receipts, and only one copy of this batch was sent, which was refused.
    """


class _Ended(Exception):
    """Raised if the partition has ended without the batch; `next` is the route that follows."""

    def __init__(self, following: NextRoute) -> None:
        super().__init__(following)
        self.next = following


class Datagrams(Generic[T]):
    """Appends to one topic by datagram: ``async with topic.datagrams() as datagrams``.

    Made by `Topic.datagrams`. The first append requests the topic's route and the nodes over HTTP, unless
    the program gave `partitions`, the number of partitions of a topic that was never split or merged. A
    client with a token also requests a key for datagrams (`laminar.client.produce.datagram_proof`).
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        codec: Codec[T] | None,
        *,
        secret: str | None,
        partitions: int | None,
        timeout: float | None,
    ) -> None:
        if partitions is not None and partitions < 1:
            raise ConfigError(
                f"partitions must be 1 or more, not {partitions}",
                code="invalid",
                field="partitions",
                value=partitions,
                limit=1,
            )
        self._session = session
        self._topic = topic
        self._codec = codec
        self._timeout_s = session.timeout_s if timeout is None else timeout
        self._proof = DatagramProof(session, secret)
        self._producer_id = os.urandom(16)
        self._partitions = partitions
        self._beginning: asyncio.Task[None] | None = None
        self._queues = DatagramQueues(self._start)
        self._nodes: list[Address] = []
        self._next_node = 0
        self._waiting: dict[bytes, asyncio.Queue[Answer]] = {}
        self._sockets = DatagramSockets(session, self._received)
        self._closed = False
        self._counts = {"datagrams": 0, "resent": 0, "redirects": 0, "forged": 0}

    def __repr__(self) -> str:
        return f"<Datagrams {self._topic}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _room_bytes(self) -> int:
        return self._proof.room_bytes(self._topic)

    def statistics(self) -> dict[str, int]:
        """Return counts of datagrams sent, copies resent, redirects, and answers that failed their MAC."""
        return dict(self._counts)

    @property
    def resent(self) -> int:
        """Number of times a batch was sent again."""
        return self._counts["resent"]

    # -- appending -----------------------------------------------------------------------------

    async def append(
        self,
        value: T,
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        trace_id: TraceId | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; return its receipt when it is durable as the topic's settings require.

        The record is sent again until it is answered, and never appended twice.

        Raises:
            Error: (``too_large``) the record does not fit into a datagram; (``forbidden``) the token lacks
                the role write on the topic.
            ConfigError: (``no_datagrams``) the cluster requires tokens, and its nodes are too old for that.
            OutcomeUnknown: the deadline passed without an answer.
            TimedOut: the deadline passed before the record was sent.
        """
        raw: Any = value if self._codec is None else self._codec.encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        timeout_s = self._timeout_s if timeout is None else timeout
        loop = self._session.loop
        record = DatagramRecord(
            bytes(raw),
            key,
            tag,
            headers,
            timestamp_ms,
            trace_id_bytes(trace_id),
            deadline=loop.time() + timeout_s,
            future=loop.create_future(),
            named=partition is not None,
        )
        self._check_size(record)
        last = "the topic and the nodes were asked for"
        try:
            async with asyncio.timeout_at(record.deadline):
                await self._begun()
                self._check_size(record)  # again, as by a credential there is less room
                queue = self._queues.queue_of(key, partition)
                queue.waiting.append(record)
                self._start(queue)
                return await record.future
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            last = queue.last if record.sent else last
            text = f"a record for {self._topic} got no receipt within {timeout_s:g} s; last: {last}"
            if record.sent:
                raise OutcomeUnknown(text, code="outcome_unknown", outcome="unknown") from None
            raise TimedOut(text, code="timed_out", retriable=True, outcome="not_applied") from None

    def _check_size(self, record: DatagramRecord) -> None:
        try:
            size_bytes = len(self._build([record], epoch=0, sequence=0))
        except BatchError as error:
            raise Error(
                str(error), code="invalid", field=error.field, value=error.value, limit=error.limit
            ) from error
        if size_bytes > self._room_bytes:
            raise Error(
                f"the record makes a batch of {size_bytes} bytes; in a datagram to {self._topic} there is "
                f"room for {self._room_bytes}",
                code="too_large",
                field="record_bytes",
                value=size_bytes,
                limit=self._room_bytes,
                hint="append it over HTTP",
                outcome="not_applied",
            )

    async def _begun(self) -> None:
        """Wait until there are queues; the first call requests the route and the nodes."""
        if self._closed:
            raise _ended()
        if self._queues.route is not None:
            return
        if self._beginning is None or (self._beginning.done() and self._beginning.exception() is not None):
            self._session.opened(self)
            self._beginning = self._session.loop.create_task(self._begin())
            self._beginning.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._beginning)

    async def _begin(self) -> None:
        endpoints = self._session.endpoints
        if self._partitions is None or endpoints.tls_only or endpoints.token or endpoints.token_file:
            await self._proof.begin()
        if self._partitions is None:
            answer = await self._session.get_json(f"{topic_path(self._topic)}/routes")
            cluster = await self._session.get_json("/v1/cluster")
            route = newest_route(answer)
            nodes = sorted(cluster["nodes"], key=lambda node: not node["alive"])
            urls = [str(node["url"]) for node in nodes]
        else:
            route = Route.even(self._partitions)
            urls = list(endpoints.urls)
        self._nodes = [(parts.hostname, parts.port or 80) for parts in map(urlsplit, urls) if parts.hostname]
        if not self._nodes:
            raise ConfigError(
                "datagrams need the host and port of a node", code="bad_url", field="url", value=urls
            )
        self._next_node = self._session.rng.randrange(len(self._nodes))
        self._queues.begin(route)

    # -- batches -------------------------------------------------------------------------------

    def _start(self, queue: DatagramQueue) -> None:
        """Start a task that sends the queue's records, unless one runs or the queue has to wait."""
        if queue.task is None and queue.waiting and not queue.after and not self._closed:
            queue.task = self._session.loop.create_task(self._run(queue))

    async def _run(self, queue: DatagramQueue) -> None:
        """Send the queue's records, batch by batch, until each has a receipt or an error."""
        try:
            while not queue.ended and (batch := self._take(queue)):
                queue.flying = batch
                try:
                    placed = await self._see_to_its_end(queue, batch)
                except _Ended as ended:
                    for record in batch:
                        record.sent = False
                    queue.waiting.extendleft(reversed(batch))
                    queue.flying = []
                    await self._follow(queue, ended.next)
                    continue
                except Error as error:
                    queue.epoch += 1
                    queue.sequence = 0
                    _fail(batch, error)
                    continue
                queue.sequence += 1
                for offset, record in enumerate(batch, placed.offset):
                    if not record.future.done():
                        receipt = Receipt(queue.partition, offset, placed.replicas, placed.synced)
                        record.future.set_result(receipt)
        except Exception as error:  # noqa: BLE001  # raised in the waiting calls, which would else wait for ever
            _fail([*queue.flying, *queue.waiting], error)
            queue.waiting.clear()
        finally:
            queue.task = None
        if queue.ended:
            self._queues.resolved(queue)

    async def _follow(self, queue: DatagramQueue, following: NextRoute) -> None:
        """Adopt the route after the end of `queue`; request it over HTTP if the answer did not have it."""
        before = self._queues.route
        if following.ranges and before is not None and following.version > before.version:
            shown = [
                {"partition": number, "from": first, "to": first + size}
                for number, first, size in following.ranges
            ]
            self._queues.adopt(Route.of_ranges(following.version, shown))
            return
        backoff = Backoff(rng=self._session.rng)
        while not queue.ended and any(not record.future.done() for record in queue.waiting):
            known = False
            try:
                route = (await lineage_of(self._session, self._topic)).route
            except Unavailable as error:
                queue.last = str(error)
            else:
                self._queues.adopt(route)
                known = route.version >= following.version
            if not queue.ended:
                await asyncio.sleep(backoff.next_ms() / 1000)
                if known:
                    return  # the datagram named an older route

    async def _see_to_its_end(self, queue: DatagramQueue, batch: list[DatagramRecord]) -> Placed:
        try:
            return await self._deliver(queue, self._build(batch, epoch=queue.epoch, sequence=queue.sequence))
        except _Forgotten:
            queue.epoch += 1
            queue.sequence = 0
            return await self._deliver(queue, self._build(batch, epoch=queue.epoch, sequence=0))

    def _take(self, queue: DatagramQueue) -> list[DatagramRecord]:
        """Remove and return the next records that fit into one datagram, except those no caller awaits."""
        batch: list[DatagramRecord] = []
        while queue.waiting:
            record = queue.waiting[0]
            if not record.future.done():
                if batch and len(self._build([*batch, record], epoch=0, sequence=0)) > self._room_bytes:
                    break
                record.sent = True
                batch.append(record)
            queue.waiting.popleft()
        return batch

    def _build(self, batch: list[DatagramRecord], *, epoch: int, sequence: int) -> bytearray:
        return build(
            [record.value for record in batch],
            keys=[record.key for record in batch],
            timestamps=[record.timestamp_ms for record in batch],
            tags=[record.tag for record in batch],
            headers=[record.headers for record in batch],
            trace_ids=[record.trace_id for record in batch],
            producer_id=self._producer_id,
            producer_epoch=epoch,
            sequence=sequence,
        )

    # -- one batch until its answer ------------------------------------------------------------

    async def _deliver(self, queue: DatagramQueue, frame: bytearray) -> Placed:
        """Send copies of a batch until one is answered with a receipt; return the receipt.

        Raises:
            Error: the node refused the batch.
            OutcomeUnknown: no caller waits for any of the records any more; or the batch was refused for
                good, but an earlier copy had no answer.
            _Forgotten: the partition has forgotten this producer.
            _Ended: the partition has ended without the batch.
        """
        number = os.urandom(NUMBER_BYTES)
        route = self._queues.route
        question = Question(
            self._topic, queue.partition, number, frame, None if route is None else route.version
        )
        answers = self._waiting[number] = asyncio.Queue()
        backoff = Backoff(rng=self._session.rng, first_ms=RESEND_MS, ceiling_ms=LONGEST_RESEND_MS)
        copies = answered = silent = redirects = clocks = 0
        pause_s = 0.0
        try:
            while True:
                answer = await _within(answers, pause_s)
                if answer is None:
                    if all(record.future.done() for record in queue.flying):
                        raise OutcomeUnknown("no longer awaited", code="outcome_unknown", outcome="unknown")
                    if copies > answered:
                        silent += 1
                        if silent % SILENT_COPIES == 0:
                            queue.address = None
                            await self._renew_proof(queue)
                    if queue.address is None:
                        queue.address = self._any_node()
                    # Counted before it is sent: if sending fails, it is not known whether the datagram left.
                    copies += 1
                    self._counts["datagrams"] += 1
                    self._counts["resent"] += copies > 1
                    refused = await self._sockets.send(queue.address, self._proof.question(question))
                    host, port = queue.address
                    queue.last = refused or f"{host}:{port} did not answer"
                    pause_s = backoff.next_ms() / 1000
                    continue
                answered += 1
                body = answer.body
                if isinstance(body, Placed):
                    return body
                if isinstance(body, Leader):
                    queue.address = (body.host, body.port)
                    queue.last = f"the leader is said to be {body.host}:{body.port}"
                    self._counts["redirects"] += 1
                    redirects += 1
                    backoff.reset()
                    # If two nodes name each other as leader, there is a pause after some redirects.
                    pause_s = 0.0 if redirects % (REDIRECTS_AT_ONCE + 1) else backoff.next_ms() / 1000
                    continue
                if isinstance(body, NextRoute):
                    raise _Ended(body)
                if body["code"] in ("sealed", "stale_route"):
                    limit = body.get("limit")
                    raise _Ended(NextRoute(limit if isinstance(limit, int) else 0))
                if body.get("field") == "minute" and isinstance(body.get("limit"), int):
                    # The clock here has stood still, or the nodes' clocks differ.
                    self._proof.set_minute(body["limit"])
                    clocks += 1
                    pause_s = 0.0 if clocks == 1 else backoff.next_ms() / 1000
                    continue
                queue.last = str(body.get("detail") or body["code"])
                if body["code"] == "unknown_producer" and queue.sequence > 0 and copies == 1:
                    raise _Forgotten
                pause_s = self._pause_after(queue, body, backoff, certain=copies == answered)
        finally:
            del self._waiting[number]

    async def _renew_proof(self, queue: DatagramQueue) -> None:
        """Request the key again; raise `OutcomeUnknown` if the token is not accepted any more."""
        try:
            await self._proof.renew()
        except Unauthorized as error:
            raise OutcomeUnknown(
                f"{error.message}; earlier copies were not answered",
                code="outcome_unknown",
                outcome="unknown",
            ) from error
        except Error as error:
            queue.last = error.message  # what matters is whether a datagram is answered

    def _pause_after(
        self, queue: DatagramQueue, problem: Mapping[str, Any], backoff: Backoff, *, certain: bool
    ) -> float:
        """Return the pause in seconds before the next copy; raise if `problem` is final.

        `certain` says that every copy was answered, so that the batch was not appended by another copy.

        Raises:
            Error: the problem is final, and `certain`.
            OutcomeUnknown: the problem is final, but an earlier copy was not answered.
        """
        code, wait_ms = problem["code"], problem.get("retry_after_ms")
        verdict = judge_answer(
            status=problem["status"],
            code=code,
            location=None,
            retry_after_ms=wait_ms if isinstance(wait_ms, int) else None,
            repeatable=True,
        )
        if verdict.step is Step.RETRY:
            if verdict.stale or verdict.avoid:
                queue.address = None
            return max(backoff.next_ms(), verdict.wait_ms) / 1000
        known = CODES.get(code)
        document = ({"title": known.title, "hint": known.hint} if known is not None else {}) | dict(problem)
        error = from_problem(
            problem["status"], document, asked=f"a datagram to {self._topic}/{queue.partition}"
        )
        if certain:
            raise error
        raise OutcomeUnknown(
            f"{error.message}; an earlier copy was not answered", code="outcome_unknown", outcome="unknown"
        ) from error

    # -- nodes and their answers ---------------------------------------------------------------

    def _any_node(self) -> Address:
        self._next_node = (self._next_node + 1) % len(self._nodes)
        return self._nodes[self._next_node]

    def _received(self, data: bytes) -> None:
        """Pass an answer to the batch that waits for it; ignore and count a datagram with a wrong MAC."""
        try:
            answer = self._proof.answer(data)
        except Forged:
            self._counts["forged"] += 1
            return
        waiting = self._waiting.get(answer.number)
        if waiting is not None:
            waiting.put_nowait(answer)

    async def end(self, error: Error) -> None:
        """Close, because the session is closed. `error` is not used: records fail as in `close`."""
        await self.close()

    async def close(self) -> None:
        """Stop sending. Idempotent. Appends without a receipt fail, those in flight with `OutcomeUnknown`."""
        self._closed = True
        self._session.ended(self)
        queues = self._queues.all()
        tasks: list[asyncio.Task[Any]] = [queue.task for queue in queues if queue.task is not None]
        if self._beginning is not None:
            tasks.append(self._beginning)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for queue in queues:
            text = f"closed while a record for {self._topic}/{queue.partition} was under way"
            _fail(queue.flying, OutcomeUnknown(text, code="outcome_unknown", outcome="unknown"))
            _fail([*queue.earlier, *queue.waiting], _ended())
        self._sockets.close()


async def _within(answers: asyncio.Queue[Answer], seconds: float) -> Answer | None:
    """Wait for the next answer and return it; None if none comes within `seconds`."""
    if not answers.empty():
        return answers.get_nowait()
    if seconds <= 0:
        return None
    try:
        async with asyncio.timeout(seconds):
            return await answers.get()
    except TimeoutError:
        return None


def _fail(records: Sequence[DatagramRecord] | deque[DatagramRecord], error: Exception) -> None:
    for record in records:
        if not record.future.done():
            record.future.set_exception(error)


def _ended() -> Unavailable:
    return Unavailable("the datagrams' block has ended", code="client_closed", outcome="not_applied")
