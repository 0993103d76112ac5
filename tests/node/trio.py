"""A partition on three members in one process and loop: real cores, real storage code, real sockets.

Each member has a disk in memory that can lose power (tests.disks.fault_disk) and whose work can be held back,
and a transport on loopback whose outgoing frames can be dropped or delayed. `kill` is what `kill -9` does:
nothing is flushed, nobody is told, what the disk had not been asked for by then is never done.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from laminar.batch import Batch, Header, build
from laminar.log import DamagedRange, Storage, StorageSettings
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.peer_repair import METHOD, PeerRepair
from laminar.node.consensus.raft_frames import read_frame, read_keepalive
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, initial_frame
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.runtime.replica_factory import ReplicaFactory
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.receive_budget import RECEIVE_BUDGET_BYTES
from laminar.node.transport.transport import Address, Channel, Peer, TcpAddress, Transport
from raft.messages import AnyMessage, AppendAnswer
from raft.values import Settings
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, LOGS, InlineExecutor

NODES = ("a", "b", "c")
CLUSTER = b"c" * 16
GROUP = b"g" * 16
VOTERS = ConfigurationRecord(voters=((1, "a"), (2, "b"), (3, "c")))
SETTINGS = Settings(election_timeout_ms=120, heartbeat_ms=25)
# For tests in which nobody may stand for election: a loop is excused for being late once in such a time, and
# that of a busy machine is late more often.
CALM = Settings(election_timeout_ms=1_000, heartbeat_ms=25)
# Longer than any member waits for its leader then.
CALM_S = 2.2
SMALL = StorageSettings(
    first_journal_file_bytes=256 << 10,
    journal_file_bytes=1 << 20,
    checkpoint_bytes=1 << 20,
    segment_size_bytes=64 << 10,
    recent_bytes=128 << 10,
)
PATIENCE_S = 60.0


class HeldWorker:
    """A disk's thread as turns of the loop, which a test can hold back, and which dies with its member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._life = member.life
        self._loop = asyncio.get_running_loop()
        self._tasks: deque[Callable[[], None]] = deque()
        self._due_s = 0.0

    def submit(self, task: Callable[[], None]) -> None:
        if self._member.held is not None:
            self._member.held.append((self, task))
            return
        self._tasks.append(task)
        trio = self._member.trio
        self._due_s = max(self._due_s, self._loop.time() + trio.rng.random() * trio.disk_takes_s)
        self._loop.call_at(self._due_s, self._next)

    def _next(self) -> None:
        self.run(self._tasks.popleft())

    def run(self, task: Callable[[], None]) -> None:
        if self._member.life == self._life:
            task()

    def close(self) -> None:
        return None


class Stepped(Clock):
    """A member's clocks: a test may move its wall clock, and stop the other one."""

    __slots__ = ("offset_ms", "stopped_at_ms")

    def __init__(self) -> None:
        self.offset_ms = 0
        self.stopped_at_ms: int | None = None

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() if self.stopped_at_ms is None else self.stopped_at_ms

    def stop(self) -> None:
        """Let no time pass for this member: it leads on until it hears of another."""
        self.stopped_at_ms = super().monotonic_ms()

    def wall_ms(self) -> int:
        return super().wall_ms() + self.offset_ms


