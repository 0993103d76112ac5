"""The Raft protocol for one replica of one group, as a pure object.

The driver feeds one input at a time (`receive`, `expire`, `propose`,
`persisted`, ...) and after *each* calls `take_ready`, whose `Ready` says what to write and what may be sent
when. The core reads no clock, draws from the generator it is given, touches no disk and does not log, so
a simulator can replay years of it. In this package "we" and "our" stand for the replica itself.

A replica follows, campaigns (first for pre-votes, which change nothing anywhere, then for votes) or leads.
What is true for one term only is kept in an object made for that term: `Following` (how far the log matches
the leader's) and `Leadership` (progress of the others, reads, hand-over). `Candidacy` has term, vote, role
and the election timer, and with them the rules of elections; the log is a `RaftLog`. The core itself decides
which messages are processed at all, passes them to these parts, and makes the `Ready` from their effects.

Invariants, by number; tests cite them.

1. Term and vote never go back, and at most one vote is given in a term. Whatever promises a term or a vote
   (`Vote`, `VoteAnswer`) waits for the sync that covers them.
2. A candidate wins with grants *collected by replica id* from a majority of the voters in its own log; an
   answer delivered twice is one answer. Hence one leader per term.
3. A leader never truncates or overwrites its own log. A follower truncates only at an entry whose term
   differs from the leader's entry there, and never at or below its commit index.
4. An accepting `AppendAnswer` waits for the sync: what it reports is durable and equal to the leader's log.
   A leader counts itself only as far as `persisted` says, by (index, term).
5. A leader commits by counting only entries of its own term. It opens its term with a no-op, so that there is
   one.
6. A follower's commit index never exceeds what it has matched with the leader of *this* term since its start.
7. Consecutive configurations differ by one voter at most; the newest one in the log is in force; the next is
   appended only when the last is committed and the leader has committed an entry of its own term.
8. A read is answered with a commit index that was taken after the request, by a leader that had committed an
   entry of its term, and whose leadership a majority has confirmed in a round begun after the request.
9. A message of another cluster or group, for another replica, or of a former incarnation is ignored.
10. A leader that no other replica voted for (a single voter) sends nothing before its own disk has confirmed
    its term: else, after a crash, it could lead the same term twice.
11. A replica that hears a leader neither grants a pre-vote nor lets a vote raise its term (except in a
    hand-over); a leader that hears no majority for an election timeout steps down. So a replica
    that is cut off disturbs no other, and no client waits for a leader that is.
12. A replica that may have forgotten what it acknowledged is *recovering*: its grants elect no leader. That
    ends when its log again matches, in the term of one leader, all that it may have acknowledged. Before
    that, a `release` may give it a *floor*: the latest end (last term, last index) among the logs of all
    replicas of the group. Then its grants count, but only for candidates whose logs reach the floor. These
    rules were searched with a model checker: change none of them without the model
    (docs/models/recovering.tla, docs/consensus.md#recovering).
13. An *offer* is the leader's request, in its heartbeats, that replicas quiesce (stop their timers). A group
    quiesces only when all replicas that were asked hold all that the leader holds, know it committed, and
    have agreed to the same offer. Quiescence stops heartbeats and timers, and nothing else: terms, votes,
    logs and reads obey the rules above all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raft.candidacy import Candidacy
from raft.configuration import Configuration
from raft.effects import Effects, Identity, Tracer
from raft.election_timer import MAX_SUSPICION_DELAY_MS
from raft.following import well_formed
from raft.leadership import Leadership
from raft.log import RaftLog
from raft.messages import (
    AnyMessage,
    Append,
    AppendAnswer,
    Heartbeat,
    HeartbeatAnswer,
    PreVote,
    PreVoteAnswer,
    Vote,
    VoteAnswer,
)
from raft.progress import Progress
from raft.values import (
    Became,
    Entry,
    EntryTooLarge,
    HardState,
    LogView,
    MakeNoop,
    NotLeader,
    Place,
    Ready,
    Role,
    SendAppend,
    Settings,
    TooMuchUncommitted,
    Trace,
    Written,
)

if TYPE_CHECKING:
    import random


# No group has more elections than this while one of its replicas is away. A term that is further ahead is
# forged: taken over, it would leave the group no term to campaign in.
MOST_TERMS_AHEAD = 2**32


class Core:
    """One replica of one group. All instants are in ms of a monotonic clock (`now_ms`), and never go back."""

    def __init__(
        self,
        *,
        cluster: bytes,
        group: bytes,
        replica_id: int,
        incarnation: int,
        configuration: Configuration,
        hard_state: HardState,
        log: LogView,
        committed_index: int,
        rng: random.Random,
        now_ms: int,
        settings: Settings,
        make_noop: MakeNoop,
        configurations: Iterable[tuple[int, Configuration]] = (),
        recovering: bool = False,
        trace: Trace | None = None,
    ) -> None:
        """Start a replica with what its disk holds.

        `recovering` says that the replica may have forgotten something that it acknowledged. That flag and
        `incarnation`, which rises with every such loss, must be durable before the core is made.
        `configuration` is in force before the first entry of `log`; `configurations` are the (index,
        configuration) of the entries in `log` that carry one, ascending. `committed_index` may be any index
        that is known to be committed, at least `log.first_index - 1`.
        """
        assert replica_id > 0, f"replica id {replica_id}: 0 means none"
        self.replica_id = replica_id
        self._cluster = cluster
        self._group = group
        self._settings = settings
        self._identity = Identity(cluster, group, replica_id, incarnation)
        self._log = RaftLog(
            log, committed_index=committed_index, configuration=configuration, configurations=configurations
        )
        self._effects = Effects()
        self._tracer = Tracer(trace)
        # The highest incarnation seen in messages, by replica id.
        self._incarnations: dict[int, int] = {}
        self._candidacy = Candidacy(
            self._identity,
            self._log,
            self._effects,
            self._tracer,
            settings,
            hard_state=hard_state,
            recovering=recovering,
            incarnations=self._incarnations,
            make_noop=make_noop,
            rng=rng,
            now_ms=now_ms,
        )
        # Messages and completions that were not acted upon, by reason.
        self.dropped = self._tracer.dropped
        self._recovered = False
        # A leader's heartbeat has shown that this log is an older copy, which lacks what this replica
        # acknowledged. All messages are ignored from then on: the replica must be started again as
        # recovering, in a new incarnation.
        self.log_regressed = False
        # The latest incarnation of ours that is known to have existed: the next one must be above it.
        self.last_incarnation = incarnation
        # What the last `Ready` said.
        self._reported_commit = self._log.committed_index
        self._reported_role = (self.role, self.term, self.leader_id)
        self._reported_configuration = self.configuration

    # What a driver may look at

    @property
    def term(self) -> int:
        """The latest term that this replica has seen."""
        return self._candidacy.term

    @property
    def vote(self) -> int:
        """The replica that this one voted for in its term; 0 for none."""
        return self._candidacy.vote

    @property
    def role(self) -> Role:
        """Role of this replica: follower, pre-candidate, candidate or leader."""
        return self._candidacy.role

    @property
    def leader_id(self) -> int:
        """The leader of this term; 0 while it is not known."""
        return self._candidacy.leader_id

    @property
    def recovering(self) -> bool:
        """Whether this replica may have forgotten what it once acknowledged."""
        return self._candidacy.recovering

    @property
    def is_released(self) -> bool:
        """Whether a release (`release`) has shown that no remaining log of the group holds more than ours."""
        return self._candidacy.is_released

    @property
    def defers_campaign(self) -> bool:
        """True if others should campaign first, because part of this log is damaged; set by the driver."""
        return self._candidacy.defers_campaign

    @defers_campaign.setter
    def defers_campaign(self, defers: bool) -> None:
        self._candidacy.defers_campaign = defers

    @property
    def second_leader(self) -> int:
        """Another replica that claims to lead our term, which must never happen; 0: none."""
        return self._candidacy.second_leader

    def take_second_leader(self) -> int:
        """Return `second_leader` and reset it to 0."""
        other, self._candidacy.second_leader = self._candidacy.second_leader, 0
        return other

    @property
    def is_leader(self) -> bool:
        """Whether this replica leads and takes proposals; False while it hands leadership over."""
        leadership = self._candidacy.leadership
        return leadership is not None and not leadership.transfer_target

    @property
    def committed_index(self) -> int:
        """The index of the last committed entry; everything up to there never changes."""
        return self._log.committed_index

    @property
    def incarnation(self) -> int:
        """The incarnation of this replica: it rises whenever the replica may have lost acknowledged data."""
        return self._identity.incarnation

    @property
    def last_term(self) -> int:
        """The term of the last entry in our log."""
        return self._log.last_term

    @property
    def last_index(self) -> int:
        """The index of the last entry in our log, even if no `Ready` has handed it out yet."""
        return self._log.last_index

    @property
    def configuration(self) -> Configuration:
        """The newest configuration in the log, committed or not."""
        return self._log.configurations.current

    @property
    def is_reconfiguring(self) -> bool:
        """Whether a change of the configuration is under way: the one in force is not committed yet."""
        return self._log.configurations.index > self._log.committed_index

    @property
    def possible_members(self) -> set[int]:
        """Voters and learners of every configuration in the log that may be in force, and ourselves."""
        return self._log.configurations.members() | {self.replica_id}

    @property
    def progress(self) -> Mapping[int, Progress]:
        """The progress of each member, by replica id, ourselves included; empty if we don't lead."""
        leadership = self._candidacy.leadership
        return leadership.progress if leadership is not None else {}

    @property
    def uncommitted_bytes(self) -> int:
        """The bytes of the entries that were appended since the start and are not committed."""
        return self._log.uncommitted_bytes

    @property
    def quiesced(self) -> bool:
        """Whether this replica is quiesced: it has no deadline and sends nothing until an input wakes it."""
        candidacy = self._candidacy
        leadership = candidacy.leadership
        return candidacy.following.quiesced if leadership is None else leadership.quiescence.quiesced

    @property
    def quiesce_peers(self) -> Collection[int]:
        """The replicas whose processes the driver must watch while we are quiesced; empty if we are not.

        For a leader these are the followers that agreed to quiesce, for a follower its leader.
        """
        if not self.quiesced:
            return ()
        leadership = self._candidacy.leadership
        return (self.leader_id,) if leadership is None else leadership.quiescence.asked

    @property
    def is_electing(self) -> bool:
        """Whether we campaign, or lead and have committed nothing yet in our term."""
        leadership = self._candidacy.leadership
        if leadership is None:
            return self.role is not Role.FOLLOWER
        return self._log.committed_index < leadership.term_start

    @property
    def is_expedited(self) -> bool:
        """Whether the leader is suspected and our campaign is not delayed by a `spread_ms`."""
        timer = self._candidacy.timer
        return timer.suspected and timer.suspicion_delay_ms <= MAX_SUSPICION_DELAY_MS

    @property
    def is_idle(self) -> bool:
        """Whether we lead and had nothing to do since the last heartbeat, so that the group may quiesce."""
        leadership = self._candidacy.leadership
        return leadership is not None and not leadership.quiescence.quiesced and leadership.is_idle

    def deadline_ms(self) -> int | None:
        """Return the next instant at which `expire` has something to do; None if there is none."""
        candidacy = self._candidacy
        if candidacy.leadership is not None:
            return candidacy.leadership.deadline_ms()
        if candidacy.following.quiesced:
            return None
        return candidacy.timer.deadline_ms if candidacy.is_promotable() else None

    def __repr__(self) -> str:
        return (
            f"<Core {self.replica_id} {self.role.value} term={self.term} leader={self.leader_id} "
            f"committed={self.committed_index} last={self.last_index}>"
        )

    # Inputs

    def receive(self, message: AnyMessage, entries: Sequence[Entry] = (), *, now_ms: int) -> None:
        """Process a message from another replica, with the entries that came with an `Append`."""
        candidacy = self._candidacy
        if (
            self.log_regressed
            or message.receiver != self.replica_id
            or message.group != self._group
            or message.cluster != self._cluster
            or message.sender == self.replica_id
        ):
            self._tracer.drop("identity", message)
            return
        if message.term > candidacy.term + MOST_TERMS_AHEAD:
            self._tracer.drop("term_ahead", message)
            return
        if message.sender in self._log.configurations.current.abandoned:
            # The sender was abandoned. With others like it, it might win an election in which we count.
            self._tracer.drop("abandoned_member", message)
            return
        if message.incarnation != self._incarnations.get(message.sender, 0):
            if message.incarnation < self._incarnations.get(message.sender, 0):
                self._tracer.drop("old_incarnation", message)
                return
            self._incarnations[message.sender] = message.incarnation
            if candidacy.leadership is not None:
                candidacy.leadership.reincarnated(message.sender)
        if self.quiesced:
            self._disturbed_by(message, now_ms=now_ms)
        if message.term != candidacy.term and not candidacy.observe_term(message, now_ms=now_ms):
            return
        leadership = candidacy.leadership
        if isinstance(message, AppendAnswer):
            if leadership is not None and not leadership.append_answer(message):
                self._tracer.drop("malformed", message)
        elif isinstance(message, Append):
            if not well_formed(message, entries):
                self._tracer.drop("malformed", message)
            elif candidacy.leader_contact(message, now_ms=now_ms) and not candidacy.following.append(
                message, entries
            ):
                self._tracer.drop("abandoned", message)
        elif isinstance(message, HeartbeatAnswer):
            if leadership is not None and not leadership.heartbeat_answer(message):
                self._tracer.drop("malformed", message)
        elif isinstance(message, Heartbeat):
            if not candidacy.leader_contact(message, now_ms=now_ms):
                return
            if candidacy.following.has_regressed(message):
                self.log_regressed = True
                self.last_incarnation = max(self.incarnation, message.receiver_incarnation)
                self._tracer.note("log_regressed", term=candidacy.term, held=message.held_index)
            else:
                candidacy.following.heartbeat(message, may_quiesce=not candidacy.recovering)
        elif isinstance(message, PreVote):
            candidacy.answer_pre_vote(message, now_ms=now_ms)
        elif isinstance(message, Vote):
            candidacy.answer_vote(message, now_ms=now_ms)
        elif isinstance(message, PreVoteAnswer):
            if leadership is not None and not message.granted:
                leadership.transfer_refused(message.sender)
            elif candidacy.role is Role.PRE_CANDIDATE and (
                not message.granted or message.term == candidacy.term + 1
            ):
                candidacy.count(message, now_ms=now_ms)
        elif isinstance(message, VoteAnswer):
            if candidacy.role is Role.CANDIDATE:
                candidacy.count(message, now_ms=now_ms)
        elif candidacy.following.leader_id == message.sender and candidacy.role is not Role.LEADER:
            # A `TimeoutNow` of our leader: it hands over to us.
            if candidacy.defers_campaign or not candidacy.is_promotable():
                # Else it would take no proposals before it has waited for us.
                self._tracer.drop("defers_campaign", message)
                head = self._identity.head_to(message.sender)
                self._effects.messages.append(
                    PreVoteAnswer(*head, candidacy.term, False, candidacy.recovering)
                )
            else:
                candidacy.campaign(transfer=True, now_ms=now_ms)

    def _disturbed_by(self, message: AnyMessage, *, now_ms: int) -> None:
        is_leaders = message.sender == self.leader_id and message.term == self.term
        if is_leaders and isinstance(message, Heartbeat | Append):
            # The leader is awake too, and knows that we are; a heartbeat may ask us to stay quiesced.
            self._candidacy.following.quiesced = isinstance(message, Heartbeat)
        else:
            self.unquiesce(now_ms=now_ms)

    def expire(self, *, now_ms: int) -> None:
        """Do what is due at `now_ms`: everything with a deadline at or before it."""
        candidacy = self._candidacy
        leadership = candidacy.leadership
        if leadership is None:
            if not candidacy.following.quiesced:
                candidacy.expire(now_ms=now_ms)
        elif not leadership.expire(now_ms=now_ms):
            self._tracer.note("not received" if leadership.is_unreached else "quorum lost", term=self.term)
            candidacy.become_follower(self.term, 0, now_ms=now_ms)
            if leadership.is_unreached:
                # Our log is the longest, so we would win again; wait, as entries of another leader may reach
                # a majority.
                candidacy.timer.postpone(by_ms=2 * self._settings.election_timeout_ms)

    def offer_quiesce(self, *, absent: Collection[int] = ()) -> None:
        """Let the next heartbeat, if we are idle, ask all members but `absent` to quiesce.

        Call it before `expire`, and only while the processes of all members but `absent` answer. Watch those
        processes from then on: call `unquiesce` when the process of one of our `quiesce_peers` is silent,
        gone, or has started again.
        """
        leadership = self._candidacy.leadership
        if leadership is not None:
            leadership.offer_quiesce(absent)

    def unquiesce(self, *, now_ms: int, contact_ms: int | None = None) -> None:
        """End quiescence: start the timers again, and notify the leader, so that it sends heartbeats again.

        If we lead, heartbeats are sent again at once. Do nothing if we are not quiesced. `contact_ms` is when
        the leader's process was last heard; None stands for now.
        """
        candidacy = self._candidacy
        leadership = candidacy.leadership
        if leadership is not None:
            if leadership.quiescence.quiesced:
                leadership.unquiesce(now_ms=now_ms, soon=True)
                self._tracer.note("awake", term=self.term)
        elif candidacy.following.quiesced:
            candidacy.following.quiesced = False
            candidacy.timer.on_contact(now_ms=now_ms if contact_ms is None else contact_ms)
            head = self._identity.head_to(self.leader_id)
            self._effects.messages.append(HeartbeatAnswer(*head, self.term, 0))
            self._tracer.note("awake", term=self.term)

    def quiesce_without(self, gone: Collection[int]) -> bool:
        """Return whether a quiesced leader stays quiesced without these members, whose processes are gone.

        After False the driver must call `unquiesce` now; after True, when a process of one of these members
        is up again.
        """
        leadership = self._candidacy.leadership
        return leadership is not None and leadership.quiescence.quiesced and leadership.quiesce_without(gone)

    def postpone(self, *, by_ms: int) -> None:
        """Postpone deadlines by `by_ms`: the loop stalled, so messages to us may be unread in the sockets."""
        candidacy = self._candidacy
        candidacy.timer.postpone(by_ms=by_ms)
        if candidacy.leadership is not None:
            candidacy.leadership.postpone(by_ms=by_ms)

    def campaign(self, *, now_ms: int) -> None:
        """Campaign at once, if we don't lead and may campaign: it elects the first leader of a new group."""
        if self._candidacy.leadership is None and self._candidacy.is_promotable():
            self.unquiesce(now_ms=now_ms)
            self._candidacy.campaign_prevote(now_ms=now_ms)

    def suspect_leader(self, *, now_ms: int, spread_ms: int = 0) -> None:
        """Suspect the leader, because a report says that it is gone: campaign soon, unless it is heard again.

        Meanwhile, pre-votes of others are granted. With `spread_ms` the first campaign comes at a random
        instant within that time, and the delays before later ones are longer, too: use it when many groups
        lose their leaders at once.
        """
        if self.role is Role.FOLLOWER and self.leader_id:
            self.unquiesce(now_ms=now_ms)
            self._candidacy.timer.suspect(now_ms=now_ms, spread_ms=spread_ms)

    def expedite_election(self, *, now_ms: int) -> None:
        """Undo the spread of `suspect_leader` for this group, because requests wait for its next leader."""
        if self.role is Role.FOLLOWER and self.leader_id and not self._candidacy.following.quiesced:
            self._candidacy.timer.expedite(now_ms=now_ms)

    def unreachable(self, replica_id: int) -> None:
        """Ask where this replica's log ends before more is sent to it: messages to it may be lost.

        Call it only if we lead; call `unquiesce` first if we are quiesced.
        """
        leadership = self._candidacy.leadership
        if leadership is not None:
            leadership.unreachable(replica_id)

    def catch_up(self, replica_id: int, *, resume_index: int) -> None:
        """Send this replica no entries until it holds the log up to `resume_index`. Leader only.

        The caller lets the replica copy the log up to there (catch-up). Meanwhile empty appends ask whether
        it holds that entry. The same happens without this call if the entries that the replica lacks are no
        longer in our log.
        """
        leadership = self._candidacy.leadership
        if leadership is not None:
            leadership.catch_up(replica_id, resume_index)

    def resume(self, replica_id: int) -> None:
        """Send this replica entries again, after `catch_up`. Leader only.

        If our log no longer has the entries that the replica lacks, it still has to be caught up.
        """
        leadership = self._candidacy.leadership
        if leadership is not None:
            leadership.resume(replica_id)

    def inhibit_campaign(self, inhibited: bool, *, now_ms: int) -> None:
        """Forbid campaigns (True), because the replica's log is being replaced, or allow them again (False).

        The replica still votes.
        """
        self._candidacy.inhibit_campaign(inhibited, now_ms=now_ms)

    def place(self) -> Place:
        """Return the index, the terms and the commit index with which the next proposed entry must be made.

        Raises:
            NotLeader: when we don't lead, or hand over.
        """
        self._leading()
        log = self._log
        return Place(log.last_index + 1, self.term, log.last_term, log.committed_index)

    def propose(self, entries: Sequence[Entry], *, now_ms: int) -> None:
        """Append entries made for `place()` and the indexes after it; all of them or none.

        Raises:
            NotLeader: when we don't lead, or hand over.
            EntryTooLarge: when an entry exceeds `max_entry_bytes`.
            TooMuchUncommitted: when too many bytes wait to be committed.
        """
        leadership = self._proposing(now_ms=now_ms)
        size_bytes = 0
        largest_bytes = self._settings.max_entry_bytes
        for entry in entries:
            assert entry.configuration is None, f"entry {entry.index}: use propose_configuration"
            if entry.size > largest_bytes:
                raise EntryTooLarge(entry_bytes=entry.size, limit_bytes=largest_bytes)
            size_bytes += entry.size
        waiting_bytes = self._log.uncommitted_bytes
        if waiting_bytes and waiting_bytes + size_bytes > self._settings.max_uncommitted_bytes:
            # Without a majority, memory and disk would fill with what may never be committed (pitfall 18).
            raise TooMuchUncommitted(
                uncommitted_bytes=waiting_bytes,
                proposed_bytes=size_bytes,
                limit_bytes=self._settings.max_uncommitted_bytes,
            )
        leadership.propose(entries)

    def propose_configuration(self, entry: Entry, *, now_ms: int) -> None:
        """Append an entry for `place()` whose `configuration` is one step from ours; it is in force at once.

        The limit of uncommitted bytes does not apply, because the change may give the group a majority again.

        Raises:
            NotLeader: when we don't lead, or hand over.
            ConfigurationRefused: when the step is not allowed, or not now.
        """
        self._proposing(now_ms=now_ms).propose_configuration(entry)
        self._tracer.note("configuration", index=entry.index, configuration=self.configuration)

    def majority_active(self, voters: Collection[int]) -> bool:
        """Return whether we lead, and heard a majority of these replicas in the last two election timeouts.

        If not, `propose_configuration` refuses to make them the voters.
        """
        leadership = self._candidacy.leadership
        return leadership is not None and leadership.majority_active(voters)

    def is_caught_up(self, replica_id: int) -> bool:
        """Return whether we lead, and this member is active and holds all committed at the last heartbeat."""
        leadership = self._candidacy.leadership
        return (
            leadership is not None and leadership.is_active(replica_id) and leadership.caught_up(replica_id)
        )

    def may_be_recovering(self, replica_id: int) -> bool:
        """Return whether we lead, and this member is active and may still be recovering.

        A member no longer is, once its log matches ours up to its goal: the end of all that it may have
        acknowledged. The state of a silent member is not known.
        """
        leadership = self._candidacy.leadership
        if leadership is None or not leadership.is_active(replica_id):
            return False
        progress = leadership.progress[replica_id]
        return self.recovering if progress is leadership.own else progress.match_index < progress.goal

    def transfer_leadership(self, replica_id: int, *, now_ms: int) -> bool:
        """Hand leadership over to another voter; return False if `replica_id` is not another voter.

        Proposals are refused until that replica leads or an election timeout has passed.

        Raises:
            NotLeader: when we don't lead, or hand over already.
        """
        return self._proposing(now_ms=now_ms).transfer(replica_id, now_ms=now_ms)

    def read_index(self, context: int, *, now_ms: int) -> None:
        """Request a commit index that covers all that is committed by now.

        The answer comes in `Ready.reads` with the caller's `context`. The context is in `Ready.reads_failed`
        if we don't lead, or stop leading before a majority has confirmed the round.
        """
        leadership = self._candidacy.leadership
        if leadership is None:
            self._effects.reads_failed.append(context)
        else:
            if leadership.quiescence.quiesced:
                leadership.unquiesce(now_ms=now_ms, soon=False)
            leadership.reads.waiting.append(context)

    def persisted(self, written: Written) -> None:
        """Note that our disk now holds the log up to `written`, its end after an earlier `Ready`.

        All hard states that were handed out before that are on the disk, too.
        """
        if not self._log.persisted(written):
            self.dropped["old_completion"] = self.dropped.get("old_completion", 0) + 1
        elif self._candidacy.leadership is not None:
            self._candidacy.leadership.persisted(written.term)

    def accept_loss(self) -> None:
        """End our recovery, because an operator accepts the loss of what only absent replicas hold.

        Call it only for such a decision.
        """
        if self.recovering:
            self._finish_recovery("an operator accepted the loss")

    def release(self, *, incarnation: int, last_term: int, last_index: int, now_ms: int) -> bool:
        """Set our *floor*: the latest end (last term, last index) of the logs of all replicas of the group.

        From now on our grants count, although we are recovering, if the candidate's log ends at the floor or
        later, because no remaining log holds more. If our own log reaches the floor we may campaign, even as
        a learner. Each of the others must have answered after our `incarnation` was known to it, and none of
        them as a leader (docs/consensus.md#when-all-replicas-have-answered). Return False, and do nothing, if
        our incarnation is another one, if we lead, or if `log_regressed`.
        """
        leads = self._candidacy.leadership is not None
        if incarnation != self._identity.incarnation or leads or self.log_regressed:
            return False
        self._candidacy.release((last_term, last_index), now_ms=now_ms)
        return True

    def go_on_alone(self, make: MakeNoop, *, term: int, now_ms: int) -> None:
        """Go on as the only voter, because an operator decided that the absent voters are gone for good.

        Call it only for such a decision. `make` returns the entry that records it: a configuration with this
        replica as its only voter, and the others as abandoned. `term` is above any that the group can have
        reached. What only the others hold is lost. All that we hold is committed, because some of it may be
        acknowledged.
        """
        candidacy = self._candidacy
        assert candidacy.leadership is None and term > self.term, f"term {term} at {self!r}"
        self.accept_loss()
        candidacy.inhibited = False
        candidacy.become_follower(term, 0, now_ms=now_ms)
        log = self._log
        entry = make(Place(log.last_index + 1, term, log.last_term, log.committed_index))
        assert entry.configuration is not None and entry.configuration.voters == (self.replica_id,), entry
        log.append([entry])
        self._tracer.note("goes on alone", term=term, abandoned=entry.configuration.abandoned)
        # Our own vote elects us in the term after `term`. Nothing is sent before our disk has that term.
        candidacy.campaign(transfer=False, now_ms=now_ms)

    def _finish_recovery(self, why: str) -> None:
        self._candidacy.finish_recovery()
        self._recovered = True
        self._tracer.note("mark fell", why=why, term=self.term)

    def _proposing(self, *, now_ms: int) -> Leadership:
        leadership = self._leading()
        if leadership.quiescence.quiesced:
            leadership.unquiesce(now_ms=now_ms, soon=False)
        return leadership

    def _leading(self) -> Leadership:
        leadership = self._candidacy.leadership
        if leadership is None or leadership.transfer_target:
            raise NotLeader(self.leader_id if leadership is None else leadership.transfer_target)
        return leadership

    # Output

    def take_ready(self) -> Ready:
        """Return the actions that the driver must perform now; no later call returns them again.

        See `Ready`.
        """
        candidacy = self._candidacy
        leadership = candidacy.leadership
        if leadership is not None:
            leadership.flush()
            if leadership.finished:
                leadership.transfer_on_removal()
                self._tracer.note("removed from the group", term=self.term)
                # Any instant will do: once its removal is committed, a replica has no deadline.
                candidacy.become_follower(candidacy.term, 0, now_ms=candidacy.timer.last_contact_ms)
                leadership = candidacy.leadership
        log = self._log
        if candidacy.recovering and (leadership or candidacy.following).is_complete:
            self._finish_recovery("complete")
        recovered, self._recovered = self._recovered, False
        # A list that has nothing in it stays where it is: most Readies carry one or two kinds of effects.
        effects = self._effects
        entries: Sequence[Entry] = ()
        messages: Sequence[AnyMessage] = ()
        after_sync: Sequence[AnyMessage] = ()
        appends: Sequence[SendAppend] = ()
        reads: Sequence[tuple[int, int]] = ()
        reads_failed: Sequence[int] = ()
        if effects.messages:
            messages, effects.messages = effects.messages, []
        if effects.after_sync:
            after_sync, effects.after_sync = effects.after_sync, []
        if effects.appends:
            appends, effects.appends = effects.appends, []
        if effects.reads:
            reads, effects.reads = effects.reads, []
        if effects.reads_failed:
            reads_failed, effects.reads_failed = effects.reads_failed, []
        truncate_from = hard_state = committed_index = became = configuration = None
        if log.pending or log.truncate_from is not None:
            truncate_from, entries = log.take()
        if candidacy.hard_state_changed:
            candidacy.hard_state_changed = False
            hard_state = HardState(candidacy.term, candidacy.vote)
        if log.committed_index != self._reported_commit:
            committed_index = self._reported_commit = log.committed_index
        new_role = (candidacy.role, candidacy.term, candidacy.leader_id)
        if new_role != self._reported_role:
            self._reported_role = new_role
            became = Became(*new_role)
        if log.configurations.current is not self._reported_configuration:
            configuration = self._reported_configuration = log.configurations.current
        place = None
        if leadership is not None and not leadership.transfer_target:
            place = Place(log.last_index + 1, candidacy.term, log.last_term, log.committed_index)
        return Ready(
            hard_state,
            truncate_from,
            entries,
            messages,
            after_sync,
            appends,
            reads,
            reads_failed,
            committed_index=committed_index,
            became=became,
            configuration=configuration,
            recovered=recovered,
            written=Written(log.last_index, log.last_term, log.truncations),
            place=place,
            quiesced=candidacy.following.quiesced if leadership is None else leadership.quiescence.quiesced,
        )
