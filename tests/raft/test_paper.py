"""The Raft paper (Ongaro and Ousterhout, extended version), rule by rule; each test cites its section."""

from __future__ import annotations

import pytest

from raft import AnyMessage, Core, Entry, HardState, NotLeader, Ready, Role
from raft.messages import (
    Append,
    AppendAnswer,
    Heartbeat,
    PreVote,
    PreVoteAnswer,
    TimeoutNow,
    Vote,
    VoteAnswer,
)
from tests.raft.harness import Network, Replica, entries_of, head, sent


def core_of(role: Role, network: Network) -> Core:
    """Replica 1 of three, brought into `role`."""
    replica = network[1]
    if role is Role.LEADER:
        network.elect(1)
    elif role is not Role.FOLLOWER:
        replica.core.campaign(now_ms=0)
        replica.perform()
        if role is Role.CANDIDATE:
            replica.receive((PreVoteAnswer(*head(2, 1, 1), granted=True), ()), now_ms=0)
    assert replica.core.role is role
    return replica.core


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("kind", [Append, Heartbeat, AppendAnswer, VoteAnswer])
def test_a_later_term_makes_anyone_a_follower(role: Role, kind: type[AnyMessage]) -> None:
    """Section 5.1: whoever sees a later term takes it over and follows."""
    core = core_of(role, Network())
    message: AnyMessage
    if kind is Append:
        message = Append(*head(2, 1, 9), 0, 0, 0, 0)
    elif kind is Heartbeat:
        message = Heartbeat(*head(2, 1, 9), 0, 1)
    elif kind is AppendAnswer:
        message = AppendAnswer(*head(2, 1, 9), 0)
    else:
        message = VoteAnswer(*head(2, 1, 9), granted=False)

    core.receive(message, now_ms=0)

    assert (core.role, core.term) == (Role.FOLLOWER, 9)
    assert core.take_ready().hard_state == HardState(9, 0)


def test_an_earlier_term_is_answered_with_ours() -> None:
    """Section 5.1: a request of an earlier term is refused, and the refusal carries the later term."""
    replica = Network(hard_states={1: HardState(5, 0)})[1]

    for request in (
        Append(*head(2, 1, 4), 0, 0, 0, 0),
        Heartbeat(*head(2, 1, 4), 0, 1),
        Vote(*head(2, 1, 4), 9, 4),
        PreVote(*head(2, 1, 4), 9, 4),
    ):
        ready = replica.receive((request, ()), now_ms=0)
        (answer,) = [*ready.messages, *ready.messages_after_sync]
        assert (answer.term, answer.receiver) == (5, 2)
        assert replica.core.last_index == 0


def test_a_replica_starts_as_a_follower_and_stands_after_silence() -> None:
    """Section 5.2: servers begin as followers; without heartbeats for an election timeout they stand."""
    replica = Network()[1]
    deadline_ms = replica.core.deadline_ms()
    assert deadline_ms is not None and 1500 <= deadline_ms < 3000

    roles = []
    for now_ms in (deadline_ms - 1, deadline_ms):
        replica.core.expire(now_ms=now_ms)
        roles.append(replica.core.role)
    assert roles == [Role.FOLLOWER, Role.PRE_CANDIDATE]


def test_heartbeats_keep_followers_quiet() -> None:
    """Section 5.2: as long as a leader is heard, nobody stands, for ever so long."""
    network = Network()
    network.elect(2)
    network.pass_time(60_000)

    assert network.leaders() == [2]
    assert network[1].core.term == 1


@pytest.mark.parametrize(
    ("size", "granting", "role"),
    [
        (1, 0, Role.LEADER),
        (3, 0, Role.CANDIDATE),
        (3, 1, Role.LEADER),
        (5, 1, Role.CANDIDATE),
        (5, 2, Role.LEADER),
    ],
)
def test_a_candidate_leads_with_a_majority(size: int, granting: int, role: Role) -> None:
    """Section 5.2: votes of a majority of the full cluster, its own among them, make a leader."""
    replica = Network(size)[1]
    replica.core.campaign(now_ms=0)
    replica.perform()
    for voter in range(2, size + 1):
        replica.receive((PreVoteAnswer(*head(voter, 1, 1), granted=True), ()), now_ms=0)
    for voter in range(2, granting + 2):
        replica.receive((VoteAnswer(*head(voter, 1, 1), granted=True), ()), now_ms=0)

    assert replica.core.role is role


