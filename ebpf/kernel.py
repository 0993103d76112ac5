"""The bpf(2) system call, as far as it is needed here: maps, programs, links and pins, by file descriptor.

BCC compiles the program and creates its maps; for that it loads a compiler into the process that calls it.
All later calls are made by this module, in any process and without BCC. Every failure is an `OSError` with
the kernel's error number; a program that the verifier refuses is `Refused`, with the verifier's log. Source:
linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

# By machine, as `uname -m` names it (asm/unistd.h).
_SYSCALL_NUMBERS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361}
_LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _PROG_LOAD, _PIN, _GET = 1, 2, 3, 4, 5, 6, 7
_TEST_RUN, _PROG_BY_ID, _INFO, _LINK_CREATE, _LINK_DETACH = 10, 13, 15, 28, 34
_PROG_TYPE_XDP = 6
_ATTACH_XDP = 37
_LOG_BYTES = 1 << 20

XDP_SKB_MODE = 1 << 1
"""Generic mode: in the kernel's own network code, for every device (linux/if_link.h)."""
XDP_DRIVER_MODE = 1 << 2
"""Native mode: in the network card's driver, if the driver supports it."""
XDP_PASS, XDP_REDIRECT = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_MAP = Struct("@IxxxxQQQ")
_LOAD = Struct("@IIQQIIQII16sII")
_PINNING = Struct("@QII")
_LINKING = Struct("@IIII")
_TESTING = Struct("@IIIIQQII32x")
_ASKING = Struct("@IIQ")
_LINK_INFO = Struct("@IIIxxxxI")


