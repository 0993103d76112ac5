"""Who may lead: votes, pre-votes and check-quorum.

Numbers are those of docs/pitfalls.md: 1, 10 to 12, 22, 24, 25.
"""

from __future__ import annotations

import pytest

from raft import HardState, Role
from raft.messages import (
    Heartbeat,
    PreVote,
    PreVoteAnswer,
    Vote,
    VoteAnswer,
)
from tests.raft.harness import Network, entries_of, head, sent


def test_pitfall_01_a_vote_leaves_only_behind_its_sync_and_outlives_a_crash() -> None:
    """Term and vote are durable before the answer leaves; a restarted voter does not vote again."""
    network = Network()
    voter = network[1]

    ready = voter.receive((Vote(*head(2, 1, 1), 0, 0), ()), now_ms=0)
    assert ready.hard_state == HardState(1, 2)
    assert sent(ready, VoteAnswer) == list(ready.messages_after_sync)
    assert not network.packets

    # Lost before the sync: nobody heard of that vote, so another may be given.
    network.restart(1)
    ready = voter.receive((Vote(*head(3, 1, 1), 0, 0), ()), now_ms=0)
    voter.sync()
    assert network.packets.pop()[0] == VoteAnswer(*head(1, 3, 1), granted=True)

    # Kept by the sync: the vote stands.
    network.restart(1)
    ready = voter.receive((Vote(*head(2, 1, 1), 0, 0), ()), now_ms=0)
    assert [m.granted for m in ready.messages_after_sync if isinstance(m, VoteAnswer)] == [False]


def test_pitfall_01_a_candidate_asks_only_when_its_own_vote_is_durable() -> None:
    """Its own vote counts as soon as others answer, so the request waits for the sync that covers it."""
    candidate = Network()[1]
    candidate.core.campaign(now_ms=0)
    candidate.perform()

    ready = candidate.receive((PreVoteAnswer(*head(2, 1, 1), granted=True), ()), now_ms=0)

    assert ready.hard_state == HardState(1, 1)
    assert sent(ready, Vote) == list(ready.messages_after_sync)
    assert [m.receiver for m in ready.messages_after_sync] == [2, 3]


def test_pitfall_01_a_vote_in_a_term_already_known_is_recorded_too() -> None:
    """The term was durable before; the vote is not, until the sync that covers it."""
    voter = Network(hard_states={1: HardState(1)})[1]

    ready = voter.receive((Vote(*head(2, 1, 1), 0, 0), ()), now_ms=0)

    assert ready.hard_state == HardState(1, 2)
    assert ready.messages_after_sync == [VoteAnswer(*head(1, 2, 1), granted=True)]


def test_pitfall_10_a_replica_that_was_cut_off_disturbs_nobody() -> None:
    """Pre-vote: it raises no term while it is away; when it returns, the leader leads on."""
    network = Network()
    leader = network.elect(1)
    network.isolate(3)
    network.pass_time(60_000)
    assert network[3].core.term == 1

    network.heal()
    network.pass_time(10_000)
    assert (network.leaders(), leader.core.term) == ([1], 1)


def test_pitfall_10_check_quorum_a_leader_cut_off_steps_down() -> None:
    """A leader that hears no majority for an election timeout leads no more, and its readers are told."""
    network = Network()
    leader = network.elect(1)
    network.isolate(1)
    leader.core.read_index(7, now_ms=0)
    leader.perform()
    network.pass_time(2 * 1500)

    assert leader.core.role is not Role.LEADER
    assert leader.reads_failed == [7]


def test_pitfall_10_votes_are_ignored_while_a_leader_is_heard() -> None:
    """Also a real vote of a later term, from a replica that knows no pre-vote or was removed."""
    network = Network()
    leader = network.elect(1)
    for replica in (leader, network[2]):
        ready = replica.receive((Vote(*head(3, replica.replica_id, 9), 99, 9), ()), now_ms=100)
        assert not ready.messages_after_sync
        assert replica.core.term == 1
        assert replica.core.dropped["leader_is_heard"] == 1


