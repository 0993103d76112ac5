"""What a start asks of the machine: service manager, misplaced packages, how many CPUs, and which are free.

Nothing here is needed on the data path.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

_OURS = ("raft", "membership", "router", "ebpf")


def notify_service_manager(state: str, environ: Mapping[str, str]) -> None:
    """Send `state` by systemd's sd_notify protocol, if a service manager asks for it."""
    name = environ.get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError:
            return  # no reader: a service manager's problem, not a reason to stop serving


def misplaced_packages() -> list[str]:
    """Return an error text for each of our packages that Python would import from another place.

    Names like `raft` and `router` are generic: a file in the working folder or another distribution may have
    them, too.
    """
    home = Path(__file__).resolve().parents[3]
    wrong = []
    for name in _OURS:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or "?"])
        if [Path(place).resolve() for place in places] != [home / name]:
            wrong.append(f"package {name} is {places[0] if places else 'missing'}, expected {home / name}")
    return wrong


class CpuClaims:
    """Claims CPUs for this node's shards, so that no other node of this machine pins shards to them.

    An abstract Unix socket for each CPU is the claim.
    """

    def __init__(self, name: str = "laminar-pinned-cpu") -> None:
        self._name = name
        self._markers: list[socket.socket] = []

    def claim(self, cpus: Sequence[int]) -> bool:
        """Claim all of `cpus`, or none if another node has claimed one; return whether they are claimed.

        The claims last until `release`, or until this process ends.
        """
        for cpu in cpus:
            marker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._markers.append(marker)
            try:
                marker.bind(f"\0{self._name}-{cpu}")
            except OSError:
                self.release()
                return False
        return True

    def release(self) -> None:
        """Release all claims."""
        for marker in self._markers:
            marker.close()
        self._markers = []


def plan_pinning(pin: str, shards: int, claims: CpuClaims) -> list[int] | None:
    """Return the CPU to pin each shard to, or None to pin none.

    `pin` is the setting: `on`, `off`, or `auto`, which pins if there are enough CPUs and no other node has
    claimed them.
    """
    if pin == "off":
        return None
    cpus = sorted(os.sched_getaffinity(0))
    if pin == "on":
        return [cpus[shard % len(cpus)] for shard in range(shards)]
    if shards > len(cpus) or not claims.claim(cpus[:shards]):
        return None
    return cpus[:shards]


def default_shards(cpus: int, cpu_max: str) -> int:
    """Return the number of shards for a process that may use `cpus` CPUs: at least one.

    `cpu_max` is the text of the cgroup's `cpu.max`, or empty.
    """
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        # Rounded down: a fraction of a CPU gets no event loop of its own.
        cpus = min(cpus, max(1, int(quota) // int(period)))
    return max(1, cpus)


def shards_of_this_machine() -> int:
    """Return `default_shards` for this process's affinity mask and the least `cpu.max` of its cgroups."""
    shards = default_shards(len(os.sched_getaffinity(0)), "")
    for text in _cpu_maxima():
        shards = min(shards, default_shards(shards, text))
    return shards


def _cpu_maxima() -> list[str]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = Path("/sys/fs/cgroup") / group.lstrip("/")
    found = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to("/sys/fs/cgroup"):
            break
        try:
            found.append((place / "cpu.max").read_text())
        except OSError:
            continue  # the root group has no such file, nor has a machine without the controller
    return found
