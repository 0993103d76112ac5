"""A limit on the number of elections that one process has under way.

After the loss of a process, or at a start, thousands of groups need a leader at once. If all of them
campaigned together, the event loops of the processes would be so late that campaigns time out and are
repeated, leaders seem silent, and everything starts over. So only a limited number of this process's
elections are under way at a time. The next one begins when one is over (our replica has committed in its term
as the leader, or follows), or has lasted a heartbeat interval, because a group that can't elect must not
delay others. In this way the pace adapts to the load of the machine. This module does not decide votes, and
campaigning later is always safe. Elections that other replicas began, and hand-overs, don't wait.
"""

from __future__ import annotations

from laminar.node.consensus.replica import Replica

MOST_AT_ONCE = 128


class ElectionThrottle:
    """The replicas that wait to campaign, and the elections under way: at most `most_at_once`.

    An election counts as under way until it is over, but for `hold_ms` at most.
    """

    def __init__(self, *, hold_ms: int, most_at_once: int = MOST_AT_ONCE) -> None:
        self._hold_ms = hold_ms
        self._most_at_once = most_at_once
        # Elections under way, and until when (ms) each counts as such; in the order in which they began.
        # The timekeeper holds this dict too: it is changed, and never replaced.
        self.under_way: dict[Replica, int] = {}
        # Waiting replicas: those whose leader a request waits for, and the others.
        self._expedited: dict[Replica, None] = {}
        self._waiting: dict[Replica, None] = {}

    def __len__(self) -> int:
        """Return how many replicas wait to campaign."""
        return len(self._expedited) + len(self._waiting)

    def add(self, replica: Replica) -> None:
        """Queue a replica whose time to campaign has come; one that waits already keeps its place."""
        if replica not in self._expedited and replica not in self._waiting:
            # Its last campaign, if that still counts as under way, has failed.
            self.under_way.pop(replica, None)
            (self._expedited if replica.core.is_expedited else self._waiting)[replica] = None

    def expedite(self, replica: Replica) -> None:
        """Move a waiting replica ahead of others, because a request waits for its group's leader."""
        if replica in self._waiting:
            del self._waiting[replica]
            self._expedited[replica] = None

    def next(self, now_ms: int) -> Replica | None:
        """Return a replica that may campaign now and count its election as under way; None if none may."""
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
        """Return when (ms) `next` returns a replica even if no election ends; None if no replica waits."""
        return next(iter(self.under_way.values()), None) if self else None

    def processed(self, replica: Replica) -> bool:
        """Note that a core has processed an input; return whether that lets another replica campaign."""
        if replica in self.under_way and not replica.core.is_electing:
            del self.under_way[replica]
            return bool(self)
        return False

    def removed(self, replica: Replica) -> None:
        """Forget a replica that the driver does not run any more."""
        self._expedited.pop(replica, None)
        self._waiting.pop(replica, None)
        self.under_way.pop(replica, None)

    def close(self) -> None:
        """Remove all waiting replicas, so that none of them campaigns any more."""
        self._expedited.clear()
        self._waiting.clear()
