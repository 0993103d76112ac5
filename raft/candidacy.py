"""Elections: one replica's term, vote and role, and how they change (paper 5.1, 5.2, 5.4.1; thesis 9.6).

A `Candidacy` decides when its replica campaigns, how it answers the campaigns of other replicas, and what to
do with a message of another term. It makes the objects that live for one term, `Following` and `Leadership`,
and knows nothing of what a leader sends or commits. All rules that tie votes to terms and logs are here:
invariants 1, 2, 10, 11 and 12 of `raft.core`, which feeds it messages and instants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raft.effects import Effects, Identity, Tracer
from raft.election_timer import ElectionTimer
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
from raft.quorum import Outcome, VoteTally
from raft.values import HardState, MakeNoop, Place, Role, Settings

if TYPE_CHECKING:
    import random


# How many campaigns a replica with damaged entries skips, at most, after its last contact with a leader.
MAX_DEFERRED_CAMPAIGNS = 3


class Candidacy:
    """One replica's term, vote and role, and the rules by which they change. Only its `Core` calls it."""

    __slots__ = (
        "_deferred",
        "_effects",
        "_floor",
        "_identity",
        "_incarnations",
        "_log",
        "_make_noop",
        "_settings",
        "_tally",
        "_tracer",
        "defers_campaign",
        "following",
        "hard_state_changed",
        "inhibited",
        "leader_id",
        "leadership",
        "recovering",
        "role",
        "second_leader",
        "term",
        "timer",
        "vote",
    )

    def __init__(
        self,
        identity: Identity,
        log: RaftLog,
        effects: Effects,
        tracer: Tracer,
        settings: Settings,
        *,
        hard_state: HardState,
        recovering: bool,
        incarnations: Mapping[int, int],
        make_noop: MakeNoop,
        rng: random.Random,
        now_ms: int,
    ) -> None:
        assert log.last_term <= hard_state.term, f"a log of term {log.last_term} with {hard_state}"
        self._identity = identity
        self._log = log
        self._effects = effects
        self._tracer = tracer
        self._settings = settings
        self._make_noop = make_noop
        # The highest incarnation seen in messages, by replica id; kept by the core.
        self._incarnations = incarnations
        self.term = hard_state.term
        self.vote = hard_state.vote
        self.hard_state_changed = False
        self.role = Role.FOLLOWER
        self.leader_id = 0
        # Another replica that claims to lead our term, which must never happen; 0: none.
        self.second_leader = 0
        # Whether we may have forgotten what we once acknowledged; every grant of ours carries it.
        self.recovering = recovering
        self.timer = ElectionTimer(timeout_ms=settings.election_timeout_ms, rng=rng, now_ms=now_ms)
        self.following = Following(identity, log, effects, term=self.term)
        self.leadership: Leadership | None = None
        # Part of our log is damaged: we vote and acknowledge, but leave campaigns to others.
        self.defers_campaign = False
        # How many campaigns were skipped for that reason since the last contact with a leader.
        self._deferred = 0
        # Our log is being replaced: we do not campaign at all.
        self.inhibited = False
        self._tally: VoteTally | None = None
        # The (last term, last index) that a log must reach for our grant to count while we are recovering.
        self._floor: tuple[int, int] | None = None

    # Campaigning

    def is_promotable(self) -> bool:
        """Return whether this replica may campaign.

        It may if campaigns are not inhibited, and it is a voter, may still count as one, or is released
        (`is_released`).
        """
        # Three cases. A voter. A former voter whose removal is not known to be committed: it does not count
        # its own vote, but its log may be the only one that the voters can vote for (thesis 4.2.2). A replica
        # whose log reaches the floor of a release, perhaps a learner: for the same reason.
        replica_id = self._identity.replica_id
        configurations = self._log.configurations
        return not self.inhibited and (
            replica_id in configurations.current.voters
            or configurations.may_count(replica_id)
            or self.is_released
        )

    @property
    def is_released(self) -> bool:
        """Whether a release has set a floor (the latest end of all remaining logs) and our log reaches it."""
        return self._reaches_floor(self._log.last_term, self._log.last_index)

    def _reaches_floor(self, last_term: int, last_index: int) -> bool:
        return self._floor is not None and (last_term, last_index) >= self._floor

    def _grants_recovering(self, last_term: int, last_index: int) -> bool:
        """Return whether our grant to a log that ends there must be marked `recovering`, and so is void."""
        return self.recovering and not self._reaches_floor(last_term, last_index)

    def release(self, floor: tuple[int, int], *, now_ms: int) -> None:
        """Make our grants to candidates whose logs end at `floor` or later valid, although we are recovering.

        `floor` is a pair (last term, last index): the latest end of all logs of the group.
        """
        if self._floor == floor:
            return
        self._floor = floor
        last_term, last_index = floor
        self._tracer.note("released", last_term=last_term, last_index=last_index)
        if self.is_promotable():
            self.timer.retry(now_ms=now_ms)

    def finish_recovery(self) -> None:
        """End the recovery: from now on this replica's grants count like those of any other."""
        self.recovering = False
        self._floor = None

    def inhibit_campaign(self, inhibited: bool, *, now_ms: int) -> None:
        """Forbid campaigns (True), because our log is being replaced, or allow them again (False)."""
        self.inhibited = inhibited
        if not inhibited:
            self.timer.retry(now_ms=now_ms)

    def expire(self, *, now_ms: int) -> None:
        """Campaign if that is due. Call it only if we neither lead nor are quiesced."""
        if (
            self.timer.is_due(now_ms=now_ms)
            and self.is_promotable()
            and not self._defer_campaign(now_ms=now_ms)
        ):
            self.campaign_prevote(now_ms=now_ms)

    def _defer_campaign(self, *, now_ms: int) -> bool:
        """Skip this campaign if part of our log is damaged; return whether it was skipped.

        Meanwhile any other voter that is up and could win campaigns. If there is no leader after
        `MAX_DEFERRED_CAMPAIGNS` skipped ones, this replica must campaign itself (docs/consensus.md#damage).
        A replica that is the only voter skips none.
        """
        if not self.defers_campaign or self._deferred >= MAX_DEFERRED_CAMPAIGNS:
            return False
        if self._log.configurations.current.voters == (self._identity.replica_id,):
            return False
        self._deferred += 1
        self.timer.retry(now_ms=now_ms)
        self._tracer.note("defers campaign", turn=self._deferred)
        return True

    def campaign_prevote(self, *, now_ms: int) -> None:
        """Become a pre-candidate and ask the voters whether they would vote for us.

        A pre-vote raises no replica's term, so a replica that can't win disturbs no leader. If our own grant
        is enough, campaign for votes at once.
        """
        self.role = Role.PRE_CANDIDATE
        self.leader_id = 0
        self.timer.retry(now_ms=now_ms)
        self._tracer.note("campaigning", term=self.term)
        tally = self._open_tally()
        if tally.outcome() is Outcome.WON:
            self.campaign(transfer=False, now_ms=now_ms)
            return
        log = self._log
        self._effects.messages.extend(
            PreVote(*self._identity.head_to(voter), self.term + 1, log.last_index, log.last_term)
            for voter in log.configurations.current.voters
            if voter != self._identity.replica_id
        )

    def campaign(self, *, transfer: bool, now_ms: int) -> None:
        """Enter the next term as a candidate and ask for votes.

        `transfer` says that the leader has handed over to us, so voters need not wait for its silence.
        """
        self._enter_term(self.term + 1)
        self.vote = self._identity.replica_id
        self.role = Role.CANDIDATE
        self.leader_id = 0
        self.timer.retry(now_ms=now_ms)
        tally = self._open_tally()
        if tally.outcome() is Outcome.WON:
            # No other replica vouches for this term, so nothing leaves before our own disk has it
            # (invariant 10).
            self._become_leader(held=True, now_ms=now_ms)
            return
        # These wait for the sync: our own vote counts as soon as others answer (invariant 1).
        log = self._log
        self._effects.after_sync.extend(
            Vote(*self._identity.head_to(voter), self.term, log.last_index, log.last_term, transfer)
            for voter in log.configurations.current.voters
            if voter != self._identity.replica_id
        )

    def _open_tally(self) -> VoteTally:
        self._tally = tally = VoteTally(self._log.configurations.current.voters)
        recovering = self._grants_recovering(self._log.last_term, self._log.last_index)
        tally.record(self._identity.replica_id, granted=True, recovering=recovering)
        return tally

    def count(self, answer: PreVoteAnswer | VoteAnswer, *, now_ms: int) -> None:
        """Count an answer to the campaign that is under way."""
        tally = self._tally
        assert tally is not None, f"{self.role} without a tally"
        tally.record(answer.sender, granted=answer.granted, recovering=answer.recovering)
        outcome = tally.outcome()
        if outcome is Outcome.WON:
            if self.role is Role.PRE_CANDIDATE:
                self.campaign(transfer=False, now_ms=now_ms)
            else:
                self._become_leader(held=False, now_ms=now_ms)
        elif outcome is Outcome.LOST:
            # The timer is left as it is: the next attempt comes when it would have come without an answer.
            self.become_follower(self.term, 0, now_ms=now_ms)

    def _become_leader(self, *, held: bool, now_ms: int) -> None:
        log = self._log
        self.role = Role.LEADER
        self.leader_id = self._identity.replica_id
        self._tally = None
        self.leadership = leadership = Leadership(
            self._identity,
            log,
            self._effects,
            self._settings,
            term=self.term,
            incarnations=self._incarnations,
            held=held,
            now_ms=now_ms,
        )
        self._tracer.note("leading", term=self.term, last_index=log.last_index)
        # A no-op: only an entry of our own term tells what is committed (invariant 5).
        leadership.propose(
            [self._make_noop(Place(log.last_index + 1, self.term, log.last_term, log.committed_index))]
        )

    # Answering those who campaign

    def answer_pre_vote(self, message: PreVote, *, now_ms: int) -> None:
        """Answer whether we would vote for the sender; our timer, term and vote stay as they are."""
        granted = (
            message.term > self.term and not self._in_contact(now_ms=now_ms) and self._up_to_date(message)
        )
        term = message.term if granted else self.term
        recovering = self._grants_recovering(message.last_term, message.last_index)
        self._effects.messages.append(
            PreVoteAnswer(*self._identity.head_to(message.sender), term, granted, recovering)
        )

    def answer_vote(self, message: Vote, *, now_ms: int) -> None:
        """Vote for the sender, or refuse; the answer waits for the sync."""
        # A candidate is judged by its log alone, not by whether it is a voter in *our* configuration: ours
        # may be old, and only the candidate's own says whose grants count (pitfall 15).
        is_free = self.vote == message.sender or (self.vote == 0 and self.leader_id == 0)
        granted = is_free and self._up_to_date(message)
        if granted and self.vote != message.sender:
            self.vote = message.sender
            self.hard_state_changed = True
            self.become_follower(self.term, 0, now_ms=now_ms)
            self.timer.restart(now_ms=now_ms)
        recovering = self._grants_recovering(message.last_term, message.last_index)
        self._effects.after_sync.append(
            VoteAnswer(*self._identity.head_to(message.sender), self.term, granted, recovering)
        )

    def _up_to_date(self, message: PreVote | Vote) -> bool:
        """Return whether the sender's log is at least as up-to-date as ours (paper 5.4.1)."""
        log = self._log
        return message.last_term > log.last_term or (
            message.last_term == log.last_term and message.last_index >= log.last_index
        )

    def _in_contact(self, *, now_ms: int) -> bool:
        if self.leadership is not None:
            return True  # A leader that hears no majority steps down by itself.
        return self.leader_id != 0 and self.timer.in_contact(now_ms=now_ms)

    # Terms

    def observe_term(self, message: AnyMessage, *, now_ms: int) -> bool:
        """Act upon the term of a message, if it is not ours; return whether the message is then processed."""
        if message.term < self.term:
            head = self._identity.head_to(message.sender)
            if isinstance(message, Append | Heartbeat):
                # A leader that doesn't know of our term: tell it, or it would lead on and never reach us.
                self._effects.messages.append(HeartbeatAnswer(*head, self.term, 0))
            elif isinstance(message, PreVote):
                self._effects.messages.append(PreVoteAnswer(*head, self.term, False))
            elif isinstance(message, Vote):
                self._effects.after_sync.append(VoteAnswer(*head, self.term, False))
            else:
                self._tracer.drop("old_term", message)
            return False
        if isinstance(message, PreVote):
            return True
        if isinstance(message, PreVoteAnswer) and message.granted:
            # Granted for the term that we asked for, which is one above ours; any other is an answer to an
            # older campaign.
            return message.term == self.term + 1
        if isinstance(message, Vote) and not message.transfer and self._in_contact(now_ms=now_ms):
            self._tracer.drop("leader_is_heard", message)
            return False
        self.become_follower(message.term, 0, now_ms=now_ms)
        return True

    def leader_contact(self, message: Append | Heartbeat, *, now_ms: int) -> bool:
        """Follow the sender as the leader of our term; return False if another leader of it is known."""
        sender = message.sender
        following = self.following
        if following.leader_id != sender:
            if following.leader_id or self.leadership is not None:
                self._tracer.drop("second_leader", message)
                self.second_leader = sender
                return False
            following.leader_id = sender
            if not self.recovering:
                self._floor = None  # Its only use here was to let a learner campaign.
            self.timer.restart(now_ms=now_ms)
        if self.leader_id != sender or self.role is not Role.FOLLOWER:
            self.become_follower(self.term, sender, now_ms=now_ms)
        self.timer.on_contact(now_ms=now_ms)
        self._deferred = 0
        return True

    def become_follower(self, term: int, leader_id: int, *, now_ms: int) -> None:
        """Follow `leader_id` (0: no leader is known) in `term`, which is our term or a later one."""
        if term > self.term:
            self._enter_term(term)
        if self.leadership is not None:
            self._effects.reads_failed.extend(self.leadership.reads.abandon())
            self.leadership = None
            self.timer.stepped_down(now_ms=now_ms)
        if self.role is not Role.FOLLOWER or self.leader_id != leader_id:
            self._tracer.note("following", term=self.term, leader_id=leader_id)
        self.role = Role.FOLLOWER
        self.leader_id = leader_id
        self.following.quiesced = False
        self._tally = None

    def _enter_term(self, term: int) -> None:
        assert term > self.term, f"term {self.term} can't become {term}"
        self.term = term
        self.vote = 0
        self.hard_state_changed = True
        self.following = Following(self._identity, self._log, self._effects, term=term)
