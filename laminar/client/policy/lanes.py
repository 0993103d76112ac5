"""The move of records from partitions that have ended to their successors, as pure objects.

A *lane* is the batches that a producer numbers for one partition. When a change of the topic's route ends
partitions, their lanes end (docs/routes.md, rule `resolve`):

1. A batch that was sent to an ended partition and has no final answer is sent to it again, until the batch
   has its receipt or is certainly not there. If it were sent to another partition, it could be in both.
2. Once that holds for all ended partitions of a change, the records that they did not take are divided into
   new batches by the new route, in order of sending, ahead of newer records. Until then nothing is sent to
   the successors: a record could come before an earlier one of its key.
3. If the change has weak order, each batch is divided by itself, and newer records need not wait.

A producer that is several changes behind adopts the newest route at once. It has sent nothing to the
partitions between, so only the key ranges of its own route and of the newest one matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laminar.client.policy.partition_queue import RECORD_OVERHEAD_BYTES, PartitionQueue, Pending, extended
from laminar.wire.key_route import Route


@dataclass(slots=True, eq=False)
class LaneChange:
    """One change of the route, as a producer sees it: queues that ended, and queues that replace them.

    `inputs` are the ended queues, `outputs` their successors by partition. With `strict` the outputs send
    nothing until all inputs are resolved. `made` is true once the records left in the inputs are moved.
    """

    inputs: list[PartitionQueue]
    outputs: dict[int, PartitionQueue]
    route: Route
    strict: bool
    made: bool = False
    spread: int = 0

    @property
    def resolved(self) -> bool:
        """Whether it is certain of each batch of the ended queues whether its partition has it."""
        return all(queue.resolved for queue in self.inputs)

    def next_output(self) -> PartitionQueue:
        """Return the output for the next batch of records without a key: the outputs take turns."""
        self.spread += 1
        return self.outputs[list(self.outputs)[self.spread % len(self.outputs)]]


def overlaps(before: Route, after: Route) -> list[tuple[list[int], list[int]]]:
    """Return pairs of lists: partitions of `before` that ended, and those of `after` that replaced them.

    Each pair is as small as possible: it begins and ends where both routes have a bound.
    """
    ended = [(held.start, held.stop, number) for number, held in before.ranges().items()]
    begun = [(held.start, held.stop, number) for number, held in after.ranges().items()]
    ended = [each for each in ended if each[2] not in after]
    begun = [each for each in begun if each[2] not in before]
    found: list[tuple[list[int], list[int]]] = []
    while ended and begun:
        old, new = ended.pop(0), begun.pop(0)
        inputs, outputs, ends = [old[2]], [new[2]], (old[1], new[1])
        while ends[0] != ends[1] and (ended if ends[0] < ends[1] else begun):
            if ends[0] < ends[1]:
                old = ended.pop(0)
                inputs.append(old[2])
                ends = (old[1], ends[1])
            else:
                new = begun.pop(0)
                outputs.append(new[2])
                ends = (ends[0], new[1])
        found.append((inputs, outputs))
    return found


class Cutter:
    """A builder of new batches for several queues, from records of other queues; `batches` is by queue."""

    def __init__(self, *, batch_bytes: int, max_records: int) -> None:
        self.batches: dict[PartitionQueue, list[Pending]] = {}
        self._batch_bytes = batch_bytes
        self._max_records = max_records

    def put(self, source: Pending, position: int, queue: PartitionQueue) -> tuple[Pending, int]:
        """Copy a record of `source` to the last batch for `queue` or a new one; return batch and position."""
        key = source.keys[position]
        size_bytes = len(source.values[position]) + RECORD_OVERHEAD_BYTES + len(key or b"")
        made = self.batches.setdefault(queue, [])
        pending = made[-1] if made else None
        if (
            pending is None
            or pending.delayed is not source.delayed
            or pending.size_bytes + size_bytes > self._batch_bytes
            or len(pending.values) >= self._max_records
        ):
            pending = Pending(queue.partition)
            pending.delayed = source.delayed
            made.append(pending)
        return pending, copy_record(source, position, pending)


def copy_record(source: Pending, position: int, pending: Pending) -> int:
    """Copy the record at `position` of the batch `source` to the end of the batch `pending`.

    Returns the record's position in `pending`.

    The deadline of `pending` becomes that of `source` if that is earlier.
    """
    place = len(pending.values)
    key = source.keys[position]
    pending.values.append(source.values[position])
    pending.keys.append(key)
    pending.keyed |= key is not None
    pending.size_bytes += len(source.values[position]) + RECORD_OVERHEAD_BYTES + len(key or b"")
    if (tag := _cell(source.tags, position)) is not None:
        pending.tags = extended(pending.tags, place, tag)
    if (headers := _cell(source.headers, position)) is not None:
        pending.headers = extended(pending.headers, place, headers)
    if (timestamp_ms := _cell(source.timestamps, position)) is not None:
        pending.timestamps = extended(pending.timestamps, place, timestamp_ms)
    if (trace_id := _cell(source.trace_ids, position)) is not None:
        pending.trace_ids = extended(pending.trace_ids, place, trace_id)
    if source.delayed:
        pending.delivery_times.append(source.delivery_times[position])
    if source.numbers is not None:
        pending.number(source.numbers[position])
    if source.deadline_ms >= 0 and not 0 <= pending.deadline_ms <= source.deadline_ms:
        pending.deadline_ms = source.deadline_ms
    return place


def in_order(batches: Sequence[Pending]) -> list[tuple[Pending, int]]:
    """Return the records of batches of several queues in order of sending: by number if they have numbers.

    Numbers in a partition must rise: a later run takes the last one as the progress of that partition. So the
    records of several queues are merged by number, not put one queue after the other.
    """
    records = [(pending, position) for pending in batches for position in range(len(pending.values))]
    if any(pending.numbers is not None for pending in batches):
        records.sort(key=_number)
    else:
        records.sort(key=lambda record: record[0].order)
    return records


def _number(record: tuple[Pending, int]) -> int:
    pending, position = record
    return 0 if pending.numbers is None else pending.numbers[position]


def _cell(column: Sequence[Any] | None, position: int) -> Any:
    return column[position] if column is not None and position < len(column) else None
