"""`python -m tests.cluster.copier URLS TOPIC NAME TOTAL`: copies a source of numbers, from where it got to.

A process of its own, so that a test can kill it at any instant. It says where it goes on, and how far it is.
"""

from __future__ import annotations

import asyncio
import sys

import laminar

KEYS = 23


async def copy(urls: list[str], topic: str, name: str, total: int) -> None:
    async with (
        laminar.aio.connect(urls, timeout=60.0) as client,
        client.topic(topic).producer(name=name, batch_bytes=2_000, buffer_bytes=20_000) as producer,
    ):
        print("from", producer.resumed_at, flush=True)
        told = producer.resumed_at
        for number in range(producer.resumed_at + 1, total + 1):
            producer.send(b"%d" % number, key=b"key %d" % (number % KEYS), number=number)
            if not producer.has_room():
                await producer.room()
            if producer.checkpoint >= told + 100:
                told = producer.checkpoint
                print("durable", told, flush=True)
        await producer.durable()
        print("done", producer.checkpoint, flush=True)


if __name__ == "__main__":
    urls, topic, name, total = sys.argv[1:]
    asyncio.run(copy(urls.split(","), topic, name, int(total)))
