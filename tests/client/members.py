"""Members of a group as processes of their own: what each read and committed is what it printed.

A member prints a record before it does anything else with it, and that it committed after it did. So what is
behind its last commit may be read again by another; nothing else may.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import laminar
from laminar.testing import nodes

ROOT = Path(__file__).parents[2]
# It ends what hangs, and judges nothing.
PATIENCE_S = 300.0
Place = tuple[int, int]


class MemberProcess:
    """One member that commits after every so many records."""

    def __init__(
        self,
        urls: Sequence[str],
        topic: str,
        group: str,
        *,
        session_s: float = 2.0,
        every: int = 1,
        tag: str = "",
    ) -> None:
        arguments = [",".join(urls), topic, group, str(session_s), str(every), tag]
        command = [sys.executable, "-m", "tests.client.member_program", *arguments]
        told, log = os.pipe()
        self._told = open(told, encoding="utf-8")  # noqa: SIM115 - until `close`
        with open(log, "wb") as writer:
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            self.process = nodes.start_process(command, env=environment, log=writer)
        # (the member's monotonic clock, which is everybody's on this machine; words) of each line.
        self.lines: list[tuple[float, list[str]]] = []
        # Of each record it was given, in order: when, and its place. And the places alone.
        self._read: list[tuple[float, Place]] = []
        self.places: set[Place] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._told:
            if not line.endswith("\n"):
                return  # it was killed while it printed
            at_s, *words = line.split() or [""]
            if not (at_s[:1].isdecimal() and words):
                print("member:", line, end="", file=sys.stderr)  # of standard error
                continue
            self.lines.append((float(at_s), words))
            if words[0] == "read":
                place = int(words[1]), int(words[2])
                self._read.append((float(at_s), place))
                self.places.add(place)

    @property
    def joined(self) -> bool:
        return bool(self.lines)

    @property
    def read(self) -> list[Place]:
        """(partition, offset) of every record it was given, in order."""
        return [place for _, place in list(self._read)]

    def read_since(self, since_s: float) -> list[Place]:
        """The same, of what came since then by the monotonic clock."""
        # Its lines are in the order of its clock.
        return [place for _, place in self._read[bisect_left(self._read, (since_s,)) :]]

    def owns(self) -> list[tuple[float, set[int]]]:
        """(since when, which partitions) it owned, as it saw it, in order."""
        return [(at_s, set(map(int, words[1:]))) for at_s, words in list(self.lines) if words[0] == "owns"]

    @property
    def uncommitted(self) -> set[Place]:
        """What it was given behind its last commit, and where its commit was refused."""
        found: set[Place] = set()
        fenced: set[Place] = set()
        for _, words in list(self.lines):
            if words[0] == "read":
                found.add((int(words[1]), int(words[2])))
            elif words[0] == "committed":
                found.clear()
            elif words[0] == "fenced":
                lost = {int(number) for number in " ".join(words[1:]).split(", ")}
                fenced |= {place for place in found if place[0] in lost}
                found.clear()
        return found | fenced

    def kill(self) -> None:
        """SIGKILL; what it printed before is still read."""
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def close(self) -> None:
        self.kill()
        self._told.close()


@contextlib.contextmanager
def ended(members: list[MemberProcess]) -> Iterator[list[MemberProcess]]:
    """No member outlives the block."""
    try:
        yield members
    finally:
        for member in members:
            member.close()


class Writing:
    """A thread that appends a record to every partition in every pause, until it is told to end.

    Their tags are `tags` in turn. It does not outlive the block.
    """

    def __init__(
        self,
        urls: Sequence[str],
        topic: str,
        partitions: int,
        *,
        pause_s: float = 0.2,
        tags: Sequence[str | None] = (None,),
    ) -> None:
        self._tags = tags
        self._ending = threading.Event()
        self._urls, self._topic = list(urls), topic
        self._partitions, self._pause_s = partitions, pause_s
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        with laminar.connect(self._urls, timeout=60) as client:
            with client.topic(self._topic).producer() as producer:
                number = 0
                while not self._ending.wait(self._pause_s):
                    for partition in range(self._partitions):
                        tag = self._tags[number % len(self._tags)]
                        producer.send(b"%d" % number, partition=partition, tag=tag)
                    number += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._thread.join()

    def end(self) -> dict[int, int]:
        """Where the partitions end, when all is there."""
        self._ending.set()
        self._thread.join()
        with laminar.connect(self._urls, timeout=60) as client:
            return client.topic(self._topic).offsets("latest")


def until(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Wait for something that processes of others do."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        time.sleep(0.02)


def check(members: Sequence[MemberProcess], ends: dict[int, int], *, every: int = 1) -> int:
    """What was read up to `ends`, of every so many records: in order, and what was committed once only."""
    counts = Counter(place for member in members for place in member.read)
    wanted = {(partition, offset) for partition, end in ends.items() for offset in range(0, end, every)}
    assert set() == wanted - counts.keys(), f"never read: {sorted(wanted - counts.keys())[:10]}"
    twice = {place for place, count in counts.items() if count > 1}
    may = set[Place]().union(*(member.uncommitted for member in members))
    assert set() == counts.keys() - wanted, f"not chosen: {sorted(counts.keys() - wanted)[:10]}"
    assert set() == twice - may, f"committed and read twice: {sorted(twice - may)[:10]}"
    for member in members:
        last: dict[int, int] = {}
        for partition, offset in member.read:
            assert offset > last.get(partition, -1) or (partition, offset) in may, "out of order"
            last[partition] = offset
    return sum(count - 1 for count in counts.values())
