"""Numbers of a named producer's records, by which a later run of the program continues its work.

Numbers rise from 1 in the order of sending. The producer's *checkpoint* is a number up to which all records
are durable, in all partitions; batches carry it into the log as their *floor*. When the epoch of a run
begins, each partition reports its own checkpoint, the last number that it has. So the run knows which records
are durable already, and does not send them again. For that, the record with a given number must go to the
same partition in every run: a record without a key goes to a partition that follows from its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from laminar.client.errors import ConfigError
from laminar.client.policy.partition_queue import PartitionQueue

# This number of consecutive records without a key go to the same partition, so that they fill batches.
BLOCK = 1024
MAX_NUMBER = 2**63 - 1


class Numbers:
    """The numbers of one named producer.

    `checkpoints` are those of the partitions, by number; 0 for a partition without one. `floor` is the number
    up to which everything was durable when this run began. `created_with` is the number of the topic's
    partitions at its creation, from which a record's place follows.
    """

    __slots__ = ("_checkpoints", "_lost", "_used", "created_with", "last", "plain", "resumed_at")

    def __init__(self, checkpoints: Mapping[int, int], *, floor: int, created_with: int) -> None:
        self.created_with = created_with
        self.resumed_at = floor
        self.last = floor
        self.plain = False
        self._checkpoints = dict(checkpoints)
        self._used = 0
        self._lost = 0

    def check(self, number: int) -> None:
        """Raise ConfigError if `number` may not be the next record's."""
        if self.plain:
            raise _refused("records with and without numbers are not mixed", number, "none")
        if not self._used < number <= MAX_NUMBER:
            raise _refused("numbers rise from record to record, from 1", number, f"above {self._used}")

    def sent(self, number: int) -> None:
        """Note that the record with this number was put into a batch, or is durable from an earlier run."""
        self._used = number
        self.last = max(self.last, number)

    def check_none(self) -> None:
        """Raise ConfigError for a record without a number if others have had one; note that none has."""
        if self._used:
            raise _refused("records with and without numbers are not mixed", None, f"above {self._used}")
        self.plain = True

    def is_there(self, number: int, partition: int) -> bool:
        """Return whether an earlier run made the record with this number durable; it goes to `partition`."""
        return number <= max(self.resumed_at, self._checkpoints[partition])

    def failed(self, first_number: int) -> None:
        """Note that a batch failed: the checkpoint stays below its first number (0: it has no numbers)."""
        if first_number:
            self._lost = min(self._lost or first_number, first_number)

    def checkpoint(self, queues: Iterable[PartitionQueue]) -> int:
        """Return the highest number up to which all records are durable.

        `queues` are the queues that have batches without a receipt.
        """
        waiting = [first for queue in queues if (first := queue.first_number())]
        if self._lost:
            waiting.append(self._lost)
        return max(self.resumed_at, min(waiting) - 1) if waiting else self.last


def _refused(what: str, number: int | None, limit: object) -> ConfigError:
    return ConfigError(what, code="number", field="number", value=number, limit=limit)
