"""Producers that know no routes: they append to a topic, and each node cuts what they send by its own view.

Some name each request and send it again, to any node, until it is answered; then its records are there once.
The others send once: what comes back without a receipt is there once or not at all, and what was refused as
not applied is nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from tests.sim.clients import Client
from tests.sim.simulation import TOPIC
from tests.sim.watch import Watch
from tests.sim.world import World

KEYS = [b"topic %d" % number for number in range(12)] + [b"all", b"both"]


class Ledger(Protocol):
    """Who is told what was sent, and what was answered (`routes.Ledger`)."""

    def send(self, key: bytes, values: Sequence[bytes]) -> None:
        """These values of a key are sent now."""

    def acknowledge(self, values: Sequence[bytes], losses: int) -> None:
        """They are acknowledged; the power was lost this often by then."""

    def refuse(self, values: Sequence[bytes]) -> None:
        """They are nowhere, for good."""

    def settle(self, values: Sequence[bytes]) -> None:
        """They are not sent again."""

    def forget(self, values: Sequence[bytes]) -> None:
        """What was acknowledged of them may have been lost with the power, and appended again."""


class TopicProducer(Client):
    """Sends one request at a time, of several keys."""

    def __init__(self, world: World, watch: Watch, number: int, *, ledger: Ledger, named: bool) -> None:
        super().__init__(world, watch, number, topic=TOPIC, partitions=world.options.partitions)
        self.ledger = ledger
        self.named = named
        self.requests = 0
        self.replayed = 0

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            self.ledger.settle(await self._send())

    async def _send(self) -> list[bytes]:
        """Send one request until it is answered; return its values."""
        self.requests += 1
        records = [
            (
                self.rng.choice(KEYS),
                b"%s/%d/%d %016x" % (self.name.encode(), self.requests, place, self.rng.getrandbits(64)),
            )
            for place in range(self.rng.randrange(1, 9))
        ]
        for key, value in records:
            self.ledger.send(key, [value])
        values = [value for _, value in records]
        body = b"".join(
            msgspec.json.encode({"key": key.decode(), "value": value.decode()}) + b"\n"
            for key, value in records
        )
        headers = {"content-type": ENVELOPE_LINES_TYPE}
        if self.named:
            headers["idempotency-key"] = f"{self.name}/{self.requests}"
        target = f"/v1/topics/{self.topic}/records"
        while not self.stopping:
            losses = self.watch.losses
            answer = await self.request(*self._somebody(0), "POST", target, headers, body)
            if answer.status in (200, 201):
                assert len(values) == msgspec.json.decode(answer.body)["appended"]
                self.replayed += "laminar-replayed" in answer.headers
                if losses == self.watch.losses:
                    self.ledger.acknowledge(values, losses)
                    self.acknowledged += len(values)
                else:
                    self.ledger.forget(values)
                if self.named and self.rng.random() < 0.2:
                    continue  # as if the answer had been lost
                return values
            running = self.named and answer.code == "in_progress"
            assert running or answer.status in (0, 503, 504, 429, 507, 404, 421), f"{target}: {answer}"
            if not self.named:
                if answer.outcome == "not_applied":
                    self.ledger.refuse(values)
                return values
            await asyncio.sleep(0.02 + self.rng.random() * 0.3)
        return values
