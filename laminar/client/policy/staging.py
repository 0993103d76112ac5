"""Stages of one writer for a batch of a sink, as a pure object: records in, numbered stages out.

Records are gathered by partition; `take` returns what is to be staged next, `staged` notes that it was. Where
the records go, over which connections and how often, belongs to `stage_sender.py`; what happens to the
stages, to the program that commits them.

1. A stage is whole: it is staged as it was gathered, or not at all. The numbers of a writer's stages rise in
   the order in which its records were put, so in each partition a commit publishes them in that order.
2. The numbers begin at a random place: writers of one batch that know nothing of each other (the tasks of a
   job, a second attempt of one of them, a block that was tried again) do not meet. A commit names the stages
   of those that count; all others are dropped.
3. Full stages go out at once, others at the end, or when the buffer is full: then the largest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from laminar.client.errors import ConfigError, Error
from laminar.client.policy.partition_queue import Pending, extended
from laminar.client.policy.record_accumulator import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES
from laminar.client.records import Staged, StagedPart

# Numbers of stages have 53 bits: as many for a writer's own count as 1 TiB of stages needs, the rest random.
_COUNT_BITS = 20
MAX_FIRST_STAGE = (1 << 53 - _COUNT_BITS) - 1
MAX_RECORDS = 65_536


class Row(NamedTuple):
    """A record that is to be staged."""

    value: bytes
    key: bytes | None
    partition: int | None
    tag: str | None = None
    headers: Mapping[str, bytes] | None = None
    timestamp_ms: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that the record takes in a batch."""
        return len(self.value) + len(self.key or b"") + RECORD_OVERHEAD_BYTES


class _Topic:
    """Open stages of one topic, by partition; records wait in `rows` until its partitions are known."""

    __slots__ = ("open", "partition_of_key", "partitions", "rows", "sticky")

    def __init__(self) -> None:
        self.partitions = 0
        self.partition_of_key: Callable[[bytes], int] | None = None
        self.rows: list[Row] = []
        self.open: dict[int, Pending] = {}
        self.sticky = 0


class Stages:
    """Records that a writer gathers, has in flight, and has staged.

    Not thread-safe: a caller with threads locks. `first_stage` is random, up to `MAX_FIRST_STAGE`;
    `buffer_bytes` is what is gathered and not staged before stages are sent that are not full.
    """

    def __init__(self, *, first_stage: int, batch_bytes: int, buffer_bytes: int) -> None:
        assert 0 <= first_stage <= MAX_FIRST_STAGE, first_stage
        self.buffered_bytes = 0
        self.buffer_bytes = buffer_bytes
        self._next_stage = first_stage << _COUNT_BITS
        self._last_stage = self._next_stage + (1 << _COUNT_BITS) - 1
        self._spread = first_stage
        self._batch_bytes = batch_bytes
        self._topics: dict[str, _Topic] = {}
        self._ready: deque[tuple[str, Pending]] = deque()
        self._staged: dict[tuple[str, int], list[int]] = {}
        self._records = 0

    # -- records in --------------------------------------------------------------------------

    def put(self, topic: str, row: Row) -> bool:
        """Gather a record; return whether there may now be something to `take`, or a topic to `know`.

        Raises:
            Error: for a record that no batch can hold.
            ConfigError: for a partition that the topic does not have.
        """
        if len(row.value) > MAX_RECORD_BYTES:
            raise _too_large(len(row.value))
        place = self._topics.get(topic)
        if place is None:
            place = self._topics[topic] = _Topic()
        if place.partition_of_key is None:
            place.rows.append(row)
            self.buffered_bytes += row.size_bytes
            return len(place.rows) == 1
        self._gather(topic, place, row)
        self.buffered_bytes += row.size_bytes
        return bool(self._ready) or self.buffered_bytes >= self.buffer_bytes

    def unknown(self) -> list[str]:
        """Return the topics whose partitions have to be given to `know`."""
        return [topic for topic, place in self._topics.items() if place.partition_of_key is None]

    def know(self, topic: str, *, partitions: int, partition_of_key: Callable[[bytes], int]) -> None:
        """Set the partitions of a topic, and gather its records that wait. Raises as `put`."""
        place = self._topics.setdefault(topic, _Topic())
        place.partitions = partitions
        place.partition_of_key = partition_of_key
        place.sticky = self._spread % partitions
        rows, place.rows = place.rows, []
        for row in rows:
            self._gather(topic, place, row)

    def _gather(self, topic: str, place: _Topic, row: Row) -> None:
        assert place.partition_of_key is not None
        number = row.partition
        if number is None:
            number = place.sticky if row.key is None else place.partition_of_key(row.key)
        elif not 0 <= number < place.partitions:
            raise ConfigError(
                f"partition {number} of {place.partitions} of topic {topic!r}",
                code="no_partition",
                field="partition",
                value=number,
                limit=place.partitions - 1,
            )
        pending = place.open.get(number)
        if pending is not None and pending.size_bytes + row.size_bytes > self._batch_bytes:
            self._close(topic, place, pending)
            pending = None
        if pending is None:
            pending = place.open[number] = Pending(number)
        before = len(pending.values)
        pending.values.append(row.value)
        pending.keys.append(row.key)
        pending.keyed |= row.key is not None
        if row.tag is not None:
            pending.tags = extended(pending.tags, before, row.tag)
        if row.headers is not None:
            pending.headers = extended(pending.headers, before, row.headers)
        if row.timestamp_ms is not None:
            pending.timestamps = extended(pending.timestamps, before, row.timestamp_ms)
        pending.size_bytes += row.size_bytes
        if pending.size_bytes >= self._batch_bytes or len(pending.values) >= MAX_RECORDS:
            self._close(topic, place, pending)

    # -- stages out --------------------------------------------------------------------------

    def _close(self, topic: str, place: _Topic, pending: Pending) -> None:
        """Close a stage: it takes no more records, and gets its number."""
        if self._next_stage > self._last_stage:
            raise Error(
                f"a writer stages at most {1 << _COUNT_BITS} batches for one commit",
                code="too_many_stages",
                field="stages",
                limit=1 << _COUNT_BITS,
                hint="commit more often, or use larger batches",
                outcome="not_applied",
            )
        del place.open[pending.partition]
        pending.sequence = self._next_stage
        self._next_stage += 1
        self._ready.append((topic, pending))
        if pending.partition == place.sticky:
            # Spread by stage: what comes next without a key goes to the next partition.
            place.sticky = (place.sticky + 1) % place.partitions

    def close_all(self) -> None:
        """Close all open stages: no more records will be put."""
        for topic, place in self._topics.items():
            for pending in list(place.open.values()):
                self._close(topic, place, pending)

    def take(self) -> tuple[str, Pending] | None:
        """Return the topic and the next stage to send (`Pending.sequence` is its number), or None."""
        if not self._ready and self.buffered_bytes >= self.buffer_bytes:
            largest = max(
                (
                    (pending.size_bytes, topic, pending.partition)
                    for topic, place in self._topics.items()
                    for pending in place.open.values()
                ),
                default=None,
            )
            if largest is not None:
                _, topic, number = largest
                place = self._topics[topic]
                self._close(topic, place, place.open[number])
        return self._ready.popleft() if self._ready else None

    def staged(self, topic: str, pending: Pending) -> None:
        """Note that a stage that was taken is durable."""
        self.buffered_bytes -= pending.size_bytes
        self._records += len(pending.values)
        self._staged.setdefault((topic, pending.partition), []).append(pending.sequence)

    def drop(self) -> None:
        """Forget all that is gathered: it will not be committed."""
        self._topics.clear()
        self._ready.clear()
        self._staged.clear()
        self.buffered_bytes = 0
        self._records = 0

    def result(self, sink: str, number: int, epoch: int) -> Staged:
        """Return what was staged, to be committed."""
        parts = tuple(
            StagedPart(topic, partition, tuple(sorted(stages)))
            for (topic, partition), stages in sorted(self._staged.items())
        )
        return Staged(sink, number, epoch, parts, self._records)


