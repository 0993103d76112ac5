"""The randomized election timer of a replica that does not lead (paper 5.2, 9.3).

It says at which instant a replica campaigns: after an election timeout without contact from the leader, or
shortly after a notice that the leader's process is gone. It knows neither terms nor votes: their rules
are in `raft.candidacy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

# After a notice that the leader is gone, replicas campaign after a delay drawn from this range, so that one
# of them is usually first by more than a round trip and a sync.
MIN_SUSPICION_DELAY_MS = 10
MAX_SUSPICION_DELAY_MS = 150


class ElectionTimer:
    """Computes the instant at which a replica that does not lead campaigns, unless it hears the leader."""

    __slots__ = (
        "_attempts",
        "_rng",
        "_timeout_ms",
        "_wait_ms",
        "deadline_ms",
        "last_contact_ms",
        "suspected",
        "suspicion_delay_ms",
    )

    def __init__(self, *, timeout_ms: int, rng: random.Random, now_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._rng = rng
        self._attempts = 0
        self._wait_ms = 0
        self.last_contact_ms = now_ms
        # A notice says that the leader is gone, and there was no contact since.
        self.suspected = False
        # The longest delay before the first campaign while the leader is suspected.
        self.suspicion_delay_ms = MAX_SUSPICION_DELAY_MS
        self.deadline_ms = now_ms
        self.restart(now_ms=now_ms)

    def restart(self, *, now_ms: int) -> None:
        """Draw a new timeout, counted from now."""
        self._wait_ms = self._timeout_ms + self._rng.randrange(self._timeout_ms)
        self.deadline_ms = now_ms + self._wait_ms

    def on_contact(self, *, now_ms: int) -> None:
        """Start the timeout again, because the leader gave a sign of life."""
        self.last_contact_ms = now_ms
        self.deadline_ms = now_ms + self._wait_ms
        self.suspected = False
        self._attempts = 0

    def is_due(self, *, now_ms: int) -> bool:
        """Return whether it is time to campaign; at the deadline itself it is."""
        return now_ms >= self.deadline_ms

    def in_contact(self, *, now_ms: int) -> bool:
        """Return whether the last contact is so recent that a campaign would only disrupt the leader."""
        return not self.suspected and now_ms < self.last_contact_ms + self._timeout_ms

    def suspect(self, *, now_ms: int, spread_ms: int = 0) -> None:
        """Suspect the leader, because a report says that it is gone, and choose an early campaign.

        If `spread_ms` exceeds `MAX_SUSPICION_DELAY_MS`, the campaign comes at a random instant within
        `spread_ms`; else `retry` chooses its instant.
        """
        self.suspected = True
        self._attempts = 0
        self.suspicion_delay_ms = max(MAX_SUSPICION_DELAY_MS, spread_ms)
        if spread_ms > MAX_SUSPICION_DELAY_MS:
            self.deadline_ms = now_ms + self._rng.randint(MIN_SUSPICION_DELAY_MS, spread_ms)
        else:
            self.retry(now_ms=now_ms)

    def expedite(self, *, now_ms: int) -> None:
        """Undo the spread of `suspect`: campaign within `MAX_SUSPICION_DELAY_MS`, or earlier if so chosen.

        Do nothing if the leader is not suspected.
        """
        if not self.suspected:
            return
        self.suspicion_delay_ms = MAX_SUSPICION_DELAY_MS
        if self.deadline_ms > now_ms + MAX_SUSPICION_DELAY_MS:
            self.deadline_ms = now_ms + self._rng.randint(MIN_SUSPICION_DELAY_MS, MAX_SUSPICION_DELAY_MS)

    def retry(self, *, now_ms: int) -> None:
        """Choose when to campaign again, after an attempt that has begun or has failed.

        While the leader is suspected, the delays are short at first and double with each attempt, up to the
        ordinary timeout: a split vote among the survivors costs little time, and in the end a delay is long
        enough for votes that wait for a slow disk. With a spread (see `suspect`) the first delays are longer,
        as an election takes longer when many groups elect at once.
        """
        spread_ms = min(self.suspicion_delay_ms, self._timeout_ms // 2)
        longest_ms = max(MAX_SUSPICION_DELAY_MS << self._attempts, spread_ms)
        if not self.suspected or longest_ms >= self._timeout_ms:
            self.restart(now_ms=now_ms)
            return
        shortest_ms = MIN_SUSPICION_DELAY_MS << self._attempts
        if self.suspicion_delay_ms > MAX_SUSPICION_DELAY_MS:
            shortest_ms = max(shortest_ms, spread_ms // 4)
        self._attempts += 1
        self.deadline_ms = now_ms + self._rng.randint(shortest_ms, longest_ms)

    def stepped_down(self, *, now_ms: int) -> None:
        """Wait a whole timeout after the end of our own leadership, so that others campaign first."""
        self.suspected = False
        self._attempts = 0
        self.restart(now_ms=now_ms)

    def postpone(self, *, by_ms: int) -> None:
        """Move the deadline by `by_ms`, because the loop stalled and messages to us may lie unread.

        Do nothing while the leader is suspected: that rests on a report, not on a silence that the stall
        could explain.
        """
        if self.suspected:
            return
        self.deadline_ms += by_ms
        self.last_contact_ms += by_ms
