"""Where the program can be loaded, and networks of a test's own to attach it in.

Nothing is ever attached in the network namespace that the tests run in: whoever else works on this machine
would notice.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from ebpf import kernel, loader
from ebpf.kernel import load_program
from ebpf.requirements import first_unmet
from ebpf.toolchain import Compiled, compile_program

_CLONE_NEWNET = 0x40000000
# linux/bpf.h: type, id, sizes of key and value, entries and flags of a map; the same without id creates one.
_MAP_INFO = struct.Struct("=6I")
_MAP_CREATE = 0
_INSTRUCTION = struct.Struct("=BBhi")
_LOAD_64 = 0x18
_MAP_FD = 1
_libc = ctypes.CDLL(None, use_errno=True)


def why_no_xdp() -> str | None:
    """None where XDP programs can be loaded and attached, else what is missing and how to get it."""
    unmet = first_unmet()
    if unmet is not None:
        return unmet.reason
    return None if shutil.which("ip") else "there is no ip command (Debian: apt-get install iproute2)"


@pytest.fixture(scope="session")
def needs_xdp() -> None:
    """Skips where nothing can be loaded, with the reason; REQUIRE=bcc makes that a failure."""
    absent = why_no_xdp()
    if absent is not None:
        if "bcc" in os.environ.get("REQUIRE", "").split(","):
            pytest.fail(f"REQUIRE=bcc, but {absent}", pytrace=False)
        pytest.skip(absent)


@pytest.fixture(scope="session")
def compiled(needs_xdp: None) -> Compiled:
    """The program as BCC made it, with maps of its own."""
    return compile_program()


@pytest.fixture(scope="session")
def program(compiled: Compiled) -> int:
    """The program, accepted by this kernel's verifier; attached to nothing."""
    return load_program(compiled.instructions, name="laminar_test")


@pytest.fixture
def compiled_once(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins of this process load the program as it was compiled once, each with maps of its own.

    A compilation takes a second; nodes and what `joiner.py` starts compile by themselves.
    """
    monkeypatch.setattr(loader, "compile_program", lambda: _with_new_maps(compiled))


def _with_new_maps(compiled: Compiled) -> Compiled:
    """The same program with empty maps: instructions name a map by its descriptor."""
    maps, by_id = {}, {}
    for name, fd in compiled.maps.items():
        kind, number, *sizes = _MAP_INFO.unpack(kernel._info(fd, _MAP_INFO.size))
        maps[name] = by_id[number] = kernel.call(_MAP_CREATE, _MAP_INFO.pack(kind, *sizes, 0))
    code = bytearray(compiled.instructions)
    for at in range(0, len(code), _INSTRUCTION.size):
        operation, registers, offset, value = _INSTRUCTION.unpack_from(code, at)
        if (operation, registers >> 4) == (_LOAD_64, _MAP_FD):
            own = by_id[_MAP_INFO.unpack(kernel._info(value, _MAP_INFO.size))[1]]
            _INSTRUCTION.pack_into(code, at, operation, registers, offset, own)
    return Compiled(bytes(code), maps)


@dataclass(frozen=True)
class Network:
    """A network namespace without a name: it goes when nobody is in it and its descriptor is closed."""

    fd: int

    @property
    def path(self) -> str:
        """Where other processes find it, for `nsenter --net=` and `ip link set netns`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread opens or starts meanwhile belongs to the namespace, and stays there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _set_namespace(self.fd)
            yield
        finally:
            _set_namespace(home)
            os.close(home)

    def ip(self, arguments: str) -> None:
        """Run `ip` in it."""
        with self.inside():
            subprocess.run(["ip", *arguments.split()], check=True, timeout=30, capture_output=True)


def _set_namespace(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _new_network() -> Network:
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"unshare: {os.strerror(number)}")
        network = Network(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        _set_namespace(home)
    finally:
        os.close(home)
    network.ip("link set lo up")
    return network


@pytest.fixture
def new_network(needs_xdp: None) -> Iterator[Callable[[], Network]]:
    """Makes network namespaces, each with nothing in it but a loopback that is up."""
    made: list[Network] = []

    def make() -> Network:
        made.append(_new_network())
        return made[-1]

    yield make
    for network in made:
        os.close(network.fd)
