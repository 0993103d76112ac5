"""The loader: one XDP program for each interface, shared by all nodes of the host that ask for steering.

The first node that joins attaches the program, the last one that leaves detaches it. It is attached by a BPF
link and never replaces another program: the kernel refuses the link if another program is attached, and
refuses other programs while the link exists. `ebpf.shared` manages the pinned link, and tells which nodes are
alive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebpf import kernel
from ebpf.interfaces import Interface, interfaces, network_namespace
from ebpf.layout import SLOTS, NodePlan
from ebpf.requirements import Requirement
from ebpf.shared import FILE_SYSTEM, FOLDER, Shared, locked, nodes_in, program_folders, remove, sweep
from ebpf.toolchain import MAPS, CompileError, compile_program, digest

PROGRAM_NAME = "laminar_steer"


class NotSteered(Exception):
    """The packets of an interface cannot be steered to CPUs. The text is the reason, in one line.

    `log` is the compiler's or the verifier's output, or empty.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


@dataclass(slots=True)
class Membership:
    """A node's membership among the nodes that share the program of one interface.

    `lock` is a descriptor of `node_folder`, locked while the node's supervisor lives, by which other nodes
    see that this node is alive (`ebpf.shared`); -1 after `let_go`.
    """

    interface: str
    mode: str
    """`native` or `generic`."""
    folder: Path
    slot: int
    node_folder: Path
    lock: int

    def leave(self) -> None:
        """Stop steering packets for this node; detach the XDP program if no other node uses it."""
        with locked():
            try:
                shared = Shared.open(self.folder)
            except OSError:
                pass  # it was removed by hand
            else:
                shared.forget(self.slot)
                shared.close()
            self.let_go()
            try:
                self.node_folder.rmdir()
            except FileNotFoundError:
                pass
            sweep()

    def let_go(self) -> None:
        """Close this process's descriptor of the lock. Idempotent.

        A child that the supervisor forks calls this: otherwise the lock would outlive the supervisor, and the
        node would seem alive.
        """
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def modes_of(interface: Interface) -> tuple[int, ...]:
    """Return the XDP attach modes (flags of the kernel) to try on this interface, the best first.

    A physical device has native mode, then generic mode; a virtual one (veth, tun, ...) only generic mode. A
    virtual device can leave a packet's checksum to be filled in later. A packet that is redirected in native
    mode loses the mark that says so, and is then dropped; generic mode keeps the mark.
    """
    if interface.loopback or interface.kind:
        return (kernel.XDP_SKB_MODE,)
    return kernel.XDP_DRIVER_MODE, kernel.XDP_SKB_MODE


def join(interface: Interface, plan: NodePlan, *, pid: int, modes: Sequence[int] | None = None) -> Membership:
    """Begin to steer the packets of a node on this interface; return the node's membership.

    `plan` says what to steer; `pid` is the process id of the node's supervisor. If no other node has attached
    the program, this function compiles, loads and attaches it. That loads a compiler into this process, which
    should therefore end soon. `modes` are the modes in which to attach, the best first; None takes those of
    `modes_of`. A program that is attached already stays in its mode.

    Raises:
        NotSteered: when the interface cannot be steered; the text is the reason.
    """
    mount_file_system()
    program: _Program | None = None
    try:
        while True:
            with locked():
                sweep()
                folder = _folder_of(interface)
                if not folder.exists() and program is not None:
                    program.attach(interface, folder, modes or modes_of(interface))
                if folder.exists():
                    return _enter(interface, folder, plan, pid)
            program = _Program.load()  # without the lock: compiling takes long
    finally:
        if program is not None:
            program.close()


def try_loading() -> tuple[Requirement, str]:
    """Compile and load the program without attaching it; return whether that worked, and the log.

    The log is the compiler's or the verifier's output after a failure, else empty.
    """
    try:
        _Program.load().close()
    except NotSteered as reason:
        return Requirement(name="program", met=False, found=str(reason)), reason.log
    return Requirement(name="program", met=True, found="accepted by the kernel's verifier"), ""


