"""Linearizable reads (thesis 6.4, pitfall 14), hand-over (13), and failover by news."""

from __future__ import annotations

import pytest

from raft import Configuration, HardState, NotLeader, Role
from raft.messages import AppendAnswer, Heartbeat, HeartbeatAnswer, TimeoutNow
from tests.raft.harness import Network, entries_of, head, sent


def test_pitfall_14_a_read_waits_for_a_round_begun_after_it() -> None:
    """The answer to a round that was begun before the question says nothing about the time after it."""
    network = Network()
    leader = network.elect(1)
    network.settle()
    leader.core.expire(now_ms=200)
    (old, _) = [m for m in sent(leader.perform(), Heartbeat) if isinstance(m, Heartbeat)]
    leader.core.read_index(7, now_ms=201)
    (new, _) = [m for m in sent(leader.perform(), Heartbeat) if isinstance(m, Heartbeat)]

    leader.receive((HeartbeatAnswer(*head(2, 1, 1), old.round), ()), now_ms=202)
    assert not leader.reads
    leader.receive((HeartbeatAnswer(*head(2, 1, 1), new.round), ()), now_ms=203)
    assert leader.reads == {7: 1}


def test_pitfall_14_no_read_before_the_leader_committed_in_its_term() -> None:
    """Until then it does not know what is committed; the read waits, and gets the later index."""
    network = Network(
        logs={1: entries_of(1), 2: entries_of(1)}, hard_states={1: HardState(1), 2: HardState(1)}
    )
    network.drop = lambda message: isinstance(message, AppendAnswer)
    leader = network.elect(1)
    leader.core.read_index(7, now_ms=0)
    leader.perform()
    network.pass_time(400)
    assert not leader.reads

    network.heal()
    network.pass_time(600)
    assert leader.reads == {7: 2}


def test_pitfall_14_one_round_answers_all_who_wait() -> None:
    """While a round is under way, further reads wait together for the next."""
    network = Network()
    leader = network.elect(1)
    rounds = []
    for context in range(5):
        leader.core.read_index(context, now_ms=0)
        rounds.append(len(sent(leader.perform(), Heartbeat)))
    assert rounds == [2, 0, 0, 0, 0]

    network.settle()
    assert leader.reads == dict.fromkeys(range(5), 1)


def test_pitfall_14_a_leader_paused_and_replaced_answers_no_read() -> None:
    """It still believes that it leads; nobody confirms that."""
    network = Network()
    old = network.elect(1)
    network.isolate(1)
    network[2].core.suspect_leader(now_ms=0)
    network[3].core.suspect_leader(now_ms=0)
    for replica in (network[2], network[3]):
        replica.core.expire(now_ms=replica.core.deadline_ms() or 0)
        replica.perform()
        network.settle()
    new = network.leader()
    assert new.replica_id != 1
    new.propose(b"new", now_ms=0)
    network.settle()

    network.heal()
    old.core.read_index(7, now_ms=10_000)
    old.perform()
    network.settle()
    assert not old.reads
    assert old.reads_failed == [7]


@pytest.mark.parametrize("asked", ["before", "after"])
def test_pitfall_27_a_leader_that_stood_still_answers_nothing_from_memory(asked: str) -> None:
    """A process may be stopped between any two lines. There is no lease: what it answers after the pause is
    confirmed after it, so a leader that was replaced meanwhile answers no read, whenever that came.
    """
    network = Network()
    leader = network.elect(1)
    network.isolate(1)
    if asked == "before":
        leader.core.read_index(7, now_ms=0)
        leader.perform()
    # 1 stands still: nothing of it runs, while the others elect and commit.
    leader.alive = False
    network.pass_time(10_000)
    other = network.leader()
    other.propose(b"new", now_ms=network.now_ms)
    network.settle()
    assert other.replica_id != 1 and other.core.committed_index == 3

    leader.alive = True
    assert leader.core.role is Role.LEADER
    if asked == "after":
        leader.core.read_index(7, now_ms=network.now_ms)
        leader.perform()
    network.heal()
    network.settle()
    network.pass_time(3_000)
    assert leader.reads == {}
    assert leader.reads_failed == [7]


def test_a_duplicated_confirmation_is_one_confirmation() -> None:
    """Confirmations are collected by replica id."""
    network = Network(5)
    leader = network.elect(1)
    leader.core.read_index(7, now_ms=0)
    heartbeat = sent(leader.perform(), Heartbeat)[0]
    assert isinstance(heartbeat, Heartbeat)
    for _ in range(4):
        leader.receive((HeartbeatAnswer(*head(2, 1, 1), heartbeat.round), ()), now_ms=0)
    assert not leader.reads

    leader.receive((HeartbeatAnswer(*head(3, 1, 1), heartbeat.round), ()), now_ms=0)
    assert leader.reads == {7: 1}


