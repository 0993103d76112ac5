"""The Raft driver of one process: performs the actions that the Raft cores of its replicas decide.

Every input of a core (a message, a proposal, a deadline, a finished sync) is followed by `process_ready`,
which takes the core's `Ready` and applies it to the log in memory at once. Messages and writes to the disk
are collected during a loop turn. At its end the messages that need no sync are sent, one frame per peer and
channel, and one sync of the shard's journal is requested. When that sync returns, the messages that waited
for it are sent. So a loop turn costs one write per peer and one `fdatasync`, however many groups took part.

Messages from peers and calls of this process come here. The cores' other inputs come from two modules:
deadlines and elections from `timekeeper`, news of peers that are gone or back from `keepalives`.
Outgoing messages are gathered in `outbox`. The driver knows groups, logs and addresses, but no topic and no
HTTP.

Invariants: a message that promises something about this disk is sent only after the sync that covers it
(`_synced`); the hard state is recorded before the entries of its term; after a replica has failed no message
of it is sent. Reference: the Ready loop of etcd's raft.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from laminar.batch import verify
from laminar.histogram import Histogram
from laminar.log.disk.errors import BrokenChain, ReplicaStopped, StorageClosed, StorageError
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.consensus.election_throttle import MOST_AT_ONCE
from laminar.node.consensus.keepalives import Keepalives
from laminar.node.consensus.outbox import Outbox
from laminar.node.consensus.quiescence import Quiescence
from laminar.node.consensus.raft_frames import read_frame, read_keepalive
from laminar.node.consensus.raft_wire import PLAIN_KEEPALIVE, ConfigurationRecord
from laminar.node.consensus.replica import Replica, entry_of
from laminar.node.consensus.timekeeper import Timekeeper
from laminar.node.host.clock import Clock
from laminar.node.host.failed_logs import RestartToRecover
from laminar.node.host.log_rate_limit import LimitedLog
from laminar.node.transport.receive_budget import RECEIVE_BUDGET_BYTES, ReceiveBudget
from laminar.node.transport.transport import Address, Channel, Peer, ProtocolError, Transport
from raft.configuration import ConfigurationRefused
from raft.core import Core
from raft.messages import AnyMessage
from raft.values import EntryTooLarge, NotLeader, Role, TooMuchUncommitted, Written

_log = logging.getLogger("laminar.driver")

# A core that refuses a proposal raises one of these, and has changed nothing.
REFUSALS = (NotLeader, EntryTooLarge, TooMuchUncommitted, ConfigurationRefused)

# Most replicas of one group that this process remembers: members, former members, and unknown senders that a
# replica without entries answers.
MOST_SENDERS = 1000
# By replica that waits for a sync: the messages that leave then, and up to where its log is durable then.
_Waiting = dict[Replica, tuple[list[AnyMessage], Written]]


class Driver:
    """Runs the replicas of one process over one storage and one transport. Call it on the loop only.

    `address_of(node, replica)` returns the address of the process on `node` that owns the replica's group,
    `address_of_peer(peer)` the address of a process; None while it is unknown. `admits(peer)` says whether
    messages of a process are accepted. `on_fatal(error)` is called once, if the journal or the code that all
    groups share failed: the process must end, because its state in memory can't be trusted any more. From
    then on the driver does nothing.

    An exception in the step of one group, which is a bug, stops only its replica, and `on_stopped(name,
    error)` is called. No message of the replica is sent any more, and its log is not changed. It takes part
    again after a restart of the process.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        transport: Transport,
        clock: Clock,
        address_of: Callable[[str, Replica], Address | None],
        on_fatal: Callable[[BaseException], None],
        on_stopped: Callable[[str, Exception], None] = lambda name, error: None,
        address_of_peer: Callable[[Peer], Address | None] = lambda peer: None,
        admits: Callable[[Peer], bool] = lambda peer: True,
        election_timeout_ms: int = 1500,
        heartbeat_ms: int = 200,
        elections_at_once: int = MOST_AT_ONCE,
        receive_budget_bytes: int = RECEIVE_BUDGET_BYTES,
    ) -> None:
        self._storage = storage
        self._transport = transport
        self._clock = clock
        self._on_fatal = on_fatal
        self._on_stopped = on_stopped
        self._admits = admits
        self._loop = asyncio.get_running_loop()
        self._bad = LimitedLog(_log, now_s=self._loop.time)
        self.replicas: dict[bytes, Replica] = {}
        # What waits for the sync that the end of this turn requests.
        self._waiting: _Waiting = {}
        self._outbox = Outbox(
            transport,
            address_of=address_of,
            is_current=self.is_current,
            turn=storage.schedule_turn_end,
            on_unsendable=self._unsendable,
        )
        self._quiescence = Quiescence(
            replicas=self.replicas,
            election_timeout_ms=election_timeout_ms,
            heartbeat_ms=heartbeat_ms,
            address_of=address_of,
            address_of_peer=address_of_peer,
        )
        self.awake = self._quiescence.awake
        """The lists of periodic checks, which look at no group that stays quiesced."""
        self._keepalives = Keepalives(
            clock=clock, stepper=self, quiescence=self._quiescence, outbox=self._outbox
        )
        self._timekeeper = Timekeeper(
            clock=clock,
            stepper=self,
            replicas=self.replicas,
            quiescence=self._quiescence,
            election_timeout_ms=election_timeout_ms,
            heartbeat_ms=heartbeat_ms,
            elections_at_once=elections_at_once,
        )
        self.receive_budget = ReceiveBudget(
            receive_budget_bytes, pause=transport.pause_bulk, resume=transport.resume_bulk
        )
        self._confirmations: dict[tuple[bytes, int], asyncio.Future[int]] = {}
        self._context = 0
        self._stopped = False
        self._resigned = asyncio.Event()
        self.unknown_groups = 0
        self.bad_frames = 0
        self.refused_frames = 0
        self.second_leaders = 0
        self.syncs = 0
        self.proposals = 0
        self.elections = 0
        self.leaderships_lost = 0
        self.commit_times = Histogram()
        self.stopped_replicas = 0
        # Hooks for observers such as the simulator: called with each replica before it is driven, and with
        # each control message before it is sent. Methods of a compiled class cannot be replaced.
        self.on_add: Callable[[Replica], None] | None = None
        self.on_control: Callable[[Replica, AnyMessage], None] | None = None
        transport.on_frame = self.on_frame
        transport.on_up = self._on_up
        storage.on_log_failure = self._log_failed
        storage.end_turns_with(self._end_turn)
        # Who proposes by a callback of it takes what comes up to the end of the turn.
        self.before_turn_end = storage.before_turn_end

    # -- replicas ----------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Start to run a replica: from now on it receives messages, deadlines and proposals."""
        if self.on_add is not None:
            self.on_add(replica)
        assert replica.group not in self.replicas, f"group {replica.group.hex()} is driven already"
        self.replicas[replica.group] = replica
        self.awake.woken(replica.group)
        self.process_ready(replica)

    def is_current(self, replica: Replica) -> bool:
        """Return whether this driver runs `replica` for its group; False for one that was replaced."""
        return self.replicas.get(replica.group) is replica

    def remove(self, group: bytes, error: Exception) -> None:
        """Stop running the replica of a group; everything that waits for it fails with `error`."""
        replica = self.replicas.pop(group, None)
        if replica is None:
            return
        for address, farewell in self._quiescence.removed(replica):
            self._outbox.keepalive(address, farewell)
        self._timekeeper.removed(replica)
        replica.failure = error
        for key in [key for key in self._confirmations if key[0] == group]:
            self._answer(self._confirmations.pop(key), None)
        try:
            replica.machine.failed(error)
        except Exception:  # noqa: BLE001  # must not end the caller's turn
            _log.critical(
                "%s: its state machine failed when it was notified of the stop", replica.name, exc_info=True
            )

    def stop_replica(self, replica: Replica, error: Exception) -> None:
        """Stop one replica because its state is wrong or its code failed; all others continue.

        None of its messages is sent any more, not even those gathered in this turn. Its log on disk is not
        changed, and a restart of the process opens it again.
        """
        if self._stopped or not self.is_current(replica):
            return
        self._outbox.discard(replica.group)
        self.remove(replica.group, ReplicaStopped(f"{type(error).__name__}: {error}"))
        self.say_stopped(replica.name, error)

    def say_stopped(self, name: str, error: Exception) -> None:
        """Log, count and report that a replica was stopped because of a bug or a defect in its state."""
        self.stopped_replicas += 1
        _log.critical(
            "%s is stopped until this process restarts, because of a defect in its state: %r",
            name,
            error,
            exc_info=error,
        )
        self._on_stopped(name, error)

    def _unsendable(self, group: bytes, error: Exception) -> None:
        replica = self.replicas.get(group)
        if replica is not None:
            self.stop_replica(replica, error)

    def step(self, replica: Replica, step: Callable[[Core], object]) -> None:
        """Give a core an input, and perform the actions that it decides.

        Raises:
            REFUSALS: if the core refuses a proposal.
        """
        try:
            step(replica.core)
        except REFUSALS:
            raise
        except Exception as error:  # noqa: BLE001  # stops this replica
            self.stop_replica(replica, error)
        else:
            self.process_ready(replica)

    def propose(
        self,
        replica: Replica,
        frame: bytearray | memoryview,
        *,
        opens_segment: bool = False,
        not_before_ms: int = 0,
    ) -> tuple[int, int, int]:
        """Propose one unstamped batch; return the (index, term, base offset) that it gets.

        With `opens_segment` the batch is the first of a new segment, even if the present one is not full. Its
        append time is `not_before_ms` or later.

        Raises:
            NotLeader: if this replica does not lead, or is handing leadership over.
            TooMuchUncommitted: if too many bytes wait to be committed.
            EntryTooLarge: if the entry is larger than a message may be.
        """
        place = replica.place
        if place is None or not self.is_current(replica):
            raise NotLeader(replica.core.leader_id)
        now_ms, time_ms = self._clock.monotonic_ms(), max(replica.wall_ms(), not_before_ms)
        # If stamping raises, only this batch is refused: nothing has changed yet.
        entry = replica.stamped(frame, place, time_ms=time_ms, opens_segment=opens_segment)
        try:
            replica.core.propose([entry], now_ms=now_ms)
        except REFUSALS:
            raise
        except Exception as error:  # noqa: BLE001  # stops this replica
            self.stop_replica(replica, error)
        else:
            self.proposals += 1
            self.process_ready(replica)
        return place.index, place.term, entry.data.header.base_offset

    def propose_configuration(self, replica: Replica, record: ConfigurationRecord) -> None:
        """Propose a Raft configuration that differs from the present one by one step.

        Raises:
            NotLeader: if this replica does not lead, or is handing leadership over.
            ConfigurationRefused: if the step is not allowed, or not allowed now.
        """
        if not self.is_current(replica):
            raise NotLeader(0)
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: replica.propose_configuration(record, now_ms=now_ms))

    def transfer(self, replica: Replica, member: int) -> None:
        """Hand the leadership over to the voter `member`.

        Raises:
            NotLeader: if this replica does not lead, or is handing leadership over already.
        """
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: core.transfer_leadership(member, now_ms=now_ms))

    def release(self, replica: Replica, *, incarnation: int, last_term: int, last_index: int) -> bool:
        """Release a recovering replica, so that its votes count again for candidates with a long enough log.

        (`last_term`, `last_index`) is the latest end among all logs of the group; a candidate's log must
        reach it. Return False, and do nothing, if `incarnation` is not the replica's present one or the
        replica leads. See `Core.release`.
        """
        if not self.is_current(replica) or replica.core.incarnation != incarnation or replica.leading:
            return False
        now_ms = self._clock.monotonic_ms()
        self.step(
            replica,
            lambda core: core.release(
                incarnation=incarnation, last_term=last_term, last_index=last_index, now_ms=now_ms
            ),
        )
        return True

    async def hand_over(self, *, timeout_s: float) -> None:
        """Hand each leadership to the follower with the longest log, and wait for it, at most `timeout_s`.

        Called before an orderly shutdown.
        """
        for replica in list(self.replicas.values()):
            if not replica.core.is_leader:
                continue
            voters = [member for member in replica.configuration.voters if member != replica.replica_id]
            if voters:
                self.transfer(replica, max(voters, key=replica.match_index))
        try:
            async with asyncio.timeout(timeout_s):
                while any(
                    replica.leading and len(replica.configuration.voters) > 1
                    for replica in self.replicas.values()
                ):
                    self._resigned.clear()
                    await self._resigned.wait()
        except TimeoutError:
            _log.info("not all leaderships were handed over within %g s; the shutdown continues", timeout_s)

    def is_active(self, replica: Replica, member: int) -> bool:
        """Return whether this leader received a message of `member` lately; True for this replica.

        In a quiesced group, which sends no messages, it means that the member agreed to quiesce and its
        process was heard from lately. Leader only.
        """
        if member == replica.replica_id:
            return True
        core = replica.core
        if core.quiesced:
            active = member in core.quiesce_peers
        else:
            progress = core.progress.get(member)
            active = progress is not None and not progress.silent
        return active and self._quiescence.is_active(replica, member, now_ms=self._clock.monotonic_ms())

    def go_on_alone(self, replica: Replica, abandoned: Sequence[int], *, node: str) -> None:
        """Make this replica its group's only voter, by an operator's decision recorded in the catalog.

        The replicas `abandoned` never take part again. `node` is the name of this node.
        """
        if not self.is_current(replica) or replica.core.role is Role.LEADER:
            return
        _log.critical(
            "%s goes on without its majority, from offset %d, by decision: replicas %s are abandoned",
            *(replica.name, replica.log.next_offset, sorted(abandoned)),
        )
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: replica.go_on_alone(abandoned, node=node, now_ms=now_ms))

    def campaign(self, replica: Replica) -> None:
        """Start an election now, if this replica may; used to elect the first leader of a new group."""
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: core.campaign(now_ms=now_ms))

    def confirm(self, replica: Replica) -> asyncio.Future[int]:
        """Return a future of the group's commit index at some time after this call (ReadIndex).

        It resolves when a majority has confirmed that this replica leads, and fails with ConnectionError if
        this replica does not lead or loses leadership.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        if not self.is_current(replica):
            self._answer(future, None)
            return future
        self._context += 1
        self._confirmations[(replica.group, self._context)] = future
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: core.read_index(self._context, now_ms=now_ms))
        return future

    def suspect_leader(self, replica: Replica) -> None:
        """Note that the group's leader may be gone, so that this replica may campaign soon."""
        now_ms = self._clock.monotonic_ms()
        self.step(replica, lambda core: core.suspect_leader(now_ms=now_ms))

    def unreachable(self, replica: Replica, member: int) -> None:
        """Note that messages to a follower may have been lost, and wake the group. Leader only.

        The leader asks the follower where its log ends before it sends more entries.
        """
        now_ms = self._clock.monotonic_ms()

        def step(core: Core) -> None:
            core.unquiesce(now_ms=now_ms)
            core.unreachable(member)

        self.step(replica, step)

    def addresses_changed(self) -> None:
        """Note that `address_of` may return other addresses than before, and use these from now on."""
        if not self._stopped:
            self._quiescence.addresses_changed()
            self._keepalives.set_alarm()

    def lost(self, lost: Peer | Address) -> None:
        """Notify groups that a process (in this incarnation) has ended, or that an address is unreachable."""
        if not self._stopped:
            self._quiescence.lost(lost)
            self._keepalives.set_alarm()
            self._keepalives.deliver()

    def leader_requested(self, replica: Replica) -> None:
        """Speed up an election in this group, because a request waits for its leader."""
        if not self._stopped and self.is_current(replica):
            self._keepalives.deliver_now(replica)
            now_ms = self._clock.monotonic_ms()
            self.step(replica, lambda core: core.expedite_election(now_ms=now_ms))
            self._timekeeper.expedite(replica)

    # -- inputs ------------------------------------------------------------------------

    def _on_up(self, peer: Peer) -> None:
        """Note that a connection with this process has come up."""
        if not self._stopped:
            self._quiescence.contact(peer, now_ms=self._clock.monotonic_ms())
            if self._quiescence.notices:
                self._keepalives.deliver()

    def on_frame(self, peer: Peer, channel: Channel, frame: memoryview) -> None:
        """Process a frame of Raft messages from a peer.

        Raises:
            ProtocolError: if the frame can't be decoded; then none of its messages was processed.
        """
        if self._stopped:
            return
        if not self._admits(peer):
            self.refused_frames += 1
            return
        if channel is Channel.BULK:
            self.receive_budget.received(len(frame))
        try:
            self._take_frame(peer, frame)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001  # ends the process
            self.fail_process(error)

    def _take_frame(self, peer: Peer, frame: memoryview) -> None:
        now_ms = self._clock.monotonic_ms()
        try:
            keepalive = read_keepalive(frame)
            messages = read_frame(frame) if keepalive is None else []
        except Exception as error:
            self.bad_frames += 1
            raise ProtocolError(f"malformed frame of Raft messages: {error!r}") from error
        liveness = self._quiescence.contact(peer, now_ms=now_ms)
        if self._quiescence.notices:
            self._keepalives.deliver()
        if keepalive is not None:
            if keepalive is not PLAIN_KEEPALIVE:
                for address, answer in self._quiescence.answer(peer, keepalive):
                    self._outbox.keepalive(address, answer)
                self._keepalives.deliver()
            return
        replicas = self.replicas
        for message, frames in messages:
            replica = replicas.get(message.group)
            if replica is None:
                self.unknown_groups += 1
                continue
            if message.sender not in replica.nodes and len(replica.nodes) >= MOST_SENDERS:
                self.unknown_groups += 1
                continue
            self._quiescence.member_seen(replica, message.sender, liveness)
            if self._quiescence.notices:
                self._keepalives.deliver_now(replica)
            try:
                entries = [entry_of(data, verify(data)) for data in frames]
            except Exception as error:  # noqa: BLE001  # only this message is dropped
                self.bad_frames += 1
                self._bad.warning("batch", "a damaged batch from %s for %s: %r", peer, replica.name, error)
                continue
            if message.sender not in replica.nodes:
                # A replica without entries knows no member: its answer goes to the sender's node.
                replica.nodes[message.sender] = peer.node
            try:
                replica.core.receive(message, entries, now_ms=now_ms)
            except Exception as error:  # noqa: BLE001  # stops this replica
                self.stop_replica(replica, error)
            else:
                self.process_ready(replica)

    def process_ready(self, replica: Replica) -> None:
        """Apply the core's decisions to the log in memory; collect messages and syncs for the turn's end."""
        if self._stopped or not self.is_current(replica):
            return
        try:
            self._process_ready(replica)
        except StorageClosed as error:
            self.fail_process(error)
        except Exception as error:  # noqa: BLE001  # stops this replica
            self.stop_replica(replica, error)

    def fail_process(self, error: BaseException) -> None:
        """Stop all replicas and call `on_fatal`: something that all groups share failed, like the journal."""
        if self._stopped:
            return
        self._stopped = True
        self._timekeeper.close()
        self._keepalives.close()
        for group in list(self.replicas):
            self.remove(group, StorageClosed(f"this process ends: {error!r}"))
        self._on_fatal(error)

    def _process_ready(self, replica: Replica) -> None:
        if replica.core.log_regressed:
            self._restart_recovering(replica)
            return
        if replica.core.second_leader:
            self._say_two_leaders(replica)
        ready = replica.core.take_ready()
        replica.place = ready.place
        if ready.became is not None:
            replica.term = ready.became.term
        if ready.configuration is not None:
            replica.configuration = ready.configuration
        must_sync = False
        # Before the entries: should the journal's frame be cut between them, a log must not be of a later
        # term than its replica.
        if ready.hard_state is not None:
            self._storage.record_hard_state(
                replica.replica_id,
                term=ready.hard_state.term,
                vote=ready.hard_state.vote,
            )
            must_sync = True
        try:
            if ready.truncate_from is not None:
                replica.truncate(ready.truncate_from)
                must_sync = True
            if ready.entries:
                replica.append(ready.entries)
                must_sync = True
            if ready.recovered:
                replica.finish_recovery()
                must_sync = True
                _log.info("%s has again all entries that it may have lost: its vote counts", replica.name)
        except (StorageError, BrokenChain) as error:
            self._fail(replica, error)
            return
        for message in ready.messages:
            self._queue_control(replica, message)
        for append in ready.appends:
            self._outbox.append(replica, append)
        if must_sync or ready.messages_after_sync:
            before = self._waiting.get(replica)
            messages = [] if before is None else before[0]
            messages.extend(ready.messages_after_sync)
            self._waiting[replica] = messages, ready.written
            self._storage.schedule_turn_end()
        if ready.became is not None:
            self._note_role(replica, leading=ready.became.role is Role.LEADER)
        if ready.committed_index is not None:
            replica.machine.committed(ready.committed_index)
        if replica.on_match is not None:
            replica.on_match()
        for context, index in ready.reads:
            self._confirmed(replica, context, index)
        for context in ready.reads_failed:
            self._confirmed(replica, context, None)
        if self._timekeeper.under_way:
            self._timekeeper.processed(replica)
        if ready.quiesced is not replica.quiesced:
            replica.quiesced = ready.quiesced
            if self._quiescence.processed(replica):
                self._keepalives.set_alarm()
        elif ready.became is None and replica.leading:
            return  # The deadline of a replica that still leads only moves later.
        deadline_ms = replica.core.deadline_ms()
        if deadline_ms is not None:
            self._timekeeper.schedule(replica, deadline_ms)

    def _note_role(self, replica: Replica, *, leading: bool) -> None:
        if leading == replica.leading:
            return
        replica.leading = leading
        replica.machine.led(leading)
        if leading:
            self.elections += 1
        else:
            self.leaderships_lost += 1
            self._resigned.set()

    def _say_two_leaders(self, replica: Replica) -> None:
        """Log that two replicas have led the same term, which breaks the guarantees of Raft.

        A replica has lost a vote that it gave, and acknowledged entries may be lost.
        """
        core = replica.core
        other = core.take_second_leader()
        self.second_leaders += 1
        if core.dropped["second_leader"] == 1:
            _log.critical(
                "%s: replica %d on %s claims to lead term %d, which replica %d on %s leads: "
                "acknowledged records may be lost",
                replica.name,
                other,
                replica.nodes.get(other, "an unknown node"),
                core.term,
                core.leader_id,
                replica.leader_node,
            )

    def _restart_recovering(self, replica: Replica) -> None:
        """Mark a replica as recovering and restart the process, because its log is an older copy of itself.

        Until the restart it sends nothing.
        """
        replica.begin_recovery()
        text = f"{replica.name} has forgotten acknowledged entries: an older copy of its log was put back"
        _log.critical("%s; it ends at offset %d", text, replica.log.next_offset)
        self.remove(replica.group, StorageClosed(text))

        def come_back(marked: asyncio.Future[None]) -> None:
            if marked.cancelled() or self._stopped:
                return
            failure = marked.exception()
            if failure is not None:
                self.fail_process(failure)
                return
            self._on_fatal(RestartToRecover(text))

        self._storage.sync(durable=True).add_done_callback(come_back)

    def _fail(self, replica: Replica, error: StorageError | BrokenChain) -> None:
        """Stop a replica whose log failed to perform a decision of its core; all others continue.

        None of the core's messages is sent, so no peer is notified of entries that are not in the log.
        """
        _log.critical("%s is stopped because its log failed: %s", replica.name, error)
        self.remove(replica.group, error)

    def _log_failed(self, log: Log) -> None:
        """Report that the files of a log failed.

        Its entries are still in the journal, so the replica takes part until its next append.
        """
        _log.critical("%s takes no more entries until a restart: %s", log.name, log.failure)

    def _confirmed(self, replica: Replica, context: int, index: int | None) -> None:
        future = self._confirmations.pop((replica.group, context), None)
        if future is not None:
            self._answer(future, index)

    @staticmethod
    def _answer(future: asyncio.Future[int], index: int | None) -> None:
        if future.done():
            return
        if index is None:
            future.set_exception(ConnectionError("no longer the leader"))
        else:
            future.set_result(index)

    # -- the end of a turn ---------------------------------------------------------------

    def _queue_control(self, replica: Replica, message: AnyMessage) -> None:
        if self.on_control is not None:
            self.on_control(replica, message)
        self._outbox.control(replica, message)

    def _end_turn(self) -> None:
        if self._stopped:
            return
        # Send before the sync: a follower's sync takes as long as ours and begins when it gets the entries.
        if self._outbox.is_due:
            try:
                self._outbox.flush()
            except Exception as error:  # noqa: BLE001  # ends the process
                self.fail_process(error)
                return
        if self._waiting:
            self._wait()
        elif self.receive_budget.turn_bytes:
            self.receive_budget.forget()

    def _wait(self) -> None:
        """Request the sync after which `_synced` notifies the cores and sends the messages that wait for it.

        For logs with the flush policy `interval` a write is enough, unless other logs need a sync anyway.
        """
        waiting, self._waiting = self._waiting, {}
        self.syncs += 1
        held = self.receive_budget.hold() if self.receive_budget.turn_bytes else 0
        self._storage.when_stored(lambda failure: self._synced(failure, waiting, held))

    def _synced(self, failure: BaseException | None, waiting: _Waiting, held: int) -> None:
        """Notify the cores that a sync has finished, and send the messages that waited for it.

        `held` bytes of the receive budget waited for the sync, too, and are released.
        """
        if held:
            self.receive_budget.release(held)
        if self._stopped:
            return
        if failure is not None:
            # The journal failed. A failure of one log does not come here, as the journal has its entries.
            self.fail_process(failure)
            return
        try:
            for replica, (messages, written) in waiting.items():
                if not self.is_current(replica):
                    continue
                for message in messages:
                    self._queue_control(replica, message)
                try:
                    replica.core.persisted(written)
                except Exception as error:  # noqa: BLE001  # stops this replica
                    self.stop_replica(replica, error)
                else:
                    self.process_ready(replica)
            # Answers to what just became durable leave now, not at the end of another turn.
            if self._outbox.is_due:
                self._outbox.flush()
        except Exception as error:  # noqa: BLE001  # ends the process
            self.fail_process(error)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and how many groups are run, led and quiesced now."""
        return {
            "groups": len(self.replicas),
            "stopped_replicas": self.stopped_replicas,
            "leading": sum(replica.leading for replica in self.replicas.values()),
            "quiesced_groups": self._quiescence.quiesced_group_count,
            "unquiesced": self._quiescence.unquiesced,
            "keepalives_sent": self._quiescence.keepalives_sent,
            "proposals": self.proposals,
            "syncs": self.syncs,
            "dropped_messages": self._outbox.dropped_messages + self.unknown_groups,
            "bad_frames": self.bad_frames,
            "refused_frames": self.refused_frames,
            "second_leaders": self.second_leaders,
            "stalls": self._timekeeper.stalls,
            "receive_pauses": self.receive_budget.pauses,
            "elections_waiting": self._timekeeper.elections_waiting,
            "elections": self.elections,
            "leaderships_lost": self.leaderships_lost,
        }

    # -- end ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop at once: from now on the driver ignores inputs and sends no messages."""
        self._stopped = True
        self._timekeeper.close()
        self._keepalives.close()
        self._outbox.close()

    async def close(self) -> None:
        """Send what was gathered and stop. Recorded entries are synced when the storage is closed."""
        if not self._stopped:
            self._outbox.flush()
        self.stop()
        for future in self._confirmations.values():
            self._answer(future, None)
            if not future.cancelled():
                future.exception()
        self._confirmations.clear()
