"""Producers and readers of a simulated cluster: they speak the HTTP API, passed on as between shards.

A producer keeps one batch in flight per partition and sends it again, unchanged, until it is acknowledged or
refused for good, recognised by its number or by an idempotency key; what it was told is held against what the
watch saw committed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import msgspec

from laminar.batch import build
from laminar.http.api.problems import Problem
from laminar.node.api.common.forwarding import PassedResponse
from laminar.node.transport.transport import TcpAddress, TransportError
from router import owner_shard, partition_hash
from tests.sim.loop import Life
from tests.sim.network import SimTransport
from tests.sim.watch import Group, Watch
from tests.sim.world import World

_encoder = msgspec.msgpack.Encoder()
REQUEST_TIMEOUT_S = 12.0
BATCH = "application/vnd.laminar.batch"


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    status: int
    payload: msgspec.Raw


_envelopes = msgspec.msgpack.Decoder(_Envelope)


@dataclass(slots=True)
class Answer:
    """What came back; `status` 0: nobody knows."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    code: str = ""
    outcome: str = ""
    limit: object = None
    # Why nobody knows.
    error: TransportError | None = None


@dataclass(slots=True, frozen=True)
class _Accepted:
    """A batch that a leader took and did not promise."""

    offset: int
    count: int
    term: int
    losses: int

    @classmethod
    def of(cls, answer: Answer, losses: int) -> _Accepted:
        body = msgspec.json.decode(answer.body)
        return cls(body["offset"], body["count"], body["term"], losses)

    def is_durable(self, answer: Answer) -> bool:
        """The window's rule: an answer in the same term that names an end behind the batch."""
        headers = answer.headers
        return (
            int(headers.get("laminar-term", -1)) == self.term
            and int(headers.get("laminar-committed", -1)) >= self.offset + self.count
        )


