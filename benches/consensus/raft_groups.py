"""One process of three, with the replicas of many groups and nothing else: what consensus alone costs.

It is the product's process (storage, transport, driver, opening of replicas) without catalog, partitions and
HTTP: a group's machine counts commits and keeps the load going. Logs and groups are made by each of the three
from the same numbers, in one sync. A parent tells it what to do, one command at a time, through a pipe.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benches.common.floors import percentile
from laminar.batch import Buffer, Header, build
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, initial_frame
from laminar.node.host.settings import Settings
from laminar.node.runtime.boot import Addresses, Boot, StatusBoard
from laminar.node.runtime.cluster_view import ViewMessage
from laminar.node.runtime.process import Process, open_store
from laminar.node.transport.transport import Address, TcpAddress
from membership.boot_history import BootRecord
from membership.records import (
    CatalogState,
    NodeRecord,
)
from raft.values import NotLeader

NODES = ("a", "b", "c")
VALUE_BYTES = 1024
VALUE = os.urandom(VALUE_BYTES)
CLUSTER = b"c" * 16
# Shard 0's place among the ports and names of a node.
_ROLE = 1
_AT_ONCE = 200
# Hundredths of a second that a portion's elections may take before the next ones begin.
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a process did in the seconds of a load: proposals committed, and the time each took."""

    seconds: float
    latencies_ms: tuple[float, ...]


def together(loads: Sequence[Loaded]) -> tuple[float, float, float]:
    """Proposals/s, p50 and p99 in milliseconds of what several processes did at the same time."""
    latencies = [latency for load in loads for latency in load.latencies_ms]
    rate = sum(len(load.latencies_ms) / load.seconds for load in loads)
    return rate, percentile(latencies, 0.5), percentile(latencies, 0.99)


class Counting:
    """A group's machine: knows what it proposed when, and hands each commit to the load."""

    def __init__(self, owner: GroupProcess, number: int) -> None:
        self.owner = owner
        self.number = number
        self.replica: Replica
        self.proposed: deque[tuple[int, float]] = deque()
        self.serves = False

    @property
    def is_whole(self) -> bool:
        return True

    def appended(self, header: Header, frame: Buffer) -> None:
        return None

    def truncated(self, index: int) -> None:
        self._give_up()

    def _give_up(self) -> None:
        self.proposed.clear()
        self.owner.pump_soon()

    def committed(self, index: int) -> None:
        done = 0
        while self.proposed and self.proposed[0][0] <= index:
            _, began = self.proposed.popleft()
            self.owner.finished(began)
            done += 1
        if done:
            self.owner.due.append((self, done))
            self.owner.pump_soon()
        if self.replica.leading and not self.serves:
            self.owner.serving(self, self.replica.log.term(index) == self.replica.core.term)

    def led(self, leading: bool) -> None:
        if not leading:
            self._give_up()
            self.owner.serving(self, False)

    def failed(self, error: Exception) -> None:
        self._give_up()


