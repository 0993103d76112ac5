"""The one driver of Raft: performs what the cores of a process decide.

Every input of a core (a message, a proposal, a timer, a finished sync) is followed by
`settle`, which takes the core's `Ready` and applies it to the log in memory at once. What
must leave the process or reach the disk is collected for the turn: at its end all messages
that may leave leave, one frame per peer and channel, and one sync of the shard's journal is
asked for. When that sync returns, the answers that waited for it are sent. So a loop turn
costs one write per peer and one `fdatasync`, however many groups it touched.

The driver knows groups, logs and addresses; it knows neither topics nor HTTP.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from laminar.batch import BatchError, verify
from laminar.log.errors import BrokenChain, StorageClosed, StorageError
from laminar.log.storage import Storage
from laminar.node.clock import Clock
from laminar.node.replica import Replica, entry_of
from laminar.node.transport import Address, Channel, Peer, Transport
from laminar.node.wire import Buffer, ConfigurationRecord, bulk_frame, control_frame, read_frame
from raft.messages import AnyMessage, Append
from raft.values import NotLeader, Role, SendAppend

_log = logging.getLogger("laminar.driver")

BULK_FRAME_BYTES = 256 * 1024
READ_BYTES = 4 * 1024 * 1024
MOST_READS = 64


class Driver:
    """Runs the replicas of one process over one storage and one transport.

    `address_of(node, group)` gives the address of the process on `node` that owns the group,
    or None while it is not known. `on_fatal(error)` is called once, when the journal failed or
    when our own code did in the middle of a step: the process must end, as nothing it holds in
    memory may be believed any more. From that call on the driver does nothing.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        transport: Transport,
        clock: Clock,
        address_of: Callable[[str, Replica], Address | None],
        on_fatal: Callable[[BaseException], None],
        heartbeat_ms: int = 200,
    ) -> None:
        self._storage = storage
        self._transport = transport
        self._clock = clock
        self._address_of = address_of
        self._on_fatal = on_fatal
        self._heartbeat_ms = heartbeat_ms
        self._loop = asyncio.get_running_loop()
        self.replicas: dict[bytes, Replica] = {}
        self._turn_scheduled = False
        self._control: dict[Address, list[AnyMessage]] = {}
        self._bulk: dict[Address, list[tuple[Append, list[Buffer]]]] = {}
        self._waiting: list[tuple[Replica, list[AnyMessage], int, int]] = []
        self._timers: list[tuple[int, int, Replica]] = []
        self._timer_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms: int | None = None
        # Appends whose entries must be read from disk, by group and follower; there while one is read.
        self._reads: dict[tuple[bytes, int], deque[SendAppend]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._confirmations: dict[tuple[bytes, int], asyncio.Future[int]] = {}
        self._context = 0
        self._stopped = False
        self._resigned = asyncio.Event()
        self.dropped_messages = 0
        self.bad_frames = 0
        self.syncs = 0
        self.proposals = 0
        self.stalls = 0
        transport.on_frame = self.on_frame

    # -- replicas ----------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Start driving a replica."""
        assert replica.group not in self.replicas, f"group {replica.group.hex()} is driven already"
        self.replicas[replica.group] = replica
        self.settle(replica)

    def drives(self, replica: Replica) -> bool:
        """Whether this replica, and not one that came before or after it, is driven here."""
        return self.replicas.get(replica.group) is replica

    def remove(self, group: bytes, error: Exception) -> None:
        """Stop driving a replica, because of `error`; whoever waits for something of it is told."""
        replica = self.replicas.pop(group, None)
        if replica is None:
            return
        replica.failure = error
        for key in [key for key in self._confirmations if key[0] == group]:
            self._answer(self._confirmations.pop(key), None)
        replica.machine.failed(error)

    def propose(self, replica: Replica, frame: bytearray | memoryview) -> tuple[int, int]:
        """Propose one unstamped batch; (index, term) of its place. Raises NotLeader."""
        if not self.drives(replica):
            raise NotLeader(0)
        place = replica.propose(frame, now_ms=self._clock.monotonic_ms())
        self.proposals += 1
        self.settle(replica)
        return place.index, place.term

    def propose_configuration(self, replica: Replica, record: ConfigurationRecord) -> None:
        """Propose a configuration one step from the present. Raises NotLeader, ConfigurationRefused."""
        if not self.drives(replica):
            raise NotLeader(0)
        replica.propose_configuration(record, now_ms=self._clock.monotonic_ms())
        self.settle(replica)

    async def hand_over(self, *, timeout_s: float) -> None:
        """Before an orderly end: give each leadership to the follower that is furthest, and wait for it."""
        now_ms = self._clock.monotonic_ms()
        for replica in list(self.replicas.values()):
            if not replica.core.is_leader:
                continue
            voters = [member for member in replica.configuration.voters if member != replica.replica_id]
            if voters:
                replica.core.transfer_leadership(max(voters, key=replica.match_index), now_ms=now_ms)
                self.settle(replica)
        try:
            async with asyncio.timeout(timeout_s):
                while any(
                    replica.leading and len(replica.configuration.voters) > 1
                    for replica in self.replicas.values()
                ):
                    self._resigned.clear()
                    await self._resigned.wait()
        except TimeoutError:
            _log.info("not all leaderships could be handed over in %g s", timeout_s)

    def campaign(self, replica: Replica) -> None:
        """Stand for election now: the first replica of a fresh group."""
        replica.core.campaign(now_ms=self._clock.monotonic_ms())
        self.settle(replica)

    def confirm(self, replica: Replica) -> asyncio.Future[int]:
        """A commit index that was the group's at some time after this call (ReadIndex).

        Fails with ConnectionError when this replica is not the leader or ceases to be.
        """
        future: asyncio.Future[int] = self._loop.create_future()
        if not self.drives(replica):
            self._answer(future, None)
            return future
        self._context += 1
        self._confirmations[(replica.group, self._context)] = future
        replica.core.read_index(self._context, now_ms=self._clock.monotonic_ms())
        self.settle(replica)
        return future

    def suspect_leader(self, replica: Replica) -> None:
        """News: the process that leads this group is gone; this replica may pre-vote soon."""
        replica.core.suspect_leader(now_ms=self._clock.monotonic_ms())
        self.settle(replica)

    def unreachable(self, replica: Replica, member: int) -> None:
        """News: messages to a follower may be lost; the leader asks where it stands before it sends more."""
        replica.core.unreachable(member)
        self.settle(replica)

    # -- inputs ------------------------------------------------------------------------

    def on_frame(self, peer: Peer, channel: Channel, frame: memoryview) -> None:
        """A frame of Raft messages from a peer."""
        if self._stopped:
            return
        try:
            self._take_frame(peer, frame)
        except Exception as error:  # noqa: BLE001  # ends the process
            self._die(error)

    def _take_frame(self, peer: Peer, frame: memoryview) -> None:
        try:
            messages = read_frame(frame)
        except ValueError as error:
            self.bad_frames += 1
            _log.warning("a frame from %s does not add up: %s", peer, error)
            return
        now_ms = self._clock.monotonic_ms()
        replicas = self.replicas
        for message, frames in messages:
            replica = replicas.get(message.group)
            if replica is None:
                self.dropped_messages += 1
                continue
            try:
                entries = [entry_of(data, verify(data)) for data in frames]
            except (BatchError, ValueError, msgspec.DecodeError) as error:
                self.bad_frames += 1
                _log.warning("a batch from %s for %s is damaged: %s", peer, replica.name, error)
                continue
            replica.core.receive(message, entries, now_ms=now_ms)
            self.settle(replica)

    def settle(self, replica: Replica) -> None:
        """Apply what the core decided to the log in memory, and note what the turn must do."""
        if self._stopped or not self.drives(replica):
            return
        try:
            self._settle(replica)
        except Exception as error:
            self._die(error)
            raise

    def _die(self, error: BaseException) -> None:
        """The journal failed, or a mistake of ours left a core and its log in disagreement: no way on."""
        if self._stopped:
            return
        self._stopped = True
        for group in list(self.replicas):
            self.remove(group, StorageClosed(f"this process ends: {error!r}"))
        self._on_fatal(error)

    def _settle(self, replica: Replica) -> None:
        ready = replica.core.take_ready()
        must_sync = False
        # Before the entries: should the journal's frame be cut between them, a log must not be of a later
        # term than its replica.
        if ready.hard_state is not None:
            self._storage.record_hard_state(
                replica.replica_id, term=ready.hard_state.term, vote=ready.hard_state.vote
            )
            must_sync = True
        try:
            if ready.truncate_from is not None:
                replica.truncate(ready.truncate_from)
                must_sync = True
            if ready.entries:
                replica.append(ready.entries)
                must_sync = True
        except (StorageError, BrokenChain) as error:
            self._fail(replica, error)
            return
        for message in ready.messages:
            self._queue_control(replica, message)
        for append in ready.appends:
            self._queue_append(replica, append)
        if must_sync or ready.messages_after_sync:
            self._waiting.append(
                (replica, list(ready.messages_after_sync), replica.log.last_index, replica.log.last_term)
            )
            self._schedule_turn()
        leading = replica.core.role is Role.LEADER
        if leading != replica.leading:
            replica.leading = leading
            replica.machine.led(leading)
            if not leading:
                self._resigned.set()
        if ready.committed_index is not None:
            replica.machine.committed(ready.committed_index)
        for context, index in ready.reads:
            self._confirmed(replica, context, index)
        for context in ready.reads_failed:
            self._confirmed(replica, context, None)
        self._schedule_timer(replica)

    def _fail(self, replica: Replica, error: StorageError | BrokenChain) -> None:
        """This log cannot follow its core any more: the replica falls silent, all others go on.

        Nothing of what the core decided leaves, so nobody is told of entries that are not there.
        """
        _log.critical("%s stops: %s", replica.name, error)
        self.remove(replica.group, error)

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

    # -- what leaves -------------------------------------------------------------------

    def _address(self, replica: Replica, receiver: int) -> Address | None:
        node = replica.nodes.get(receiver)
        address = self._address_of(node, replica) if node is not None else None
        if address is None:
            self.dropped_messages += 1
        return address

    def _queue_control(self, replica: Replica, message: AnyMessage) -> None:
        address = self._address(replica, message.receiver)
        if address is not None:
            self._control.setdefault(address, []).append(message)
            self._schedule_turn()

    def _queue_append(self, replica: Replica, append: SendAppend) -> None:
        address = self._address(replica, append.message.receiver)
        if address is None:
            return
        if append.first_index > append.last_index:
            self._control.setdefault(address, []).append(append.message)
            self._schedule_turn()
            return
        key = (replica.group, append.message.receiver)
        behind = self._reads.get(key)
        if behind is not None:
            # It leaves behind those that are being read, or the follower could not join it to its log.
            if len(behind) < MOST_READS:
                behind.append(append)
            return
        frames = replica.log.read_nowait(append.first_index, append.last_index, max_bytes=1 << 31)
        if frames is not None and len(frames) == append.last_index - append.first_index + 1:
            self._bulk.setdefault(address, []).append((append.message, list(frames)))
            self._schedule_turn()
            return
        self._reads[key] = deque((append,))
        self._spawn(self._read_and_send(replica, address, key))

    async def _read_and_send(self, replica: Replica, address: Address, key: tuple[bytes, int]) -> None:
        """Entries that are only on disk: read them off the loop, in order, and send what is still true."""
        appends = self._reads[key]
        try:
            while appends:
                append = appends.popleft()
                frames: list[Buffer] = []
                index = append.first_index
                while index <= append.last_index:
                    more = await replica.log.read(index, append.last_index, max_bytes=READ_BYTES)
                    frames.extend(more)
                    index += len(more)
                if self._stopped or not self.drives(replica):
                    return
                if replica.core.term == append.message.term:
                    self._bulk.setdefault(address, []).append((append.message, frames))
                    self._schedule_turn()
        except (StorageError, AssertionError, LookupError) as error:
            # The core takes every message as one that may be lost: it asks again.
            _log.warning("%s: entries from %d on are not sent: %s", replica.name, append.first_index, error)
        finally:
            del self._reads[key]

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _schedule_turn(self) -> None:
        if not self._turn_scheduled and not self._stopped:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        if self._stopped:
            return
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self.syncs += 1
            future = self._storage.sync()
            future.add_done_callback(lambda done: self._synced(done, waiting))
        try:
            self._flush()
        except Exception as error:  # noqa: BLE001  # ends the process
            self._die(error)

    def _flush(self) -> None:
        if self._bulk:
            bulk, self._bulk = self._bulk, {}
            for address, appends in bulk.items():
                for group in _portions(appends):
                    if not self._transport.send(address, Channel.BULK, bulk_frame(group)):
                        self.dropped_messages += len(group)
        if self._control:
            control, self._control = self._control, {}
            for address, messages in control.items():
                if not self._transport.send(address, Channel.CONTROL, control_frame(messages)):
                    self.dropped_messages += len(messages)

    def _synced(
        self, done: asyncio.Future[None], waiting: list[tuple[Replica, list[AnyMessage], int, int]]
    ) -> None:
        if self._stopped or done.cancelled():
            return
        failure = done.exception()
        if failure is not None:
            self._die(failure)
            return
        try:
            for replica, messages, index, term in waiting:
                if not self.drives(replica):
                    continue
                for message in messages:
                    self._queue_control(replica, message)
                replica.core.persisted(index=index, term=term)
                self.settle(replica)
            # Answers to what just became durable leave now, not at the end of another turn.
            self._flush()
        except Exception as error:  # noqa: BLE001  # ends the process
            self._die(error)

    # -- time --------------------------------------------------------------------------

    def _schedule_timer(self, replica: Replica) -> None:
        # A deadline only ever moves later while nothing happens, so a replica has one
        # entry in the heap; when it comes up too early it is put back where it belongs.
        deadline = replica.core.deadline_ms()
        if deadline is None or (replica.scheduled_ms is not None and replica.scheduled_ms <= deadline):
            return
        replica.scheduled_ms = deadline
        self._timer_number += 1
        heapq.heappush(self._timers, (deadline, self._timer_number, replica))
        self._arm()

    def _arm(self) -> None:
        if not self._timers or self._stopped:
            return
        at_ms = self._timers[0][0]
        if self._timer is not None:
            if self._timer_at_ms is not None and self._timer_at_ms <= at_ms:
                return
            self._timer.cancel()
        delay_s = max(0, at_ms - self._clock.monotonic_ms()) / 1000
        self._timer_at_ms = at_ms
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        due_ms, self._timer_at_ms = self._timer_at_ms, None
        self._timer = None
        try:
            now_ms = self._clock.monotonic_ms()
            if due_ms is not None and now_ms - due_ms > self._heartbeat_ms // 2:
                self._after_stall(late_ms=now_ms - due_ms)
            self._expire(now_ms)
        except Exception as error:  # noqa: BLE001  # ends the process
            self._die(error)

    def _after_stall(self, *, late_ms: int) -> None:
        """This loop stood still: the silence was ours, so what lies in the sockets is read before anybody is
        taken for dead.
        """
        self.stalls += 1
        for replica in self.replicas.values():
            replica.core.postpone(by_ms=late_ms + self._heartbeat_ms)

    def _expire(self, now_ms: int) -> None:
        while self._timers and self._timers[0][0] <= now_ms:
            scheduled_ms, _, replica = heapq.heappop(self._timers)
            if replica.scheduled_ms != scheduled_ms or not self.drives(replica):
                continue  # an older entry of a replica whose deadline came nearer, or a removed one
            replica.scheduled_ms = None
            deadline = replica.core.deadline_ms()
            if deadline is not None and deadline <= now_ms:
                replica.core.expire(now_ms=now_ms)
                self.settle(replica)
            else:
                self._schedule_timer(replica)
        self._arm()

    # -- end ---------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop driving. What was recorded is synced by the storage's own close."""
        if not self._stopped:
            self._flush()
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        for future in self._confirmations.values():
            self._answer(future, None)
            if not future.cancelled():
                future.exception()
        self._confirmations.clear()


def _portions(
    appends: list[tuple[Append, list[Buffer]]],
) -> Iterable[list[tuple[Append, list[Buffer]]]]:
    """Group appends into frames of about 256 KiB, so that none waits behind megabytes of others."""
    portion: list[tuple[Append, list[Buffer]]] = []
    size = 0
    for append, frames in appends:
        bytes_here = sum(len(frame) for frame in frames)
        if portion and size + bytes_here > BULK_FRAME_BYTES:
            yield portion
            portion, size = [], 0
        portion.append((append, frames))
        size += bytes_here
    if portion:
        yield portion