class Client:
    """One user's process, on a host of its own."""

    def __init__(self, world: World, watch: Watch, number: int, *, topic: str, partitions: int) -> None:
        self.world = world
        self.watch = watch
        self.name = f"client{number}"
        self.rng = random.Random(world.rng.getrandbits(64))
        self.topic = topic
        self.partitions = partitions
        self.life = Life(self.name)
        self.producer = number.to_bytes(16, "big")
        self.sequences = [0] * partitions
        self.epochs = [1] * partitions
        self.keys = 0
        # By partition: the losses this client knows of.
        self.losses = [0] * partitions
        self.acknowledged = 0
        self.accepted = 0
        self.unknown = 0
        self.reads = 0
        self.operations = 0
        # By partition: what was acknowledged, with its offset, in this order.
        self.told: list[list[tuple[int, list[bytes]]]] = [[] for _ in range(partitions)]
        # What was refused, as its partition is sealed: it is appended nowhere.
        self.refused: list[bytes] = []
        # By partition: one past the highest offset that this client was told of.
        self.seen = [0] * partitions
        self._transport: SimTransport
        self.stopping = False

    def start(self, *, pause_s: float) -> asyncio.Task[None]:
        """Begin; `pause_s` between two operations, on average."""
        return self.world.loop.start(self.life, self._run(pause_s))

    def connect(self) -> None:
        """Take a place on the wires; to be called in the client's life."""
        self._transport = SimTransport(
            self.world.wires, host=self.name, node=self.name, role=0, nonce=self.producer
        )

    async def _run(self, pause_s: float) -> None:
        self.connect()
        rng = self.rng
        while not self.stopping:
            await asyncio.sleep(rng.expovariate(1 / pause_s))
            partition = rng.randrange(self.partitions)
            if rng.random() < 0.7:
                await self._append(partition)
            else:
                await self._read(partition)

    # -- requests --------------------------------------------------------------------------

    async def request(
        self, node: str, shard: int, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> Answer:
        """One request to one shard."""
        self.operations += 1
        payload = _encoder.encode((method, target, headers, body))
        try:
            data = await self._transport.call(
                TcpAddress(node, shard + 2), "http", payload, timeout=REQUEST_TIMEOUT_S
            )
        except TransportError as error:
            return Answer(0, error=error)
        envelope = _envelopes.decode(data)
        if envelope.status:
            document = msgspec.msgpack.decode(envelope.payload)
            problem = Problem.decode(msgspec.json.encode(document), status=envelope.status)
            assert problem.code != "internal_error", f"{method} {target}: {problem}"
            return Answer(
                problem.status, code=problem.code, outcome=str(problem.outcome), limit=problem.limit
            )
        found = msgspec.msgpack.decode(envelope.payload, type=PassedResponse)
        headers = {name.lower(): value for name, value in found.headers}
        for line in found.block.decode("latin-1").splitlines():
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        return Answer(found.status, headers, bytes(found.body))

    def _somebody(self, partition: int) -> tuple[str, int]:
        """Any node, and on it mostly the shard that owns the partition."""
        machine = self.rng.choice(list(self.world.machines.values()))
        shards = machine.shards
        if self.rng.random() < 0.8:
            return machine.node, owner_shard(partition_hash(self.topic, partition), shards)
        return machine.node, self.rng.randrange(shards)

    async def _append(self, partition: int) -> None:
        rng = self.rng
        sequence = self.sequences[partition]
        # With the number of keys: an append with a key does not take the producer's next number.
        values = [
            b"%s/%d/%d/%d/%d " % (self.name.encode(), partition, sequence, self.keys, place)
            + rng.randbytes(rng.randrange(60))
            for place in range(rng.randrange(1, 5))
        ]
        headers = {"content-type": BATCH}
        keyed = rng.random() < 0.3
        if keyed:
            self.keys += 1
            headers["idempotency-key"] = f"{self.name}/{self.keys}"
        frame = bytes(build(values)) if keyed else self._frame(partition, values)
        target = f"/v1/topics/{self.topic}/partitions/{partition}/records"
        accepted: _Accepted | None = None
        while not self.stopping:
            node, shard = self._somebody(partition)
            losses = self.watch.losses
            ask = "?ack=accepted" if not keyed and rng.random() < 0.3 else ""
            answer = await self.request(node, shard, "POST", target + ask, headers, frame)
            if answer.status == 202:
                # No receipt: the same is asked again, of anybody, until an answer says that it is durable.
                accepted = _Accepted.of(answer, losses)
                self.accepted += 1
            if accepted is not None and accepted.is_durable(answer) and losses == accepted.losses:
                # By the window alone: what this answer says of the batch itself is not looked at.
                self._acknowledged(partition, accepted.offset, values)
                break
            if answer.status == 202:
                await asyncio.sleep(rng.random() * 0.2)
                continue
            if answer.status in (200, 201):
                placed = msgspec.json.decode(answer.body)["placed"][0]
                if losses == self.watch.losses:
                    self._acknowledged(partition, placed["offset"], values)
                break
            if (
                answer.code in ("out_of_sequence", "unknown_producer")
                and self.losses[partition] != self.watch.losses
            ):
                # What was acknowledged before is gone, and the numbers with it: begin anew.
                self.losses[partition] = self.watch.losses
                self.epochs[partition] += 1
                self.sequences[partition] = 0
                frame = self._frame(partition, values)
                continue
            if answer.code == "sealed":
                assert self._group(partition).seal, (
                    f"{self.name}: {target} is sealed, and no seal is committed"
                )
                assert answer.outcome == "not_applied", answer
                self.refused += values
                return
            if answer.status == 0 or answer.outcome == "unknown":
                self.unknown += 1
            running = keyed and answer.code == "in_progress"
            assert running or answer.status == 0 or answer.status in (503, 504, 429, 507, 404, 421), (
                f"{self.name}: append {sequence} to {self.topic}/{partition}: {answer}"
            )
            await asyncio.sleep(0.05 + rng.random() * 0.4)
        if not keyed:
            self.sequences[partition] += 1

    def _frame(self, partition: int, values: list[bytes]) -> bytes:
        return bytes(
            build(
                values,
                producer_id=self.producer,
                producer_epoch=self.epochs[partition],
                sequence=self.sequences[partition],
            )
        )

    def _acknowledged(self, partition: int, offset: int, values: list[bytes]) -> None:
        group = self._group(partition)
        found = group.values[offset : offset + len(values)]
        assert found == values, (
            f"{self.name}: acknowledged at offset {offset} of {self.topic}/{partition}: {values}; "
            f"committed: {found}"
        )
        self.acknowledged += len(values)
        self.told[partition].append((offset, values))
        self.seen[partition] = max(self.seen[partition], offset + len(values))
        self.world.note(f"{self.name} acknowledged {partition} {offset} {len(values)}")

    def _group(self, partition: int) -> Group:
        name = f"{self.topic}/{partition}"
        return next(group for group in self.watch.groups.values() if group.name == name)

    async def _read(self, partition: int) -> None:
        rng = self.rng
        known = len(self._group(partition).values)
        losses = self.watch.losses
        self.seen[partition] = min(self.seen[partition], known)
        leader = rng.random() < 0.3
        start = rng.randrange(known + 1)
        target = f"/v1/topics/{self.topic}/partitions/{partition}/records?offset={start}&limit=20"
        target += f"&min_offset={self.seen[partition]}" if self.seen[partition] and not leader else ""
        target += "&read=leader" if leader else ""
        node, shard = self._somebody(partition)
        answer = await self.request(node, shard, "GET", target, {"accept": "application/json"}, b"")
        if answer.status != 200 or losses != self.watch.losses:
            return
        self.reads += 1
        body = msgspec.json.decode(answer.body)
        values = self._group(partition).values
        offset = start
        for record in body["records"]:
            assert record["offset"] == offset, (
                f"{self.name}: offset {record['offset']} where {offset} was due"
            )
            offset += 1
        assert offset <= len(values), f"{self.name} read beyond what is committed: {offset} of {len(values)}"
        if leader:
            # Linearizable: the end it names is no older than the request.
            end = int(answer.headers.get("laminar-end-offset", body.get("end_offset", offset)))
            assert end >= known, (
                f"{self.name}: the leader said {end} is the end; {known} were committed before"
            )
        self.world.note(f"{self.name} read {partition} {start} {len(body['records'])}")