def test_one_vote_per_term_first_come_first_served() -> None:
    """Section 5.2: a server votes for one candidate in a term; asked again by it, it says so again."""
    replica = Network()[1]

    answers = []
    for candidate in (2, 3, 2):
        ready = replica.receive((Vote(*head(candidate, 1, 1), 0, 0), ()), now_ms=0)
        answers += [(m.receiver, m.granted) for m in ready.messages_after_sync if isinstance(m, VoteAnswer)]

    assert answers == [(2, True), (3, False), (2, True)]


def test_a_candidate_follows_a_leader_of_its_term() -> None:
    """Section 5.2: an append from a leader of the same term ends a candidacy."""
    core = core_of(Role.CANDIDATE, Network())

    core.receive(Append(*head(3, 1, 1), 0, 0, 0, 0), now_ms=0)

    assert (core.role, core.leader_id, core.term) == (Role.FOLLOWER, 3, 1)


def test_a_split_vote_ends_by_itself() -> None:
    """Section 5.2: timeouts are drawn, so after split votes somebody wins soon."""
    rounds = []
    for seed in range(30):
        network = Network(4, seed=seed)
        for replica in network.replicas.values():
            replica.core.campaign(now_ms=0)
            replica.perform()
        network.settle()
        network.pass_time(12_000)
        assert len(network.leaders()) == 1
        rounds.append(network.leader().core.term)

    assert max(rounds) <= 6


def test_a_leader_appends_first_and_commits_on_a_majority() -> None:
    """Section 5.3: an entry is committed once it is on a majority; then the followers are told."""
    network = Network()
    leader = network.elect(1)
    ready = leader.propose(b"a", now_ms=0)
    assert [e.data for e in ready.entries] == [b"a"]
    assert len(sent(ready, Append)) == 2
    assert leader.core.committed_index == 1

    network.settle()

    assert [r.core.committed_index for r in network.replicas.values()] == [2, 2, 2]


def test_an_entry_without_a_majority_stays_uncommitted() -> None:
    """Section 5.3: one copy of three commits nothing, nor do two of five."""
    for size, reached in ((3, []), (5, [2])):
        network = Network(size)
        leader = network.elect(1)
        for follower in range(2, size + 1):
            if follower not in reached:
                network.isolate(follower)
        leader.propose(b"a", now_ms=0)
        network.settle()

        assert leader.core.committed_index == 1


def test_the_consistency_check_refuses_what_does_not_follow() -> None:
    """Section 5.3: no append is accepted unless (prev_index, prev_term) is in the follower's log."""
    replica = Network(logs={1: entries_of(1, 2)}, hard_states={1: HardState(2)})[1]
    entry = Entry(3, 3, b"new", 1)

    for prev_index, prev_term, accepted in ((3, 3, False), (2, 1, False), (2, 2, True)):
        message = Append(*head(2, 1, 3), prev_index, prev_term, 0, 1)
        entries = (Entry(prev_index + 1, 3, entry.data, 1),)
        ready = replica.receive((message, entries), now_ms=0)
        (answer,) = ready.messages_after_sync
        assert isinstance(answer, AppendAnswer)
        assert answer.rejected is not accepted
        assert len(ready.entries) == accepted


FIGURE_7 = {
    "leader": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6),
    "a": (1, 1, 1, 4, 4, 5, 5, 6, 6),
    "b": (1, 1, 1, 4),
    "c": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6),
    "d": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7),
    "e": (1, 1, 1, 4, 4, 4, 4),
    "f": (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
}


@pytest.mark.parametrize("follower", "abcdef")
def test_figure_7_the_leader_makes_every_log_like_its_own(follower: str) -> None:
    """Section 5.3, figure 7: missing entries are filled in, foreign ones replaced, with few refusals."""
    network = Network(
        logs={1: entries_of(*FIGURE_7["leader"]), 2: entries_of(*FIGURE_7[follower])},
        hard_states={1: HardState(7), 2: HardState(7), 3: HardState(7)},
    )
    leader = network.elect(1)
    assert leader.core.term == 8
    network.settle()

    assert network[2].terms == network[3].terms == [*FIGURE_7["leader"], 8]
    refused = [
        message
        for ready in network[2].readies
        for message in sent(ready, AppendAnswer)
        if isinstance(message, AppendAnswer) and message.rejected
    ]
    assert len(refused) <= 2