def test_pitfall_11_a_pre_vote_changes_nothing_at_anyone() -> None:
    """Neither term, vote, leader nor timer; a grant can be given to many."""
    replica = Network(hard_states={1: HardState(4, 2)})[1]
    deadline_ms = replica.core.deadline_ms()

    for candidate in (2, 3):
        ready = replica.receive((PreVote(*head(candidate, 1, 5), 0, 0), ()), now_ms=700)
        assert ready.messages == [PreVoteAnswer(*head(1, candidate, 5), granted=True)]
        assert ready.hard_state is None
    assert replica.core.deadline_ms() == deadline_ms


def test_pitfall_11_a_replica_with_a_later_term_comes_back_into_the_group() -> None:
    """It answers the leader with its own term; the leader steps down, and one election heals all."""
    network = Network(hard_states={3: HardState(9, 3)})
    network.isolate(3)
    network.elect(1)
    network.heal()
    network.pass_time(10_000)

    terms = {replica.core.term for replica in network.replicas.values()}
    assert len(network.leaders()) == 1
    assert terms == {network.leader().core.term}
    assert terms.pop() > 9


def test_pitfall_11_a_replica_with_an_earlier_term_can_win_when_its_log_is_good() -> None:
    """Refused with the later term it takes that over, and asks again."""
    network = Network(
        logs={1: entries_of(1)}, hard_states={1: HardState(1), 2: HardState(5), 3: HardState(5)}
    )
    network[1].core.campaign(now_ms=0)
    network[1].perform()
    network.settle()
    assert network[1].core.term == 5

    network.elect(1)
    assert network[1].core.term == 6


@pytest.mark.parametrize("with_candidate", [False, True])
def test_pitfall_12_a_leader_with_one_way_cut_is_replaced(with_candidate: bool) -> None:
    """It sends to all but hears nobody: its heartbeats would keep the others quiet for ever."""
    network = Network(5 if with_candidate else 3)
    leader = network.elect(1)
    for other in network.replicas:
        network.cut.add((other, 1))
    network.pass_time(12_000)

    assert leader.core.role is not Role.LEADER
    assert network.leader().replica_id != 1
    network.leader().propose(b"a", now_ms=network.now_ms)
    network.settle()
    assert network.leader().data == [b"a"]


def test_pitfall_12_a_cut_between_two_of_three_does_not_cost_the_leader() -> None:
    """Leader and one follower don't see each other; the third sees both: the leader keeps its majority."""
    network = Network()
    network.elect(1)
    network.cut = {(1, 3), (3, 1)}
    network.pass_time(60_000)

    assert network.leaders() == [1]
    assert network[1].core.term == 1


def test_pitfall_12_the_only_replica_that_sees_a_majority_leads() -> None:
    """Five replicas, all links down but those of 3: nobody else can lead, so 3 does, and goes on to."""
    network = Network(5)
    network.elect(1)
    network.cut = {(a, b) for a in network.replicas for b in network.replicas if 3 not in (a, b)}
    network.pass_time(20_000)
    assert network.leaders() == [3]

    term = network[3].core.term
    network.pass_time(30_000)
    assert (network.leaders(), network[3].core.term) == ([3], term)


def test_pitfall_22_news_that_the_leader_is_gone_is_taken_back_by_a_sign_of_life() -> None:
    """Told so, a follower grants pre-votes; it still knows its leader, and a heartbeat ends the doubt."""
    network = Network()
    network.elect(1)
    follower = network[2]
    follower.core.suspect_leader(now_ms=0)
    asked = (PreVote(*head(3, 2, 2), 1, 1), ())
    ready = follower.receive(asked, now_ms=0)
    assert ready.messages == [PreVoteAnswer(*head(2, 3, 2), granted=True)]
    assert follower.core.leader_id == 1

    follower.receive((Heartbeat(*head(1, 2, 1), 1, 1), ()), now_ms=1)
    ready = follower.receive(asked, now_ms=1)
    assert ready.messages == [PreVoteAnswer(*head(2, 3, 1), granted=False)]


