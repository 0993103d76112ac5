"""A node whose loops write down every turn of over 5 ms, with the callback that took most of it.

    LOOP_TURNS=<folder> python -m benches.common.timed_node <flags of a node>

A turn is what a loop does between two looks at its sockets. What counts is its CPU time, which a busy
neighbour on the machine does not change, and its *blocked* time: neither running nor waiting for a CPU, so
waiting for the interpreter lock, a disk or a page. Time in which the thread was ready and had no CPU is left
out. While a turn lasts, a thread of its own takes samples of the loop's stack. Each process appends lines of
JSON to `<folder>/<pid>`, a `Turn` each, and every second a line with what all turns since its start took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import uvloop

FOLDER: Final = "LOOP_TURNS"
LONG_S: Final = 0.005
_SAMPLE_S: Final = 0.002
_DEEPEST: Final = 8
_MOST_NAMED: Final = 3
_TOTALS_S: Final = 1.0


@dataclass(slots=True)
class Turn:
    """One long turn: when it began (`time.monotonic`), what it took, and which callbacks took most."""

    process: str
    at_s: float
    wall_ms: float
    cpu_ms: float
    blocked_ms: float
    callbacks: int
    outside_ms: float
    """CPU time outside of callbacks: the loop's own reads and writes of sockets."""
    heaviest: dict[str, tuple[float, int]]
    """The callbacks that took most: their CPU time in ms, and how many there were."""
    stacks: list[list[str]] = field(default_factory=list)
    """Samples: file, line and function of the innermost frames, the innermost first."""


def read(folder: Path) -> Iterator[Turn]:
    """Yield the long turns that all processes of a folder have written so far."""
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            found = json.loads(line)
            if "turns" not in found:
                yield Turn(**found)


