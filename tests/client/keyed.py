"""Numbered records of some keys: how they are sent while routes change, and what members read of them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Self

import laminar
from tests.client.members import MemberProcess

KEYS = 8


class Keyed:
    """A thread that sends numbered records of each key, in order, until it or its block ends."""

    def __init__(self, url: str | Sequence[str], topic: str, *, pause_s: float = 0.15) -> None:
        self._ending = threading.Event()
        self._url, self._topic, self._pause_s = url, topic, pause_s
        self.sent = 0
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            with laminar.connect(self._url, timeout=60) as client, client.topic(self._topic).producer() as to:
                while not self._ending.wait(self._pause_s):
                    for key in range(KEYS):
                        to.send(b"%d-%d" % (key, self.sent), key=b"key %d" % key)
                    self.sent += 1
        except BaseException as failure:
            self.failures.append(failure)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._thread.join()

    def end(self) -> int:
        """How many of each key there are, when all are acknowledged."""
        self._ending.set()
        self._thread.join()
        assert not self.failures, self.failures
        return self.sent


def read_of(member: MemberProcess, *, after: int = 0) -> list[tuple[float, int, int, int]]:
    """(when, key, number, partition) of each record that it was given, behind its first `after` lines."""
    found = []
    for at_s, words in member.lines[after:]:
        if words[0] == "read":
            key, number = words[3].split("-")
            found.append((at_s, int(key), int(number), int(words[1])))
    return found


def check(members: list[MemberProcess], count: int) -> None:
    """Each record was read; those of a key in order, but for what was not committed when a member died.

    Such a record comes again only while no later one was read in a partition that follows its own.
    """
    events = sorted(event for member in members for event in read_of(member))
    seen: dict[int, set[int]] = defaultdict(set)
    newest: dict[int, tuple[int, int]] = {}
    for _, key, number, partition in events:
        assert set(range(number)) <= seen[key], f"key {key}: {number} came before what is before it"
        seen[key].add(number)
        last, at = newest.get(key, (-1, partition))
        assert number > last or partition == at, f"key {key}: {number} of {partition} after {last} of {at}"
        if number > last:
            newest[key] = (number, partition)
    assert {key: set(range(count)) for key in range(KEYS)} == dict(seen)


def read_all(members: list[MemberProcess], count: int) -> Callable[[], bool]:
    """What to wait for until each record was read; a line is looked at once, however often this is asked."""
    seen: set[tuple[int, int]] = set()
    looked_at: dict[int, int] = defaultdict(int)

    def is_read() -> bool:
        for number, member in enumerate(members):
            until = len(member.lines)
            seen.update(event[1:3] for event in read_of(member, after=looked_at[number]))
            looked_at[number] = until
        return len(seen) == KEYS * count

    return is_read
