"""The producer's window against a model of a partition that fails in every way it may."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.client.errors import Error
from laminar.client.policy.partition_queue import Pending
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.policy.resume_numbers import Numbers
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_block


def accumulator(**more: int | bool) -> RecordAccumulator:
    values = {"batch_bytes": 60, "window": 4, **more}
    return RecordAccumulator(route=Route.even(values.pop("partitions", 1)), **values)  # type: ignore[arg-type]


class Partition:
    """A log with the server's producer table: takes the next sequence of an epoch, knows the old ones."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.epoch = 0
        self.next_sequence = 0
        self.known: dict[int, int] = {}

    def append(self, pending: Pending) -> int | str:
        if pending.epoch > self.epoch:
            self.epoch, self.next_sequence, self.known = pending.epoch, 0, {}
        if pending.epoch < self.epoch:
            return "fenced"
        if pending.sequence < self.next_sequence:
            return self.known[pending.sequence]
        if pending.sequence > self.next_sequence:
            return "gap"
        self.known[pending.sequence] = len(self.records)
        self.next_sequence += 1
        self.records += pending.values
        return self.known[pending.sequence]


def test_a_batch_that_fails_with_another_has_an_outcome_of_its_own() -> None:
    """The first was refused, so it is not there; the second may be: its answer is under way."""
    box = accumulator(stop_on_failure=True, batch_bytes=20)
    queue = box.queues[0]
    box.put(b"first" * 5, None, queue)
    first = box.take(queue, now_ms=0)
    box.put(b"second" * 5, None, queue)
    second = box.take(queue, now_ms=0)
    assert first is not None and second is not None

    box.failed(queue, first, Error("refused", outcome="not_applied"), maybe_applied=False)

    assert first.error is not None and second.error is not None
    assert ("not_applied", "unknown") == (first.error.outcome, second.error.outcome)


# What may happen to a request: `late` is applied and answered with a loss, `early` lost before.
FATES = ["good"] * 4 + ["late", "early", "busy", "reject"]
ACTIONS = ["put"] * 5 + ["take"] * 3 + ["answer"] * 2


def steps_of(seed: int) -> list[tuple[str, str]]:
    """A run drawn from a seed: long ones shrink badly, but short ones never fill a window."""
    rng = random.Random(seed)
    return [(rng.choice(ACTIONS), rng.choice(FATES)) for _ in range(rng.randrange(200))]


def run(
    box: RecordAccumulator, partition: Partition, steps: list[tuple[str, str]], values: list[bytes]
) -> None:
    """Put, take and answer as `steps` say, then without faults until nothing is left."""
    queue = box.queues[0]
    flying: deque[Pending] = deque()
    left = deque(values)
    now = 0

    def answer(pending: Pending, fate: str) -> None:
        if fate == "reject" and not pending.settled:
            box.failed(queue, pending, Error("rejected"), maybe_applied=False)
        elif fate == "busy":
            box.retry(queue, pending, until_ms=now + 3, maybe_applied=False)
        elif fate == "early":
            box.retry(queue, pending, until_ms=now, maybe_applied=True)
        else:
            result = partition.append(pending)
            if fate == "late":
                box.retry(queue, pending, until_ms=now, maybe_applied=True)
            elif isinstance(result, int):
                box.acknowledged(queue, pending, base_offset=result, replicas=3, synced=True)
            elif not (result == "gap" and box.renumber(queue, pending)):
                box.failed(queue, pending, Error(result), maybe_applied=False)

    for action, fate in [*steps, *[("put", "good")] * len(left)]:
        now += 1
        if action == "put" and left and queue.error is None:
            box.put(left.popleft(), None, queue)
        elif action == "take":
            taken = box.take(queue, now_ms=now)
            if taken is not None:
                flying.append(taken)
        elif action == "answer" and flying:
            # Answers come in the order of the requests, as on one connection.
            pending = flying.popleft()
            known = pending.sequence < partition.next_sequence and pending.epoch == partition.epoch
            # A server does not reject what it has taken already.
            answer(pending, "good" if fate == "reject" and known else fate)
    for _ in range(10_000):
        now += 1
        taken = box.take(queue, now_ms=now)
        if taken is not None:
            flying.append(taken)
        elif flying:
            answer(flying.popleft(), "good")
        elif queue.idle():
            return
    raise AssertionError("the queue did not come to an end")


