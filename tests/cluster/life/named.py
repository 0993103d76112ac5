"""A program with a named producer that begins anew again and again: each number must be there once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence

import laminar
from laminar.client.errors import Error
from laminar.client.produce.producer import Delivery
from tests.checkers import History, Operation, Violation
from tests.cluster.faults.workload import now_us

NAME = "teller"
KEYS = 5
# A run ends after up to this long; the next one takes up its name.
RUN_S = 6.0


class NamedWriter:
    """Numbers 1, 2, ... under one name, over all runs. `runs` and `last` are for the report."""

    def __init__(self, history: History, urls: Sequence[str], topic: str, *, rng: random.Random) -> None:
        self.runs = 0
        self.last = 0
        self.checkpoint = 0
        self._history = history
        self._urls = list(urls)
        self._topic = topic
        self._rng = rng
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        # By number: what was sent and has no receipt yet.
        self._sent: dict[int, Operation] = {}

    def start(self) -> None:
        """Begin; a failure shows in `check_alive` and at the end."""
        self._task = asyncio.create_task(self._run())

    def check_alive(self) -> None:
        """Raise what ended the program, if anything did."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def finish(self, *, timeout_s: float) -> None:
        """End once all that was sent is durable."""
        self._stopping = True
        assert self._task is not None
        async with asyncio.timeout(timeout_s):
            await self._task

    async def close(self) -> None:
        """End whatever it does, and note what has no receipt. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for operation in self._sent.values():
            operation.outcome = "unknown"
            self._history.add(operation)
        self._sent = {}

    async def _run(self) -> None:
        while not self._stopping or self.checkpoint < self.last:
            with contextlib.suppress(Error):  # what was not acknowledged is sent again by the next run
                await self._once()

    async def _once(self) -> None:
        """From taking up the name to the end of one run."""
        async with (
            laminar.aio.connect(self._urls, timeout=30.0) as client,
            client.topic(self._topic).producer(name=NAME) as producer,
        ):
            self.runs += 1
            number = producer.resumed_at
            until_s = time.monotonic() + self._rng.uniform(0.3 * RUN_S, RUN_S)
            deliveries: dict[int, Delivery] = {}
            try:
                while number < self.last or (not self._stopping and time.monotonic() < until_s):
                    number += 1
                    self.last = max(self.last, number)
                    operation = self._operation(number)
                    value = operation.value.encode()
                    deliveries[number] = producer.send(value, key=operation.key, number=number)
                    await producer.room()
                    await asyncio.sleep(self._rng.expovariate(20.0))
                    self._note(deliveries)
                await producer.durable()
                self.checkpoint = max(self.checkpoint, producer.checkpoint)
            finally:
                self._note(deliveries)

    def _note(self, deliveries: dict[int, Delivery]) -> None:
        """Put into the history what has its receipt by now."""
        for number in [number for number, delivery in deliveries.items() if delivery.done()]:
            delivery = deliveries.pop(number)
            with contextlib.suppress(Error):
                self._acknowledged(number, delivery.result())

    def _acknowledged(self, number: int, receipt: laminar.Receipt) -> None:
        operation = self._sent.pop(number)
        if receipt.offset < 0:
            operation.outcome = "unknown"  # an earlier run made it durable: `check` looks for it
        else:
            operation.end_us = now_us()
            operation.partition, operation.offset = receipt.partition, receipt.offset
        self._history.add(operation)

    def _operation(self, number: int) -> Operation:
        if number not in self._sent:
            self._sent[number] = Operation(
                kind="append",
                process=NAME,
                topic=self._topic,
                key=f"{NAME}{number % KEYS}",
                number=number,
                start_us=now_us(),
            )
        return self._sent[number]

    def check(self) -> list[Violation]:
        """Return which numbers up to the checkpoint are missing in the final reading, or there twice."""
        found: Counter[int] = Counter()
        for each in self._history.operations:
            if each.kind == "final" and each.topic == self._topic:
                found.update(int(value.split()[1]) for _, value in each.values if value.startswith(NAME))
        wrong = [
            Violation("lost", f"number {number} of {NAME} is durable and not there", -1)
            for number in range(1, self.checkpoint + 1)
            if not found[number]
        ]
        return wrong + [
            Violation("duplicate", f"number {number} of {NAME} is there {times} times", -1)
            for number, times in found.items()
            if times > 1
        ]
