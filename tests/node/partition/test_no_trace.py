"""A refused append leaves nothing behind: no offset, no byte, no waiter, no room taken (laminarmq P11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.batch import Header
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.partition.append_path import UNCOMMITTED_BYTES
from laminar.node.partition.partition import Partition
from raft.values import NotLeader, Settings
from tests.node.alone import lone_partition
from tests.node.trio import batch


def append(partition: Partition, sequence: int, *, epoch: int = 1) -> asyncio.Future[object]:
    frame = batch(sequence, b"value", epoch=epoch)
    return partition.appends.append_frame(frame, Header.unpack(frame))  # type: ignore[return-value]


def disk_full(partition: Partition) -> None:
    partition.appends.refusal = lambda: Problem("disk_full", outcome="not_applied")


def handing_over(partition: Partition) -> None:
    """The core still leads, but takes nothing more: known only when it is asked."""

    def propose(*arguments: object, **options: object) -> tuple[int, int, int]:
        raise NotLeader(2)

    partition.context.driver.propose = propose  # type: ignore[method-assign]


def not_leader(partition: Partition) -> None:
    partition.replica.failure = RuntimeError("a test says so")


def removed(partition: Partition) -> None:
    partition.context.driver.remove(partition.replica.group, RuntimeError("a test says so"))


def backed_up(partition: Partition) -> None:
    partition.appends.uncommitted_bytes += UNCOMMITTED_BYTES + 1


def larger_than_a_message(partition: Partition) -> None:
    core = partition.replica.core
    core._settings = replace(core._settings, max_entry_bytes=100)


def unchanged(partition: Partition) -> None:
    return None


def picture(partition: Partition) -> tuple[object, ...]:
    return (
        partition.log.last_index,
        partition.log.next_offset,
        partition.log.size_bytes,
        partition.context.driver._storage._changes.pending_bytes,
        partition.appends.residue(),
        partition.producers.stored(),
        partition.cursors.stored(),
    )


FRAMES = [
    (disk_full, 1, 1, "disk_full"),
    (handing_over, 1, 1, "not_leader"),
    (not_leader, 1, 1, "not_leader"),
    (backed_up, 1, 1, "overloaded"),
    (larger_than_a_message, 1, 1, "too_large"),
    (unchanged, 0, 0, "fenced"),
    (unchanged, 7, 1, "out_of_sequence"),
]


def _name(value: object) -> str:
    """The same in every worker, which the address of a function is not."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("prepare", "sequence", "epoch", "code"), FRAMES, ids=_name)
async def test_a_refused_batch_leaves_no_trace(
    tmp_path: Path, prepare: Callable[[Partition], None], sequence: int, epoch: int, code: str
) -> None:
    """Whatever refuses it. The next one gets the next offset and the next sequence."""
    async with lone_partition(tmp_path) as partition:
        await append(partition, 0)
        refusal, propose = partition.appends.refusal, partition.context.driver.propose
        prepare(partition)
        before = picture(partition)

        with pytest.raises(Problem) as refused:
            append(partition, sequence, epoch=epoch)

        assert (code, "not_applied") == (refused.value.code, refused.value.outcome)
        assert before == picture(partition)
        partition.appends.refusal, partition.context.driver.propose = refusal, propose  # type: ignore[method-assign]
        partition.replica.failure = None
        if prepare is backed_up:
            partition.appends.uncommitted_bytes = 0
        partition.replica.core._settings = Settings()
        receipt = await append(partition, 1)
        assert 1 == receipt.offset  # type: ignore[attr-defined]
        assert 0 == partition.appends.uncommitted_bytes


@pytest.mark.parametrize("prepare", [disk_full, removed, backed_up], ids=_name)
async def test_refused_records_leave_no_trace(tmp_path: Path, prepare: Callable[[Partition], None]) -> None:
    """At the door too: they never stood there."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"first"]))
        prepare(partition)
        before = picture(partition)

        with pytest.raises(Problem):
            await partition.appends.append_records(Records([b"refused"]))

        assert before == picture(partition)


async def test_records_at_the_door_of_a_leader_that_hands_over_are_refused(tmp_path: Path) -> None:
    """They were not proposed, so their sender may send them again at once."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"first"]))
        before = picture(partition)
        handing_over(partition)

        refused = partition.appends.append_records(Records([b"a", b"b"]))

        with pytest.raises(Problem) as problem:
            await refused
        assert ("not_leader", "not_applied") == (problem.value.code, problem.value.outcome)
        assert before == picture(partition)
