"""The only access to the disk: a small interface, and the real disk that implements it.

Every byte that Laminar keeps passes through here (an architecture test forbids `open` elsewhere in the
packages that hold data), so that a test or the simulator can put a faulty disk in its place. All calls block
except `pread_nowait`; callers own the threads. Every `OSError` becomes a `DiskError` here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from laminar.log.disk.errors import DiskError
from laminar.unzeroed import new_bytearray

Buffer: TypeAlias = bytes | bytearray | memoryview

# The kernel takes at most this many buffers in one call (UIO_MAXIOV).
MAX_BUFFERS = 1024
_SYNC_FILE_RANGE_WRITE = 2
_FALLOC_FL_KEEP_SIZE = 1
_preadv, _RWF_NOWAIT = os.preadv, os.RWF_NOWAIT
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class File(Protocol):
    """One open file.

    The file is closed by `close`, or with its last reference; so a thread that is reading it may continue
    after other threads have dropped their references.
    """

    path: str

    def pread(self, size: int, position: int) -> Buffer:
        """Return up to `size` bytes at `position`; fewer only at the end of the file."""

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        """Return all `size` bytes at `position` if they are in the page cache, else None; never waits.

        It is also None if the file ends before the last of these bytes.
        """

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers back to back; return the number of bytes. Not durable before `sync`."""

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers back to back and make these bytes durable; return the number of bytes.

        Earlier writes are not made durable: use it only for a file without other unsynced writes.
        """

    def sync(self) -> None:
        """Make everything written so far, and the file's size, durable.

        After a failure never call it again: it might succeed although the pages that failed are lost.
        """

    def reserve(self, size: int) -> None:
        """Reserve disk space for the first `size` bytes; the file's own size stays.

        Later writes of these bytes succeed even on a full disk. A file system without such a call
        reserves nothing, and reports nothing.
        """

    def start_writeback(self, size: int, position: int) -> None:
        """Ask the kernel to begin writing these bytes to the disk, so that a later `sync` is short.

        `size` 0 means up to the end of the file.
        """

    def drop_cached(self, size: int, position: int) -> None:
        """Ask the kernel to drop clean pages of these bytes, so that the next read is from the disk."""

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""

    def size(self) -> int:
        """Return the size in bytes."""

    def close(self) -> None:
        """Close the file. Further calls do nothing."""


class Lock(Protocol):
    """An exclusive lock, held until closed or until the process ends."""

    def close(self) -> None:
        """Release the lock."""


class Disk(Protocol):
    """A file system, as the storage uses it.

    A file's creation, renaming or removal is durable only after `sync_directory` of its directory.
    """

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        """Open a file for reading and writing.

        With `create` a missing file is made; with `exclusive` too, an existing file is an error.
        """

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at `path`."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; empty if there is no such directory."""

    def make_directory(self, path: str) -> None:
        """Make a directory and its missing parents; all of them are durable on return."""

    def make_directories(self, paths: Sequence[str]) -> None:
        """Make several directories in one existing, durable directory, with one sync for all.

        All of them are durable on return. After an error some may exist; none of them must be relied on.
        """

    def sync_directory(self, path: str) -> None:
        """Make all creations, renamings and removals of files in a directory durable."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory atomically within one file system; replace a file named `new`."""

    def unlink(self, path: str) -> None:
        """Remove a file; do nothing if it is missing."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory with all its files and directories; do nothing if it is missing."""

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        """Take an exclusive lock on a file, which is made if missing.

        Raises:
            DiskError: With EAGAIN, if `wait` is false and another process holds the lock.
        """

    def free_bytes(self, path: str) -> int:
        """Return how many bytes may still be written to the disk that holds `path`."""

    def total_bytes(self, path: str) -> int:
        """Return the size of the disk that holds `path`."""

    def boot_id(self) -> bytes:
        """Return 16 bytes that identify the machine's present boot.

        While they are the same, everything that was written and not synced is still in the page cache.
        """


