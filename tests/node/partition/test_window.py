"""Accepted and durable are two things: what a partition tells of a producer, and whom it shuts out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.batch import HEADER_SIZE, Header, Kind, build
from laminar.batch.header import seal
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.producer_progress import fence, read
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.producers import Place, Producers, Progress, Refused
from tests.node.alone import lone_partition
from tests.node.entries import stamped
from tests.node.trio import batch as producer_batch
from tests.node.trio import send, trio

ONE = b"1" * 16


def batch(sequence: int, *values: bytes, epoch: int = 0, checkpoint: int = 0, floor: int = 0) -> bytearray:
    return build(
        list(values),
        producer_id=ONE,
        producer_epoch=epoch,
        sequence=sequence,
        checkpoint=checkpoint,
        floor=floor,
    )


def entry(index: int, frame: bytearray) -> Header:
    return Header.unpack(stamped(frame, index, base_offset=index * 10, time_ms=1000))


def fence_of(epoch: int) -> bytearray:
    return seal(bytearray(HEADER_SIZE), Kind.FENCE, producer_id=ONE, producer_epoch=epoch)


def test_what_is_told_as_durable_is_what_is_committed() -> None:
    """The end of the log is told apart, and a truncation takes it back."""
    table = Producers()
    table.appended(entry(1, batch(0, b"a", checkpoint=5, floor=3)))
    assert table.committed_progress(ONE) is None
    table.committed(1)
    table.appended(entry(2, batch(1, b"b", checkpoint=9, floor=5)))

    assert Progress(0, 0, 5, 3) == table.committed_progress(ONE)
    assert Progress(0, 1, 9, 5) == table.progress(ONE)
    table.truncated(2)
    assert Progress(0, 0, 5, 3) == table.progress(ONE)


def test_numbers_outlive_the_epoch_and_never_go_back() -> None:
    """A batch without numbers, and one that knows less, change nothing."""
    table = Producers()
    table.appended(entry(1, batch(0, b"a", checkpoint=5, floor=4)))
    table.appended(entry(2, batch(0, b"b", epoch=1)))
    table.appended(entry(3, batch(1, b"c", epoch=1, checkpoint=7, floor=2)))

    assert Progress(1, 1, 7, 4) == table.progress(ONE)
    again = Producers()
    again.restore(table.stored())
    assert table.stored() == again.stored()


def test_a_fence_shuts_the_older_epochs_out() -> None:
    """Without a record; the new epoch begins at 0, and a truncation of the fence opens the way again."""
    table = Producers()
    table.appended(entry(1, batch(0, b"a", epoch=1, checkpoint=5)))
    table.appended(entry(2, fence_of(2)))

    assert Refused("fenced", 2) == table.check(ONE, 1, 1)
    assert None is table.check(ONE, 2, 0)
    assert Progress(2, -1, 5, 0) == table.progress(ONE)
    again = Producers()
    again.restore(table.stored())
    assert table.stored() == again.stored()
    table.truncated(2)
    assert None is table.check(ONE, 1, 1)
    assert Place(1, 10, 1, 0) == table.check(ONE, 1, 0)


async def test_an_accepted_batch_has_a_place_at_once_and_is_recognised(tmp_path: Path) -> None:
    """Accepted again, or appended with a receipt, it is the same batch."""
    async with lone_partition(tmp_path) as partition:
        first = batch(0, b"a", b"b")
        accepted = partition.appends.accept_frame(first, Header.unpack(first))
        again = batch(0, b"a", b"b")

        assert Receipt(0, 0, 2) == accepted
        assert Receipt(0, 0, 2, duplicate=True) == partition.appends.accept_frame(again, Header.unpack(again))
        assert Receipt(0, 0, 2, duplicate=True) == await partition.appends.append_frame(
            again, Header.unpack(again)
        )
        assert 2 == partition.end_offset


async def test_a_look_waits_until_the_batch_is_durable(tmp_path: Path) -> None:
    """And a producer that has nothing durable is not known."""
    async with lone_partition(tmp_path) as partition:
        assert None is await read(partition, ONE, epoch=0, sequence=None, wait_s=0)
        for sequence in range(3):
            frame = batch(sequence, b"v", checkpoint=10 + sequence, floor=sequence)
            partition.appends.accept_frame(frame, Header.unpack(frame))

        assert Progress(0, 2, 12, 2) == await read(partition, ONE, epoch=0, sequence=2, wait_s=10)


async def test_a_fence_tells_what_the_older_epoch_left_and_ends_it(tmp_path: Path) -> None:
    """Told twice it is the same; an older epoch is refused as a fence and as a batch."""
    async with lone_partition(tmp_path) as partition:
        frame = batch(0, b"v", checkpoint=10, floor=3)
        partition.appends.accept_frame(frame, Header.unpack(frame))

        one, two = await asyncio.gather(fence(partition, ONE, 4), fence(partition, ONE, 4))

        assert Progress(4, -1, 10, 3) == one == two
        entries = partition.log.last_index
        assert Progress(4, -1, 10, 3) == await fence(partition, ONE, 4)
        assert entries == partition.log.last_index, "nothing is appended for what is so already"
        with pytest.raises(Problem) as old:
            await fence(partition, ONE, 3)
        assert ("fenced", 4) == (old.value.code, old.value.limit)
        late = batch(1, b"w")
        with pytest.raises(Problem) as refused:
            partition.appends.accept_frame(late, Header.unpack(late))
        assert ("fenced", "not_applied") == (refused.value.code, refused.value.outcome)


async def test_what_a_deposed_leader_accepted_is_in_no_window_and_is_taken_anew() -> None:
    """It calls nothing durable that a majority has not got; the next leader knows nothing of it, and takes it
    with the same number, behind what came there meanwhile.
    """
    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, producer_batch(0, b"a"))
        await cluster.settled()
        cluster.cut_off(old.node)
        lost = producer_batch(1, b"b")
        taken = old.partition.appends.accept_frame(lost, Header.unpack(lost))
        assert (1, 1) == (taken.offset, taken.count)
        assert 1 == old.partition.copies.window().end, "accepted is not durable"
        before = old.partition.replica.core.term

        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        await send(new, producer_batch(0, b"other", producer=b"2" * 16))
        cluster.heal()
        await cluster.settled()

        assert new.partition.replica.core.term > before
        for member in cluster.alive:
            assert 0 == told_of(member.partition).sequence
        again = producer_batch(1, b"b")
        assert 2 == (await send(new, again)).offset
        await cluster.settled()
        cluster.check_equal()
        assert [b"a", b"other", b"b"] == new.values()
        assert 1 == told_of(old.partition).sequence


def told_of(partition: Partition) -> Progress:
    progress = partition.producers.committed_progress(b"p" * 16)
    assert progress is not None
    return progress