class TimedLoop(uvloop.Loop):
    """A uvloop whose callbacks are timed: those of handles, timers and readers, and those of protocols."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0
        self._in_turn = False
        self._began_s = self._began_cpu_s = 0.0
        self._began_waited_s = 0.0
        self._callbacks = 0
        self._took: dict[Any, tuple[float, int]] = {}
        self._thread_id = 0
        self._stacks: list[list[str]] = []
        self._schedstat = -1
        self._turns = 0
        self._turns_cpu_s = 0.0
        self._written: list[Turn] = []
        self._classes: dict[type, type] = {}

    # -- what is timed ---------------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon(self._timed, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_soon_threadsafe(self._timed, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_later(delay, self._timed, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return super().call_at(when, self._timed, callback, *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        super().add_reader(fd, self._timed, callback, *args)

    async def create_server(self, protocol_factory: Any, *args: Any, **named: Any) -> Any:
        return await super().create_server(self._making(protocol_factory), *args, **named)

    async def create_unix_server(self, protocol_factory: Any, *args: Any, **named: Any) -> Any:
        return await super().create_unix_server(self._making(protocol_factory), *args, **named)

    async def create_connection(self, protocol_factory: Any, *args: Any, **named: Any) -> Any:
        return await super().create_connection(self._making(protocol_factory), *args, **named)

    async def create_unix_connection(self, protocol_factory: Any, *args: Any, **named: Any) -> Any:
        return await super().create_unix_connection(self._making(protocol_factory), *args, **named)

    async def connect_accepted_socket(self, protocol_factory: Any, *args: Any, **named: Any) -> Any:
        return await super().connect_accepted_socket(self._making(protocol_factory), *args, **named)

    def _making(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:
            protocol = factory()
            kind = type(protocol)
            timed = self._classes.get(kind)
            if timed is None:
                timed = self._classes[kind] = self._timed_class(kind)
            protocol.__class__ = timed
            return protocol

        return make

    def _timed_class(self, kind: type) -> type:
        """Return a class of the same layout whose methods that the loop calls are timed."""

        def method(name: str) -> Any:
            original = getattr(kind, name)

            def timed(protocol: Any, *args: Any) -> Any:
                return self._timed(original, protocol, *args)

            return timed

        names = ("data_received", "buffer_updated", "resume_writing", "connection_lost", "connection_made")
        members = {name: method(name) for name in names if hasattr(kind, name)}
        return type(kind.__name__, (kind,), {"__slots__": (), **members})

    # -- turns -----------------------------------------------------------------------------------

    def _timed(self, callback: Any, *args: Any) -> Any:
        if not self._in_turn:
            if not self._thread_id:
                self._start()
            self._in_turn = True
            self._callbacks = 0
            self._took.clear()
            # The handles that are ready run at the beginning of the next turn: so this one ends it.
            super().call_soon(self._end_turn)
            self._began_waited_s = self._waited_s()
            self._began_cpu_s = time.thread_time()
            self._began_s = time.monotonic()
            self._turn += 1
        self._callbacks += 1
        began_s = time.thread_time()
        try:
            return callback(*args)
        finally:
            took_s = time.thread_time() - began_s
            key = _key_of(callback)
            before_s, count = self._took.get(key, (0.0, 0))
            self._took[key] = before_s + took_s, count + 1

    def _end_turn(self) -> None:
        wall_s = time.monotonic() - self._began_s
        cpu_s = time.thread_time() - self._began_cpu_s
        self._in_turn = False
        self._turns += 1
        self._turns_cpu_s += cpu_s
        if wall_s < LONG_S:
            return
        blocked_s = wall_s - cpu_s - (self._waited_s() - self._began_waited_s)
        if cpu_s < LONG_S and blocked_s < LONG_S:
            self._stacks = []
            return
        stacks, self._stacks = self._stacks, []
        heaviest = sorted(self._took.items(), key=lambda each: -each[1][0])[:_MOST_NAMED]
        outside_s = cpu_s - sum(took_s for took_s, _ in self._took.values())
        self._written.append(
            Turn(
                f"{os.getpid()}",
                round(self._began_s, 4),
                round(1000 * wall_s, 2),
                round(1000 * cpu_s, 2),
                round(1000 * blocked_s, 2),
                self._callbacks,
                round(1000 * outside_s, 2),
                {_name_of(key): (round(1000 * took_s, 2), count) for key, (took_s, count) in heaviest},
                stacks[:_DEEPEST],
            )
        )

    def _waited_s(self) -> float:
        """Return how long this thread has been ready without a CPU."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    # -- the thread beside -----------------------------------------------------------------------

    def _start(self) -> None:
        self._thread_id = threading.get_ident()
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        threading.Thread(target=self._watch, name="turns", daemon=True).start()

    def _watch(self) -> None:
        file = (Path(os.environ[FOLDER]) / str(os.getpid())).open("a", buffering=1)
        name = " ".join(sys.argv[-1:])
        seen, said_s = 0, time.monotonic()
        while True:
            time.sleep(_SAMPLE_S)
            if self._in_turn and self._turn == seen:
                frame = sys._current_frames().get(self._thread_id)
                if frame is not None and len(self._stacks) < _DEEPEST:
                    self._stacks.append(_stack_of(frame))
            else:
                seen = self._turn
            while self._written:
                turn = self._written.pop(0)
                file.write(json.dumps(asdict(turn)) + "\n")
            if time.monotonic() - said_s >= _TOTALS_S:
                said_s = time.monotonic()
                file.write(json.dumps({"turns": self._turns, "cpu_s": self._turns_cpu_s, "of": name}) + "\n")


def _place(code: CodeType, line: int) -> str:
    return f"{'/'.join(code.co_filename.split('/')[-2:])}:{line} {code.co_qualname}"


def _stack_of(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < _DEEPEST and frame.f_code.co_name != "run_process":
        if "timed_loop.py" not in frame.f_code.co_filename:
            found.append(_place(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _key_of(callback: Any) -> Any:
    """Return what all calls of one kind have in common: the code of a task's coroutine, or a function."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "cr_code", None)
    return getattr(getattr(callback, "func", callback), "__func__", getattr(callback, "func", callback))


def _name_of(key: Any) -> str:
    if isinstance(key, CodeType):
        return "task " + key.co_qualname
    return getattr(key, "__qualname__", None) or type(key).__name__
