"""Which operations of the fault disk go wrong, and how: rules, in order, the first that matches decides.

Rules are plain values, so that a test, a seed or a file beside a running node may name them.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec


class Rule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One fault: where, when, and what. Only one of the effects.

    `operation` and `path` are patterns (`*`): "read", "write", "reserve", "sync", "truncate", "create",
    "rename", "unlink", "make directory", "sync directory". `first_byte` to `last_byte`, both included, narrow
    reads and writes.
    """

    operation: str = "*"
    path: str = "*"
    first_byte: int = 0
    last_byte: int = 1 << 62
    # When: so many matching operations pass first; then at most so many go wrong; each with this chance.
    after: int = 0
    times: int | None = None
    chance: float = 1.0
    # What: the name of an errno; a delay; a read that has to wait for the disk; a write that is acknowledged
    # and never happens, or lands so many bytes away; a read that finds one bit flipped, for good.
    error: str = ""
    stall_ms: float = 0
    cold: bool = False
    lost: bool = False
    astray_bytes: int = 0
    rot: bool = False

    @property
    def kind(self) -> str:
        """For counting."""
        effects = ("stall_ms", "cold", "lost", "astray_bytes", "rot")
        return self.error or next((name for name in effects if getattr(self, name)), "none")

    @property
    def errno(self) -> int:
        return int(getattr(errno, self.error)) if self.error else 0


class Rules:
    """An ordered list of rules, and how often each kind of fault has happened."""

    def __init__(self, rules: list[Rule], rng: random.Random) -> None:
        for rule in rules:
            assert rule.errno >= 0 and rule.kind != "none", f"a rule without an effect: {rule}"
        self.rules = rules
        self.happened: Counter[str] = Counter()
        self._rng = rng
        self._seen = [0] * len(rules)
        self._done = [0] * len(rules)

    def find(self, operation: str, path: str, position: int, size: int) -> Rule | None:
        """The rule for this operation, which counts as used."""
        for place, rule in enumerate(self.rules):
            if not fnmatchcase(operation, rule.operation) or not fnmatchcase(path, rule.path):
                continue
            if size and not (position <= rule.last_byte and rule.first_byte < position + size):
                continue
            self._seen[place] += 1
            if self._seen[place] <= rule.after or self._done[place] == rule.times:
                continue
            if rule.chance < 1 and self._rng.random() >= rule.chance:
                continue
            self._done[place] += 1
            self.happened[rule.kind] += 1
            return rule
        return None


class RulesFile:
    """Rules that a test may change while a node runs: a JSON list, looked at before each operation."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self._path = Path(path)
        self._rng = rng
        self._read = (0, 0)
        self._rules = Rules([], rng)

    def current(self) -> Rules:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return self._rules
        # Two that are put there within a tick of the kernel's clock have the same time, and other inodes.
        version = (found.st_mtime_ns, found.st_ino)
        if version != self._read:
            self._rules = Rules(msgspec.json.decode(self._path.read_bytes(), type=list[Rule]), self._rng)
            self._read = version
        return self._rules


class Gate:
    """Holds every operation that matches until it is opened; for tests with threads."""

    def __init__(self, operation: str, path: str) -> None:
        self.operation = operation
        self.path = path
        self.reached = threading.Event()
        self._open = threading.Event()

    def pass_through(self, operation: str, path: str) -> None:
        if fnmatchcase(operation, self.operation) and fnmatchcase(path, self.path):
            self.reached.set()
            self._open.wait()

    def open(self) -> None:
        self._open.set()
