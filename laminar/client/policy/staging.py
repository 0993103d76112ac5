"""The stages that one writer makes for a batch of a sink, as a pure object: records in, numbered stages out.

A *stage* is a batch of records for one partition, which the partition stores but does not show before the
sink's batch is committed. Records are gathered by partition. `take` returns the stage to send next, `staged`
notes that it is durable.
`stage_sender.py` sends the stages and repeats failed requests. The program that commits the batch decides
which stages become visible.

1. A stage is staged as a whole or not at all. The numbers of a writer's stages rise in the order in
   which its records were put, so in each partition a commit publishes the records in that order.
2. The numbers begin at a random value, so that writers of the same batch do not use the same
   numbers: the tasks of a job, a second attempt at one of them, a block that was tried again. A
   commit names the stages that it publishes; all others are dropped.
3. A full stage is sent at once. Others are sent at the end, or while the buffer is full, the
   largest first.
4. When a partition has ended (was replaced by others), no further stage of its topic is sent until all that
   are under way are answered. Then the records that the ended partitions did not take are divided by the next
   route into new stages, in order, with higher numbers (`refused`, `renew`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from laminar.client.errors import ConfigError, Error
from laminar.client.policy.partition_queue import RECORD_OVERHEAD_BYTES, Pending, extended, padded
from laminar.client.policy.record_accumulator import MAX_RECORD_BYTES, sealed_error
from laminar.client.records import Staged, StagedPart
from laminar.wire.channels import MAX_ACKS
from laminar.wire.key_route import Route

# A stage's number has 53 bits. The lower ones count the writer's stages, enough for 1 TiB in stages of 1 MiB;
# the upper ones are random.
_COUNT_BITS = 20
MAX_FIRST_STAGE = (1 << 53 - _COUNT_BITS) - 1
MAX_RECORDS = 65_536


class Row(NamedTuple):
    """A record to be staged; `partition` is the one that the caller named, None if by key."""

    value: bytes
    key: bytes | None
    partition: int | None
    tag: str | None = None
    headers: Mapping[str, bytes] | None = None
    timestamp_ms: int | None = None
    trace_id: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes that the record takes in a stage, about."""
        return len(self.value) + len(self.key or b"") + RECORD_OVERHEAD_BYTES


class _Topic:
    """The open stages of one topic, by partition.

    Until the topic's route is known, its records wait in `rows`. `sticky` is the partition for records
    without a key. `refused` are the stages that an ended partition did not take, `under_way` counts those
    without an answer; `ended` has the partitions that a newer route lacks.
    """

    __slots__ = ("ended", "open", "refused", "route", "rows", "sticky", "under_way")

    def __init__(self) -> None:
        self.route: Route | None = None
        self.rows: list[Row] = []
        self.open: dict[int, Pending] = {}
        self.sticky = 0
        self.refused: list[Pending] = []
        self.ended: set[int] = set()
        self.under_way = 0


