"""A cluster in memory behind real sockets, with faults on order: what the client's tests talk to.

It keeps the promises of docs/protocol.md that the client relies on (sequences, 307, committed
reads) and none of the machinery behind them. The real cluster's tests are in tests/cluster.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from laminar.batch import Header, split, stamp, verify
from laminar.wire.key_route import Route

FakeAnswer = tuple[int, dict[str, str], bytes]


@dataclass
class FakePartition:
    """One partition's truth, shared by all fake nodes; ``ends`` is how far each node got."""

    leader: int
    frames: list[bytes] = field(default_factory=list)
    end: int = 0
    start: int = 0
    producers: dict[bytes, tuple[int, int, dict[int, tuple[int, int]]]] = field(default_factory=dict)
    lag: dict[int, int] = field(default_factory=dict)  # node -> records it is behind
    term: int = 1
    committed: int = 0  # batches
    sealed: int = 0  # the version of the route that follows; 0: it takes records
    checkpoints: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def append(self, frame: bytes) -> tuple[int, str | dict[str, Any]]:
        """(200, (offset, count)) or (409, code), by the rules of node/partition/state/producers.py."""
        header = verify(frame)
        epoch, expected, known = self.producers.get(header.producer_id, (0, 0, {}))
        if header.producer_id != bytes(16):
            if header.producer_epoch > epoch:
                epoch, expected, known = header.producer_epoch, 0, {}
            elif header.producer_epoch < epoch:
                return 409, "fenced"
            if header.sequence < expected:
                offset, count = known[header.sequence]
                return 200, {"offset": offset, "count": count}
            if self.sealed:
                return 409, "sealed"
            if header.sequence > expected:
                return 409, "sequence_gap"
            known[header.sequence] = (self.end, header.count)
            self.producers[header.producer_id] = (epoch, expected + 1, known)
            checkpoint, floor = self.checkpoints.get(header.producer_id, (0, 0))
            self.checkpoints[header.producer_id] = (
                max(checkpoint, header.checkpoint),
                max(floor, header.floor),
            )
        if self.sealed:
            return 409, "sealed"
        stamped = bytearray(frame)
        index = len(self.frames) + 1
        stamp(
            stamped,
            index=index,
            term=1,
            prev_term=0 if index == 1 else 1,
            base_offset=self.end,
            append_time_ms=1_700_000_000_000 + index,
            committed_index=index - 1,
        )
        self.frames.append(bytes(stamped))
        placed = {"offset": self.end, "count": header.count}
        self.end += header.count
        return 200, placed

    @property
    def committed_end(self) -> int:
        """The offset behind what is committed."""
        return Header.unpack(self.frames[self.committed - 1]).next_offset if self.committed else 0

    def depose(self) -> None:
        """Another leader, in a new term, without what was not committed."""
        frames, self.frames = self.frames[: self.committed], []
        epochs = {producer: epoch for producer, (epoch, _, _) in self.producers.items()}
        self.end, self.producers, self.checkpoints = 0, {}, {}
        for frame in frames:
            self.append(frame)
        for producer, epoch in epochs.items():
            self.begin(producer, epoch)
        self.term += 1

    def begin(self, producer: bytes, epoch: int) -> bool:
        """An epoch, as a fence; False if it is over already."""
        known = self.producers.get(producer, (0, 0, {}))[0]
        if not self.sealed and (epoch > known or producer not in self.producers):
            self.producers[producer] = epoch, 0, {}
        return epoch >= known


def _range(number: int, held: range) -> dict[str, int]:
    return {"from": held.start, "to": held.stop, "partition": number}


