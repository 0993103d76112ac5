"""What must hold at every step, looked at from outside: no replica is asked, all are watched.

A `Watch` sees every replica of every process: what is appended, committed, led and voted, over all lives. The
first violation is an `AssertionError` that says who, where and what; the world stops there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crc32c import crc32c

from laminar.batch import HEADER_SIZE, Batch, Buffer, Header, Kind
from laminar.log.disk.errors import DamagedRange
from laminar.node.catalog.local_replica import CATALOG_NAME
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from laminar.node.consensus.replica import Replica
from laminar.node.consensus.replica import StateMachine as Follower
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.staging_entries import publish_record
from laminar.node.placement.wanted import wanted_number
from laminar.node.runtime.process import Process
from laminar.node.shard.shard import Shard
from raft.configuration import ConfigurationRefused, check_step
from raft.messages import AnyMessage, Vote, VoteAnswer
from tests.sim.machine import Machine
from tests.sim.placement_rules import PlacementRules
from tests.sim.route_rules import RouteRules
from tests.sim.sinks import Ledger
from tests.sim.uploads import UploadLedger
from tests.sim.world import World

# A replica that comes up is looked at so far back; at the end of a run, as a whole.
LOOK_BACK = 20


@dataclass(slots=True)
class Committed:
    """One entry as it was first committed anywhere."""

    term: int
    checksum: int
    kind: int
    base_offset: int
    values: list[bytes]
    # Of an idempotent producer's batch: its id and epoch, and the sequence.
    producer: tuple[bytes, int] | None = None
    sequence: int = 0


@dataclass(slots=True)
class Group:
    """Everything that was ever certain about one group."""

    name: str
    id: bytes
    # By replica id: the host, and which of its folders, that it lives in for ever.
    homes: dict[int, tuple[str, int]] = field(default_factory=dict)
    # The newest configuration that is committed, with its index.
    configuration: tuple[int, ConfigurationRecord] | None = None
    leaders: dict[int, int] = field(default_factory=dict)
    votes: dict[tuple[int, int], int] = field(default_factory=dict)
    frames: dict[tuple[int, int], int] = field(default_factory=dict)
    entries: list[Committed] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    sequences: dict[tuple[bytes, int], int] = field(default_factory=dict)
    # Index of the entry that sealed the partition; 0: it is open.
    seal: int = 0
    # Index of the seal that the catalog has recorded; 0: none.
    reported: int = 0
    # How often entries were given up.
    losses: int = 0
    # It was a partition that is reclaimed: what was committed stays so, for those who compare.
    reclaimed: bool = False

    def give_up(self, index: int) -> None:
        """What was committed behind entry `index` may or may not be found again."""
        self.losses += 1
        if index >= len(self.entries):
            return
        if self.configuration is not None and self.configuration[0] > index:
            self.configuration = None
        if self.seal > index:
            self.seal = 0
        del self.values[self.entries[index].base_offset :]
        del self.entries[index:]
        self.sequences = {entry.producer: entry.sequence for entry in self.entries if entry.producer}


@dataclass(frozen=True, slots=True)
class Held:
    """What a replica has on its disk for certain: where its log begins, up to which entry it holds what is
    committed, and the configuration that it knows there.
    """

    start: int
    index: int
    record: ConfigurationRecord


class Watcher:
    """Stands between a driver and a replica's machine."""

    def __init__(self, watch: Watch, group: Group, replica: Replica, machine: Machine) -> None:
        self._watch = watch
        self._group = group
        self._replica = replica
        self._inner: Follower = replica.machine
        self._machine = machine
        self._seen = replica.core.committed_index
        # Where the configurations of this life stand; the first is what it began with.
        self._configured = [replica.core._log.configurations.index]
        log = replica.log
        for index in range(max(log.first_index, log.last_index - LOOK_BACK), log.last_index + 1):
            self._entry(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _who(self) -> str:
        return f"{self._group.name}@{self._machine.node} (replica {self._replica.replica_id})"

    def _entry(self, index: int) -> None:
        try:
            frames = self._replica.log.read_nowait(index, index, max_bytes=1)
        except DamagedRange:
            return
        if frames:
            header = Header.unpack(frames[0])
            self._matches(header, frames[0])

    def _matches(self, header: Header, frame: Buffer) -> None:
        """Log matching: an (index, term) names the same bytes wherever it stands."""
        checksum = crc32c(bytes(frame))
        known = self._group.frames.setdefault((header.index, header.term), checksum)
        assert known == checksum, f"{self._who()}: entry {header.index} of term {header.term} has other bytes"

    # -- the machine -----------------------------------------------------------------------

    def appended(self, header: Header, frame: Buffer) -> None:
        self._matches(header, frame)
        entries = self._group.entries
        assert header.index > self._seen, f"{self._who()}: entry {header.index} again behind {self._seen}"
        if header.index <= len(entries) and self._replica.core.is_leader:
            # One that was deposed and does not know it yet may write what it likes.
            assert entries[header.index - 1].term >= header.term, (
                f"{self._who()}: a leader writes over entry {header.index}, which is committed"
            )
        if header.kind == Kind.CONFIGURATION and self._replica.core.is_leader:
            self._changes(header)
            after = configuration_record(memoryview(frame)[HEADER_SIZE:])
            if not after.abandoned:
                self._watch.placement.configuration_changed(
                    self._who(), after.configuration(), self._group.homes
                )
        if header.kind == Kind.CONFIGURATION:
            self._configured.append(header.index)
        if self._replica.core.is_leader:
            if header.kind == Kind.PUBLISH:
                published = publish_record(frame)
                if published.large is None and published.due is None:
                    self._watch.ledger.publishing(self._who(), frame)
            if header.kind in (Kind.SEAL, Kind.OPEN):
                assert isinstance(self._inner, Partition)
                stages = len(self._inner.state.stages)
                self._watch.routes.taken(self._who(), self._machine.node, self._group, header, frame, stages)
            self._watch.on_entry("taken", self._group.name, header)
        self._inner.appended(header, frame)

    def _changes(self, header: Header) -> None:
        """A leader changes who belongs to the group: one change at a time, and after an entry of its term."""
        core, log = self._replica.core, self._replica.log
        if core.configuration.abandoned and header.term < core.term:
            return  # a person's decision, in the term before the one that it is led in
        self._watch.changing(self._machine, self._group.name)
        before = self._configured[-1]
        assert before <= core.committed_index, (
            f"{self._who()}: configuration {header.index} while {before} is not committed"
        )
        assert log.term(core.committed_index) in (header.term, None), (
            f"{self._who()}: configuration {header.index} before anything of term {header.term} is committed"
        )

    def truncated(self, index: int) -> None:
        assert index > self._seen, f"{self._who()}: cut at {index}, committed up to {self._seen}"
        while len(self._configured) > 1 and self._configured[-1] >= index:
            self._configured.pop()
        self._inner.truncated(index)

    def committed(self, index: int) -> None:
        assert index >= self._seen, f"{self._who()}: the commit index falls from {self._seen} to {index}"
        self._watch.committed(self._group, self._replica, self._who(), self._seen + 1, index)
        self._seen = index
        self._inner.committed(index)

    def led(self, leading: bool) -> None:
        if leading:
            core, group = self._replica.core, self._group
            leader = group.leaders.setdefault(core.term, core.replica_id)
            assert leader == core.replica_id, f"{self._who()} and replica {leader} both lead term {core.term}"
            for index in range(max(1, len(group.entries) - 20), len(group.entries) + 1):
                held = self._replica.log.term(index)
                hidden = held is None and bool(self._replica.log.quarantine)
                if index >= self._replica.log.first_index and not hidden:
                    assert held == group.entries[index - 1].term, (
                        f"{self._who()} leads term {core.term} without committed entry {index}"
                    )
            self._watch.elections += 1
        self._inner.led(leading)

    def failed(self, error: Exception) -> None:
        self._inner.failed(error)


class Watch:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[bytes, Group] = {}
        self.elections = 0
        self.reconfigurations = 0
        self._processes: list[Process] = []
        # How often more was lost than the promise covers.
        self.losses = 0
        # By group and replica: what no loss of power takes, also while its node is down or opens it.
        self._held: dict[bytes, dict[int, Held]] = {}
        self.ledger = Ledger()
        self.uploads = UploadLedger()
        # Told of each entry that a leader takes, and of each that is committed: what, which group, its head.
        self.on_entry: Callable[[str, str, Header], None] = lambda what, group, header: None
        # Hear of each entry that is committed for the first time, before its values are counted.
        self.on_committed: list[Callable[[Group, Header, Buffer], None]] = []
        # Told of the machine whose leader begins a change of its group, and of the group's name.
        self.changing: Callable[[Machine, str], None] = lambda machine, group: None
        self.placement = PlacementRules(world)
        self.routes = RouteRules(world, self.groups)
        world.watch = self.process
        world.losing = self._losing
        world.ending = self._hold
        world.forgetting = self._forget

    def process(self, machine: Machine, process: Process) -> None:
        """See everything that this process's driver is given to drive."""
        self._processes.append(process)

        def watched_add(replica: Replica) -> None:
            group = self.groups.setdefault(replica.group, Group(replica.name, replica.group))
            last = replica.core.committed_index
            # Who comes back with another folder has another id: the old one's promises went with its folder.
            home = group.homes.setdefault(replica.replica_id, (machine.node, machine.folder))
            assert home == (machine.node, machine.folder), (
                f"{replica.name}: replica {replica.replica_id} of folder {home} lives in "
                f"{(machine.node, machine.folder)}"
            )
            self.committed(group, replica, f"{replica.name}@{machine.node}", last - LOOK_BACK, last)
            if replica.name == CATALOG_NAME:
                self._follow_catalog(replica.machine)
            watcher: Any = Watcher(self, group, replica, machine)
            replica.machine = watcher

        def watched_queue(replica: Replica, message: AnyMessage) -> None:
            assert message.sender == replica.replica_id, f"{replica.name}: not its own {message}"
            # What an older copy of a folder says is heard by nobody: that is watched where it would count.
            if isinstance(message, (Vote, VoteAnswer)) and not machine.is_old:
                self._voted(replica, message)

        process.driver.on_add = watched_add
        process.driver.on_control = watched_queue

    def _follow_catalog(self, group: Any) -> None:
        """See each change of the catalog that this node makes."""
        catalog = group.catalog
        apply = catalog.apply

        def watched_apply(index: int, command: bytes) -> Any:
            before = catalog.state()
            result = apply(index, command)
            self.placement.catalog_changed(before, catalog.state())
            self.routes.catalog_changed(catalog.state())
            return result

        catalog.apply = watched_apply

    def _voted(self, replica: Replica, message: Vote | VoteAnswer) -> None:
        """At most one vote in a term, over all lives."""
        if isinstance(message, VoteAnswer):
            if not message.granted:
                return
            choice = message.receiver
        else:
            choice = message.sender
        votes = self.groups[replica.group].votes
        given = votes.setdefault((message.sender, message.term), choice)
        assert given == choice, (
            f"{replica.name}: replica {message.sender} voted for {given} and {choice} in term {message.term}"
        )

    def committed(self, group: Group, replica: Replica, who: str, first: int, last: int) -> None:
        """Entries `first` to `last` are committed at this replica: the same as everywhere, offsets dense."""
        log = replica.log
        index = max(min(first, len(group.entries) + 1), log.first_index)
        while index <= last:
            try:
                # Not by the loop's reads: these keep a pace beside commits, and who looks on takes no time.
                frames = log.read_here(index, last, max_bytes=1 << 20)
            except DamagedRange as damage:
                # Nothing rots here that was not committed, and seen, before.
                assert damage.last_index <= len(group.entries), f"{who}: {damage}, but nobody committed it"
                index = damage.last_index + 1
                continue
            assert frames, f"{who}: committed entry {index} cannot be read"
            for frame in frames:
                header = Header.unpack(frame)
                assert header.index == index, f"{who}: entry {header.index} where {index} was asked for"
                self._one(group, who, header, frame)
                index += 1

    def _one(self, group: Group, who: str, header: Header, frame: Buffer) -> None:
        entries = group.entries
        checksum = crc32c(bytes(frame))
        if header.index <= len(entries):
            known = entries[header.index - 1]
            assert (known.term, known.checksum) == (header.term, checksum), (
                f"{who}: entry {header.index} of term {header.term} is committed, but so was one of term "
                f"{known.term}"
            )
            return
        assert header.index == len(entries) + 1, (
            f"{who}: entry {header.index} is committed after {len(entries)}"
        )
        values: list[bytes] = []
        producer = None
        assert not group.seal or header.kind not in (Kind.DATA, Kind.STAGED, Kind.PUBLISH), (
            f"{who}: entry {header.index} of kind {header.kind} is committed, and {group.seal} is a seal"
        )
        if group.name != CATALOG_NAME:
            self.routes.committed(who, group, header, frame)
            for told in self.on_committed:
                told(group, header, frame)
        if header.kind == Kind.SEAL:
            group.seal = group.seal or header.index
        if header.count:
            assert header.base_offset == len(group.values), (
                f"{who}: offset {header.base_offset} where {len(group.values)} comes next"
            )
            if header.kind == Kind.PUBLISH:
                record = publish_record(frame)
                if record.due is not None:
                    values = [bytes(value) for value in Batch(record.due.frame).values]
                elif record.large is None:
                    values = self.ledger.published(who, group.name, header, frame)
                else:
                    values = self.uploads.published(who, group.name, header, record, record.large)
            else:
                values = [bytes(value) for value in Batch(frame).values]
            group.values.extend(values)
            if header.kind == Kind.DATA and any(header.producer_id):
                key = (header.producer_id, header.producer_epoch)
                before = group.sequences.get(key, -1)
                assert header.sequence > before, (
                    f"{who}: producer {header.producer_id.hex()} sequence {header.sequence} after {before}"
                )
                group.sequences[key] = header.sequence
                producer = key
        if header.kind == Kind.STAGED:
            if header.floor:
                self.ledger.staged(group.name, header, frame)
            else:
                self.uploads.staged(group.name, header, frame)
        if header.kind == Kind.SINK:
            self.ledger.changed(who, frame)
        if header.kind == Kind.CONFIGURATION:
            self._reconfigured(
                group, who, header.index, configuration_record(memoryview(frame)[HEADER_SIZE:])
            )
        entries.append(
            Committed(
                header.term, checksum, header.kind, header.base_offset, values, producer, header.sequence
            )
        )
        self.world.note(f"committed {group.name} {header.index} {header.term} {checksum:08x}")
        self.on_entry("committed", group.name, header)

    def _reconfigured(self, group: Group, who: str, index: int, record: ConfigurationRecord) -> None:
        """Each configuration is one step from the last: of any two majorities, somebody is in both. But for a
        person's decision, which gives others up and is about one replica alone.
        """
        before = group.configuration[1].abandoned if group.configuration is not None else ()
        if group.configuration is not None and record.abandoned == before:
            try:
                check_step(group.configuration[1].configuration(), record.configuration())
            except ConfigurationRefused as error:
                raise AssertionError(f"{who}: configuration {index}: {error}") from error
            self.reconfigurations += 1
        elif record.abandoned != before:
            assert len(record.voters) == 1 and set(before) <= set(record.abandoned), f"{who}: {record}"
        group.configuration = (index, record)

    def _losing(self) -> None:
        """All machines lose power at once: of an `interval` topic that leaves what any voter had synced.

        Each of them must answer then, and the one that holds most leads (docs/consensus.md#recovering). A
        learner's copy keeps nothing: it begins again, empty.
        """
        self.losses += 1
        for machine in self.world.up:
            self._hold(machine)
        for key, group in self.groups.items():
            if group.name == CATALOG_NAME or group.reclaimed:
                continue
            held = self._held.get(key, {})
            group.give_up(_kept(held))
            end = len(group.entries)
            self._held[key] = {
                replica_id: replace(each, index=min(each.index, end)) for replica_id, each in held.items()
            }

    def _hold(self, machine: Machine) -> None:
        """Keep what the voters that are open on a machine have on its disk, and of others what was kept."""
        shards = machine.shard_processes
        if len(shards) == machine.shards:
            named = {entry.replica_id for shard in shards for entry in shard.storage.manifest.entries}
            self._forget(machine, but=named - {entry.replica_id for shard in shards for entry in shard.lost})
        for shard in shards:
            began = {entry.replica_id: dict(entry.voters) for entry in shard.storage.manifest.entries}
            for partition in shard.partitions.values():
                replica_id = partition.replica.replica_id
                key, index = partition.replica.group, partition.log.synced_index
                # An entry of its own that was never committed keeps nothing of what was.
                entries = self.groups[key].entries if key in self.groups else []
                start, index = partition.log.start.index, min(index, len(entries))
                while index > start and partition.log.term(index) not in (entries[index - 1].term, None):
                    index -= 1
                # With its end goes a configuration that stands there.
                left = [record for _, record in partition.state.configurations_up_to(index)]
                # What a later LOG_START entry repeats, the tables need not remember from before it.
                left = left or [partition.replica.configuration_record]
                voting = (began.get(replica_id, {}), *(dict(each.voters) for each in left))
                self._held.setdefault(key, {}).pop(replica_id, None)
                if any(replica_id in voters for voters in voting):
                    self._held[key][replica_id] = Held(min(start, index), index, left[-1])

    def _forget(self, machine: Machine, but: Collection[int] = ()) -> None:
        """What was kept of a machine's replicas is not there any more, or not for certain."""
        for key, held in self._held.items():
            homes = self.groups[key].homes
            for replica_id in [each for each in held if each not in but]:
                if homes[replica_id][0] == machine.node:
                    del held[replica_id]

    def exercised(self) -> Counter[str]:
        """How much of what happens now and then did happen."""
        shards = [process for process in self._processes if isinstance(process, Shard)]
        return (
            Counter(
                {
                    "groups unquiesced": sum(
                        each.driver.statistics()["unquiesced"] for each in self._processes
                    ),
                    "configurations": self.reconfigurations,
                    "starts moved": sum(shard.retention.moved for shard in shards),
                    "logs caught up": sum(shard.catch_up.installer.installed for shard in shards),
                    "replicas made": sum(shard.moves.made for shard in shards),
                    "replicas deleted": sum(shard.moves.deleted for shard in shards),
                }
            )
            + Counter({f"steps: {name}": count for name, count in self.placement.steps.items()})
            + self.routes.happened
            + self.ledger.happened
            + self.uploads.happened
        )

    # -- the end ---------------------------------------------------------------------------

    def partitions(self, topic: str, number: int) -> Sequence[tuple[Machine, Partition]]:
        """The running replicas of a partition."""
        return [
            (machine, shard.partitions[(topic, number)])
            for machine in self.world.up
            for shard in machine.shard_processes
            if (topic, number) in shard.partitions
        ]

    def converged(self, topic: str, partitions: int | Sequence[int], replicas: int | None) -> bool:
        """Whether every partition has its replicas where the catalog wants them, and these hold the same.

        `partitions`: their numbers, or how many from 0 on; `replicas`: how many of each; None: as many as
        are wanted.
        """
        catalog = self.world.catalog()
        if catalog is None:
            return False
        for number in numbers_of(partitions):
            found = self.partitions(topic, number)
            leader = next((p for _, p in found if p.leads), None)
            record = catalog.partitions.get(f"{topic}/{number}")
            if record is None:
                return False
            most = replicas or wanted_number(catalog, record)
            if leader is None or len(found) != most or record.leaving:
                return False
            if {r.replica_id for r in record.replicas} != set(leader.replica.configuration.members()):
                return False
            if len(leader.replica.configuration.voters) != most:
                return False
            ends = {(p.committed_index, p.log.last_index) for _, p in found}
            if len(ends) != 1 or len(set(next(iter(ends)))) != 1:
                return False
        return True

    async def is_whole(self) -> bool:
        """Whether every entry of every running replica can be read, from its files where they hold it."""
        whole = True
        for machine in self.world.up:
            for running in machine.running.values():
                for replica in running.process.driver.replicas.values():
                    log, index = replica.log, replica.log.first_index
                    while index <= log.last_index:
                        try:
                            index += len(await log.read(index, log.last_index, max_bytes=1 << 20))
                        except DamagedRange as damage:
                            index = damage.last_index + 1
                            whole = False
        return whole

    def staged_batches(self, topic: str, partitions: int) -> int:
        """Batches that are staged, and neither published nor dropped."""
        return sum(
            len(partition.state.stages)
            for number in range(partitions)
            for _, partition in self.partitions(topic, number)
        )

    async def check_end(self, topic: str, partitions: int | Sequence[int]) -> None:
        """All replicas hold the same bytes and the same derived state; all that was committed is readable."""
        for number in numbers_of(partitions):
            found = self.partitions(topic, number)
            group = self.groups[found[0][1].replica.group]
            for machine, partition in found:
                who = f"{group.name}@{machine.node}"
                self.committed(group, partition.replica, who, 1, partition.committed_index)
                assert partition.committed_index == len(group.entries), (
                    f"{who} ends at {partition.committed_index}, committed are {len(group.entries)}"
                )
                first = found[0][1]
                assert first.producers.stored() == partition.producers.stored(), f"{who}: producers differ"
                assert first.cursors.names() == partition.cursors.names(), f"{who}: cursors differ"
                mine, others = first.state.state(), partition.state.state()
                assert (mine.stages, mine.sinks) == (others.stages, others.sinks), f"{who}: sinks differ"
                assert mine.keys == others.keys, f"{who}: keys differ"
                seals = [(each.succession.opened, each.succession.sealed) for each in (mine, others)]
                assert seals[0] == seals[1], f"{who}: seals differ"


def numbers_of(partitions: int | Sequence[int]) -> Sequence[int]:
    """Return the numbers of partitions, of which all or only how many are given."""
    return range(partitions) if isinstance(partitions, int) else partitions


def _kept(held: dict[int, Held]) -> int:
    """Up to which entry a group keeps all, of whose replicas this is left.

    Who stands asks the voters that it knows of. So whoever wins, no end of one of these is lost. Nor is what
    lies before the start of a log: it was committed when that moved, and the start is durable.
    """
    ends = [
        max(held[voter].index for voter, _ in each.record.voters if voter in held)
        for replica_id, each in held.items()
        if replica_id in dict(each.record.voters)
    ]
    return max(min(ends, default=0), *(each.start for each in held.values()), 0)