class Stages:
    """The stages of one writer for one batch of a sink: open (filling), ready to be sent, and staged.

    Not thread-safe: a caller with several threads needs a lock. `first_stage` is a random number from 0 to
    `MAX_FIRST_STAGE`. When `buffer_bytes` are gathered and not staged yet, stages that are not full are sent
    too.
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
        # By topic and partition, then by channel: tokens of jobs.
        self._acks: dict[tuple[str, int], dict[str, list[str]]] = {}
        self.acks = 0
        self._records = 0
        self._closing = False

    # -- records in --------------------------------------------------------------------------

    def put(self, topic: str, row: Row) -> bool:
        """Add a record; return whether to call `take` (a stage may be ready) or `know` (the topic is new).

        Raises:
            Error: the value is too large, or the writer has used up its stage numbers.
            ConfigError: the topic does not have the record's partition.
        """
        if len(row.value) > MAX_RECORD_BYTES:
            raise _too_large(len(row.value))
        place = self._topics.get(topic)
        if place is None:
            place = self._topics[topic] = _Topic()
        if place.route is None:
            place.rows.append(row)
            self.buffered_bytes += row.size_bytes
            return len(place.rows) == 1
        self._gather(topic, place, row)
        self.buffered_bytes += row.size_bytes
        return bool(self._ready) or self.buffered_bytes >= self.buffer_bytes

    def ack(self, topic: str, partition: int, channel: str, token: str) -> None:
        """Add a job that the batch acknowledges. Raises `Error` if they are more than a batch may have."""
        if self.acks >= MAX_ACKS:
            raise Error(
                f"a batch acknowledges at most {MAX_ACKS} jobs",
                code="invalid",
                field="acks",
                value=self.acks + 1,
                limit=MAX_ACKS,
                hint="commit more often",
                outcome="not_applied",
            )
        self.acks += 1
        self._acks.setdefault((topic, partition), {}).setdefault(channel, []).append(token)

    def unknown(self) -> list[str]:
        """Return the topics whose routes are not known yet: the caller requests each and calls `know`."""
        return [topic for topic, place in self._topics.items() if place.route is None]

    def route_version(self, topic: str) -> int:
        """Return the version of a topic's route, by which its records are divided. It must be known."""
        route = self._topics[topic].route
        assert route is not None
        return route.version

    def know(self, topic: str, route: Route) -> None:
        """Set a topic's route, and divide its waiting records by it. Raises the errors of `put`."""
        place = self._topics.setdefault(topic, _Topic())
        place.route = route
        place.sticky = route.numbers[self._spread % len(route)]
        rows, place.rows = place.rows, []
        for row in rows:
            self._gather(topic, place, row)

    def _gather(self, topic: str, place: _Topic, row: Row) -> None:
        assert place.route is not None
        number = row.partition
        if number is None:
            number = place.sticky if row.key is None else place.route.partition_of_key(row.key)
        elif number not in place.route:
            if number in place.ended:
                raise sealed_error(number, place.route.version)
            raise ConfigError(
                f"topic {topic} has no partition {number}: it has {len(place.route)}, the last is "
                f"{max(place.route.numbers)}",
                code="no_partition",
                field="partition",
                value=number,
                limit=max(place.route.numbers),
            )
        pending = place.open.get(number)
        if pending is not None and pending.size_bytes + row.size_bytes > self._batch_bytes:
            self._close(topic, place, pending)
            pending = None
        if pending is None:
            pending = place.open[number] = Pending(number)
        before = len(pending.values)
        if row.partition is not None:
            pending.named = (pending.named or set()) | {before}
        pending.values.append(row.value)
        pending.keys.append(row.key)
        pending.keyed |= row.key is not None
        if row.tag is not None:
            pending.tags = extended(pending.tags, before, row.tag)
        if row.headers is not None:
            pending.headers = extended(pending.headers, before, row.headers)
        if row.timestamp_ms is not None:
            pending.timestamps = extended(pending.timestamps, before, row.timestamp_ms)
        if row.trace_id is not None:
            pending.trace_ids = extended(pending.trace_ids, before, row.trace_id)
        pending.size_bytes += row.size_bytes
        if pending.size_bytes >= self._batch_bytes or len(pending.values) >= MAX_RECORDS:
            self._close(topic, place, pending)

    # -- stages out --------------------------------------------------------------------------

    def _close(self, topic: str, place: _Topic, pending: Pending) -> None:
        """Close a stage: it takes no more records, gets its number, and is ready to be sent."""
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
            # Records without a key are spread by stage: the next ones go to the next partition.
            assert place.route is not None
            place.sticky = place.route.after(place.sticky)

    def close_all(self) -> None:
        """Close all open stages. Call it when no more records will be put."""
        self._closing = True
        for topic, place in self._topics.items():
            for pending in list(place.open.values()):
                self._close(topic, place, pending)

    def take(self) -> tuple[str, Pending] | None:
        """Return the topic and the batch of the next stage to send; None if none is ready.

        `Pending.sequence` is the stage's number. If none is ready and the buffer is full, the largest open
        stage is closed and returned.
        """
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
        for index, (topic, pending) in enumerate(self._ready):
            if not self._topics[topic].refused:
                del self._ready[index]
                self._topics[topic].under_way += 1
                return topic, pending
        return None

    def refused(self, topic: str, pending: Pending) -> None:
        """Note that a stage returned by `take` was refused, because its partition has ended.

        No stage of the topic is returned by `take` until `renew` is called.
        """
        if topic in self._topics:
            self._topics[topic].under_way -= 1
            self._topics[topic].refused.append(pending)

    def waits_for_route(self, topic: str) -> bool:
        """Return whether all stages of a topic that were sent are answered, and `renew` may be called."""
        place = self._topics.get(topic)
        return place is not None and bool(place.refused) and not place.under_way

    def renew(self, topic: str, route: Route) -> None:
        """Use `route` from now on, and divide the refused records and those of ended partitions by it.

        Raises:
            Sealed: the caller named a partition that has ended.
        """
        place = self._topics[topic]
        again, place.refused = place.refused, []
        assert place.route is not None, f"the route of {topic} was not known"
        old = {number for number in place.route.numbers if number not in route}
        place.ended |= old
        old |= {pending.partition for pending in again}
        again += [pending for name, pending in self._ready if name == topic and pending.partition in old]
        again.sort(key=lambda pending: pending.sequence)
        moved = {id(pending) for pending in again}
        self._ready = deque(each for each in self._ready if id(each[1]) not in moved)
        again += [place.open.pop(number) for number in sorted(old) if number in place.open]
        place.route = route
        if place.sticky not in route:
            place.sticky = route.numbers[self._spread % len(route)]
        for pending in again:
            for row in _rows_of(pending):
                self._gather(topic, place, row)
        if self._closing:
            for pending in list(place.open.values()):
                self._close(topic, place, pending)

    def staged(self, topic: str, pending: Pending) -> None:
        """Note that a stage that `take` returned is durable in its partition."""
        if topic in self._topics:
            self._topics[topic].under_way -= 1
        self.buffered_bytes -= pending.size_bytes
        self._records += len(pending.values)
        self._staged.setdefault((topic, pending.partition), []).append(pending.sequence)

    def drop(self) -> None:
        """Forget all records and stages: the batch will not be committed with them."""
        self._topics.clear()
        self._ready.clear()
        self._staged.clear()
        self.buffered_bytes = 0
        self._records = 0

    def result(self, sink: str, number: int, epoch: int) -> Staged:
        """Return a description of the staged records, with which batch `number` of `sink` is committed."""
        parts = _parts(self._staged, self._acks)
        return Staged(sink, number, epoch, parts, self._records)


