"""Where a channel begins when it is opened; how it is moved, drained and closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import Acknowledged, channel_entry
from laminar.node.partition.state.succession import Output, SealRecord
from laminar.wire.channels import ChannelSettings, CursorStart
from tests.node.alone import lone_partition
from tests.node.channels.delivering import (
    CHANNEL,
    QUICK,
    append,
    attempts,
    delivering,
    given,
    nothing,
    offsets,
    steps,
    values,
)


@contextmanager
def disk_held(partition: Partition) -> Iterator[None]:
    """Nothing is written to the journal, so nothing is committed, before the block ends."""
    gate = threading.Event()

    def hold() -> None:
        gate.wait()

    partition.context.driver._storage._journal_worker.submit(hold)
    try:
        yield
    finally:
        gate.set()


async def test_a_snapshot_made_while_a_channel_is_opened_changes_nothing(tmp_path: Path) -> None:
    """It rolls the opening back and does it again; consumers that wait by then get each record once."""
    async with delivering(tmp_path) as (partition, delivery):
        await nothing(delivery)  # the memory of this term begins with the first turn
        with disk_held(partition):
            opening = asyncio.ensure_future(delivery.open(CHANNEL + 1, "mails", 2, QUICK))
            committed = partition.log.last_index
            # The opening is proposed after two turns of the loop, and committed when it is on the disk.
            async with asyncio.timeout(60):
                while CHANNEL + 1 not in partition.state.channels.by_id:  # noqa: ASYNC110  # turns of the loop
                    await asyncio.sleep(0)
            waiting = asyncio.ensure_future(delivery.receive(CHANNEL + 1, wanted=1, wait_s=60.0))
            await asyncio.sleep(0)
            assert not opening.done(), "it is committed already: the snapshot has nothing to roll back"

            stored = partition.state.channels.stored_at(committed)

            assert [each.channel for each in stored] == [CHANNEL]
        await opening
        await append(partition, b"a", b"b")
        first = await waiting
        second = await delivery.receive(CHANNEL + 1, wanted=10, wait_s=60.0)
        assert first is not None and second is not None
        assert (offsets(first), offsets(second)) == ([0], [1])
        assert await delivery.settle(CHANNEL + 1, steps("nack", first)) == (1, [])
        again = await delivery.receive(CHANNEL + 1, wanted=10, wait_s=60.0)
        assert again is not None and (offsets(again), attempts(again)) == ([0], [2])


@pytest.mark.parametrize("opens", [True, False])
async def test_a_channel_begins_behind_a_start_of_the_log_that_is_not_committed_yet(
    tmp_path: Path, opens: bool
) -> None:
    """Opened, or moved back, while records are deleted: it gives out no record that is not there."""
    async with lone_partition(tmp_path) as partition:
        await append(partition, b"0", b"1")
        first = partition.log.last_index
        await append(partition, b"2", b"3")
        delivery = Delivery(partition)
        if not opens:
            await delivery.open(CHANNEL, "billing", 1, QUICK)
            await delivery.seek(CHANNEL, 4)
        moved = asyncio.ensure_future(partition.start_mover.propose(first))
        await asyncio.sleep(0)

        await (delivery.open(CHANNEL, "billing", 1, QUICK) if opens else delivery.seek(CHANNEL, 0))

        await moved
        assert values(await given(delivery)) == [b"2", b"3"]
        delivery.stop()


async def test_a_channel_begins_ends_and_is_moved_where_it_is_told(tmp_path: Path) -> None:
    """`latest` leaves out what was there; `seek` gives out again, and settings change in flight."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        await delivery.open(8, "later", 2, ChannelSettings(start="latest"))
        assert await delivery.receive(8, wanted=1, wait_s=0) is None
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("ack", jobs))

        await delivery.seek(CHANNEL, 1)
        assert values(await given(delivery)) == [b"b"]
        await delivery.open(CHANNEL, "billing", 3, ChannelSettings(paused=True))
        await append(partition, b"c")
        await nothing(delivery)
        await delivery.open(CHANNEL, "billing", 2, QUICK)
        await nothing(delivery)  # an older version changes nothing
        await delivery.open(CHANNEL, "billing", 4, QUICK)
        assert values(await given(delivery)) == [b"c"]
        await delivery.close(8)
        with pytest.raises(Problem, match="not open"):
            await delivery.receive(8, wanted=1, wait_s=0)


async def test_a_channel_begins_where_a_cursor_stood_when_it_was_opened(tmp_path: Path) -> None:
    """The place is in the log: the cursor may move or go, and the next leader gives out from there."""
    start = CursorStart("billing")
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await append(partition, b"a", b"b", b"c", b"d")
        await set_cursor(partition, "billing", 2)
        await delivery.open(CHANNEL, "new", 1, ChannelSettings(start=start))
        await delivery.open(8, "other", 2, ChannelSettings(start=CursorStart("unknown")))
        await delivery.open(9, "later", 3, ChannelSettings(start=start), from_start=True)
        await set_cursor(partition, "billing", 4)
        await delivery.open(CHANNEL, "new", 4, ChannelSettings(start=start, retry_ms=0))
        delivery.stop()

    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await set_cursor(partition, "billing", None)
        found = partition.state.channels.by_id
        assert {CHANNEL: 2, 8: 0, 9: 0} == {number: each.next for number, each in found.items()}
        assert ChannelSettings(start=start, retry_ms=0) == found[CHANNEL].settings
        assert values(await given(delivery)) == [b"c", b"d"]
        delivery.stop()


async def set_cursor(partition: Partition, name: str, position: int | None) -> None:
    await partition.cursor_commands.set(
        name, position, expected=None, check=False, owner="", now_ms=partition.context.now_ms()
    )


async def test_a_channel_at_a_cursor_that_is_behind_begins_with_what_is_left(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await append(partition, b"a")
        first = partition.log.last_index
        await append(partition, b"b")
        await set_cursor(partition, "billing", 0)
        await partition.start_mover.propose(first)
        await delivery.open(CHANNEL, "new", 1, ChannelSettings(start=CursorStart("billing")))
        assert values(await given(delivery)) == [b"b"]
        delivery.stop()


async def test_a_channel_is_drained_when_that_is_committed(tmp_path: Path) -> None:
    """An acknowledgement that comes after all was committed that the leader looked at may be lost."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        jobs = await given(delivery)
        await partition.propose_seal(SealRecord(7, 1, [Output(1, 0, 65_536, b"1" * 16)], "strict"))
        assert not await delivery.is_drained(CHANNEL)
        when_committed = partition.appends.when_committed

        async def seen(*arguments: Any, **named: Any) -> Receipt:
            receipt = await when_committed(*arguments, **named)
            partition.appends.propose(channel_entry([Acknowledged(CHANNEL, [0, 1])], synced=True), [])
            return receipt

        partition.appends.when_committed = seen  # type: ignore[method-assign,assignment]
        drained = await delivery.is_drained(CHANNEL)
        assert not (drained and partition.committed_index < partition.log.last_index)
        partition.appends.when_committed = when_committed  # type: ignore[method-assign]

        await delivery.settle(CHANNEL, steps("ack", jobs))
        assert await delivery.is_drained(CHANNEL)