def test_pitfall_22_a_majority_that_was_told_so_replaces_a_leader_that_lives() -> None:
    """Check-quorum must not keep them: who was told stands and grants, and the old leader follows."""
    network = Network()
    network.elect(1)
    network[2].core.suspect_leader(now_ms=0)
    network[3].core.suspect_leader(now_ms=0)
    network[3].core.campaign(now_ms=0)
    network[3].perform()
    network.settle()

    assert network.leaders() == [3]
    assert network[1].core.leader_id == 3


def test_pitfall_24_news_of_anybodys_death_changes_no_quorum_and_elects_nobody() -> None:
    """Gossip is a hint: wrong about everybody, all the time, it costs elections at most, never a vote."""
    network = Network(5)
    network.elect(1)
    network.isolate(4)
    network.isolate(5)
    for _ in range(50):
        for replica in network.replicas.values():
            replica.core.suspect_leader(now_ms=network.now_ms)
            for other in network.replicas:
                replica.core.unreachable(other)
            replica.perform()
        network.pass_time(20)
    assert all(len(r.core.configuration.voters) == 5 for r in network.replicas.values())
    # Three of five are needed for anything, whoever is said to be dead.
    leader = network.leader()
    committed = leader.core.committed_index
    for other in {1, 2, 3} - {leader.replica_id}:
        network.isolate(other)
    leader.propose(b"alone", now_ms=network.now_ms)
    for other in network.replicas:
        leader.core.unreachable(other)
    network.settle()
    assert leader.core.committed_index == committed
    network.pass_time(20_000)
    assert network.leaders() == []


def test_pitfall_25_a_duplicated_answer_is_one_answer() -> None:
    """Votes are collected by replica id: one voter's grant, however often it comes, is one of five."""
    candidate = Network(5)[1]
    candidate.core.campaign(now_ms=0)
    candidate.perform()
    roles = []
    for kind in (PreVoteAnswer, VoteAnswer):
        for voter in (2, 2, 2, 2, 3):
            candidate.receive((kind(*head(voter, 1, 1), granted=True), ()), now_ms=0)
            roles.append(candidate.core.role)

    pre, full = Role.PRE_CANDIDATE, Role.CANDIDATE
    assert roles == [pre, pre, pre, pre, full, full, full, full, full, Role.LEADER]


def test_pitfall_25_answers_of_an_earlier_ballot_or_of_strangers_elect_nobody() -> None:
    """A grant for another term, or from a replica that is no voter, is no grant."""
    candidate = Network(hard_states={1: HardState(4)})[1]
    candidate.core.campaign(now_ms=0)
    candidate.perform()

    for stray in (PreVoteAnswer(*head(2, 1, 4), granted=True), PreVoteAnswer(*head(7, 1, 5), granted=True)):
        candidate.receive((stray, ()), now_ms=0)
        assert candidate.core.role is Role.PRE_CANDIDATE
    candidate.receive((PreVoteAnswer(*head(2, 1, 5), granted=True), ()), now_ms=0)
    for late in (VoteAnswer(*head(2, 1, 4), granted=True), VoteAnswer(*head(7, 1, 5), granted=True)):
        candidate.receive((late, ()), now_ms=0)
        assert candidate.core.role is Role.CANDIDATE


def test_pitfall_25_a_lone_voter_leads_again_after_a_restart() -> None:
    """What it had committed it commits again by its new no-op."""
    network = Network(1)
    network.elect(1).propose(b"a", now_ms=0)
    network.settle()
    network.restart(1)
    network.pass_time(4_000)

    assert network[1].core.is_leader
    assert network[1].core.committed_index == 3
    assert network[1].data == [b"a"]


@pytest.mark.parametrize("why", ["damaged", "replaced"])
def test_a_hand_over_to_one_that_will_not_stand_ends_at_once(why: str) -> None:
    """Else no proposals are taken before an election timeout is over."""
    network = Network()
    leader = network.elect(1)
    if why == "damaged":
        network[2].core.defers_campaign = True
    else:
        network[2].core.inhibit_campaign(True, now_ms=network.now_ms)
    assert leader.core.transfer_leadership(2, now_ms=network.now_ms)
    leader.perform()
    network.settle()

    assert leader.core.is_leader
    leader.propose(b"a", now_ms=network.now_ms)
    network.settle()
    assert leader.core.committed_index == leader.core.last_index