@pytest.mark.parametrize(
    ("voter", "candidate", "granted"),
    [
        ((1,), (1, 1), True),
        ((1, 1), (1, 1), True),
        ((1, 1), (1,), False),
        ((1, 1, 1), (1, 2), True),
        ((1, 2), (1, 1, 1), False),
        ((), (), True),
    ],
)
def test_votes_go_only_to_logs_as_up_to_date(
    voter: tuple[int, ...], candidate: tuple[int, ...], granted: bool
) -> None:
    """Section 5.4.1: the later last term wins, then the longer log; for votes and pre-votes alike."""
    last_term = candidate[-1] if candidate else 0
    for kind, answer_kind in ((PreVote, PreVoteAnswer), (Vote, VoteAnswer)):
        replica = Network(logs={1: entries_of(*voter)}, hard_states={1: HardState(2)})[1]
        ready = replica.receive((kind(*head(2, 1, 3), len(candidate), last_term), ()), now_ms=0)
        (answer,) = [*ready.messages, *ready.messages_after_sync]
        assert isinstance(answer, answer_kind)
        assert answer.granted is granted


def test_figure_8_an_old_entry_on_a_majority_is_not_committed() -> None:
    """Section 5.4.2, figure 8: only an entry of the leader's own term is committed by counting."""
    logs = {1: entries_of(1, 2), 2: entries_of(1, 2), 3: entries_of(1)}
    network = Network(logs=logs, hard_states=dict.fromkeys((1, 2, 3), HardState(3)))
    leader = network[1]
    network.drop = lambda message: isinstance(message, Append)
    network.elect(1)
    # Both followers hold the old entry; the no-op of term 4 is nowhere but here.
    for follower in (2, 3):
        leader.receive((AppendAnswer(*head(follower, 1, 4), 2), ()), now_ms=0)
    assert leader.core.committed_index == 0

    leader.receive((AppendAnswer(*head(2, 1, 4), 3), ()), now_ms=0)
    assert leader.core.committed_index == 3


def test_a_leader_begins_its_term_with_a_no_op() -> None:
    """Section 8: so that it finds out what is committed."""
    network = Network(logs={1: entries_of(1, 1)}, hard_states={1: HardState(1)})
    leader = network.elect(1)

    assert leader.terms == [1, 1, 2]
    assert leader.core.committed_index == 3


def test_only_the_leader_takes_proposals() -> None:
    """Section 8: others say who leads, if they know."""
    network = Network()
    network.elect(3)

    with pytest.raises(NotLeader) as refusal:
        network[1].core.place()
    assert refusal.value.leader_id == 3


def test_leader_completeness_committed_entries_outlive_any_minority() -> None:
    """Section 5.4.3: after the leader and a minority are gone, the next leader has all of it."""
    network = Network(5)
    leader = network.elect(1)
    network.isolate(5)
    leader.propose(b"a", b"b", now_ms=0)
    network.settle()
    assert leader.core.committed_index == 3
    network.heal()
    leader.crash()
    network[2].crash()

    network.pass_time(10_000)

    assert network.leader().replica_id in (3, 4)
    assert network[5].data == [b"a", b"b"]


def test_replicas_are_repaired_after_the_worst() -> None:
    """Section 5.3: whatever the logs were, after an election and an entry they are the same."""
    network = Network(
        5,
        logs={i: entries_of(*FIGURE_7[name]) for i, name in enumerate("abcef", 1)},
        hard_states={i: HardState(7) for i in range(1, 6)},
    )
    network.pass_time(10_000)

    logs: list[Replica] = list(network.replicas.values())
    assert all(replica.log.entries == logs[0].log.entries for replica in logs)
    assert all(replica.core.committed_index == logs[0].core.last_index for replica in logs)


def answers_of(ready: Ready) -> list[AnyMessage]:
    return [*ready.messages, *ready.messages_after_sync]


