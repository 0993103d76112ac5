"""A node in processes of its own that is attacked over HTTP: which processes it has, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from laminar.testing.nodes import serve


@dataclass(frozen=True, slots=True)
class Victim:
    """`pids` are its processes as they were when it was ready."""

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
        assert self.pids <= processes_of(self.http.base_url.host), "a process ended"
        return True


@contextmanager
def victim(**settings: str | int) -> Iterator[Victim]:
    """One node of one shard, with a topic `innocent` of one partition."""
    with serve(settings=settings) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        assert 201 == client.put("/v1/topics/innocent", json={"partitions": 1}).status_code
        pids = frozenset(processes_of(client.base_url.host))
        assert 3 == len(pids), "a supervisor, a controller and a shard"
        yield Victim(client, pids)


def processes_of(host: str) -> set[int]:
    """Return the processes of the node whose address is `host`, and no others of this process."""
    mark = f"LAMINAR_HOST={host}".encode()
    return {pid for pid in descendants(os.getpid()) if mark in environment_of(pid)}


def environment_of(pid: int) -> list[bytes]:
    """Return the environment that a process was started with; nothing for one that ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def descendants(pid: int) -> set[int]:
    """Return the processes below one."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found.update(children)
            waiting += children
    return found


def rss_bytes(pid: int) -> int:
    """Return what a process holds in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