class GroupProcess(Process):
    """Replicas of groups 0 to n - 1, each with one voter per node; group k is first led by node k mod 3."""

    def __init__(self, boot: Boot, *, storage: Storage, ports: Sequence[int]) -> None:
        super().__init__(boot, storage=storage)
        self.place = NODES.index(boot.node)
        self.addresses = {
            node: TcpAddress("127.0.0.1", port) for node, port in zip(NODES, ports, strict=True)
        }
        records = {
            node: NodeRecord(node, node.encode(), "127.0.0.1", 0, [0], [0, port], 0, 1)
            for node, port in zip(NODES, ports, strict=True)
        }
        self.view.message = ViewMessage(
            CLUSTER, CatalogState(CLUSTER, 1, records), dict.fromkeys(NODES, "alive")
        )
        self.machines: list[Counting] = []
        self.due: list[tuple[Counting, int]] = []
        self.serving_count = 0
        self.serving_since_s = time.monotonic()
        self._latencies_ms: list[float] = []
        self._pumping = False
        self._loading = False
        # Set when no proposal is on its way any more.
        self._rest = asyncio.Event()

    def knows(self, node: str) -> bool:
        return node in self.addresses

    def known_boot(self, node: str) -> BootRecord | None:
        """See Process: there is no catalog to have heard of any."""
        return None

    def known_store(self, node: str) -> bytes | None:
        """See Process: there is no catalog to have heard of any."""
        return None

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """See Process."""
        return self.addresses.get(node)

    def holder_address(self, node: str, entry: ReplicaEntry) -> Address | None:
        """See Process."""
        return self.addresses.get(node)

    # -- groups --------------------------------------------------------------------------

    async def open(self, count: int) -> float:
        """Make and drive this node's replica of so many groups; the seconds it took."""
        began = time.perf_counter()
        made = []
        for number in range(count):
            made.append(self._make(len(self.machines) + number))
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # else the others get no handshake in time
        await self.storage.sync()
        for entry in made:
            if entry.partition % _AT_ONCE == 0:
                await asyncio.sleep(0)
            machine = Counting(self, entry.partition)
            self.machines.append(machine)
            machine.replica = await self.replica_factory.open(
                entry, name=f"g/{entry.partition}", machine=machine
            )
            self.driver.add(machine.replica)
        gc.collect()
        gc.freeze()
        return time.perf_counter() - began

    def _make(self, number: int) -> ReplicaEntry:
        members = [(3 * number + place + 1, node) for place, node in enumerate(NODES)]
        replica_id = members[self.place][0]
        log: Log = self.storage.create_log(f"g-{number}")
        log.append([initial_frame(ConfigurationRecord(voters=tuple(members)), created_ms=1)])
        self.storage.record_hard_state(replica_id, term=1, vote=0)
        return ReplicaEntry(
            log_id=log.log_id,
            replica_id=replica_id,
            incarnation=1,
            group=number.to_bytes(16, "big"),
            topic="g",
            partition=number,
            partition_hash=0,
            state="made",
            created_ms=1,
            voters=members,
        )

    async def lead(self) -> None:
        """Stand for election in this node's share, so many at a time that the others can follow."""
        mine = [machine for machine in self.machines if machine.number % len(NODES) == self.place]
        for first in range(0, len(mine), _AT_ONCE):
            portion = mine[first : first + _AT_ONCE]
            for machine in portion:
                if not machine.replica.core.leader_id:
                    self.driver.campaign(machine.replica)
            for _ in range(_TRIES):
                if all(machine.replica.core.leader_id for machine in portion):
                    break
                await asyncio.sleep(0.01)

    def serving(self, machine: Counting, serves: bool) -> None:
        """A group's leader here has committed an entry of its term, or leads no more."""
        if serves != machine.serves:
            machine.serves = serves
            self.serving_count += 1 if serves else -1
            self.serving_since_s = time.monotonic()

    async def serves(self) -> tuple[int, float]:
        """How many groups are led from here and serve, and since when (of the monotonic clock, seconds)."""
        return self.serving_count, self.serving_since_s

    async def cpu(self) -> float:
        """Seconds of CPU that all threads of this process have used."""
        return time.process_time()

    # -- load ----------------------------------------------------------------------------

    async def load(self, groups: int, in_flight: int, seconds: float) -> Loaded:
        """Keep `in_flight` proposals without a commit in all of the first `groups` together."""
        led = [machine for machine in self.machines[:groups] if machine.replica.leading]
        self._loading = True
        each, rest = divmod(in_flight, groups)
        for machine in led:
            self.due.append((machine, each + (machine.number < rest)))
        self.pump_soon()
        await asyncio.sleep(seconds / 4)  # to warm up
        self._latencies_ms = []
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        for _ in range(500 if led else 0):  # a slow disk and a short load: at least one
            if self._latencies_ms:
                break
            await asyncio.sleep(0.01)
        self._loading = False
        found = Loaded(time.perf_counter() - began, tuple(self._latencies_ms))
        self._rest.clear()
        if any(machine.proposed for machine in led):
            await self._rest.wait()
        return found

    def finished(self, began: float) -> None:
        """A proposal is committed."""
        self._latencies_ms.append((time.perf_counter() - began) * 1000)

    def pump_soon(self) -> None:
        """Propose what is due, at the loop's next turn: as those do who wait for an answer."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        due, self.due = self.due, []
        if not self._loading:
            if not any(machine.proposed for machine in self.machines):
                self._rest.set()
            return
        for machine, count in due:
            for _ in range(count):
                began = time.perf_counter()
                try:
                    index, _, _ = self.driver.propose(machine.replica, build([VALUE]))
                except NotLeader:
                    break
                machine.proposed.append((index, began))

    # -- life ----------------------------------------------------------------------------

    async def obey(self, orders: Connection) -> None:
        """Carry out the parent's commands until it says `end` or is gone."""
        came = asyncio.Event()
        asyncio.get_running_loop().add_reader(orders.fileno(), came.set)
        commands: dict[str, Callable[..., Any]] = {
            "open": self.open,
            "lead": self.lead,
            "serves": self.serves,
            "cpu": self.cpu,
            "load": self.load,
        }
        while not self.stopping.is_set():
            await came.wait()
            came.clear()
            while orders.poll():
                try:
                    name, arguments = orders.recv()
                except EOFError:
                    return
                if name == "end":
                    return
                orders.send(await commands[name](*arguments))


def run_node(node: str, folder: Path, sockets: Sequence[socket.socket], orders: Connection) -> None:
    """The body of a process of the trio; it takes one of the listening `sockets`, by place."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ports = [sock.getsockname()[1] for sock in sockets]
    peer = sockets[NODES.index(node)]
    boot = Boot(
        settings=Settings(data=str(folder), node=node, shards=1),
        data_directory=str(folder),
        cluster_id=CLUSTER,
        store_id=f"{node}-{peer.getsockname()[1]:05}".encode().ljust(16, b"-"),
        node=node,
        role=_ROLE - 1,
        shards=1,
        nonce=os.urandom(16),
        http_shared=None,
        http_own=None,
        peer=peer,
        gossip=None,
        addresses=Addresses(
            host="127.0.0.1",
            gossip_host="127.0.0.1",
            http_port=0,
            shard_http_ports=(0,),
            peer_ports=(),
            gossip_port=0,
        ),
        board=StatusBoard(1),
        lifeline=-1,
        report_fd=-1,
    )
    storage = open_store(boot, str(folder / "home"))

    async def main() -> None:
        process = GroupProcess(boot, storage=storage, ports=ports)
        await process.listen()
        orders.send("listens")
        try:
            await process.obey(orders)
            if process.failure is not None:
                raise process.failure
        finally:
            await process.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
