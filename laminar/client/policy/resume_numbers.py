"""Numbers of a named producer's records, by which a later run of the program continues its work.

They rise from 1 in the order of sending. The producer's *checkpoint* is one up to which everything is
durable; batches carry it into the log as their floor. A run that learns each partition's own checkpoint when
its epoch begins knows which records are there already, and does not send them again: so every record, by its
number, must go to the same partition in every run. Without a key it goes by the number itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from laminar.client.errors import ConfigError
from laminar.client.policy.partition_queue import PartitionQueue

# Records without a key change the partition after this number of them: together they fill batches.
BLOCK = 1024
MAX_NUMBER = 2**63 - 1


class Numbers:
    """State of one producer's numbers. `checkpoints` are those of the partitions, 0 where there is none."""

    __slots__ = ("_checkpoints", "_lost", "_used", "last", "plain", "resumed_at")

    def __init__(self, checkpoints: Sequence[int], *, floor: int) -> None:
        self.resumed_at = floor
        self.last = floor
        self.plain = False
        self._checkpoints = list(checkpoints)
        self._used = 0
        self._lost = 0

    def check(self, number: int) -> None:
        """Raise ConfigError if `number` may not be the next record's."""
        if self.plain:
            raise _refused("records with and without numbers are not mixed", number, "none")
        if not self._used < number <= MAX_NUMBER:
            raise _refused("numbers rise from record to record, from 1", number, f"above {self._used}")

    def sent(self, number: int) -> None:
        """Note that a record with this number was taken, or was there before."""
        self._used = number
        self.last = max(self.last, number)

    def check_none(self) -> None:
        """Raise ConfigError if a record without a number may not come now."""
        if self._used:
            raise _refused("records with and without numbers are not mixed", None, f"above {self._used}")
        self.plain = True

    def is_there(self, number: int, partition: int) -> bool:
        """Return whether an earlier run made this partition's record durable."""
        return number <= max(self.resumed_at, self._checkpoints[partition])

    def failed(self, first_number: int) -> None:
        """Note a batch that failed: no checkpoint passes its first number."""
        if first_number:
            self._lost = min(self._lost or first_number, first_number)

    def checkpoint(self, queues: Iterable[PartitionQueue]) -> int:
        """Return the highest number up to which all is durable.

        `queues` are those that still have batches.
        """
        waiting = [first for queue in queues if (first := queue.first_number())]
        if self._lost:
            waiting.append(self._lost)
        return max(self.resumed_at, min(waiting) - 1) if waiting else self.last


def _refused(what: str, number: int | None, limit: object) -> ConfigError:
    return ConfigError(what, code="number", field="number", value=number, limit=limit)