class Member:
    """One node with its replica of the partition. `start` and `kill` may alternate."""

    def __init__(self, trio: Trio, node: str, replica_id: int) -> None:
        self.node = node
        self.replica_id = replica_id
        self.disk = FaultDisk()
        self.life = 0
        self.alive = False
        self.held: list[tuple[HeldWorker, Callable[[], None]]] | None = None
        self.clock = Stepped()
        self.failures: list[BaseException] = []
        # What stopped its replica, and nothing else.
        self.stopped: list[Exception] = []
        self.storage: Storage
        self.driver: Driver
        self.transport: Transport
        self.partition: Partition
        self.trio = trio
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("127.0.0.1", 0))
        self.address = TcpAddress("127.0.0.1", self._sock.getsockname()[1])

    def __repr__(self) -> str:
        return (
            f"<Member {self.node} {self.partition.replica.core!r}>" if self.alive else f"<{self.node} down>"
        )

    async def start(self) -> None:
        """Recover the disk and take part."""
        assert not self.alive, f"{self.node} is running"
        rng = random.Random(self.trio.rng.getrandbits(64))
        self.storage = Storage.open(
            self.disk,
            HOME,
            LOGS,
            settings=SMALL,
            rng=rng,
            workers=lambda name: HeldWorker(self),
            readers=InlineExecutor(),
        )
        self.transport = Transport(
            cluster_id=lambda: CLUSTER,
            node=self.node,
            role=1,
            nonce=rng.randbytes(16),
            secrets=Keyring(),
            rng=rng,
        )
        self._filter(self.transport)
        self.driver = Driver(
            storage=self.storage,
            transport=self.transport,
            clock=self.clock,
            address_of=lambda node, replica: self.trio.members[node].address,
            on_fatal=self.failures.append,
            on_stopped=lambda name, error: self.stopped.append(error),
            address_of_peer=lambda peer: self.trio.members[peer.node].address,
            election_timeout_ms=self.trio.settings.election_timeout_ms,
            heartbeat_ms=self.trio.settings.heartbeat_ms,
            receive_budget_bytes=self.trio.receive_budget_bytes,
        )
        self.transport.on_lost = self.driver.lost
        self._heal()
        if self._sock.fileno() < 0:
            self._sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(self.address)
        self.alive = True
        await self.transport.serve_tcp(self._sock)
        if not self.storage.logs:
            log = self.storage.create_log("t-0", self.replica_id)
            log.append([initial_frame(VOTERS, created_ms=1)])
            self.storage.record_hard_state(self.replica_id, term=1, vote=0)
            await self.storage.sync()
        await self._open()

    @property
    def entry(self) -> ReplicaEntry:
        """As its manifest has it."""
        return ReplicaEntry(
            log_id=self.replica_id,
            replica_id=self.replica_id,
            incarnation=1,
            group=GROUP,
            topic="t",
            partition=0,
            partition_hash=0,
            state="made",
            created_ms=1,
            voters=list(VOTERS.voters),
            settings={},
        )

    def _made(self, log: Log) -> Partition:
        return Partition(
            topic="t",
            number=0,
            driver=self.driver,
            log=log,
        )

    async def _open(self) -> None:
        log = self.storage.logs[self.replica_id]
        self.partition = self._made(log)
        entry = self.entry
        factory = ReplicaFactory(
            cluster_id=lambda: CLUSTER,
            storage=self.storage,
            settings=self.trio.settings,
            clock=self.clock,
            rng=self.trio.rng,
        )
        if self.trio.heals:
            self.repairs.keep(entry, log)
        while True:
            try:
                replica = await factory.open(entry, name=f"t/0@{self.node}", machine=self.partition)
                break
            except DamagedRange:
                await self.repairs.wait_for_progress(GROUP)
                self.partition = self._made(log)
        self.partition.replica = replica
        self.partition.committed(replica.core.committed_index)
        self.driver.add(replica)
        if self.trio.heals:
            self.repairs.attach_replica(replica)

    def _heal(self) -> None:
        """As `Process`, with one group."""
        self.work: set[asyncio.Task[None]] = set()

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = asyncio.get_running_loop().create_task(work)
            self.work.add(task)
            task.add_done_callback(self._work_ended)
            return task

        self.repairs = PeerRepair(
            cluster_id=lambda: CLUSTER,
            call=self.transport.call,
            nodes_of=lambda entry, replica: [node for node in NODES if node != self.node],
            address_of=lambda node, entry: self.trio.members[node].address,
            hand_over=lambda replica, node: None,
            spawn=spawn,
            rng=self.trio.rng,
        )

        async def on_call(peer: Peer, method: str, payload: bytes) -> bytes:
            assert method == METHOD, f"{method} is called"
            return await self.repairs.answer(peer, payload)

        if self.trio.heals:
            self.storage.on_damage = self.repairs.found
        self.transport.on_call = on_call

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        self.work.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.alive:
            self.failures.append(error)

    def _filter(self, transport: Transport) -> None:
        send = transport.send

        def filtered(
            address: Address, channel: Channel, parts: Sequence[Any], *, at_once: bool = False
        ) -> bool:
            receiver = next(m for m in self.trio.members.values() if m.address == address)
            frame = memoryview(b"".join(parts))
            messages = [] if read_keepalive(frame) else [message for message, _ in read_frame(frame)]
            self.trio.refused += sum(
                isinstance(message, AppendAnswer) and message.rejected for message in messages
            )
            delay_s = self.trio.wire(self, receiver, channel, messages)
            if delay_s is None:
                return True  # lost on the way
            if delay_s == 0:
                return send(address, channel, parts, at_once=at_once)
            life = self.life
            kept = [bytes(part) for part in parts]
            asyncio.get_running_loop().call_later(
                delay_s, lambda: self.life == life and send(address, channel, kept)
            )
            return True

        transport.send = filtered  # type: ignore[method-assign]

    @property
    def replica(self) -> Replica:
        return self.partition.replica

    def hold_disk(self) -> None:
        """From now on the disk does nothing."""
        self.held = []

    def release_disk(self) -> None:
        """The disk does what was asked of it meanwhile, in order."""
        held, self.held = self.held or [], None
        for worker, task in held:
            worker.run(task)

    async def _end(self) -> None:
        self.alive = False
        self.life += 1
        self.held = None
        # Nothing of this life acts on what may still come: neither syncs, nor timers, nor frames.
        self.driver.stop()
        self.storage._commits.close()
        for task in list(self.work):
            task.cancel()
        self.transport.on_frame = lambda peer, channel, payload: None
        self.transport.on_lost = lambda whom: None
        self._sock.close()
        await self.transport.close(timeout=0)

    async def kill(self) -> None:
        """kill -9: what was handed to the kernel stays."""
        await self._end()
        self.disk.kill()

    async def cut_power(self, *, keep: float = 0.5) -> None:
        """Of what was not synced, any part may be there."""
        await self._end()
        self.disk.crash(self.trio.rng, keep)

    async def stop(self) -> None:
        """An orderly end."""
        self.release_disk()
        for task in list(self.work):
            task.cancel()
        await self.driver.close()
        await self.transport.close()
        await self.storage.close()
        self._sock.close()
        self.alive = False
        self.life += 1

    def frames(self, *, committed: bool = True) -> list[bytes]:
        """The log's frames, byte for byte."""
        log = self.partition.log
        last = self.partition.committed_index if committed else log.last_index
        frames: list[bytes] = []
        while log.first_index + len(frames) <= last:
            found = log.read_nowait(log.first_index + len(frames), last, max_bytes=1 << 20)
            assert found, f"{self}: entry {log.first_index + len(frames)} cannot be read"
            frames += [bytes(frame) for frame in found]
        return frames

    def forget_recent(self) -> None:
        """Let everything be read from its files."""
        recorder = self.storage._changes
        recorder.written = recorder.recorded
        recorder.evict_written()

    def values(self) -> list[bytes]:
        """All committed values in order."""
        found: list[bytes] = []
        for frame in self.frames():
            if Header.unpack(frame).count:
                assert len(found) == Header.unpack(frame).base_offset, "offsets are dense"
                found.extend(bytes(value) for value in Batch(frame).values)
        return found


