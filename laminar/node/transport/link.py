"""One connection between two processes: frames in, frames out, nothing about their meaning.

A frame is a header of 16 bytes, little-endian, and a payload:

    0 length u32 (of the payload) | 4 kind u8 | 5 zero u8 | 6 zero u16 | 8 number u32 | 12 crc u32

`number` counts the frames of one direction of one connection from 0, so a lost or doubled one can't go
unnoticed; `crc` is the CRC32C of header bytes 0..12 and the payload. After a handshake that has agreed on
keys a MAC of 16 bytes stands in the place of `crc` (`laminar.node.transport.frame_check`). A frame that
breaks a rule ends the connection.

In: the first bytes of a frame arrive in a buffer that all links of a transport share; a frame that is
complete there is copied out (it is small), the rest of an incomplete one is received straight into a buffer
of its own, so a frame of 1 MiB is not copied a second time (but for its first 16 KiB at most). Either way
the receiver may keep what it gets. A message of a bulk link that is larger than a frame travels as frames of
kind PART and a last one of its own kind, and is received as one.

Out: parts are never joined when they are big. What is sent in one turn of the loop leaves in one write at its
end, or at once if that is asked for. Handshake, calls, pings and reconnecting are
`laminar.node.transport.transport`'s.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, cast

from laminar.node.transport.frame_check import MAC_BYTES, Buffer, Checksum, FrameCheck, is_right
from laminar.node.transport.handshake import MAX_HANDSHAKE_BYTES, Channel

HEADER = struct.Struct("<IBBHI")
"""The header of a frame without its check."""
HEADER_SIZE = HEADER.size + MAC_BYTES
"""The most that a header has."""
MAX_FRAME_BYTES = 64 << 20
MAX_MESSAGE_BYTES = 512 << 20
"""The largest message of a bulk link; above `MAX_FRAME_BYTES` it travels in parts. New entries are never that
large (`max_entry_bytes` of `raft.values.Settings`); logs written before that limit may have larger ones,
which must reach the followers.
"""
SHARED_BUFFER_BYTES = 256 << 10
_BULK_READ_BYTES = 16 << 10
"""A bulk link reads no more than this ahead of a frame's own buffer: it bounds what is copied of a big
frame.
"""
_JOIN_BELOW_BYTES = 4 << 10
"""Neighbouring parts smaller than this are joined: copying them costs less than an entry in the write
vector.
"""
_JOIN_BELOW_TLS_BYTES = 16 << 10
"""The same with TLS, where each part becomes a record of its own at least: to seal and open one more costs
more than to copy the bytes of a whole one.
"""
_BULK_HIGH_WATER_BYTES = 1 << 20
STUCK_MS = 60_000
"""A connection ends when bytes are not acknowledged for this long; without that the kernel would try for a
quarter of an hour. It is longer than a peer stops reading because its receive budget is used up.
"""


class FrameKind(IntEnum):
    """The kind of a frame; the payload's form is defined by `laminar.node.transport.transport`."""

    HELLO = 1
    REPLY = 2
    PROOF = 3
    REFUSED = 4
    DATA = 5
    CALL = 6
    ANSWER = 7
    FAILURE = 8
    PING = 9
    PONG = 10
    PART = 11


_KINDS = frozenset(FrameKind)


_CHECKSUM = Checksum()


class LinkOwner(Protocol):
    """The receiver of what links report: opened, a frame, lost. All calls come from inside the loop."""

    def link_made(self, link: Link) -> None:
        """React to the opening of the link's connection: frames can be sent and will come."""

    def link_frame(self, link: Link, kind: int, payload: memoryview) -> None:
        """Process a whole frame that has arrived over the link."""

    def link_lost(self, link: Link, error: Exception | None) -> None:
        """React to the end of the link's connection, on either side.

        `error` is the cause, if there is one.
        """


