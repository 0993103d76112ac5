"""A small world of cores in memory: disks that lose what was not synced, a network under control.

`Replica` is a driver in miniature. It obeys the contract of `Ready` to the letter, so a core that asks for
the wrong order shows it here; the disk syncs only when the test (or `settle`) says so.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from raft import (
    AnyMessage,
    Append,
    Configuration,
    Core,
    Entry,
    HardState,
    Place,
    Ready,
    Role,
    Settings,
    Written,
)

CLUSTER = b"c" * 16
GROUP = b"g" * 16
SETTINGS = Settings()

Packet = tuple[AnyMessage, tuple[Entry, ...]]
Head = tuple[bytes, bytes, int, int, int, int]


def noop(place: Place) -> Entry:
    """What opens a term."""
    return Entry(place.index, place.term, b"noop %d" % place.term, 128)


class MemoryLog:
    """The driver's log: the entries behind (`start_index`, `start_term`)."""

    def __init__(self, entries: Sequence[Entry] = (), *, start_index: int = 0, start_term: int = 0) -> None:
        self.entries = list(entries)
        self.start_index = start_index
        self.start_term = start_term

    @property
    def first_index(self) -> int:
        return self.start_index + 1

    @property
    def last_index(self) -> int:
        return self.start_index + len(self.entries)

    @property
    def last_term(self) -> int:
        return self.entries[-1].term if self.entries else self.start_term

    def term(self, index: int) -> int | None:
        if index == self.start_index:
            return self.start_term
        if self.start_index < index <= self.last_index:
            return self.entries[index - self.start_index - 1].term
        return None

    def size(self, index: int) -> int:
        return self.entries[index - self.start_index - 1].size

    def slice(self, first: int, last: int) -> tuple[Entry, ...]:
        """Entries `first` to `last`, as a driver reads them for an append."""
        return tuple(self.entries[first - self.start_index - 1 : last - self.start_index])

    def truncate(self, index: int) -> None:
        del self.entries[index - self.start_index - 1 :]

    def trim(self, index: int) -> None:
        """Forget everything up to `index`, as retention does."""
        term = self.term(index)
        assert term is not None
        del self.entries[: index - self.start_index]
        self.start_index, self.start_term = index, term