def joined(stages: Iterable[Staged], *, sink: str, number: int, epoch: int) -> list[StagedPart]:
    """Return the parts of one commit from all that writers staged for it, each partition once.

    Raises:
        ConfigError: for what was staged for something else, and for what is given twice.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for each in stages:
        for field, value, wanted in (
            ("sink", each.sink, sink),
            ("number", each.number, number),
            ("epoch", each.epoch, epoch),
        ):
            if value != wanted:
                raise ConfigError(
                    f"what is to be committed was staged for {field} {value!r}, not {wanted!r}",
                    code="other_batch",
                    field=field,
                    value=value,
                    limit=wanted,
                )
        for part in each.parts:
            known = found.setdefault((part.topic, part.partition), [])
            known.extend(part.stages)
            if len(set(known)) != len(known):
                raise ConfigError(
                    f"a stage of {part.topic}/{part.partition} is to be committed twice",
                    code="staged_twice",
                    field="stages",
                    value=part.stages[0],
                    hint="of two attempts at one task, commit what one of them staged",
                )
    return [
        StagedPart(topic, partition, tuple(sorted(numbers)))
        for (topic, partition), numbers in sorted(found.items())
    ]


@dataclass(slots=True)
class Epoch:
    """What a client knows of its own epoch of one sink; `committed` is -1 before the first batch.

    A client that was fenced stays so: it takes a new epoch only when the program calls `begin`. One whose
    commit did not end well begins again by itself, unless another client began meanwhile: what that commit
    has prepared is in the way of staging the batch again, and no newer epoch means that it cannot be decided
    later.
    """

    number: int = 0
    committed: int = -1
    doubtful: bool = False
    newer: int = 0  # the epoch of who took over

    @property
    def begun(self) -> bool:
        """Whether this client has an epoch."""
        return self.number > 0

    def hear(self, epoch: int) -> None:
        """Note the sink's present epoch: if it is not this one, another client began since."""
        if self.begun and epoch > self.number:
            self.newer = epoch

    def began(self, epoch: int, committed: int) -> None:
        """Note that this client began `epoch`, after batch `committed`."""
        self.number = epoch
        self.committed = max(committed, self.committed)
        self.doubtful = False
        self.newer = 0

    def over(self, number: int) -> None:
        """Note that a commit of this epoch ended well."""
        self.committed = max(number, self.committed)


def _too_large(size_bytes: int) -> Error:
    return Error(
        f"a value of {size_bytes} bytes is over the limit of {MAX_RECORD_BYTES}",
        code="too_large",
        field="value",
        value=size_bytes,
        limit=MAX_RECORD_BYTES,
        outcome="not_applied",
    )