Wire = Callable[[Member, Member, Channel, list[AnyMessage]], float | None]


def everything(sender: Member, receiver: Member, channel: Channel, messages: list[AnyMessage]) -> float:
    """A wire that delivers all, at once."""
    return 0


class Trio:
    """Three members. `wire` says of each frame how many seconds late it arrives; None: never."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.wire: Wire = everything
        # Appends that a follower could not join to its log.
        self.refused = 0
        # Whether damage is fetched from the others.
        self.heals = True
        self.receive_budget_bytes = RECEIVE_BUDGET_BYTES
        self.settings = SETTINGS
        # A write or sync takes up to so long; none overtakes another.
        self.disk_takes_s = 0.0
        self.members = {node: Member(self, node, number + 1) for number, node in enumerate(NODES)}

    def cut_off(self, *nodes: str) -> None:
        """Nothing passes between these and the others."""
        self.wire = lambda sender, receiver, channel, messages: (
            0 if (sender.node in nodes) == (receiver.node in nodes) else None
        )

    def heal(self) -> None:
        """Everything passes."""
        self.wire = everything

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.alive]

    async def until(self, condition: Callable[[], bool], *, what: str = "") -> None:
        """Wait for a condition; an AssertionError with everybody's standing when it takes too long."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    for member in self.alive:
                        assert not member.failures, member.failures
                        assert not member.stopped, member.stopped
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never came: {what}; {list(self.members.values())}") from None

    async def leader(self, *, among: Sequence[str] = NODES) -> Member:
        """The leader, once one of these has committed in its term."""

        def found() -> Member | None:
            leaders = [m for m in self.alive if m.node in among and m.partition.leads]
            best = max(leaders, key=lambda m: m.replica.core.term, default=None)
            if best is None:
                return None
            committed_term = best.partition.log.term(best.partition.committed_index)
            return best if committed_term == best.replica.core.term else None

        await self.until(lambda: found() is not None, what=f"a leader among {among}")
        member = found()
        assert member is not None
        return member

    def followers(self, leader: Member) -> list[Member]:
        return [member for member in self.alive if member is not leader]

    async def settled(self) -> None:
        """Wait until everybody alive has committed all that the leader holds."""
        leader = await self.leader()
        last = leader.partition.log.last_index
        await self.until(
            lambda: all(m.partition.committed_index >= last for m in self.alive), what=f"{last} committed"
        )

    def check_equal(self) -> None:
        """Committed logs are prefixes of one another, byte for byte; equal logs make equal state."""
        longest = max((member.frames() for member in self.alive), key=len)
        for member in self.alive:
            frames = member.frames()
            assert longest[: len(frames)] == frames, f"{member} committed something else"
        ends = {member.partition.log.last_index for member in self.alive}
        if len(ends) == 1:
            first = self.alive[0].partition
            for member in self.alive:
                partition = member.partition
                assert first.producers.stored() == partition.producers.stored(), f"{member}"
                assert first.cursors.names() == partition.cursors.names(), f"{member}"
                mine, others = first.state.state(), partition.state.state()
                assert (mine.stages, mine.sinks) == (others.stages, others.sinks), f"{member}"
                assert mine.keys == others.keys, f"{member}: keys differ"
                assert mine.succession == others.succession, f"{member}: seals differ"


