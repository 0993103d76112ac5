"""Read-ahead: a reader of small consecutive ranges gets larger reads.

One system call for each record would be too many. Where a read begins at the end of an earlier one, more is
read, up to a limit, and the verified frames are kept here, within a limit that all logs share. Frames are
found by log id, number of truncations and index: after a truncation the log asks with another number, so it
gets no older frames.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from laminar.log.disk.disk import Buffer

# Bytes of the first read of a sequence; each following read takes twice as many as the one before.
FIRST_BYTES = 16 * 1024
MOST_BYTES = 256 * 1024
# The number of readers of one log that are remembered.
_READERS = 16

_Key = tuple[int, int, int]


class ReadAheadCache:
    """A cache of frames that were read ahead, for all logs of a storage; the oldest are dropped first.

    A frame's key is its log's id, the log's `truncations` at the time of the read (`changes`), and its index.
    The loop's thread only.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frames: dict[_Key, Buffer] = {}
        # By the key of the first frame: the keys of all, and the bytes that they keep in memory.
        self._pieces: OrderedDict[_Key, tuple[list[_Key], int]] = OrderedDict()
        self.size_bytes = 0

    def get(self, log_id: int, changes: int, index: int) -> Buffer | None:
        """Return the frame of entry `index`; None if the cache does not have it."""
        return self._frames.get((log_id, changes, index))

    def put(self, log_id: int, changes: int, first_index: int, frames: Sequence[Buffer]) -> None:
        """Cache the frames of consecutive entries, which share one buffer and so are dropped together."""
        keys = [(log_id, changes, first_index + place) for place in range(len(frames))]
        self._drop(keys[0])
        size = sum(map(len, frames))
        self._frames.update(zip(keys, frames, strict=True))
        self._pieces[keys[0]] = keys, size
        self.size_bytes += size
        while self.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._pieces)))

    def _drop(self, first: _Key) -> None:
        keys, size = self._pieces.pop(first, ([], 0))
        self.size_bytes -= size
        for key in keys:
            self._frames.pop(key, None)


class SequentialReadDetector:
    """Recognises the readers of one log that read on from where they ended, to let them read more at once."""

    __slots__ = ("_next_bytes",)

    def __init__(self) -> None:
        self._next_bytes: dict[int, int] = {}

    def bytes_at(self, index: int) -> int:
        """Return to how many bytes a read that begins at `index` should be extended.

        It is 0 if the read does not continue an earlier one; else it doubles with each read of a sequence.
        """
        return self._next_bytes.get(index, 0)

    def stopped(self, index: int, *, took_bytes: int) -> None:
        """Note that a read ended with entry `index`: the next read may begin with that entry or after it.

        `took_bytes` is the number of bytes to which the read was extended; 0 if it was not.
        """
        following = min(max(2 * took_bytes, FIRST_BYTES), MOST_BYTES)
        known = self._next_bytes
        known.pop(index - 1, None)
        known[index] = known[index + 1] = following
        while len(known) > 2 * _READERS:
            del known[next(iter(known))]
