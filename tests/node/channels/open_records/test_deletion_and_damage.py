"""What a person deletes, and what the disk has lost, of open records and of their copies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from laminar.node.channels.given_records import GivenRecords
from laminar.node.partition.state.channels import Why
from laminar.wire.channels import ChannelSettings
from tests.node.channels.carrying import CHANNEL, carrying, damage
from tests.node.channels.delivering import append, attempts, given, steps, values


async def test_a_person_deletes_copies_too(tmp_path: Path) -> None:
    """What is deleted by hand is lost to the channel, where it was copied and where it was not."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, order="key")) as held:
        partition, delivery = held.partition, held.delivery
        channel = partition.state.channels.by_id[CHANNEL]
        (moved,) = await held.failed(b"its copy lies after what is deleted", keys=[b"m"])
        await held.fill(5)
        held.carrier.carry([last for last, _, _ in partition.log.sealed()])
        await held.carrier.finished()
        assert list(partition.state.channels.copies) == [moved] and partition.start_offset == 0
        await partition.start_mover.delete(await partition.start_mover.index_before(moved + 1))
        assert (channel.open, channel.lost, partition.start_offset) == (0, 1, moved + 1)

        (copied,) = await held.failed(b"a", keys=[b"k"])
        await held.fill(5)
        assert await held.trimmed() > copied
        (left,) = await held.failed(b"b", keys=[b"l"])
        await held.fill(1)
        lost = channel.lost

        await partition.start_mover.delete(partition.committed_index)
        assert (channel.open, channel.lost - lost) == (0, 2) and not partition.state.channels.copies
        assert left < partition.start_offset == partition.end_offset
        await append(partition, b"after", keys=[b"k"])
        assert values(await given(delivery)) == [b"after"], "its key is free"


async def test_a_deletion_that_ends_between_its_two_entries_is_repeated(tmp_path: Path) -> None:
    """The first one alone takes no more than was asked for, and the second counts nothing twice."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0)) as held:
        partition = held.partition
        channel = partition.state.channels.by_id[CHANNEL]
        (moved,) = await held.failed(b"its copy lies after what is deleted")
        await held.fill(5)
        held.carrier.carry([last for last, _, _ in partition.log.sealed()])
        await held.carrier.finished()
        (later,) = await held.failed(b"after what is deleted")

        await partition.start_mover.delete_copies(moved + 1)  # what a crash leaves: the first entry

        assert (list(channel.aside), channel.lost, partition.start_offset) == ([later], 1, 0)
        await partition.start_mover.delete(await partition.start_mover.index_before(moved + 1))
        assert (list(channel.aside), channel.lost, partition.start_offset) == ([later], 1, moved + 1)


async def test_a_copy_that_is_damaged_everywhere_is_a_dead_record(tmp_path: Path) -> None:
    """As an original is: attempts fail, and then it waits for a person."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, max_attempts=2)) as held:
        partition, delivery = held.partition, held.delivery
        await append(partition, b"lost", b"kept")
        channel = partition.state.channels.by_id[CHANNEL]
        while channel.dead != 2:
            await delivery.settle(CHANNEL, steps("nack", await given(delivery)))
        await held.fill(5)
        assert await held.trimmed() > 1
        await damage(partition, partition.state.channels.copies[0].entry)

        assert await delivery.retry_dead(CHANNEL, None) == 2
        async with asyncio.timeout(60):
            while channel.dead != 2:
                await delivery.receive(CHANNEL, wanted=1, wait_s=0.2)
        assert {each.reason for each in channel.aside.values()} == {"damaged"}


async def test_what_lies_beside_damage_is_given_out(tmp_path: Path) -> None:
    """Only what cannot be read fails, though it was to be given out together with others."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, max_attempts=2)) as held:
        partition, delivery = held.partition, held.delivery
        for value in (b"before", b"damaged", b"after"):
            await append(partition, value)
        await damage(partition, partition.log.last_index - 1)

        channel = partition.state.channels.by_id[CHANNEL]
        found: list[bytes] = []
        async with asyncio.timeout(60):
            while len(found) < 2 or not channel.dead:
                jobs = await delivery.receive(CHANNEL, wanted=3, wait_s=0.2)
                if jobs is not None and jobs.total:
                    found += values(jobs)
                    await delivery.settle(CHANNEL, steps("ack", jobs))
        assert found == [b"before", b"after"]
        assert {offset: each.why for offset, each in channel.aside.items()} == {1: Why.DEAD}


async def test_what_is_deleted_before_it_is_read_fails_no_other(tmp_path: Path) -> None:
    """The records beside it were given to nobody: they come again, with the same attempt."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        await append(partition, b"a", b"b")
        await append(partition, b"c", b"d")
        read = GivenRecords.read

        async def deleted_first(self: GivenRecords, *arguments: Any) -> Any:
            if partition.start_offset == 0:
                await partition.start_mover.delete(await partition.start_mover.index_before(2))
            return await read(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GivenRecords, "read", deleted_first)
            jobs = await delivery.receive(CHANNEL, wanted=4, wait_s=5)
        assert jobs is not None and not jobs.total

        channel = partition.state.channels.by_id[CHANNEL]
        assert (partition.start_offset, channel.lost) == (2, 2)
        again = await given(delivery)
        assert (values(again), attempts(again)) == ([b"c", b"d"], [1, 1])
        assert not channel.dead