@asynccontextmanager
async def trio(
    *,
    seed: int = 1,
    heals: bool = True,
    receive_budget_bytes: int = RECEIVE_BUDGET_BYTES,
    settings: Settings = SETTINGS,
) -> AsyncIterator[Trio]:
    """Three members, running; all that still run end in order. `heals`: damage is fetched from the others."""
    cluster = Trio(seed)
    cluster.settings = settings
    cluster.heals = heals
    cluster.receive_budget_bytes = receive_budget_bytes
    try:
        for member in cluster.members.values():
            await member.start()
        if settings is not SETTINGS:  # nobody waits for an election that comes by time
            first = cluster.members[NODES[0]]
            first.driver.campaign(first.replica)
        yield cluster
    finally:
        cluster.heal()
        for member in cluster.members.values():
            if member.alive:
                await member.stop()
            else:
                member._sock.close()


def batch(sequence: int, *values: bytes, producer: bytes = b"p" * 16, epoch: int = 0) -> bytearray:
    """An idempotent producer's batch."""
    return build(list(values), producer_id=producer, producer_epoch=epoch, sequence=sequence)


def send(member: Member, frame: bytearray) -> asyncio.Future[Receipt]:
    """Append a batch at a member, from a copy, as it comes from a client."""
    mine = bytearray(frame)
    return member.partition.appends.append_frame(mine, Header.unpack(mine))
