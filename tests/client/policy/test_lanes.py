"""Lanes against a model of a topic whose route changes: each record is there once, keys are in order.

Whatever answers come: the partitions of the model split, merge and move, and its network loses answers, and
delivers copies of requests at any later time, also after the partition has ended.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, methodcaller
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.client.errors import Error, Fenced, Sealed
from laminar.client.policy.lanes import overlaps
from laminar.client.policy.lineage import Change, Input, Lineage
from laminar.client.policy.partition_queue import PartitionQueue, Pending
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.policy.resume_numbers import Numbers, Reached
from laminar.client.produce.producer import put_record
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key

KEYS = [b"key %d" % number for number in range(12)]
SEEDS = st.integers(0, 2**40)
SIZE_BYTES = attrgetter("size_bytes")
WAITING = methodcaller("waiting")
# What a step does, and what becomes of an answer: drawn thousands of times.
ACTIONS = ("take",) * 3 + ("answer",) * 3 + ("deliver", "adopt")
FATES = ("good",) * 4 + ("late", "early", "changing", "stale")


class Copy(NamedTuple):
    """A request as it travels: a batch of one producer for one partition."""

    partition: int
    epoch: int
    sequence: int
    values: list[bytes]
    last_number: int


@dataclass
class Partition:
    """A log with the server's producer table, which may end."""

    held: range
    open: bool = True
    sealed: bool = False
    records: list[bytes] = field(default_factory=list)
    epoch: int = 0
    known: dict[int, int] = field(default_factory=dict)
    checkpoint: int = 0

    def append(self, copy: Copy) -> int | str:
        epoch, known = self.epoch, self.known
        if copy.epoch > epoch:
            epoch, known = copy.epoch, {}
        if copy.epoch < epoch:
            return "fenced"
        if copy.sequence < len(known):
            return known[copy.sequence]
        if self.sealed:
            return "sealed"
        if not self.open:
            return "changing"
        if copy.sequence > len(known):
            return "out_of_sequence"
        self.epoch, self.known = epoch, known
        known[copy.sequence] = len(self.records)
        self.records += copy.values
        self.checkpoint = max(self.checkpoint, copy.last_number)
        return known[copy.sequence]

    def fence(self, epoch: int) -> int:
        if epoch < self.epoch:
            raise Fenced("a newer run has begun", code="fenced")
        if not self.sealed and epoch > self.epoch:
            self.epoch, self.known = epoch, {}
        return self.checkpoint


class Topic:
    """Partitions, the route, and at most one change under way."""

    def __init__(self, rng: random.Random, partitions: int, *, weak: bool) -> None:
        self.rng = rng
        self.weak = weak
        self.route = Route.even(partitions)
        self.partitions = {number: Partition(held) for number, held in self.route.ranges().items()}
        self.changes: list[Change] = []
        self.closing: tuple[list[int], Route] | None = None
        self._lineage: Lineage | None = None

    def lineage(self) -> Lineage:
        if self._lineage is None:
            self._lineage = Lineage(self.route, tuple(self.changes))
        return self._lineage

    def step(self) -> None:
        """Begin a change, or seal one input of it; with the last one its outputs open."""
        if self.closing is None:
            self.closing = self._begin()
            return
        inputs, route = self.closing
        left = [number for number in inputs if not self.partitions[number].sealed]
        if left:
            self.partitions[self.rng.choice(left)].sealed = True
            if len(left) > 1:
                return
        outputs = {number: held for number, held in route.ranges().items() if number not in self.route}
        ended = tuple(
            Input(number, self.partitions[number].held, len(self.partitions[number].records))
            for number in inputs
        )
        self.changes.append(Change(route.version, not self.weak, ended, outputs))
        self.route, self.closing, self._lineage = route, None, None
        for number in outputs:
            self.partitions[number].open = True

    def _begin(self) -> tuple[list[int], Route]:
        numbers, bounds = list(self.route.numbers), list(self.route.bounds)
        kind = self.rng.choice(["split", "merge", "move"])
        place = self.rng.randrange(len(numbers))
        new = len(self.partitions)
        if kind == "merge" and place + 1 < len(numbers):
            inputs = numbers[place : place + 2]
            numbers[place : place + 2] = [new]
            del bounds[place + 1]
        elif kind == "split" and len(numbers) < 6 and bounds[place + 1] - bounds[place] > 2:
            inputs = [numbers[place]]
            numbers[place : place + 1] = [new, new + 1]
            bounds.insert(place + 1, self.rng.randrange(bounds[place] + 1, bounds[place + 1]))
        else:
            inputs = [numbers[place]]
            numbers[place] = new
        route = Route(self.route.version + 1, bounds, numbers)
        for number, held in route.ranges().items():
            if number not in self.partitions:
                self.partitions[number] = Partition(held, open=False)
        return inputs, route

    def values(self) -> list[bytes]:
        """All records, those of a partition before those of the ones that follow it."""
        return [value for number in sorted(self.partitions) for value in self.partitions[number].records]


