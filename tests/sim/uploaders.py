"""Clients that append records larger than a batch: part by part, breaking off between any two steps."""

from __future__ import annotations

import asyncio

import msgspec
from crc32c import crc32c

from tests.sim.clients import Answer, Client

# What may be asked again, of this or another node.
_AGAIN = (0, 503, 504, 429, 507, 421)
BREAK_OFF = 0.05


class Uploader(Client):
    """One upload after the other, each under a name of its own; what it was told is compared with the log."""

    uploads = 0

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            self.uploads += 1
            await self._upload(self.rng.randrange(self.partitions), f"{self.name}-{self.uploads}")

    async def _upload(self, partition: int, name: str) -> None:
        rng = self.rng
        base = f"/v1/topics/{self.topic}/partitions/{partition}"
        parts = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(rng.randrange(1, 6))]
        for number in rng.sample(range(len(parts)), len(parts)):
            answer = await self._until(f"{base}/uploads/{name}/parts/{number}", parts[number], method="PUT")
            if answer is None or self.rng.random() < BREAK_OFF:
                if rng.random() < 0.5:
                    await self._ask(partition, "DELETE", f"{base}/uploads/{name}", b"")
                return
            assert answer.status == 201, f"{self.name}: part {number} of {name}: {answer}"
        whole = b"".join(parts)
        target = (
            f"{base}/uploads/{name}?parts={len(parts)}&size_bytes={len(whole)}&crc32c={crc32c(whole):08x}"
        )
        for _ in range(rng.choice((1, 1, 2))):
            # Asked again once it was answered: the same record, not another.
            answer = await self._until(target, b"")
            if answer is None:
                return
            if answer.status == 409 and answer.code == "no_stage":
                # Dropped for their age: a node's clock was ahead by hours.
                return
            assert answer.status == 201, f"{self.name}: publish of {name}: {answer}"
            offset = msgspec.json.decode(answer.body)["placed"][0]["offset"]
            self._acknowledged(partition, offset, [whole])
        answer = await self._ask(partition, "GET", f"{base}/records/{offset}", b"")
        if answer.status == 200:
            assert answer.body == whole, f"{self.name}: {name} at {offset} is read as {answer.body!r}"
            self.reads += 1

    async def _until(self, target: str, body: bytes, *, method: str = "POST") -> Answer | None:
        """An answer that says something; None once this client is to stop."""
        partition = int(target.split("/")[5])
        while not self.stopping:
            answer = await self._ask(partition, method, target, body)
            if answer.status not in _AGAIN:
                return answer
            await asyncio.sleep(0.05 + self.rng.random() * 0.5)
        return None

    async def _ask(self, partition: int, method: str, target: str, body: bytes) -> Answer:
        node, shard = self._somebody(partition)
        return await self.request(node, shard, method, target, {}, body)
