"""The one door to the disk: a small interface, and the real disk behind it.

Every byte that Laminar keeps passes here (an architecture test forbids `open` elsewhere in the packages
that hold data), so that a test or the simulator can put a faulty disk in its place. All calls block but
`pread_nowait`; callers own the threads. Every `OSError` becomes a `DiskError` here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from laminar.log.errors import DiskError

Buffer: TypeAlias = bytes | bytearray | memoryview

# The kernel takes at most so many buffers in one call (UIO_MAXIOV).
MAX_BUFFERS = 1024
_SYNC_FILE_RANGE_WRITE = 2


class File(Protocol):
    """One open file. Also closed when the last reference goes, so a reader in another thread is safe."""

    path: str

    def pread(self, size: int, position: int) -> Buffer:
        """Up to `size` bytes; fewer only at the end of the file."""

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        """All `size` bytes from memory; None when the disk must be asked, or the file ends before."""

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers one behind the other; returns the number of bytes. Not durable before `sync`."""

    def sync(self) -> None:
        """What was written (and the size) is durable when this returns. Never retry after a failure."""

    def start_writeback(self, size: int, position: int) -> None:
        """A hint: begin to write these bytes now, so that a later `sync` is short. Size 0: to the end."""

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Lock(Protocol):
    """An exclusive lock, held until closed or until the process ends."""

    def close(self) -> None: ...


class Disk(Protocol):
    """A file system. Names made, renamed or removed are durable after `sync_directory` of their directory."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        """For reading and writing. `create` makes a missing file, `exclusive` insists that it was missing."""

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when there is no such directory."""

    def make_directory(self, path: str) -> None:
        """With its parents. The names of all that were made are durable when this returns."""

    def sync_directory(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Atomic, in one file system; replaces a file named `new`."""

    def unlink(self, path: str) -> None:
        """A file that is missing already is fine."""

    def remove_tree(self, path: str) -> None: ...

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        """Raises `DiskError` with EAGAIN when `wait` is false and another holds it."""

    def free_bytes(self, path: str) -> int: ...


class RealFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, size: int, position: int) -> Buffer:
        try:
            data = os.pread(self._fd, size, position)
            if len(data) == size or not data:
                return data
            pieces = [data]
            have = len(data)
            while have < size and (data := os.pread(self._fd, size - have, position + have)):
                pieces.append(data)
                have += len(data)
        except OSError as error:
            raise DiskError.of("read", self.path, error) from error
        return b"".join(pieces)

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        buffer = bytearray(size)
        try:
            got = os.preadv(self._fd, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise DiskError.of("read", self.path, error) from error
        return buffer if got == size else None

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        total = 0
        try:
            for first in range(0, len(buffers), MAX_BUFFERS):
                part = buffers[first : first + MAX_BUFFERS]
                wanted = sum(map(len, part))
                written = os.pwritev(self._fd, part, position + total)
                total += written
                if written < wanted:
                    total += self._write_rest(b"".join(part)[written:], position + total)
        except OSError as error:
            raise DiskError.of("write", self.path, error) from error
        return total

    def _write_rest(self, rest: bytes, position: int) -> int:
        # A short write: at the 2 GiB limit of one call, or just before an error that the next call will name.
        view = memoryview(rest)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], position + done)
        return done

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskError.of("sync", self.path, error) from error

    def start_writeback(self, size: int, position: int) -> None:
        if _sync_file_range is not None:
            _sync_file_range(self._fd, position, size, _SYNC_FILE_RANGE_WRITE)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise DiskError.of("truncate", self.path, error) from error

    def size(self) -> int:
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise DiskError.of("stat", self.path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RealDisk:
    """The file system of this machine."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        try:
            return RealFile(path, os.open(path, flags, 0o640))
        except OSError as error:
            raise DiskError.of("open", path, error) from error

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DiskError.of("list", path, error) from error

    def make_directory(self, path: str) -> None:
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o750)
            except FileExistsError:
                pass  # another shard of this node makes the same parents
            except OSError as error:
                raise DiskError.of("make directory", directory, error) from error
            self.sync_directory(os.path.dirname(directory) or ".")

    def sync_directory(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise DiskError.of("sync directory", path, error) from error

    def rename(self, old: str, new: str) -> None:
        try:
            os.rename(old, new)
        except OSError as error:
            raise DiskError.of("rename", old, error) from error

    def unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DiskError.of("unlink", path, error) from error

    def remove_tree(self, path: str) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DiskError.of("remove", path, error) from error

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise DiskError.of("open", path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(fd)
            raise DiskError.of("lock", path, error) from error
        return RealFile(path, fd)

    def free_bytes(self, path: str) -> int:
        try:
            state = os.statvfs(path)
        except OSError as error:
            raise DiskError.of("statvfs", path, error) from error
        return state.f_bavail * state.f_frsize


def _find_sync_file_range() -> ctypes._NamedFuncPointer | None:
    # Python has no wrapper. Called through ctypes it lets go of the interpreter lock.
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


_sync_file_range = _find_sync_file_range()