class Run:
    """A producer over that topic: its accumulator, its requests, and the copies of them in the network."""

    def __init__(self, rng: random.Random, topic: Topic, box: RecordAccumulator) -> None:
        self.rng = rng
        self.topic = topic
        self.box = box
        self.flying: dict[int, list[tuple[PartitionQueue, Pending, Copy]]] = defaultdict(list)
        self.network: list[Copy] = []
        self.now = 0
        # Of each answer that would be good: how often the batch is rejected, or only accepted.
        self.rejects = 0.0
        self.accepts = 0.0

    def take(self) -> None:
        if not self.box.active:
            return
        queue = self.rng.choice(list(self.box.active.values()))
        pending = self.box.take(queue, now_ms=self.now)
        if pending is not None:
            copy = Copy(
                pending.partition,
                pending.epoch,
                pending.sequence,
                list(pending.values),
                pending.last_number,
            )
            self.flying[queue.partition].append((queue, pending, copy))

    def answer(self, *, faults: bool) -> None:
        waiting = [number for number, flying in self.flying.items() if flying]
        if not waiting:
            return
        # Answers come in the order of the requests, as on one connection.
        queue, pending, copy = self.flying[self.rng.choice(waiting)].pop(0)
        fate = self.rng.choice(FATES) if faults else "good"
        if fate in ("changing", "stale"):
            self.box.retry(queue, pending, until_ms=self.now, maybe_applied=False)
            return
        if fate == "early":  # it arrives some time, or never
            self.network.append(copy)
            self.box.retry(queue, pending, until_ms=self.now, maybe_applied=True)
            return
        partition = self.topic.partitions[copy.partition]
        known = copy.epoch == partition.epoch and copy.sequence < len(partition.known)
        if fate == "good" and faults and not known and self.rng.random() < self.rejects:
            self.box.failed(queue, pending, Error("rejected", code="rejected"), maybe_applied=False)
            return
        result = partition.append(copy)
        if fate == "late":
            self.network.append(copy)
            self.box.retry(queue, pending, until_ms=self.now, maybe_applied=True)
        elif isinstance(result, int) and self.rng.random() < self.accepts:
            self.box.accepted(queue, pending, base_offset=result, term=1, replicas=3, synced=True)
        elif isinstance(result, int):
            self.box.acknowledged(queue, pending, base_offset=result, replicas=3, synced=True)
        elif result == "sealed":
            self.box.sealed(queue, pending)
        elif result == "changing":
            self.box.retry(queue, pending, until_ms=self.now + 3, maybe_applied=False)
        elif not (result == "out_of_sequence" and self.box.renumber(queue, pending)):
            self.box.failed(queue, pending, Error(result), maybe_applied=False)

    def deliver(self) -> None:
        if self.network:
            copy = self.rng.choice(self.network)
            self.topic.partitions[copy.partition].append(copy)

    def adopt(self) -> None:
        lineage = self.topic.lineage()
        if self.box.numbers is not None:
            for number in self.box.route.numbers:
                if number not in lineage.route:
                    self.topic.partitions[number].fence(self.box.epoch)
            begin(self.topic, self.box.numbers, self.box.epoch, lineage)
        self.box.adopt(self.topic.lineage())

    def step(self, *, faults: bool = True) -> None:
        self.now += 1
        action = self.rng.choice(ACTIONS)
        if action == "take":
            self.take()
        elif action == "answer":
            self.answer(faults=faults)
        elif action == "deliver" and faults:
            self.deliver()
        elif action == "adopt":
            self.adopt()
        if self.accepts and (queues := list(self.box.active.values())):
            queue = self.rng.choice(queues)
            committed = len(self.topic.partitions[queue.partition].records)
            self.box.learned(queue, term=1, committed=committed)
        held = set(chain.from_iterable(map(WAITING, self.box.active.values())))
        assert self.box.buffered_bytes == sum(map(SIZE_BYTES, held))

    def finish(self) -> None:
        """Go on without faults until nothing is left; then deliver every copy once more."""
        for _ in range(20_000):
            if self.topic.closing is not None:
                self.topic.step()
            if not self.box.active and not any(self.flying.values()):
                break
            self.step(faults=False)
        else:
            raise AssertionError(f"no end: {[queue.waiting() for queue in self.box.active.values()]}")
        assert self.box.buffered_bytes == 0
        for copy in self.network:
            self.topic.partitions[copy.partition].append(copy)