def test_figure_2_state_a_leader_starts_behind_its_log_and_with_nothing_matched() -> None:
    """Figure 2, volatile state on leaders: next_index is the last log index + 1, match_index 0."""
    network = Network(logs={1: entries_of(1, 1, 2)}, hard_states={1: HardState(2)})
    network.drop = lambda message: isinstance(message, Append)
    leader = network.elect(1)

    others = [leader.core.progress[member] for member in (2, 3)]
    assert [(progress.next_index, progress.match_index) for progress in others] == [(4, 0), (4, 0)]
    assert leader.core.committed_index == 0


def test_figure_2_state_term_vote_and_log_are_on_disk_and_nothing_else_is_needed() -> None:
    """Figure 2, persistent state: what a restart brings back; the commit index is found again."""
    network = Network()
    network.elect(1).propose(b"a", now_ms=0)
    network.settle()
    before = network[2].core
    after = network.restart(2).core

    assert (after.term, after.vote, after.last_index) == (before.term, before.vote, before.last_index)
    assert (before.committed_index, after.committed_index) == (2, 0)
    assert (after.role, after.leader_id) == (Role.FOLLOWER, 0)
    network.pass_time(300)
    assert after.committed_index == 2


@pytest.mark.parametrize(
    ("held", "prev", "sent_terms", "cut", "held_then"),
    [
        ((1, 1), 2, (2, 2), None, [1, 1, 2, 2]),
        ((1, 1), 1, (1, 2), None, [1, 1, 2]),
        ((1, 1, 1), 1, (2,), 2, [1, 2]),
        ((1, 1, 1), 0, (1, 2), 2, [1, 2]),
        ((1, 1, 1), 0, (1, 1), None, [1, 1, 1]),
        ((), 0, (1, 2), None, [1, 2]),
    ],
)
def test_figure_2_appends_delete_what_conflicts_and_add_what_is_new(
    held: tuple[int, ...], prev: int, sent_terms: tuple[int, ...], cut: int | None, held_then: list[int]
) -> None:
    """Figure 2, AppendEntries 3 and 4: an entry of another term goes with all behind it, and no other."""
    replica = Network(logs={1: entries_of(*held)}, hard_states={1: HardState(2)})[1]
    entries = tuple(Entry(prev + n, term, b"%d" % term, 1) for n, term in enumerate(sent_terms, 1))
    prev_term = held[prev - 1] if prev else 0

    ready = replica.receive((Append(*head(2, 1, 2), prev, prev_term, 0, len(entries)), entries), now_ms=0)

    assert (ready.truncate_from, replica.terms) == (cut, held_then)
    (answer,) = ready.messages_after_sync
    assert isinstance(answer, AppendAnswer) and answer.match_index == prev + len(entries)