class RealFile:
    """A file of the operating system."""

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, size: int, position: int) -> Buffer:
        """Return up to `size` bytes, by as many system calls as the kernel needs."""
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
        """Return the bytes if `preadv2` finds all of them in the page cache (RWF_NOWAIT), else None."""
        buffer = new_bytearray(size)
        try:
            got = _preadv(self._fd, (buffer,), position, _RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise DiskError.of("read", self.path, error) from error
        return buffer if got == size else None

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers, by one system call for each `MAX_BUFFERS` of them."""
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

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        """Write all buffers durably, by one system call where the file system allows it (RWF_DSYNC)."""
        # One call, not two: between two calls the thread would wait again for the interpreter lock,
        # which the loop may hold for a whole turn.
        if len(buffers) <= MAX_BUFFERS:
            try:
                written = os.pwritev(self._fd, buffers, position, os.RWF_DSYNC)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise DiskError.of("write", self.path, error) from error
            else:
                if written == sum(map(len, buffers)):
                    return written
        # Too many buffers, a short write, or a kernel without RWF_DSYNC: write the same bytes in the
        # same place, then sync.
        written = self.pwritev(buffers, position)
        self.sync()
        return written

    def _write_rest(self, rest: bytes, position: int) -> int:
        # A short write happens at the 2 GiB limit of one call, or just before an error that the next
        # call reports.
        view = memoryview(rest)
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], position + done)
        return done

    def sync(self) -> None:
        """Make everything written so far, and the size, durable (fdatasync)."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskError.of("sync", self.path, error) from error

    def reserve(self, size: int) -> None:
        """Reserve room for the first `size` bytes, where the file system has fallocate."""
        if _fallocate is None:
            return
        while _fallocate(self._fd, _FALLOC_FL_KEEP_SIZE, 0, size):
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if number != errno.EINTR:
                raise DiskError.of("reserve", self.path, OSError(number, os.strerror(number)))

    def start_writeback(self, size: int, position: int) -> None:
        """Start writing these bytes to the medium, where the system has sync_file_range."""
        if _sync_file_range is not None:
            _sync_file_range(self._fd, position, size, _SYNC_FILE_RANGE_WRITE)

    def drop_cached(self, size: int, position: int) -> None:
        """Drop clean pages of these bytes from the page cache, where the file system takes such hints."""
        try:
            os.posix_fadvise(self._fd, position, size, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # a file system without such a hint

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise DiskError.of("truncate", self.path, error) from error

    def size(self) -> int:
        """Return the size in bytes."""
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise DiskError.of("stat", self.path, error) from error

    def close(self) -> None:
        """Close the descriptor. Further calls do nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RealDisk:
    """The file system of this machine."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        """Open a file for reading and writing; a new one is readable by owner and group only."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        try:
            return RealFile(path, os.open(path, flags, 0o640))
        except OSError as error:
            raise DiskError.of("open", path, error) from error

    def exists(self, path: str) -> bool:
        """Return whether a name exists; a broken symbolic link does."""
        return os.path.lexists(path)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; empty if there is no such directory."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DiskError.of("list", path, error) from error

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents, and sync the parent of each."""
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        # The deepest existing directory may come from a process that was killed before it synced the
        # name.
        try:
            self.sync_directory(os.path.dirname(path) or ".")
        except DiskError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):
                raise  # a directory that we may not open: no process of ours has made a name in it
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o750)
            except FileExistsError:
                pass  # another shard of this node made the same parent
            except OSError as error:
                raise DiskError.of("make directory", directory, error) from error
            self.sync_directory(os.path.dirname(directory) or ".")

    def make_directories(self, paths: Sequence[str]) -> None:
        """Make directories that have the same parent, and sync the parent."""
        for path in paths:
            try:
                os.mkdir(path, 0o750)
            except FileExistsError:
                pass  # made by an attempt that failed later
            except OSError as error:
                raise DiskError.of("make directory", path, error) from error
        self.sync_directory(os.path.dirname(paths[0]))

    def sync_directory(self, path: str) -> None:
        """Make all changes of names in a directory durable."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise DiskError.of("sync directory", path, error) from error

    def rename(self, old: str, new: str) -> None:
        """Rename atomically within one file system, replacing a file named `new`."""
        try:
            os.rename(old, new)
        except OSError as error:
            raise DiskError.of("rename", old, error) from error

    def unlink(self, path: str) -> None:
        """Remove a file; do nothing if it is missing."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DiskError.of("unlink", path, error) from error

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; do nothing if it is missing."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DiskError.of("remove", path, error) from error

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        """Take an exclusive `flock` on a file, which is made if missing; never follow a symbolic link."""
        try:
            # Never follow a symbolic link: another user may have put it there.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise DiskError.of("open", path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(fd)
            raise DiskError.of("lock", path, error) from error
        return RealFile(path, fd)

    def free_bytes(self, path: str) -> int:
        """Return how many bytes a process without privileges may still write there."""
        try:
            state = os.statvfs(path)
        except OSError as error:
            raise DiskError.of("statvfs", path, error) from error
        return state.f_bavail * state.f_frsize

    def total_bytes(self, path: str) -> int:
        """Return the size of the file system that holds `path`."""
        try:
            state = os.statvfs(path)
        except OSError as error:
            raise DiskError.of("statvfs", path, error) from error
        return state.f_blocks * state.f_frsize

    def boot_id(self) -> bytes:
        """Return the kernel's boot id; random bytes where it cannot be read, so that no two are equal."""
        try:
            fd = os.open(_BOOT_ID, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return bytes.fromhex(os.read(fd, 64).decode().strip().replace("-", ""))
            finally:
                os.close(fd)
        except (OSError, ValueError):
            # Unknown: return a value that is never repeated, so that each start is treated as a
            # start after a power loss.
            return os.urandom(16)


class ReadOnlyDisk(RealDisk):
    """The file system, for reading only: every change is refused, and no lock is taken."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        """Open a file for reading; refuse to create one."""
        if create:
            raise self._refusal("create", path)
        try:
            return RealFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise DiskError.of("open", path, error) from error

    def is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory."""
        return os.path.isdir(path)

    def is_locked(self, path: str) -> bool:
        """Return whether a process of this machine holds the lock file, according to /proc/locks."""
        try:
            found = os.stat(path)
            with open("/proc/locks", encoding="ascii") as file:
                lines = file.read().splitlines()
        except OSError:
            return False
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any(" FLOCK " in f" {line} " and place in line.split() for line in lines)

    def make_directory(self, path: str) -> None:
        """Refuse to make a directory."""
        raise self._refusal("make directory", path)

    def make_directories(self, paths: Sequence[str]) -> None:
        """Refuse to make directories."""
        raise self._refusal("make directory", paths[0])

    def rename(self, old: str, new: str) -> None:
        """Refuse to rename."""
        raise self._refusal("rename", old)

    def unlink(self, path: str) -> None:
        """Refuse to remove a file."""
        raise self._refusal("unlink", path)

    def remove_tree(self, path: str) -> None:
        """Refuse to remove a directory."""
        raise self._refusal("remove", path)

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        """Refuse to take a lock: its file might have to be made."""
        raise self._refusal("lock", path)

    def _refusal(self, operation: str, path: str) -> DiskError:
        return DiskError(operation, path, errno.EROFS, "opened for reading only")


def _find(name: str, *arguments: Any) -> ctypes._NamedFuncPointer | None:
    # Returns None where the C library lacks the function. Python has no wrapper for these calls; a call
    # through ctypes releases the interpreter lock.
    try:
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int
    return function


_fallocate = _find("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_file_range = _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
