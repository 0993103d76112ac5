"""Numbers of a named producer's records, by which a later run of the program continues its work.

Numbers rise from 1 in the order of sending. The producer's *checkpoint* is a number up to which all records
are durable, in all partitions; batches carry it into the log as their *floor*. When the epoch of a run
begins, each partition reports its own checkpoint, the last number that it has. So the run knows which records
are durable already, and does not send them again. For that, the record with a given number must have the same
place among the logical partitions in every run: that of a record without a key follows from its number. The
partition of that place may have changed since, so a record is looked up in all partitions that held it
(docs/routes.md, rule `lookup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laminar.client.errors import ConfigError
from laminar.client.policy.partition_queue import PartitionQueue

# This number of consecutive records without a key go to the same partition, so that they fill batches.
BLOCK = 1024
MAX_NUMBER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Reached:
    """The progress of a producer's earlier runs in one partition: `checkpoint` is the last number there.

    It is 0 if there is none. `held` is the partition's range of logical partitions (hashes of keys); `inputs`
    are the partitions that it replaced.
    """

    checkpoint: int
    held: range
    inputs: Sequence[int] = ()


class Numbers:
    """The numbers of one named producer's records: which are durable, and which this run has sent.

    `floor` is the number up to which all records were durable when this run began. `created_with` is the
    number of the topic's partitions at its creation; the logical partition of a record without a key follows
    from it and the record's number. Call `learn` with the progress of earlier runs in each partition, also in
    those that have ended.
    """

    __slots__ = (
        "_highest",
        "_known",
        "_lost",
        "_reached",
        "_used",
        "created_with",
        "last",
        "plain",
        "resumed_at",
    )

    def __init__(self, *, floor: int, created_with: int) -> None:
        self.created_with = created_with
        self.resumed_at = floor
        self.last = floor
        self.plain = False
        self._reached: dict[int, Reached] = {}
        self._highest = floor
        self._known: dict[int, int] = {}  # by logical partition, the highest checkpoint over it
        self._used = 0
        self._lost = 0

    def learn(self, partition: int, reached: Reached) -> None:
        """Note the progress of the earlier runs in a partition."""
        self._reached[partition] = reached
        self._highest = max(self._highest, reached.checkpoint)
        self._known.clear()

    @property
    def reached(self) -> int:
        """The highest number that an earlier run made durable in any partition."""
        return self._highest

    @property
    def partitions(self) -> frozenset[int]:
        """The partitions for which `learn` was called."""
        return frozenset(self._reached)

    def check(self, number: int) -> None:
        """Raise ConfigError unless `number` is higher than that of the record before."""
        if self.plain:
            raise _refused("records with and without numbers are not mixed", number, "none")
        if not self._used < number <= MAX_NUMBER:
            raise _refused("numbers rise from record to record, from 1", number, f"above {self._used}")

    def sent(self, number: int) -> None:
        """Note that the record with this number was put into a batch, or an earlier run made it durable."""
        self._used = number
        self.last = max(self.last, number)

    def check_none(self) -> None:
        """Note a record without a number. Raise ConfigError if earlier ones had numbers."""
        if self._used:
            raise _refused("records with and without numbers are not mixed", None, f"above {self._used}")
        self.plain = True

    def is_there(self, number: int, logical: int) -> bool:
        """Return whether an earlier run made the record with this number durable.

        `logical` is the record's logical partition. In each partition the numbers rise, and the successors of
        a partition begin with the lowest number that it does not have. So every number up to the highest
        checkpoint over `logical` is durable in one of the partitions that held it.
        """
        if number > self._highest:
            return False
        known = self._known.get(logical)
        if known is None:
            over = [each.checkpoint for each in self._reached.values() if logical in each.held]
            known = self._known[logical] = max(over, default=0)
        return number <= max(self.resumed_at, known)

    def is_there_in(self, number: int, partition: int) -> bool:
        """Return whether an earlier run made the record durable that the program sends to `partition`.

        If that partition replaced several, the record may have been sent to any of them; so all must have the
        number: better to append a record twice than to lose it.
        """
        if number <= self.resumed_at:
            return True
        reached = self._reached.get(partition)
        if reached is None:
            return False
        if number <= reached.checkpoint:
            return True
        return bool(reached.inputs) and all(self.is_there_in(number, each) for each in reached.inputs)

    def failed(self, first_number: int) -> None:
        """Note that a batch failed: the checkpoint stays below its first number (0: it has no numbers)."""
        if first_number:
            self._lost = min(self._lost or first_number, first_number)

    def checkpoint(self, queues: Iterable[PartitionQueue]) -> int:
        """Return the checkpoint of this run: the number up to which all records are durable.

        `queues` are the queues that have batches without a receipt.
        """
        waiting = [first for queue in queues if (first := queue.first_number())]
        if self._lost:
            waiting.append(self._lost)
        return max(self.resumed_at, min(waiting) - 1) if waiting else self.last


def _refused(what: str, number: int | None, limit: object) -> ConfigError:
    return ConfigError(what, code="number", field="number", value=number, limit=limit)
