"""Delayed records under faults: appended, cancelled and moved while nodes fail; each comes once, none early.

Writers append records with delays to a topic of their own, beside what else a run does. Each request is sent
again, under its key, until it is known what became of it. When the faults are over and all that is pending is
due, the whole topic is read, and compared with what was answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from laminar.http.api.timestamps import parse_time

TOPIC = "later"
PARTITIONS = 3
WRITERS = 24
MOST_DELAY_MS = 20_000
CANCELS, MOVES = 0.2, 0.1
PATIENCE_S = 180.0
ENVELOPE = {"Content-Type": "application/vnd.laminar.records+json"}


@dataclass(slots=True)
class Sent:
    """A record that was taken: when it is due, at the earliest, and what was said of it last."""

    value: str
    due_ms: int
    state: str = "pending"


class Delayed:
    """The writers of one run, and what they were told."""

    def __init__(self, urls: Sequence[str], rng: random.Random) -> None:
        self.sent: list[Sent] = []
        self.happened: Counter[str] = Counter()
        self._urls = list(urls)
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._count = 0

    async def start(self) -> None:
        """Make the topic, and begin."""
        async with _client() as client:
            await self._asked(client, "PUT", "", json={"partitions": PARTITIONS, "replicas": 3})
        self._tasks = [asyncio.create_task(self._write()) for _ in range(WRITERS)]

    async def finish(self) -> None:
        """End once every request is answered. Raises what a writer raised."""
        self._ending.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End at once. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        async with _client() as client:
            while not self._ending.is_set():
                await self._one(client)
                await asyncio.sleep(self._rng.uniform(0, 0.1))

    async def _one(self, client: httpx.AsyncClient) -> None:
        self._count += 1
        value, delay_ms = f"{self._count}", self._rng.randrange(MOST_DELAY_MS)
        due_ms = _now_ms() + delay_ms
        answer = await self._asked(
            client,
            "POST",
            "/records",
            json={"value": value, "key": f"k{self._count % 50}", "deliver_at": due_ms},
            headers={**ENVELOPE, "Idempotency-Key": f"delayed-{value}"},
        )
        sent = Sent(value, due_ms)
        self.sent.append(sent)
        ids = answer.get("scheduled", [])
        self.happened["delayed" if ids else "at once"] += 1
        if not ids:
            return
        chance = self._rng.random()
        if chance < CANCELS + MOVES:
            await asyncio.sleep(self._rng.uniform(0, delay_ms / 800))
        if chance < CANCELS:
            sent.state = (await self._asked(client, "DELETE", f"/delayed/{ids[0]}"))["state"]
            self.happened[f"cancel: {sent.state}"] += 1
        elif chance < CANCELS + MOVES:
            moved_ms = _now_ms() + self._rng.randrange(MOST_DELAY_MS)
            earliest_ms = min(sent.due_ms, moved_ms)
            answer = await self._asked(client, "PATCH", f"/delayed/{ids[0]}", json={"deliver_at": moved_ms})
            self.happened[f"move: {answer['state']}"] += 1
            # A first attempt whose answer was lost may have moved it, and it is published since.
            sent.due_ms = moved_ms if answer["state"] == "pending" else earliest_ms

    async def check(self) -> list[str]:
        """Read the topic once all is due; return what is wrong."""
        last_ms = max((each.due_ms for each in self.sent), default=0)
        await asyncio.sleep(max(0.0, (last_ms - _now_ms()) / 1000))
        deadline = time.monotonic() + PATIENCE_S
        async with _client() as client:
            while (await self._asked(client, "GET", "/delayed?limit=1"))["records"]:
                if time.monotonic() > deadline:
                    return ["delayed: records are pending long after their time"]
                await asyncio.sleep(0.2)
            found: dict[str, list[int]] = {}
            for partition in range(PARTITIONS):
                await self._read(client, partition, found)
        wrong = []
        for each in self.sent:
            times = found.pop(each.value, [])
            wanted = 0 if each.state == "cancelled" else 1
            if len(times) != wanted:
                wrong.append(f"delayed: record {each.value}, {each.state}, is there {len(times)} times")
            if times and min(times) < each.due_ms:
                wrong.append(f"delayed: record {each.value} came {each.due_ms - min(times)} ms early")
        wrong += [f"delayed: record {value} was not taken, and is there" for value in found]
        self.happened["published"] = sum(each.state != "cancelled" for each in self.sent)
        return wrong

    async def _read(self, client: httpx.AsyncClient, partition: int, found: dict[str, list[int]]) -> None:
        offset = 0
        while True:
            path = f"/partitions/{partition}/records?offset={offset}&read=leader&limit=5000"
            page = await self._asked(client, "GET", path)
            for record in page["records"]:
                found.setdefault(record["value"], []).append(parse_time(record["timestamp"], field=""))
            if not page["records"]:
                return
            offset = page["next_offset"]

    async def _asked(self, client: httpx.AsyncClient, method: str, path: str, **more: Any) -> Any:
        """Return the answer of a node; send it again until there is one that says what was done."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            url = self._rng.choice(self._urls)
            try:
                answer = await client.request(method, f"{url}/v1/topics/{TOPIC}{path}", **more)
            except httpx.TransportError as error:
                told = repr(error)
            else:
                if answer.is_success:
                    return answer.json()
                told = answer.text
                if answer.status_code < 500 and answer.json()["code"] not in ("in_progress", "no_such_topic"):
                    raise RuntimeError(f"{method} {path}: {told}")
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{method} {path} after {PATIENCE_S:g} s: {told}")
            await asyncio.sleep(0.1)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=15.0, trust_env=False)
