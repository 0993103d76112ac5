"""A shard whose copy of the catalog is old: it asks the leader before anything is born or deleted."""

from __future__ import annotations

import asyncio
import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.log import DiskError, Storage
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import ConfirmRequest
from laminar.node.catch_up.service import CatchUp
from laminar.node.shard.replicas.reconcile import Reconciler
from laminar.node.shard.replicas.replica_moves import EMPTY, ReplicaMover
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.shard.shard import Shard
from membership.records import (
    CatalogState,
    PartitionRecord,
    ReplicaRecord,
    Tombstone,
    TopicRecord,
)
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, LOGS, SMALL, frame_for, open_inline
from tests.node.opened import entry

HELD, OTHER = bytes([1]) * 16, bytes([2]) * 16
STORE = b"s" * 16


class OldNode:
    """The parts of a shard that follow the catalog, over a storage that holds one replica with data."""

    def __init__(self, storage: Storage, catalog: CatalogState, truth: CatalogAnswer) -> None:
        self.asked: list[Any] = []
        self.opened: list[Any] = []
        shard: Any = SimpleNamespace(
            storage=storage,
            node="here",
            store_id=STORE,
            shards=1,
            number=0,
            view=SimpleNamespace(
                message=SimpleNamespace(catalog=catalog),
                partitions=lambda: catalog.partitions,
                topics=lambda: catalog.topics,
                nodes=lambda: catalog.nodes,
                partition=lambda topic, number: catalog.partitions.get(f"{topic}/{number}"),
            ),
            driver=SimpleNamespace(remove=lambda group, error: None),
            repairs=SimpleNamespace(forget=lambda group: None),
            partitions={},
            by_group={},
            request_reconcile=lambda: None,
        )
        self.shard = shard
        shard.owns = lambda record: True
        shard.lost = []
        shard.failed = {}
        shard.remove_replica = lambda entry, error: Shard.remove_replica(shard, entry, error)

        async def ask(request: Any) -> CatalogAnswer:
            self.asked.append(request)
            return truth if isinstance(request, ConfirmRequest) else CatalogAnswer()

        async def opened(made: Any) -> None:
            self.opened.append(made)

        shard.ask_catalog = ask
        shard.open = opened

    def duties(self) -> tuple[ReplicaMover, Reconciler]:
        """The parts, with a view that has just come."""
        work = WorkLists(self.shard)
        moves, reconciler = ReplicaMover(self.shard, work), Reconciler(self.shard, work)
        work.follow(None)
        return moves, reconciler

    async def follow(self) -> None:
        moves, reconciler = self.duties()
        await moves.at_home()
        await reconciler.make_missing()
        await reconciler.remove_deleted()


def creating(store_id: bytes = STORE) -> CatalogState:
    replica = ReplicaRecord(replica_id=7, node="here", store_id=store_id)
    record = PartitionRecord("new", 0, OTHER, "creating", [replica], 1)
    topic = TopicRecord("new", 1, 1, {}, 1, 1)
    return CatalogState(version=1, topics={"new": topic}, partitions={"new/0": record})


def buried() -> CatalogState:
    replica = ReplicaRecord(replica_id=1, node="here", store_id=STORE)
    stone = Tombstone("t", 1, HELD, [replica], 1, 1)
    return CatalogState(version=1, tombstones={HELD.hex(): stone})


async def followed(catalog: CatalogState, truth: CatalogAnswer) -> tuple[list[bytes], list[Any]]:
    """Groups in the manifest after a shard followed this copy, and what it asked the leader to confirm."""
    disk = FaultDisk()
    storage = open_inline(disk)
    log = storage.create_log("t-1", 1)
    log.append([frame_for(log, [b"data"])])
    await storage.write_manifest([entry(1, 1)])
    await storage.sync()
    node = OldNode(storage, catalog, truth)
    await node.follow()
    groups = [each.group for each in storage.manifest.entries]
    kept = [each for each in storage.manifest.entries if each.group == HELD]
    assert not kept or storage.logs[1].last_index == 1, "its entry is there"
    await storage.close()
    return groups, [request.groups for request in node.asked if isinstance(request, ConfirmRequest)]


async def test_pitfall_37_a_node_with_an_old_catalog_bootstraps_nothing() -> None:
    """The group was being created a year ago; by now the leader knows it as live: what is missing here
    is lost, and a blank replica would vote twice.
    """
    groups, asked = await followed(creating(), CatalogAnswer(creating=[]))
    assert ([HELD], [[OTHER]]) == (groups, asked)

    groups, _ = await followed(creating(), CatalogAnswer(creating=[OTHER]))
    assert [HELD, OTHER] == groups


async def test_pitfall_37_a_replica_promised_to_another_store_is_not_made_here() -> None:
    """The folder was emptied and formatted anew: it has this node's name, and none of its promises."""
    groups, asked = await followed(creating(b"formerly"), CatalogAnswer(creating=[OTHER]))

    assert ([HELD], []) == (groups, asked)


async def test_pitfall_37_a_node_with_an_old_catalog_deletes_nothing() -> None:
    """Its copy is of the time before the topic was made: what the catalog does not name stays. A tombstone
    counts only when the leader confirms it.
    """
    groups, _ = await followed(CatalogState(version=1), CatalogAnswer(deleted=[HELD]))
    assert [HELD] == groups
    groups, asked = await followed(buried(), CatalogAnswer(deleted=[]))
    assert ([HELD], [[HELD]]) == (groups, asked)

    groups, _ = await followed(buried(), CatalogAnswer(deleted=[HELD]))
    assert [] == groups


