"""Replicas that come up: what cannot be read stays away alone; a catalog never stands still."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from laminar.batch import Kind, build_control
from laminar.log import Storage
from laminar.log.errors import StorageError
from laminar.log.manifest import ReplicaEntry
from laminar.node.catalog_group import CatalogGroup
from laminar.node.clock import Clock
from laminar.node.process import Process
from laminar.node.replica import initial_frame
from laminar.node.shard import Shard
from raft.values import Settings
from tests.log.crash_disk import CrashDisk
from tests.log.histories import open_inline
from tests.node.trio import CLUSTER, VOTERS


def entry(number: int, log_id: int) -> ReplicaEntry:
    return ReplicaEntry(
        log_id=log_id,
        replica_id=number,
        incarnation=1,
        group=bytes([number]) * 16,
        topic="t",
        partition=number,
        partition_hash=number,
        state="made",
        created_ms=1,
        voters=list(VOTERS.voters),
        settings={},
    )


async def open_all(storage: Storage, entries: list[ReplicaEntry]) -> Any:
    """The part of a shard that opens replicas."""
    driven: list[Any] = []
    shard: Any = SimpleNamespace(
        storage=storage,
        lost=[],
        partitions={},
        _by_group={},
        driver=SimpleNamespace(add=driven.append),
        driven=driven,
        cluster_id=CLUSTER,
        raft_settings=Settings(),
        rng=random.Random(1),
        clock=Clock(),
    )
    shard.open_replica = lambda *args, **named: Process.open_replica(shard, *args, **named)
    for each in entries:
        await Shard._open(shard, each)
    return shard


async def test_pitfall_35_what_is_missing_unreadable_or_unsure_stays_away_alone() -> None:
    """No log, no vote, a vote that may be older than the newest, a damaged log: none of these takes part, and
    the shard's other replicas serve.
    """
    storage = open_inline(CrashDisk())
    entries = []
    for number in range(1, 7):
        log = storage.create_log(f"t-{number}")
        log.append([initial_frame(VOTERS, created_ms=1)])
        storage.record_hard_state(number, term=1, vote=0)
        entries.append(entry(number, log.log_id))
    await storage.sync()
    healthy, no_log, no_vote, unsure, recovering, damaged = entries
    storage.logs.pop(no_log.log_id)
    storage.hard_states.pop(no_vote.replica_id)
    storage.lost_hard_states.add(unsure.replica_id)
    storage.logs[recovering.log_id].recovering = True

    async def unreadable(*_: object, **__: object) -> list[bytes]:
        raise StorageError("damaged")

    storage.logs[damaged.log_id].read = unreadable  # type: ignore[method-assign, assignment]

    shard = await open_all(storage, entries)

    assert [no_log, no_vote, unsure, recovering, damaged] == shard.lost
    assert [healthy.group] == [replica.group for replica in shard.driven]
    assert [("t", healthy.partition)] == list(shard.partitions)
    await storage.close()


async def test_a_command_that_cannot_be_applied_ends_the_controller() -> None:
    """Nothing is applied behind it, and nobody goes on with a catalog that stands still."""
    frame = build_control(Kind.COMMAND, b"no command")
    failures: list[Exception] = []

    async def read(*_: object, **__: object) -> list[bytearray]:
        return [frame]

    log: Any = SimpleNamespace(start=SimpleNamespace(index=0), read=read)
    driver: Any = None
    group = CatalogGroup(
        driver=driver,
        log=log,
        on_applied=lambda: None,
        on_led=lambda leading: None,
        on_failed=failures.append,
    )

    def broken(index: int, command: bytes) -> None:
        raise RuntimeError("not a command")

    group.catalog.apply = broken  # type: ignore[method-assign, assignment]
    group.committed(1)
    async with asyncio.timeout(2):
        while not failures:  # noqa: ASYNC110  # a list, filled from within
            await asyncio.sleep(0.001)

    assert ["not a command"] == [str(failure) for failure in failures]
    assert 0 == group.applied_index
