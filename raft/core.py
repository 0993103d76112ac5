"""The Raft protocol for one replica of one group, as a pure object.

Theory of operation ------------------- The driver feeds one input at a time (`receive`, `expire`, `propose`,
`persisted`, ...) and after *each* calls `take_ready`, whose `Ready` says what to write and what may be sent
when. The core reads no clock, draws from the generator it is given, touches no disk and does not log; a
simulator replays years of it.

A replica follows, stands (first for pre-votes, which change nothing anywhere, then for votes) or leads. What
is true for one term only lives in an object made for that term: `Following` (what matched with its leader)
and `Leadership` (progress of the others, reads, hand-over). What outlasts terms lives here: term, vote, log,
timer.

Invariants, by number; tests cite them.

1. Term and vote never go back, and at most one vote is given in a term. Whatever promises a term or a vote
   (`Vote`, `VoteAnswer`) waits for the sync that covers them.
2. A candidate wins with grants *collected by replica id* from a majority of the voters in its own log; an
   answer delivered twice is one answer. Hence one leader per term.
3. A leader never cuts or overwrites its own log. A follower cuts only at an entry whose term differs from the
   leader's entry there, and never at or below its commit index.
4. An accepting `AppendAnswer` waits for the sync: what it reports is durable and equal to the leader's log.
   A leader counts itself only as far as `persisted` told it, by (index, term).
5. A leader commits by counting only entries of its own term. It opens its term with a no-op, so that there is
   one.
6. A follower's commit index never exceeds what it has matched with the leader of *this* term, in this life.
7. Consecutive configurations differ by one voter at most; the newest one in the log is in force; the next is
   appended only when the last is committed and the leader has committed an entry of its own term.
8. A read is answered by a commit index taken after the request, confirmed by a majority in a round begun
   after the request, by a leader that had committed in its term.
9. Nothing is done with a message of another cluster or group, for another replica, or of a former
   incarnation.
10. A leader that nobody else voted for (a single voter) sends nothing before its own disk has confirmed its
    term: else, after a crash, it could lead the same term twice.
11. A replica that hears a leader neither grants a pre-vote nor lets a vote raise its term (except in a
    hand-over); a leader that hears no majority for an election timeout steps down. So a replica that is cut
    off disturbs nobody, and nobody waits for a leader that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raft.configuration import Configuration
from raft.elector import Elector
from raft.following import well_formed
from raft.leadership import Leadership
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
    HardState,
    LogView,
    MakeNoop,
    NotLeader,
    Place,
    Ready,
    Role,
    Settings,
    Trace,
)

if TYPE_CHECKING:
    import random


class Core(Elector):
    """One replica. All instants are `now_ms`, integers that never go back."""

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
        trace: Trace | None = None,
    ) -> None:
        """A replica as it comes up, with what its disk holds.

        `configuration` is in force before the first entry of `log`; `configurations` are the (index,
        configuration) of the entries in `log` that carry one, ascending. `committed_index` may be any index
        that is known to be committed, at least `log.first_index - 1`.
        """
        super().__init__(
            cluster=cluster,
            group=group,
            replica_id=replica_id,
            incarnation=incarnation,
            configuration=configuration,
            hard_state=hard_state,
            log=log,
            committed_index=committed_index,
            rng=rng,
            now_ms=now_ms,
            settings=settings,
            make_noop=make_noop,
            configurations=configurations,
            trace=trace,
        )
        self._cluster = cluster
        self._group = group
        # What the driver was told last.
        self._told_commit = self._log.committed_index
        self._told_role = (self.role, self.term, self.leader_id)
        self._told_configuration = self.configuration

    # What a driver may look at

    @property
    def is_leader(self) -> bool:
        """Whether proposals are taken here; false while handing over."""
        return self._leadership is not None and not self._leadership.transfer_target

    @property
    def committed_index(self) -> int:
        """Everything up to here is committed and never changes."""
        return self._log.committed_index

    @property
    def last_index(self) -> int:
        """The last entry, also if the driver has not been told of it yet."""
        return self._log.last_index

    @property
    def configuration(self) -> Configuration:
        """The newest configuration in the log, committed or not."""
        return self._log.configurations.current

    @property
    def progress(self) -> Mapping[int, Progress]:
        """What a leader knows of each member, by replica id; empty if we don't lead."""
        return self._leadership.progress if self._leadership is not None else {}

    def deadline_ms(self) -> int | None:
        """The next instant at which `expire` has something to do; None if only an input can do that."""
        if self._leadership is not None:
            return self._leadership.deadline_ms()
        return self._timer.deadline_ms if self._may_stand() else None

    def __repr__(self) -> str:
        return (
            f"<Core {self.replica_id} {self.role.value} term={self.term} leader={self.leader_id} "
            f"committed={self.committed_index} last={self.last_index}>"
        )

    # Inputs

    def receive(self, message: AnyMessage, entries: Sequence[Entry] = (), *, now_ms: int) -> None:
        """Take in a message from another replica, with the entries that travelled behind an `Append`."""
        if (
            message.receiver != self.replica_id
            or message.group != self._group
            or message.cluster != self._cluster
            or message.sender == self.replica_id
        ):
            self._drop("identity", message)
            return
        if message.incarnation != self._incarnations.get(message.sender, 0):
            if message.incarnation < self._incarnations.get(message.sender, 0):
                self._drop("old_incarnation", message)
                return
            self._incarnations[message.sender] = message.incarnation
            if self._leadership is not None:
                self._leadership.reincarnated(message.sender)
        if message.term != self.term and not self._settle_term(message, now_ms=now_ms):
            return
        if isinstance(message, AppendAnswer):
            if self._leadership is not None and not self._leadership.append_answer(message):
                self._drop("malformed", message)
        elif isinstance(message, Append):
            if not well_formed(message, entries):
                self._drop("malformed", message)
            elif self._hear_leader(message, now_ms=now_ms):
                self._following.append(message, entries)
        elif isinstance(message, HeartbeatAnswer):
            if self._leadership is not None and not self._leadership.heartbeat_answer(message):
                self._drop("malformed", message)
        elif isinstance(message, Heartbeat):
            if self._hear_leader(message, now_ms=now_ms):
                self._following.heartbeat(message)
        elif isinstance(message, PreVote):
            self._answer_pre_vote(message, now_ms=now_ms)
        elif isinstance(message, Vote):
            self._answer_vote(message, now_ms=now_ms)
        elif isinstance(message, PreVoteAnswer):
            if self.role is Role.PRE_CANDIDATE and (not message.granted or message.term == self.term + 1):
                self._count(message, now_ms=now_ms)
        elif isinstance(message, VoteAnswer):
            if self.role is Role.CANDIDATE:
                self._count(message, now_ms=now_ms)
        elif (
            self._following.leader_id == message.sender and self.role is not Role.LEADER and self._may_stand()
        ):
            # A `TimeoutNow` of our leader: it hands over to us.
            self._stand_for_votes(transfer=True, now_ms=now_ms)

    def expire(self, *, now_ms: int) -> None:
        """Do what is due at `now_ms`; at a deadline itself it is due."""
        if self._leadership is not None:
            if not self._leadership.expire(now_ms=now_ms):
                self._note("quorum lost", term=self.term)
                self._become_follower(self.term, 0, now_ms=now_ms)
        elif self._timer.overdue(now_ms=now_ms) and self._may_stand():
            self._stand(now_ms=now_ms)

    def postpone(self, *, by_ms: int) -> None:
        """The loop stalled: read what lies in the sockets before anybody is taken for silent."""
        self._timer.postpone(by_ms=by_ms)
        if self._leadership is not None:
            self._leadership.postpone(by_ms=by_ms)

    def campaign(self, *, now_ms: int) -> None:
        """Stand for election at once: for the first replica of a fresh group."""
        if self._leadership is None and self._may_stand():
            self._stand(now_ms=now_ms)

    def suspect_leader(self, *, now_ms: int) -> None:
        """News that the leader is gone: until it is heard again, stand soon and grant others pre-votes."""
        if self.role is Role.FOLLOWER and self.leader_id:
            self._timer.suspect(now_ms=now_ms)

    def unreachable(self, replica_id: int) -> None:
        """News that messages to this replica were lost: a leader asks where it stands, then goes on."""
        if self._leadership is not None:
            self._leadership.unreachable(replica_id)

    def place(self) -> Place:
        """Where the next proposed entry goes. Raises `NotLeader`."""
        self._proposing()
        log = self._log
        return Place(log.last_index + 1, self.term, log.last_term, log.committed_index)

    def propose(self, entries: Sequence[Entry], *, now_ms: int) -> None:
        """Append entries made for `place()` and the places after it. Raises `NotLeader`."""
        leadership = self._proposing()
        for entry in entries:
            assert entry.configuration is None, f"entry {entry.index}: use propose_configuration"
        leadership.propose(entries)

    def propose_configuration(self, entry: Entry, *, now_ms: int) -> None:
        """Append an entry for `place()` whose `configuration` is one step from ours; in force at once.

        Raises `NotLeader`, or `ConfigurationRefused` when the step is not allowed (now).
        """
        self._proposing().propose_configuration(entry)
        self._note("configuration", index=entry.index, configuration=self.configuration)

    def transfer_leadership(self, replica_id: int, *, now_ms: int) -> bool:
        """Hand over to a voter; proposals stop for an election timeout at most. False if it is no voter."""
        return self._proposing().transfer(replica_id, now_ms=now_ms)

    def read_index(self, context: int, *, now_ms: int) -> None:
        """Ask for an index that covers all that is committed by now; the answer comes in `Ready.reads`."""
        if self._leadership is None:
            self._effects.reads_failed.append(context)
        else:
            self._leadership.reads.waiting.append(context)

    def persisted(self, *, index: int, term: int) -> None:
        """Our disk holds the log up to entry (`index`, `term`), and all hard states recorded before it."""
        if not self._log.persisted(index, term):
            self.dropped["old_completion"] = self.dropped.get("old_completion", 0) + 1
        elif self._leadership is not None:
            self._leadership.persisted(term)

    def _proposing(self) -> Leadership:
        leadership = self._leadership
        if leadership is None or leadership.transfer_target:
            raise NotLeader(self.leader_id if leadership is None else leadership.transfer_target)
        return leadership

    # Output

    def take_ready(self) -> Ready:
        """What has to be done now; everything in it is handed out once. See `Ready`."""
        leadership = self._leadership
        if leadership is not None:
            leadership.flush()
            if leadership.finished:
                leadership.resign()
                self._note("removed from the group", term=self.term)
                # Any instant will do: once its removal is committed, a replica has no deadline.
                self._become_follower(self.term, 0, now_ms=self._timer.heard_at_ms)
        log = self._log
        truncate_from, entries = log.take()
        hard_state = committed_index = became = configuration = None
        if self._hard_state_changed:
            self._hard_state_changed = False
            hard_state = HardState(self.term, self.vote)
        if log.committed_index != self._told_commit:
            committed_index = self._told_commit = log.committed_index
        told_role = (self.role, self.term, self.leader_id)
        if told_role != self._told_role:
            self._told_role = told_role
            became = Became(*told_role)
        if log.configurations.current is not self._told_configuration:
            configuration = self._told_configuration = log.configurations.current
        return Ready(
            hard_state,
            truncate_from,
            entries,
            *self._effects.hand_out(),
            committed_index=committed_index,
            became=became,
            configuration=configuration,
        )
