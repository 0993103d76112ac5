"""In order by key: of the records of a key one is out at a time, the others wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from laminar.node.channels.delivery import Delivery
from laminar.node.partition.state.channels import Why
from laminar.wire.channels import ChannelSettings
from tests.node.channels.delivering import (
    CHANNEL,
    append,
    attempts,
    delivering,
    given,
    nothing,
    offsets,
    steps,
    values,
)


async def test_in_order_by_key_one_record_of_a_key_is_out(tmp_path: Path) -> None:
    """Others go on; a poisoned key stops itself alone, and goes on when its record is dead."""
    settings = ChannelSettings(order="key", retry_ms=0, max_attempts=2)
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"0", b"1", b"2", b"3", b"4", keys=[b"k", b"k", b"l", None, b"k"])

        first = await given(delivery)
        assert values(first) == [b"0", b"2", b"3"]
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("nack", first)[:1])
        again = await given(delivery)
        assert (offsets(again)[:1], attempts(again)[:1]) == ([0], [2])
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("nack", again))

        one = await given(delivery)
        assert values(one) == [b"1"], "0 is dead, and 4 waits for 1"
        await delivery.settle(CHANNEL, steps("ack", one))
        assert values(await given(delivery)) == [b"4"]


async def test_a_dead_record_parks_its_key_if_the_channel_says_so(tmp_path: Path) -> None:
    """Until a person drops it, or has it tried again."""
    settings = ChannelSettings(order="key", retry_ms=0, max_attempts=1, on_dead="park")
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"0", b"1", b"2", keys=[b"k", b"k", b"l"])
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", jobs))
        await nothing(delivery)

        assert await delivery.drop_dead(CHANNEL, [0]) == 1

        assert values(await given(delivery)) == [b"1"]


async def test_what_the_start_of_the_log_takes_holds_no_key(tmp_path: Path) -> None:
    """A person deletes records that are aside, and not looked at yet: what is left of their keys comes."""
    async with delivering(tmp_path, ChannelSettings(order="key")) as (partition, delivery):
        await append(partition, b"0", b"1", keys=[b"k", b"k"])
        first = partition.log.last_index
        await append(partition, b"2", b"3", keys=[b"k", b"l"])
        jobs = await given(delivery, 1)
        await delivery.settle(CHANNEL, steps("nack", jobs, delay_ms=3_600_000))
        assert values(await given(delivery)) == [b"3"]
        await nothing(delivery)
        waiting = asyncio.create_task(given(delivery, 5))

        await partition.start_mover.propose(first)

        assert partition.start_offset == 2
        assert values(await waiting) == [b"2"]
        assert partition.state.channels.by_id[CHANNEL].lost == 2


async def test_a_new_leader_knows_of_which_keys_a_record_is_out(tmp_path: Path) -> None:
    """What its memory lacks is in the log: else two records of a key are out."""
    async with delivering(tmp_path, ChannelSettings(order="key")) as (partition, delivery):
        await append(partition, b"a", b"b", b"c", keys=[b"k", b"k", b"other"])
        assert offsets(await given(delivery, 1)) == [0]
        delivery.stop()

        later = Delivery(partition)
        assert offsets(await given(later)) == [2]
        assert 1 in partition.state.channels.by_id[CHANNEL].aside
        later.stop()


async def test_what_waited_for_a_key_waits_again_when_an_earlier_one_is_replayed(tmp_path: Path) -> None:
    """It was free to go when the dead one left its key, and no consumer has taken it."""
    settings = ChannelSettings(order="key", max_attempts=1)
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"a", b"b", keys=[b"k", b"k"])
        first = await given(delivery, 1)
        await nothing(delivery)
        assert partition.state.channels.by_id[CHANNEL].aside[1].why is Why.BUSY
        await delivery.settle(CHANNEL, steps("nack", first))
        assert await delivery.retry_dead(CHANNEL, None) == 1

        replayed = await given(delivery)
        assert offsets(replayed) == [0]
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("ack", replayed))
        assert offsets(await given(delivery)) == [1]