def begin(topic: Topic, numbers: Numbers, epoch: int, lineage: Lineage) -> None:
    for number, held in lineage.partitions.items():
        if number not in numbers.partitions:
            reached = topic.partitions[number].fence(epoch)
            numbers.learn(number, Reached(reached, held, lineage.inputs_of(number)))


def in_order_of_keys(values: list[bytes]) -> bool:
    """Whether the records of each key rise; a value is the key, a space, and its number."""
    by_key: dict[bytes, list[int]] = defaultdict(list)
    for value in values:
        key, _, number = value.rpartition(b" ")
        by_key[key].append(int(number))
    return all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.parametrize("weak", [False, True], ids=["strict", "weak"])
@pytest.mark.parametrize("stop_on_failure", [True, False], ids=["stream", "appends"])
@settings(max_examples=200)
@given(SEEDS)
def test_each_record_is_there_once_and_keys_are_in_order(
    weak: bool, stop_on_failure: bool, seed: int
) -> None:
    rng = random.Random(seed)
    topic = Topic(rng, rng.choice([1, 2, 3]), weak=weak)
    box = RecordAccumulator(
        route=topic.route, batch_bytes=rng.choice([40, 70, 200]), stop_on_failure=stop_on_failure
    )
    run = Run(rng, topic, box)
    sent: list[tuple[bytes, Pending, int]] = []
    for number in range(60):
        key = rng.choice(KEYS)
        value = b"%b %d" % (key, number)
        pending = box.put(value, key, box.queue_of(key))
        sent.append((value, pending, len(pending.values) - 1))
        for _ in range(rng.randrange(6)):
            run.step()
        if rng.random() < 0.15:
            topic.step()
    run.finish()

    found = topic.values()
    assert sorted(found) == sorted(value for value, _, _ in sent), "lost, doubled, or put beside"
    assert not box.failures
    for value, pending, position in sent:
        receipt = pending.receipt(position)
        partition = topic.partitions[receipt.partition]
        assert value == partition.records[receipt.offset]
        assert logical_of_key(value.rpartition(b" ")[0]) in partition.held
    if not weak:
        assert in_order_of_keys(found)


