"""`python -m tests.cluster.faults.numbers URLS TOPIC TOTAL`: a named copier of the numbers up to TOTAL.

It goes on where its name got to. A process of its own, so that it can be killed at any instant; "done TOTAL"
is the last that it says.
"""

from __future__ import annotations

import asyncio
import sys

import laminar
from tests.cluster.faults.routes import copied


async def copy(urls: list[str], topic: str, total: int) -> None:
    """Copy what is missing."""
    async with (
        laminar.aio.connect(urls, timeout=120.0) as client,
        client.topic(topic).producer(name="routed-copier", batch_bytes=600) as producer,
    ):
        for key, number in copied(total)[producer.resumed_at :]:
            producer.send(f"{key} {number}".encode(), key=key, number=number)
            if not producer.has_room():
                await producer.room()
            await asyncio.sleep(0.005)
        await producer.durable()
        print("done", producer.checkpoint, flush=True)


if __name__ == "__main__":
    asyncio.run(copy(sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])))