class Refused(Exception):
    """The kernel's verifier refused the program. `.log` says why, line by line."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def call(command: int, attributes: bytes | bytearray | ctypes.Array[ctypes.c_char]) -> int:
    """Call bpf(command, attributes) and return its result.

    Raises:
        OSError: the call failed.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"bpf(2) is not supported on machine {platform.machine()}")
    buffer = (
        attributes
        if isinstance(attributes, ctypes.Array)
        else ctypes.create_string_buffer(bytes(attributes), len(attributes))
    )
    result = _libc.syscall(number, command, buffer, ctypes.c_uint(ctypes.sizeof(buffer)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def possible_cpus() -> int:
    """Return the number of *possible* CPUs: those that this machine has or could get while it runs.

    A value of a per-CPU map has a part for each of them.
    """
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return 1 + max(int(part.rpartition("-")[2]) for part in text.strip().split(","))


class BpfMap:
    """One map of the kernel. The object owns the descriptor `fd`, and `close` closes it.

    Every key has `key_bytes` bytes and every value `value_bytes`, as set when the map was created. Use it in
    one thread at a time: its buffers are shared.
    """

    def __init__(self, fd: int, *, key_bytes: int, value_bytes: int) -> None:
        self.fd = fd
        self._key = ctypes.create_string_buffer(key_bytes)
        self._next = ctypes.create_string_buffer(key_bytes)
        self._value = ctypes.create_string_buffer(value_bytes)

    def _call(self, command: int, key: bytes | None, value: ctypes.Array[ctypes.c_char] | None) -> None:
        if key is not None:
            assert len(key) == len(self._key), (len(key), len(self._key))
            self._key.raw = key
        place = ctypes.addressof(self._key) if key is not None else 0
        call(command, _MAP.pack(self.fd, place, ctypes.addressof(value) if value is not None else 0, 0))

    def get(self, key: bytes) -> bytes | None:
        """Return the value of `key`, or None if there is none."""
        try:
            self._call(_LOOKUP, key, self._value)
        except FileNotFoundError:
            return None
        return self._value.raw

    def set(self, key: bytes, value: bytes) -> None:
        """Set the value of `key`. The program's next lookup sees it."""
        assert len(value) == len(self._value), (len(value), len(self._value))
        self._value.raw = value
        self._call(_UPDATE, key, self._value)

    def delete(self, key: bytes) -> None:
        """Remove a key; do nothing if the map does not have it."""
        try:
            self._call(_DELETE, key, None)
        except FileNotFoundError:
            pass

    def keys(self) -> Iterator[bytes]:
        """Yield every key. A deletion meanwhile may repeat keys: make a list before you delete."""
        key: bytes | None = None
        while True:
            try:
                self._call(_NEXT_KEY, key, self._next)
            except FileNotFoundError:
                return
            key = self._next.raw
            yield key

    def close(self) -> None:
        """Close the descriptor; the map lives on while a program, a pin or another process has it."""
        os.close(self.fd)


def load_program(instructions: bytes, *, name: str) -> int:
    """Load an XDP program and return its descriptor.

    Raises:
        Refused: the verifier refused the program; the error has the verifier's log.
        OSError: the kernel refused the program for another reason.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"MIT")
    log = ctypes.create_string_buffer(_LOG_BYTES)

    def attempt(level: int) -> int:
        return call(
            _PROG_LOAD,
            _LOAD.pack(
                *(_PROG_TYPE_XDP, len(instructions) // 8),
                *(ctypes.addressof(code), ctypes.addressof(licence)),
                *(level, _LOG_BYTES if level else 0, ctypes.addressof(log) if level else 0),
                *(0, 0, name.encode(), 0, _ATTACH_XDP),
            ),
        )

    try:
        return attempt(0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.E2BIG, errno.EFAULT):
            raise
        first = error
    try:  # once more, with a log: writing it takes the verifier time, so the first attempt goes without
        return attempt(1)
    except OSError as error:
        said = log.value.decode(errors="replace").strip()
        if not said and error.errno != errno.ENOSPC:
            raise first from None
        raise Refused(f"the kernel's verifier refused the program: {first.strerror}", said) from None


def pin(fd: int, path: str) -> None:
    """Pin a map, program or link as the file `path` of a bpf file system; the file keeps it alive."""
    text = ctypes.create_string_buffer(path.encode())
    call(_PIN, _PINNING.pack(ctypes.addressof(text), fd, 0))


def get_pinned(path: str) -> int:
    """Return a descriptor of the object that is pinned at `path`."""
    text = ctypes.create_string_buffer(path.encode())
    return call(_GET, _PINNING.pack(ctypes.addressof(text), 0, 0))


def attach(program: int, interface: int, *, flags: int) -> int:
    """Attach a program to the interface with this index and return the descriptor of the link.

    The kernel detaches the program when the link ends: when no descriptor and no pin of it is left. `flags`
    is `XDP_SKB_MODE` or `XDP_DRIVER_MODE`.

    Raises:
        OSError: EBUSY or EEXIST if another program is attached, EOPNOTSUPP if the driver does not support
            this mode.
    """
    return call(_LINK_CREATE, _LINKING.pack(program, interface, _ATTACH_XDP, flags))


def detach(link: int) -> None:
    """Detach the link's program now, whether or not another process holds the link."""
    call(_LINK_DETACH, Struct("@I").pack(link))


def interface_of(link: int) -> int:
    """Return the index of the interface that a link's program is attached to; 0 if that no longer exists."""
    return int(_LINK_INFO.unpack(_info(link, _LINK_INFO.size))[3])


def program_of(link: int) -> int:
    """Return the id of the link's program."""
    return int(_LINK_INFO.unpack(_info(link, _LINK_INFO.size))[2])


def program_name(program_id: int) -> str:
    """Return the name that a program was loaded with; empty if it has none or is gone."""
    try:
        fd = call(_PROG_BY_ID, Struct("@III").pack(program_id, 0, 0))
    except OSError:
        return ""
    try:
        raw = _info(fd, 80)
    finally:
        os.close(fd)
    return raw[64:80].rstrip(b"\0").decode(errors="replace")


def _info(fd: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    call(_INFO, _ASKING.pack(fd, size, ctypes.addressof(buffer)))
    return buffer.raw


class TestRun:
    """Runs a loaded program on packets given as bytes, without any network (BPF_PROG_TEST_RUN)."""

    __test__ = False  # not a test class, for pytest

    def __init__(self, program: int, *, longest: int = 4096) -> None:
        self._program = program
        self._in = ctypes.create_string_buffer(longest)
        self._out = ctypes.create_string_buffer(longest + 256)

    def __call__(self, packet: bytes) -> tuple[int, bytes]:
        """Run the program on `packet`; return its answer (an XDP action) and the packet afterwards."""
        ctypes.memmove(self._in, packet, len(packet))
        attributes = ctypes.create_string_buffer(
            _TESTING.pack(
                *(self._program, 0, len(packet), len(self._out)),
                *(ctypes.addressof(self._in), ctypes.addressof(self._out), 1, 0),
            ),
            _TESTING.size,
        )
        call(_TEST_RUN, attributes)
        _, action, _, size, *_ = _TESTING.unpack(attributes.raw)
        return action, self._out.raw[:size]
