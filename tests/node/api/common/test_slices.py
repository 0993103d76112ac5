"""Work in slices lets the loop turn; what is costly is asked once for all who wait."""

from __future__ import annotations

import asyncio

from laminar.node.api.common.slices import SLICE_MS, Kept, in_slices
from laminar.node.host.clock import Clock


class Ticking(Clock):
    """A clock that a test moves."""

    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms


async def test_the_loop_turns_when_a_slice_is_over() -> None:
    """Each thing takes a slice here, so another task runs between any two."""
    clock, seen = Ticking(), list[str]()

    def work(thing: int) -> None:
        seen.append(f"{thing}")
        clock.now_ms += SLICE_MS

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await in_slices(range(3), work, clock=clock)
    beside.cancel()

    assert ["0", "other", "1", "other", "2", "other"] == seen


async def test_a_result_is_asked_once_and_kept_until_its_time_or_version_is_over() -> None:
    clock, version, asked = Ticking(), 1, 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        number = asked
        await asyncio.sleep(0)
        return number

    kept = Kept(ask, clock=clock, version=lambda: version, keep_s=1.0)

    assert [1, 1, 1] == list(await asyncio.gather(kept.get(), kept.get(), kept.get()))
    clock.now_ms += 999
    assert 1 == await kept.get()
    version = 2
    assert 2 == await kept.get()
    clock.now_ms += 1000
    assert 3 == await kept.get()


async def test_one_who_goes_away_does_not_cancel_the_question_of_the_others() -> None:
    ended = asyncio.Event()

    async def ask() -> str:
        await ended.wait()
        return "answer"

    kept = Kept(ask, clock=Ticking())
    impatient, patient = asyncio.create_task(kept.get()), asyncio.create_task(kept.get())
    await asyncio.sleep(0)
    impatient.cancel()
    ended.set()

    assert "answer" == await patient
