"""Send the delayed records of a sealed partition to the partitions that follow it. The leader does this.

A change of the topic's route seals a partition, and nothing is published in it any more. Its pending records
are sent to the *outputs* of the change, each record to the output that has its key now. A record without a
key is assigned by its own number; so is one with a key of another partition, which a client appended here by
the partition's number. Records retain their numbers. While a record is being sent it is pending in both
partitions: then its time cannot be changed, and only the later partition publishes it.

A record is sent once. The batches for an output are a *stream*, numbered from 0. The records of a batch
follow from the log alone, because the table of a sealed partition changes only by sending. So the next leader
sends the same batch under the same number, and the output, which stores the count in its log, appends it
once. An output that is sealed itself appends no more; the batches that it has not appended go, in the same
stream, to the partitions that follow it. Whether it has appended a batch is certain, because its log is
final.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.delay.contents import PUBLISH_BYTES, Contents, Due, joined, record_bytes, written_ms
from laminar.node.delay.publisher import PUBLISH_RECORDS
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import not_leader
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.delayed_records import Received, Sent, delayed_entry
from laminar.node.partition.state.succession import Output
from laminar.wire.key_route import logical_of_key

_log = logging.getLogger("laminar.delay")

PAUSE_S: Final = 0.5
"""The pause before another attempt."""


class DelayedBatchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to append a batch of a stream of delayed records."""

    topic: str
    partition: int
    batch: Received


class DelayedBatchAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer: whether the batch is appended, by this request or an earlier one.

    If not, the partition is sealed, and `outputs` are the partitions that follow it.
    """

    taken: bool
    outputs: list[Output] = []


Send = Callable[[Partition, DelayedBatchRequest], Awaitable[DelayedBatchAnswer]]
"""Asks the leader of a partition to append a batch (`take`)."""


async def take(partition: Partition, batch: Received) -> DelayedBatchAnswer:
    """Append a batch from a partition that this one follows; answer when that is committed. Leader only.

    Raises:
        Problem: 503 `not_leader`; 503 `changing` while it is uncertain whether the partition is sealed.
    """
    partition.check_leads()
    table = partition.state.delayed
    if table.received.get(batch.stream, 0) > batch.sequence:
        await partition.reader.confirmed_bounds()
        await partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0), copied=False
        )
        return DelayedBatchAnswer(True)
    seal = partition.context.final_seal
    if seal is not None:
        return DelayedBatchAnswer(False, seal.record.outputs)
    try:
        await partition.appends.append_control(delayed_entry(batch))
    except Problem as problem:
        if problem.code != "sealed":
            raise
        seal = partition.context.final_seal
        assert seal is not None, f"{partition.context.name}: its seal is final"
        return DelayedBatchAnswer(False, seal.record.outputs)
    if partition.appends.on_delayed is not None:
        partition.appends.on_delayed()
    return DelayedBatchAnswer(True)


class _Range(NamedTuple):
    """The logical partitions from `first` up to, not including, `end`."""

    first: int
    end: int

    @classmethod
    def of(cls, output: Output) -> _Range:
        return cls(output.first, output.first + output.size)

    def common(self, other: _Range) -> _Range:
        return _Range(max(self.first, other.first), min(self.end, other.end))

    def holds(self, logical: int) -> bool:
        return self.first <= logical < self.end


class Sender:
    """Sends the delayed records of one sealed partition, in a task that `check` begins and `stop` ends."""

    def __init__(self, partition: Partition, contents: Contents, send: Send) -> None:
        """Create the sender of a partition; it is idle until the partition is sealed for good."""
        self._partition = partition
        self._contents = contents
        self._send = send
        self._task: asyncio.Task[None] | None = None
        self.sent = 0

    def check(self) -> None:
        """Begin to send, if this replica leads, the partition is sealed for good, and records are pending."""
        if self._task is None and self._may_send():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """End the task: this replica leads no more, or the process ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _may_send(self) -> bool:
        partition = self._partition
        return (
            partition.leads and partition.context.final_seal is not None and len(partition.state.delayed) > 0
        )

    async def _run(self) -> None:
        try:
            while self._may_send():
                try:
                    await self._send_all()
                except (Problem, StorageError) as error:
                    _log.debug(
                        "%s: delayed records are not sent on yet: %s", self._partition.replica.name, error
                    )
                if self._may_send():
                    await asyncio.sleep(PAUSE_S)  # also if nothing was sent: else this would never wait
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._partition.stop(error)
        finally:
            self._task = None

    async def _send_all(self) -> None:
        seal = self._partition.context.final_seal
        assert seal is not None, "only what has ended sends"
        for output in seal.record.outputs:
            targets = [output]
            while targets:
                # After a sealed target come the partitions that follow it: each range has one that takes
                # records.
                targets += await self._send_to(output, targets.pop(0))

    async def _send_to(self, output: Output, target: Output) -> Sequence[Output]:
        """Send the records that belong to both an output and `target`, its follower, to `target`.

        Returns the partitions that follow `target`, if it is sealed and takes no more.
        """
        partition = self._partition
        wanted = _Range.of(output).common(_Range.of(target))
        stream = partition.replica.group + output.number.to_bytes(4, "little")
        first_entry = 0
        while self._may_send():
            # The number of the batch and its records are of one state of the table: another leader may send
            # this batch, and be deposed again, while its entries are read here.
            term = partition.replica.core.term
            sequence = partition.state.delayed.sent.get((output.number, target.number), 0)
            chosen = await self._chosen(wanted, first_entry)
            if not chosen:
                break
            first_entry = chosen[0].place.entry
            records = await self._contents.records(chosen)
            chosen = chosen[: len(records)]
            if not self._may_send() or partition.replica.core.term != term:
                raise not_leader(partition.context.name, outcome="not_applied")
            moved = partition.state.delayed.moved
            # The publisher there reads a batch in time for the earliest, so present due times count, too.
            times = [written_ms(batch, each.place.row) for each, batch in records]
            times += [each.due_ms for each in chosen]
            batch = Received(
                stream,
                sequence,
                [each.number for each in chosen],
                min(times),
                max(times),
                [
                    value
                    for row, each in enumerate(chosen)
                    if each.number in moved
                    for value in (row, each.due_ms)
                ],
                bytes(joined(records, as_written=True)),
            )
            answer = await self._send(partition, DelayedBatchRequest(partition.topic, target.number, batch))
            if not answer.taken:
                return answer.outputs
            rows = [value for each in chosen for value in each.place]
            self.sent += len(chosen)
            await partition.appends.append_control(
                delayed_entry(Sent(output.number, target.number, sequence, rows)), even_if_full=True
            )
        return ()

    async def _chosen(self, wanted: _Range, first_entry: int) -> list[Due]:
        """Return the next records to send of a range, in order of entries and rows, from `first_entry` on."""
        table = self._partition.state.delayed
        found: list[Due] = []
        size = 0
        for entry in sorted(entry for entry in table.batches if entry >= first_entry):
            held = table.batches.get(entry)
            if held is None:
                continue  # another leader has sent it; what is chosen here is dropped
            batch = await self._contents.batch(entry)
            keys = batch.keys
            for each in await self._contents.due(held):
                key = None if keys is None else keys[each.place.row]
                if not wanted.holds(self._logical(key, each.number)):
                    continue
                size += record_bytes(batch, each.place.row)
                if found and (size > PUBLISH_BYTES or len(found) == PUBLISH_RECORDS):
                    return found
                found.append(each)
        return found

    def _logical(self, key: bytes | None, number: int) -> int:
        """Return the logical partition of a record, which is always one of this partition's range.

        The key may belong to another range: an append that names a partition, or a logical partition, may
        have any key.
        """
        seal = self._partition.context.final_seal
        assert seal is not None, "only what has ended sends"
        outputs = seal.record.outputs
        first, size = outputs[0].first, sum(each.size for each in outputs)
        logical = first + number % size if key is None else logical_of_key(key)
        return logical if first <= logical < first + size else first + number % size
