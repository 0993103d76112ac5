"""Quiescence of an idle group, on the leader's side: the bookkeeping of one offer.

An idle group quiesces by agreement (docs/consensus.md#quiescence): a heartbeat carries the offer, and the
group is quiesced once all replicas that were asked have agreed. An agreement is valid while every
heartbeat since then carried the same offer, so that answers that take longer than a heartbeat count too. A
quiesced group has no timers and sends nothing; instead its driver must watch the processes of the replicas
that were asked. Safety does not depend on quiescence: a quiesced leader still leads, its log is unchanged,
and it answers a read only after a round. Only heartbeats stop, and the timers that wait for them.

Whether the group is idle is decided in `raft.leadership`, and whether a follower agrees in `raft.following`;
this module only collects the answers.
"""

from __future__ import annotations

from collections.abc import Collection


class QuiesceOffer:
    """The leader's present offer to its followers to quiesce, and the answers that are still missing.

    `asked` are the replicas asked last; a group stays quiesced only while the processes of these are up.
    """

    __slots__ = ("_first_round", "_missing", "_offered", "asked", "last_at_tick", "quiesced")

    def __init__(self, *, no_op_index: int) -> None:
        self.quiesced = False
        self.asked: frozenset[int] = frozenset()
        # The log's end when the last heartbeat was due; -1: there was none since the group was woken. A new
        # leader's first heartbeat may quiesce its group if nothing follows the no-op: when thousands of
        # groups elect, heartbeats of those that have elected would slow down those that are still to come.
        self.last_at_tick = no_op_index
        self._offered = False
        # The first heartbeat that carried the present offer.
        self._first_round = 0
        self._missing: set[int] = set()

    def offer(self, asked: Collection[int]) -> None:
        """Let the next heartbeat ask these replicas to quiesce; with none, the group quiesces at once."""
        if self.asked != asked:
            self.asked = frozenset(asked)
            self._missing = set()
        self._offered = True
        self.quiesced = not asked

    def begin(self, round_: int) -> Collection[int]:
        """Return the replicas that the heartbeat of round `round_` asks to quiesce.

        If `offer` was not called since the last heartbeat, there are none, and answers to earlier heartbeats
        are void.
        """
        if not self._offered:
            self._missing = set()
            return ()
        self._offered = False
        if not self._missing:
            self._first_round = round_
            self._missing = set(self.asked)
        return self.asked

    def is_answer(self, round_: int, replica_id: int) -> bool:
        """Return whether an answer to round `round_` belongs to the present offer."""
        return round_ >= self._first_round and bool(self._missing) and replica_id in self.asked

    def agreed(self, replica_id: int) -> bool:
        """Note that a replica agrees to quiesce; return whether it was the last one that was missing."""
        self._missing.discard(replica_id)
        return not self._missing

    def withdraw(self) -> None:
        """Withdraw the present offer: answers to it are ignored."""
        self._missing = set()

    def end(self) -> None:
        """Wake the group. It does not count as idle again before the second heartbeat from now."""
        self.quiesced = False
        self.last_at_tick = -1
        self._missing = set()
