"""Count the Python calls of a journey through the code: how many, in how many files, with how many moves.

A move is a call of a function that lies in another file than the function called before it. So a journey that
goes back and forth between two files has many moves in few files. Only the product counts, not what it
imports. Every thread counts; threads are merged in the order in which their calls were made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("laminar", "raft", "membership", "router"))


@dataclass(frozen=True, slots=True)
class Figures:
    """What was counted on one journey."""

    calls: int
    files: int
    moves: int


class Trace:
    """A recorder of calls. Start it before the journey, and stop it when the result is there."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._names: dict[Any, str | None] = {}
        self._paused = False

    def start(self) -> None:
        """Record the calls of this thread, and of threads that are started from now on."""
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: for the calls by which a journey's end is looked for."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or self._paused:
            return
        code = frame.f_code
        try:
            file = self._names[code]
        except KeyError:
            name = code.co_filename
            file = self._names[code] = name if name.startswith(PACKAGES) else None
        if file is not None:
            self._files.append(file)

    def figures(self) -> Figures:
        """Return what was counted."""
        files = self._files
        moves = sum(one != other for one, other in pairwise(files))
        return Figures(calls=len(files), files=len(set(files)), moves=moves)

    def path(self) -> list[str]:
        """Return the files in the order of the moves, as paths below the project's folder."""
        path: list[str] = []
        for file in self._files:
            name = str(Path(file).relative_to(ROOT))
            if not path or path[-1] != name:
                path.append(name)
        return path