def _rows_of(pending: Pending) -> list[Row]:
    """Return the records of a stage, as they were given to `put`."""
    count = len(pending.values)
    none = [None] * count
    tags, headers = padded(pending.tags, count) or none, padded(pending.headers, count) or none
    timestamps = padded(pending.timestamps, count) or none
    traces = padded(pending.trace_ids, count) or none
    named = pending.named or set()
    return [
        Row(value, key, pending.partition if position in named else None, *cells)
        for position, (value, key, *cells) in enumerate(
            zip(pending.values, pending.keys, tags, headers, timestamps, traces, strict=True)
        )
    ]


def joined(stages: Iterable[Staged], *, sink: str, number: int, epoch: int) -> list[StagedPart]:
    """Join the results of several writers into the parts of one commit, one for each partition.

    Raises:
        ConfigError: an element was staged for another sink, number or epoch, or a stage is given twice.
    """
    found: dict[tuple[str, int], list[int]] = {}
    acks: dict[tuple[str, int], dict[str, list[str]]] = {}
    for each in stages:
        for field, value, wanted in (
            ("sink", each.sink, sink),
            ("number", each.number, number),
            ("epoch", each.epoch, epoch),
        ):
            if value != wanted:
                raise ConfigError(
                    f"these stages were staged for {field} {value!r}, not {wanted!r}",
                    code="other_batch",
                    field=field,
                    value=value,
                    limit=wanted,
                )
        for part in each.parts:
            for channel, tokens in part.acks:
                acks.setdefault((part.topic, part.partition), {}).setdefault(channel, []).extend(tokens)
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
    return list(_parts(found, acks))


def _parts(
    stages: Mapping[tuple[str, int], list[int]], acks: Mapping[tuple[str, int], dict[str, list[str]]]
) -> tuple[StagedPart, ...]:
    """Return one part for each partition that has stages, or jobs to acknowledge, in order."""
    return tuple(
        StagedPart(
            topic,
            partition,
            tuple(sorted(stages.get((topic, partition), ()))),
            tuple(
                (channel, tuple(tokens))
                for channel, tokens in sorted(acks.get((topic, partition), {}).items())
            ),
        )
        for topic, partition in sorted(stages.keys() | acks.keys())
    )


@dataclass(slots=True)
class Epoch:
    """A client's own epoch of one sink (the number by which a later writer replaces it), as it knows it.

    `number` is 0 before the client began an epoch; `committed` is the number of the last committed batch, -1
    before the first; `newer` is the epoch of a client that took over.

    A client that was fenced (replaced) stays fenced: it begins a new epoch only when the program calls
    `begin`. A client whose commit failed (`doubtful`) begins a new epoch by itself, unless another client did
    meanwhile. The reason: stages that the failed commit has prepared stay prepared until a newer epoch
    begins, and the batch cannot be staged again; after that the failed commit cannot succeed any more.
    """

    number: int = 0
    committed: int = -1
    doubtful: bool = False
    newer: int = 0  # the epoch of the client that took over, 0 if none is known

    @property
    def begun(self) -> bool:
        """Whether this client has an epoch."""
        return self.number > 0

    def observe_epoch(self, epoch: int) -> None:
        """Note the sink's present epoch: if it is newer than this client's, another client took over."""
        if self.begun and epoch > self.number:
            self.newer = epoch

    def began(self, epoch: int, committed: int) -> None:
        """Note that this client began `epoch`, when `committed` was the last committed batch (-1: none)."""
        self.number = epoch
        self.committed = max(committed, self.committed)
        self.doubtful = False
        self.newer = 0

    def over(self, number: int) -> None:
        """Note that batch `number` was committed under this epoch."""
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
