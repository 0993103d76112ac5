"""The state of the XDP program that nodes of one host share: a folder per interface in the bpf file system.

The folder has the link (the program stays attached while the link exists), the maps, and a folder
`node-SLOT-PID` for each node. A node's supervisor holds a lock of its node folder, which the kernel releases
however the supervisor ends. So a lock that can be taken shows that the node is gone. A node that joins or
leaves removes what dead nodes left, and a program that no node uses any more.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from ebpf import kernel
from ebpf.kernel import BpfMap
from ebpf.layout import PLACE, ROWS, TARGET_BYTES, NodePlan, Passed, Place, Rule, Target, counter, counters_of
from ebpf.toolchain import MAPS

FILE_SYSTEM = Path("/sys/fs/bpf")
FOLDER = FILE_SYSTEM / "laminar"
QUEUE_PACKETS = 2048
"""The number of packets that may wait for a CPU. Further ones are dropped, as by a network card's ring."""
_U32 = Struct("@I")
# Network namespace, index of the interface, digest of the program.
_PROGRAM_FOLDER = re.compile(r"\d+-\d+-[0-9a-f]+")
_NODE_FOLDER = re.compile(r"node-(\d+)-(\d+)")


@dataclass(slots=True)
class Shared:
    """The opened link and maps of the program on one interface, for all nodes that share it; `close` it."""

    folder: Path
    link: int
    targets: BpfMap
    cpus: BpfMap
    steered: BpfMap
    passed: BpfMap

    @classmethod
    def open(cls, folder: Path) -> Shared:
        """Open the link and the maps that are pinned in `folder`.

        Raises:
            OSError: the link or a map is missing.
        """
        opened: list[int] = []
        try:
            for name in ("link", *MAPS):
                opened.append(kernel.get_pinned(str(folder / name)))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return cls(folder, opened[0], **maps_of(dict(zip(MAPS, opened[1:], strict=True))))

    def close(self) -> None:
        """Close the descriptors; what is pinned stays."""
        os.close(self.link)
        for each in (self.targets, self.cpus, self.steered, self.passed):
            each.close()

    def counts(self, slot: int, rows: Iterable[int] = range(ROWS)) -> dict[tuple[int, Rule], tuple[int, int]]:
        """Return the packet counts of a slot, by (row, rule): (redirected, already on the right CPU).

        A row and rule without packets is left out.
        """
        found = {}
        for row in rows:
            for rule in Rule:
                moved, stayed = (
                    self._sum(self.steered, counter(slot=slot, row=row, rule=rule, already_there=there))
                    for there in (False, True)
                )
                if moved or stayed:
                    found[row, rule] = moved, stayed
        return found

    def passed_counts(self) -> dict[Passed, int]:
        """Return, by reason, the numbers of packets that were passed on without redirection."""
        return {reason: self._sum(self.passed, reason) for reason in Passed}

    def _sum(self, counters: BpfMap, at: int) -> int:
        value = counters.get(_U32.pack(at)) or b""
        return sum(part for (part,) in Struct("@Q").iter_unpack(value))

    def entries(self) -> list[tuple[Place, Target]]:
        """Return each destination whose packets are steered on this interface, with its target; all nodes."""
        found = []
        for key in list(self.targets.keys()):
            value = self.targets.get(key)
            if value is not None:
                found.append((Place.unpack(key), Target.unpack(value)))
        return found

    def forget(self, slot: int) -> None:
        """Remove the destinations of `slot`, so that packets to its node are no longer steered."""
        for place, target in self.entries():
            if target.slot == slot:
                self.targets.delete(place.pack())

    def fill(self, slot: int, plan: NodePlan) -> None:
        """Set the destinations of `slot` to those of `plan`, remove its others, and zero its counters."""
        zero = bytes(8 * kernel.possible_cpus())
        for at in counters_of(slot):
            self.steered.set(_U32.pack(at), zero)
        wanted = {place.pack(): target for place, target in plan.targets(slot)}
        for cpu in sorted({cpu for target in wanted.values() for cpu in target.cpus.values()}):
            # An entry that exists stays: replacing it would end the kernel thread that works on its packets.
            if self.cpus.get(_U32.pack(cpu)) is None:
                self.cpus.set(_U32.pack(cpu), _U32.pack(QUEUE_PACKETS))
        for place, target in self.entries():
            if target.slot == slot and place.pack() not in wanted:
                self.targets.delete(place.pack())
        for key, target in wanted.items():
            self.targets.set(key, target.pack())


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of this host under which nodes join and leave, while the context lasts."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def sweep() -> None:
    """Remove what dead nodes left, and programs that no node uses. The caller holds `locked`."""
    for folder in program_folders():
        alive = False
        for slot, _, node_folder in nodes_in(folder):
            if is_alive(node_folder):
                alive = True
                continue
            try:
                shared = Shared.open(folder)
            except OSError:
                pass  # incomplete: its node ended while it made the folder
            else:
                shared.forget(slot)
                shared.close()
            node_folder.rmdir()
        if not alive or not _is_attached(folder):
            remove(folder)


def program_folders() -> list[Path]:
    """Return the folders of Laminar's programs in `FOLDER`; anything else there is left alone."""
    return [path for path in FOLDER.iterdir() if _PROGRAM_FOLDER.fullmatch(path.name) and path.is_dir()]


def _is_attached(folder: Path) -> bool:
    """Return whether the folder's link still attaches the program to an interface.

    The interface may be gone with its network namespace although nodes are alive.
    """
    try:
        link = kernel.get_pinned(str(folder / "link"))
    except OSError:
        return False
    try:
        return kernel.interface_of(link) != 0
    finally:
        os.close(link)


def nodes_in(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (slot, process id, folder) of each node, alive or dead, sorted; none if `folder` is gone."""
    try:
        matches = [(_NODE_FOLDER.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), int(match[2]), path) for match, path in matches if match)


def is_alive(node_folder: Path) -> bool:
    """Return whether the supervisor of the node holds the folder's lock; False if the folder is gone."""
    try:
        fd = os.open(node_folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove(folder: Path) -> None:
    """Detach the interface's XDP program and delete its pinned maps."""
    try:
        link = kernel.get_pinned(str(folder / "link"))
    except OSError:
        pass
    else:
        try:
            kernel.detach(link)
        except OSError:
            pass  # its interface is gone
        os.close(link)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def maps_of(fds: dict[str, int]) -> dict[str, BpfMap]:
    """Return the program's maps by name, made from their descriptors `fds` by name, which they now own."""
    per_cpu = 8 * kernel.possible_cpus()
    sizes = {
        "targets": (PLACE.size, TARGET_BYTES),
        "cpus": (_U32.size, _U32.size),
        "steered": (_U32.size, per_cpu),
        "passed": (_U32.size, per_cpu),
    }
    return {name: BpfMap(fds[name], key_bytes=sizes[name][0], value_bytes=sizes[name][1]) for name in MAPS}
