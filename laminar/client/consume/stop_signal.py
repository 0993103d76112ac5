"""SIGTERM ends all workers of a process, unless the program handles the signal itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_stops: list[Callable[[], None]] = []


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for stop in list(_stops):
        stop()


@contextmanager
def at_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` if SIGTERM arrives in this block.

    Nothing is done if the program has a handler of its own, or in a thread other than the main one, which
    cannot set handlers. `stop` is called between two instructions of the main thread: it must only wake a
    loop.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or (not _stops and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL):
        yield
        return
    _stops.append(stop)
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    finally:
        _stops.remove(stop)
        if not _stops:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
