"""Deadlines of many groups in one heap: each is dealt with in time, and one timer of the loop serves all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from laminar.node.consensus.driver import Driver
from laminar.node.consensus.timekeeper import MOST_DUE
from laminar.node.consensus.timers import Alarm, Deadlines
from laminar.node.host.clock import Clock
from raft.values import Became, Ready, Role
from tests.mutation import need_pure_build


class Group:
    """A replica whose core is due again and again."""

    def __init__(self, number: int, due_ms: int, *, interval_ms: int) -> None:
        self.group = self.name = number
        self.core = self
        self.log = SimpleNamespace(last_index=0, last_term=0)
        self.role, self.leading = Role.LEADER, False
        self.machine = SimpleNamespace(led=lambda leading: None)
        self.on_match = None
        self.log_regressed = self.is_idle = self.quiesced = self.is_electing = False
        self.second_leader = 0
        self.due_ms, self.interval_ms = due_ms, interval_ms
        self.expired = 0

    def deadline_ms(self) -> int:
        return self.due_ms

    def expire(self, *, now_ms: int) -> None:
        assert now_ms >= self.due_ms
        self.expired += 1
        self.due_ms += self.interval_ms

    def take_ready(self) -> Ready:
        return Ready() if self.leading else Ready(became=Became(Role.LEADER, 1, 1))


def lone_driver(clock: Clock, errors: list[BaseException]) -> Driver:
    """Return a driver that has nothing but its clock; what ends it is added to `errors`."""
    storage: Any = SimpleNamespace(
        end_turns_with=lambda on_turn_end: None, schedule_turn_end=None, before_turn_end=None
    )
    transport: Any = SimpleNamespace(pause_bulk=None, resume_bulk=None)
    return Driver(
        storage=storage,
        transport=transport,
        clock=clock,
        address_of=lambda node, replica: None,
        on_fatal=errors.append,
        heartbeat_ms=10_000,
    )


async def test_a_deadline_that_has_moved_since_it_was_scheduled_comes_all_the_same() -> None:
    """At the earlier instant the group is not due, and is looked at again at the later one."""
    clock = Clock()
    errors: list[BaseException] = []
    driver = lone_driver(clock, errors)
    group: Any = Group(1, clock.monotonic_ms() + 10, interval_ms=60_000)
    driver.add(group)
    group.due_ms += 20
    async with asyncio.timeout(60):
        while not group.expired:  # noqa: ASYNC110  # counted
            await asyncio.sleep(0.002)
    driver.stop()
    assert not errors


async def test_one_timer_serves_all_groups_also_when_many_are_due_at_once() -> None:
    """What is left for another turn replaces the timer and does not add to it."""
    clock = Clock()
    errors: list[BaseException] = []
    driver = lone_driver(clock, errors)
    rings = 0
    on_deadline = driver._timekeeper._deadline_alarm._ring

    def ring(at_ms: int | None) -> None:
        nonlocal rings
        rings += 1
        on_deadline(at_ms)

    driver._timekeeper._deadline_alarm._ring = ring
    due_ms = clock.monotonic_ms() + 50
    groups: list[Any] = [Group(number, due_ms, interval_ms=50) for number in range(4 * MOST_DUE + 1)]
    for group in groups:
        driver.add(group)
    ticks = []
    async with asyncio.timeout(60):
        for interval in range(1, 13):
            while sum(group.expired for group in groups) < interval * len(groups):  # noqa: ASYNC110  # counted
                await asyncio.sleep(0.002)
            ticks.append(rings)
    driver.stop()
    assert not errors
    assert 0 == driver.statistics()["stopped_replicas"]
    # Five turns for those that are due, and as many in which nothing is due yet.
    assert ticks[-1] - ticks[-3] <= 2 * 10, ticks


def test_a_deadline_that_came_nearer_counts_once_and_one_of_a_removed_replica_never() -> None:
    """Entries of the heap that are out of date are passed over."""
    need_pure_build()  # names stand for replicas
    deadlines = Deadlines()
    a: Any = "a"
    b: Any = "b"
    assert deadlines.schedule(a, 100)
    assert not deadlines.schedule(a, 200)
    assert deadlines.schedule(a, 50)
    assert deadlines.schedule(b, 60)
    assert 50 == deadlines.next_ms()
    assert deadlines.pop(49) is None

    assert a == deadlines.pop(50)
    deadlines.remove(b)
    assert deadlines.pop(1000) is None
    assert deadlines.next_ms() is None


async def test_an_alarm_rings_once_at_the_earliest_instant_that_was_asked_for() -> None:
    """A later one does not move it, and a closed one stays silent."""
    clock = Clock()
    rung: list[int | None] = []
    done = asyncio.Event()

    def ring(at_ms: int | None) -> None:
        rung.append(at_ms)
        done.set()

    alarm = Alarm(clock, ring)
    now_ms = clock.monotonic_ms()
    alarm.set(now_ms + 60_000)
    alarm.set(now_ms + 1)
    alarm.set(now_ms + 30_000)
    await asyncio.wait_for(done.wait(), 60)
    assert [now_ms + 1] == rung

    done.clear()
    alarm.set(now_ms + 60_000)
    alarm.set_next_turn()
    alarm.set(now_ms)
    await asyncio.wait_for(done.wait(), 60)
    assert [now_ms + 1, None] == rung

    alarm.set_next_turn()
    alarm.close()
    alarm.set(now_ms)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [now_ms + 1, None] == rung