@settings(max_examples=300)
@given(SEEDS)
def test_a_program_that_starts_again_in_the_middle_of_changes_loses_and_doubles_nothing(seed: int) -> None:
    """Records with keys and without, by number; copies of the runs before arrive at any time.

    The run before may go on a while, too: it does not know that it is replaced.
    """
    rng = random.Random(seed)
    created_with = rng.choice([1, 2, 3])
    topic = Topic(rng, created_with, weak=rng.random() < 0.3)
    network: list[Copy] = []
    program = [(number, rng.choice([*KEYS, None])) for number in range(1, 80)]
    before: Run | None = None
    for epoch in range(1, 4):
        lineage = topic.lineage()
        numbers = Numbers(floor=0, created_with=created_with)
        begin(topic, numbers, epoch, lineage)
        box = RecordAccumulator(route=lineage.route, batch_bytes=90, numbers=numbers, epoch=epoch)
        run = Run(rng, topic, box)
        run.network = network
        run.accepts = rng.choice([0.0, 0.7])
        crash = rng.randrange(len(program)) if epoch < 3 else len(program)
        for number, key in program[:crash]:
            try:
                put_record(
                    box,
                    b"%b %d" % (key or b"none", number),
                    key,
                    tag=None,
                    headers=None,
                    timestamp_ms=None,
                    partition=None,
                    number=number,
                )
            except Error:
                raise AssertionError("the newest run is not refused") from None
            for _ in range(rng.randrange(5)):
                run.step()
                if before is not None and rng.random() < 0.5:
                    try:
                        before.step()
                    except Fenced:
                        before = None
            if rng.random() < 0.15:
                topic.step()
        before = run
        network = run.network + [copy for flying in run.flying.values() for _, _, copy in flying]
    assert before is not None
    before.finish()

    found = topic.values()
    assert sorted(found) == sorted(b"%b %d" % (key or b"none", number) for number, key in program)
    assert in_order_of_keys([value for value in found if not value.startswith(b"none")])


@settings(max_examples=200)
@given(SEEDS)
def test_a_record_for_a_partition_that_the_caller_named_goes_there_or_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    topic = Topic(rng, 2, weak=False)
    box = RecordAccumulator(route=topic.route, batch_bytes=60)
    run = Run(rng, topic, box)
    sent: list[tuple[int, bytes, Pending, int]] = []
    refused = 0
    for number in range(60):
        named = rng.choice(sorted({*box.queues, *box.gone})) if rng.random() < 0.5 else None
        key = rng.choice(KEYS)
        value = b"%b %d" % (key, number)
        try:
            pending = put_record(
                box,
                value,
                key,
                tag=f"tag {number}",
                headers={"n": b"%d" % number},
                timestamp_ms=number,
                partition=named,
                number=None,
            )
        except Sealed as error:
            assert error.value == named and named in box.gone
            refused += 1
            continue
        place = len(pending.values) - 1
        assert pending.tags is not None and f"tag {number}" == pending.tags[place]
        sent.append((-1 if named is None else named, value, pending, place))
        for _ in range(rng.randrange(5)):
            run.step()
        if rng.random() < 0.15:
            topic.step()
    run.finish()

    found = topic.values()
    failed = [each.value for pending in box.failures for each in pending.undelivered()]
    for named, value, pending, position in sent:
        try:
            receipt = pending.receipt(position)
        except Sealed as error:
            assert named == error.value and topic.partitions[named].sealed and value not in found
            assert "not_applied" == error.outcome and value in failed
        else:
            assert value == topic.partitions[receipt.partition].records[receipt.offset]
            assert named in (-1, receipt.partition)
            assert 1 == found.count(value)


@settings(max_examples=200)
@given(SEEDS)
def test_a_stream_of_which_a_batch_is_rejected_ends_there_for_its_keys(seed: int) -> None:
    """Also over changes: of each key the log is the begin of what was sent, and what has none is reported."""
    rng = random.Random(seed)
    topic = Topic(rng, rng.choice([1, 2, 3]), weak=False)
    box = RecordAccumulator(route=topic.route, batch_bytes=50, stop_on_failure=True)
    run = Run(rng, topic, box)
    run.rejects = 0.05
    sent: dict[bytes, list[bytes]] = defaultdict(list)
    for number in range(60):
        key = rng.choice(KEYS)
        value = b"%b %d" % (key, number)
        try:
            box.put(value, key, box.queue_of(key))
            sent[key].append(value)
        except Error as error:
            assert "rejected" == error.code
        for _ in range(rng.randrange(6)):
            run.step()
        if rng.random() < 0.15:
            topic.step()
    run.finish()

    found: dict[bytes, list[bytes]] = defaultdict(list)
    for value in topic.values():
        found[value.rpartition(b" ")[0]].append(value)
    failed = [record for pending in box.failures for record in pending.undelivered()]
    for key, values in sent.items():
        assert values[: len(found[key])] == found[key], "the begin, once and in order"
        missing = values[len(found[key]) :]
        told = [record for record in failed if record.key == key]
        assert set(missing) <= {record.value for record in told}, "what is not there is reported"
        assert all(record.outcome == "unknown" for record in told if record.value in found[key])


