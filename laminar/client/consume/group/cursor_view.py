"""What a member knows of its group's cursor, and when it reads the cursor from the cluster again.

Each read asks the leaders of all partitions. So a member reads the cursor once in each session time, more
rarely where a read takes long, and sooner when there is a reason: the topic's route has changed, it has lost
a partition, or it may claim one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from laminar.client.consume.group.membership import Membership
from laminar.client.consume.group.partition_leases import STEP_TIMEOUT_S, Lease, Leases
from laminar.client.net.session import Session
from laminar.client.policy.assignment import Places, wanted

# How long a member waits before it looks again whether it may read what follows partitions that others read,
# and tries a claim again that was refused: at first, and at most.
GATE_PAUSE_S = 0.1
LONGEST_GATE_PAUSE_S = 2.0


class CursorView:
    """The places of a group's cursor as they were read last, and the plan of the next look.

    `known` are the places, `partitions` the topic's partitions, `looks_at_s` when (the monotonic clock) the
    cursor is looked at in any case.
    """

    def __init__(
        self, session: Session, topic: str, *, cursor: Leases, membership: Membership, start: str
    ) -> None:
        self._session = session
        self._topic = topic
        self._cursor = cursor
        self._membership = membership
        self._start = start
        self.partitions: frozenset[int] = frozenset()
        self.known = Places()
        self.looks_at_s = 0.0
        self._gate_pause_s = GATE_PAUSE_S
        # Until when (the monotonic clock) it is not looked at for what was refused.
        self._try_at_s = 0.0

    def look_at_once(self) -> None:
        """Have the next turn look at the cursor."""
        self.looks_at_s = 0.0

    def wanted(self, me: str, partitions: frozenset[int]) -> frozenset[int]:
        """Return those of these partitions that are assigned to this member."""
        if self._membership.mode == "broadcast":
            return partitions
        return wanted(me, self._topic, partitions, self._membership.members)

    async def is_due(self, me: str, leases: Mapping[int, Lease]) -> bool:
        """Return whether to read the cursor from the cluster now; update the list of partitions before.

        `leases` are those of this member, by partition; they are read when the list is there.
        """
        places = self._session.topic_map_nowait(self._topic)
        if places is None or places.stale:
            places = await self._session.topic_map(self._topic, timeout_s=STEP_TIMEOUT_S)
        self.partitions = self.known.numbers or frozenset(places.numbers)
        now_s = time.monotonic()
        if self._membership.mode == "broadcast" or now_s >= self.looks_at_s:
            return True
        if now_s < self._try_at_s:
            return False
        if any(lease.committed >= lease.end for lease in leases.values() if lease.end is not None):
            return True  # what follows may be read now
        return bool(self.wanted(me, self.known.readable(self.partitions)) - leases.keys())

    async def look(self, me: str) -> None:
        """Read the cursor from the cluster; give it a position in new partitions that have none."""
        known = await self._cursor.places()
        partitions = known.numbers or self.partitions
        absent = frozenset(each for each in partitions if known.place(each).position is None)
        if (self._membership.route or known.ends) and self.wanted(me, absent):
            known = await self._cursor.begin(self._start, timeout_s=2 * STEP_TIMEOUT_S)
        if known != self.known:
            self._gate_pause_s = GATE_PAUSE_S
        self.known = known
        # A partition that is reclaimed is in no later description.
        self.partitions = known.numbers or self.partitions
        # A look asks the leader of each partition. Of hundreds it takes long: leave time for records.
        now_s, took_s = time.monotonic(), self._cursor.look_s
        self.looks_at_s = now_s + max(self._membership.session_s, 4 * took_s)
        self._try_at_s = now_s + took_s

    def plan_next_look(self, me: str, *, refused: bool) -> None:
        """Plan to read the cursor again soon, if an assigned partition may not be read yet."""
        known, now_s = self.known, time.monotonic()
        if not self._membership.route:
            return
        undrained = frozenset(each for each in self.partitions if not known.is_drained(each))
        if not refused and not self.wanted(me, undrained) - known.readable(undrained):
            return
        next_s = now_s + max(self._gate_pause_s, self._cursor.look_s)
        if refused:
            self._try_at_s = next_s
        if self.looks_at_s > next_s:
            self.looks_at_s = next_s
            self._gate_pause_s = min(2 * self._gate_pause_s, LONGEST_GATE_PAUSE_S)
