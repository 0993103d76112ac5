"""Progress of one replica as its leader sees it, and how much may be sent to it (etcd's tracker).

A replica is *probed* until it is known where its log meets the leader's: one append, then silence until an
answer or a heartbeat. Then it is *replicated* to: appends go out one after another without waiting, up to a
window of bytes and appends. A replica is in *catch-up* if its next entry is no longer in the leader's log, or
if the driver decides that it lacks too much of the log: then it gets no entries, and copies the log in a way
that this package does not know. These objects exist for one leader's term; they decide nothing about
commitment.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class Flow(Enum):
    """The way in which entries are sent to a replica: probe, replicate, or none because of a catch-up."""

    PROBE = "probe"
    REPLICATE = "replicate"
    CATCH_UP = "catch-up"


class Progress:
    """The state of one replica as its leader knows it; the leader has one of itself, too.

    The replica holds the leader's log durably up to `match_index`.
    """

    __slots__ = (
        "acked_round",
        "active",
        "counts_from",
        "flow",
        "goal",
        "incarnation",
        "inflight",
        "inflight_bytes",
        "match_at_tick",
        "match_index",
        "next_index",
        "probe_sent",
        "received",
        "received_index",
        "replica_id",
        "resume_index",
        "sent_commit",
        "silent",
    )

    def __init__(self, replica_id: int, *, next_index: int, incarnation: int, goal: int) -> None:
        self.replica_id = replica_id
        self.match_index = 0
        # Of a voter that this leader promoted: the entry that made it one.
        self.counts_from = 0
        self.next_index = next_index
        self.flow = Flow.PROBE
        self.probe_sent = False
        # (last index, bytes) of each append that is under way, in the order sent.
        self.inflight: deque[tuple[int, int]] = deque()
        self.inflight_bytes = 0
        # Heard from since the last check of the quorum.
        self.active = False
        # Never heard from yet, or not once between the last two checks.
        self.silent = True
        # The highest commit index that was sent, and the highest confirmation round that was answered.
        self.sent_commit = 0
        self.acked_round = 0
        self.match_at_tick = 0
        # Up to where it has our log, durably or not, by its answers to heartbeats; and whether an append has
        # reached it since the last check of the quorum.
        self.received_index = 0
        self.received = False
        # While it is caught up: appends may serve it again once it holds the log up to this entry.
        self.resume_index = 0
        self.incarnation = incarnation
        self.goal = goal

    @property
    def counted_index(self) -> int:
        """The index up to which the replica counts in majorities.

        0 until it has the entry that made it a voter.

        Until then the replica may take itself for a learner, and start again with an empty log.
        """
        return self.match_index if self.match_index >= self.counts_from else 0

    @property
    def needs_catch_up(self) -> bool:
        """Whether the replica gets no entries, but has to copy the log in another way (catch-up)."""
        return self.flow is Flow.CATCH_UP

    def probe(self, next_index: int) -> None:
        """Probe again up to which entry the logs match, beginning with the one before `next_index`."""
        assert next_index > self.match_index, f"probe at {next_index}, matched {self.match_index}"
        self.flow = Flow.PROBE
        self.next_index = next_index
        self.probe_sent = False
        self.resume_index = 0
        self.inflight.clear()
        self.inflight_bytes = 0

    def replicate(self) -> None:
        """Send entries from now on without waiting for answers: the logs match up to `match_index`."""
        self.flow = Flow.REPLICATE
        self.next_index = self.match_index + 1
        self.resume_index = 0
        self.inflight.clear()
        self.inflight_bytes = 0

    def catch_up(self, resume_index: int = 0) -> None:
        """Pause entries to this follower until it holds the log up to `resume_index`, which it copies itself.

        It also has to hold all entries before the leader's first one. Used if the entries that the follower
        lacks are no longer in the leader's log, or are too many to send.
        """
        self.flow = Flow.CATCH_UP
        self.resume_index = resume_index
        self.inflight.clear()
        self.inflight_bytes = 0

    def sent(self, last_index: int, size_bytes: int) -> None:
        """Note that an append of `size_bytes` with entries up to `last_index` was sent."""
        if self.flow is Flow.REPLICATE:
            self.next_index = last_index + 1
            self.inflight.append((last_index, size_bytes))
            self.inflight_bytes += size_bytes
        else:
            self.probe_sent = True

    def matched(self, index: int) -> bool:
        """Note that the replica holds the leader's log up to `index`; return False if that was known."""
        if index <= self.match_index:
            return False
        self.match_index = index
        if self.next_index <= index:
            self.next_index = index + 1
        inflight = self.inflight
        while inflight and inflight[0][0] <= index:
            self.inflight_bytes -= inflight.popleft()[1]
        return True

    def reset(self, *, incarnation: int, goal: int, next_index: int) -> None:
        """Begin again with a new incarnation of the replica, which may have lost what it acknowledged."""
        self.incarnation = incarnation
        self.goal = goal
        self.match_index = 0
        self.match_at_tick = 0
        self.acked_round = 0
        self.sent_commit = 0
        self.probe(next_index)

    def __repr__(self) -> str:
        return (
            f"<Progress {self.replica_id} {self.flow.value} match={self.match_index} next={self.next_index} "
            f"inflight={len(self.inflight)}/{self.inflight_bytes}B>"
        )