@pytest.mark.parametrize(("leader_commit", "committed"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_figure_2_a_follower_commits_the_lower_of_the_leaders_and_the_last_new_entry(
    leader_commit: int, committed: int
) -> None:
    """Figure 2, AppendEntries 5: min(leaderCommit, index of last new entry), also with a longer log here."""
    replica = Network(logs={1: entries_of(1, 1, 1)}, hard_states={1: HardState(1)})[1]

    replica.receive((Append(*head(2, 1, 1), 0, 0, leader_commit, 2), tuple(entries_of(1, 1))), now_ms=0)

    assert replica.core.committed_index == committed


def test_figure_2_the_commit_index_never_goes_back() -> None:
    """Figure 2, commitIndex increases monotonically: an old message tells nothing new."""
    replica = Network()[1]
    replica.receive((Append(*head(2, 1, 1), 0, 0, 2, 2), tuple(entries_of(1, 1))), now_ms=0)
    assert replica.core.committed_index == 2

    for late in (0, 1):
        replica.receive((Append(*head(2, 1, 1), 0, 0, late, 0), ()), now_ms=0)
        replica.receive((Heartbeat(*head(2, 1, 1), late, 1), ()), now_ms=0)
        assert replica.core.committed_index == 2


def test_figure_2_a_candidate_raises_its_term_votes_for_itself_and_asks_all() -> None:
    """Figure 2, candidates: on conversion to candidate (after the pre-votes of thesis 9.6)."""
    replica = Network(5, logs={1: entries_of(1, 3)}, hard_states={1: HardState(3)})[1]
    replica.core.campaign(now_ms=0)
    replica.perform()
    deadline_ms = replica.core.deadline_ms()
    replica.receive((PreVoteAnswer(*head(2, 1, 4), granted=True), ()), now_ms=1)
    ready = replica.receive((PreVoteAnswer(*head(3, 1, 4), granted=True), ()), now_ms=1)

    assert ready.hard_state == HardState(4, 1)
    assert sent(ready, Vote) == [Vote(*head(1, voter, 4), 2, 3) for voter in (2, 3, 4, 5)]
    assert replica.core.deadline_ms() != deadline_ms


def test_figure_2_a_candidacy_that_comes_to_nothing_begins_again() -> None:
    """Figure 2, candidates: if the election timeout elapses, start a new election."""
    replica = Network()[1]
    replica.core.campaign(now_ms=0)
    replica.perform()
    replica.receive((PreVoteAnswer(*head(2, 1, 1), granted=True), ()), now_ms=0)
    assert (replica.core.role, replica.core.term) == (Role.CANDIDATE, 1)
    deadline_ms = replica.core.deadline_ms()
    assert deadline_ms is not None

    replica.core.expire(now_ms=deadline_ms)
    ready = replica.perform()
    assert [m.term for m in sent(ready, PreVote)] == [2, 2]
    assert replica.core.term == 1, "no term is raised before somebody would vote"


def test_a_candidate_is_not_stopped_by_a_leader_of_an_earlier_term() -> None:
    """Section 5.2: the append is refused, and it remains a candidate."""
    core = core_of(Role.CANDIDATE, Network())

    core.receive(Append(*head(3, 1, 0), 0, 0, 0, 0), now_ms=0)

    assert (core.role, core.term) == (Role.CANDIDATE, 1)
    (answer,) = answers_of(core.take_ready())
    assert (answer.receiver, answer.term) == (3, 1)


def test_a_leader_sends_heartbeats_when_idle_and_announces_itself_at_once() -> None:
    """Figure 2, leaders: upon election, and repeat during idle periods."""
    network = Network()
    leader = network.elect(1)
    first = next(ready for ready in leader.readies if ready.became and ready.became.role is Role.LEADER)
    assert {m.receiver for m in sent(first, Append)} == {2, 3}

    deadline_ms = leader.core.deadline_ms()
    assert deadline_ms == 200
    leader.core.expire(now_ms=deadline_ms)
    assert [m.receiver for m in sent(leader.perform(), Heartbeat)] == [2, 3]
    assert leader.core.deadline_ms() == 400


def test_a_refusal_is_answered_with_earlier_entries_until_the_logs_meet() -> None:
    """Figure 2, leaders: if it fails because of inconsistency, decrement next_index and retry."""
    network = Network(logs={1: entries_of(1, 1, 1)}, hard_states={1: HardState(1)})
    leader = network.elect(1)

    assert network[2].log.entries == network[3].log.entries == leader.log.entries
    asked = [m.prev_index for r in leader.readies for m in sent(r, Append) if m.receiver == 2]  # type: ignore[union-attr]
    assert asked[:2] == [3, 0]


def test_a_leader_never_cuts_its_own_log() -> None:
    """Section 5.3, Leader Append-Only: what nobody else has stays, and is given to the others."""
    network = Network(logs={1: entries_of(1, 1, 2, 2)}, hard_states=dict.fromkeys((1, 2, 3), HardState(2)))
    leader = network.elect(1)
    network.pass_time(1_000)

    assert all(ready.truncate_from is None for ready in leader.readies)
    assert leader.terms == network[2].terms == [1, 1, 2, 2, 3]


def test_logs_that_agree_in_one_entry_agree_in_all_before_it() -> None:
    """Section 5.3, Log Matching: by induction over the consistency check."""
    network = Network(
        logs={1: entries_of(1, 2, 3), 2: entries_of(1, 1, 1, 1), 3: entries_of(1, 2, 2)},
        hard_states=dict.fromkeys((1, 2, 3), HardState(3)),
    )
    network.elect(1)

    for one in network.replicas.values():
        for other in network.replicas.values():
            pairs = list(zip(one.log.entries, other.log.entries, strict=False))
            same = [place for place, (a, b) in enumerate(pairs) if a.term == b.term]
            assert all(a == b for a, b in pairs[: same[-1] + 1])


def test_a_crashed_follower_is_sent_again_what_it_missed_and_takes_it_once() -> None:
    """Section 5.5: requests are repeated until they are answered; they are idempotent."""
    network = Network()
    leader = network.elect(1)
    network[3].crash()
    leader.propose(b"a", now_ms=0)
    network.settle()
    network[3].start(now_ms=network.now_ms)
    network.pass_time(1_000)
    leader.propose(b"b", now_ms=network.now_ms)
    network.settle()

    assert network[3].data == [b"a", b"b"]


def test_broadcast_time_may_be_a_third_of_the_election_timeout() -> None:
    """Section 5.6: as long as messages are well within the timeout, the leader stays for ever."""
    network = Network()
    leader = network.elect(1)
    for _ in range(60):
        # Half a second passes before anything arrives.
        network.pass_time(500, settle=False)
        network.settle()

    assert (network.leaders(), leader.core.term) == ([1], 1)


def test_a_server_added_without_a_log_does_not_stop_commits() -> None:
    """Section 6, thesis 4.2.1: new servers join as non-voting members until they have caught up."""
    network = Network()
    leader = network.elect(1)
    network[3].crash()
    leader.configure(leader.core.configuration.with_learner(4), now_ms=0)
    network.settle()
    leader.propose(b"a", now_ms=0)
    network.settle()

    assert leader.core.committed_index == 3, "two of three, though of the four only two answer"


def test_a_configuration_is_used_as_soon_as_it_is_in_the_log() -> None:
    """Section 6, thesis 4.1: a server always uses the latest configuration in its log, committed or not."""
    network = Network(4)
    leader = network.elect(1)
    network.isolate(4)
    leader.configure(leader.core.configuration.without(4), now_ms=0)
    network.deliver_one()

    assert leader.core.configuration.voters == network[2].core.configuration.voters == (1, 2, 3)
    assert leader.core.committed_index == network[2].core.committed_index == 1


def test_thesis_3_10_a_hand_over_waits_for_the_whole_log_and_then_skips_the_timeout() -> None:
    """Thesis 3.10: stop proposals, bring the target up, TimeoutNow; it stands without a pre-vote."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    leader.core.transfer_leadership(2, now_ms=0)
    assert not sent(leader.perform(), TimeoutNow)

    ready = leader.receive((AppendAnswer(*head(2, 1, 1), 2), ()), now_ms=0)
    (told,) = sent(ready, TimeoutNow)
    network.settle()
    assert told.receiver == 2
    assert not any(sent(ready, PreVote) for ready in network[2].readies)
    assert (network.leaders(), network[2].core.term) == ([2], 2)


def test_thesis_6_4_a_read_needs_a_commit_of_the_term_and_a_round_of_heartbeats() -> None:
    """Thesis 6.4: the no-op is committed, the commit index is saved, a majority answers a heartbeat."""
    network = Network()
    leader = network.elect(1)
    leader.core.read_index(1, now_ms=0)
    ready = leader.perform()
    assert {m.receiver for m in sent(ready, Heartbeat)} == {2, 3}
    assert leader.reads == {}

    leader.propose(b"later", now_ms=0)
    network.settle()
    assert leader.reads == {1: 1}, "the index as it was saved"


@pytest.mark.parametrize(
    ("heard", "last", "granted"), [(True, 1, False), (False, 1, True), (False, 0, False), (True, 0, False)]
)
def test_thesis_9_6_a_pre_vote_is_granted_for_a_good_log_when_no_leader_is_heard(
    heard: bool, last: int, granted: bool
) -> None:
    """Thesis 9.6, 4.2.3: both conditions, and neither changes the voter."""
    network = Network(logs={1: entries_of(1)}, hard_states={1: HardState(1)})
    replica = network[1]
    if heard:
        replica.receive((Heartbeat(*head(2, 1, 1), 0, 1), ()), now_ms=0)

    ready = replica.receive((PreVote(*head(3, 1, 2), last, last), ()), now_ms=1)

    (answer,) = ready.messages
    assert isinstance(answer, PreVoteAnswer) and answer.granted is granted
    assert (replica.core.term, ready.hard_state) == (1, None)
