"""Frames read before they are asked for: whoever reads small pieces in sequence gets larger reads.

A reader that takes one record after the other would cost a system call for each. Where reads follow each
other the next one takes more, up to a limit, and what it found waits here, verified, for as long as the
bytes that all logs share allow. It knows frames by log and index; a log that changed asks with another
number of changes, and so finds nothing of before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from laminar.log.disk.disk import Buffer

# The first read of a sequence takes so much, each of the following twice as much as the one before.
FIRST_BYTES = 16 * 1024
MOST_BYTES = 256 * 1024
# Where so many readers of one log stopped is remembered.
_READERS = 16

_Key = tuple[int, int, int]


class ReadAheadCache:
    """Frames of all logs of a storage, those read longest ago leaving first. The loop's thread only."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._frames: dict[_Key, Buffer] = {}
        # By the key of the first frame: the keys of all, and the bytes that they keep in memory.
        self._pieces: OrderedDict[_Key, tuple[list[_Key], int]] = OrderedDict()
        self.size_bytes = 0

    def get(self, log_id: int, changes: int, index: int) -> Buffer | None:
        return self._frames.get((log_id, changes, index))

    def put(self, log_id: int, changes: int, first_index: int, frames: Sequence[Buffer]) -> None:
        """Keep frames that follow each other; they share one buffer, so they stay or go together."""
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
    """Where readers of one log stopped, and how much the next read there should take."""

    __slots__ = ("_next_bytes",)

    def __init__(self) -> None:
        self._next_bytes: dict[int, int] = {}

    def bytes_at(self, index: int) -> int:
        """What a read at `index` should take; 0 if none has stopped there."""
        return self._next_bytes.get(index, 0)

    def stopped(self, index: int, *, took_bytes: int) -> None:
        """A read ended with entry `index`: the next is of the one behind it, or of the same once more."""
        following = min(max(2 * took_bytes, FIRST_BYTES), MOST_BYTES)
        known = self._next_bytes
        known.pop(index - 1, None)
        known[index] = known[index + 1] = following
        while len(known) > 2 * _READERS:
            del known[next(iter(known))]
