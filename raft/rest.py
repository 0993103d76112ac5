"""When a leader lets its group fall quiet: the bookkeeping of one offer.

A group that has nothing to do falls quiet by agreement (docs/consensus.md#rest): a heartbeat carries the
offer, and the group is quiet once everybody who was asked has agreed. An agreement stands while every
heartbeat since carried the same offer: so answers that take longer than a heartbeat count too. Quiet, a group
has no timers and sends nothing, and whoever drives it must watch the processes that it rests on. This changes
nothing that is safe or not: a quiet leader leads, answers no read without a round, and its log is what it
was; all that rests are the heartbeats and the clocks that wait for them.

Whether there is something to do is decided in `raft.leadership`, and whether a follower agrees in
`raft.following`; this module only collects the answers.
"""

from __future__ import annotations

from collections.abc import Collection


class Rest:
    """One leader's offers. `asked` are those who were asked last, and on whom the group rests if quiet."""

    __slots__ = ("_first_round", "_missing", "_offered", "asked", "last_at_tick", "quiet")

    def __init__(self, *, no_op_index: int) -> None:
        self.quiet = False
        self.asked: frozenset[int] = frozenset()
        # The log's end when the last heartbeat was due; -1: there was none since we are awake. A new leader's
        # first heartbeat may bring rest if nothing follows its no-op: when thousands of groups elect, those
        # that went on beating would slow down those that are still to come.
        self.last_at_tick = no_op_index
        self._offered = False
        # The first heartbeat that carried the offer that stands.
        self._first_round = 0
        self._missing: set[int] = set()

    def offer(self, asked: Collection[int]) -> None:
        """The next heartbeat shall ask these; with nobody to ask the group is quiet at once."""
        if self.asked != asked:
            self.asked = frozenset(asked)
            self._missing = set()
        self._offered = True
        self.quiet = not asked

    def begin(self, round_: int) -> Collection[int]:
        """A heartbeat leaves as round `round_`: who is asked by it; without an offer no older one stands."""
        if not self._offered:
            self._missing = set()
            return ()
        self._offered = False
        if not self._missing:
            self._first_round = round_
            self._missing = set(self.asked)
        return self.asked

    def is_answer(self, round_: int, replica_id: int) -> bool:
        """Whether this is an answer to the offer that stands."""
        return round_ >= self._first_round and bool(self._missing) and replica_id in self.asked

    def agreed(self, replica_id: int) -> bool:
        """It agrees; whether it was the last one."""
        self._missing.discard(replica_id)
        return not self._missing

    def withdraw(self) -> None:
        """The offer stands no more."""
        self._missing = set()

    def wake(self) -> None:
        """Not quiet any more, and not so soon again."""
        self.quiet = False
        self.last_at_tick = -1
        self._missing = set()
