"""What processes cost: CPU seconds and memory, as /proc tells it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds, user and system, that these processes have used since they began."""
    ticks = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / _TICKS_PER_S


def waited_s(pids: Iterable[int]) -> float:
    """Seconds that the threads of these processes were ready to run and got no CPU, since they began.

    A process or thread that has ended meanwhile counts nothing.
    """
    waited_ns = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                waited_ns += int(stat.read_text().split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return waited_ns / 1e9


def machine_cpu_s() -> float:
    """CPU seconds that anybody, the kernel included, has used since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class Bystanders:
    """What share of the machine's CPUs is used by others than the processes watched (and this one)."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._begun = time.monotonic()
        self._others = self._others_s()

    def _others_s(self) -> float:
        return machine_cpu_s() - cpu_s(self._pids) - time.process_time()

    def share(self) -> float:
        """Since this was made; the kernel's own threads, which write to the disk, are others too."""
        capacity_s = (time.monotonic() - self._begun) * (os.cpu_count() or 1)
        return max(0.0, (self._others_s() - self._others) / capacity_s)


def pss_mib(pids: Iterable[int]) -> float:
    """Proportional set size in MiB: what is shared by forked processes counts once in the sum."""
    total_kib = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


def disk_written_bytes(path: Path) -> int | None:
    """Bytes written to the block device that holds `path`, by anybody; None where it has none of its own."""
    device = path.stat().st_dev
    try:
        found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return None
    # Always of 512 bytes, whatever the device's are (Documentation/admin-guide/iostats.rst).
    return int(found[6]) * 512


def dirtied_bytes(pid: int) -> int:
    """Bytes of the pages that a process made dirty, whole folios where they are large."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "write_bytes":
            return int(value)
    raise AssertionError(f"/proc/{pid}/io tells no write_bytes")


def filesystem(path: Path) -> str:
    """Type of the file system that holds `path`: ext4, xfs, tmpfs, ..."""
    real = path.resolve()
    best, found = -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4])
        if real.is_relative_to(point) and len(point.parts) > best:
            best, found = len(point.parts), right.split()[0]
    return found
