"""Steering: XDP programs get each packet to the CPU of the shard that handles it, if the machine allows it.

The supervisor calls `begin` before it starts its children, `let_go` in each of them, and `end` when they are
gone. Attaching the programs loads a compiler into the process that does it. So it is done in a child that
ends at once, and that passes back a locked descriptor for each interface: while the lock is held, the node
takes part in that interface's program. Without privilege, BCC or kernel headers the node serves the same, and
one log line says why packets are not steered.
"""

from __future__ import annotations

import array
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebpf import loader, requirements
from ebpf.interfaces import Interface, interfaces_of
from ebpf.layout import MAX_SHARDS, NodePlan
from ebpf.loader import Membership, NotSteered
from laminar.node.runtime.listeners import NodeSockets

log = logging.getLogger("laminar.steering")

LONGEST_S = 60.0
"""How long a start waits for the child that compiles and attaches. That takes seconds, on busy CPUs more."""
_MESSAGE_BYTES = 1 << 20
_MOST_INTERFACES = 64

Fork = Callable[[str, Callable[[], int]], int]
"""`fork(name, work)` runs `work` in a child and returns the child's pid."""


def plan_of(sockets: NodeSockets, cpus: Sequence[int], controller_cpu: int | None) -> NodePlan:
    """Return the data of a node for the XDP programs: host, ports, and the CPUs of its shards."""
    ports = sockets.ports
    host = str(sockets.shared[0].getsockname()[0])
    return NodePlan(
        host=host.partition("%")[0],  # a link-local IPv6 address names its interface
        shared_port=ports.shared,
        own_ports=ports.own,
        append_port=ports.shared,
        gossip_port=ports.gossip,
        shard_cpus=cpus,
        controller_cpu=controller_cpu,
    )


def spare_cpu(taken: Sequence[int]) -> int | None:
    """Return a CPU for the controller on which no shard is pinned, if this process may use one."""
    spare = sorted(os.sched_getaffinity(0) - set(taken))
    return spare[0] if spare else None


def why_not(wish: str, cpus: Sequence[int] | None, found: Sequence[Interface], host: str) -> str:
    """Return, in one line, why a node's packets can't or shouldn't be steered; "" if nothing prevents it."""
    if wish == "auto" and found and all(interface.loopback for interface in found):
        return f"{host} is on the loopback, where it costs more than it gives (steer=require insists)"
    unmet = requirements.first_unmet()
    if unmet is not None:
        return unmet.reason
    if cpus is None:
        return "the shards are not pinned to CPUs (setting pin)"
    if len(cpus) > MAX_SHARDS:
        return f"there are {len(cpus)} shards, and at most {MAX_SHARDS} are steered"
    if not found:
        return f"no interface has the address {host}"
    return ""


@dataclass(slots=True)
class Steering:
    """One node's use of the XDP programs on its network interfaces, which it shares with other nodes."""

    wish: str
    """The setting: `auto`, `require`, `off`."""
    controller_cpu: int | None = None
    """The CPU to pin the controller to; None if nothing is steered or no CPU is free of shards."""
    memberships: list[Membership] = field(default_factory=list)

    def begin(self, sockets: NodeSockets, cpus: Sequence[int] | None, fork: Fork) -> bool:
        """Begin to steer packets (bring each to the CPU of its shard), if setting and machine allow it.

        Return False only if the setting requires steering and it is not possible.
        """
        if self.wish == "off":
            return True
        controller_cpu = spare_cpu(cpus or ())
        plan = plan_of(sockets, cpus or (0,) * len(sockets.own), controller_cpu)
        try:
            found = interfaces_of(plan.host)
            reason = why_not(self.wish, cpus, found, plan.host)
        except OSError as error:  # a sandbox that hides what we look at
            found, reason = [], f"this machine can't be looked at: {error}"
        reasons = [reason] if reason else self._join(found, plan, fork)
        if reasons and self.wish == "require":
            log.error("steer=require, but %s", "; ".join(reasons))
            self.end()
            return False
        if reasons:
            log.info("packets are not steered: %s", "; ".join(reasons))
        for each in self.memberships:
            log.info("packets on %s are steered to the shards' CPUs (%s)", each.interface, each.mode)
        if self.memberships:
            self.controller_cpu = controller_cpu
        return True

    def _join(self, found: Sequence[Interface], plan: NodePlan, fork: Fork) -> list[str]:
        """Join the XDP program of each interface, in a child; return a reason for each one that failed."""
        pid = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            child = fork("steering", lambda: _join_all(found, plan, pid, theirs))
            theirs.close()
            ready, _, _ = select.select([ours], [], [], LONGEST_S)
            if not ready:
                os.kill(child, signal.SIGKILL)
            data, ancillary, _, _ = ours.recvmsg(
                _MESSAGE_BYTES, socket.CMSG_SPACE(_MOST_INTERFACES * array.array("i").itemsize)
            )
            _, status = os.waitpid(child, 0)
        if not data:
            how = os.waitstatus_to_exitcode(status)
            late = f"took longer than {LONGEST_S:.0f} s" if not ready else f"ended with {how}"
            return [f"the process that loads the program {late}"]
        locks = array.array("i")
        for _, _, content in ancillary:
            locks.frombytes(content)
        answer = json.loads(data)
        for row, lock in zip(answer["joined"], locks, strict=True):
            folder, node_folder = Path(row["folder"]), Path(row["node_folder"])
            self.memberships.append(
                Membership(row["interface"], row["mode"], folder, row["slot"], node_folder, lock)
            )
        for line in answer["log"]:
            log.info("%s", line)
        return list(answer["refused"])

    def let_go(self) -> None:
        """Close the locked descriptors in a child of the supervisor, so that they end with the supervisor."""
        for membership in self.memberships:
            membership.let_go()

    def end(self) -> None:
        """Stop steering; the last node on an interface detaches its program."""
        for membership in self.memberships:
            try:
                membership.leave()
            except OSError as error:
                log.error("%s may still be steered: %s", membership.interface, error)
        self.memberships = []


def _join_all(found: Sequence[Interface], plan: NodePlan, pid: int, answer: socket.socket) -> int:
    """Join the program of every interface, and send the locks with their descriptions. Runs in the child."""
    joined: list[Membership] = []
    refused: list[str] = []
    lines: list[str] = []
    for interface in found[:_MOST_INTERFACES]:
        try:
            joined.append(loader.join(interface, plan, pid=pid))
        except NotSteered as reason:
            refused.append(str(reason))
            lines += reason.log.splitlines()
        except OSError as error:  # a sandbox that refuses one of many steps
            refused.append(f"{interface.name}: {error}")
    result = {
        "joined": [
            {
                "interface": each.interface,
                "mode": each.mode,
                "folder": str(each.folder),
                "slot": each.slot,
                "node_folder": str(each.node_folder),
            }
            for each in joined
        ],
        "refused": refused,
        "log": [line[:300] for line in lines[-200:]],  # one message, no larger than a socket takes
    }
    socket.send_fds(answer, [json.dumps(result).encode()], [each.lock for each in joined])
    return 0
