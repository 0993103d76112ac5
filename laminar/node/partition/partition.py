"""One replica of a partition: the state machine of its Raft group, and the parts that serve requests.

`Partition` is the `StateMachine` of a `Replica`: its state is derived from the entries of the log
(`laminar.node.partition.state.state`). It notifies its parts of changes of the log: the append path resolves
the futures that wait for a commit, the read view wakes readers, the start mover moves the log's start. A
change of a topic's route opens new partitions with `propose_open` and ends old ones with `propose_seal`
(`docs/consensus.md#ends-of-partitions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from laminar.batch import Buffer, Header
from laminar.http.api.problems import Problem
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.partition.append_path import AppendPath
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.cursor_commands import CursorCommands
from laminar.node.partition.min_replicas import Copies
from laminar.node.partition.problems import held, not_open, sealed
from laminar.node.partition.reads import ReadView
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.start_mover import StartMover
from laminar.node.partition.state.cursors import Cursors
from laminar.node.partition.state.group_members import GroupMembers
from laminar.node.partition.state.producers import Producers
from laminar.node.partition.state.state import PartitionState
from laminar.node.partition.state.succession import OpenRecord, Sealed, SealRecord
from raft.quorum import majority

NEVER_CHANGES = "_transactions"
"""The internal topic whose route never changes, so that its partitions are never sealed."""


def _no_refusal() -> Problem | None:
    return None


class Partition:
    """A replica of partition `number` of `topic`; set `replica` before use."""

    def __init__(
        self,
        *,
        topic: str,
        number: int,
        driver: Driver,
        log: Log,
        refusal: Callable[[], Problem | None] = _no_refusal,
        consumer_refusal: Callable[[], Problem | None] = _no_refusal,
        asks_catalog: bool = False,
        code_version: Callable[[], int] | None = None,
    ) -> None:
        """Create the replica's parts.

        `code_version` returns the code version that the cluster has enabled; None enables everything.
        `refusal` and `consumer_refusal` return the problem for which the storage takes no appends, or no
        entries of consumers, now. With `asks_catalog` a leader whose log may have lost a seal takes no
        records until the shard has asked the catalog and calls `lacks_no_seal`.
        """
        self.topic = topic
        self.number = number
        self.log = log
        self.context = PartitionContext(
            topic=topic, number=number, driver=driver, log=log, code_version=code_version
        )
        self.group_members = GroupMembers()
        self.copies = Copies(self.context)
        self.appends = AppendPath(
            self.context, self.copies, refusal=refusal, consumer_refusal=consumer_refusal
        )
        self.reader = ReadView(self.context)
        self.start_mover = StartMover(self.context, self.appends)
        self.cursor_commands = CursorCommands(self.context, self.appends)
        # Called when this replica begins to lead.
        self.on_led: Callable[[Partition], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._asks_catalog = asks_catalog
        # Until this time (of the loop) no batch of a sink and no upload begins: a seal would wait for it.
        self._held_until_s = 0.0

    @property
    def replica(self) -> Replica:
        """The Raft replica that this is the state machine of."""
        return self.context.replica

    @replica.setter
    def replica(self, replica: Replica) -> None:
        self.context.replica = replica

    @property
    def state(self) -> PartitionState:
        """The tables that are derived from the log."""
        return self.context.state

    @property
    def producers(self) -> Producers:
        """The table of producers that have appended here."""
        return self.state.producers

    @property
    def cursors(self) -> Cursors:
        """The table of cursors, as of the log's end."""
        return self.state.cursors

    @property
    def committed_index(self) -> int:
        """Index of the last entry that this replica knows to be committed."""
        return self.state.committed_index

    @property
    def start_offset(self) -> int:
        """Start of the log: offset of the earliest record that is not trimmed."""
        return self.context.start_offset

    @property
    def end_offset(self) -> int:
        """Offset after the last record that this replica knows to be committed."""
        return self.context.end_offset

    @property
    def replicas(self) -> int:
        """Number of voters to which an append is replicated.

        An acknowledged append is on a majority of them, and on at least the topic's `min_replicas`.
        """
        return self.context.voters

    @property
    def leads(self) -> bool:
        """Whether this replica leads and takes appends."""
        return self.context.leads

    def check_leads(self) -> None:
        """Raise 503 `not_leader` unless this replica leads; then also ask for an election."""
        self.context.check_leads()

    # -- changes of routes -------------------------------------------------------------------

    def hold(self, seconds: float) -> int:
        """Refuse new batches of sinks and new uploads for this time; return how many are under way.

        Those under way continue; once they have ended, none is left and the partition can be sealed. A later
        call replaces the time of an earlier one. The refusal ends when the leader changes. Leader only.
        """
        self.check_leads()
        self._held_until_s = self._loop.time() + seconds
        return len(self.state.stages)

    def check_may_begin(self) -> None:
        """Raise 503 `changing` while new batches of sinks and uploads are refused (`hold`)."""
        if self._loop.time() < self._held_until_s:
            raise held(self.context.name)

    def propose_seal(self, record: SealRecord) -> asyncio.Future[Receipt]:
        """Propose the `seal` entry, after which this partition takes no records. Leader only.

        The returned future is resolved when the seal is committed; the offset of its receipt is the final end
        of the partition. If the same change has sealed the partition already, nothing is appended. Call it
        only for a change of the route that can no longer be withdrawn, in a cluster whose nodes all know
        `seal` entries.

        Raises:
            Problem: 409 `in_progress` while records are staged here, prepared or not, or a large record is
                being uploaded, because the decision about them could not be appended after the seal; 409
                `sealed` if another change has sealed the partition; 503 `changing` if the partition is not
                opened yet; 503 `not_leader`.
        """
        self.check_leads()
        self.appends.flush()
        succession = self.state.succession
        known = succession.sealed
        if known is not None:
            if known.record.change_id != record.change_id:
                raise sealed(self.context.name, known.record.version)
            receipt = Receipt(self.number, known.end, 0, duplicate=True)
            return self.appends.when_committed(known.index, receipt, copied=False)
        if succession.status == "waiting":
            raise not_open(self.context.name)
        under_way = len(self.state.stages)
        if under_way:
            raise Problem(
                "in_progress",
                f"{self.context.name} holds {under_way} batches or uploads that are not published yet",
                field="stages",
                value=under_way,
                limit=0,
                outcome="not_applied",
            )
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self.appends.propose(record.frame(), [(future, 0)])
        # From now on the seal refuses everything for good, so the temporary refusal of `hold` can end.
        self._held_until_s = 0.0
        return future

    def propose_open(self, record: OpenRecord) -> asyncio.Future[Receipt]:
        """Propose the `open` entry, after which this partition takes records. Leader only.

        The returned future is resolved when the entry is committed. If the same change has opened the
        partition already, nothing is appended. The append time of the entry is not before that of any input's
        seal, so append times never decrease from a partition to those that follow it. Call it only if the
        catalog says that all inputs are sealed for good, and, if the log may have lost its first entry
        (`may_lack_seal`), that `record`'s change created this partition.

        Raises:
            Problem: 422 `invalid` if this change did not create the partition, or it is sealed already; 503
                `not_leader`.
        """
        self.check_leads()
        succession = self.state.succession
        known = succession.opened
        if known is not None and known.record.change_id == record.change_id:
            receipt = Receipt(self.number, 0, 0, duplicate=True)
            return self.appends.when_committed(known.index, receipt, copied=False)
        made_by = succession.successor_of
        waits = succession.status == "waiting" and made_by == record.change_id
        if not waits and (made_by or succession.status != "open" or not self.may_lack_seal):
            raise Problem(
                "invalid",
                f"{self.context.name} is {succession.status}, and was made by another change or by none",
                field="change_id",
                value=record.change_id,
                limit=made_by,
                outcome="not_applied",
            )
        future: asyncio.Future[Receipt] = self._loop.create_future()
        not_before_ms = max((each.time_ms for each in record.inputs), default=0)
        self.appends.propose(record.frame(), [(future, 0)], not_before_ms=not_before_ms)
        return future

    @property
    def synced_seal(self) -> tuple[int, int]:
        """Index and term of the seal that this replica has synced to its disk; (0, 0) if there is none.

        The seal may be uncommitted. Two replicas with the same pair have the same entry.
        """
        seal = self.state.succession.sealed
        if seal is None or seal.index > self.log.synced_index:
            return (0, 0)
        return (seal.index, seal.term)

    def seal_is_kept(self, synced: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether the seal is committed and synced by a majority of the voters, so cannot be lost.

        `synced` maps the nodes of other voters to the `synced_seal` that they reported, however long ago. A
        commit alone is not enough: in a log with the flush policy `interval` a power loss may undo it.
        """
        seal = self.state.committed_seal
        if seal is None:
            return False
        place = (seal.index, seal.term)
        voters = self.replica.configuration_record.voters
        holding = sum(
            (self.synced_seal if voter == self.replica.replica_id else synced.get(node)) == place
            for voter, node in voters
        )
        return holding >= majority(len(voters))

    @property
    def final_end(self) -> int | None:
        """Offset after the last record of the partition, whose seal is final; None if more may come."""
        seal = self.context.final_seal
        return None if seal is None else seal.end

    @property
    def kept_seal(self) -> Sealed | None:
        """The committed `seal` entry, if this replica knows that a majority has synced it (`keep_seal`)."""
        seal = self.state.committed_seal
        return seal if seal is not None and self.context.kept_seal == (seal.index, seal.term) else None

    def keep_seal(self) -> None:
        """Note that a majority has synced the committed seal: answers to clients may mention it now."""
        seal = self.state.committed_seal
        assert seal is not None, f"{self.context.name}: its seal is not committed"
        self.context.kept_seal = (seal.index, seal.term)
        self.appends.seal_is_final()
        self.reader.committed()

    @property
    def may_lack_seal(self) -> bool:
        """Whether this log may have lost a committed seal, so that the catalog must be asked for one.

        True if an operator has accepted a loss for the group, or damaged entries were left out for good.
        """
        return bool(self.replica.configuration.abandoned) or self.state.succession.lacks_entries

    def doubt(self) -> None:
        """Take no records until `lacks_no_seal`, if this log may have lost a seal. Called on a new leader."""
        self.state.succession.in_doubt = (
            self._asks_catalog and self.may_lack_seal and self.topic != NEVER_CHANGES
        )

    def lacks_no_seal(self) -> None:
        """Take records again: asked in this term, the catalog says that the partition is open."""
        self.state.succession.in_doubt = False

    def stop(self, error: Exception) -> None:
        """Stop this replica after a bug in its state; it stays out of its Raft group until a restart."""
        self.context.driver.stop_replica(self.replica, error)

    # -- the state machine: called by the driver ---------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the derived state covers every entry of the log."""
        return self.context.is_whole

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply an entry that is now the log's last."""
        trace = self.context.trace
        if trace is not None:
            trace.appended(header, frame, self.state)
        self.state.appended(header, frame)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, and fail the appends that wait for them."""
        self.state.truncated(index)
        if self.context.trace is not None:
            self.context.trace.truncated(index)
        self.appends.truncated(index)

    def committed(self, index: int) -> None:
        """Note that entries up to `index` are committed: resolve appends, wake readers, move the start."""
        state = self.context.state
        before = state.committed_index
        state.committed(index)
        self.appends.committed(before, index)
        if self.reader.waiting:
            self.reader.committed()
        if self.context.trace is not None:
            self.context.trace.committed(index)
        if state.due_start is not None:
            self.start_mover.carry_out()

    def led(self, leading: bool) -> None:
        """Handle the start of leadership, or, if not `leading`, its loss: refuse unproposed appends."""
        self._held_until_s = 0.0
        self.doubt()
        if leading:
            self.group_members.led(self._loop.time())
            if self.on_led is not None:
                self.on_led(self)
        else:
            self.appends.lost_leadership()

    def failed(self, error: Exception) -> None:
        """Fail the appends and wake the readers that wait here, because the log failed."""
        self.appends.failed(error)
        self.reader.stop_waiting()
