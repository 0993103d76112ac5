"""The watch over a process's event loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

import pytest

from laminar.node.host import loop_health
from laminar.node.host.loop_health import (
    FULL_AT_LEAST_S,
    FULL_BLOCKS,
    FULL_COLLECTION_S,
    FULL_GROWTH,
    IDLE_TICK_S,
    LEAST_GARBAGE,
    TICK_S,
    LoopHealth,
)


def _a_long_turn() -> None:
    time.sleep(0.5 + IDLE_TICK_S)


async def test_pitfall_44_a_long_turn_is_counted_with_its_stack_and_as_lag() -> None:
    """So that whoever sees elections or slow answers finds what held the loop up."""
    health = LoopHealth()
    health.start()
    try:
        # Where the machine itself stands still just before, the watch may have seen that in our place.
        for _ in range(5):
            await _next_tick(health)
            _a_long_turn()
            stack = health.last_stack
            await _next_tick(health)
            if "_a_long_turn" in stack:
                break
        found = health.statistics()
    finally:
        health.stop()

    assert found["long_turns"] >= 1
    assert found["lag_max_seconds"] >= 0.4
    assert "_a_long_turn" in stack


def _make_garbage(number: int) -> None:
    for _ in range(number):
        ring: list[object] = []
        ring.append(ring)


async def _next_tick(health: LoopHealth) -> None:
    ticks = health.ticks
    while health.ticks == ticks:  # noqa: ASYNC110  # a counter
        await asyncio.sleep(0.01)


async def test_an_idle_process_ticks_less_often_and_a_busy_one_at_once_more_often() -> None:
    """Ticks took half of the CPU time of an idle process."""
    health = LoopHealth()
    health.start()
    try:
        async with asyncio.timeout(60):
            while health._tick_s != IDLE_TICK_S:  # noqa: ASYNC110  # a number
                await asyncio.sleep(IDLE_TICK_S)
            began_s, ticks = time.monotonic(), health.ticks
            while health.ticks < ticks + 3:  # noqa: ASYNC110  # a counter
                await asyncio.sleep(IDLE_TICK_S)
        assert time.monotonic() - began_s >= 2 * IDLE_TICK_S, "three ticks, the first of which may be near"
        async with asyncio.timeout(60):
            while health._tick_s != TICK_S:
                sum(range(20_000))
                await asyncio.sleep(0)
    finally:
        health.stop()


async def test_garbage_is_collected_by_us_and_not_in_the_middle_of_a_burst() -> None:
    """Python's own collector stands still meanwhile, and runs again when the watch ends."""
    health = LoopHealth()
    health.start()
    try:
        assert not gc.isenabled()
        _make_garbage(LEAST_GARBAGE)
        async with asyncio.timeout(30):
            while not health.collections:
                await _next_tick(health)
    finally:
        health.stop()

    assert gc.isenabled()


async def test_an_idle_process_is_not_stopped_to_look_for_garbage_that_it_has_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is a look each second otherwise."""
    monkeypatch.setattr(loop_health, "LOOK_AT_GARBAGE_S", 0.0)
    health = LoopHealth()
    health.start()
    try:
        _make_garbage(LEAST_GARBAGE)
        async with asyncio.timeout(30):
            while not health.collections:
                await _next_tick(health)
        collections = health.collections
        for _ in range(4):
            await _next_tick(health)
    finally:
        health.stop()

    assert collections == health.collections


def test_everything_is_looked_at_for_garbage_only_when_there_may_be_some() -> None:
    """A full collection stops the loop, and an idle node would have one a minute for nothing."""
    health = LoopHealth()
    health._full_blocks = sys.getallocatedblocks()

    assert not health._is_full_due(FULL_COLLECTION_S + 1)
    made: list[list[int]] = [[] for _ in range(int(health._full_blocks * FULL_GROWTH) + FULL_BLOCKS + 1000)]
    assert health._is_full_due(FULL_COLLECTION_S + 1)
    assert not health._is_full_due(FULL_COLLECTION_S - 1), "whatever there is"
    made.clear()
    assert not health._is_full_due(FULL_COLLECTION_S + 1)
    assert health._is_full_due(FULL_AT_LEAST_S)
