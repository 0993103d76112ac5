"""The events of a record follow from the log, however it is cut into steps, and end where the table ends."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from laminar.batch import Buffer, kind_of
from laminar.node.channels.delivery import Delivery
from laminar.node.find.history import KINDS, History, Place
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Why
from laminar.wire.channels import ChannelSettings
from tests.node.channels.delivering import CHANNEL, append, delivering, steps

RECORDS = 6


async def work(partition: Partition, delivery: Delivery, rng: random.Random) -> None:
    """A consumer that does anything, and a person who moves and replays."""
    for _ in range(60):
        act = rng.random()
        if act < 0.1:
            await delivery.seek(CHANNEL, rng.randrange(RECORDS), drop=rng.random() < 0.3)
        elif act < 0.2:
            await delivery.retry_dead(CHANNEL, None)
        elif act < 0.25:
            await delivery.drop_dead(CHANNEL, None)
        jobs = await delivery.receive(CHANNEL, wanted=rng.choice([1, 3]), wait_s=0.0)
        if jobs is not None and rng.random() < 0.9:
            verb = rng.choice(["ack", "nack", "nack", "release"])
            await delivery.settle(CHANNEL, steps(verb, jobs, reason="r" if verb == "nack" else ""))


def word(partition: Partition, offset: int) -> str:
    """Where the table has the record."""
    channel = partition.state.channels.by_id[CHANNEL]
    if offset in channel.out:
        return "out"
    if offset in channel.aside:
        return "dead" if channel.aside[offset].why is Why.DEAD else "aside"
    return "done" if offset < channel.next else "waiting"


@pytest.mark.parametrize("seed", range(3))
async def test_events_are_the_same_in_steps_and_end_where_the_table_is(tmp_path: Path, seed: int) -> None:
    """Random lives of records; the state between two steps goes through a token's bytes."""
    rng = random.Random(seed)
    settings = ChannelSettings(retry_ms=0, max_attempts=3)
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, *(b"%d" % n for n in range(RECORDS)))
        await work(partition, delivery, rng)
        log = partition.log
        first = (await log.find_offset(0) or 0) + 1
        entries: list[Buffer] = []
        for index in range(first, partition.committed_index + 1):
            (frame,) = await log.read(index, index, max_bytes=1)
            if kind_of(frame) in KINDS:
                entries.append(frame)
        for offset in range(RECORDS):
            whole = History(offset, Place(first - 1, True), {CHANNEL: "billing"})
            whole.take(entries)
            stepped, events, left = whole.place(), [], list(entries)
            stepped = Place(first - 1, True)
            while left:
                count = rng.randint(1, 4)
                data = msgspec.msgpack.encode(stepped)
                history = History(offset, msgspec.msgpack.decode(data, type=Place), {CHANNEL: "billing"})
                history.take(left[:count])
                left = left[count:]
                events += history.events
                stepped = history.place()
            assert events == whole.events and whole.is_complete
            assert whole.states()[CHANNEL] == word(partition, offset)
            deliveries = [each.delivery for each in events if each.name == "delivered"]
            assert len(set(deliveries)) == len(deliveries) > 0
            ends = ("acked", "nacked", "released", "dead", "sought")
            assert (
                sum(each.name in ends and each.delivery is not None for each in events) >= len(deliveries) - 1
            )