class Replica:
    """A core with its disk. What `sync` has not covered is lost by `crash`."""

    def __init__(
        self,
        replica_id: int,
        configuration: Configuration,
        *,
        post: Callable[[AnyMessage, tuple[Entry, ...]], None],
        entries: Sequence[Entry] = (),
        hard_state: HardState | None = None,
        seed: int = 0,
        now_ms: int = 0,
        settings: Settings = SETTINGS,
        group: bytes = GROUP,
    ) -> None:
        self.replica_id = replica_id
        self.initial = configuration
        self.settings = settings
        self.group = group
        self.incarnation = 0
        # The mark as recorded: it falls when a Ready says so (docs/consensus.md#recovering).
        self.recovering = False
        self.rng = random.Random(f"{seed} {replica_id}")
        self.post = post
        self.log = MemoryLog(entries)
        self.hard_state = hard_state or HardState(term=self.log.last_term)
        self.durable_log = MemoryLog(entries)
        self.durable_hard_state = self.hard_state
        self.alive = True
        # The Readies not yet synced: (what to tell the core, what may be sent then).
        self.unsynced: list[tuple[Ready, Written | None]] = []
        self.reads: dict[int, int] = {}
        self.reads_failed: list[int] = []
        self.readies: list[Ready] = []
        self.on_ready: Callable[[Ready], None] = lambda ready: None
        self.events: list[tuple[str, dict[str, object]]] = []
        self.start(now_ms=now_ms)

    def start(self, *, now_ms: int) -> None:
        """Come up with what the disk holds."""
        self.alive = True
        self.log = MemoryLog(
            self.durable_log.entries,
            start_index=self.durable_log.start_index,
            start_term=self.durable_log.start_term,
        )
        self.hard_state = self.durable_hard_state
        self.unsynced = []
        self.flushed: list[tuple[Ready, Written | None]] = []
        self.core = Core(
            cluster=CLUSTER,
            group=self.group,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            recovering=self.recovering,
            configuration=self.initial,
            configurations=[
                (e.index, e.configuration) for e in self.log.entries if e.configuration is not None
            ],
            hard_state=self.hard_state,
            log=self.log,
            committed_index=self.log.start_index,
            rng=self.rng,
            now_ms=now_ms,
            settings=self.settings,
            make_noop=noop,
            trace=lambda event, details: self.events.append((event, dict(details))),
        )

    def crash(self) -> None:
        """Lose everything that was not synced."""
        self.alive = False

    def forget(self, count: int, *, now_ms: int) -> None:
        """Lose power with flush=interval: the last `count` entries are gone, term and vote are not. It comes
        back recovering, as a new incarnation.
        """
        self.crash()
        kept = len(self.durable_log.entries) - count
        del self.durable_log.entries[kept:]
        self.recovering = True
        self.incarnation += 1
        self.start(now_ms=now_ms)

    def perform(self) -> Ready:
        """Take the Ready and do what it says; the sync waits."""
        ready = self.core.take_ready()
        self.readies.append(ready)
        if ready.truncate_from is not None:
            self.log.truncate(ready.truncate_from)
        self.log.entries.extend(ready.entries)
        if ready.hard_state is not None:
            self.hard_state = ready.hard_state
        if ready.recovered:
            self.recovering = False
        for message in ready.messages:
            self.post(message, ())
        for send in ready.appends:
            self.post(send.message, self.log.slice(send.first_index, send.last_index))
        written = None
        if ready.entries:
            written = ready.written
            assert (written.index, written.term) == (ready.entries[-1].index, ready.entries[-1].term)
        if written or ready.hard_state or ready.messages_after_sync or ready.truncate_from is not None:
            self.unsynced.append((ready, written))
        self.reads.update(ready.reads)
        self.reads_failed.extend(ready.reads_failed)
        self.on_ready(ready)
        return ready

    def flush(self, count: int | None = None) -> None:
        """Make the first `count` unsynced Readies durable, or all of them; in order. The core is not told
        yet.
        """
        done, self.unsynced = self.unsynced[:count], self.unsynced[len(self.unsynced[:count]) :]
        for ready, _ in done:
            if ready.truncate_from is not None:
                self.durable_log.truncate(ready.truncate_from)
            self.durable_log.entries.extend(ready.entries)
            if ready.hard_state is not None:
                self.durable_hard_state = ready.hard_state
        self.flushed += done

    def complete(self) -> None:
        """What was flushed is known to be durable: send what waited for that, and tell the core."""
        done, self.flushed = self.flushed, []
        for ready, _ in done:
            for message in ready.messages_after_sync:
                self.post(message, ())
        for _, written in done:
            if written is not None:
                self.core.persisted(written)
                self.perform()

    def sync(self, count: int | None = None) -> None:
        """The disk has made the first `count` unsynced Readies durable, or all of them; in order."""
        self.flush(count)
        self.complete()

    def receive(self, packet: Packet, *, now_ms: int) -> Ready:
        message, entries = packet
        self.core.receive(message, entries, now_ms=now_ms)
        return self.perform()

    def propose(self, *data: bytes, now_ms: int) -> Ready:
        """Propose one entry per item."""
        place = self.core.place()
        entries = []
        for number, item in enumerate(data):
            entries.append(Entry(place.index + number, place.term, item, max(len(item), 1)))
        self.core.propose(entries, now_ms=now_ms)
        return self.perform()

    def configure(self, configuration: Configuration, *, now_ms: int) -> Ready:
        """Propose `configuration`."""
        place = self.core.place()
        entry = Entry(place.index, place.term, b"configuration", 128, configuration)
        self.core.propose_configuration(entry, now_ms=now_ms)
        return self.perform()

    @property
    def data(self) -> list[bytes]:
        """The payloads of the log, without no-ops and configurations."""
        return [e.data for e in self.log.entries if not e.data.startswith((b"noop", b"configuration"))]

    @property
    def terms(self) -> list[int]:
        return [entry.term for entry in self.log.entries]


