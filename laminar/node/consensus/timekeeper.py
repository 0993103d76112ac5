"""Time as an input of Raft cores: expires deadlines, starts elections, and excuses silence after a stall.

A core asks for time by its deadline. The timekeeper tells it when that has come: a leader at once, any other
replica when the throttle lets it campaign. When the loop is late, messages of peers may be unread in the
sockets, so all deadlines that mean silence are postponed first. The driver performs what a core decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.node.consensus.election_throttle import ElectionThrottle
from laminar.node.consensus.quiescence import Quiescence
from laminar.node.consensus.replica import Replica, Stepper
from laminar.node.consensus.timers import Alarm, Deadlines
from laminar.node.host.clock import Clock

# How many deadlines are handled in one turn of the loop, so that sockets are read in between. After a process
# is killed thousands may be due at once.
MOST_DUE = 64


class Timekeeper:
    """The deadlines and elections of one process, and the two timers that wait for them.

    `replicas` are those that `stepper` runs.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        stepper: Stepper,
        replicas: Mapping[bytes, Replica],
        quiescence: Quiescence,
        election_timeout_ms: int,
        heartbeat_ms: int,
        elections_at_once: int,
    ) -> None:
        self._clock = clock
        self._stepper = stepper
        self._replicas = replicas
        self._quiescence = quiescence
        self._election_timeout_ms = election_timeout_ms
        self._heartbeat_ms = heartbeat_ms
        self._next_grace_ms = 0
        self._deadlines = Deadlines()
        self._deadline_alarm = Alarm(clock, self._on_deadline)
        self._throttle = ElectionThrottle(hold_ms=heartbeat_ms, most_at_once=elections_at_once)
        self._election_alarm = Alarm(clock, self._on_election)
        self._closed = False
        self.under_way: Mapping[Replica, int] = self._throttle.under_way
        """The elections under way: while there are any, `processed` is to be called."""
        self.stalls = 0

    @property
    def elections_waiting(self) -> int:
        """The number of replicas that wait to campaign."""
        return len(self._throttle)

    def schedule(self, replica: Replica, deadline_ms: int) -> None:
        """Expire a replica at its deadline, unless it is scheduled for an earlier time."""
        if self._deadlines.schedule(replica, deadline_ms):
            self._deadline_alarm.set(deadline_ms)

    def processed(self, replica: Replica) -> None:
        """Note that a core has processed an input, which may let another replica campaign."""
        if self._throttle.processed(replica):
            self._election_alarm.set(self._clock.monotonic_ms())

    def expedite(self, replica: Replica) -> None:
        """Move a replica that waits to campaign ahead of others."""
        self._throttle.expedite(replica)

    def removed(self, replica: Replica) -> None:
        """Forget a replica that is not run any more."""
        self._throttle.removed(replica)
        self._deadlines.remove(replica)

    def close(self) -> None:
        """Stop both timers: no deadline expires and no election starts any more."""
        self._closed = True
        self._deadline_alarm.close()
        self._election_alarm.close()
        self._throttle.close()

    # -- deadlines ---------------------------------------------------------------------

    def _on_deadline(self, at_ms: int | None) -> None:
        if self._closed:
            return
        try:
            now_ms = self._clock.monotonic_ms()
            if at_ms is not None and now_ms - at_ms > self._heartbeat_ms // 2:
                self._stalled(now_ms - at_ms)
            self._expire_due(now_ms)
        except Exception as error:  # noqa: BLE001  # ends the process
            self._stepper.fail_process(error)

    def _expire_due(self, now_ms: int) -> None:
        """Handle the deadlines that have come: `MOST_DUE` of them now, the rest in later turns."""
        dealt_with = 0
        while (at_ms := self._deadlines.next_ms()) is not None and at_ms <= now_ms:
            if dealt_with == MOST_DUE:
                self._deadline_alarm.set_next_turn()
                return
            replica = self._deadlines.pop(now_ms)
            if replica is None:
                continue  # nothing but entries out of date, which are gone now
            try:
                deadline_ms = replica.core.deadline_ms()
                if deadline_ms is None:
                    continue
                if deadline_ms <= now_ms:
                    dealt_with += 1
                    self._due(replica, now_ms)
                else:
                    self._deadlines.schedule(replica, deadline_ms)  # it has moved since it was scheduled
            except Exception as error:  # noqa: BLE001  # stops this replica
                self._stepper.stop_replica(replica, error)
            if self._closed:
                return
        if at_ms is not None:
            self._deadline_alarm.set(at_ms)

    def _due(self, replica: Replica, now_ms: int) -> None:
        core = replica.core
        if not replica.leading:
            self._throttle.add(replica)
            self._begin_elections(now_ms)
            return
        if core.is_idle:
            core.offer_quiesce(absent=self._quiescence.absent(replica))
        self._stepper.step(replica, lambda core: core.expire(now_ms=now_ms))
        if self._stepper.is_current(replica) and replica.leading:
            deadline_ms = core.deadline_ms()
            if deadline_ms is not None:
                self.schedule(replica, deadline_ms)

    def _stalled(self, late_ms: int) -> None:
        """Excuse the silence of peers while this loop stood still: their messages may be in the sockets."""
        self.stalls += 1
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._next_grace_ms:
            # A loop that is always late is not stalled but busy: it must not postpone elections for ever.
            return
        self._next_grace_ms = now_ms + self._election_timeout_ms
        for replica in self._replicas.values():
            if not self._quiescence.is_quiesced(replica):
                replica.core.postpone(by_ms=late_ms + self._heartbeat_ms)
        self._quiescence.postpone(by_ms=late_ms + self._heartbeat_ms, now_ms=now_ms)

    # -- elections ---------------------------------------------------------------------

    def _begin_elections(self, now_ms: int) -> None:
        """Start the elections that the throttle allows now, and set the alarm for the next one."""
        while (replica := self._throttle.next(now_ms)) is not None:
            if not replica.leading:
                # If the leader was heard from meanwhile, the deadline has moved and the core does nothing.
                self._stepper.step(replica, lambda core: core.expire(now_ms=now_ms))
            else:
                self._stepper.process_ready(replica)
        at_ms = self._throttle.next_ms()
        if at_ms is not None:
            self._election_alarm.set(at_ms)

    def _on_election(self, at_ms: int | None) -> None:
        if self._closed:
            return
        try:
            self._begin_elections(self._clock.monotonic_ms())
        except Exception as error:  # noqa: BLE001  # ends the process
            self._stepper.fail_process(error)
