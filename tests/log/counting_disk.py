"""The real disk, with a counter at its door: how often it is read, how many bytes, and by which threads."""

from __future__ import annotations

import threading

from laminar.log import RealDisk
from laminar.log.disk.disk import Buffer, File


class CountingFile:
    """A file that counts its reads; else the real one."""

    def __init__(self, disk: CountingDisk, file: File) -> None:
        self._disk = disk
        self._file = file
        self.path = file.path

    def pread(self, size: int, position: int) -> Buffer:
        self._disk.threads.add(threading.current_thread().name)
        self._disk.note(self.path, size)
        return self._file.pread(size, position)

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        if self._disk.cold:
            return None
        self._disk.note(self.path, size)
        return self._file.pread_nowait(size, position)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class CountingDisk(RealDisk):
    """The real disk, which counts reads and bytes read of segments (`.log`) and of index files."""

    def __init__(self) -> None:
        self.reads = {"log": 0, "index": 0}
        self.bytes = {"log": 0, "index": 0}
        # Threads that read without being asked not to wait.
        self.threads: set[str] = set()
        # As if the page cache held nothing.
        self.cold = False

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        file: File = CountingFile(self, super().open(path, create=create, exclusive=exclusive))  # type: ignore[assignment]  # the rest passes by
        return file

    def note(self, path: str, size: int) -> None:
        kind = path.rpartition(".")[2]
        if kind in self.reads:
            self.reads[kind] += 1
            self.bytes[kind] += size

    def forget(self) -> None:
        self.reads = dict.fromkeys(self.reads, 0)
        self.bytes = dict.fromkeys(self.bytes, 0)
        self.threads.clear()
