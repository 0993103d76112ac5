"""The last lines of a process's log, kept in memory for a bundle (`laminar doctor --bundle`).

A bundle is given to other people, so parts of a line that may be data are left out: the text is kept only if
it is a constant of the program, an argument only if it is a number or a short text. The code that makes the
bundle decides which of these texts are shown. Of an error its type and the places of its traceback are kept.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Container
from types import FrameType, TracebackType
from typing import Final

import msgspec

MOST_LINES: Final = 200
MOST_ARGUMENTS: Final = 8
LONGEST_ARGUMENT: Final = 120
MOST_FRAMES: Final = 30
LEFT_OUT: Final = "(left out)"
# How far up the callers of a log call its text is looked for: through `logging` and `LimitedLog`.
_MOST_CALLERS: Final = 12

Argument = int | float | bool | str | None


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """One log line: `text` is the format string in the source, `arguments` are the values for it.

    `kinds` has the types of the arguments: of an argument that is neither number nor text, only the type is
    kept. `error` is the type of a logged exception, and `frames` are the places of its traceback.
    """

    at_ms: int
    level: str
    logger: str
    place: str
    text: str
    arguments: list[Argument]
    kinds: list[str]
    error: str = ""
    frames: list[str] = []

    def shown(self, known: Container[str]) -> list[Argument]:
        """Return the arguments as a bundle may show them.

        Numbers are shown, and texts that are `known` names; of all others only the type, in brackets.
        """
        return [
            (each if each in known else LEFT_OUT)
            if isinstance(each, str)
            else (each if each is not None or kind == "NoneType" else f"({kind})")
            for each, kind in zip(self.arguments, self.kinds, strict=True)
        ]


class RecentLog(logging.Handler):
    """A logging handler that keeps the last `MOST_LINES` lines in memory."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[LogLine] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as a line, without what may be data."""
        kind, traceback = (record.exc_info or (None, None, None))[::2]
        arguments = record.args[:MOST_ARGUMENTS] if isinstance(record.args, tuple) else ()
        self._lines.append(
            LogLine(
                at_ms=int(record.created * 1000),
                level=record.levelname.lower(),
                logger=record.name,
                place=f"{record.filename}:{record.lineno}",
                text=record.msg if _is_constant(record.msg) else LEFT_OUT,
                arguments=[_kept(each) for each in arguments],
                kinds=[type(each).__name__ for each in arguments],
                error="" if kind is None else kind.__name__,
                frames=[] if traceback is None else frames_of_error(traceback),
            )
        )

    def lines(self) -> list[LogLine]:
        """Return the lines, the oldest first."""
        self.acquire()
        try:
            return list(self._lines)
        finally:
            self.release()


def _is_constant(text: object) -> bool:
    """Return whether a text is a constant of a function in the call stack, so that it can't be data."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_CALLERS):
        if frame is None:
            break
        if type(text) is str and text in frame.f_code.co_consts:
            return True
        frame = frame.f_back
    return False


def _kept(argument: object) -> Argument:
    if argument is None or type(argument) in (int, float, bool):
        return argument  # type: ignore[return-value]
    if type(argument) is str:
        return argument if len(argument) <= LONGEST_ARGUMENT else LEFT_OUT
    return None


def frames_of_error(traceback: TracebackType) -> list[str]:
    """Return the places in an error's traceback, the innermost first."""
    frames = []
    step: TracebackType | None = traceback
    while step is not None:
        frames.append(_place(step.tb_frame, step.tb_lineno))
        step = step.tb_next
    return frames[::-1][:MOST_FRAMES]


def frames_of(frame: FrameType | None) -> list[str]:
    """Return the places of a stack, the innermost first: file, line and function, and nothing else."""
    frames: list[str] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(_place(frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _place(frame: FrameType, line: int) -> str:
    parts = frame.f_code.co_filename.split("/")
    return f"{'/'.join(parts[-3:])}:{line} {frame.f_code.co_name}"
