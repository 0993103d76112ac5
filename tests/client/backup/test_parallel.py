"""Work in threads, and its cancellation."""

from __future__ import annotations

import asyncio
import threading

import pytest

from laminar.client.backup.parallel import for_each, in_thread


async def test_a_cancellation_is_raised_after_the_thread_has_ended() -> None:
    """Else the file that a thread writes would be closed meanwhile. Repeated cancellations change nothing."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert go_on.wait(60)
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_the_first_error_is_raised_when_no_thread_runs_any_more() -> None:
    """The work on other partitions is cancelled, and its threads have ended."""
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        assert go_on.wait(60)
        ended.set()

    async def work(number: int) -> None:
        if number == 0:
            await in_thread(slow)
        await asyncio.to_thread(began.wait)
        asyncio.get_running_loop().call_soon(go_on.set)
        raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        await for_each([0, 1], work)
    assert ended.is_set()


async def test_the_result_and_the_error_of_a_thread_are_those_of_the_call() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)