def test_columns_move_with_their_records() -> None:
    """Tags, headers, times and trace ids, and the deadline: it does not begin again."""
    box = RecordAccumulator(route=Route.even(1), batch_bytes=1000)
    route = Route(1, [0, 30_000, LOGICAL_PARTITIONS], [1, 2])
    sent = []
    for number in range(20):
        key = KEYS[number % 5]
        pending = box.put_with(
            b"%d" % number,
            key,
            box.queue_of(key),
            tag=None if number % 3 else f"tag {number}",
            headers=None if number % 4 else {"n": b"%d" % number},
            timestamp_ms=None if number % 2 else number,
            trace_id=None if number % 5 else number.to_bytes(16),
        )
        sent.append((pending, len(pending.values) - 1))
    sent[0][0].deadline_ms = 777
    box.adopt(Lineage(route, (Change(1, True, (Input(0, range(LOGICAL_PARTITIONS), 0),), {}),)))

    for number, (source, position) in enumerate(sent):
        assert source.parts is not None
        pending, place = source.parts[position]
        assert b"%d" % number == pending.values[place] and pending.keyed
        placed = pending.keys[place]
        assert placed is not None and pending.partition == route.partition_of_key(placed)
        for column, wanted in (
            (pending.tags, None if number % 3 else f"tag {number}"),
            (pending.headers, None if number % 4 else {"n": b"%d" % number}),
            (pending.timestamps, None if number % 2 else number),
            (pending.trace_ids, None if number % 5 else number.to_bytes(16)),
        ):
            cell = column[place] if column is not None and place < len(column) else None
            assert wanted == cell
        assert 777 == pending.deadline_ms


def test_what_failed_for_good_stops_the_partitions_that_follow() -> None:
    """A producer promises the order of the whole stream: later records of these keys fail with the reason."""
    box = RecordAccumulator(route=Route.even(2), batch_bytes=30)
    first = next(key for key in KEYS if box.queue_of(key).partition == 0)
    other = next(key for key in KEYS if box.queue_of(key).partition == 1)
    box.put(b"first", first, box.queue_of(first))
    queue = box.queues[0]
    pending = box.take(queue, now_ms=0)
    assert pending is not None
    box.adopt(Lineage(Route(1, [0, 32_768, LOGICAL_PARTITIONS], [2, 1])))
    later = box.put(b"later", first, box.queue_of(first))
    assert box.take(box.queues[2], now_ms=0) is None, "the input is not resolved"
    box.failed(queue, pending, Error("refused", code="refused"), maybe_applied=False)

    assert later.error is not None and "refused" == later.error.code
    with pytest.raises(Error, match="refused"):
        box.put(b"more", first, box.queue_of(first))
    assert not box.put(b"x", other, box.queue_of(other)).settled
    assert 1 == len(box.active)


def test_pairs_are_as_small_as_the_bounds_allow() -> None:
    end = LOGICAL_PARTITIONS
    before = Route(3, [0, 10, 20, 30, 40, end], [0, 1, 2, 3, 4])
    after = Route(7, [0, 5, 10, 20, 35, 40, end], [5, 6, 1, 7, 8, 9])

    assert [([0], [5, 6]), ([2, 3], [7, 8]), ([4], [9])] == overlaps(before, after)
    assert [] == overlaps(before, before)
