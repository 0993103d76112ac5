"""Accepted is not durable: the window against a log whose leaders lose what they accepted."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laminar
from laminar import aio
from laminar.client.policy.partition_queue import MOST_FLYING, Pending
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.policy.resume_numbers import Numbers, Reached
from laminar.client.produce import sender
from laminar.wire.key_route import Route


class Partition:
    """A leader's log, of which `committed` batches are safe; the next leader may have lost the others."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.batches: list[tuple[int, list[bytes]]] = []
        self.committed = 0
        self.term = 1

    def offset(self, batch: int) -> int:
        return sum(len(values) for _, values in self.batches[:batch])

    def append(self, pending: Pending) -> int | None:
        """The offset, None for a gap."""
        if pending.sequence > len(self.batches):
            return None
        if pending.sequence == len(self.batches):
            self.batches.append((pending.sequence, list(pending.values)))
        return self.offset(pending.sequence)

    def commit(self) -> None:
        self.committed = self.rng.randint(self.committed, len(self.batches))

    def depose(self) -> None:
        self.term += 1
        del self.batches[self.rng.randint(self.committed, len(self.batches)) :]


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_what_was_accepted_and_lost_is_sent_again_in_order(seed: int) -> None:
    """Whatever leaders lose, the log ends as the stream; what is told as durable never was in danger."""
    rng = random.Random(seed)
    box = RecordAccumulator(
        route=Route.even(1),
        batch_bytes=60,
        window=4,
        numbers=Numbers(floor=0, created_with=1),
    )
    queue, partition = box.queues[0], Partition(rng)
    values = deque(b"value %06d" % number for number in range(40))
    flying: deque[Pending] = deque()
    sent: list[tuple[Pending, bytes]] = []
    old: deque[tuple[int, int]] = deque()
    now = 0

    def check() -> None:
        safe = [value for _, each in partition.batches[: partition.committed] for value in each]
        settled = [value for pending, value in sent if pending.settled]
        assert settled == safe[: len(settled)], "told as durable, and not committed"
        waiting = sum(each.size_bytes for each in queue.waiting())
        assert waiting == box.buffered_bytes, "what is not durable is kept, and nothing else"
        assert len(queue.flying) <= MOST_FLYING

    def answer(fate: str) -> None:
        pending = flying.popleft()
        if fate == "early":
            box.retry(queue, pending, until_ms=now, maybe_applied=True)
            return
        offset = partition.append(pending)
        if fate == "late":
            box.retry(queue, pending, until_ms=now, maybe_applied=True)
        elif offset is None:
            assert box.renumber(queue, pending), "a gap behind what was lost is no failure"
        else:
            box.accepted(queue, pending, base_offset=offset, term=partition.term, replicas=3, synced=True)
            box.learned(queue, term=partition.term, committed=partition.offset(partition.committed))

    for turn in range(10_000):
        now += 1
        calm = turn > 300
        action = "take" if calm else rng.choice(["put", "put", "take", "answer", "commit", "depose", "stale"])
        if values and (calm or action == "put"):
            value = values.popleft()
            sent.append((box.put(value, None, queue), value))
        if action == "take" and (taken := box.take(queue, now_ms=now)) is not None:
            flying.append(taken)
        elif flying and (calm or action == "answer"):
            answer("good" if calm else rng.choice(["good", "good", "late", "early"]))
        elif action == "commit":
            partition.commit()
            old.append((partition.term, partition.offset(partition.committed)))
        elif action == "depose" and rng.random() < 0.3:
            partition.depose()
        elif action == "stale" and old:
            # A probe's answer that took long.
            term, committed = rng.choice(old)
            box.learned(queue, term=term, committed=committed)
        elif calm:
            partition.committed = len(partition.batches)
            box.learned(queue, term=partition.term, committed=partition.offset(partition.committed))
        check()
        if calm and queue.idle() and not values:
            break

    assert [value for _, value in sent] == [value for _, each in partition.batches for value in each]
    assert not box.failures and 0 == box.buffered_bytes
    assert all(pending.base_offset >= 0 for pending, _ in sent)


def test_an_answer_of_another_term_says_nothing_of_what_was_accepted() -> None:
    """However far its committed end lies: another batch may stand there."""
    box = RecordAccumulator(route=Route.even(1), batch_bytes=60, window=4)
    queue = box.queues[0]
    pending = box.put(b"a", None, queue)
    assert pending is box.take(queue, now_ms=0)
    box.accepted(queue, pending, base_offset=0, term=3, replicas=3, synced=True)

    box.learned(queue, term=2, committed=100)
    box.learned(queue, term=4, committed=100)

    assert not pending.settled
    assert pending is box.take(queue, now_ms=1), "it is sent again"
    box.accepted(queue, pending, base_offset=7, term=4, replicas=3, synced=True)
    box.learned(queue, term=4, committed=7)
    assert not pending.settled
    box.learned(queue, term=4, committed=8)
    assert 7 == pending.receipt(0).offset


