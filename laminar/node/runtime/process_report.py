"""The report of a process in a bundle: its loop, its threads' stacks, the last lines of its log."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Final

import msgspec

from laminar.node.host.loop_health import LoopHealth
from laminar.node.runtime.recent_log import LogLine, RecentLog, frames_of

MOST_THREADS: Final = 64


class ProcessReport(msgspec.Struct, frozen=True, array_like=True):
    """A process's report. `loop` has the counters of its event loop, and percentiles of the loop's delay."""

    role: int
    pid: int
    loop: dict[str, float]
    last_long_turn: list[str]
    threads: list[list[str]]
    log: list[LogLine]


def report_of(role: int, health: LoopHealth, recent: RecentLog | None) -> ProcessReport:
    """Return the report of this process, with the stacks of its threads as of now."""
    stacks: dict[int, Any] = sys._current_frames()
    loop = dict(health.statistics())
    for name, share in (("delay_p50_seconds", 0.5), ("delay_p99_seconds", 0.99)):
        # What is beyond the last bound is as much as was ever seen: infinity is no number of JSON.
        loop[name] = min(health.delays.percentile(share), health.lag_max_s)
    mine = threading.get_ident()
    return ProcessReport(
        role=role,
        pid=os.getpid(),
        loop=loop,
        last_long_turn=health.last_frames,
        threads=[frames_of(frame) for _, frame in sorted(stacks.items(), key=lambda item: item[0] != mine)][
            :MOST_THREADS
        ],
        log=[] if recent is None else recent.lines(),
    )
