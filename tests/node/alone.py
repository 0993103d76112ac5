"""A partition with one voter in this process and loop: real storage, real driver, no HTTP."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from laminar.batch import Batch
from laminar.log import RealDisk, Storage, StorageSettings
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, initial_frame, replay
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import Transport
from raft.values import HardState, Settings

VOTER = ConfigurationRecord(voters=((1, "here"),))
GROUP = b"g" * 16
SMALL = StorageSettings(
    first_journal_file_bytes=1 << 20, journal_file_bytes=4 << 20, segment_size_bytes=1 << 20
)


@asynccontextmanager
async def lone_partition(
    directory: Path,
    *,
    voters: ConfigurationRecord = VOTER,
    stopped: list[str] | None = None,
    settings: StorageSettings = SMALL,
) -> AsyncIterator[Partition]:
    """Opens, or opens again, the one partition in `directory`; it leads if it is the only voter.

    `stopped`: names of replicas that stop by a mistake, where a test makes one.
    """
    storage = Storage.open(RealDisk(), str(directory / "home"), str(directory / "logs"), settings=settings)
    transport = Transport(
        cluster_id=lambda: b"c" * 16, node="here", role=1, nonce=b"n" * 16, secrets=Keyring()
    )
    failures: list[object] = []
    driver = Driver(
        storage=storage,
        transport=transport,
        clock=Clock(),
        address_of=lambda node, replica: None,
        on_fatal=failures.append,
        on_stopped=lambda name, error: failures.append(error) if stopped is None else stopped.append(name),
    )
    partition = await add_partition(driver, storage, 0, voters=voters)
    try:
        yield partition
    finally:
        await driver.close()
        await transport.close()
        await storage.close()
        assert not failures, failures


async def add_partition(
    driver: Driver, storage: Storage, number: int, *, voters: ConfigurationRecord = VOTER
) -> Partition:
    """Make or open again partition `number` of a driver's process, and let it stand."""
    name, replica_id = f"t-{number}", number + 1
    if not any(log.name == name for log in storage.logs.values()):
        log = storage.create_log(name)
        log.append([initial_frame(voters, created_ms=1)])
        storage.record_hard_state(replica_id, term=1, vote=0)
        await storage.sync()
    (log,) = (log for log in storage.logs.values() if log.name == name)
    partition = Partition(topic="t", number=number, driver=driver, log=log)
    index = log.first_index
    while index <= log.last_index:
        frames = await log.read(index, log.last_index, max_bytes=1 << 30)
        replay(frames, partition)
        index += len(frames)
    hard = storage.hard_states[replica_id]
    partition.replica = Replica(
        name=f"t/{number}",
        cluster=b"c" * 16,
        group=bytes([GROUP[0] + number]) * 16,
        replica_id=replica_id,
        incarnation=1,
        log=log,
        machine=partition,
        hard_state=HardState(hard.term, hard.vote),
        committed_index=log.start.index,
        configurations=[(0, voters), (1, voters)],
        settings=Settings(),
        rng=random.Random(1),
        now_ms=Clock().monotonic_ms(),
        wall_ms=Clock().wall_ms,
    )
    driver.add(partition.replica)
    driver.campaign(partition.replica)
    return partition


async def values(partition: Partition) -> list[bytes]:
    """All that is committed, in order."""
    found: list[bytes] = []
    while len(found) < partition.end_offset:
        for frame in await partition.reader.frames(len(found), max_bytes=1 << 20):
            found.extend(Batch(frame).values)
    return found