def test_a_checkpoint_never_passes_a_record_that_is_not_durable() -> None:
    """In no queue, nor one that was given up; and it does not go back behind where the producer began."""
    numbers = Numbers(floor=2, created_with=2)
    numbers.learn(0, Reached(5, range(32_768)))
    numbers.learn(1, Reached(0, range(32_768, 65_536)))
    box = RecordAccumulator(route=Route.even(2), batch_bytes=60, window=4, numbers=numbers)
    assert (2, 2) == (box.checkpoint(), numbers.resumed_at)
    pendings = []
    for number, queue in ((7, box.queues[0]), (8, box.queues[1]), (9, box.queues[0])):
        numbers.check(number)
        pendings.append(box.put(b"x" * 60, None, queue))
        pendings[-1].first_number = pendings[-1].last_number = number
        numbers.sent(number)
    assert 6 == box.checkpoint()

    first = box.take(box.queues[0], now_ms=0)
    assert first is pendings[0]
    box.accepted(box.queues[0], first, base_offset=0, term=1, replicas=3, synced=True)
    assert 6 == box.checkpoint(), "accepted is not durable"
    box.learned(box.queues[0], term=1, committed=1)
    assert 7 == box.checkpoint()
    box.fail(box.queues[1], pendings[1], laminar.Error("gone"))
    third = box.take(box.queues[0], now_ms=0)
    assert third is pendings[2]
    box.acknowledged(box.queues[0], third, base_offset=1, replicas=3, synced=True)
    assert 7 == box.checkpoint()
    assert numbers.is_there(5, 0) and not numbers.is_there(5, 40_000) and numbers.is_there(2, 40_000)


@pytest.mark.parametrize("fault", ["drop", "lose", "refuse", "move", "unknown", "depose"])
async def test_a_fault_neither_loses_nor_doubles_nor_reorders_what_was_accepted(
    cluster: Any, fault: str
) -> None:
    """As for receipts; `depose` loses what two nodes had not got yet."""
    cluster.append_faults.extend([None, None, None, fault, None, None, None, None, fault, fault])
    async with aio.connect(cluster.urls) as client:
        async with client.topic("t").producer(name="copy", batch_bytes=300) as producer:
            deliveries = [producer.send(b"%04d" % n, partition=1, number=n + 1) for n in range(600)]
        assert 600 == producer.checkpoint
        offsets = [delivery.result().offset for delivery in deliveries]

    assert [b"%04d" % n for n in range(600)] == cluster.values("t", 1)
    assert list(range(600)) == offsets


async def test_accepted_comes_before_durable(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records stay here until the second; without it nobody asks before `PROBE_MS` are over."""
    monkeypatch.setattr(sender, "PROBE_MS", 600_000)
    async with aio.connect(cluster.urls) as client:
        async with client.topic("t").producer(name="copy") as producer:
            delivery = producer.send(b"a", partition=1, number=1)
            await producer.accepted()

            assert (False, 0) == (delivery.done(), producer.checkpoint)
            assert 0 < producer.statistics()["buffered_bytes"]
            assert 0 == cluster.probes
            await producer.durable()
            assert (0, 1, 0) == (
                delivery.result().offset,
                producer.checkpoint,
                producer.statistics()["buffered_bytes"],
            )
            assert 1 == cluster.probes
            monkeypatch.setattr(sender, "PROBE_MS", 50)
            delivery = producer.send(b"b", partition=1, number=2)
            async with asyncio.timeout(60):
                assert 1 == (await delivery).offset, "asked for, though nobody waits for all"
            probes = cluster.probes
            await asyncio.sleep(0.3)
            assert probes == cluster.probes, "nobody asks when all is durable"


async def test_who_takes_the_name_goes_on_and_shuts_the_older_out(cluster: Any) -> None:
    """The second run sends everything again; each record is there once."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        async with topic.producer(name="copy", batch_bytes=200) as first:
            assert 0 == first.resumed_at
            for number in range(1, 301):
                first.send(b"%d" % number, key=b"k%d" % (number % 7), number=number)
            await first.durable()
            async with topic.producer(name="copy", batch_bytes=200) as second:
                assert 0 < second.resumed_at <= 300
                deliveries = [
                    second.send(b"%d" % number, key=b"k%d" % (number % 7), number=number)
                    for number in range(1, 401)
                ]
                await second.durable()
                assert 400 == second.checkpoint
                assert [-1] * 300 == [each.result().offset for each in deliveries[:300]]
            with pytest.raises(laminar.ProduceError) as late:
                first.send(b"late", key=b"k1", number=401)
                await first.durable()
            assert "fenced" == late.value.code
            read: dict[bytes | None, list[int]] = {}
            async for record in topic.read():
                read.setdefault(record.key, []).append(int(record.text))
            first._sender.accumulator.failures.clear()  # type: ignore[union-attr]

    assert {b"k%d" % k: [n for n in range(1, 401) if n % 7 == k] for k in range(7)} == read


async def test_numbers_rise_and_all_records_have_one_or_none(cluster: Any) -> None:
    """Else a checkpoint would say nothing; and they are remembered under a name only."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        async with topic.producer(name="copy") as producer:
            producer.send(b"a", number=4)
            for number in (4, 3, None):
                with pytest.raises(laminar.ConfigError, match="number"):
                    producer.send(b"b", number=number)
        async with topic.producer(name="other") as producer:
            with pytest.raises(laminar.ConfigError, match="from 1"):
                producer.send(b"a", number=0)
            producer.send(b"a")
            with pytest.raises(laminar.ConfigError, match="not mixed"):
                producer.send(b"a", number=1)
        async with topic.producer() as producer:
            with pytest.raises(laminar.ConfigError, match="with a name"):
                producer.send(b"a", number=1)


def test_the_sync_face_takes_a_name_up_as_well(cluster: Any) -> None:
    """Without a loop: both waits, the checkpoint, and the second run's place."""
    with laminar.connect(cluster.urls) as client:
        topic = client.topic("t")
        with topic.producer(name="copy", batch_bytes=100) as producer:
            for number in range(1, 51):
                producer.send(b"%d" % number, partition=2, number=number)
            producer.accepted()
            producer.durable()
            assert 50 == producer.checkpoint
        with topic.producer(name="copy") as producer:
            resumed_at = producer.resumed_at
            assert 0 < resumed_at <= 50
            for number in range(resumed_at + 1, 61):
                producer.send(b"%d" % number, partition=2, number=number)

    assert [b"%d" % n for n in range(1, 61)] == cluster.values("t", 2)
