"""One replica's term, vote and role: who may lead, and how that is found out.

`raft.core` feeds it messages and instants. It decides when to stand, what to answer those who stand, and what
a message of another term means; it knows nothing of what leaders send or commit. Apart from the core so that
the rules of elections stand on one page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from raft.configuration import Configuration
from raft.effects import Effects, Identity
from raft.election import Ballot, ElectionTimer
from raft.following import Following
from raft.leadership import Leadership
from raft.log import RaftLog
from raft.messages import (
    AnyMessage,
    Append,
    Heartbeat,
    HeartbeatAnswer,
    PreVote,
    PreVoteAnswer,
    Vote,
    VoteAnswer,
)
from raft.quorum import Outcome
from raft.values import HardState, LogView, MakeNoop, Place, Role, Settings, Trace

if TYPE_CHECKING:
    import random


# So many of its turns to stand a damaged replica lets pass after the last sign of a leader.
RELUCTANT_TURNS = 3


class Elector:
    """The part of a `Core` that holds its state and its elections; see `Core` for the arguments."""

    def __init__(
        self,
        *,
        cluster: bytes,
        group: bytes,
        replica_id: int,
        incarnation: int,
        marked: bool,
        configuration: Configuration,
        hard_state: HardState,
        log: LogView,
        committed_index: int,
        rng: random.Random,
        now_ms: int,
        settings: Settings,
        make_noop: MakeNoop,
        configurations: Iterable[tuple[int, Configuration]] = (),
        trace: Trace | None = None,
    ) -> None:
        assert replica_id > 0, f"replica id {replica_id}: 0 stands for nobody"
        self.replica_id = replica_id
        self.term = hard_state.term
        self.vote = hard_state.vote
        self.role = Role.FOLLOWER
        self.leader_id = 0
        # Whether we may have forgotten what we once acknowledged; it goes with every grant of ours.
        self.marked = marked
        # Who else said that it leads our term, which must never be; 0: nobody. The driver resets it.
        self.second_leader = 0
        # Messages and completions that were not acted upon, by reason.
        self.dropped: dict[str, int] = {}
        self._identity = Identity(cluster, group, replica_id, incarnation)
        self._settings = settings
        self._make_noop = make_noop
        self._trace = trace
        self._log = RaftLog(
            log, committed_index=committed_index, configuration=configuration, configurations=configurations
        )
        assert self._log.last_term <= self.term, f"a log of term {self._log.last_term} with {hard_state}"
        self._effects = Effects()
        self._timer = ElectionTimer(timeout_ms=settings.election_timeout_ms, rng=rng, now_ms=now_ms)
        # The highest incarnation heard of, by replica id.
        self._incarnations: dict[int, int] = {}
        self._following = Following(self._identity, self._log, self._effects, term=self.term)
        self._leadership: Leadership | None = None
        # Part of its log is damaged: it votes and acknowledges, but lets others lead. Set from outside.
        self.reluctant = False
        # How often its turn to stand has come since a leader was heard.
        self._passed = 0
        self._ballot: Ballot | None = None
        # As a follower: quiet by agreement with the leader of this term.
        self._rests = False
        self._hard_state_changed = False
        # Its log is being replaced: others stand.
        self._sits_out = False
        # (last term, last index) that a log must reach for a grant of ours to count in spite of our mark.
        self._floor: tuple[int, int] | None = None

    # Standing

    def _may_stand(self) -> bool:
        # A voter whose removal is not known to be committed stands too, without counting itself: its log may
        # be the only one that the others' votes can go to (thesis 4.2.2). So may the latest log of all that
        # answered before a release, which may be a learner's.
        configurations = self._log.configurations
        return not self._sits_out and (
            self.replica_id in configurations.current.voters
            or configurations.may_count(self.replica_id)
            or self._reaches_floor(self._log.last_term, self._log.last_index)
        )

    def _reaches_floor(self, last_term: int, last_index: int) -> bool:
        return self._floor is not None and (last_term, last_index) >= self._floor

    def _counts_marked(self, last_term: int, last_index: int) -> bool:
        """Whether a grant of ours to a log that ends there carries our mark."""
        return self.marked and not self._reaches_floor(last_term, last_index)

    def _lets_others(self, *, now_ms: int) -> bool:
        """Whether a damaged replica lets its turn to stand pass once more (docs/consensus.md#damage).

        Any other voter that answers, and could win, stands meanwhile: if nobody has, this one must.
        """
        if not self.reluctant or self._passed >= RELUCTANT_TURNS:
            return False
        if self._log.configurations.current.voters == (self.replica_id,):
            return False
        self._passed += 1
        self._timer.retry(now_ms=now_ms)
        self._note("lets others stand", turn=self._passed)
        return True

    def _stand(self, *, now_ms: int) -> None:
        """Ask first whether a vote could be won: a replica that can't win raises nobody's term."""
        self.role = Role.PRE_CANDIDATE
        self.leader_id = 0
        self._timer.retry(now_ms=now_ms)
        self._note("standing", term=self.term)
        ballot = self._open_ballot()
        if ballot.outcome() is Outcome.WON:
            self._stand_for_votes(transfer=False, now_ms=now_ms)
            return
        log = self._log
        self._effects.messages.extend(
            PreVote(*self._head_to(voter), self.term + 1, log.last_index, log.last_term)
            for voter in log.configurations.current.voters
            if voter != self.replica_id
        )

    def _stand_for_votes(self, *, transfer: bool, now_ms: int) -> None:
        self._enter_term(self.term + 1)
        self.vote = self.replica_id
        self.role = Role.CANDIDATE
        self.leader_id = 0
        self._timer.retry(now_ms=now_ms)
        ballot = self._open_ballot()
        if ballot.outcome() is Outcome.WON:
            # Nobody else vouches for this term, so nothing leaves before our own disk does (invariant 10).
            self._lead(held=True, now_ms=now_ms)
            return
        # These wait for the sync: our own vote counts as soon as others answer (invariant 1).
        log = self._log
        self._effects.after_sync.extend(
            Vote(*self._head_to(voter), self.term, log.last_index, log.last_term, transfer)
            for voter in log.configurations.current.voters
            if voter != self.replica_id
        )

    def _open_ballot(self) -> Ballot:
        self._ballot = ballot = Ballot(self._log.configurations.current.voters)
        marked = self._counts_marked(self._log.last_term, self._log.last_index)
        ballot.record(self.replica_id, granted=True, marked=marked)
        return ballot

    def _count(self, answer: PreVoteAnswer | VoteAnswer, *, now_ms: int) -> None:
        ballot = self._ballot
        assert ballot is not None, f"{self.role} without a ballot"
        ballot.record(answer.sender, granted=answer.granted, marked=answer.marked)
        outcome = ballot.outcome()
        if outcome is Outcome.WON:
            if self.role is Role.PRE_CANDIDATE:
                self._stand_for_votes(transfer=False, now_ms=now_ms)
            else:
                self._lead(held=False, now_ms=now_ms)
        elif outcome is Outcome.LOST:
            # The timer stands where it stood: the next try comes when it would have come without an answer.
            self._become_follower(self.term, 0, now_ms=now_ms)

    def _lead(self, *, held: bool, now_ms: int) -> None:
        log = self._log
        self.role = Role.LEADER
        self.leader_id = self.replica_id
        self._ballot = None
        self._leadership = leadership = Leadership(
            self._identity,
            log,
            self._effects,
            self._settings,
            term=self.term,
            incarnations=self._incarnations,
            held=held,
            now_ms=now_ms,
        )
        self._note("leading", term=self.term, last_index=log.last_index)
        # A no-op: only an entry of our own term tells what is committed (invariant 5).
        leadership.propose(
            [self._make_noop(Place(log.last_index + 1, self.term, log.last_term, log.committed_index))]
        )

    # Answering those who stand

    def _answer_pre_vote(self, message: PreVote, *, now_ms: int) -> None:
        # Neither timer, term nor vote changes: to grant this costs nothing and binds nobody.
        granted = (
            message.term > self.term and not self._hears_leader(now_ms=now_ms) and self._up_to_date(message)
        )
        term = message.term if granted else self.term
        marked = self._counts_marked(message.last_term, message.last_index)
        self._effects.messages.append(PreVoteAnswer(*self._head_to(message.sender), term, granted, marked))

    def _answer_vote(self, message: Vote, *, now_ms: int) -> None:
        # Whoever asks is asked for its log alone, not whether it is a voter in *our* configuration: ours may
        # be old, and only the candidate's own says whose grants count (pitfall 15).
        is_free = self.vote == message.sender or (self.vote == 0 and self.leader_id == 0)
        granted = is_free and self._up_to_date(message)
        if granted and self.vote != message.sender:
            self.vote = message.sender
            self._hard_state_changed = True
            self._become_follower(self.term, 0, now_ms=now_ms)
            self._timer.restart(now_ms=now_ms)
        marked = self._counts_marked(message.last_term, message.last_index)
        self._effects.after_sync.append(
            VoteAnswer(*self._head_to(message.sender), self.term, granted, marked)
        )

    def _up_to_date(self, message: PreVote | Vote) -> bool:
        """Section 5.4.1: the later last term wins, then the longer log."""
        log = self._log
        return message.last_term > log.last_term or (
            message.last_term == log.last_term and message.last_index >= log.last_index
        )

    def _hears_leader(self, *, now_ms: int) -> bool:
        if self._leadership is not None:
            return True  # While we lead: if we hear no majority we step down by ourselves.
        return self.leader_id != 0 and self._timer.hears_leader(now_ms=now_ms)

    # Terms

    def _settle_term(self, message: AnyMessage, *, now_ms: int) -> bool:
        """Deal with a message of another term than ours; whether there is more to do with it."""
        if message.term < self.term:
            if isinstance(message, Append | Heartbeat):
                # A leader that doesn't know of our term: tell it, or it would lead on and never reach us.
                self._effects.messages.append(HeartbeatAnswer(*self._head_to(message.sender), self.term, 0))
            elif isinstance(message, PreVote):
                self._effects.messages.append(PreVoteAnswer(*self._head_to(message.sender), self.term, False))
            elif isinstance(message, Vote):
                self._effects.after_sync.append(VoteAnswer(*self._head_to(message.sender), self.term, False))
            else:
                self._drop("old_term", message)
            return False
        if isinstance(message, PreVote):
            return True
        if isinstance(message, PreVoteAnswer) and message.granted:
            # Granted for the term that we asked for, which is one above ours; anything else is of an old
            # ballot.
            return message.term == self.term + 1
        if isinstance(message, Vote) and not message.transfer and self._hears_leader(now_ms=now_ms):
            self._drop("leader_is_heard", message)
            return False
        self._become_follower(message.term, 0, now_ms=now_ms)
        return True

    def _hear_leader(self, message: Append | Heartbeat, *, now_ms: int) -> bool:
        """Take the sender for the leader of our term; False if that can't be."""
        sender = message.sender
        following = self._following
        if following.leader_id != sender:
            if following.leader_id or self._leadership is not None:
                self._drop("second_leader", message)
                self.second_leader = sender
                return False
            following.leader_id = sender
            if not self.marked:
                self._floor = None  # it let a learner stand, no more
            self._timer.restart(now_ms=now_ms)
        if self.leader_id != sender or self.role is not Role.FOLLOWER:
            self._become_follower(self.term, sender, now_ms=now_ms)
        self._timer.heard(now_ms=now_ms)
        self._passed = 0
        return True

    def _become_follower(self, term: int, leader_id: int, *, now_ms: int) -> None:
        if term > self.term:
            self._enter_term(term)
        if self._leadership is not None:
            self._effects.reads_failed.extend(self._leadership.reads.abandon())
            self._leadership = None
            self._timer.stepped_down(now_ms=now_ms)
        if self.role is not Role.FOLLOWER or self.leader_id != leader_id:
            self._note("following", term=self.term, leader_id=leader_id)
        self.role = Role.FOLLOWER
        self.leader_id = leader_id
        self._rests = False
        self._ballot = None

    def _enter_term(self, term: int) -> None:
        assert term > self.term, f"term {self.term} can't become {term}"
        self.term = term
        self.vote = 0
        self._hard_state_changed = True
        self._rests = False
        self._following = Following(self._identity, self._log, self._effects, term=term)

    # Small things

    def _head_to(self, receiver: int) -> tuple[bytes, bytes, int, int, int]:
        identity = self._identity
        return identity.cluster, identity.group, identity.replica_id, receiver, identity.incarnation

    def _drop(self, reason: str, message: AnyMessage) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self._note("dropped", reason=reason, message=message)

    def _note(self, event: str, **details: object) -> None:
        if self._trace is not None:
            self._trace(event, details)
