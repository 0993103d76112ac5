"""Performs what quiescence plans: sends keepalives when they are due, and delivers notices to cores.

The loss or return of a process may concern thousands of groups, so their notices are delivered in portions,
one in each turn of the loop. A group for which a message or a request waits is notified before that.
"""

from __future__ import annotations

import asyncio

from laminar.node.consensus.outbox import Outbox
from laminar.node.consensus.quiescence import Notice, Quiescence
from laminar.node.consensus.replica import Replica, Stepper
from laminar.node.consensus.timers import Alarm
from laminar.node.host.clock import Clock
from raft.core import Core
from raft.values import Role

# How many groups are notified in one turn of the loop, so that sockets are read in between.
MOST_NOTICES = 64


class Keepalives:
    """The timer of a process's keepalives, and the delivery of the notices that its peers' silence causes."""

    def __init__(self, *, clock: Clock, stepper: Stepper, quiescence: Quiescence, outbox: Outbox) -> None:
        self._clock = clock
        self._stepper = stepper
        self._quiescence = quiescence
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(clock, self._on_alarm)
        # Whether a later turn delivers the rest of the notices.
        self._delivering = False
        self._closed = False

    def set_alarm(self) -> None:
        """Wake when the next keepalives are due, if any are: a group has quiesced, or addresses changed."""
        at_ms = self._quiescence.next_keepalive_ms(self._clock.monotonic_ms())
        if at_ms is not None:
            self._alarm.set(at_ms)

    def deliver(self) -> None:
        """Notify groups of members that are gone or back: some groups now, the rest in later turns."""
        if self._quiescence.notices and not self._delivering:
            self._deliver_portion()

    def deliver_now(self, replica: Replica) -> None:
        """Deliver the pending notice of this group at once, because a message or a request waits for it."""
        notice = self._quiescence.take_notice_of(replica)
        if notice is not None:
            self._deliver(notice)

    def close(self) -> None:
        """Send no more keepalives, and deliver no more notices."""
        self._closed = True
        self._alarm.close()

    def _on_alarm(self, at_ms: int | None) -> None:
        if self._closed:
            return
        try:
            now_ms = self._clock.monotonic_ms()
            due_ms = now_ms if at_ms is None else at_ms
            for address, keepalive in self._quiescence.keepalives(now_ms=now_ms, due_ms=due_ms):
                self._outbox.keepalive(address, keepalive)
            self.deliver()
            self.set_alarm()
        except Exception as error:  # noqa: BLE001  # ends the process
            self._stepper.fail_process(error)

    def _deliver_portion(self) -> None:
        self._delivering = False
        if self._closed:
            return
        try:
            for notice in self._quiescence.take_notices(MOST_NOTICES):
                self._deliver(notice)
        except Exception as error:  # noqa: BLE001  # ends the process
            self._stepper.fail_process(error)
        if self._quiescence.notices and not self._closed:
            self._delivering = True
            self._loop.call_soon(self._deliver_portion)

    def _deliver(self, notice: Notice) -> None:
        if not self._stepper.is_current(notice.replica):
            return
        now_ms = self._clock.monotonic_ms()

        def step(core: Core) -> None:
            if core.role is Role.LEADER:
                core.unquiesce(now_ms=now_ms)
                for member in notice.members:
                    core.unreachable(member)
            elif core.leader_id in notice.members:
                core.suspect_leader(now_ms=now_ms, spread_ms=notice.spread_ms)

        self._stepper.step(notice.replica, step)
