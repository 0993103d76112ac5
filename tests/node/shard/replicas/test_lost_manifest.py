"""A shard whose manifest was lost: what the catalog records for it is lost, and nothing is born before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from laminar.http.api.problems import Problem
from laminar.log import Storage
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.consensus.lost_majority import LogEnd, Releases
from laminar.node.host.clock import Clock
from laminar.node.shard.replicas.lost_manifest import LostManifest, recorded_here
from membership.records import (
    CatalogState,
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
    TopicRecord,
)
from router import owner_shard, partition_hash
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import open_inline
from tests.node.opened import entry
from tests.node.shard.replicas.test_old_catalog import HELD, OTHER, STORE, OldNode, creating, live

ELSEWHERE = ReplicaRecord(8, "there", b"t" * 16, made=True)


def state_of(*records: PartitionRecord) -> CatalogState:
    topic = TopicRecord("t", len(records), 3, {"flush": "interval"}, 1, 1)
    return CatalogState(
        version=1,
        topics={"t": topic},
        partitions={f"{each.topic}/{each.number}": each for each in records},
    )


def record(number: int, *here: ReplicaRecord, state: Any = "live", **more: Any) -> PartitionRecord:
    return PartitionRecord("t", number, bytes([number]) * 16, state, [ELSEWHERE, *here], 5, **more)


def replica(replica_id: int, *, store_id: bytes = STORE, **more: Any) -> ReplicaRecord:
    return ReplicaRecord(replica_id, "here", store_id, **more)


def test_whatever_is_recorded_for_this_store_and_shard_is_lost() -> None:
    """Also what is being created, what joins, and what leaves: each may have been made here and have voted.
    What is removed never comes back, and is left out.
    """
    catalog = state_of(
        record(0, replica(10, made=True)),
        record(1, replica(11), state="creating"),
        record(2, replica(12)),
        record(3, leaving=[LeavingReplica(replica(13, made=True), "moved")]),
        record(4, removed=[replica(14, made=True)]),
        record(5, replica(15, store_id=b"formerly")),
        record(6),
    )
    found = recorded_here(catalog, node="here", store_id=STORE, shard=0, shards=1)

    assert [10, 11, 12, 13] == [each.replica_id for each in found]
    assert {("made", 0)} == {(each.state, each.log_id) for each in found}
    first = found[0]
    assert (bytes(16), "t", 0, 5) == (first.group, first.topic, first.partition, first.created_ms)
    assert (partition_hash("t", 0), {"flush": "interval"}) == (first.partition_hash, first.settings)
    assert [(8, "there"), (10, "here")] == first.voters
    for shard in range(3):
        numbers = [n for n in range(4) if owner_shard(partition_hash("t", n), 3) == shard]
        found = recorded_here(catalog, node="here", store_id=STORE, shard=shard, shards=3)
        assert numbers == [each.partition for each in found]


async def unknown_home() -> tuple[FaultDisk, Storage]:
    """As a recovery leaves it that found no manifest."""
    disk = FaultDisk()
    storage = open_inline(disk)
    await storage.write_manifest([], known=False)
    return disk, storage


def node_of(storage: Storage, catalog: CatalogState, *, answers: list[str]) -> OldNode:
    """`answers`: what the catalog says each time that it is asked for its newest version; "" is an answer."""
    node = OldNode(storage, catalog, CatalogAnswer(creating=[OTHER], joining=[7]))

    async def refresh_view() -> None:
        problem = answers.pop(0)
        if problem:
            raise Problem("no_leader", problem)

    node.shard.refresh_view = refresh_view
    return node


async def test_a_replica_that_may_have_been_here_is_never_born_again() -> None:
    """Its group is being created by the leader's confirmed word: it may have been made here before, all the
    same. Nothing is known while the catalog cannot be asked; then it is lost, durably.
    """
    for catalog in (creating(), live([replica(7)], [], OTHER)):
        disk, storage = await unknown_home()
        node = node_of(storage, catalog, answers=["nobody leads", ""])
        lost = LostManifest(node.shard)
        assert not await lost.settle()
        assert not storage.manifest.known and [] == storage.manifest.entries == node.opened

        assert await lost.settle()
        await node.follow()

        [made] = node.opened
        assert ([made], OTHER, 7) == (storage.manifest.entries, made.group, made.replica_id)
        assert made.log_id not in storage.logs and [] == list(storage.logs)
        await storage.close()
        disk.kill()
        again = open_inline(disk)
        assert again.manifest.known and [made] == again.manifest.entries
        assert await LostManifest(node_of(again, catalog, answers=[]).shard).settle(), "it asks nobody"
        await again.close()


async def test_what_was_created_since_is_born_as_ever() -> None:
    """It was on no record when the catalog was asked, so it was never here."""
    _, storage = await unknown_home()
    assert await LostManifest(node_of(storage, CatalogState(version=1), answers=[""]).shard).settle()

    node = node_of(storage, creating(), answers=[])
    _, reconciler = node.duties()
    await reconciler.make_missing()

    assert [(OTHER, "made")] == [(each.group, each.state) for each in storage.manifest.entries]
    assert 1 == len(storage.logs)
    await storage.close()


async def test_a_group_that_is_created_goes_on_without_the_lost_replica_and_replaces_it() -> None:
    """Its node reports it as made, so that the group becomes live, and then as lost."""
    _, storage = await unknown_home()
    node = node_of(storage, creating(), answers=[""])
    assert await LostManifest(node.shard).settle()
    [made] = storage.manifest.entries
    node.shard.lost.append(made)
    node.asked.clear()
    _, reconciler = node.duties()
    await reconciler.make_missing()
    assert [[OTHER]] == [request.groups for request in node.asked]

    record = msgspec.structs.replace(
        creating().partitions["new/0"], state="live", replicas=[replica(7, made=True)]
    )
    node = node_of(storage, CatalogState(version=2, partitions={"new/0": record}), answers=[])
    node.shard.lost.append(made)
    moves, _ = node.duties()
    await moves.at_home()
    assert [[7]] == [request.change.lost for request in node.asked]
    await storage.close()


async def test_what_the_manifest_names_keeps_its_group() -> None:
    """Of another home of this node, dealt out with this one: it goes on as it was."""
    _, storage = await unknown_home()
    await storage.write_manifest([entry(1, 1)])
    catalog = live([replica(9)], [], HELD)
    record_ = msgspec.structs.replace(
        catalog.partitions["t/0"], leaving=[LeavingReplica(replica(1), "moved")]
    )
    node = node_of(storage, state_of(record_), answers=[""])

    assert await LostManifest(node.shard).settle()

    assert ([entry(1, 1)], [], True) == (storage.manifest.entries, node.opened, storage.manifest.known)
    await storage.close()


async def test_nobody_is_told_that_a_replica_which_is_forgotten_never_promised_anything() -> None:
    """A group in which all the others are marked would go on without what it acknowledged."""
    _, storage = await unknown_home()
    driver = SimpleNamespace(replicas={})
    releases = Releases(
        cast(Any, None),
        node="a",
        driver=cast(Any, driver),
        storage=storage,
        clock=Clock(),
        election_timeout_ms=1500,
        call=cast(Any, None),
        address_of=lambda node, member: None,
    )

    assert releases._end(OTHER) is None
    await storage.write_manifest([], known=True)
    assert releases._end(OTHER) == LogEnd()
    await storage.write_manifest([entry(2, 0)])
    assert releases._end(OTHER) is None
    await storage.close()
