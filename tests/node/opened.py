"""Replicas opened as a shard opens them, without the rest of the shard."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from laminar.log import Log, Storage
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.peer_repair import PeerRepair
from laminar.node.consensus.replica import Replica, initial_frame
from laminar.node.host.clock import Clock
from laminar.node.runtime.replica_factory import ReplicaFactory
from laminar.node.secret.keyring import Keyring
from laminar.node.shard.replicas.replica_startup import ReplicaOpener
from laminar.node.trace.ring import TraceRing
from laminar.node.transport.rpc import PeerLost
from laminar.node.transport.transport import TcpAddress, Transport
from raft.values import Settings
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import frame_for, open_inline
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


def idle_driver(on_add: Callable[[Replica], None] | None = None) -> Driver:
    """A driver that is stopped, for tests that do its work: real, as the compiled build takes no other.

    `on_add` is called with each replica that is handed to it.
    """

    def failed(error: BaseException) -> None:
        raise error

    driver = Driver(
        storage=open_inline(FaultDisk()),
        transport=Transport(cluster_id=lambda: CLUSTER, node="a", role=1, nonce=b"n" * 16, secrets=Keyring()),
        clock=Clock(),
        address_of=lambda node, replica: None,
        on_fatal=failed,
    )
    driver.on_add = on_add
    driver.stop()
    return driver


async def open_all(storage: Storage, entries: list[ReplicaEntry]) -> Any:
    """The part of a shard that opens replicas."""
    driven: list[Any] = []
    shard: Any = SimpleNamespace(
        storage=storage,
        lost=[],
        failed={},
        view=SimpleNamespace(partition=lambda topic, number: None, topics=dict),
        refusal=lambda: None,
        consumer_refusal=lambda: None,
        trace_refusal=lambda: None,
        traces=TraceRing(),
        opened=lambda partition: None,
        partitions={},
        by_group={},
        driver=idle_driver(driven.append),
        driven=driven,
        cluster_id=CLUSTER,
        clock=Clock(),
        replica_factory=ReplicaFactory(
            cluster_id=lambda: CLUSTER,
            storage=storage,
            settings=Settings(),
            clock=Clock(),
            rng=random.Random(1),
        ),
    )
    shard.work = []

    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        shard.work.append(asyncio.get_running_loop().create_task(work))
        task: asyncio.Task[None] = shard.work[-1]
        return task

    shard.spawn = spawn
    shard.repairs = PeerRepair(
        cluster_id=lambda: CLUSTER,
        call=nobody_answers,
        nodes_of=lambda each, replica: ["b", "c"],
        address_of=lambda node, each: TcpAddress("127.0.0.1", 9),
        hand_over=lambda replica, node: None,
        spawn=spawn,
        rng=random.Random(1),
    )
    storage.on_damage = shard.repairs.found
    opening = ReplicaOpener(shard)
    for each in entries:
        await opening.open(each)
    return shard


async def nobody_answers(*_: object, **__: object) -> bytes:
    """A call to nodes that are not there."""
    raise PeerLost("nobody is there", sent=False)


async def found_again(*values: bytes) -> tuple[FaultDisk, Storage, Log]:
    """The log of replica 1 with an entry for each of these, as a start finds it in its segment."""
    disk = FaultDisk()
    storage = open_inline(disk)
    log = storage.create_log("t-1")
    log.append([initial_frame(VOTERS, created_ms=1)])
    for value in values:
        log.append([frame_for(log, [value])])
    storage.record_hard_state(1, term=1, vote=0)
    await storage.sync()
    await storage.close()
    disk.kill()
    storage = open_inline(disk)
    return disk, storage, storage.logs[log.log_id]
