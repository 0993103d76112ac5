"""What a replica knows of the leader of its term, and what it does with that leader's appends.

One object lives for one term. So what was *matched* with a leader is forgotten with the term and by a
restart, without anybody having to remember to forget it, and a commit index never reaches beyond that.
"""

from __future__ import annotations

from collections.abc import Sequence

from raft.effects import Effects, Identity
from raft.log import RaftLog
from raft.messages import Append, AppendAnswer, Heartbeat, HeartbeatAnswer
from raft.values import Entry


class Following:
    """The follower's side of one term. `leader_id` is 0 until the leader has spoken, and then fixed."""

    __slots__ = ("_effects", "_identity", "_leader_commit", "_log", "leader_id", "matched_index", "term")

    def __init__(self, identity: Identity, log: RaftLog, effects: Effects, *, term: int) -> None:
        self._identity = identity
        self._log = log
        self._effects = effects
        self._leader_commit = 0
        self.term = term
        self.leader_id = 0
        self.matched_index = 0

    def append(self, message: Append, entries: Sequence[Entry]) -> None:
        """Take over what is new, cut only what conflicts, and answer (the answer waits for our sync)."""
        log = self._log
        prev_index = message.prev_index
        prev_term = message.prev_term
        committed = log.committed_index
        if prev_index < committed:
            # Every leader's log holds what is committed, so up to there the two logs are the same.
            entries = entries[committed - prev_index :]
            prev_index, prev_term = committed, log.term(committed) or 0
        elif log.term(prev_index) != prev_term:
            self._reject(message)
            return
        if entries:
            last = log.last_index
            for place, entry in enumerate(entries):
                index = entry.index
                if index > last:
                    log.append(entries[place:] if place else entries)
                    break
                if log.term(index) != entry.term:
                    log.truncate(index)
                    log.append(entries[place:] if place else entries)
                    break
        self.matched_index = max(self.matched_index, prev_index + len(entries))
        self._learn_commit(message.commit)
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
            )
        )

    def heartbeat(self, message: Heartbeat) -> None:
        """Learn the commit index; answer at once, since the answer says nothing about our disk."""
        self._learn_commit(message.commit)
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
                )
            )

    def _learn_commit(self, leader_commit: int) -> None:
        # Never min(leader's commit, our last index): an old tail of ours would become committed (pitfall 53).
        if leader_commit > self._leader_commit:
            self._leader_commit = leader_commit
        index = min(self._leader_commit, self.matched_index)
        if index > self._log.committed_index:
            self._log.commit(index)

    def _reject(self, message: Append) -> None:
        # Anything of ours above the leader's prev_term can't be in its log up to prev_index: step over all of
        # it.
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
    """Whether `entries` are what `message` announces: as many, without a hole, of terms that never fall."""
    if message.entry_count != len(entries):
        return False
    index, term = message.prev_index, message.prev_term
    for entry in entries:
        index += 1
        if entry.index != index or entry.term < term:
            return False
        term = entry.term
    return term <= message.term
