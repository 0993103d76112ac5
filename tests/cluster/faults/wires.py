"""Networks that can be cut: each node in a network namespace of its own, all on one bridge.

A cut from A to B is a wrong, permanent address of B in A's neighbour table: what A sends is dropped silently,
as by a broken switch; the other direction is a cut of its own. We, outside, still reach every node. Needs
root (or what `unshare --user --map-root-user --net --mount` gives) and the command `ip`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable

from laminar.testing.cluster import LoopbackNet

NOBODY = "02:00:00:00:00:99"


def can_be_made() -> bool:
    """Whether this machine lets us."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"laminar-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    bridge = f"lt{os.getpid()}"
    if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "link", "del", bridge], check=True)
    return True


class Wires:
    """The network of one cluster: 10.77.N.1, .2, ... The number N is that of a loopback net we hold."""

    def __init__(self, nodes: int) -> None:
        self._claim = LoopbackNet()
        self._number = self._claim.number
        self.hosts = [f"10.77.{self._number}.{node + 1}" for node in range(nodes)]
        self._bridge = f"lmb{self._number}"
        self._cut: set[tuple[int, int]] = set()
        try:
            self._remove()  # what a run that was killed left behind; the number is ours alone
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self._ip(f"link add {self._bridge} type bridge", f"link set {self._bridge} up")
        self._ip(f"addr add 10.77.{self._number}.254/24 dev {self._bridge}")
        for node, host in enumerate(self.hosts):
            space, wire = self._space(node), f"lmv{self._number}.{node}"
            self._ip(f"netns add {space}", f"link add {wire} type veth peer name eth0 netns {space}")
            self._ip(f"link set {wire} master {self._bridge}", f"link set {wire} up")
            inside = (f"addr add {host}/24 dev eth0", "link set eth0 up", "link set lo up")
            self._ip(*inside, space=space)

    def _space(self, node: int) -> str:
        return f"laminar-{self._number}-{node + 1}"

    def inside(self, node: int) -> list[str]:
        """What to put before a command that is to run at a node. It becomes the command: same pid."""
        return ["ip", "netns", "exec", self._space(node)]

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """From now on nothing that the first of a pair sends reaches the second."""
        for sender, receiver in sorted(set(pairs) - self._cut):
            self._cut.add((sender, receiver))
            command = f"neigh replace {self.hosts[receiver]} lladdr {NOBODY} nud permanent dev eth0"
            self._ip(command, space=self._space(sender))

    def heal(self) -> None:
        """No cuts any more."""
        for sender, receiver in sorted(self._cut):
            self._ip(f"neigh del {self.hosts[receiver]} dev eth0", space=self._space(sender))
        self._cut.clear()

    def close(self) -> None:
        """Give all of it back. Idempotent."""
        self._remove()
        self._claim.close()

    def _remove(self) -> None:
        """Removes the wires first: the kernel removes a namespace, and what is in it, some time later.

        Until then the outer end of a wire would keep its name.
        """
        for _, name in socket.if_nameindex():
            if name.startswith(f"lmv{self._number}."):
                subprocess.run(["ip", "link", "del", name], capture_output=True)  # may be gone by now
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for line in listed.splitlines():
            if line.startswith(f"laminar-{self._number}-"):
                self._ip(f"netns del {line.split()[0]}")
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def _ip(self, *commands: str, space: str | None = None) -> None:
        place = ["-n", space] if space is not None else []
        subprocess.run(["ip", *place, "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True)
