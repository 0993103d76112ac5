"""A partition that followed others by a change of the route: an ordered channel waits for these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from laminar.http.api.problems import Problem
from laminar.node.channels import giver as module
from laminar.node.channels.delivery import Delivery
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.succession import Input, OpenRecord, Output, SealRecord
from laminar.wire.channels import ChannelSettings
from tests.node.alone import lone_partition
from tests.node.channels.delivering import CHANNEL, append, delivering, given, nothing, steps, values

CHANGE = 7
OUTPUT = ConfigurationRecord(voters=((1, "here"),), successor_of=CHANGE)
ORDERED = ChannelSettings(order="key")


class Before:
    """Says whether the channel is done with the partitions before this one; None: nobody answers."""

    def __init__(self) -> None:
        self.answer: bool | None = False
        self.asked = asyncio.Event()
        self.count = 0

    async def __call__(self, partition: Partition, channel: int) -> bool:
        assert channel == CHANNEL
        self.count += 1
        self.asked.set()
        if self.answer is None:
            raise Problem("no_leader", "nobody leads the partition before")
        return self.answer

    async def again(self) -> None:
        """Wait until it was asked, and has answered, once more."""
        self.asked.clear()
        async with asyncio.timeout(60):
            await self.asked.wait()
        await asyncio.sleep(0)


@asynccontextmanager
async def following(
    folder: Path, settings: ChannelSettings, before: Before
) -> AsyncIterator[tuple[Partition, Delivery]]:
    """A partition that took the place of partition 0, with a channel."""
    async with lone_partition(folder, voters=OUTPUT) as partition:
        await partition.propose_open(OpenRecord(CHANGE, 1, 0, 32_768, [Input(0, b"0" * 16, 812, 1)]))
        delivery = Delivery(partition, precedes=before)
        try:
            await delivery.open(CHANNEL, "billing", 1, settings)
            yield partition, delivery
        finally:
            delivery.stop()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATE_S", 0.01)


async def test_an_ordered_channel_gives_out_nothing_before_the_partitions_before_are_done(
    tmp_path: Path,
) -> None:
    """Nor while nobody says whether they are; then what waits is given out, and nobody is asked any more."""
    before = Before()
    async with following(tmp_path, ORDERED, before) as (partition, delivery):
        await append(partition, b"a", keys=[b"k"])
        waiting = asyncio.create_task(given(delivery))
        await before.again()
        await nothing(delivery, 0.05)
        assert await delivery.receive(CHANNEL, wanted=0, wait_s=0.05) is None, (
            "it says that there is something"
        )
        before.answer = None
        await before.again()
        await nothing(delivery, 0.05)
        assert not waiting.done() and not partition.state.channels.by_id[CHANNEL].out

        before.answer = True

        jobs = await waiting
        assert values(jobs) == [b"a"]
        asked = before.count
        await append(partition, b"b", keys=[b"l"])
        assert values(await given(delivery)) == [b"b"]
        assert before.count == asked


async def test_a_channel_without_order_waits_for_no_partition(tmp_path: Path) -> None:
    before = Before()
    async with following(tmp_path, ChannelSettings(), before) as (partition, delivery):
        await append(partition, b"a", keys=[b"k"])
        assert values(await given(delivery)) == [b"a"]
        assert before.count == 0


async def test_a_partition_that_followed_none_waits_for_none(tmp_path: Path) -> None:
    async with delivering(tmp_path, ORDERED) as (partition, delivery):
        await append(partition, b"a", keys=[b"k"])
        assert values(await given(delivery)) == [b"a"]


@pytest.mark.parametrize("on_dead", ["continue", "park"])
async def test_what_is_dead_keeps_those_that_follow_waiting_only_if_it_parks_its_key(
    tmp_path: Path, on_dead: str
) -> None:
    settings = ChannelSettings(order="key", max_attempts=1, on_dead=on_dead)  # type: ignore[arg-type]  # one of both
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"a", keys=[b"k"])
        jobs = await given(delivery)
        await partition.propose_seal(SealRecord(CHANGE, 1, [Output(1, 0, 65_536, b"1" * 16)], "strict"))
        assert not await delivery.is_drained(CHANNEL), "it is out"

        await delivery.settle(CHANNEL, steps("nack", jobs))

        assert await delivery.is_drained(CHANNEL) == (on_dead == "continue")
        assert await delivery.drop_dead(CHANNEL, None) == 1
        assert await delivery.is_drained(CHANNEL)
