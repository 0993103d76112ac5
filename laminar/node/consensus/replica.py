"""One member of one Raft group: its core, its log, and the state machine that is fed from its log.

`Replica` connects the pure core (`raft.core`) with a log (`laminar.log`) and a `StateMachine`: the partition
or the catalog, whose state is a function of the log. It does no I/O, and reads the clock only for append
times. The driver performs the core's decisions through the methods here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from laminar.batch import Buffer, Header, Kind, body_of, build_control, stamp
from laminar.log.partition_log.log import Log
from laminar.node.consensus.log_start import log_start_record
from laminar.node.consensus.raft_frames import StampedBatch, entry_of
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from raft.configuration import Configuration
from raft.core import Core
from raft.values import Entry, HardState, Place, Settings, Trace

# A group that continues without its majority adds this number to its term, so that the abandoned replicas
# can't have reached the new term: each term takes them an election.
TERMS_PASSED = 1 << 16
# By how much the term of a replica is raised whose log is an older copy: above all terms in which it may have
# voted (each term takes an election, and a copy that only leaders recognise is minutes old).
TERMS_FORGOTTEN = 1 << 14


class EntryObserver(Protocol):
    """An observer of a log's entries, which is called for each of them in order."""

    def appended(self, header: Header, frame: Buffer) -> None:
        """Process the batch that is now the last entry of the log; it may still be truncated.

        It must not propose: the driver is in the middle of a Ready.
        """


class StateMachine(EntryObserver, Protocol):
    """State that is a function of a log; it is notified of every change of the log, in log order."""

    @property
    def is_whole(self) -> bool:
        """Whether its state includes every entry; False if damaged ones were left out at the start."""

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated. It must not propose."""

    def committed(self, index: int) -> None:
        """Note that all entries up to `index` are committed."""

    def led(self, leading: bool) -> None:
        """Note that this replica became, or ceased to be, the leader."""

    def failed(self, error: Exception) -> None:
        """Fail everything that waits for this replica, which does not take part in its group any more."""


class Replica:
    """The member of a Raft group in this process, run by the driver."""

    __slots__ = (
        "configuration",
        "core",
        "failure",
        "group",
        "leading",
        "log",
        "machine",
        "name",
        "nodes",
        "on_match",
        "place",
        "quiesced",
        "replica_id",
        "term",
        "wall_ms",
    )

    def __init__(
        self,
        *,
        name: str,
        cluster: bytes,
        group: bytes,
        replica_id: int,
        incarnation: int,
        log: Log,
        machine: StateMachine,
        hard_state: HardState,
        committed_index: int,
        configurations: Sequence[tuple[int, ConfigurationRecord]],
        settings: Settings,
        rng: random.Random,
        now_ms: int,
        wall_ms: Callable[[], int],
        trace: Trace | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.replica_id = replica_id
        self.log = log
        self.machine = machine
        self.wall_ms = wall_ms
        self.nodes: dict[int, str] = {}
        for _, record in configurations:
            self.nodes.update(record.nodes())
        # Called after each input while a caller waits for more members to have an entry.
        self.on_match: Callable[[], None] | None = None
        self.failure: Exception | None = None
        # As of the last `Ready`, one of which follows each input of the core: whether it is the leader; the
        # place of its next proposal, None if it takes none, as a leader that hands over.
        self.leading = False
        self.place: Place | None = None
        self.quiesced = False
        self.core = Core(
            cluster=cluster,
            group=group,
            replica_id=replica_id,
            incarnation=incarnation,
            recovering=log.recovering,
            configuration=configurations[0][1].configuration(),
            configurations=[(index, record.configuration()) for index, record in configurations[1:]],
            hard_state=hard_state,
            log=log,
            committed_index=committed_index,
            rng=rng,
            now_ms=now_ms,
            settings=settings,
            make_noop=self._noop,
            trace=trace,
        )
        self.term = self.core.term
        self.configuration = self.core.configuration
        """Voters and learners in force."""

    # -- proposing ---------------------------------------------------------------------

    def stamped(
        self,
        frame: bytearray | memoryview,
        place: Place,
        *,
        time_ms: int,
        opens_segment: bool = False,
        configuration: Configuration | None = None,
    ) -> Entry:
        """Return a batch as the entry to propose at `place`; its `data` is a `StampedBatch`. Leader only.

        Index, terms, base offset and append time, `time_ms` or later, are written into `frame` in place;
        nothing else changes. The driver performs the core's `Ready` before the next proposal, so the log's
        end is always the end the next stamp continues from.
        """
        log = self.log
        stamp(
            frame,
            index=place.index,
            term=place.term,
            prev_term=place.prev_term,
            base_offset=log.next_offset,
            append_time_ms=max(time_ms, log.last_append_time_ms),
            committed_index=place.committed_index,
            opens_segment=opens_segment or log.segment_full or place.index == log.start.index + 1,
        )
        data = StampedBatch(frame, Header.unpack(frame))
        return Entry(place.index, place.term, data, len(frame), configuration)

    def _noop(self, place: Place) -> Entry:
        return self.stamped(build_control(Kind.NOOP, b""), place, time_ms=self.wall_ms())

    def propose_configuration(self, record: ConfigurationRecord, *, now_ms: int) -> Place:
        """Propose a configuration one step from the present one; return the place of its entry."""
        self.nodes.update(record.nodes())
        place = self.core.place()
        self.core.propose_configuration(self._configuration_entry(record, place), now_ms=now_ms)
        return place

    def go_on_alone(self, abandoned: Sequence[int], *, node: str, now_ms: int) -> None:
        """Become the only voter; the replicas `abandoned` are gone for good (`Core.go_on_alone`).

        `node` is this replica's node, which may be unknown from the log: a new replica may not have received
        a configuration with itself yet.
        """
        current = self.configuration_record
        self.nodes[self.replica_id] = node
        gone = tuple(sorted({*current.abandoned, *abandoned}))
        record = ConfigurationRecord(voters=((self.replica_id, node),), abandoned=gone)
        self.core.go_on_alone(
            partial(self._configuration_entry, record), term=self.core.term + TERMS_PASSED, now_ms=now_ms
        )

    def _configuration_entry(self, record: ConfigurationRecord, place: Place) -> Entry:
        frame = build_control(Kind.CONFIGURATION, record.encoded())
        return self.stamped(frame, place, time_ms=self.wall_ms(), configuration=record.configuration())

    # -- what the driver performs ------------------------------------------------------

    def truncate(self, index: int) -> None:
        """Truncate the log from entry `index` on, and roll the state machine back."""
        self.log.truncate(index)
        self.machine.truncated(index)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries to the log in memory and apply them to the state machine."""
        batches: list[StampedBatch] = [entry.data for entry in entries]
        self.log.append([batch.frame for batch in batches])
        for frame, header in batches:
            if header.kind == Kind.CONFIGURATION:
                self.nodes.update(configuration_record(body_of(frame)).nodes())
            self.machine.appended(header, frame)

    def begin_recovery(self) -> None:
        """Record that this replica is recovering, because its log is an older copy of itself.

        After a restart it is a new incarnation, whose vote does not count until a leader has sent it all
        entries again (docs/consensus.md#recovering). Its term and vote may be outdated like the copy, so it
        starts in a higher term, in which it has promised nothing. The term is in the same journal record as
        the recovering flag, so that both become durable together.
        """
        self.log.set_recovering(
            recovering=True,
            incarnation=self.log.incarnation + self.core.last_incarnation - self.core.incarnation + 1,
            least_term=self.core.term + TERMS_FORGOTTEN,
        )

    def finish_recovery(self) -> None:
        """Record that this replica is not recovering any more (docs/consensus.md#recovering)."""
        self.log.set_recovering(recovering=False, incarnation=self.log.incarnation)

    def match_index(self, replica_id: int) -> int:
        """Return the index up to which a member's log is known to be durable and equal to ours, or 0.

        Leader only.
        """
        progress = self.core.progress.get(replica_id)
        return progress.match_index if progress is not None else 0

    def counted_index(self, replica_id: int) -> int:
        """Return the index up to which a voter's copy of the log counts for commits, or 0. Leader only.

        See `raft.progress.Progress`.
        """
        progress = self.core.progress.get(replica_id)
        return progress.counted_index if progress is not None else 0

    @property
    def leader_node(self) -> str | None:
        """Node of the leader that this replica knows of; None if it knows none."""
        leader = self.core.leader_id
        return self.nodes.get(leader) if leader else None

    @property
    def configuration_record(self) -> ConfigurationRecord:
        """The group's present configuration, with the nodes of voters and learners."""
        current = self.configuration
        return ConfigurationRecord(
            voters=tuple((member, self.nodes[member]) for member in current.voters),
            learners=tuple((member, self.nodes[member]) for member in current.learners),
            abandoned=current.abandoned,
        )

    def lagging(self, index: int) -> list[str]:
        """Return the nodes whose replicas are not known to have the log up to `index`. Leader only."""
        current = self.configuration
        others = [member for member in (*current.voters, *current.learners) if member != self.replica_id]
        return sorted(self.nodes[member] for member in others if self.match_index(member) < index)


