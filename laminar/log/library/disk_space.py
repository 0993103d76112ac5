"""The low-water mark of disk space: how much of the disk appends to a folder of logs leave free.

An append is refused before the disk is full: then nothing is damaged, and appends continue as soon as there
is room. On a full disk, writes of segments would wait; a failed sync, or more waiting writes than memory may
hold, would stop a log until the folder is opened again.
"""

from __future__ import annotations

from laminar.log.disk.disk import Disk

# At most one part in this many of a disk is kept free.
_MOST = 20


class FreeSpace:
    """A check for appends that the disk of `path` keeps `reserve_bytes` free (at most 5 % of the disk)."""

    def __init__(self, disk: Disk, path: str, *, reserve_bytes: int) -> None:
        self._disk = disk
        self._path = path
        self._reserve_bytes = min(reserve_bytes, disk.total_bytes(path) // _MOST)
        # Bytes that may be appended before the disk is asked again.
        self._left_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` may be appended now; if so, count them as appended.

        Raises:
            DiskError: The free space cannot be read.
        """
        if self._left_bytes < size_bytes:
            free = self._disk.free_bytes(self._path)
            if free - size_bytes < self._reserve_bytes:
                return False
            # Other programs write to the disk too, so its free space is read again long before it is used up.
            self._left_bytes = max(size_bytes, (free - self._reserve_bytes) // 8)
        self._left_bytes -= size_bytes
        return True
