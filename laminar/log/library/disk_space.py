"""The low-water mark of disk space for appends of the library.

A segment write that meets a full disk stops its log until the folder is opened again. So an append is refused
before that: then nothing is harmed, and appends continue as soon as there is room.
"""

from __future__ import annotations

from laminar.log.disk.disk import Disk

# At most one part in this many of a disk is kept free.
_MOST = 20


class FreeSpace:
    """The room on the disk that holds `path`; `reserve_bytes` of it (at most 5 %) are kept free."""

    def __init__(self, disk: Disk, path: str, *, reserve_bytes: int) -> None:
        self._disk = disk
        self._path = path
        self._reserve_bytes = min(reserve_bytes, disk.total_bytes(path) // _MOST)
        # Bytes that may be appended before the disk is asked again.
        self._left_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` may be appended now.

        Raises:
            DiskError: The disk cannot be asked.
        """
        if self._left_bytes < size_bytes:
            free = self._disk.free_bytes(self._path)
            if free - size_bytes < self._reserve_bytes:
                return False
            # Others write to the disk too, so it is asked again long before this is used up.
            self._left_bytes = max(size_bytes, (free - self._reserve_bytes) // 8)
        self._left_bytes -= size_bytes
        return True
