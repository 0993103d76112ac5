"""Clients of a cluster under faults, each a process of the history: writers, followers, askers of leaders.

Writers go through the client library and its idempotent producer, as a user would. Followers and askers
speak plain HTTP to one node at a time, so that what a node says is seen as it says it. All values are
unique: a key of the writer's own and a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import laminar
from laminar.client.errors import Error
from laminar.client.net.pool import Pool
from laminar.http.client.connection import head_bytes
from laminar.http.protocol.answer import Answer, ConnectionFailed, Target
from tests.checkers import History, Operation

# A node that stands still for 10 s still gets to answer those that asked it meanwhile.
ASK_TIMEOUT_S = 15.0


def now_us() -> int:
    """The clock of histories."""
    return time.monotonic_ns() // 1_000


class Workload:
    """All clients of one run over some topics of `partitions` each. Use `run` for the time of the faults."""

    def __init__(
        self,
        history: History,
        urls: Sequence[str],
        topics: Sequence[str],
        *,
        partitions: int,
        writers: int = 24,
        appends_per_s: float = 100.0,
        readers: int = 2,
        padding_bytes: int = 100,
        tags: Sequence[str] = (),
        ask_pause_s: float = 0.04,
        seed: int = 0,
    ) -> None:
        """`tags`: each record has one of them, by number. `ask_pause_s`: between an asker's questions."""
        self.history = history
        self.followers = [f"reader-{number + 1}" for number in range(readers)]
        self.acknowledged = 0
        self._urls = list(urls)
        self._topics = list(topics)
        self._partitions = partitions
        self._writers = writers
        self._appends_per_s = appends_per_s
        self._rng = random.Random(seed)
        # Behind each value, so that files grow; histories do without.
        self._padding = b" " * padding_bytes
        self._tags = tags
        self._ask_pause_s = ask_pause_s
        self._writing = True
        self._following = True
        self._asking = True
        self._tasks: list[asyncio.Task[None]] = []
        self._writer_tasks: list[asyncio.Task[None]] = []
        self._next: dict[tuple[str, str, int], int] = {}
        self._shards: dict[tuple[str, int], dict[str, str]] = {}
        self._probers: dict[str, laminar.aio.Producer[bytes]] = {}
        self._probes = 0
        self._sent: dict[int, Operation] = {}
        self._changed = asyncio.Event()
        self._open = contextlib.AsyncExitStack()
        self._pool = Pool(asyncio.get_running_loop(), connect_timeout_s=2.0, idle_s=20.0)

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; a failure of a client shows in `check_alive` and at the end."""
        await self.find_shards()
        clients = [
            await self._open.enter_async_context(laminar.aio.connect(self._urls, timeout=30.0))
            for _ in range(3)
        ]
        for topic in self._topics:
            producer = clients[0].topic(topic).producer()
            self._probers[topic] = await self._open.enter_async_context(_Abandoned(producer))
        for number in range(self._writers):
            topic = self._topics[number % len(self._topics)]
            writer = self._write(clients[number % len(clients)], topic, f"w{number}")
            self._writer_tasks.append(asyncio.create_task(writer))
        for topic in self._topics:
            for partition in range(self._partitions):
                for follower in self.followers:
                    self._tasks.append(asyncio.create_task(self._follow(follower, topic, partition)))
        for node in range(len(self._urls)):
            self._tasks.append(asyncio.create_task(self._ask_leaders(node)))

    def check_alive(self) -> None:
        """Raise what ended a client, if anything did."""
        for task in [*self._writer_tasks, *self._tasks]:
            if task.done():
                task.result()

    async def more(self, count: int, *, timeout_s: float = 180.0) -> None:
        """Wait until so many more records are acknowledged."""
        goal = self.acknowledged + count
        async with asyncio.timeout(timeout_s):
            while self.acknowledged < goal:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 1.0)
                self.check_alive()

    async def finish_writing(self) -> None:
        """No new record; every record that was sent has its answer, or is given up."""
        self._writing = False
        await asyncio.gather(*self._writer_tasks)

    async def drain(self, *, timeout_s: float = 60.0) -> None:
        """Read everything, and let the followers get as far; then end all clients."""
        self._asking = False
        ends = {}
        for topic in self._topics:
            for partition in range(self._partitions):
                ends[topic, partition] = await self._read_all(topic, partition, timeout_s=timeout_s)
        wanted = {(reader, *place): end for place, end in ends.items() for reader in self.followers}
        deadline = time.monotonic() + timeout_s
        while any(self._next.get(place, 0) < end for place, end in wanted.items()):
            if time.monotonic() >= deadline:
                break  # what a follower has not seen is a finding of the checkers
            await asyncio.sleep(0.05)
        self._following = False
        await self.close()

    async def close(self) -> None:
        """End all clients, whatever they do. Idempotent."""
        for task in [*self._writer_tasks, *self._tasks]:
            task.cancel()
        await asyncio.gather(*self._writer_tasks, *self._tasks, return_exceptions=True)
        for operation in list(self._sent.values()):
            operation.outcome = "unknown"
            self._note_sent(operation)
        await self._open.aclose()
        await self._pool.close()

    # -- clients -------------------------------------------------------------------------------

    async def _write(self, client: laminar.aio.Client, topic: str, name: str) -> None:
        """Bursts of records of one key; after a failure another producer with another key."""
        rng = random.Random(self._rng.random())
        generation = 0
        while self._writing:
            with contextlib.suppress(Error):  # each record's own answer is in the history
                async with client.topic(topic).producer() as producer:
                    number = 0
                    while self._writing:
                        burst = range(number, number + rng.randint(1, 3))
                        if not await self._send(producer, topic, f"{name}.{generation}", burst):
                            break
                        number = burst.stop
                        # Half as often as records are wanted: a burst has two on average.
                        await asyncio.sleep(rng.expovariate(self._appends_per_s / self._writers / 2))
            generation += 1
            if self._writing:
                await asyncio.sleep(0.2)

    async def _send(
        self, producer: laminar.aio.Producer[bytes], topic: str, key: str, numbers: range
    ) -> bool:
        """Records one behind the other without waiting, then their answers; whether all were good."""
        sent = []
        good = True
        for number in numbers:
            operation = Operation(
                kind="append",
                process=key.partition(".")[0],
                topic=topic,
                key=key,
                number=number,
                start_us=now_us(),
            )
            try:
                value = operation.value.encode() + self._padding
                delivery = producer.send(value, key=key, tag=tag_of(number, self._tags))
                sent.append((operation, delivery))
            except Error as error:
                self._failed(operation, error)
                good = False
                break
        self._sent |= {id(operation): operation for operation, _ in sent}
        for operation, delivery in sent:
            try:
                receipt = await delivery
            except Error as error:
                self._failed(operation, error)
                good = False
                continue
            operation.end_us = now_us()
            operation.partition, operation.offset = receipt.partition, receipt.offset
            self._note_sent(operation)
            self.acknowledged += 1
            self._changed.set()
        return good

    async def probe(self, topic: str, partition: int) -> None:
        """One append, begun now: how long does it take?"""
        self._probes += 1
        operation = Operation(
            kind="append",
            process="prober",
            topic=topic,
            key=f"probe{partition}",
            number=self._probes,
            start_us=now_us(),
        )
        self._sent[id(operation)] = operation
        try:
            value = operation.value.encode() + self._padding
            receipt = await self._probers[topic].send(
                value, key=operation.key, tag=tag_of(self._probes, self._tags), partition=partition
            )
        except Error as error:
            self._failed(operation, error)
            return
        operation.end_us = now_us()
        operation.partition, operation.offset = receipt.partition, receipt.offset
        self._note_sent(operation)
        self.acknowledged += 1

    def _note_sent(self, operation: Operation) -> None:
        self._sent.pop(id(operation), None)
        self.history.add(operation)

    def _failed(self, operation: Operation, error: Error) -> None:
        refused = error.outcome == "not_applied"
        operation.outcome = "fail" if refused else "unknown"
        operation.end_us = now_us() if refused else None
        operation.error = f"{error.code}: {error.message}"[:200]
        self._note_sent(operation)

    async def _follow(self, process: str, topic: str, partition: int) -> None:
        """Polls any node for what comes next."""
        rng = random.Random(self._rng.random())
        place = (process, topic, partition)
        self._next[place] = 0
        while self._following:
            url = rng.choice(self._urls)
            path = f"/v1/topics/{topic}/partitions/{partition}/records"
            start_us = now_us()
            answer = await self._get(url, f"{path}?offset={self._next[place]}&wait_ms=500&limit=200", 3.0)
            if answer is None or answer.status != 200:
                self._note_end(process, topic, partition, url, start_us, answer)
                await asyncio.sleep(0.1)
                continue
            records = answer.json()["records"]
            if records:
                values = _values(records)
                self.history.add(
                    Operation(
                        kind="poll",
                        process=process,
                        topic=topic,
                        partition=partition,
                        start_us=start_us,
                        end_us=now_us(),
                        offset=self._next[place],
                        values=values,
                        node=answer.headers.get("laminar-node", url),
                    )
                )
                self._next[place] = values[-1][0] + 1
            # Not as fast as it can: several records a poll, and time for others on this machine.
            await asyncio.sleep(rng.uniform(0.05, 0.3))

    def _note_end(
        self, process: str, topic: str, partition: int, url: str, start_us: int, answer: Answer | None
    ) -> None:
        """A leader that denies what the follower asks for says where the partition ends: a leader read."""
        if answer is not None and answer.json().get("code") == "offset_beyond_end":
            self._note_read(process, topic, partition, url, start_us, int(answer.json()["limit"]))

    def _note_read(
        self, process: str, topic: str, partition: int, node: str, start_us: int, end_offset: int
    ) -> None:
        self.history.add(
            Operation(
                kind="read",
                process=process,
                topic=topic,
                partition=partition,
                start_us=start_us,
                end_us=now_us(),
                end_offset=end_offset,
                node=node,
            )
        )

    async def find_shards(self) -> None:
        """At which URL each host's replicas are. Not by node: a host may come back under another name."""
        for topic in self._topics:
            for url in self._urls:
                answer = await self._get(url, f"/v1/topics/{topic}/partitions", 3.0)
                if answer is None or answer.status != 200:
                    continue
                for partition in answer.json()["partitions"]:
                    self._shards[topic, int(partition["partition"])] = {
                        host_of(each["url"]): each["url"] for each in partition["replicas"]
                    }
                break

    async def _ask_leaders(self, node: int) -> None:
        """Asks one node about each partition in turn; it answers itself or not at all."""
        while self._asking:
            for topic in self._topics:
                for partition in range(self._partitions):
                    await self.ask_leader(node, topic, partition)
                    await asyncio.sleep(self._ask_pause_s)

    async def ask_leader(self, node: int, topic: str, partition: int) -> bool:
        """One `leader` read at one node; whether it answered as a leader."""
        url = self._shards.get((topic, partition), {}).get(host_of(self._urls[node]))
        if url is None:
            return False
        path = f"/v1/topics/{topic}/partitions/{partition}/records?read=leader&offset=latest&limit=1"
        start_us = now_us()
        answer = await self._get(url, path, ASK_TIMEOUT_S, local=True)
        if answer is None or answer.status != 200:
            return False
        end = int(answer.headers["laminar-end-offset"])
        self._note_read(f"asker-{node + 1}", topic, partition, f"node-{node + 1}", start_us, end)
        return True

    async def _read_all(self, topic: str, partition: int, *, timeout_s: float) -> int:
        """The final reading of a partition, as its leader has it; where it ends."""
        offset = 0
        deadline = time.monotonic() + timeout_s
        while True:
            path = f"/v1/topics/{topic}/partitions/{partition}/records?read=leader&offset={offset}"
            start_us = now_us()
            answer = await self._get(self._rng.choice(self._urls), path, 10.0)
            if answer is None or answer.status != 200:
                if time.monotonic() >= deadline:
                    told: Any = bytes(answer.body) if answer is not None else "nothing"
                    raise TimeoutError(f"{topic}/{partition} from {offset} on: {told!r} after {timeout_s} s")
                await asyncio.sleep(0.1)
                continue
            records = answer.json()["records"]
            self.history.add(
                Operation(
                    kind="final",
                    process="final",
                    topic=topic,
                    partition=partition,
                    start_us=start_us,
                    end_us=now_us(),
                    offset=offset,
                    values=_values(records),
                    node=answer.headers.get("laminar-node", ""),
                )
            )
            offset = int(answer.headers["laminar-next-offset"])
            if offset >= int(answer.headers["laminar-end-offset"]):
                return offset

    async def _get(self, url: str, path: str, timeout_s: float, *, local: bool = False) -> Answer | None:
        headers = {"Laminar-Local": "1"} if local else {}
        head = head_bytes("GET", path, Target.of(url).authority, headers)
        try:
            return await self._pool.ask(url, head, timeout_s=timeout_s)
        except (ConnectionFailed, OSError, TimeoutError):
            return None


class _Abandoned:
    """A producer that is left without waiting for what it still has to say."""

    def __init__(self, producer: laminar.aio.Producer[bytes]) -> None:
        self._producer = producer

    async def __aenter__(self) -> laminar.aio.Producer[bytes]:
        return await self._producer.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Error):
            await self._producer.__aexit__(None, None, None)


def tag_of(number: int, tags: Sequence[str]) -> str | None:
    """Return the tag of a record by its number; None without any tags."""
    return tags[number % len(tags)] if tags else None


def host_of(url: str) -> str:
    """`http://10.77.1.2:7070` without its port."""
    return url.rpartition(":")[0]


def _values(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return [(int(each["offset"]), str(each["value"]).rstrip()) for each in records]
