"""The leader's side of one term: commitment, confirmation rounds, configuration changes, hand-over.

The object is made when an election is won. It is dropped when leadership ends, and with it everything that is
true only of a leader in that term. It decides what is sent to which replica, what is committed (paper 5.3,
5.4.2), and when the group is idle and may quiesce; it knows neither votes nor how it came to lead. `flush` is
called once per Ready, so that many proposals of one turn leave in few appends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from raft.configuration import ConfigurationRefused, check_step
from raft.effects import Effects, Identity
from raft.log import RaftLog
from raft.messages import AppendAnswer, HeartbeatAnswer, TimeoutNow
from raft.progress import Flow, Progress
from raft.quiescence import QuiesceOffer
from raft.quorum import agreed_value, majority
from raft.reads import ReadQueue
from raft.sender import Sender
from raft.values import Entry, Settings

# A leader that has reached no majority with its entries for this number of election timeouts steps down.
UNREACHED_CHECKS = 4


class Leadership:
    """The leader's side of one term: what is sent, committed and confirmed.

    `finished` says that the leader must step down after the next `flush`, because its removal is committed.
    """

    __slots__ = (
        "_committed_at_check",
        "_committed_at_tick",
        "_effects",
        "_heartbeat_deadline_ms",
        "_incarnation_of",
        "_last_at_check",
        "_log",
        "_others",
        "_quorum_deadline_ms",
        "_round",
        "_sender",
        "_settings",
        "_tick_round",
        "_transfer_deadline_ms",
        "_unreached",
        "_voters",
        "finished",
        "held",
        "own",
        "progress",
        "quiescence",
        "reads",
        "term",
        "term_start",
        "transfer_target",
    )

    def __init__(
        self,
        identity: Identity,
        log: RaftLog,
        effects: Effects,
        settings: Settings,
        *,
        term: int,
        incarnations: Mapping[int, int],
        held: bool,
        now_ms: int,
    ) -> None:
        """Begin to lead.

        `held` says that no other replica voted for us: then nothing is sent before our own disk has this term
        (invariant 10 of `raft.core`).
        """
        self._sender = Sender(identity, log, effects, settings, term=term)
        self._log = log
        self._effects = effects
        self._settings = settings
        self._incarnation_of = incarnations
        self.term = term
        self.term_start = log.last_index + 1
        self.held = held
        self.finished = False
        self.progress: dict[int, Progress] = {}
        self.own = self._new_progress(identity.replica_id)
        self.own.match_index = log.durable_index
        self._others: list[Progress] = []
        self._voters: list[Progress] = []
        self.reads = ReadQueue()
        self.quiescence = QuiesceOffer(no_op_index=self.term_start)
        self._round = 0
        self._tick_round = 0
        self._committed_at_tick = log.committed_index
        # The commit index and the log's end at the last check of the quorum; and for how many such checks in
        # a row entries have waited and reached no majority.
        self._committed_at_check = self._last_at_check = log.committed_index
        self._unreached = 0
        # The no-op announces this leader, so the first heartbeat can wait for a whole interval.
        self._heartbeat_deadline_ms = now_ms + settings.heartbeat_ms
        self._quorum_deadline_ms = now_ms + settings.election_timeout_ms
        self.transfer_target = 0
        self._transfer_deadline_ms = 0
        self._adopt_configuration()

    # Time

    def deadline_ms(self) -> int | None:
        """Return the next instant at which `expire` has something to do; None while the group is quiesced."""
        if self.quiescence.quiesced:
            return None
        deadline_ms = min(self._heartbeat_deadline_ms, self._quorum_deadline_ms)
        return min(deadline_ms, self._transfer_deadline_ms) if self.transfer_target else deadline_ms

    def expire(self, *, now_ms: int) -> bool:
        """Do what is due; return False if we must step down.

        We must if no majority was heard for an election timeout (check-quorum), or if `is_unreached`, that
        is, if we hear a majority, but it receives none of our appends.
        """
        if now_ms >= self._quorum_deadline_ms:
            self._quorum_deadline_ms = now_ms + self._settings.election_timeout_ms
            if not self._quorum_is_active() or self.is_unreached:
                return False
        if self.transfer_target and now_ms >= self._transfer_deadline_ms:
            self.transfer_target = 0
        if now_ms >= self._heartbeat_deadline_ms:
            # At multiples of the interval: so the heartbeats of all groups that this process leads are due
            # together, and those to one peer share a frame.
            interval_ms = self._settings.heartbeat_ms
            self._heartbeat_deadline_ms = now_ms - now_ms % interval_ms + interval_ms
            self._tick_round = self._begin_round()
            self._committed_at_tick = self._log.committed_index
            self.quiescence.last_at_tick = self._log.last_index
            if self.transfer_target:
                # The message by which the target campaigns may have been lost.
                self._hand_over()
        return True

    @property
    def is_unreached(self) -> bool:
        """Whether for `UNREACHED_CHECKS` election timeouts entries waited and none has reached a majority."""
        return self._unreached >= UNREACHED_CHECKS

    @property
    def is_complete(self) -> bool:
        """Whether our own recovery may end: an entry of our term is committed, and durable on our disk."""
        return self.term_start <= min(self._log.committed_index, self._log.durable_index)

    def postpone(self, *, by_ms: int) -> None:
        """Allow the others `by_ms` more to be heard: their messages may lie unread in our sockets."""
        self._quorum_deadline_ms += by_ms

    # Quiescence (docs/consensus.md#quiescence)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was appended since the last heartbeat, and the group has nothing else to do."""
        log = self._log
        last = log.last_index
        return (
            last == self.quiescence.last_at_tick == log.committed_index == self.own.match_index
            and not self.held
            and not self.transfer_target
            and not self.reads.waiting
            and not self.reads.in_flight
        )

    def offer_quiesce(self, absent: Collection[int]) -> None:
        """Let the next heartbeat ask all members but `absent` to quiesce, if the group can.

        The group can if it is idle, if the replicas asked form a majority together with us, and if each of
        them holds our whole log and was sent our commit index.
        """
        asked = {p.replica_id for p in self._others if p.replica_id not in absent}
        voters = sum(p is self.own or p.replica_id in asked for p in self._voters)
        if self.is_idle and voters >= majority(len(self._voters)) and self._hold_all(asked):
            self.quiescence.offer(asked)
            if self.quiescence.quiesced:
                self._forget_absent()

    def quiesce_without(self, gone: Collection[int]) -> bool:
        """Stay quiesced without the members in `gone`, and probe these later.

        Return False, and change nothing, if the members left are no majority.
        """
        left = self.quiescence.asked.difference(gone)
        if sum(p is self.own or p.replica_id in left for p in self._voters) < majority(len(self._voters)):
            return False
        self.quiescence.asked = left
        for replica_id in gone:
            self.unreachable(replica_id)
        self._forget_absent()
        return True

    def _forget_absent(self) -> None:
        """Mark replicas that were not asked to quiesce as silent: no heartbeat asks whether they live."""
        for progress in self._others:
            if progress.replica_id not in self.quiescence.asked:
                progress.silent = True

    def _hold_all(self, asked: Collection[int]) -> bool:
        log = self._log
        return all(
            p.flow is Flow.REPLICATE
            and p.match_index == log.last_index
            and p.sent_commit == log.committed_index
            for p in self._others
            if p.replica_id in asked
        )

    def _count_agreement(self, progress: Progress, message: HeartbeatAnswer) -> None:
        """Note a replica's answer to the offer to quiesce; the group is quiesced when the last one agrees."""
        quiescence = self.quiescence
        if not message.round:
            quiescence.withdraw()  # The follower woke while answers of others were still under way.
        elif not quiescence.is_answer(message.round, progress.replica_id):
            return
        elif not message.quiesce:
            # The follower lacks something, though we took it to hold all, as after its restart: find out
            # where its log ends.
            quiescence.withdraw()
            if progress.flow is Flow.REPLICATE and progress.match_index == self._log.last_index:
                self._sender.probe(progress, progress.match_index)
        elif quiescence.agreed(progress.replica_id) and self.is_idle and self._hold_all(quiescence.asked):
            quiescence.quiesced = True
            self._forget_absent()

    def unquiesce(self, *, now_ms: int, soon: bool) -> None:
        """Send heartbeats again: with `soon` at once, else when the next one would be due."""
        self.quiescence.end()
        self._unreached = 0
        interval_ms = self._settings.heartbeat_ms
        self._heartbeat_deadline_ms = now_ms if soon else now_ms - now_ms % interval_ms + interval_ms
        self._quorum_deadline_ms = now_ms + self._settings.election_timeout_ms
        for progress in self._others:
            progress.active = False  # Heard of long ago is not heard of now.

    def _check_receivers(self) -> None:
        """Count the checks in a row at which entries waited, none was committed, and none reached a majority.

        This finds failures of the network alone. A follower whose disk is slow counts as reached: its
        heartbeat answers report what it holds in memory. So does one with damaged entries: it answers
        appends.
        """
        log = self._log
        waits = self._last_at_check > log.committed_index == self._committed_at_check
        received = sum(
            p is self.own or p.received or p.needs_catch_up or p.received_index >= self._last_at_check
            for p in self._voters
        )
        self._unreached = self._unreached + 1 if waits and received < majority(len(self._voters)) else 0
        self._committed_at_check, self._last_at_check = log.committed_index, log.last_index
        for progress in self._others:
            progress.received = False

    def _quorum_is_active(self) -> bool:
        self._check_receivers()
        active = 0
        for progress in self._voters:
            active += progress.active or progress is self.own
        for progress in self._others:
            if not progress.active and progress.flow is Flow.REPLICATE:
                # This follower was silent for an election timeout: stop filling its window, and probe it
                # when it answers a heartbeat.
                progress.probe(progress.match_index + 1)
                progress.probe_sent = True
            progress.silent = not progress.active
            progress.active = False
        return active >= majority(len(self._voters))

    # Log

    def propose(self, entries: Sequence[Entry]) -> None:
        """Append `entries`, which have this term, to our own log; `flush` sends them."""
        assert entries[0].term == self.term == entries[-1].term, (
            f"proposal of terms {entries[0].term}..{entries[-1].term} in term {self.term}"
        )
        self._log.append(entries)

    def propose_configuration(self, entry: Entry) -> None:
        """Append an entry that changes the configuration by one step.

        Raises:
            ConfigurationRefused: when the step is not allowed, or not now.
        """
        log = self._log
        current = log.configurations.current
        new = entry.configuration
        assert new is not None, f"entry {entry.index} carries no configuration"
        if log.committed_index < self.term_start:
            # Without this, two leaders could each change the same old configuration and get disjoint
            # majorities (Ongaro, raft-dev 2015-07-10; pitfall 6).
            raise ConfigurationRefused("no_commit_in_term", f"term {self.term} has committed nothing yet")
        if log.configurations.index > log.committed_index:
            raise ConfigurationRefused(
                "change_pending", f"the change at {log.configurations.index} is not committed yet"
            )
        check_step(current, new)
        for replica_id in new.voters:
            if replica_id in current.learners and not self.caught_up(replica_id):
                match_index = self.progress[replica_id].match_index
                raise ConfigurationRefused(
                    "not_caught_up",
                    f"replica {replica_id} is probed, or holds {match_index} of {self._wanted_index}",
                )
        if set(new.voters) != set(current.voters) and not self.majority_active(new.voters):
            # A configuration is in force once it is appended. Without a majority of its voters it could be
            # neither committed nor followed by another one.
            raise ConfigurationRefused("no_majority", f"of {new.voters} no majority is heard")
        self.propose([entry])
        for replica_id in new.voters:
            if replica_id in current.learners:
                self.progress[replica_id].counts_from = entry.index
        self._adopt_configuration()

    @property
    def _wanted_index(self) -> int:
        """The index up to which a replica must hold the log to be promoted."""
        # A new leader has had no heartbeat tick yet, or its commit index was low at that tick; then the no-op
        # is the least.
        return max(self._committed_at_tick, self.term_start)

    def caught_up(self, replica_id: int) -> bool:
        """Return whether this member holds all that was committed at the last heartbeat.

        False for a member that is probed: it may have been restarted, and hold nothing any more.
        """
        progress = self.progress.get(replica_id)
        if progress is None or progress.match_index < self._wanted_index:
            return False
        return progress is self.own or progress.flow is Flow.REPLICATE

    def is_active(self, replica_id: int) -> bool:
        """Return whether this member sent something in the last two election timeouts; True for our own.

        While we are quiesced it says whether the member agreed to that, and its process is up.
        """
        progress = self.progress.get(replica_id)
        return progress is not None and (progress is self.own or not progress.silent)

    def majority_active(self, voters: Collection[int]) -> bool:
        """Return whether a majority of these replicas sent something in the last two election timeouts."""
        return sum(map(self.is_active, voters)) >= majority(len(voters))

    def persisted(self, term: int) -> None:
        """Count our log up to `durable_index` (an entry of `term`) in majorities, and commit what can be."""
        if term == self.term:
            # The term and our vote in it were recorded before its first entry, so they are durable too.
            self.held = False
        durable = self._log.durable_index
        if durable > self.own.match_index:
            self.own.match_index = durable
            self._advance_commit()

    def _advance_commit(self) -> None:
        index = agreed_value([progress.counted_index for progress in self._voters])
        log = self._log
        # Only entries of our own term are committed by counting; older ones with them (section 5.4.2).
        if index > log.committed_index and index >= self.term_start:
            log.commit(index)
            if (
                log.configurations.index <= index
                and self.own.replica_id not in log.configurations.current.voters
            ):
                self.finished = True

    def _adopt_configuration(self) -> None:
        configuration = self._log.configurations.current
        own_id = self.own.replica_id
        old = self.progress
        self.progress = {
            replica_id: self.own
            if replica_id == own_id
            else old.get(replica_id) or self._new_progress(replica_id)
            for replica_id in configuration.members()
        }
        self._others = [progress for progress in self.progress.values() if progress is not self.own]
        self._voters = [self.progress[replica_id] for replica_id in configuration.voters]
        if self.transfer_target not in configuration.voters:
            self.transfer_target = 0

    def _new_progress(self, replica_id: int) -> Progress:
        return Progress(
            replica_id,
            next_index=self._log.last_index + 1,
            incarnation=self._incarnation_of.get(replica_id, 0),
            goal=max(self._log.committed_index, self.term_start),
        )

    # Answers

    def reincarnated(self, replica_id: int) -> None:
        """Forget what a replica acknowledged, because it came back as a new incarnation."""
        progress = self.progress.get(replica_id)
        if progress is not None and progress is not self.own:
            progress.reset(
                incarnation=self._incarnation_of[replica_id],
                goal=max(self._log.committed_index, self.term_start),
                next_index=self._log.last_index + 1,
            )

    def append_answer(self, message: AppendAnswer) -> bool:
        """Process a follower's answer to an append: how far it holds our log, or where the logs differ.

        Return False if a follower of this term can't have given that answer.
        """
        progress = self.progress.get(message.sender)
        if progress is None:
            return True
        match_index = message.match_index
        if match_index > self._log.last_index:
            return False
        progress.active = True
        progress.silent = False
        progress.received = True
        if message.hint_term and not message.rejected:
            held = self._log.term(message.hint_index)
            if held is not None and held != message.hint_term:
                return False
        if message.rejected:
            self._rejected(progress, message)
            return True
        is_new = progress.matched(match_index)
        if match_index == progress.match_index and (
            progress.flow is Flow.PROBE
            or (progress.flow is Flow.CATCH_UP and match_index >= self._resume_index(progress))
        ):
            progress.replicate()
        if is_new:
            if match_index > self._log.committed_index:
                self._advance_commit()
            if progress.replica_id == self.transfer_target:
                self._hand_over()
        return True

    def _rejected(self, progress: Progress, message: AppendAnswer) -> None:
        prev_index = message.prev_index
        if prev_index <= progress.match_index:
            return  # An old refusal, overtaken by an acknowledgement.
        if progress.flow is not Flow.REPLICATE and prev_index != progress.next_index - 1:
            return  # The refusal of an earlier probe.
        hint_index = message.hint_index
        if message.hint_term:
            # Section 5.3: skip all our entries of terms later than the follower's conflicting one.
            hint_index = self._log.last_at_or_below_term(hint_index, message.hint_term)
        progress.probe(max(min(prev_index, hint_index + 1), progress.match_index + 1))

    def heartbeat_answer(self, message: HeartbeatAnswer) -> bool:
        """Note that the follower knew no later term in that round, and whether it agrees to quiesce.

        Return False if we have begun no round of that number.
        """
        progress = self.progress.get(message.sender)
        if progress is None:
            return True
        if message.round > self._round:
            return False
        progress.active = True
        progress.silent = False
        if message.match_index > progress.received_index:
            progress.received_index = message.match_index
            progress.received = True
        self._count_agreement(progress, message)
        if message.round > progress.acked_round:
            progress.acked_round = message.round
            if message.round == self._tick_round:
                self._resend_probe(progress, message.match_index)
        self._confirm_reads()
        return True

    def _resend_probe(self, progress: Progress, known_index: int) -> None:
        """Probe a replica, at most once per heartbeat, if messages to it or from it seem lost.

        `known_index` is the index up to which the replica knows its log to match ours, by its heartbeat
        answer.
        """
        if progress.flow is Flow.PROBE:
            progress.probe_sent = False
        elif progress.flow is Flow.CATCH_UP:
            # Perhaps it has copied the log up to there by now. The probe carries no entries: until the
            # answer comes, none may be sent.
            self._sender.probe(progress, self._resume_index(progress))
        elif progress.next_index - 1 > progress.match_index:
            if progress.match_index == progress.match_at_tick:
                # Nothing was acknowledged since the last heartbeat. An empty append after all that was sent
                # is accepted if that came (then only the answer was lost) and rejected with a hint if it did
                # not.
                self._sender.probe(progress, progress.next_index - 1)
            progress.match_at_tick = progress.match_index
        elif known_index < progress.match_index:
            # It was restarted and has forgotten up to where it matches, so it can't learn what is committed.
            self._sender.probe(progress, progress.match_index)

    def _resume_index(self, progress: Progress) -> int:
        """Return the index up to which a replica in catch-up must hold the log before appends can go on."""
        return max(self._log.first_index - 1, progress.resume_index)

    def catch_up(self, replica_id: int, resume_index: int) -> None:
        """Pause entries to this replica until it holds the log up to `resume_index`, which is committed.

        The caller lets it copy the log up to there, and calls `resume` if that fails.
        """
        progress = self.progress.get(replica_id)
        assert resume_index <= self._log.committed_index, f"{resume_index} is not committed"
        if progress is not None and progress is not self.own and progress.match_index < resume_index:
            progress.catch_up(resume_index)

    def resume(self, replica_id: int) -> None:
        """Probe this replica and send it entries again, because its catch-up failed."""
        progress = self.progress.get(replica_id)
        if progress is not None and progress.flow is Flow.CATCH_UP:
            progress.probe(progress.match_index + 1)

    def unreachable(self, replica_id: int) -> None:
        """Probe this replica, because the messages that were under way to it are probably lost."""
        progress = self.progress.get(replica_id)
        if progress is not None and progress.flow is Flow.REPLICATE and progress is not self.own:
            progress.probe(progress.match_index + 1)
            progress.probe_sent = True

    # Reads

    def _begin_round(self) -> int:
        """Begin a confirmation round for all reads that wait, and return its number (thesis 6.4)."""
        self._round = self.own.acked_round = round_ = self._round + 1
        # Before our term has committed anything we don't know the commit index (thesis 6.4; pitfall 14).
        if self._log.committed_index >= self.term_start:
            self.reads.begin(round_, committed_index=self._log.committed_index)
        asked = self.quiescence.begin(round_)
        if not self.held:
            for progress in self._others:
                self._sender.heartbeat(progress, round_, quiesce=progress.replica_id in asked)
        self._confirm_reads()
        return round_

    def _confirm_reads(self) -> None:
        if self.reads.in_flight:
            confirmed = agreed_value([progress.acked_round for progress in self._voters])
            self._effects.reads.extend(self.reads.confirmed(confirmed))

    # Hand-over

    def transfer(self, replica_id: int, *, now_ms: int) -> bool:
        """Stop taking proposals, and let `replica_id` lead once it holds our whole log.

        If it does not lead within an election timeout, proposals are taken again. Return False, and do
        nothing, if it is not another voter.
        """
        if replica_id == self.own.replica_id or replica_id not in self._log.configurations.current.voters:
            return False
        self.transfer_target = replica_id
        self._transfer_deadline_ms = now_ms + self._settings.election_timeout_ms
        self._hand_over()
        return True

    def transfer_refused(self, replica_id: int) -> None:
        """End the hand-over and go on leading, because the replica that should lead will not campaign."""
        if replica_id == self.transfer_target:
            self.transfer_target = 0

    def _hand_over(self) -> None:
        if self.progress[self.transfer_target].match_index == self._log.last_index:
            self._effects.messages.append(TimeoutNow(*self._sender.head_to(self.transfer_target)))

    def transfer_on_removal(self) -> None:
        """Let the voter with the longest log campaign at once, because our own removal is committed."""
        best = max(self._voters, key=lambda progress: progress.match_index)
        self._effects.messages.append(TimeoutNow(*self._sender.head_to(best.replica_id)))

    # Sending

    def flush(self) -> None:
        """Send each replica the entries that it lacks and may be sent now, and a new commit index."""
        if self.reads.waiting and not self.reads.in_flight and self._log.committed_index >= self.term_start:
            self._begin_round()
        if self.held:
            return
        log = self._log
        last, committed = log.last_index, log.committed_index
        window_bytes = self._settings.max_inflight_bytes
        window_appends = self._settings.max_inflight_appends
        for progress in self._others:
            flow = progress.flow
            if flow is Flow.REPLICATE:
                while (
                    progress.flow is Flow.REPLICATE
                    and progress.next_index <= last
                    and progress.inflight_bytes < window_bytes
                    and len(progress.inflight) < window_appends
                ):
                    self._sender.entries(progress, last)
            elif flow is Flow.PROBE and not progress.probe_sent:
                self._sender.entries(progress, last)
            if progress.sent_commit < committed and progress.active:
                # Nothing else is sent to this follower now, and its readers wait for this commit.
                self._sender.heartbeat(progress, 0)
