"""Appends by datagram: requests on this shard's UDP socket, and their answers.

They are for many small producers that keep no connection open. The kernel gives a datagram to the shard that
owns its partition, so the steps are those of an append over HTTP, without HTTP: authenticate, verify, append,
and answer when the receipt is complete. If this node does not lead the partition, the answer is the leader's
address: datagrams are not forwarded.

A datagram may come twice, late, or never. So every batch must carry a producer id and a sequence number, by
which the partition recognises a batch that it has already (`laminar.node.partition.state.producers`). A
datagram whose MAC is wrong gets no answer, and no answer is much larger than its request: so a forged sender
address can't make this node send more than it receives. While too many requests wait, datagrams are dropped:
the client asks again.

A node with access control takes only questions (requests by datagram) that are signed with the key of a
credential. The key is derived from the cluster's secret and the credential's id, so data of the catalog do
not suffice to sign a datagram. A copy of a question is refused after some minutes, which is before a
partition may forget its batch (`KEPT_MS` of `laminar.node.partition.state.producers`), so it is never
appended again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from laminar.batch import NO_PRODUCER, Header
from laminar.http.api.append_body import read_batches
from laminar.http.api.deadlines import SECOND_HOP_WAIT_S
from laminar.http.api.limits import Limits
from laminar.http.api.names import SYSTEM_TOPICS
from laminar.http.api.problems import Problem
from laminar.node.access.meters import Meter
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.datagram_proofs import MalformedUnder, Proofs
from laminar.node.api.records.new_ids import NewIds
from laminar.node.api.records.stale_routes import NOT_SAID, StaleRoutes, has_keys
from laminar.node.partition.deduplication import is_duplicate
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt as Appended
from laminar.wire.datagram import (
    Answer,
    DatagramCodec,
    Forged,
    Leader,
    NextRoute,
    Question,
    Receipt,
)

_log = logging.getLogger("laminar.datagrams")

MOST_WAITING = 10_000
"""The most requests of this shard that wait for their answers; further datagrams are dropped."""

SHARE = 4
"""The most waiting requests of one principal, as a multiple of the free room: 4 means four fifths of all."""

OnRefused = Callable[[str, int, str, str, Problem], None]
"""`f(topic, partition, credential, peer, problem)`; `peer` is the sender as ``host:port``."""

# Fields of a problem that are left out: the client has them in its own table, by the code.
_LEFT_OUT = ("type", "title", "hint")


class Datagrams(asyncio.DatagramProtocol):
    """Appends by datagram at one shard; the socket itself belongs to the supervisor."""

    def __init__(
        self,
        services: ShardServices,
        locator: Locator,
        topics: TopicLookup,
        *,
        sock: socket.socket | None,
        limits: Limits,
        meter_of: Callable[[str], Meter] | None = None,
        new_ids: NewIds | None = None,
        on_refused: OnRefused | None = None,
    ) -> None:
        """Count requests in the meters of `meter_of`, and new producers in `new_ids`.

        `on_refused` is called for each authentic request that is refused.
        """
        self._services = services
        self._sock = sock
        self._locator = locator
        self._topics = topics
        self._stale = StaleRoutes(topics)
        self._limits = limits
        self._proofs = Proofs(services, meter_of)
        self._new_ids = new_ids or NewIds(services)
        self._on_refused = on_refused
        self._transport: asyncio.DatagramTransport | None = None
        self._tasks: set[asyncio.Task[Appended | Leader]] = set()
        self._waiting = 0
        # by principal the number of its waiting requests, if it has any
        self._waiting_of: Counter[str] = Counter()
        self._counts = dict.fromkeys(
            ("received", "forged", "dropped", "appended", "repeated", "redirected", "refused"), 0
        )

    async def serve(self) -> None:
        """Begin to read the socket, if this shard was given one."""
        sock = self._sock
        if sock is None:
            return
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, sock=sock.dup())

    def close(self) -> None:
        """Stop reading and answering."""
        if self._transport is not None:
            self._transport.close()
        for task in self._tasks:
            task.cancel()

    def statistics(self) -> dict[str, int]:
        """Return the numbers of datagrams received, by outcome, and the number that wait for an answer.

        `forged` counts those that failed the MAC check; `dropped` those that arrived while `MOST_WAITING`
        requests waited, or too many of their principal.
        """
        return self._counts | {"waiting": self._waiting}

    # -- what the event loop calls -------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the socket (asyncio calls it)."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def error_received(self, exc: Exception) -> None:
        """Log that an answer could not be sent; the client asks again."""
        _log.debug("sending a datagram failed: %s", exc)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """Handle a datagram: answer an authentic request; drop anything else."""
        self._counts["received"] += 1
        try:
            question, codec = self._proofs.opened(data)
        except Forged:
            self._counts["forged"] += 1
            return
        except MalformedUnder as malformed:
            fault, asked = malformed.fault, _Asked(len(data), malformed.fault.number, addr, malformed.codec)
            problem = Problem(
                "malformed", str(fault), field=fault.field, value=fault.value, limit=fault.limit
            )
            self._refuse(asked, problem)
            return
        if self._waiting >= MOST_WAITING:
            self._counts["dropped"] += 1
            return
        asked = _Asked(len(data), question.number, addr, codec)
        try:
            principal = self._proofs.check(question, len(data))
            if not self._has_room(principal):
                self._counts["dropped"] += 1
                return
            self._take(question, asked, principal)
        except Problem as problem:
            self._refuse(asked, problem, question)

    def _has_room(self, principal: str) -> bool:
        """Return whether one more request of a principal may wait: others must find room, too."""
        return not principal or self._waiting_of[principal] <= SHARE * (MOST_WAITING - self._waiting)

    # -- from the question to the answer -------------------------------------------------

    def _take(self, question: Question, asked: _Asked, principal: str) -> None:
        frame = self._verified(question)
        self._topics.check_import(question.topic, {})
        partition = self._services.partitions.get((question.topic, question.partition))
        work: asyncio.Future[Appended] | asyncio.Task[Appended | Leader]
        if partition is not None and partition.leads:
            work = self._append(partition, question, frame, principal)
        else:
            work = asyncio.get_running_loop().create_task(self._elsewhere(question, frame, principal))
            self._tasks.add(work)
            work.add_done_callback(self._tasks.discard)
        self._waiting += 1
        self._waiting_of[principal] += 1
        work.add_done_callback(lambda done: self._done(question, asked, principal, done))

    def _append(
        self, partition: Partition, question: Question, frame: bytearray, principal: str
    ) -> asyncio.Future[Appended]:
        """Append the batch at its leader. Raises `Problem`."""
        header = Header.unpack(frame)
        if self._stale.matter(partition) and has_keys(frame) and not is_duplicate(partition.context, header):
            self._stale.check(partition, NOT_SAID if question.route is None else question.route)
        try:
            self._new_ids.count(partition, header.producer_id, principal)
            return partition.appends.append_frame(frame, header)
        except Problem as problem:
            return partition.appends.refused(problem)

    def _verified(self, question: Question) -> bytearray:
        """Verify the batch of a question; return a copy of it, because a leader stamps batches in place."""
        if question.topic in SYSTEM_TOPICS:
            raise Problem("invalid", "this is an internal topic", field="topic", value=question.topic)
        frames, headers = read_batches(question.frame, self._limits)
        if len(frames) != 1:
            raise Problem(
                "invalid",
                "a datagram must hold exactly one batch",
                field="batches",
                value=len(frames),
                limit=1,
            )
        if headers[0].producer_id == NO_PRODUCER:
            raise Problem(
                "invalid",
                "a datagram may arrive twice, so its batch needs a producer id and a sequence",
                field="producer_id",
                value=NO_PRODUCER.hex(),
            )
        return bytearray(frames[0])

    async def _elsewhere(self, question: Question, frame: bytearray, principal: str) -> Appended | Leader:
        """Return the leader's address, or this shard's own receipt if it leads by now.

        Raises:
            Problem: there is no such partition, or no leader is known.
        """
        topic, number = question.topic, question.partition
        if not self._topics.knows(topic, str(number)):
            await self._services.refresh_view()
        self._topics.partition_record(topic, str(number))
        where = await self._locator.leader(topic, number, wait_s=SECOND_HOP_WAIT_S)
        partition = self._services.partitions.get((topic, number))
        if partition is not None and partition.leads:
            return await self._append(partition, question, frame, principal)
        record = self._services.view.nodes().get(where.node)
        if record is None or where.node == self._services.node:
            self._locator.forget(topic, number)
            raise Problem(
                "no_leader",
                f"{topic}/{number} has no leader at the moment (election in progress)",
                outcome="not_applied",
            )
        if partition is None:
            # Another shard named this leader, and does not notify this one of a new leader, so it is asked
            # again.
            self._locator.forget(topic, number)
        return Leader(record.host, record.http_port)

    def _done(self, question: Question, asked: _Asked, principal: str, done: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        self._waiting_of[principal] -= 1
        if not self._waiting_of[principal]:
            del self._waiting_of[principal]
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, Problem):
            self._refuse(asked, error, question)
            return
        if error is not None:
            identity = uuid.uuid4().hex[:12]
            _log.error("internal error %s in the append of a datagram", identity, exc_info=error)
            self._refuse(asked, Problem("internal_error", f"see {identity} in the log of this node"))
            return
        said: Appended | Leader = done.result()
        if isinstance(said, Leader):
            self._counts["redirected"] += 1
            self._answer(asked, said)
            return
        self._counts["repeated" if said.duplicate else "appended"] += 1
        partition: Partition | None = self._services.partitions.get((question.topic, question.partition))
        if partition is None:
            return  # deleted in this turn of the loop: a client that asks again learns it
        synced = partition.log.policy.name == "commit"
        self._answer(asked, Receipt(said.offset, said.count, partition.replicas, synced, said.duplicate))

    def _refuse(self, asked: _Asked, problem: Problem, question: Question | None = None) -> None:
        self._counts["refused"] += 1
        if self._on_refused is not None and question is not None:
            peer = f"{asked.address[0]}:{asked.address[1]}"
            self._on_refused(question.topic, question.partition, question.credential, peer, problem)
        if problem.code == "sealed" and question is not None:
            self._answer(asked, self._next_route(question.topic, problem.limit))
            return
        document = problem.document()
        self._answer(asked, {name: document[name] for name in document if name not in _LEFT_OUT})

    def _next_route(self, topic: str, version: Any) -> NextRoute:
        """Return the topic's present route if it has this version or a later one, else only the version."""
        record = self._services.view.topics().get(topic)
        if record is None or self._topics.version(topic) < version:
            return NextRoute(version)
        route = self._topics.route(record)
        return NextRoute(
            route.version,
            tuple((number, held.start, len(held)) for number, held in route.ranges().items()),
        )

    def _answer(self, asked: _Asked, body: Receipt | Leader | NextRoute | dict[str, Any]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        answer = Answer(asked.number, self._services.number, body)
        transport.sendto(asked.codec.encode_answer(answer, limit_bytes=asked.size_bytes), asked.address)


class _Asked:
    """The parts of a request that are needed to encode its answer."""

    __slots__ = ("address", "codec", "number", "size_bytes")

    def __init__(
        self, size_bytes: int, number: bytes, address: tuple[Any, ...], codec: DatagramCodec
    ) -> None:
        self.codec = codec
        self.size_bytes = size_bytes
        self.number = number
        self.address = address