class Network:
    """Replicas and the packets between them; nothing moves unless told to."""

    def __init__(
        self,
        size: int = 3,
        *,
        learners: int = 0,
        seed: int = 0,
        settings: Settings = SETTINGS,
        logs: Mapping[int, Sequence[Entry]] | None = None,
        hard_states: Mapping[int, HardState] | None = None,
    ) -> None:
        self.now_ms = 0
        self.settings = settings
        self.seed = seed
        self.configuration = Configuration(
            tuple(range(1, size + 1)), tuple(range(size + 1, size + learners + 1))
        )
        self.packets: deque[Packet] = deque()
        self.cut: set[tuple[int, int]] = set()
        self.drop: Callable[[AnyMessage], bool] = lambda message: False
        # Whether leaders with nothing to do let their group rest, and without whom.
        self.rests = False
        self.absent: set[int] = set()
        self.replicas: dict[int, Replica] = {}
        for replica_id in self.configuration.members():
            self.add(
                replica_id,
                entries=(logs or {}).get(replica_id, ()),
                hard_state=(hard_states or {}).get(replica_id),
            )

    def add(
        self, replica_id: int, *, entries: Sequence[Entry] = (), hard_state: HardState | None = None
    ) -> Replica:
        """A further replica with its own disk."""
        self.replicas[replica_id] = replica = Replica(
            replica_id,
            self.configuration,
            post=self.post,
            entries=entries,
            hard_state=hard_state,
            seed=self.seed,
            now_ms=self.now_ms,
            settings=self.settings,
        )
        return replica

    def __getitem__(self, replica_id: int) -> Replica:
        return self.replicas[replica_id]

    def post(self, message: AnyMessage, entries: tuple[Entry, ...]) -> None:
        self.packets.append((message, entries))

    def isolate(self, replica_id: int) -> None:
        """Cut this replica off from all others, both ways."""
        for other in self.replicas:
            self.cut |= {(other, replica_id), (replica_id, other)}

    def heal(self) -> None:
        self.cut = set()
        self.drop = lambda message: False

    def deliver_one(self) -> None:
        message, entries = self.packets.popleft()
        replica = self.replicas.get(message.receiver)
        if (message.sender, message.receiver) in self.cut or self.drop(message):
            return
        if replica is not None and replica.alive:
            replica.receive((message, entries), now_ms=self.now_ms)

    def settle(self, *, sync: bool = True) -> None:
        """Deliver everything and sync every disk, until nothing moves."""
        for _ in range(100_000):
            if self.packets:
                self.deliver_one()
                continue
            waiting = [r for r in self.replicas.values() if r.alive and (r.unsynced or r.flushed) and sync]
            if not waiting:
                return
            for replica in waiting:
                replica.sync()
        raise AssertionError("the cluster does not come to rest")

    def pass_time(self, duration_ms: int, *, settle: bool = True) -> None:
        """Let time pass from deadline to deadline, settling at each."""
        end_ms = self.now_ms + duration_ms
        while True:
            due = [(r.core.deadline_ms(), r.replica_id) for r in self.replicas.values() if r.alive]
            next_ms, replica_id = min(((d, i) for d, i in due if d is not None), default=(end_ms + 1, 0))
            if next_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, next_ms)
            replica = self.replicas[replica_id]
            if self.rests:
                replica.core.offer_quiesce(absent=self.absent)
            replica.core.expire(now_ms=self.now_ms)
            replica.perform()
            if settle:
                self.settle()
        self.now_ms = end_ms

    def elect(self, replica_id: int = 1) -> Replica:
        """Make this replica the leader, by time if need be."""
        replica = self.replicas[replica_id]
        replica.core.campaign(now_ms=self.now_ms)
        replica.perform()
        self.settle()
        assert replica.core.role is Role.LEADER, f"{replica.core!r} did not win"
        return replica

    def release(self, *members: int) -> None:
        """All members have told where their logs end, and each hears which end is the latest."""
        ends = [(self[each].core.last_term, self[each].core.last_index) for each in members]
        last_term, last_index = max(ends)
        for each in members:
            replica = self[each]
            replica.core.release(
                incarnation=replica.incarnation,
                last_term=last_term,
                last_index=last_index,
                now_ms=self.now_ms,
            )
            replica.perform()

    def leaders(self) -> list[int]:
        return [r.replica_id for r in self.replicas.values() if r.alive and r.core.role is Role.LEADER]

    def leader(self) -> Replica:
        """The leader of the latest term."""
        leaders = [r for r in self.replicas.values() if r.alive and r.core.role is Role.LEADER]
        assert leaders, "nobody leads"
        return max(leaders, key=lambda replica: replica.core.term)

    def restart(self, replica_id: int) -> Replica:
        """Crash and come back with what was synced."""
        replica = self.replicas[replica_id]
        replica.crash()
        replica.start(now_ms=self.now_ms)
        return replica


def head(sender: int, receiver: int, term: int, incarnation: int = 0) -> Head:
    """What every message begins with."""
    return CLUSTER, GROUP, sender, receiver, incarnation, term


def entries_of(*terms: int, data: str = "x") -> list[Entry]:
    """A log with one entry per term given."""
    return [Entry(i, term, f"{data}{i}.{term}".encode(), 10) for i, term in enumerate(terms, 1)]


def sent(ready: Ready, kind: type[AnyMessage]) -> list[AnyMessage]:
    """The messages of one kind in a Ready, whenever they may leave."""
    everything: list[AnyMessage] = [*ready.messages, *ready.messages_after_sync]
    if kind is Append:
        everything.extend(send.message for send in ready.appends)
    return [message for message in everything if isinstance(message, kind)]
