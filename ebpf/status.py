"""The present state of steering on this machine, for display, read from the shared maps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ebpf import kernel
from ebpf.interfaces import Interface, interfaces, network_namespace
from ebpf.layout import Passed, Place, Rule, Target
from ebpf.shared import FOLDER, Shared, is_alive, nodes_in


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The state of one node's packet steering on one network interface.

    `counts` has, by (row, rule), the packets redirected and those that were on the right CPU already.
    """

    slot: int
    pid: int
    alive: bool
    targets: list[tuple[Place, Target]]
    counts: dict[tuple[int, Rule], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceStatus:
    """The XDP program on one interface of this network namespace: Laminar's, another one, or none.

    `nodes` and `passed` (packets that passed untouched, by reason) are empty unless it is Laminar's (`ours`).
    """

    interface: Interface
    program: str
    """The attached program's name; empty if there is none."""
    ours: bool
    nodes: list[NodeStatus] = field(default_factory=list)
    passed: dict[Passed, int] = field(default_factory=dict)


def status() -> list[InterfaceStatus]:
    """Return the status of every interface of this network namespace."""
    found = []
    for interface in interfaces():
        attached = kernel.program_name(interface.xdp_program) if interface.xdp_program else ""
        shared = _shared_on(interface)
        if shared is None:
            found.append(InterfaceStatus(interface=interface, program=attached, ours=False))
            continue
        try:
            entries = shared.entries()
            nodes = [
                NodeStatus(
                    slot=slot,
                    pid=pid,
                    alive=is_alive(folder),
                    targets=sorted(
                        ((place, target) for place, target in entries if target.slot == slot),
                        key=lambda entry: (entry[0].protocol, entry[0].port),
                    ),
                    counts=shared.counts(slot),
                )
                for slot, pid, folder in nodes_in(shared.folder)
            ]
            found.append(
                InterfaceStatus(
                    interface=interface,
                    program=attached,
                    ours=True,
                    nodes=nodes,
                    passed=shared.passed_counts(),
                )
            )
        finally:
            shared.close()
    return found


def _shared_on(interface: Interface) -> Shared | None:
    if not interface.xdp_program or not FOLDER.is_dir():
        return None
    for folder in FOLDER.glob(f"{network_namespace()}-{interface.index}-*"):
        try:
            shared = Shared.open(folder)
        except OSError:
            continue
        if kernel.program_of(shared.link) == interface.xdp_program:
            return shared
        shared.close()
    return None
