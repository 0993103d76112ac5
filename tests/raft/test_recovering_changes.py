"""Marks and changes of the configuration at one time: one replica of three forgot, and nothing may be lost.

While a grant of a recovering replica counted when every voter granted, a candidate asked the voters of *its*
configuration only, which may be uncommitted or overtaken: nobody who held the data was asked.
"""

from __future__ import annotations

import pytest

from raft import Configuration, Role
from tests.raft.harness import Network, Packet, Replica


def stands(network: Network, replica: Replica) -> None:
    """Let it stand, a few times."""
    network.packets.clear()
    for _ in range(5):
        if replica.core.role is Role.LEADER:
            return
        replica.core.campaign(now_ms=network.now_ms)
        replica.perform()
        network.settle()


def test_pitfall_34_a_removal_that_nobody_heard_of_elects_nobody_with_a_marked_grant() -> None:
    """3 leads, appends the removal of 2 and is cut off. 1 and 2 go on, 1 forgets. 3, in its configuration
    of 1 and 3, has the grants of all its voters; 2 holds the record and is not asked.
    """
    network = Network(3)
    leader = network.elect(3)
    leader.propose(b"old", now_ms=network.now_ms)
    network.settle()
    network.isolate(3)
    leader.configure(Configuration((1, 3)), now_ms=network.now_ms)
    network.settle()
    for each in (1, 2):
        network[each].core.suspect_leader(now_ms=network.now_ms)
        network[each].perform()
    one = network.elect(1)
    one.propose(b"precious", now_ms=network.now_ms)
    network.settle()
    assert one.data == network[2].data == [b"old", b"precious"]
    one.forget(len(one.log.entries) - 2, now_ms=network.now_ms)
    while leader.core.role is Role.LEADER:
        network.now_ms += 1_600
        leader.core.expire(now_ms=network.now_ms)
        leader.perform()
    network.heal()
    stands(network, leader)
    network.pass_time(5_000)

    assert b"precious" in network.leader().data


def test_pitfall_34_voters_before_a_promotion_elect_nobody_with_a_marked_grant() -> None:
    """1 leads 1 and 2, promotes 3 and commits with it; then it forgets. 2 stands in the configuration that it
    knows, with the grants of all its voters; 3 holds the record and is not asked.
    """
    network = Network(2, learners=1)
    one, three = network.elect(1), network[3]
    one.propose(b"old", now_ms=network.now_ms)
    network.settle()
    network.pass_time(500)
    network[2].crash()
    one.propose(b"precious", now_ms=network.now_ms)
    network.settle()
    one.configure(Configuration((1, 2, 3)), now_ms=network.now_ms)
    network.settle(sync=False)
    three.sync()
    network.settle(sync=False)
    assert one.core.committed_index == 3
    one.forget(1, now_ms=network.now_ms)
    network[2].start(now_ms=network.now_ms)
    stands(network, network[2])
    assert network[2].core.role is not Role.LEADER
    network.pass_time(6_000)

    assert b"precious" in network.leader().data


@pytest.mark.parametrize("word_is_late", [False, True])
def test_pitfall_34_a_promoted_learner_counts_only_when_it_knows_that_it_votes(word_is_late: bool) -> None:
    """3 acknowledged the record as a learner, was restarted and began again with an empty log. So it may, as
    nobody waits for the copy of a learner. 1 has not heard of it and promotes it. Its former word commits
    nothing: the record would be on one disk of three, and go with it. The same if that word comes only then.
    """
    network = Network(2, learners=1)
    one, three = network.elect(1), network[3]
    one.propose(b"old", now_ms=network.now_ms)
    network.settle()
    network.pass_time(500)
    network.isolate(2)
    one.propose(b"precious", now_ms=network.now_ms)
    late: list[Packet] = []
    if word_is_late:
        network.settle(sync=False)
        three.sync()
        late = [packet for packet in network.packets if packet[0].sender == 3]
        network.packets.clear()
    else:
        network.settle()
    held = one.log.last_index
    three.forget(len(three.durable_log.entries), now_ms=network.now_ms)
    network.packets.clear()
    assert one.core.committed_index == held - 1

    one.configure(Configuration((1, 2, 3)), now_ms=network.now_ms)
    one.sync()
    for packet in late:
        one.receive(packet, now_ms=network.now_ms)
    assert one.core.committed_index == held - 1

    network.pass_time(2_000)
    assert one.core.committed_index == one.log.last_index
    assert three.data == one.data == [b"old", b"precious"]


def test_a_learner_with_the_latest_log_stands_once_all_have_answered() -> None:
    """1 and 2 forgot what only the learner 3 still has. It leads, without a vote of its own, until they have
    it again.
    """
    network = Network(2, learners=1)
    one = network.elect(1)
    one.propose(b"a", now_ms=network.now_ms)
    network.settle()
    network.pass_time(500)
    for each in (1, 2):
        network[each].forget(1, now_ms=network.now_ms)
    network.packets.clear()
    network.pass_time(10_000)
    assert network.leaders() == []

    network.release(1, 2, 3)
    led: list[int] = []
    network[3].on_ready = lambda ready: led.extend(network.leaders())
    network.pass_time(10_000)
    assert led[0] == 3 and network.leaders() in ([1], [2])
    assert [network[each].data for each in (1, 2, 3)] == [[b"a"]] * 3
    assert not any(network[each].core.recovering for each in (1, 2, 3))


def test_pitfall_34_no_log_below_the_latest_gets_a_marked_grant() -> None:
    """All three are recovering, and all have answered: the one with the latest log leads, although the other
    two would be a majority.
    """
    network = Network()
    network.elect(1)
    network.isolate(3)
    network[1].propose(b"a", now_ms=network.now_ms)
    network.settle()
    network.heal()
    network[1].forget(0, now_ms=network.now_ms)
    network[2].forget(1, now_ms=network.now_ms)
    network[3].forget(0, now_ms=network.now_ms)
    network.packets.clear()
    network.release(1, 2, 3)
    network.isolate(1)
    network.pass_time(20_000)
    assert network.leaders() == []

    network.heal()
    network.pass_time(20_000)
    assert network.leader().data == [b"a"]


def test_pitfall_34_a_release_is_for_one_incarnation() -> None:
    """What 2 acknowledged and forgot after it answered is not in the latest end that was told."""
    network = Network()
    network.elect(1)
    replica = network[2]
    assert not replica.core.release(incarnation=1, last_term=1, last_index=1, now_ms=0)
    replica.forget(0, now_ms=0)
    assert not replica.core.release(incarnation=0, last_term=1, last_index=1, now_ms=0)
    assert replica.core.release(incarnation=1, last_term=1, last_index=1, now_ms=0)
