"""What is pending in a partition that has ended goes to those that follow it: one voter, a real log."""

from __future__ import annotations

import asyncio
from pathlib import Path

from laminar.node.delay.contents import Contents
from laminar.node.delay.sender import DelayedBatchAnswer, DelayedBatchRequest, Sender
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.delayed_records import Received
from laminar.node.partition.state.succession import Output, SealRecord
from laminar.wire.key_route import LOGICAL_PARTITIONS
from tests.node.delay.test_publisher import append, now_ms, publishing


async def test_a_batch_is_sent_with_the_earliest_time_of_now(tmp_path: Path) -> None:
    """The publisher there reads it in time for that, also where all were to come much later at first."""
    async with publishing(tmp_path) as (partition, publisher):
        far, soon = now_ms() + 3_600_000, now_ms() + 60_000
        await append(partition, b"moved", b"other", delivery_times=[far, far + 1])
        await publisher.change(0, soon, was_ms=far)
        outputs = [Output(1, 0, LOGICAL_PARTITIONS, b"o" * 16)]
        await partition.appends.append_control(SealRecord(1, 1, outputs, "strict").frame())
        partition.keep_seal()
        sent: asyncio.Queue[Received] = asyncio.Queue()

        async def send(partition: Partition, request: DelayedBatchRequest) -> DelayedBatchAnswer:
            sent.put_nowait(request.batch)
            return DelayedBatchAnswer(True)

        sender = Sender(partition, Contents(partition), send)
        sender.check()
        batch = await sent.get()
        task, again = sender._task, asyncio.create_task(sent.get())
        assert task is not None
        await asyncio.wait({task, again}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        sender.stop()

        assert not again.done(), "it is sent again"
        again.cancel()
        assert (len(publisher.delayed), publisher.delayed.sent) == (0, {(1, 1): 1})
        assert (batch.numbers, batch.moved) == ([0, 1], [0, soon])
        assert (batch.first_due_ms, batch.last_due_ms) == (soon, far + 1)
