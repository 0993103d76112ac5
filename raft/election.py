"""When to stand for election, and who has granted what.

`ElectionTimer` says at which instant silence, or news of a dead leader, makes a replica stand; `Ballot`
collects answers by replica id, so that an answer delivered twice is still one answer. Neither knows what a
term is: the rules that tie them to terms and votes are in `raft.core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raft.quorum import Outcome, ballot_outcome

if TYPE_CHECKING:
    import random

# After news that the leader is gone, replicas stand after a delay drawn from this range, so that one of them
# is usually first by more than a round trip and a sync.
MIN_NEWS_DELAY_MS = 10
MAX_NEWS_DELAY_MS = 150


class Ballot:
    """The answers to one round of pre-votes or votes."""

    __slots__ = ("_grants", "_voters")

    def __init__(self, voters: tuple[int, ...]) -> None:
        self._voters = voters
        self._grants: dict[int, tuple[bool, bool]] = {}

    def record(self, replica_id: int, *, granted: bool, marked: bool) -> None:
        """Note an answer. A grant, once given, stands; a mark, once shown, too."""
        before = self._grants.get(replica_id)
        if before is not None:
            granted = granted or before[0]
            marked = marked or before[1]
        self._grants[replica_id] = (granted, marked)

    def outcome(self) -> Outcome:
        """Whether the answers so far decide it."""
        return ballot_outcome(self._voters, self._grants)


class ElectionTimer:
    """The instant at which a replica that is not leading stands for election, if nothing happens before."""

    __slots__ = (
        "_attempts",
        "_rng",
        "_timeout_ms",
        "_wait_ms",
        "deadline_ms",
        "heard_at_ms",
        "news_delay_ms",
        "suspected",
    )

    def __init__(self, *, timeout_ms: int, rng: random.Random, now_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._rng = rng
        self._attempts = 0
        self._wait_ms = 0
        self.heard_at_ms = now_ms
        # News says that the leader is gone, and it has not been heard since.
        self.suspected = False
        # The longest delay before the first try then.
        self.news_delay_ms = MAX_NEWS_DELAY_MS
        self.deadline_ms = now_ms
        self.restart(now_ms=now_ms)

    def restart(self, *, now_ms: int) -> None:
        """Draw a new timeout, counted from now."""
        self._wait_ms = self._timeout_ms + self._rng.randrange(self._timeout_ms)
        self.deadline_ms = now_ms + self._wait_ms

    def heard(self, *, now_ms: int) -> None:
        """The leader gave a sign of life."""
        self.heard_at_ms = now_ms
        self.deadline_ms = now_ms + self._wait_ms
        self.suspected = False
        self._attempts = 0

    def overdue(self, *, now_ms: int) -> bool:
        """Whether it is time to stand: at the deadline itself the answer is yes."""
        return now_ms >= self.deadline_ms

    def hears_leader(self, *, now_ms: int) -> bool:
        """Whether the leader was heard so recently that standing against it would only disrupt."""
        return not self.suspected and now_ms < self.heard_at_ms + self._timeout_ms

    def suspect(self, *, now_ms: int, spread_ms: int = 0) -> None:
        """News says that the leader is gone: stand soon, or somewhere in the next `spread_ms` if longer."""
        self.suspected = True
        self._attempts = 0
        self.news_delay_ms = max(MAX_NEWS_DELAY_MS, spread_ms)
        if spread_ms > MAX_NEWS_DELAY_MS:
            self.deadline_ms = now_ms + self._rng.randint(MIN_NEWS_DELAY_MS, spread_ms)
        else:
            self.retry(now_ms=now_ms)

    def hasten(self, *, now_ms: int) -> None:
        """Stand against a suspected leader as soon as if there were no spread; never later than before."""
        if not self.suspected:
            return
        self.news_delay_ms = MAX_NEWS_DELAY_MS
        if self.deadline_ms > now_ms + MAX_NEWS_DELAY_MS:
            self.deadline_ms = now_ms + self._rng.randint(MIN_NEWS_DELAY_MS, MAX_NEWS_DELAY_MS)

    def retry(self, *, now_ms: int) -> None:
        """Choose when to try again after an attempt that was begun or has failed.

        While the leader is suspected, tries follow each other quickly but ever more slowly, up to the
        ordinary timeout, so that a split vote among the survivors costs a moment and a slow disk is not
        outrun for ever. Where many groups do so at once, an election takes longer.
        """
        spread_ms = min(self.news_delay_ms, self._timeout_ms // 2)
        longest_ms = max(MAX_NEWS_DELAY_MS << self._attempts, spread_ms)
        if not self.suspected or longest_ms >= self._timeout_ms:
            self.restart(now_ms=now_ms)
            return
        shortest_ms = MIN_NEWS_DELAY_MS << self._attempts
        if self.news_delay_ms > MAX_NEWS_DELAY_MS:
            shortest_ms = max(shortest_ms, spread_ms // 4)
        self._attempts += 1
        self.deadline_ms = now_ms + self._rng.randint(shortest_ms, longest_ms)

    def stepped_down(self, *, now_ms: int) -> None:
        """We led until now: let the others stand first."""
        self.suspected = False
        self._attempts = 0
        self.restart(now_ms=now_ms)

    def postpone(self, *, by_ms: int) -> None:
        """Move the deadline: the loop stalled, and what would have reached us lies unread in the sockets.

        News that the leader is gone is no silence: then nothing moves.
        """
        if self.suspected:
            return
        self.deadline_ms += by_ms
        self.heard_at_ms += by_ms
