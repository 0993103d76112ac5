"""One build's side of `bench_compiled`: three members of a cluster in one process, told what to do.

The members are the product's storage, transport, driver and partitions: twelve groups with three voters each,
over real files and loopback, without HTTP. Whether the modules are compiled is decided by the folder that
Python imports them from. Each line of standard input is a number of appends in flight and a number of
seconds; each line of standard output is the answer, as JSON. With `http` before the folder the members are
three nodes with one shard each, which get POSTs of one record; with `sim` a line is the seed of a world.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import socket
import sys
import time
import urllib.request
from pathlib import Path

import uvloop

from benches.common import leaders, loads
from laminar.aio import connect
from laminar.http.api.records import Records
from laminar.log import Storage, StorageSettings
from laminar.log.disk.disk import RealDisk
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import initial_frame
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.runtime.replica_factory import ReplicaFactory
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import TcpAddress, Transport
from laminar.testing.cluster import LocalCluster
from raft.values import Settings

NODES = ("a", "b", "c")
PARTITIONS = 12
VALUE = random.Random(1).randbytes(1024)
_CLUSTER = b"c" * 16


class Member:
    """A node with its replica of each partition; those of partition k have the ids 3k + 1 to 3k + 3."""

    def __init__(self, number: int, folder: Path, addresses: list[TcpAddress]) -> None:
        self.node = NODES[number]
        home = folder / self.node
        home.mkdir(parents=True)
        self._number = number
        self._rng = random.Random(number)
        self.storage = Storage.open(
            RealDisk(), str(home / "store"), str(home / "logs"), settings=StorageSettings()
        )
        self.transport = Transport(
            cluster_id=lambda: _CLUSTER,
            node=self.node,
            role=1,
            nonce=self._rng.randbytes(16),
            secrets=Keyring(),
            rng=self._rng,
        )
        self.driver = Driver(
            storage=self.storage,
            transport=self.transport,
            clock=Clock(),
            address_of=lambda node, replica: addresses[NODES.index(node)],
            on_fatal=_fail,
            address_of_peer=lambda peer: addresses[NODES.index(peer.node)],
        )
        self.transport.on_lost = self.driver.lost
        self.partitions: list[Partition] = []

    async def open(self, sock: socket.socket) -> None:
        await self.transport.serve_tcp(sock)
        factory = ReplicaFactory(
            cluster_id=lambda: _CLUSTER,
            storage=self.storage,
            settings=Settings(),
            clock=Clock(),
            rng=self._rng,
        )
        for number in range(PARTITIONS):
            voters = [(3 * number + place + 1, node) for place, node in enumerate(NODES)]
            replica_id = voters[self._number][0]
            log = self.storage.create_log(f"t-{number}", replica_id)
            log.append([initial_frame(ConfigurationRecord(voters=tuple(voters)), created_ms=1)])
            self.storage.record_hard_state(replica_id, term=1, vote=0)
            await self.storage.sync()
            entry = ReplicaEntry(
                log_id=log.log_id,
                replica_id=replica_id,
                incarnation=1,
                group=number.to_bytes(16, "big"),
                topic="t",
                partition=number,
                partition_hash=0,
                state="made",
                created_ms=1,
                voters=voters,
                settings={},
            )
            partition = Partition(topic="t", number=number, driver=self.driver, log=log)
            partition.replica = await factory.open(entry, name=f"t/{number}", machine=partition)
            partition.committed(partition.replica.core.committed_index)
            self.driver.add(partition.replica)
            self.partitions.append(partition)

    async def close(self) -> None:
        await self.driver.close()
        await self.transport.close()
        await self.storage.close()


def _fail(error: BaseException) -> None:
    raise error


async def _load(leaders: list[Partition], in_flight: int, seconds: float) -> dict[str, float]:
    """Keep so many appends under way, the same number in each partition; what a record and an entry cost."""
    records = 0
    until_s = 0.0

    async def append(partition: Partition) -> None:
        nonlocal records
        while time.perf_counter() < until_s:
            await partition.appends.append_records(Records([VALUE]))
            records += 1

    def entries() -> int:
        return sum(partition.log.last_index for partition in leaders)

    for portion_s in (seconds / 4, seconds):  # the first warms up
        records, before = 0, entries()
        until_s = time.perf_counter() + portion_s
        began_s, cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(in_flight):
                tasks.create_task(append(leaders[number % len(leaders)]))
        cpu_s = time.process_time() - cpu_s
        took_s = time.perf_counter() - began_s
    return {
        "cpu_us": cpu_s / records * 1e6,
        "records_per_s": records / took_s,
        "records_an_entry": records / (entries() - before),
    }


async def _serve(folder: Path) -> None:
    sockets = []
    for _ in NODES:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.bind(("127.0.0.1", 0))
        sockets.append(sock)
    addresses = [TcpAddress("127.0.0.1", sock.getsockname()[1]) for sock in sockets]
    members = [Member(number, folder, addresses) for number in range(len(NODES))]
    for member, sock in zip(members, sockets, strict=True):
        await member.open(sock)
    for number in range(PARTITIONS):
        member = members[number % len(NODES)]
        member.driver.campaign(member.partitions[number].replica)
    leaders: list[Partition] = []
    async with asyncio.timeout(30):
        while len(leaders) < PARTITIONS:
            await asyncio.sleep(0.01)
            leaders = [each for member in members for each in member.partitions if each.leads]
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    _say({"partitions": len(leaders)})
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        leaders = [each for member in members for each in member.partitions if each.leads]
        _say(await _load(leaders, int(line[0]), float(line[1])))
    for member in members:
        await member.close()


def _modules_of(url: str) -> str:
    """Return which modules a node runs, as its metrics tell it."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        build = re.search(r'laminar_build_info\{.*modules="([^"]*)"', answer.read().decode())
    assert build is not None, url
    return build[1]


async def _post(folder: Path) -> None:
    with LocalCluster(folder, nodes=len(NODES), shards=1) as cluster:
        async with connect(cluster.urls) as client:
            topic = await client.create_topic("load", partitions=PARTITIONS, replicas=len(NODES))
            await leaders.settled(client, topic)
            targets = await leaders.posts_to(topic)
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        _say({"modules": _modules_of(cluster.urls[0])})
        loop = asyncio.get_running_loop()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
            done = await loads.posted(
                targets, pids, connections=int(line[0]), seconds=float(line[1]), rounds=1
            )
            _say({"cpu_us": done.cpu_us, "records_per_s": done.per_s})


def _simulate(seed: int) -> dict[str, float | str]:
    """Run the world of a seed: what of it a second of CPU shows, and the digest of its trace."""
    import hashlib

    from tests.sim import simulation

    trace: list[str] = []
    outcome = simulation.simulate(simulation.options_of(seed), trace=trace)
    return {
        "events_per_cpu_s": len(trace) / outcome.cpu_s,
        "events": len(trace),
        "digest": hashlib.sha256("".join(trace).encode()).hexdigest(),
    }


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve the lines of standard input: worlds with `sim`, nodes with `http`, else members here."""
    if sys.argv[1] == "sim":
        for line in sys.stdin:
            _say(_simulate(int(line)))
            gc.collect()
        return
    if sys.argv[1] == "http":
        asyncio.run(_post(Path(sys.argv[2])))
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