def mount_file_system() -> None:
    """Mount the bpf file system at its usual place, unless it is mounted.

    Raises:
        NotSteered: it can't be mounted.
    """
    if is_mounted():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bpf", str(FILE_SYSTEM).encode(), b"bpf", 0, b"mode=0700") != 0:
        number = ctypes.get_errno()
        raise NotSteered(f"{FILE_SYSTEM} can't be mounted: {os.strerror(number)}")


def is_mounted() -> bool:
    """Return whether the bpf file system is mounted."""
    try:
        with open("/proc/self/mounts") as mounts:
            return any(line.split()[1:3] == [str(FILE_SYSTEM), "bpf"] for line in mounts)
    except OSError:
        return False


# ---- the program


@dataclass(slots=True)
class _Program:
    """A program that is compiled and loaded, but not attached yet."""

    fd: int
    maps: dict[str, int]

    @classmethod
    def load(cls) -> _Program:
        try:
            compiled = compile_program()
            return cls(kernel.load_program(compiled.instructions, name=PROGRAM_NAME), compiled.maps)
        except CompileError as error:
            raise NotSteered("BCC can't compile the program here", str(error)) from error
        except LookupError as error:
            raise NotSteered(str(error.args[0])) from error
        except kernel.Refused as error:
            raise NotSteered(str(error), error.log) from error
        except OSError as error:
            raise NotSteered(f"the kernel refused to load the program: {error.strerror}") from error

    def attach(self, interface: Interface, folder: Path, modes: Sequence[int]) -> None:
        """Attach in the first of `modes` that is possible, and pin the maps and the link in `folder`.

        Raises:
            NotSteered: when it cannot be attached or pinned; nothing is left.
        """
        link = _attach(self.fd, interface, modes)
        try:
            folder.mkdir()
            for name in MAPS:
                kernel.pin(self.maps[name], str(folder / name))
            kernel.pin(link, str(folder / "link"))
        except OSError as error:
            remove(folder)
            raise NotSteered(f"the program can't be pinned in {folder}: {error.strerror}") from error
        finally:
            os.close(link)

    def close(self) -> None:
        """Close the descriptors; what is attached and pinned stays."""
        for fd in (self.fd, *self.maps.values()):
            os.close(fd)


def _attach(program: int, interface: Interface, modes: Sequence[int]) -> int:
    for flags in modes:
        try:
            return kernel.attach(program, interface.index, flags=flags)
        except OSError as error:
            failure = error
        if failure.errno in (errno.EBUSY, errno.EEXIST):
            now = next((each for each in interfaces() if each.index == interface.index), interface)
            name = kernel.program_name(now.xdp_program) or "unnamed"
            raise NotSteered(
                f"{interface.name} has another XDP program (id {now.xdp_program}, {name}): it is not replaced"
            )
    raise NotSteered(f"the program can't be attached to {interface.name}: {failure.strerror}")


def _folder_of(interface: Interface) -> Path:
    """Return the folder for this interface that nodes with the same program share; it may not exist yet.

    Raises:
        NotSteered: nodes with another version of the program steer on the interface, or a file has the
            folder's name.
    """
    prefix = f"{network_namespace()}-{interface.index}-"
    folder = FOLDER / f"{prefix}{digest()}"
    if any(other != folder and other.name.startswith(prefix) for other in program_folders()):
        raise NotSteered(f"nodes of another version of Laminar steer on {interface.name}")
    if folder.exists() and not folder.is_dir():
        raise NotSteered(f"{folder} is a file, not the folder of a program: remove it")
    return folder


def _enter(interface: Interface, folder: Path, plan: NodePlan, pid: int) -> Membership:
    taken = {slot for slot, _, _ in nodes_in(folder)}
    slot = next((slot for slot in range(SLOTS) if slot not in taken), None)
    if slot is None:
        raise NotSteered(f"{SLOTS} nodes steer on {interface.name} already")
    node_folder = folder / f"node-{slot}-{pid}"
    node_folder.mkdir(mode=0o700)
    lock = os.open(node_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shared = Shared.open(folder)
        try:
            shared.fill(slot, plan)
        finally:
            shared.close()
    except OSError as error:
        os.close(lock)
        raise NotSteered(f"{folder} can't be used: {error.strerror}") from error
    now = next((each for each in interfaces() if each.index == interface.index), interface)
    return Membership(interface.name, now.xdp_mode, folder, slot, node_folder, lock)
