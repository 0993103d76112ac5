"""The serving side of a catch-up: committed entries of this shard's replicas, at a bounded rate.

Entries in sealed segments are read from the segment's file; entries after them, and those that the file does
not have, are read through the log. The serving replica need not lead: what it knows to be committed stays
committed. The source remembers which replica reads where, so that retention does not trim entries that are
still to be read (`reading_from`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from laminar.log.disk.errors import DamagedRange, EntriesTrimmed, StorageError
from laminar.node.catch_up.messages import (
    DAMAGED,
    GONE,
    PIECE_BYTES,
    Beginning,
    BeginningRequest,
    PieceRequest,
)
from laminar.node.catch_up.pace import Pace
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer, RemoteError

# A receiver that has requested nothing for this long no longer counts as reading.
SILENT_S = 15.0

ReadBytes = Callable[[str, int, int], Awaitable[bytes]]

_beginning_decoder = msgspec.msgpack.Decoder(BeginningRequest)
_piece_decoder = msgspec.msgpack.Decoder(PieceRequest)


@dataclass(slots=True)
class _Reader:
    index: int
    at_s: float


class Source:
    """Serves the committed entries of one shard's replicas to replicas in catch-up.

    `read_bytes(path, position, size)` reads a file without blocking the loop. `bytes_per_s` bounds all
    transfers together.
    """

    def __init__(
        self, *, by_group: Mapping[bytes, Partition], read_bytes: ReadBytes, bytes_per_s: int
    ) -> None:
        self._by_group = by_group
        self._read_bytes = read_bytes
        self._pace = Pace(bytes_per_s)
        self._readers: dict[tuple[bytes, int], _Reader] = {}
        self.sent_bytes = 0

    async def beginning(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a `BeginningRequest` with a `Beginning`.

        Raises:
            RemoteError: `GONE` when the replica is not here, has stopped, or knows of no committed entry.
        """
        request = _beginning_decoder.decode(payload)
        partition = self._partition(request.group)
        start, committed_index = partition.log.start, partition.committed_index
        if committed_index <= start.index:
            raise RemoteError(GONE, "nothing is known as committed here")
        self._note(request.group, request.receiver, start.index + 1)
        return msgspec.msgpack.encode(
            Beginning(
                start.index,
                start.term,
                start.offset,
                start.time_ms,
                committed_index,
                partition.log.size_bytes,
            )
        )

    async def piece(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a `PieceRequest` with frames back to back, from the requested entry on.

        The last frame may be cut off; the first never is.

        Raises:
            RemoteError: `GONE` when the entry is not among the committed ones here, `DAMAGED` when it is
                damaged.
        """
        request = _piece_decoder.decode(payload)
        partition = self._partition(request.group)
        self._note(request.group, request.receiver, request.index)
        await self._pace.take(PIECE_BYTES)
        try:
            data = b"" if request.verified else await self._from_file(partition, request.index)
            if not data:
                self._check(partition, request.index)
                frames = await partition.log.read(
                    request.index, partition.committed_index, max_bytes=PIECE_BYTES
                )
                data = b"".join(frames)
        except DamagedRange as error:
            raise RemoteError(DAMAGED, str(error)) from error
        except EntriesTrimmed as error:
            raise RemoteError(GONE, str(error)) from error
        self._pace.correct(len(data) - PIECE_BYTES)
        self.sent_bytes += len(data)
        return data

    async def _from_file(self, partition: Partition, index: int) -> bytes:
        """Return bytes of the entry's sealed segment from the entry on, unverified.

        Empty if the entry's segment is not sealed or not all committed, or if the file lacks the entry.
        """
        log = partition.log
        self._check(partition, index)
        row = await log.find_index_entry(index)
        self._check(partition, index)
        segment = log.segment_of(index)
        if segment.last_index > partition.committed_index or segment.last_index == log.last_index:
            return b""
        size = min(max(PIECE_BYTES, row.size), segment.size - row.position)
        try:
            data = await self._read_bytes(segment.file.path, row.position, size)
        except (OSError, StorageError):
            return b""  # not written yet, gone, or unreadable: a read through the log tells which
        return data if len(data) >= row.size else b""

    @staticmethod
    def _check(partition: Partition, index: int) -> None:
        if not partition.log.start.index < index <= partition.committed_index:
            raise EntriesTrimmed(f"entry {index} is not among the committed ones of {partition.log.name}")

    def _partition(self, group: bytes) -> Partition:
        partition = self._by_group.get(group)
        if partition is None or partition.replica.failure is not None:
            raise RemoteError(GONE, "this replica is not here, or has stopped")
        return partition

    # -- the replicas that read ----------------------------------------------------------

    def _note(self, group: bytes, receiver: int, index: int) -> None:
        self._readers[(group, receiver)] = _Reader(index, asyncio.get_running_loop().time())

    def reading_from(self, group: bytes, receiver: int) -> int | None:
        """Return the index that a replica in catch-up requested last; None if none came for `SILENT_S`."""
        reader = self._readers.get((group, receiver))
        if reader is None:
            return None
        if asyncio.get_running_loop().time() - reader.at_s > SILENT_S:
            del self._readers[(group, receiver)]
            return None
        return reader.index

    def done(self, group: bytes, receiver: int) -> None:
        """Forget the position of a replica's catch-up, which is over: the leader sends it appends again."""
        self._readers.pop((group, receiver), None)

    @property
    def readers(self) -> int:
        """Number of replicas that read here; a silent one counts until `reading_from` is called for it."""
        return len(self._readers)