class Link(asyncio.BufferedProtocol):
    """One connection, incoming or outgoing. `queue_limit_bytes` bounds the bytes that wait to be sent.

    Frames passed to `send` before `establish` wait; `send_at_once` sends the frames of the handshake.
    """

    def __init__(
        self,
        owner: LinkOwner,
        loop: asyncio.AbstractEventLoop,
        shared: memoryview,
        *,
        channel: Channel | None,
        queue_limit_bytes: int,
    ) -> None:
        self._owner = owner
        self._loop = loop
        self._shared = shared
        self.channel = channel
        self.queue_limit_bytes = queue_limit_bytes
        self.established = False
        self.closing = False
        self.close_reason = ""
        self.received = False
        """Set whenever bytes arrive; the owner clears it when it looks for silence."""
        self.forged = False
        """Whether it ended because of a frame that the peer did not make, or did not make for this place."""
        self.frames_in = 0
        self.frames_out = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.transport: asyncio.Transport | None = None
        self._max_frame_bytes = MAX_HANDSHAKE_BYTES
        self._remnant = b""
        self._body: bytearray | None = None
        self._body_view = memoryview(b"")
        self._body_filled = 0
        self._body_head = b""
        self._body_check = b""
        self._check_sent: FrameCheck = _CHECKSUM
        self._check_received: FrameCheck = _CHECKSUM
        self._received_parts = bytearray()
        # Frames that wait for the end of the handshake, which decides on their check.
        self._early: list[tuple[FrameKind, Sequence[Buffer], int]] = []
        self._outgoing: list[Buffer] = []
        self._outgoing_bytes = 0
        self._join_below_bytes = _JOIN_BELOW_BYTES
        self._flush_scheduled = False
        self._writing_paused = False

    def __repr__(self) -> str:
        state = "closing" if self.closing else "established" if self.established else "opening"
        channel = self.channel.name.lower() if self.channel else "unknown"
        return (
            f"<Link {channel} {state} in={self.frames_in} out={self.frames_out} queued={self.queued_bytes}>"
        )

    # ---- outgoing

    @property
    def queued_bytes(self) -> int:
        """The bytes that were passed to `send` and have not been given to the kernel."""
        held = 0 if self.transport is None or self.closing else self.transport.get_write_buffer_size()
        return self._outgoing_bytes + held

    def has_room(self, size: int) -> bool:
        """Return whether a payload of `size` bytes fits the queue. An empty queue takes any frame."""
        queued = self.queued_bytes
        return queued == 0 or queued + size + HEADER_SIZE <= self.queue_limit_bytes

    def send(self, kind: FrameKind, parts: Sequence[Buffer], size: int, *, at_once: bool = False) -> None:
        """Queue one frame of `size` bytes; it leaves at the end of this turn of the loop, or `at_once`.

        `parts` are kept, not copied: the caller must not change them afterwards. `size` is at most `largest`.
        """
        if size > MAX_FRAME_BYTES:
            assert size <= self.largest, f"message of {size} bytes, at most {self.largest}"
            parts, size = self._send_beginning(parts, size)
        self._queue(kind, parts, size)
        if at_once:
            self._flush()
        else:
            self._schedule_flush()

    @property
    def largest(self) -> int:
        """Size in bytes of the largest message that can be sent."""
        return MAX_MESSAGE_BYTES if self.channel is Channel.BULK else MAX_FRAME_BYTES

    def _send_beginning(self, parts: Sequence[Buffer], size: int) -> tuple[list[Buffer], int]:
        """Queue all but the last frame of a message; return the rest, and its bytes."""
        rest = deque(memoryview(part) for part in parts)
        while size > MAX_FRAME_BYTES:
            frame: list[Buffer] = []
            room = MAX_FRAME_BYTES
            while room:
                part = rest.popleft()
                if len(part) > room:
                    rest.appendleft(part[room:])
                frame.append(part[:room])
                room -= len(frame[-1])
            self._queue(FrameKind.PART, frame, MAX_FRAME_BYTES)
            size -= MAX_FRAME_BYTES
        return list(rest), size

    def _queue(self, kind: FrameKind, parts: Sequence[Buffer], size: int) -> None:
        self._outgoing_bytes += HEADER.size + self._check_sent.size + size
        if not self.established:
            self._early.append((kind, parts, size))
            return
        self._outgoing.append(self._header(kind, parts, size))
        self._outgoing += parts

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and self.established:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_due)

    def send_at_once(self, kind: FrameKind, payload: bytes) -> None:
        """Write a frame of the handshake, ahead of what waits for the handshake's end."""
        assert self.transport is not None and not self.established, f"handshake frame {kind!r} out of place"
        self.transport.write(self._header(kind, (payload,), len(payload)) + payload)
        self.frames_out = 0  # frames of the handshake are not numbered

    def _header(self, kind: FrameKind, parts: Sequence[Buffer], size: int) -> bytes:
        assert size <= MAX_FRAME_BYTES, f"frame of {size} bytes, at most {MAX_FRAME_BYTES}"
        head = HEADER.pack(size, kind, 0, 0, self.frames_out & 0xFFFFFFFF)
        self.frames_out += 1
        return head + self._check_sent.of(head, parts)

    def _flush_due(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._writing_paused or self.closing or self.transport is None or not self._outgoing:
            return
        self.bytes_out += self._outgoing_bytes
        outgoing, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        try:
            self.transport.writelines(join_small(outgoing, below_bytes=self._join_below_bytes))
        except (OSError, RuntimeError) as error:
            # Its loop has closed it, and has not said so yet. That is no fault of what was to be sent.
            self.abort(f"cannot be written to: {error}")

    def establish(
        self, channel: Channel, *, sent: FrameCheck | None = None, received: FrameCheck | None = None
    ) -> None:
        """End the handshake: large frames are accepted now, and what waited is sent.

        `sent` and `received` compute the checks of outgoing and incoming frames from now on; None stands for
        checksums.
        """
        assert self.transport is not None and not self.established, f"established twice: {self!r}"
        self.channel = channel
        self.established = True
        self._max_frame_bytes = MAX_FRAME_BYTES
        high = _BULK_HIGH_WATER_BYTES if channel is Channel.BULK else 2 * self.queue_limit_bytes
        self.transport.set_write_buffer_limits(high=high)
        self._check_sent, self._check_received = sent or _CHECKSUM, received or _CHECKSUM
        early, self._early, self._outgoing_bytes = self._early, [], 0
        for kind, parts, size in early:
            self._queue(kind, parts, size)
        self._flush()

    def close(self, reason: str) -> None:
        """Send what is queued, then close the connection. The first reason given is kept."""
        self._flush()
        self._end(reason)
        if self.transport is not None:
            self.transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection at once. The first reason given is kept."""
        self._end(reason)
        if self.transport is not None:
            self.transport.abort()

    def _end(self, reason: str) -> None:
        self.close_reason = self.close_reason or reason
        self.closing = True
        self._early = []
        self._outgoing = []
        self._outgoing_bytes = 0

    def pause_reading(self) -> None:
        """Stop reading, so that the kernel's buffer fills and the peer has to wait."""
        if self.transport is not None and not self.closing:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self.transport is not None and not self.closing:
            self.transport.resume_reading()

    # ---- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection (asyncio)."""
        self.transport = cast(asyncio.Transport, transport)
        _end_when_stuck(self.transport)
        if transport.get_extra_info("sslcontext") is not None:
            self._join_below_bytes = _JOIN_BELOW_TLS_BYTES
        if self.closing:  # aborted while the connection was being made
            self.transport.abort()
            return
        self._owner.link_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Release the buffers and report the end to the owner (asyncio)."""
        self._end("connection closed")
        self._body = None
        self._body_view = memoryview(b"")
        self._received_parts = bytearray()
        self._owner.link_lost(self, error)

    def pause_writing(self) -> None:
        """Stop writing and let frames wait, because the kernel's buffer is full (asyncio)."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Write the frames that wait, because the kernel's buffer has room again (asyncio)."""
        self._writing_paused = False
        self._flush()

    def eof_received(self) -> bool:
        """Close the connection, as half of one is of no use (asyncio)."""
        return False  # a half-closed connection is of no use to us: close it

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of the next bytes: a large frame's own, or the shared one (asyncio)."""
        if self._body is not None:
            return self._body_view[self._body_filled :]
        # The loop calls `buffer_updated` before it asks any other link, so one buffer serves them all; only
        # the beginning of a header may have to be kept in between, and is put back here.
        kept = len(self._remnant)
        self._shared[:kept] = self._remnant
        end = _BULK_READ_BYTES if self.channel is Channel.BULK else SHARED_BUFFER_BYTES
        return self._shared[kept:end]

    def buffer_updated(self, nbytes: int) -> None:
        """Take `nbytes` that were received into the buffer returned last (asyncio)."""
        self.received = True
        self.bytes_in += nbytes
        if self._body is not None:
            self._body_filled += nbytes
            if self._body_filled == len(self._body):
                self._finish_body()
            return
        end = len(self._remnant) + nbytes
        self._remnant = b""
        self._split(end)

    # ---- incoming

    def _split(self, end: int) -> None:
        """Deliver the complete frames of the shared buffer's first `end` bytes, and keep the remainder."""
        position = 0
        shared = self._shared
        # The handshake's last frame changes the check of those behind it.
        while end - position >= (header := HEADER.size + self._check_received.size):
            length, kind, zero, zeros, number = HEADER.unpack_from(shared, position)
            if not self._acceptable(length, kind, zero | zeros, number):
                return
            head = bytes(shared[position : position + HEADER.size])
            check = bytes(shared[position + HEADER.size : position + header])
            begin = position + header
            position = begin + length
            if position > end:
                self._begin_body(shared[begin:end], length, head, check)
                return
            payload = bytes(shared[begin:position])
            # No link receives more bytes before the owner has handled this frame, so the rest of `shared`
            # is not overwritten.
            self._deliver(head, memoryview(payload), check)
            if self.closing:
                return
        self._remnant = bytes(shared[position:end])

    def _acceptable(self, length: int, kind: int, zeros: int, number: int) -> bool:
        expected = self.frames_in & 0xFFFFFFFF if self.established else 0
        if length <= self._max_frame_bytes and kind in _KINDS and zeros == 0 and number == expected:
            return True
        self.forged = self._check_received is not _CHECKSUM
        self.abort(f"bad frame: length {length}, kind {kind}, number {number}, expected {expected}")
        return False

    def _begin_body(self, first: memoryview, length: int, head: bytes, check: bytes) -> None:
        self._body = bytearray(length)
        self._body_view = memoryview(self._body)
        self._body_filled = len(first)
        self._body_view[: len(first)] = first
        self._body_head = head
        self._body_check = check

    def _finish_body(self) -> None:
        payload = self._body_view
        self._body = None
        self._body_view = memoryview(b"")
        self._deliver(self._body_head, payload, self._body_check)

    def _deliver(self, head: bytes, payload: memoryview, check: bytes) -> None:
        if not is_right(self._check_received.of(head, (payload,)), check):
            self.forged = self._check_received is not _CHECKSUM
            self.abort(
                f"bad frame: {'MAC' if self.forged else 'checksum'} of frame {self.frames_in} is wrong"
            )
            return
        kind = HEADER.unpack(head)[1]
        if self.established:
            self.frames_in += 1
        if kind == FrameKind.PART or self._received_parts:
            if (
                self.channel is not Channel.BULK
                or len(self._received_parts) + len(payload) > MAX_MESSAGE_BYTES
            ):
                self.abort(f"bad frame: a part too many, at frame {self.frames_in}")
                return
            self._received_parts += payload
            if kind == FrameKind.PART:
                return
            payload, self._received_parts = memoryview(self._received_parts), bytearray()
        self._owner.link_frame(self, kind, payload)


def join_small(parts: Sequence[Buffer], *, below_bytes: int) -> list[Buffer]:
    """Return the same bytes with runs of parts below a size joined; others unchanged, empty ones left out."""
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for part in parts:
        if len(part) < below_bytes:
            run.append(part)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(part)
    if run:
        joined.append(b"".join(run))
    return joined


def _end_when_stuck(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