SEEDS = st.integers(0, 2**32)
VALUES = [b"value %06d" % number for number in range(40)]


@settings(max_examples=300)
@given(SEEDS)
def test_a_stream_is_a_prefix_of_what_was_sent(seed: int) -> None:
    """Whatever fails: the log is the stream's begin, once and in order; every receipt is right, and
    a producer that failed reports exactly what has none.
    """
    box, partition = accumulator(), Partition()
    run(box, partition, steps_of(seed), VALUES)

    assert VALUES[: len(partition.records)] == partition.records
    assert 0 == box.buffered_bytes
    reported = [record.value for pending in box.failures for record in pending.undelivered()]
    if not reported:
        assert VALUES == partition.records
    else:
        sent_without_receipt = [value for value in VALUES if value in reported]
        assert sent_without_receipt == reported, "reported in order of sending"


@settings(max_examples=300)
@given(SEEDS)
def test_appends_that_go_on_are_never_doubled(seed: int) -> None:
    """Without stop_on_failure: every record without error is there once, a rejected one is not, and
    one of unknown outcome at most once. What is there is in order.
    """
    box, partition = accumulator(stop_on_failure=False), Partition()
    run(box, partition, steps_of(seed), VALUES)

    rejected = {r.value for p in box.failures for r in p.undelivered() if r.outcome == "not_applied"}
    unknown = {r.value for p in box.failures for r in p.undelivered() if r.outcome == "unknown"}
    assert len(set(partition.records)) == len(partition.records)
    assert sorted(partition.records) == partition.records
    assert not rejected & set(partition.records)
    assert set(VALUES) - rejected - unknown <= set(partition.records)
    assert 0 == box.buffered_bytes


def test_a_partial_batch_waits_for_the_one_in_flight() -> None:
    """What comes meanwhile is joined; a full batch goes out beside it, up to the window."""
    box = accumulator(window=3)
    queue = box.queues[0]
    box.put(b"a", None, queue)
    first = box.take(queue, now_ms=0)
    box.put(b"b", None, queue)

    assert first is not None and [b"a"] == first.values
    assert None is box.take(queue, now_ms=0)
    for _ in range(30):
        box.put(b"x" * 20, None, queue)
    assert all(box.take(queue, now_ms=0) is not None for _ in range(2))
    assert None is box.take(queue, now_ms=0), "the window is full"


def test_after_a_failure_nothing_is_sent_until_all_have_ended() -> None:
    """Then the failed and those behind it go out again, in order, with their first sequences."""
    box = accumulator()
    queue = box.queues[0]
    for _ in range(12):
        box.put(b"x" * 20, None, queue)
    taken = [box.take(queue, now_ms=0) for _ in range(3)]
    first, second, third = (each for each in taken if each is not None)
    box.retry(queue, first, until_ms=10, maybe_applied=True)

    assert None is box.take(queue, now_ms=50), "two are under way"
    assert box.renumber(queue, second), "a gap behind a failed batch is no failure"
    box.retry(queue, third, until_ms=0, maybe_applied=True)
    assert 10 == box.next_resume_ms()
    assert None is box.take(queue, now_ms=9)
    again = [box.take(queue, now_ms=10) for _ in range(3)]
    assert [first, second, third] == again
    assert [0, 1, 2] == [each.sequence for each in (first, second, third)]


