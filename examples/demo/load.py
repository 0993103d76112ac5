"""The stream of flights, and the kill of a node in the middle of it.

One task sends flights without a pause for the kill. Another task waits until half of them are sent, kills the
node that leads most partitions, and starts it again. A kill tests something only if appends were under way.
So a kill after which no append was sent again is repeated. Until the kills are over, the sender sends the
last fifth (`REST`) of the flights slowly.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from examples.demo.flights import Flights
from laminar.client.client import Client
from laminar.client.produce.producer import Delivery, Producer
from laminar.client.topic import Topic
from laminar.testing.cluster import LocalCluster
from laminar.testing.history import Sent

# At most 2,500 flights a second: the load lasts long enough for a node to be killed and started again in it.
STEP_FLIGHTS = 50
STEP_S = 0.02
# The share of the flights that is sent slowly while the kills are not over.
REST = 0.2
DOWN_S = 2.0
MAX_KILLS = 4

Say = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """The result of the load: what was sent with its receipts, batches sent again, kills, duration."""

    sent: list[Sent] = field(default_factory=list)
    retried: int = 0
    kills: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Progress:
    """The state that the sending task and the killing task share."""

    deliveries: list[Delivery] = field(default_factory=list)
    step_sent: asyncio.Event = field(default_factory=asyncio.Event)
    half_sent: asyncio.Event = field(default_factory=asyncio.Event)
    kill_over: asyncio.Event = field(default_factory=asyncio.Event)
    kills: int = 0


async def stream(
    client: Client, topic: Topic[bytes], flights: Flights, cluster: LocalCluster, *, say: Say
) -> Outcome:
    """Send every flight while a node is killed and started again; `say` prints progress.

    Raises:
        ProduceError: when a flight got no receipt.
    """
    progress = Progress()
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_kill(client, topic, flights, cluster, progress, say))
        async with topic.producer(timeout=60) as producer:
            await _send(producer, flights, progress)
    receipts = [await delivery for delivery in progress.deliveries]
    sent = [
        Sent(flight.origin, number, receipt.partition, receipt.offset)
        for number, (flight, receipt) in enumerate(zip(flights.flights, receipts, strict=True), start=1)
    ]
    return Outcome(sent, _retried(client), progress.kills, time.monotonic() - began)


def _retried(client: Client) -> int:
    return int(client.statistics()["resent_batches"])


async def _send(producer: Producer[bytes], flights: Flights, progress: Progress) -> None:
    """Send all flights in order at a steady pace, the last ones slowly until the kills are over."""
    deliveries = progress.deliveries
    held_back = int(len(flights) * (1 - REST))
    while len(deliveries) < len(flights):
        slow = len(deliveries) >= held_back and not progress.kill_over.is_set()
        step = range(len(deliveries), min(len(deliveries) + (1 if slow else STEP_FLIGHTS), len(flights)))
        for position in step:
            # Each flight gets its own receipt. The checks claim nothing for a flight without one.
            deliveries.append(producer.send(flights.lines[position], key=flights.flights[position].origin))
        if len(deliveries) >= len(flights) // 2:
            progress.half_sent.set()
        progress.step_sent.set()
        progress.step_sent.clear()  # `set` has woken the waiting task already
        await producer.room()
        await asyncio.sleep(STEP_S)


async def _kill(
    client: Client, topic: Topic[bytes], flights: Flights, cluster: LocalCluster, progress: Progress, say: Say
) -> None:
    """Kill a node and start it again; repeat, up to `MAX_KILLS` times, until an append was sent again."""
    await progress.half_sent.wait()
    try:
        while progress.kills < MAX_KILLS:
            before = _retried(client)
            await _kill_once(topic, flights, cluster, progress, say)
            if _retried(client) > before:
                return
            say("nothing was under way: once more")
    finally:
        progress.kill_over.set()


async def _kill_once(
    topic: Topic[bytes], flights: Flights, cluster: LocalCluster, progress: Progress, say: Say
) -> None:
    leaders = await _leaders(topic)
    while not (led := Counter(leader for leader in leaders.values() if leader is not None)):
        await asyncio.sleep(STEP_S)
        leaders = await _leaders(topic)
    name, count = led.most_common(1)[0]
    number = next(node.number for node in cluster.members if node.name == name)
    sent = len(progress.deliveries)
    began = time.monotonic()
    # In a thread, so that the load continues meanwhile.
    await asyncio.to_thread(cluster.kill, number)
    progress.kills += 1
    say(f"{sent:,} flights sent: kill -9 of {name}, which leads {count} of {len(leaders)} partitions")
    orphans = {partition for partition, leader in leaders.items() if leader == name}
    down = asyncio.create_task(asyncio.sleep(DOWN_S))
    await _acknowledged_again(topic, flights, progress, sent, orphans)
    say(f"all of them take appends again, {time.monotonic() - began:.2f} s after the kill")
    await down
    began = time.monotonic()
    await asyncio.to_thread(cluster.restart, number)
    say(f"{name} is back, after {time.monotonic() - began:.2f} s; {len(progress.deliveries):,} flights sent")


async def _leaders(topic: Topic[bytes]) -> dict[int, str | None]:
    """Return the name of the node that leads each partition, None where the node asked knows none."""
    return {each.partition: each.leader for each in await topic.partitions()}


async def _acknowledged_again(
    topic: Topic[bytes], flights: Flights, progress: Progress, sent: int, orphans: set[int]
) -> None:
    """Wait until each partition in `orphans` acknowledged a flight sent after the first `sent` flights."""
    partition_of: dict[str, int] = {}
    position = sent
    while orphans and position < len(flights):
        while position >= len(progress.deliveries):
            await progress.step_sent.wait()
        origin = flights.flights[position].origin
        if origin not in partition_of:
            partition_of[origin] = await topic.partition_of(origin)
        if partition_of[origin] in orphans:
            await progress.deliveries[position]
            orphans.discard(partition_of[origin])
        position += 1