class Stepper(Protocol):
    """The interface of the driver to the parts that it works with.

    The driver gives inputs to the Raft cores of a process's replicas, and performs what they decide.
    """

    def is_current(self, replica: Replica) -> bool:
        """Return whether the driver runs this replica for its group now."""

    def step(self, replica: Replica, step: Callable[[Core], object]) -> None:
        """Give a core an input, and perform the actions that it decides; an error stops the replica."""

    def process_ready(self, replica: Replica) -> None:
        """Perform what a core has decided already."""

    def stop_replica(self, replica: Replica, error: Exception) -> None:
        """Stop one replica, because its state is wrong or its code failed."""

    def fail_process(self, error: BaseException) -> None:
        """End the process, because code that all groups share failed."""


def initial_frame(record: ConfigurationRecord, *, created_ms: int) -> bytearray:
    """Return the frame of entry 1 of a new group, which has the same bytes on every replica."""
    frame = build_control(Kind.CONFIGURATION, record.encoded())
    stamp(
        frame,
        index=1,
        term=1,
        prev_term=0,
        base_offset=0,
        append_time_ms=created_ms,
        committed_index=0,
        opens_segment=True,
    )
    return frame


def replay(frames: Sequence[Buffer], observer: EntryObserver) -> list[tuple[int, ConfigurationRecord]]:
    """Feed the frames of a log that was just opened to its observer; return the configurations in them.

    Each is returned with the index of its entry. A `log_start` entry repeats the present configuration,
    because the entry that set it may be trimmed.
    """
    configurations = []
    for frame in frames:
        header = Header.unpack(frame)
        if header.kind == Kind.CONFIGURATION:
            configurations.append((header.index, configuration_record(body_of(frame))))
        elif header.kind == Kind.LOG_START:
            configurations.append((header.index, log_start_record(frame).configuration))
        observer.appended(header, frame)
    return configurations


__all__ = [
    "Replica",
    "StateMachine",
    "Stepper",
    "entry_of",
    "initial_frame",
    "replay",
]
