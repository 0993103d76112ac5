"""A load that knows what it was told: numbered records per key, their receipts, and everything read back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import laminar
from laminar.client.produce.producer import Delivery
from laminar.testing.cluster import LocalCluster, get_json
from laminar.testing.history import Read, Sent, Violation, check_history, check_replicas
from tests.cluster.patience import told, until

KEYS = [f"key-{number:02d}" for number in range(24)]

# A round follows the last at once while a test waits for records, and shortly after: what a test breaks
# then, it breaks under load. At other times, as while nodes start, the load leaves the CPUs to them.
HURRY_S = 0.5
CALM_PAUSE_S = 0.1


@dataclass
class Load:
    """Sends until told to finish, through the idempotent producer, and keeps every receipt."""

    urls: list[str]
    topic: str
    acknowledged: list[Sent] = field(default_factory=list)
    uncertain: list[tuple[str, int]] = field(default_factory=list)
    _next: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KEYS, 0))
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: int = 0
    _calm_from: float = 0.0
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a failure of the load shows at the next wait."""
        self._task = asyncio.create_task(self._run())

    async def finish(self) -> None:
        """No further round; wait for the receipts of the last."""
        self._stop.set()
        assert self._task is not None
        await self._task

    async def _run(self, *, round_size: int = 200) -> None:
        """Rounds of records over all keys, each round awaited, until `finish`."""
        async with (
            laminar.aio.connect(self.urls, timeout=60.0) as client,
            client.topic(self.topic).producer() as producer,
        ):
            while not self._stop.is_set():
                sent: list[tuple[str, int, Delivery]] = []
                for turn in range(round_size):
                    key = KEYS[turn % len(KEYS)]
                    number = self._next[key]
                    self._next[key] = number + 1
                    sent.append((key, number, producer.send(f"{key} {number}".encode(), key=key)))
                for key, number, delivery in sent:
                    receipt = await delivery
                    self.acknowledged.append(Sent(key, number, receipt.partition, receipt.offset))
                self._changed.set()
                if not self._waiting and asyncio.get_running_loop().time() > self._calm_from:
                    await asyncio.sleep(CALM_PAUSE_S)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 180.0) -> None:
        """Wait until the acknowledged records satisfy a condition."""
        assert self._task is not None
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    done, _ = await asyncio.wait({changed, self._task}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if self._task in done:
                        self._task.result()
                        raise AssertionError("the load has ended")
        finally:
            self._waiting -= 1
            self._calm_from = asyncio.get_running_loop().time() + HURRY_S

    async def more(self, count: int) -> None:
        """Wait until `count` more records are acknowledged than now."""
        goal = len(self.acknowledged) + count
        await self.until(lambda: len(self.acknowledged) >= goal)


async def read_all(urls: list[str], topic: str) -> list[Read]:
    """Every record of a topic in the order of reading, with nothing removed."""
    found: list[Read] = []
    async with (
        laminar.aio.connect(urls, timeout=60.0) as client,
        client.topic(topic).read(start="earliest") as records,
    ):
        async for record in records:
            key, number = record.text.split()
            found.append(Read(record.partition, record.offset, key, int(number)))
    return found


async def violations(urls: list[str], topic: str, load: Load) -> list[Violation]:
    """What is wrong with the history, if anything."""
    return check_history(load.acknowledged, await read_all(urls, topic), uncertain=load.uncertain)


async def converged(
    cluster: LocalCluster,
    topic: str,
    partitions: int,
    *,
    replicas: int | None = None,
    timeout_s: float = 120.0,
) -> list[Violation]:
    """Wait until all replicas of each partition are as far, then compare their committed bytes.

    `replicas`: how many there are of each; as many as nodes by default.
    """
    wanted = replicas or cluster.nodes
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        digests: dict[int, dict[str, str]] = {}
        indexes: dict[int, set[int]] = {}
        listed = await asyncio.to_thread(get_json, f"{cluster.urls[0]}/v1/topics/{topic}/partitions")
        for partition in listed["partitions"] if listed else []:
            number = partition["partition"]
            for replica in partition["replicas"]:
                url = f"{replica['url']}/v1/topics/{topic}/partitions/{number}/digest"
                told = await asyncio.to_thread(get_json, url, headers={"Laminar-Local": "1"})
                if told is not None:
                    digests.setdefault(number, {})[replica["node"]] = told["digest"]
                    # Of what was digested: a replica that catches up has more by now.
                    indexes.setdefault(number, set()).add(told["to_index"])
        level = all(len(found) == 1 for found in indexes.values())
        whole = len(digests) == partitions and all(len(found) == wanted for found in digests.values())
        if level and whole:
            return check_replicas(digests)
        if loop.time() > deadline:
            raise TimeoutError(f"the replicas of {topic} are not level after {timeout_s:g} s: {indexes}")
        await asyncio.sleep(0.1)


def leaders(url: str, topic: str, *, among: Iterable[str] | None = None) -> dict[int, str]:
    """Return the name of the node that leads each partition, once one of `among` (None: any) leads each."""

    def found() -> dict[int, str]:
        rows = told(f"{url}/v1/topics/{topic}/partitions")["partitions"]
        names = {row["partition"]: row["leader"]["node"] for row in rows if row["leader"] is not None}
        fit = among is None or set(names.values()) <= set(among)
        return names if fit and len(names) == len(rows) else {}

    led: dict[int, str] = until(found, f"leaders of {topic}")
    return led


def placement(listed: dict[str, object]) -> list[object]:
    """Node and reason of each partition's replicas, of the answer that lists them."""
    partitions = listed["partitions"]
    assert isinstance(partitions, list)
    return [[(r["node"], r["reason"]) for r in partition["replicas"]] for partition in partitions]
