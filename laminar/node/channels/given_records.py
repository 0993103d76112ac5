"""Read the records that were given out. Those that cannot be read are released, or nacked as damaged."""

from __future__ import annotations

from collections.abc import Collection

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.open_records.jobs import Jobs, Run, frames_of, split
from laminar.node.channels.settling import Settling
from laminar.node.partition.partition import Partition


class GivenRecords:
    """Reads the records of one partition that were given out."""

    def __init__(self, partition: Partition, settling: Settling) -> None:
        self._partition = partition
        self._settling = settling

    async def read(self, channel: int, runs: list[Run], late: Collection[int]) -> Jobs:
        """Return records that were given out, with their batches.

        Records that cannot be read are released.
        """
        number = self._partition.number
        held = self._partition.state.channels.by_id.get(channel)
        floor = held.floor if held is not None else 0
        if not runs:
            return Jobs(number, floor, [], [])
        try:
            frames, count = await frames_of(self._partition, runs)
        except DamagedRange as damage:
            # Other replicas may have the record; if none has, it is dead after some attempts.
            first, end = damage.first_offset, max(damage.next_offset, runs[0].first + 1)
        except Problem as problem:
            if problem.code != "offset_expired":
                self._settling.release(channel, runs)
                raise
            # The record was deleted meanwhile, or its copy is lost on all replicas: then it becomes dead.
            first = problem.value if isinstance(problem.value, int) else runs[0].first
            end = self._end_of_expired(first, runs[0].end)
        else:
            if count < len(runs):
                self._settling.release(channel, runs[count:])
            again = (
                [offset for run in runs[:count] for offset in range(run.first, run.end) if offset in late]
                if late
                else []
            )
            return Jobs(number, floor, runs[:count], frames, again)
        whole, rest = split(runs, first)
        if whole and rest:
            # The unreadable record is given out again at once, and is then the first.
            self._settling.release(channel, rest)
            return await self.read(channel, whole, late)
        lost, rest = split(runs, end)
        self._settling.settle_alone(channel, "nack", lost, "damaged")
        self._settling.release(channel, rest)
        return Jobs(number, floor, [], [])

    def _end_of_expired(self, first: int, end: int) -> int:
        """Return the offset after the records from `first` on that are not in the log and have no copy."""
        start, copies = self._partition.start_offset, self._partition.state.channels.copies
        at = first + 1
        while at < min(end, start) and at not in copies:
            at += 1
        return at
