"""One replica of a partition: the state machine of its Raft group, and the parts that serve requests.

`Partition` is the `StateMachine` of a `Replica`: its state follows from the log
(`laminar.node.partition.state.state`). It notifies its parts of changes of the log: the append path resolves
the futures that wait for a commit, the read view wakes readers, the start mover moves the log's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.batch import Buffer, Header
from laminar.http.api.problems import Problem
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.replica import Replica
from laminar.node.partition.append_path import AppendPath
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.cursor_commands import CursorCommands
from laminar.node.partition.min_replicas import Copies
from laminar.node.partition.reads import ReadView
from laminar.node.partition.start_mover import StartMover
from laminar.node.partition.state.cursors import Cursors
from laminar.node.partition.state.group_members import GroupMembers
from laminar.node.partition.state.producers import Producers
from laminar.node.partition.state.state import PartitionState


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
    ) -> None:
        self.topic = topic
        self.number = number
        self.log = log
        self.context = PartitionContext(topic=topic, number=number, driver=driver, log=log)
        self.group_members = GroupMembers()
        self.copies = Copies(self.context)
        self.appends = AppendPath(self.context, self.copies, refusal=refusal)
        self.reader = ReadView(self.context)
        self.start_mover = StartMover(self.context, self.appends)
        self.cursor_commands = CursorCommands(self.context, self.appends)
        # Called when this replica begins to lead.
        self.on_led: Callable[[Partition], None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def replica(self) -> Replica:
        """The Raft replica that this is the state machine of."""
        return self.context.replica

    @replica.setter
    def replica(self, replica: Replica) -> None:
        self.context.replica = replica

    @property
    def state(self) -> PartitionState:
        """What follows from the log."""
        return self.context.state

    @property
    def producers(self) -> Producers:
        """The producers that have appended here."""
        return self.state.producers

    @property
    def cursors(self) -> Cursors:
        """The cursors, as of the log's end."""
        return self.state.cursors

    @property
    def committed_index(self) -> int:
        """Index of the last entry that this replica knows to be committed."""
        return self.state.committed_index

    @property
    def start_offset(self) -> int:
        """Offset of the earliest record that is still there."""
        return self.context.start_offset

    @property
    def end_offset(self) -> int:
        """Offset after the last record that this replica knows to be committed."""
        return self.context.end_offset

    @property
    def replicas(self) -> int:
        """Number of voters, over which an append is replicated.

        When it is acknowledged, a majority of them has it, and at least the topic's `min_replicas`.
        """
        return self.context.voters

    @property
    def leads(self) -> bool:
        """Whether appends are taken here."""
        return self.context.leads

    def check_leads(self) -> None:
        """Raise 503 `not_leader` where only the leader can answer."""
        self.context.check_leads()

    def stop(self, error: Exception) -> None:
        """Stop this replica after a bug in its state: it takes part in nothing until a restart."""
        self.context.driver.stop_replica(self.replica, error)

    # -- the state machine: called by the driver ---------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the state covers every entry of the log."""
        return self.context.is_whole

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply an entry that is now the log's last."""
        self.state.appended(header, frame)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, and fail the appends that wait for them."""
        self.state.truncated(index)
        self.appends.truncated(index)

    def committed(self, index: int) -> None:
        """Take note that everything up to `index` is committed: resolve appends, wake readers."""
        state = self.context.state
        before = state.committed_index
        state.committed(index)
        self.appends.committed(before, index)
        self.reader.committed()
        if state.due_start is not None:
            self.start_mover.carry_out()

    def led(self, leading: bool) -> None:
        """Begin to lead; or, if not `leading`, refuse at once all appends that are not proposed yet."""
        if leading:
            self.group_members.led(self._loop.time())
            if self.on_led is not None:
                self.on_led(self)
        else:
            self.appends.lost_leadership()

    def failed(self, error: Exception) -> None:
        """End everything that waits here, as the log failed."""
        self.appends.failed(error)
        self.reader.stop_waiting()
