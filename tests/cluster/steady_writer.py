"""A program that appends all the time, for tests of what happens to a cluster meanwhile.

    python -m tests.cluster.steady_writer TOPIC URL...

Each of its keys is a task that awaits a receipt, then sends the next record. It prints the number of receipts
now and then. At the end of its input it stops, reads everything, and prints one line of JSON, a `Report`.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

import laminar
from laminar.client.produce.producer import Producer
from laminar.testing.history import Sent, check_history
from tests.cluster.load import read_all

KEYS = [f"key-{number}" for number in range(6)]
_PAUSE_S = 0.02
_TELL_S = 0.1


class Report(msgspec.Struct, frozen=True):
    """What became of the records."""

    acknowledged: int
    violations: list[str]
    longest_gap_ms: dict[str, int]
    """By key: the longest time between two receipts."""


class Writer:
    """The records that were sent, and when the receipts came."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.gaps_s = dict.fromkeys(KEYS, 0.0)
        self.stopping = asyncio.Event()

    async def write(self, producer: Producer[bytes], key: str) -> None:
        """Send numbered records until it is time to stop."""
        number, last_s = 0, time.monotonic()
        while not self.stopping.is_set():
            receipt = await producer.send(f"{key} {number}".encode(), key=key)
            now_s = time.monotonic()
            self.gaps_s[key] = max(self.gaps_s[key], now_s - last_s)
            self.sent.append(Sent(key, number, receipt.partition, receipt.offset))
            number, last_s = number + 1, now_s
            await asyncio.sleep(_PAUSE_S)

    async def tell(self) -> None:
        """Print how many receipts there are."""
        while not self.stopping.is_set():
            print(len(self.sent), flush=True)
            await asyncio.sleep(_TELL_S)


async def main(topic: str, urls: list[str]) -> None:
    """Write until the end of the input, then read and report."""
    writer = Writer()
    asyncio.get_running_loop().add_reader(0, writer.stopping.set)
    async with (
        laminar.aio.connect(urls, timeout=60.0) as client,
        client.topic(topic).producer() as producer,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(writer.tell())
        for key in KEYS:
            tasks.create_task(writer.write(producer, key))
    found = check_history(writer.sent, await read_all(urls, topic), uncertain=[])
    gaps_ms = {key: round(1000 * gap_s) for key, gap_s in writer.gaps_s.items()}
    report = Report(len(writer.sent), [str(each) for each in found], gaps_ms)
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
