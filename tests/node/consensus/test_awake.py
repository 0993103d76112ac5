"""Which groups periodic checks look at: what is quiesced costs them nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import laminar
from laminar.client.topic import Topic
from laminar.node.consensus.awake import ROUND_S, Awake, AwakeList
from laminar.node.partition.partition import Partition
from laminar.node.shard.shard import Shard
from tests.http.serving import until

PARTITIONS = 16


def quiesced(shard: Shard) -> bool:
    """Whether all of the node's partitions are quiesced."""
    found = shard.driver.statistics()
    return len(shard.partitions) == found["groups"] == found["quiesced_groups"]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[Topic[bytes], Shard]]:
    """A topic of a node in this loop, and its shard; all partitions have a record, and are quiesced."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        shard = node._processes[0]
        assert isinstance(shard, Shard)
        topic = await node.client.create_topic("t", partitions=PARTITIONS)
        for number in range(PARTITIONS):
            await topic.append(b"value", partition=number)
        await until(lambda: quiesced(shard))
        yield topic, shard


async def test_no_check_of_an_idle_shard_looks_at_a_partition(node: tuple[Topic[bytes], Shard]) -> None:
    """Counted over all its checks: only the partition that was appended to since is looked at, once."""
    topic, shard = node
    lists: list[AwakeList[Partition]] = list(shard.driver.awake._lists)  # type: ignore[arg-type]
    for each in lists:
        each.take()
    # Some come back for the round that misses none.
    assert sum(len(each.take()) for each in lists) <= len(lists)

    await topic.append(b"another", partition=3)
    await until(lambda: quiesced(shard))

    woken = [{partition.number for partition in each.take()} for each in lists]
    assert len(lists) >= 8
    assert all(3 in numbers and len(numbers) <= 2 for numbers in woken), woken
    assert sum(len(each.take()) for each in lists) <= len(lists)


async def test_a_list_keeps_what_time_alone_makes_due(node: tuple[Topic[bytes], Shard]) -> None:
    """As long as `keep` holds, and once more after that."""
    _, shard = node
    kept = {1, 2}
    found = AwakeList(shard.by_group, lambda partition: partition.number in kept)

    assert PARTITIONS == len([each for each in found.take() if each.topic == "t"])
    kept.remove(1)
    assert {1, 2} == {partition.number for partition in found.take()}
    assert {2} == {partition.number for partition in found.take()}


async def test_a_replica_that_is_driven_no_longer_is_looked_at_once_more(
    node: tuple[Topic[bytes], Shard],
) -> None:
    """Then a check ends what it holds for it."""
    _, shard = node
    made = shard.driver.awake.list_of(shard.by_group, lambda partition: False)
    made.take()
    partition = shard.partitions["t", 5]

    shard.driver.remove(partition.replica.group, ConnectionError("by the test"))

    assert partition in made.take()


def test_every_group_comes_back_once_a_round_whatever_was_forgotten() -> None:
    """So a check that nobody told of what it should look at is late, and not lost."""
    came: list[bytes] = []

    class Noting(AwakeList[Partition]):
        def add(self, group: bytes) -> None:
            came.append(group)

    groups = {bytes([number]): None for number in range(150)}
    awake = Awake()
    awake._lists.append(Noting({}, lambda partition: False))  # type: ignore[arg-type]

    for _ in range(ROUND_S):
        awake.remind(groups, passed_s=1.0)

    assert sorted(groups) == sorted(came)
