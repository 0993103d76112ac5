"""A shard brought in line with its view: what waits, and for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from laminar.batch import Header, build
from laminar.log.format.flush_policy import COMMIT
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.shard.replicas.reconcile import Reconciler
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.transactions.participant import Batch, Participant
from membership.records import CatalogState, PartitionRecord, ReplicaRecord, TopicRecord
from tests.node.alone import lone_partition


async def test_a_partition_keeps_its_flush_policy_until_what_is_prepared_is_published(tmp_path: Path) -> None:
    """A commit may be decided already: what it publishes is synced before that is said, as promised."""
    async with lone_partition(tmp_path) as partition:
        staging, batch = Participant(partition), Batch(sink=b"s" * 16, number=0, epoch=1)
        frame = build([b"x"])
        await staging.stage(batch, 0, frame, Header.unpack(frame))
        await staging.prepare(batch, [0])
        written: list[Any] = []
        again = asyncio.Event()

        async def change_manifest(change: Callable[[dict[int, Any]], dict[int, Any]]) -> None:
            written.append(change({}))

        storage = partition.context.driver._storage
        record = PartitionRecord("t", 0, partition.replica.group, "live", [ReplicaRecord(1, "b", b"")], 1)
        topic = TopicRecord("t", 1, 1, {"flush": "interval"}, 1, 1)
        view = View(node="a", unix_name=str)
        catalog = CatalogState(version=1, topics={"t": topic}, partitions={"t/0": record})
        view.message = ViewMessage(cluster_id=b"", catalog=catalog, statuses={})
        shard: Any = SimpleNamespace(
            node="a",
            partitions={("t", 0): partition},
            by_group={partition.replica.group: partition},
            owns=lambda record: True,
            view=view,
            storage=SimpleNamespace(
                set_policy=storage.set_policy,
                change_manifest=change_manifest,
                manifest=SimpleNamespace(of_group=lambda group: None),
            ),
            request_reconcile=again.set,
        )
        work = WorkLists(shard)
        reconciler = Reconciler(shard, work)
        work.follow(None)
        await reconciler.change_policies()
        assert COMMIT == partition.log.policy
        await asyncio.wait_for(again.wait(), 30)
        await staging.publish(batch)
        await reconciler.change_policies()
        assert partition.log.policy.is_interval and len(written) == 1
