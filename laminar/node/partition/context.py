"""One replica of a partition as its parts see it: its name, log, driver, derived state and Raft replica.

The parts of a `Partition` share this object, so that none of them needs the others or the whole. The only
decision made here is whether this replica leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from laminar.http.api.problems import Problem
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.partition.problems import not_leader
from laminar.node.partition.state.kept_log import KeptLog
from laminar.node.partition.state.state import PartitionState
from laminar.node.partition.state.succession import Sealed
from laminar.node.trace.mode import mode_in
from laminar.node.trace.partition_trace import PartitionTrace
from laminar.node.trace.ring import Place, TraceRing


class PartitionContext:
    """The shared state of one replica of partition `number` of `topic`; set `replica` before use."""

    __slots__ = (
        *("_code_version", "_kept_log", "driver", "kept_seal", "log", "name", "number"),
        *("replica", "state", "topic", "trace"),
    )

    replica: Replica

    def __init__(
        self,
        *,
        topic: str,
        number: int,
        driver: Driver,
        log: Log,
        code_version: Callable[[], int] | None = None,
    ) -> None:
        """Create the context; its `replica` is set afterwards.

        `code_version` returns the code version that the cluster has enabled; None if every feature of this
        program is enabled.
        """
        self.topic = topic
        self.number = number
        self.name = f"{topic}/{number}"
        self.driver = driver
        self.log = log
        self.state = PartitionState(log.start.index)
        # Index and term of the `seal` entry that a majority of the voters has synced; (0, 0): none known.
        self.kept_seal = (0, 0)
        # Notes events of records; usually None: the topic is not traced.
        self.trace: PartitionTrace | None = None
        self._kept_log: KeptLog | None = None
        self._code_version = code_version

    def follow_trace(
        self,
        settings: Mapping[str, object],
        ring: TraceRing,
        channels: Iterable[Mapping[str, object]] = (),
    ) -> None:
        """Start, change or stop the trace of records to match the settings of the topic and its channels.

        The events of traced records are written to `ring`.
        """
        mode = mode_in(self.topic, settings, channels)
        if mode is None:
            self.trace = None
        elif self.trace is None:
            self.trace = PartitionTrace(Place(self.topic, self.number, self.replica.group), mode, ring)
        else:
            self.trace.mode = mode

    def follows_trace(self, settings: Mapping[str, object], channels: Iterable[Mapping[str, object]]) -> bool:
        """Return whether the present trace matches the settings of the topic and its channels."""
        return mode_in(self.topic, settings, channels) == (None if self.trace is None else self.trace.mode)

    @property
    def committed_index(self) -> int:
        """Index of the last entry that this replica knows to be committed."""
        return self.state.committed_index

    @property
    def start_offset(self) -> int:
        """Start of the log: offset of the earliest record that is not trimmed."""
        return self.log.start.offset

    @property
    def end_offset(self) -> int:
        """Offset after the last record that this replica knows to be committed."""
        return self.log.offset_after(self.state.committed_index)

    @property
    def kept_log(self) -> KeptLog | None:
        """The channels because of which the log is kept longer than the topic's retention says.

        They are what the last check of retention found, less those that have gone on since. None if no
        channel keeps the log, or if this replica does not lead.
        """
        if self._kept_log is None or not self.leads:
            return None
        return self._kept_log.still(self.state.channels)

    def note_kept(self, kept: KeptLog | None) -> None:
        """Store the result of a check of retention: the channels that keep the log, or None."""
        self._kept_log = kept

    @property
    def final_seal(self) -> Sealed | None:
        """The `seal` entry that ends the partition, if it cannot be lost any more; only then tell clients.

        A loss of power can take a committed entry from a log with the flush policy `interval`. So in such a
        log the seal is final only once a majority is known to have synced it (`kept_seal`).
        """
        seal = self.state.committed_seal
        if seal is None or (self.log.policy.is_interval and self.kept_seal != (seal.index, seal.term)):
            return None
        return seal

    @property
    def is_whole(self) -> bool:
        """Whether the derived state covers every entry of the log, so that no damaged one is left out."""
        return not self.state.left_out

    @property
    def leads(self) -> bool:
        """Whether this replica leads and takes appends; False while its derived state lacks entries."""
        replica = self.replica
        return replica.place is not None and replica.failure is None and not self.state.left_out

    @property
    def voters(self) -> int:
        """Number of voters of the group."""
        return len(self.replica.configuration.voters)

    def check_leads(self) -> None:
        """Raise 503 `not_leader` unless this replica leads; if it does not, also ask for an election."""
        if not self.leads:
            self.driver.leader_requested(self.replica)
            raise not_leader(self.name, outcome="not_applied")

    def check_knows(self, version: int, what: str) -> None:
        """Raise 503 `not_enabled` unless the cluster has enabled code version `version`.

        It is enabled once all nodes run a program that knows it (docs/upgrading.md). `what` names the feature
        in the message.
        """
        if self._code_version is not None and (enabled := self._code_version()) < version:
            raise Problem(
                "not_enabled",
                f"{what} need code version {version}; {enabled} is enabled until all nodes are upgraded",
                outcome="not_applied",
            )

    def is_active(self, member: int) -> bool:
        """Return whether this leader received a message of `member` lately; True for this replica."""
        return self.driver.is_active(self.replica, member)

    def now_ms(self) -> int:
        """Return the wall clock in ms, but never less than the last append time of the log."""
        return max(self.replica.wall_ms(), self.log.last_append_time_ms)