async def _close_server(server: asyncio.Server) -> None:
    """Close a server that accepts nothing any more.

    asyncio leaks the socket of a connection that it accepts in the turn in which its server closes: the
    transport asserts that the server is open, after it has taken the socket.
    """
    for socket in server.sockets:
        asyncio.get_running_loop().remove_reader(socket.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    server.close()


class FakeCluster:
    """`nodes` listening nodes and their topics, on a loop and a thread of its own."""

    def __init__(self, nodes: int = 3) -> None:
        self.urls: list[str] = []
        self.topics: dict[str, list[FakePartition]] = {}
        self.routes: dict[str, Route] = {}
        self.changes: dict[str, list[dict[str, Any]]] = {}
        # What is true after these many further answers to `routes`: until then they are of the route before.
        self.late_routes = 0
        self.late_partitions = 1
        self.cursors: dict[tuple[str, str], dict[str, int]] = {}
        # Consumed by appends, one each: refuse, drop (before), lose (after), gone (307), unknown, or None.
        self.append_faults: deque[str | None] = deque()
        # What requests about sinks get, one each and the last for ever: status and document; None: no answer.
        self.sink_answers: deque[tuple[int, dict[str, Any]] | None] = deque()
        self.requests: list[tuple[int, str, str]] = []  # node, method, target
        self.leaderless = False
        self.named: dict[str, int] = {}
        self.probes = 0
        self.holes: set[tuple[int, int]] = set()  # node, first offset of a batch that it passes over
        # Called with each fetch's node, partition and query; what it returns is answered instead. With a
        # header "Cut" the connection ends in the middle of the body.
        self.on_fetch: Callable[[int, FakePartition, dict[str, str]], FakeAnswer | None] = lambda *_: None
        self.silent: set[int] = set()  # nodes that read requests and answer none
        self._count = nodes
        self._servers: list[asyncio.Server] = []
        self._writers: dict[int, set[asyncio.StreamWriter]] = {node: set() for node in range(nodes)}
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def create(self, topic: str, partitions: int) -> None:
        self.topics[topic] = [FakePartition(leader=number % self._count) for number in range(partitions)]
        self.routes[topic] = Route.even(partitions)
        self.changes[topic] = []

    def change(self, topic: str, *inputs: int, parts: int = 1, order: str = "strict") -> list[int]:
        """End neighbouring partitions, and return those that follow them: `parts` of one size."""
        partitions, before = self.topics[topic], self.routes[topic]
        held = before.ranges()
        first, end = held[inputs[0]].start, held[inputs[-1]].stop
        size = (end - first) // parts
        outputs = list(range(len(partitions), len(partitions) + parts))
        starts = [first + size * part for part in range(parts)]
        ranges = {number: each for number, each in held.items() if number not in inputs}
        for number, start, stop in zip(outputs, starts, [*starts[1:], end], strict=True):
            ranges[number] = range(start, stop)
            partitions.append(FakePartition(leader=number % self._count))
        version = before.version + 1
        for number in inputs:
            partitions[number].sealed = version
        shown = [_range(number, each) for number, each in ranges.items()]
        self.routes[topic] = Route.of_ranges(version, shown)
        self.changes[topic].append(
            {
                "id": version,
                "version": version,
                "order": order,
                "state": "done",
                "inputs": [
                    {**_range(number, held[number]), "end": partitions[number].end, "reclaimed": False}
                    for number in inputs
                ],
                "outputs": [_range(number, ranges[number]) for number in outputs],
            }
        )
        return outputs

    def values(self, topic: str, partition: int) -> list[bytes]:
        """Everything the partition holds, in order."""
        from laminar.batch import Batch

        return [value for frame in self.topics[topic][partition].frames for value in Batch(frame).values]

    def kill(self, node: int) -> None:
        """Close a node's listener and connections; its partitions get the next node as leader."""

        async def run() -> None:
            await _close_server(self._servers[node])
            for writer in list(self._writers[node]):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)
        for partitions in self.topics.values():
            for partition in partitions:
                if partition.leader == node:
                    partition.leader = (node + 1) % self._count

    async def _listen(self) -> None:
        for node in range(self._count):
            server = await asyncio.start_server(partial(self._serve, node), "127.0.0.1", 0)
            self._servers.append(server)
            self.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    async def _close(self) -> None:
        for server in self._servers:
            await _close_server(server)
        # Also tasks of connections that are just accepted: a socket that is left open fails the test.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._serving:
                task.cancel()  # a long poll would wait for its time
            await asyncio.wait(tasks)
        for _ in range(3):
            await asyncio.sleep(0)  # the transports' own last callbacks

    async def _serve(self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[node].add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append((node, method, target))
                answer = await self._answer(node, method, target, headers, body)
                if answer is None:
                    writer.transport.abort()
                    return
                status, extra, content = answer
                topic = target.split("/")[3] if target.startswith("/v1/topics/") else ""
                if topic in self.routes:
                    extra = {"Laminar-Route": str(self.routes[topic].version), **extra}
                extra = {"Laminar-Node": f"n{node}", **extra}
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
                lines += [f"{name}: {value}" for name, value in extra.items()]
                sent = content[: len(content) // 2] if "Cut" in extra else content
                writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + sent)
                await writer.drain()
                if "Cut" in extra:
                    writer.close()
                    await writer.wait_closed()
                    return
                if extra.get("Connection") == "close":
                    writer.close()
                    await writer.wait_closed()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            self._writers[node].discard(writer)
            self._serving.discard(task)

    async def _answer(
        self, node: int, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes] | None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = [unquote(each) for each in parts.path.split("/")[1:]]
        while node in self.silent:  # noqa: ASYNC110  # the test is on another loop, and another thread
            await asyncio.sleep(0.005)
        if path == ["v1", "cluster"]:
            return _json(200, {"nodes": [{"node": f"n{i}", "url": url} for i, url in enumerate(self.urls)]})
        if path == ["v1", "topics"]:
            return _json(200, {"topics": [{"topic": name} for name in sorted(self.topics)], "next": None})
        if path == ["v1", "producers"]:
            name = json.loads(body)["name"]
            self.named[name] = self.named.get(name, 0) + 1
            return _json(201, {"producer": name.encode().hex().ljust(32, "0"), "epoch": self.named[name]})
        if path[:2] == ["v1", "sinks"]:
            told = self.sink_answers.popleft() if len(self.sink_answers) > 1 else self.sink_answers[0]
            return None if told is None else _json(*told)
        if path[:2] != ["v1", "topics"]:
            return problem(404, "not_found")
        topic, rest = path[2], path[3:]
        if not rest:
            return self._topic(method, topic, headers, body)
        if topic not in self.topics:
            return problem(404, "not_found", detail=f"there is no topic {topic}")
        if rest == ["partitions"]:
            route = self.routes[topic]
            rows = [self._row(topic, number) for number in range(len(self.topics[topic]))]
            shown = route.answer()["ranges"]
            created_with = min([len(rows), *(out["partition"] for out in self._first_outputs(topic))])
            return _json(
                200,
                {
                    "partitions": rows,
                    "route": route.version,
                    "ranges": shown,
                    "created_with": created_with,
                },
            )
        if rest == ["routes"]:
            if self.late_routes and self.changes[topic]:
                self.late_routes -= 1
                return _json(200, {"routes": [Route.even(self.late_partitions).answer()]})
            return _json(
                200, {"routes": [self.routes[topic].answer()], "changes": self.changes[topic], "change": None}
            )
        if rest[0] == "cursors":
            return self._cursor(method, topic, rest[1:], body)
        partition = self.topics[topic][int(rest[1])]
        if rest[2] == "offsets":
            end = partition.end
            if query.get("read") == "replica":
                end -= partition.lag.get(node, 0)
            elif self.leaderless:
                return problem(503, "no_leader")
            place = partition.start if query["at"] == "earliest" else end
            return _json(200, {"offset": place, "end_offset": end})
        if rest[2] == "producers":
            return self._producer(method, partition, bytes.fromhex(rest[3]), int(query["epoch"]))
        if method == "POST":
            return self._append(node, topic, int(rest[1]), partition, body, accepts="ack" in query)
        return await self._fetch(node, partition, query)

    def _topic(
        self, method: str, topic: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        known = self.topics.get(topic)
        if method == "PUT":
            wanted = json.loads(body).get("partitions", 1)
            if known is not None:
                return _json(200, {}) if len(known) == wanted else problem(409, "already_exists")
            self.create(topic, wanted)
            return _json(201, {})
        if known is None:
            return problem(404, "not_found")
        if method == "DELETE":
            if headers.get("if-match") != '"1"':
                return problem(428, "if_match_required")
            del self.topics[topic]
            return _json(202, {})
        status, extra, content = _json(200, {"topic": topic, "partitions": len(known), "replicas": 3})
        return status, {**extra, "ETag": '"1"'}, content

    def _first_outputs(self, topic: str) -> list[dict[str, int]]:
        return self.changes[topic][0]["outputs"] if self.changes[topic] else []

    def _row(self, topic: str, number: int) -> dict[str, Any]:
        partition = self.topics[topic][number]
        replicas = [
            {"node": f"n{i}", "url": url, "role": "follower", "in_sync": True}
            for i, url in enumerate(self.urls)
        ]
        leader = {"node": f"n{partition.leader}", "url": self.urls[partition.leader]}
        return {
            "partition": number,
            "leader": None if self.leaderless else leader,
            "replicas": replicas,
            "term": 1,
            "start_offset": partition.start,
            "end_offset": partition.end,
        }

    def _producer(
        self, method: str, partition: FakePartition, producer: bytes, epoch: int
    ) -> tuple[int, dict[str, str], bytes]:
        """A fence, or a probe that waits: then all is committed."""
        if method == "PUT":
            if not partition.begin(producer, epoch):
                return problem(409, "fenced")
        else:
            self.probes += 1
        partition.committed = len(partition.frames)
        checkpoint, floor = partition.checkpoints.get(producer, (0, 0))
        said = {"checkpoint": checkpoint, "floor": floor, "sealed": partition.sealed > 0}
        status, headers, content = _json(200, said)
        window = {"Laminar-Term": str(partition.term), "Laminar-Committed": str(partition.committed_end)}
        return status, headers | window, content

    def _append(
        self, node: int, topic: str, number: int, partition: FakePartition, body: bytes, *, accepts: bool
    ) -> tuple[int, dict[str, str], bytes] | None:
        if self.leaderless:
            return problem(503, "no_leader")
        if node != partition.leader:
            location = f"{self.urls[partition.leader]}/v1/topics/{topic}/partitions/{number}/records"
            return 307, {"Location": location, "Connection": "close"}, b""
        fault = self.append_faults.popleft() if self.append_faults else None
        if fault == "drop":
            return None
        if fault == "refuse":
            return problem(503, "overloaded", retry_after_ms=1)
        if fault == "reject":
            return problem(422, "invalid", outcome="not_applied", detail="not this one")
        if fault == "move":
            partition.leader = (partition.leader + 1) % self._count
            return problem(503, "not_leader")
        if fault == "depose":
            partition.depose()
        frames = split(body)
        assert len(frames) == 1, "the client sends one batch a request"
        status, result = partition.append(bytes(frames[0]))
        if fault == "lose":
            return None
        if fault == "unknown":
            return problem(504, "outcome_unknown", outcome="unknown")
        if status != 200:
            more = {"limit": partition.sealed, "outcome": "not_applied"} if result == "sealed" else {}
            return problem(status, str(result), **more)
        assert isinstance(result, dict)
        if accepts:
            # All but the two newest batches are on other nodes too by now.
            partition.committed = max(partition.committed, len(partition.frames) - 2)
            return _json(
                202,
                {
                    "durable": False,
                    "partition": number,
                    **result,
                    "term": partition.term,
                    "committed": partition.committed_end,
                    "when_durable": {"replicas": 3, "synced": True},
                },
            )
        return _json(
            200,
            {
                "appended": result["count"],
                "placed": [{"partition": number, **result}],
                "durable": {"replicas": 3, "synced": True, "flush": "commit"},
            },
        )

    async def _fetch(
        self, node: int, partition: FakePartition, query: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        ordered = self.on_fetch(node, partition, query)
        if ordered is not None:
            return ordered
        asked = query["offset"]
        places = {"earliest": partition.start, "latest": partition.end}
        offset = places[asked] if asked in places else int(asked)
        if query.get("read") == "leader":
            if self.leaderless:
                return problem(503, "no_leader")
            node = partition.leader  # whoever is asked passes it on
        end = partition.end - partition.lag.get(node, 0)
        if offset < partition.start:
            return problem(410, "offset_expired", earliest=partition.start)
        if query.get("read") == "leader" and offset > partition.end:
            return problem(416, "offset_beyond_end", limit=partition.end)
        if int(query.get("min_offset", 0)) > end:
            return problem(503, "replica_lagging")
        for _ in range(int(query.get("wait_ms", 0)) // 5):
            end = partition.end - partition.lag.get(node, 0)
            if end > offset or partition.sealed:
                break
            await asyncio.sleep(0.005)
        found: list[bytes] = []
        size = 0
        for frame in partition.frames:
            header = Header.unpack(frame)
            if (node, header.base_offset) in self.holes:
                continue
            if header.next_offset <= offset or header.next_offset > end:
                continue
            if found and size + len(frame) > int(query["max_bytes"]):
                break
            found.append(frame)
            size += len(frame)
        headers = {
            "Laminar-End-Offset": str(end),
            "Laminar-Offset": str(offset),
            "Laminar-Node": f"n{node}",
        }
        if partition.sealed and end == partition.end:
            headers["Laminar-Sealed"] = str(end)
        return 200, headers, b"".join(found)

    def _cursor(
        self, method: str, topic: str, rest: list[str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if not rest:
            return _json(200, {"cursors": [{"cursor": c} for t, c in self.cursors if t == topic]})
        key = (topic, rest[0])
        known = self.cursors.get(key, {})
        if method == "PUT":
            asked = json.loads(body)
            expected = asked.get("expected")
            moved = [each for each in asked["positions"] if known.get(each) != (expected or {}).get(each)]
            if expected is not None and moved:
                return problem(412, "precondition_failed")
            self.cursors[key] = {**known, **asked["positions"]}
            return _json(200, {"positions": self.cursors[key]})
        if key not in self.cursors:
            return problem(404, "not_found")
        if method == "DELETE":
            del self.cursors[key]
        return _json(200, {"positions": known})


def _json(status: int, content: Any) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def problem(status: int, code: str, **more: Any) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/problem+json"}, json.dumps({"code": code, **more}).encode()


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Three fake nodes with a topic `t` of four partitions."""
    fake = FakeCluster()
    fake.start()
    fake.create("t", 4)
    yield fake
    fake.stop()