def live(replicas: list[ReplicaRecord], removed: list[ReplicaRecord], group: bytes) -> CatalogState:
    record = PartitionRecord("t", 0, group, "live", replicas, 1, removed=removed)
    topic = TopicRecord("t", 1, 1, {}, 1, 1)
    return CatalogState(version=1, topics={"t": topic}, partitions={"t/0": record})


async def test_pitfall_50_a_removed_replica_is_deleted_when_the_leader_confirms_it() -> None:
    """The copy may be of a catalog that lost what it decided last."""
    removed = live([ReplicaRecord(9, "there", OTHER)], [ReplicaRecord(1, "here", STORE)], HELD)
    groups, asked = await followed(removed, CatalogAnswer(removed=[]))
    assert ([HELD], [[HELD]]) == (groups, asked)

    groups, _ = await followed(removed, CatalogAnswer(removed=[1]))
    assert [] == groups


async def test_pitfall_37_a_new_member_is_made_when_the_leader_confirms_that_it_is_missing() -> None:
    """By now it may have been made here, have voted, and be lost."""
    joining = live([ReplicaRecord(7, "here", STORE)], [], OTHER)
    groups, asked = await followed(joining, CatalogAnswer(joining=[]))
    assert ([HELD], [[OTHER]]) == (groups, asked)

    groups, _ = await followed(joining, CatalogAnswer(joining=[7]))
    assert [HELD, OTHER] == groups


async def test_what_is_made_takes_back_no_change_of_the_manifest_that_is_under_way() -> None:
    """A learner begins anew beside the shard's own task. By a list that was made before, the manifest would
    name the log that is no more: the next start would take the replica for lost.
    """
    storage = Storage.open(FaultDisk(), HOME, LOGS, settings=SMALL)
    await storage.write_manifest([entry(1, 1)])
    node = OldNode(storage, creating(), CatalogAnswer(creating=[OTHER]))
    may_go_on = threading.Event()
    storage._executor.post_to_writer(may_go_on.wait)  # type: ignore[arg-type]
    changing = asyncio.ensure_future(storage.change_manifest(lambda known: {1: replace(known[1], log_id=9)}))
    await asyncio.sleep(0)
    following = asyncio.ensure_future(node.follow())
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(changing, following)

    assert [(HELD, 9), (OTHER, node.opened[0].log_id)] == [
        (each.group, each.log_id) for each in storage.manifest.entries
    ]
    await storage.close()


@pytest.mark.parametrize("passed", range(4))
async def test_a_new_member_whose_manifest_could_not_be_written_is_made_later(passed: int) -> None:
    """A full disk lets some of the manifest's files be made: nothing is left behind, and nothing left half
    made.
    """
    disk = FaultDisk()
    storage = open_inline(disk)
    node = OldNode(storage, live([ReplicaRecord(7, "here", STORE)], [], OTHER), CatalogAnswer(joining=[7]))
    moves, _ = node.duties()
    left = [passed]

    def full(operation: str, path: str) -> int | None:
        if operation != "create" or "manifest." not in path:
            return None
        left[0] -= 1
        return errno.ENOSPC if left[0] < 0 else None

    disk.error = full
    for _ in range(3):
        left[0] = passed if passed < 2 or not storage.manifest.entries else passed - 2
        with pytest.raises(DiskError):
            await moves.at_home()
    assert [] == node.opened and len(storage.logs) <= 1
    assert all(each.state == "making" for each in storage.manifest.entries)
    disk.error = None
    await moves.at_home()
    await moves.at_home()

    [entry] = storage.manifest.entries
    assert ([entry], EMPTY, [entry.log_id]) == (node.opened, entry.state, list(storage.logs))
    await storage.close()


@pytest.mark.parametrize("removed", [True, False])
async def test_the_log_that_took_anothers_place_is_deleted_with_its_replica(removed: bool) -> None:
    """Also when the manifest does not name it yet."""
    storage = open_inline(FaultDisk())
    log = storage.create_log("t-1", 1)
    log.append([frame_for(log, [b"data"])])
    await storage.sync()
    await storage.write_manifest([entry(1, 1)])
    new = storage.create_log("t-1+", 2)
    new.append([frame_for(new, [b"data"])])
    await storage.replace_log(1, new)
    gone = live([ReplicaRecord(9, "there", OTHER)], [ReplicaRecord(1, "here", STORE)], HELD)
    catalog = gone if removed else buried()
    await OldNode(storage, catalog, CatalogAnswer(removed=[1], deleted=[HELD])).follow()

    assert ([], {}) == (storage.manifest.entries, storage.logs)
    await storage.close()


async def test_a_replica_that_was_deleted_while_its_log_was_replaced_does_not_come_back() -> None:
    """The catch-up's record was on its way to the disk when the replica was let go of."""
    storage = open_inline(FaultDisk())
    log = storage.create_log("t-1+", 2)
    log.append([frame_for(log, [b"data"])])
    await storage.sync()
    opened: list[Any] = []
    shard = SimpleNamespace(open=opened.append, request_reconcile=lambda: None)
    partition = SimpleNamespace(replica=SimpleNamespace(replica_id=8))
    for by_group in ({}, {HELD: partition}):
        home: Any = SimpleNamespace(storage=storage, _shard=shard, _replaced_logs={}, _by_group=by_group)
        await CatchUp.log_replaced(home, entry(1, 2))

    assert ([], {}) == (opened, storage.logs)
    await storage.close()
