"""A node in processes of its own that is attacked over HTTP: which processes it has, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from laminar.testing.nodes import serve
from tests.guards import RUN_VARIABLE

MOST_BLOCKED_S = 30
"""What another client waits at most, however busy the machine: only one that is blocked waits so long."""


@dataclass(frozen=True, slots=True)
class Victim:
    """`pids` are its processes as they were when it was ready; its client keeps its connection."""

    http: httpx.Client
    pids: frozenset[int]

    def rss_bytes(self) -> int:
        """What the largest of its processes holds now."""
        return max(rss_bytes(pid) for pid in self.pids)

    def unharmed(self) -> bool:
        """Return True if it still has the same processes, and an innocent client's append is taken.

        Raises:
            AssertionError: the append is refused, or a process ended; the text says which.
        """
        answer = self.http.post("/v1/topics/innocent/partitions/0/records", content=b"x" * 100)
        assert 201 == answer.status_code, answer.text
        assert all(map(runs, self.pids)), "a process ended"
        return True


@contextmanager
def victim(**settings: str | int) -> Iterator[Victim]:
    """One node of one shard, with a topic `innocent` of one partition."""
    # Where connections are used up, a new one in place of one that was idle for long would be refused.
    kept = httpx.Limits(keepalive_expiry=None)
    with (
        serve(settings=settings) as url,
        httpx.Client(base_url=url, timeout=60, limits=kept, trust_env=False) as client,
    ):
        assert 201 == client.put("/v1/topics/innocent", json={"partitions": 1}).status_code
        pids = frozenset(processes_of(client.base_url.host))
        assert 3 == len(pids), "a supervisor, a controller and a shard"
        yield Victim(client, pids)


def processes_of(host: str) -> set[int]:
    """Return the processes of the node of this run whose address is `host`.

    By all processes of the machine: the kernel's list of the children of one may lack some while others end.
    """
    wanted = {f"LAMINAR_HOST={host}".encode(), f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}".encode()}
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return {pid for pid in pids if wanted <= environment_of(pid)}


def environment_of(pid: int) -> set[bytes]:
    """Return the environment that a process was started with; nothing for one that ended."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def runs(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def rss_bytes(pid: int) -> int:
    """Return what a process holds in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU time that processes have used, in seconds, of all their threads together."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
