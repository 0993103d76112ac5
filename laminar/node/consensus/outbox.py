"""The messages that leave a process at the end of a turn, in one frame per peer and channel for all groups.

Messages and appends are gathered here by address. Consecutive appends of one turn become one append. Of
several commit notices to a follower only the last is sent, and none if an append carries that commit index.
Entries that are only on disk are first read outside of the loop. Later appends to the same follower wait for
that read, because the follower could not append their entries before the earlier ones. A message that can't
be sent is dropped: Raft allows every message to be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from laminar.batch import Buffer
from laminar.log.disk.errors import DamagedRange, StorageError
from laminar.node.consensus.raft_frames import bulk_frame, control_frame, keepalive_frame
from laminar.node.consensus.raft_wire import Keepalive
from laminar.node.consensus.replica import Replica
from laminar.node.transport.transport import Address, Channel, Transport
from raft.messages import AnyMessage, Append, Heartbeat
from raft.values import SendAppend

_log = logging.getLogger("laminar.driver")

T = TypeVar("T")

BULK_FRAME_BYTES = 256 * 1024
READ_BYTES = 4 * 1024 * 1024
MOST_READS = 64


# A group and one of its members.
_Member = tuple[bytes, int]


class _GatheredAppend:
    """An append message with its batches; the next append of the same turn may be joined to it."""

    __slots__ = ("frames", "message", "size_bytes")

    def __init__(self, message: Append, frames: list[Buffer]) -> None:
        self.message = message
        self.frames = frames
        self.size_bytes = sum(map(len, frames))

    def takes(self, message: Append, size_bytes: int) -> bool:
        """Return whether the entries of `message` can be joined to this append.

        They can if they are the next ones, for the same incarnation of the follower, and fit into a frame.
        """
        mine = self.message
        return (
            mine.prev_index + len(self.frames) == message.prev_index
            and mine.term == message.term
            and mine.receiver_incarnation == message.receiver_incarnation
            and self.size_bytes + size_bytes <= BULK_FRAME_BYTES
        )

    def add(self, message: Append, frames: Sequence[Buffer], size_bytes: int) -> None:
        """Join the entries of an append for which `takes` returned True."""
        self.frames += frames
        self.size_bytes += size_bytes
        self.message = msgspec.structs.replace(
            self.message, commit=message.commit, goal=message.goal, entry_count=len(self.frames)
        )


class Outbox:
    """The outgoing messages of one process.

    `turn()` is called when there is something to flush (`is_due`); `is_current(replica)` says whether the
    driver still runs that replica. `on_unsendable(group, error)` is called for a message that cannot be put
    into a frame, which is dropped. `address_of(node, replica)` returns the address of the process on `node`
    that owns the replica's group, or None while it is unknown.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        address_of: Callable[[str, Replica], Address | None],
        is_current: Callable[[Replica], bool],
        turn: Callable[[], None],
        on_unsendable: Callable[[bytes, Exception], None],
    ) -> None:
        self._transport = transport
        self._address_of = address_of
        self._is_current = is_current
        self._turn = turn
        self._on_unsendable = on_unsendable
        self._loop = asyncio.get_running_loop()
        self._control: dict[Address, list[AnyMessage]] = {}
        self._bulk: dict[Address, list[_GatheredAppend]] = {}
        # The last append in `_bulk` by group and follower.
        self._appends: dict[_Member, _GatheredAppend] = {}
        # Commit notices to followers; once `_notices_due` is True the next flush sends them.
        self._notices: dict[_Member, tuple[Address, Heartbeat]] = {}
        self._notices_due = False
        # By group and follower, the appends that wait until entries are read from disk.
        self._reads: dict[_Member, deque[SendAppend]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.dropped_messages = 0
        # Whether something was gathered that the next flush sends.
        self.is_due = False

    def _gathered(self) -> None:
        self.is_due = True
        self._turn()

    def address(self, replica: Replica, receiver: int) -> Address | None:
        """Return the address of a group's member; if it is unknown, count a drop and return None."""
        node = replica.nodes.get(receiver)
        address = self._address_of(node, replica) if node is not None else None
        if address is None:
            self.dropped_messages += 1
        return address

    def control(self, replica: Replica, message: AnyMessage) -> None:
        """Gather a small message (one without entries).

        A heartbeat that only tells a follower the commit index (a commit notice) is kept for one more turn.
        The requests that wait for the commit run first, and an append that they cause carries the commit
        index, too.
        """
        address = self.address(replica, message.receiver)
        if address is None:
            return
        if isinstance(message, Heartbeat):
            key = (message.group, message.receiver)
            if not message.round:
                if not self._notices:
                    self._loop.call_soon(self._send_notices)
                self._notices[key] = (address, message)
                return
            # This heartbeat carries the commit index, too. It may make the follower quiesce, and an older
            # notice sent after it would wake the follower.
            self._notices.pop(key, None)
        self._control.setdefault(address, []).append(message)
        self._gathered()

    def _send_notices(self) -> None:
        if self._notices:
            self._notices_due = True
            self._gathered()

    def append(self, replica: Replica, append: SendAppend) -> None:
        """Gather an append of entries, or a probe: an empty one, to ask whether earlier ones have arrived."""
        address = self.address(replica, append.message.receiver)
        if address is None:
            return
        key = (replica.group, append.message.receiver)
        behind = self._reads.get(key)
        if behind is not None:
            # This append must leave after those that are being read. If it came first, the follower could
            # not join its entries, or would answer a probe as if the others were lost; then all of them
            # would be read and sent again.
            if len(behind) < MOST_READS:
                behind.append(append)
            return
        if append.first_index > append.last_index:
            self._control.setdefault(address, []).append(append.message)
            self._gathered()
            return
        try:
            frames = replica.log.read_nowait(append.first_index, append.last_index, max_bytes=1 << 31)
        except StorageError:
            frames = None  # The read below reports the error; other replicas are not affected.
        if frames is not None and len(frames) == append.last_index - append.first_index + 1:
            self._pack(address, key, append.message, list(frames))
            return
        self._reads[key] = deque((append,))
        task = self._loop.create_task(self._read_and_send(replica, address, key))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _pack(self, address: Address, key: _Member, message: Append, frames: list[Buffer]) -> None:
        size_bytes = sum(map(len, frames))
        last = self._appends.get(key)
        if last is not None and last.takes(message, size_bytes):
            last.add(message, frames, size_bytes)
            return
        gathered = self._appends[key] = _GatheredAppend(message, frames)
        self._bulk.setdefault(address, []).append(gathered)
        self._gathered()

    def keepalive(self, address: Address, keepalive: Keepalive) -> None:
        """Send a keepalive, which replaces the heartbeats of all groups quiesced between two processes."""
        if not self._transport.send(address, Channel.CONTROL, keepalive_frame(keepalive)):
            self.dropped_messages += 1

    async def _read_and_send(self, replica: Replica, address: Address, key: _Member) -> None:
        """Read entries from disk off the loop, in order; gather their appends if the term is unchanged."""
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
                if not self._is_current(replica):
                    return
                if replica.core.term == append.message.term:
                    self._pack(address, key, append.message, frames)
        except DamagedRange:
            # The damage was logged when it was found. Raft tries again until the bytes are repaired.
            pass
        except (StorageError, AssertionError, LookupError) as error:
            # The core expects that any message may be lost, and sends the entries again.
            _log.warning(
                "%s: entries from %d on were not sent to a follower and will be tried again: %s",
                replica.name,
                append.first_index,
                error,
            )
        finally:
            del self._reads[key]

    def flush(self) -> None:
        """Send everything that was gathered."""
        self.is_due = False
        if self._bulk:
            bulk, self._bulk, self._appends = self._bulk, {}, {}
            for address, appends in bulk.items():
                for gathered in appends if self._notices else ():
                    self._drop_notices_said_by(gathered.message)
                for portion in _portions(appends):
                    self._send(address, Channel.BULK, bulk_frame, portion, lambda each: each[0].group)
        if self._notices_due:
            self._notices_due = False
            notices, self._notices = self._notices, {}
            for address, notice in notices.values():
                self._control.setdefault(address, []).append(notice)
        if self._control:
            control, self._control = self._control, {}
            for address, messages in control.items():
                self._send(address, Channel.CONTROL, control_frame, messages, lambda each: each.group)

    def _send(
        self,
        address: Address,
        channel: Channel,
        frame: Callable[[Sequence[T]], list[Buffer]],
        gathered: Sequence[T],
        group_of: Callable[[T], bytes],
    ) -> None:
        """Send all of the gathered messages in one frame.

        If a message cannot be encoded, only this message is dropped, and its replica is stopped.
        """
        try:
            # The frame has all messages of this turn for the address, so it need not wait for the turn's end.
            sent = self._transport.send(address, channel, frame(gathered), at_once=True)
        except Exception as error:  # noqa: BLE001  # stops the replica that it is of
            if len(gathered) > 1:
                for each in gathered:
                    self._send(address, channel, frame, [each], group_of)
                return
            self._on_unsendable(group_of(gathered[0]), error)
            sent = False
        if not sent:
            self.dropped_messages += len(gathered)

    def discard(self, group: bytes) -> None:
        """Drop all messages gathered for this group.

        Entries that are being read from disk are not sent either, because the replica is not current then.
        """
        for address, messages in self._control.items():
            self._control[address] = [each for each in messages if each.group != group]
        for address, appends in self._bulk.items():
            self._bulk[address] = [each for each in appends if each.message.group != group]
        self._appends = {key: each for key, each in self._appends.items() if key[0] != group}
        self._notices = {key: each for key, each in self._notices.items() if key[0] != group}

    def _drop_notices_said_by(self, append: Append) -> None:
        """Drop a gathered commit notice if this append carries the same or a later commit index."""
        key = (append.group, append.receiver)
        waiting = self._notices.get(key)
        if waiting is not None and waiting[1].commit <= append.commit:
            del self._notices[key]

    def close(self) -> None:
        """Stop reading entries from disk."""
        for task in list(self._tasks):
            task.cancel()


def _portions(appends: Sequence[_GatheredAppend]) -> Iterable[list[tuple[Append, list[Buffer]]]]:
    """Group appends into portions of about 256 KiB, one frame each, so that none waits behind megabytes."""
    portion: list[tuple[Append, list[Buffer]]] = []
    size_bytes = 0
    for gathered in appends:
        if portion and size_bytes + gathered.size_bytes > BULK_FRAME_BYTES:
            yield portion
            portion, size_bytes = [], 0
        portion.append((gathered.message, gathered.frames))
        size_bytes += gathered.size_bytes
    if portion:
        yield portion
