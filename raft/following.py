"""The follower's side of one term: the leader as it is known here, and the processing of its appends.

A new object is made for each term, and by a restart. So the index up to which our log *matched* the leader's
starts at 0 in each, and the commit index never goes beyond it (invariant 6 of `raft.core`; paper 5.3). This
module knows neither votes nor timers.
"""

from __future__ import annotations

from collections.abc import Sequence

from raft.effects import Effects, Identity
from raft.log import RaftLog
from raft.messages import Append, AppendAnswer, Heartbeat, HeartbeatAnswer
from raft.values import Entry

# No replica loses what it acknowledged more often than this, and each loss makes one incarnation: a message
# that names an incarnation of ours further ahead is forged.
MOST_LOSSES = 2**32


class Following:
    """The follower's side of one term: how far our log matches the leader's, and what we answer.

    `leader_id` is 0 until the leader has sent something, and does not change then. `goal` is the index up to
    which our log must match the leader's before our recovery may end, as the leader says; 0 until it has said
    so to our incarnation.
    """

    __slots__ = (
        "_effects",
        "_identity",
        "_leader_commit",
        "_log",
        "goal",
        "leader_id",
        "matched_index",
        "quiesced",
        "term",
    )

    def __init__(self, identity: Identity, log: RaftLog, effects: Effects, *, term: int) -> None:
        self._identity = identity
        self._log = log
        self._effects = effects
        self._leader_commit = 0
        self.term = term
        self.leader_id = 0
        self.matched_index = 0
        self.goal = 0
        # Whether we agreed with this leader to quiesce.
        self.quiesced = False

    @property
    def is_complete(self) -> bool:
        """Whether our log holds, durably, all of the leader's log that we may have acknowledged.

        That ends a recovery (docs/consensus.md#recovering). A log as long as the goal is not enough, as its
        tail may differ from the leader's: it must match. Nor is a match enough before an entry of the
        leader's term is committed: until then a leader without the matched entries may be elected.
        """
        log = self._log
        return (
            0 < self.goal <= min(self.matched_index, log.durable_index)
            and log.term(log.committed_index) == self.term
        )

    def append(self, message: Append, entries: Sequence[Entry]) -> bool:
        """Append what is new, truncate only what conflicts, and answer; the answer waits for our sync.

        Return False, and do nothing, if the leader's log lacks an entry that we know to be committed. That
        happens if an operator accepted the entry's loss, or if more replicas forgot it than a group survives.
        We may have served that entry, and it must not change, so we accept nothing more from this leader.
        """
        log = self._log
        prev_index = message.prev_index
        prev_term = message.prev_term
        committed = log.committed_index
        if prev_index < committed:
            # Every leader's log holds what is committed: nothing of ours up to there is touched.
            shared = min(committed - prev_index, len(entries))
            prev_index, prev_term = prev_index + shared, entries[shared - 1].term if shared else prev_term
            if (log.term(prev_index) or prev_term) != prev_term:
                return False
            entries = entries[shared:]
        elif log.term(prev_index) != prev_term:
            self._reject(message)
            return True
        if entries:
            last = log.last_index
            for place, entry in enumerate(entries):
                index = entry.index
                if index > last:
                    log.append(entries[place:] if place else entries)
                    break
                term = log.term(index)
                if term is None:
                    # Our entry here is damaged. It may be the same as the leader's, and entries after it may
                    # be acknowledged: until it is repaired, nothing is truncated, and nothing from here on
                    # is matched.
                    entries = entries[:place]
                    break
                if term != entry.term:
                    if log.term(index - 1) is None:
                        # After the truncation this log would end with a damaged entry, and a log must know
                        # the term that it ends with. The truncation waits for the repair.
                        entries = entries[:place]
                        break
                    log.truncate(index)
                    log.append(entries[place:] if place else entries)
                    break
        self.matched_index = max(self.matched_index, prev_index + len(entries))
        self._learn_goal(message)
        self._learn_commit(message.commit)
        identity = self._identity
        if self.matched_index >= committed:
            match_index, hint_index, hint_term = self.matched_index, 0, 0
        else:
            # The leader need not send what we have committed; by the term it can check that it has the same
            # entry there.
            match_index = hint_index = committed
            hint_term = log.term(committed) or 0
        self._effects.after_sync.append(
            AppendAnswer(
                identity.cluster,
                identity.group,
                identity.replica_id,
                message.sender,
                identity.incarnation,
                self.term,
                match_index,
                hint_index=hint_index,
                hint_term=hint_term,
            )
        )
        return True

    def heartbeat(self, message: Heartbeat, *, may_quiesce: bool) -> None:
        """Process a heartbeat: take over its commit index, and answer at once.

        The answer need not wait for a sync, because it promises nothing about our disk.

        Quiesce if the leader asks for it, `may_quiesce` allows it, and our log holds exactly the entries that
        the leader has committed. A heartbeat of round 0 gets no answer.
        """
        self._learn_goal(message)
        self._learn_commit(message.commit)
        log = self._log
        quiesces = (
            message.quiesce
            and may_quiesce
            and message.commit == log.committed_index == log.last_index == self.matched_index
        )
        if message.round:
            identity = self._identity
            self._effects.messages.append(
                HeartbeatAnswer(
                    identity.cluster,
                    identity.group,
                    identity.replica_id,
                    message.sender,
                    identity.incarnation,
                    self.term,
                    message.round,
                    quiesces,
                    self.matched_index,
                )
            )
        self.quiesced = quiesces

    def has_regressed(self, message: Heartbeat) -> bool:
        """Return whether our log lacks what we acknowledged to this leader, or is of an older incarnation.

        What we acknowledged to the leader of a term stays in our log for as long as the term lasts, and an
        incarnation is durable before any other replica hears of it. So a log that lacks either is an older
        copy that was put back. An acknowledgement of a former incarnation is not compared.
        """
        index, own = message.held_index, self._identity.incarnation
        if own < message.receiver_incarnation <= own + MOST_LOSSES:
            return True
        if not index or message.receiver_incarnation != own:
            return False
        term = self._log.term(index)
        return index > self._log.last_index or (term is not None and term != message.held_term)

    def _learn_goal(self, message: Append | Heartbeat) -> None:
        # A goal that was meant for a former incarnation of ours says nothing of what this one must hold.
        if message.goal > self.goal and message.receiver_incarnation == self._identity.incarnation:
            self.goal = message.goal

    def _learn_commit(self, leader_commit: int) -> None:
        # Never min(leader's commit, our last index): an old tail of ours would become committed (pitfall 53).
        if leader_commit > self._leader_commit:
            self._leader_commit = leader_commit
        index = min(self._leader_commit, self.matched_index)
        if index > self._log.committed_index:
            self._log.commit(index)

    def _reject(self, message: Append) -> None:
        # The leader's log up to prev_index has no term above prev_term, so no entry of ours with a later term
        # can be in it: the hint skips all of these.
        log = self._log
        hint_index = log.last_at_or_below_term(min(message.prev_index, log.last_index), message.prev_term)
        identity = self._identity
        self._effects.after_sync.append(
            AppendAnswer(
                identity.cluster,
                identity.group,
                identity.replica_id,
                message.sender,
                identity.incarnation,
                self.term,
                self.matched_index,
                rejected=True,
                prev_index=message.prev_index,
                hint_index=max(hint_index, 0),
                hint_term=(log.term(hint_index) or 0) if hint_index > 0 else 0,
            )
        )


def well_formed(message: Append, entries: Sequence[Entry]) -> bool:
    """Return whether `entries` fit `message`: as many as it says, without a gap, terms never falling."""
    if message.entry_count != len(entries):
        return False
    index, term = message.prev_index, message.prev_term
    for entry in entries:
        index += 1
        if entry.index != index or entry.term < term:
            return False
        term = entry.term
    return term <= message.term
