"""Drivers of sinks under faults: they begin, stage, commit, crash between any two steps, and come back.

Each sink has two that know nothing of each other, so that an older epoch is refused again and again. One that
crashes leaves what it sent on its way; one that stands still goes on when a newer one has begun, as a process
does that was paused. What each staged, asked for and was told is an `Attempt`, noted before it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence

import laminar
from laminar.client.errors import Error, Fenced
from laminar.client.transact.sinks import Sink
from tests.checkers import Attempt, Begun, History, Operation
from tests.cluster.faults.workload import now_us

DRIVERS = 2
MOST_RECORDS = 6
# So small that a part has several stages.
STAGE_BYTES = 600
CRASH_CHANCE = 0.04
PAUSE_CHANCE = 0.03
# A driver goes on for so long before it begins anew by itself; it waits meanwhile for those that fence it.
ANEW_S = 2.0
# Numbers of records rise with those of batches, and say which attempt they are of.
PER_BATCH, PER_ATTEMPT = 10**9, 10**3


class Crashed(Exception):
    """This driver is no more; another one comes in its place."""


class Drivers:
    """All of them. `attempts` and `begun` are for the checkers, `happened` is counted for the report."""

    def __init__(
        self, urls: Sequence[str], topic: str, *, partitions: int, sinks: int, rng: random.Random
    ) -> None:
        self.attempts: list[Attempt] = []
        self.begun: list[Begun] = []
        self.happened: Counter[str] = Counter()
        self.took_ms: list[float] = []
        # What each sink says of itself in the end.
        self.committed: dict[str, int] = {}
        self._urls = list(urls)
        self._topic = topic
        self._partitions = partitions
        self._sinks = [f"sink{number}" for number in range(sinks)]
        self._rng = rng
        self._padding = b" " * 100
        self._stopping = False
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        # Commits of drivers that crashed: what was sent goes on.
        self._left: set[asyncio.Task[str]] = set()

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; a failure shows in `check_alive` and at the end."""
        self._tasks = [asyncio.create_task(self._run(sink)) for sink in self._sinks for _ in range(DRIVERS)]

    def check_alive(self) -> None:
        """Raise what ended a driver, if anything did."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def finish(self, *, timeout_s: float) -> None:
        """End them, then commit one more batch to each sink by a new driver, who finds nothing in its way."""
        self._stopping = True
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)
            await asyncio.gather(*map(self._last, self._sinks))

    async def close(self, history: History) -> None:
        """End them whatever they do, and note what they did in the history. Idempotent."""
        ending = [*self._tasks, *self._left]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._tasks = []
        outcomes = {"applied": "ok", "refused": "fail", "unknown": "unknown"}
        for attempt in self.attempts:
            for partition, values in attempt.parts.items():
                for value in values:
                    key, _, number = value.rpartition(" ")
                    history.add(
                        Operation(
                            kind="append",
                            process=attempt.sink,
                            topic=self._topic,
                            partition=partition,
                            key=key,
                            number=int(number),
                            start_us=attempt.asked_us or 0,
                            end_us=attempt.ended_us,
                            outcome=outcomes[attempt.outcome],  # type: ignore[arg-type]  # one of the three
                            error=attempt.error,
                        )
                    )

    # -- a driver --------------------------------------------------------------------------------

    async def _run(self, name: str) -> None:
        while not self._stopping:
            try:
                async with laminar.aio.connect(self._urls, timeout=30.0) as client:
                    await self._drive(client.sink(name))
            except Crashed:
                self.happened["driver crashes"] += 1
            except Error as error:
                self.happened[f"driver told {error.code}"] += 1
            await asyncio.sleep(self._rng.uniform(0.0, ANEW_S))

    async def _drive(self, sink: Sink) -> None:
        """From `begin` until somebody else has begun, or something fails."""
        await self._begin(sink)
        self._maybe_crash()
        until_s = time.monotonic() + self._rng.uniform(0.5, 3 * ANEW_S)
        number = 0 if sink.committed is None else sink.committed + 1
        while not self._stopping and time.monotonic() < until_s:
            await self._batch(sink, number)
            self._maybe_crash()
            number += 1
            await asyncio.sleep(self._rng.expovariate(10.0))

    async def _begin(self, sink: Sink) -> None:
        epoch = await sink.begin()
        self.begun.append(Begun(sink=sink.name, epoch=epoch, told_us=now_us()))

    def _maybe_crash(self) -> None:
        if self._rng.random() < CRASH_CHANCE:
            raise Crashed

    async def _batch(self, sink: Sink, number: int, *, may_crash: bool = True) -> None:
        """Stage some records in some partitions, then commit them."""
        assert sink.epoch is not None, "a driver begins"
        attempt = Attempt(sink=sink.name, number=number, epoch=sink.epoch, parts={})
        self.attempts.append(attempt)
        first = number * PER_BATCH + next(self._numbers) % (PER_BATCH // PER_ATTEMPT) * PER_ATTEMPT
        chosen = self._rng.sample(range(self._partitions), self._rng.randint(1, self._partitions))
        async with sink.stage(number, batch_bytes=STAGE_BYTES) as stager:
            for partition in chosen:
                key = f"{sink.name}.{partition}"
                for place in range(self._rng.randint(1, MOST_RECORDS)):
                    value = f"{key} {first + place}"
                    # Written down before it is sent: from then on it may be there.
                    attempt.parts.setdefault(partition, []).append(value)
                    stager.append(self._topic, value.encode() + self._padding, key=key, partition=partition)
                if may_crash:
                    self._maybe_crash()
                await stager.room()
        if may_crash:
            self._maybe_crash()
            if self._rng.random() < PAUSE_CHANCE:
                self.happened["driver pauses"] += 1
                await asyncio.sleep(self._rng.uniform(1.0, 3 * ANEW_S))
        attempt.asked_us = now_us()
        attempt.outcome = "unknown"
        commit: asyncio.Task[str] = asyncio.create_task(sink.commit(number, [stager.staged]))
        if may_crash and self._rng.random() < CRASH_CHANCE:
            # Its commit is under way; the connection goes with the process, now or a little later.
            self._left.add(commit)
            commit.add_done_callback(self._gone)
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))
            commit.cancel()
            raise Crashed
        try:
            await commit
        except Error as error:
            attempt.ended_us = now_us()
            attempt.error = f"{error.code}: {error.message}"[:200]
            if error.outcome == "not_applied":
                attempt.outcome = "refused"
            if isinstance(error, Fenced) and self._rng.random() < 0.3:
                await self._still_fenced(sink, number, stager.staged)
            raise
        attempt.ended_us = now_us()
        attempt.outcome = "applied"
        self.took_ms.append((attempt.ended_us - attempt.asked_us) / 1000)
        if may_crash and self._rng.random() < 0.1:
            self.happened["commits asked for again"] += 1
            await sink.commit(number, [stager.staged])

    async def _still_fenced(self, sink: Sink, number: int, staged: laminar.Staged) -> None:
        """Who was refused once is refused for ever."""
        try:
            await sink.commit(number, [staged])
        except Fenced:
            return
        except Error:
            return  # nobody could tell just now
        raise AssertionError(f"batch {number} of {sink.name} was fenced, then committed")

    def _gone(self, commit: asyncio.Task[str]) -> None:
        self._left.discard(commit)
        if not commit.cancelled():
            commit.exception()

    async def _last(self, name: str) -> None:
        while True:
            try:
                async with laminar.aio.connect(self._urls, timeout=30.0) as client:
                    sink = client.sink(name)
                    await self._begin(sink)
                    number = 0 if sink.committed is None else sink.committed + 1
                    await self._batch(sink, number, may_crash=False)
                    told = await sink.describe()
            except Error as error:
                self.happened[f"driver told {error.code}"] += 1
                continue
            assert not told.publishing, f"{name} was committed and is being published: {told}"
            self.committed[name] = -1 if told.committed is None else told.committed
            return

    async def leave_staged(self) -> None:
        """Of every sink, in every partition: stages that nobody commits, a prepare that nobody decides."""
        async with laminar.aio.connect(self._urls, timeout=60.0) as client:
            for name in self._sinks:
                sink = client.sink(name)
                for prepared in (True, False):
                    epoch = await sink.begin()
                    self.begun.append(Begun(sink=name, epoch=epoch, told_us=now_us()))
                    number = self.committed[name] + 1
                    async with sink.stage(number, batch_bytes=STAGE_BYTES) as stager:
                        for partition in range(self._partitions):
                            stager.append(self._topic, b"never committed", partition=partition)
                    if prepared:
                        *parts, last = stager.staged.parts
                        torn = stager.staged._replace(parts=(*parts, last._replace(stages=(0,))))
                        with contextlib.suppress(Error):
                            await sink.commit(number, [torn])
                            raise AssertionError(f"batch {number} of {name} was committed without its stages")