def test_a_queue_is_silent_by_its_oldest_request_under_way() -> None:
    """At the instant its patience ends, not before; an answer counts for its own request only."""
    box = accumulator()
    queue = box.queues[0]
    for value in VALUES[:12]:
        box.put(value, None, queue)
    first = box.take(queue, now_ms=100)
    second = box.take(queue, now_ms=130)
    assert first is not None and second is not None

    assert ([], 150) == box.silent(now_ms=149, patience_ms=50)
    assert ([queue], None) == box.silent(now_ms=150, patience_ms=50)
    box.acknowledged(queue, first, base_offset=0, replicas=3, synced=True)
    assert ([], 180) == box.silent(now_ms=150, patience_ms=50)
    box.retry(queue, second, until_ms=500, maybe_applied=True)
    assert ([], None) == box.silent(now_ms=1_000, patience_ms=50)


def test_a_forgotten_producer_begins_the_next_epoch() -> None:
    """A server that dropped an idle producer refuses its next sequence; nothing is lost or failed."""
    box = accumulator()
    queue = box.queues[0]
    box.put(b"a", None, queue)
    first = box.take(queue, now_ms=0)
    assert first is not None
    box.acknowledged(queue, first, base_offset=0, replicas=3, synced=True)
    box.put(b"b", None, queue)
    pending = box.take(queue, now_ms=0)
    assert pending is not None and pending.sequence == 1

    assert box.renumber(queue, pending)
    again = box.take(queue, now_ms=1)
    assert again is pending
    assert (0, 1) == (again.sequence, again.epoch)


def test_records_without_a_key_are_spread_by_batch() -> None:
    """A full batch moves on to the next partition; so does one that was taken."""
    box = accumulator(partitions=3)
    queue = box.sticky
    first = [box.put(b"x" * 20, None, box.sticky).partition for _ in range(4)]
    box.put(b"x", None, box.sticky)
    box.take(box.sticky, now_ms=0)

    assert len(set(first)) == 2 and first == sorted(first)
    assert 0 == box.sticky.partition
    assert queue is box.queues[0]


def test_queues_are_those_of_the_route_whatever_its_numbers() -> None:
    """Keys follow the ranges, and the partition after the last one is the first."""
    route = Route(2, [0, 40_000, 50_000, LOGICAL_PARTITIONS], [7, 2, 11])
    box = RecordAccumulator(route=route, batch_bytes=20, first_place=4)

    assert [7, 2, 11] == list(box.queues)
    assert all(route.partition_of_key(key) == box.queue_of(key).partition for key in (b"a", b"b", b"c"))
    spread = [box.put(b"x" * 20, None, box.sticky).partition for _ in range(6)]
    assert [2, 11, 7, 2, 11, 7] == spread


def test_numbered_records_without_a_key_stay_at_their_place_over_any_route() -> None:
    """With route 0 it is the block's number modulo the partitions; later, who took over the place."""
    numbers = Numbers(floor=0, created_with=3)
    box = accumulator(partitions=3)
    box.numbers = numbers
    later = RecordAccumulator(
        route=Route(1, [0, 30_000, LOGICAL_PARTITIONS], [4, 3]), batch_bytes=60, numbers=numbers
    )

    assert [block % 3 for block in range(50)] == [box.queue_of_block(block).partition for block in range(50)]
    for block in range(50):
        logical = logical_of_block(block, 3)
        assert box.queue_of_block(block).partition == box.route.partition_of(logical)
        assert later.queue_of_block(block).partition == (4 if logical < 30_000 else 3)


def test_a_record_too_large_changes_nothing() -> None:
    box = accumulator(max_record_bytes=100)
    with pytest.raises(Error, match="over the limit"):
        box.put(b"x" * 101, None, box.queues[0])

    assert (0, True) == (box.buffered_bytes, box.queues[0].idle())
    assert {} == box.active


@pytest.mark.parametrize("size", [10, 50, 1000])
def test_a_stream_without_keys_fills_one_partition_after_another_before_anything_is_sent(size: int) -> None:
    """Whether a batch's bytes divide by a record's or not: a burst is work for all partitions at once."""
    box = accumulator(partitions=3, batch_bytes=1024)

    for _ in range(300):
        box.put(bytes(size), None, box.sticky)

    waiting = [sum(len(pending.values) for pending in queue.waiting()) for queue in box.queues.values()]
    assert max(waiting) - min(waiting) <= 1024 // size
