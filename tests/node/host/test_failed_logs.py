"""A process with a failed log ends in order when that helps: after a pause, and not on a full disk."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.node.host.failed_logs import LONGEST_PAUSE_S, RestartToRecover, pause_s
from laminar.node.runtime.process import Process


def test_each_comeback_is_waited_for_longer_than_the_last() -> None:
    """A disk that fails for good must not keep the other logs of a process from serving."""
    pauses = [pause_s(number) for number in range(40)]

    assert all(2 * one == other for one, other in pairwise(pauses[:9]))
    assert LONGEST_PAUSE_S == pauses[-1] == max(pauses)


async def test_a_process_with_a_failed_log_ends_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before a log has failed, and not while a recovery would find the disk full."""
    monkeypatch.setattr("laminar.node.runtime.process.CHECK_S", 0.001)
    monkeypatch.setattr("laminar.node.runtime.process.pause_s", lambda recovery_restarts: 0.001)
    log = SimpleNamespace(name="t-0", failure=None)
    process: Any = SimpleNamespace(
        storage=SimpleNamespace(failed_logs=lambda: [log] if log.failure is not None else [], refusal="disk"),
        boot=SimpleNamespace(
            recovery_restarts=0, data_directory=".", settings=SimpleNamespace(journal_file_bytes=1)
        ),
        environment=SimpleNamespace(disk=SimpleNamespace(free_bytes=lambda directory: 100)),
        stopping=asyncio.Event(),
        ended=[],
    )

    def fatal(error: BaseException) -> None:
        process.ended.append(error)
        process.stopping.set()

    process.fatal = fatal
    process.stopped_within = lambda seconds: Process.stopped_within(process, seconds)
    process._has_room = lambda: Process._has_room(process)
    process.awaiting_restart = lambda: Process.awaiting_restart(process)
    process._restart_to_recover = lambda: Process._restart_to_recover(process)
    assert Process.check_failed_logs(process) is None
    log.failure = OSError("no room")
    work = Process.check_failed_logs(process)
    assert work is not None
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    assert not process.ended
    process.storage.refusal = None
    async with asyncio.timeout(60):
        await task

    [error] = process.ended
    assert isinstance(error, RestartToRecover) and "t-0 (no room)" in str(error)
