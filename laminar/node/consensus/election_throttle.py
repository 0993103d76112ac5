"""A limit on the number of elections that one process has under way.

After the loss of a process, or at a start, thousands of groups want a leader at once. If all campaigned
together, the event loops of the processes would be so late that campaigns time out and are repeated, leaders
seem silent, and everything starts over. So only a limited number of this process's elections are under way
at a time. The next one begins when one is over (our replica has committed in its term as the leader, or
follows), or has lasted a heartbeat interval, as a group that can't elect must not delay others. So the pace
adapts to the load of the machine. This module decides about no vote, and to campaign later is always safe.
Elections that other replicas began, and hand-overs, don't wait.
"""

from __future__ import annotations

from laminar.node.consensus.replica import Replica

MOST_AT_ONCE = 128


class ElectionThrottle:
    """The replicas that wait to campaign, and the elections that are under way, `most_at_once` at most.

    An election that is not over counts as under way for `hold_ms`.
    """

    def __init__(self, *, hold_ms: int, most_at_once: int = MOST_AT_ONCE) -> None:
        self._hold_ms = hold_ms
        self._most_at_once = most_at_once
        # Under way, and until when each counts; those that began first come first.
        self.under_way: dict[Replica, int] = {}
        # Waiting: those that a request waits for, and the others.
        self._expedited: dict[Replica, None] = {}
        self._waiting: dict[Replica, None] = {}

    def __len__(self) -> int:
        """Return how many replicas wait."""
        return len(self._expedited) + len(self._waiting)

    def add(self, replica: Replica) -> None:
        """Queue a replica whose time to campaign has come; one that waits already keeps its place."""
        if replica not in self._expedited and replica not in self._waiting:
            # Its last campaign, if that still counts as under way, has failed.
            self.under_way.pop(replica, None)
            (self._expedited if replica.core.is_expedited else self._waiting)[replica] = None

    def expedite(self, replica: Replica) -> None:
        """Let a replica, if it waits, go before those that no request waits for."""
        if replica in self._waiting:
            del self._waiting[replica]
            self._expedited[replica] = None

    def next(self, now_ms: int) -> Replica | None:
        """Return the replica that may campaign now; None if none waits, or enough elections are under way."""
        while self.under_way:
            replica, until_ms = next(iter(self.under_way.items()))
            if now_ms < until_ms:
                break
            del self.under_way[replica]
        if self and len(self.under_way) < self._most_at_once:
            queue = self._expedited or self._waiting
            replica = next(iter(queue))
            del queue[replica]
            self.under_way[replica] = now_ms + self._hold_ms
            return replica
        return None

    def next_ms(self) -> int | None:
        """Return when `next` has another replica even if no election ends; None if none waits."""
        return next(iter(self.under_way.values()), None) if self else None

    def processed(self, replica: Replica) -> bool:
        """Note that a core has processed an input; return whether that lets another replica campaign."""
        if replica in self.under_way and not replica.core.is_electing:
            del self.under_way[replica]
            return bool(self)
        return False

    def removed(self, replica: Replica) -> None:
        """Forget a replica that is not driven any more."""
        self._expedited.pop(replica, None)
        self._waiting.pop(replica, None)
        self.under_way.pop(replica, None)

    def close(self) -> None:
        """Let no replica campaign any more."""
        self._expedited.clear()
        self._waiting.clear()