def test_a_lost_round_is_made_good_by_the_next_heartbeat() -> None:
    """Also for the reads of the lost round: a later round confirms earlier ones."""
    network = Network()
    leader = network.elect(1)
    network.drop = lambda message: isinstance(message, Heartbeat)
    leader.core.read_index(7, now_ms=0)
    leader.perform()
    network.settle()
    leader.core.read_index(8, now_ms=1)
    leader.perform()
    network.heal()
    network.pass_time(250)

    assert leader.reads == {7: 1, 8: 1}


def test_a_lone_voter_confirms_itself_and_a_follower_refuses() -> None:
    """A read at a group of one is answered in the same Ready; at a follower it fails at once."""
    network = Network(1, learners=1)
    leader = network.elect(1)
    leader.core.read_index(7, now_ms=0)
    assert leader.perform().reads == [(7, 1)]

    network[2].core.read_index(8, now_ms=0)
    assert network[2].perform().reads_failed == [8]


def test_reads_under_way_are_answered_when_the_group_shrinks_to_one() -> None:
    """The next round finds the lone voter's own word enough."""
    network = Network(2)
    leader = network.elect(1)
    network.isolate(2)
    leader.core.read_index(7, now_ms=0)
    leader.perform()
    leader.configure(Configuration((1,)), now_ms=0)
    network.pass_time(250)

    assert leader.reads == {7: 1}


def test_pitfall_13_hand_over_stops_proposals_and_bypasses_the_pre_vote() -> None:
    """The target has everything, stands at once, and is voted for though the old leader was just heard."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    assert leader.core.transfer_leadership(3, now_ms=0)
    assert not sent(leader.perform(), TimeoutNow), "it does not hold everything yet"
    with pytest.raises(NotLeader) as refusal:
        leader.core.place()
    assert refusal.value.leader_id == 3
    network.settle()

    assert network.leaders() == [3]
    assert network[3].core.term == 2
    assert network[3].data == [b"a"]


def test_pitfall_13_hand_over_to_somebody_gone_ends_by_itself() -> None:
    """After an election timeout the leader takes proposals again."""
    network = Network()
    leader = network.elect(1)
    network.isolate(3)
    assert leader.core.transfer_leadership(3, now_ms=0)
    with pytest.raises(NotLeader):
        leader.propose(b"too early", now_ms=0)
    network.pass_time(1_600)

    leader.propose(b"a", now_ms=network.now_ms)
    network.settle()
    assert leader.core.committed_index == 2


def test_pitfall_13_a_lost_hand_over_is_told_again() -> None:
    """Proposals wait for it: at the next heartbeat, not after the whole time out."""
    network = Network()
    leader = network.elect(1)
    network.drop = lambda message: isinstance(message, TimeoutNow)
    leader.core.transfer_leadership(3, now_ms=0)
    leader.perform()
    network.settle()
    assert network.leaders() == [1]

    network.heal()
    network.pass_time(250)
    assert network.leaders() == [3]


def test_news_of_a_dead_leader_makes_a_new_one_at_once() -> None:
    """Both survivors hear that the connection closed: one leads within a moment, at every seed."""
    took = []
    for seed in range(100):
        network = Network(seed=seed)
        network.elect(1)
        network[1].crash()
        for survivor in (2, 3):
            network[survivor].core.suspect_leader(now_ms=0)
        while not network.leaders():
            network.pass_time(10)
        took.append(network.now_ms)

    assert max(took) < 1_000
    assert sorted(took)[50] <= 100


def test_wrong_news_disturbs_nobody() -> None:
    """One follower's connection broke, the other still hears the leader: no pre-vote is won."""
    network = Network()
    leader = network.elect(1)
    network.cut = {(1, 3), (3, 1)}
    network[3].core.suspect_leader(now_ms=0)
    network.pass_time(190)
    assert network[3].core.term == 1

    network.heal()
    network.pass_time(1_000)
    assert (network.leaders(), leader.core.term, network[3].core.leader_id) == ([1], 1, 1)
    assert network[3].core.role is Role.FOLLOWER


def test_pitfall_44_a_stalled_loop_reads_before_it_elects() -> None:
    """Deadlines move by what the driver says, so heartbeats that lie in the sockets are read first."""
    network = Network()
    network.elect(1)
    follower = network[2]
    before_ms = follower.core.deadline_ms()
    assert before_ms is not None

    follower.core.postpone(by_ms=200)
    follower.core.expire(now_ms=before_ms)

    assert follower.core.role is Role.FOLLOWER
    assert follower.core.deadline_ms() == before_ms + 200
