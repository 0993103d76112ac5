"""A group whose majority is gone for good goes on with one replica, by a person's decision
(docs/consensus.md#accepting-a-loss): and the others, if they ever come back, elect nobody who counts.
"""

from __future__ import annotations

import pytest

from raft import Configuration, ConfigurationRefused, Entry, Role
from raft.configuration import check_step
from raft.messages import AnyMessage, Append, AppendAnswer, Vote
from raft.values import Place
from tests.raft.harness import Network, Replica, entries_of, head

PASSED = 1 << 16


def go_on_alone(replica: Replica, *abandoned: int, now_ms: int) -> None:
    """As its driver does once the catalog has the decision."""

    def make(place: Place) -> Entry:
        configuration = Configuration((replica.replica_id,), (), abandoned)
        return Entry(place.index, place.term, b"configuration", 128, configuration)

    replica.core.go_on_alone(make, term=replica.core.term + PASSED, now_ms=now_ms)
    replica.perform()


def bereaved() -> Network:
    """1 held what it took as a follower of 2; 2 and 3 are gone, and have committed more than that."""
    network = Network()
    network.elect(2)
    network[2].propose(b"a", now_ms=network.now_ms)
    network.settle()
    network.isolate(1)
    network[2].propose(b"b", now_ms=network.now_ms)
    network.settle()
    network[2].crash()
    network[3].crash()
    network.heal()
    network.pass_time(20_000)
    assert network[1].data == [b"a"] and not network.leaders()
    return network


def test_it_leads_alone_and_says_nothing_before_its_disk_has_the_decision() -> None:
    """What it holds is committed, as some of it may be acknowledged; and it takes new entries."""
    network = bereaved()
    survivor = network[1]
    go_on_alone(survivor, 2, 3, now_ms=network.now_ms)
    assert survivor.core.role is Role.LEADER and not network.packets
    assert survivor.core.committed_index < survivor.core.last_index, "its disk has not answered"
    survivor.sync()

    assert survivor.core.committed_index == survivor.core.last_index
    survivor.propose(b"c", now_ms=network.now_ms)
    network.settle()
    assert survivor.data == [b"a", b"c"]
    assert survivor.core.configuration == Configuration((1,), (), (2, 3))


def test_the_decision_outlives_a_restart_and_a_crash_before_its_sync_leaves_it_undone() -> None:
    """Then it is carried out again, in a later term, from what the catalog has."""
    network = bereaved()
    survivor = network[1]
    go_on_alone(survivor, 2, 3, now_ms=network.now_ms)
    survivor.crash()
    survivor.start(now_ms=network.now_ms)
    assert survivor.core.configuration == Configuration((1, 2, 3))
    go_on_alone(survivor, 2, 3, now_ms=network.now_ms)
    survivor.sync()
    survivor.crash()
    survivor.start(now_ms=network.now_ms)
    network.pass_time(20_000)

    assert network.leaders() == [1]
    assert survivor.core.configuration.abandoned == (2, 3)


def test_those_given_up_come_back_and_nobody_of_the_group_counts_for_them_or_hears_them() -> None:
    """Among themselves they are a majority of the group as it was, and elect one another. But what they say
    changes nothing here, of whatever term it is, and no acknowledgement of ours counts there.
    """
    network = bereaved()
    survivor = network[1]
    go_on_alone(survivor, 2, 3, now_ms=network.now_ms)
    survivor.sync()
    network.settle()
    answered: list[object] = []

    def listening(message: AnyMessage) -> bool:
        if message.sender == 1 and message.receiver in (2, 3):
            answered.append(message)
        return False

    network.drop = listening
    network[2].start(now_ms=network.now_ms)
    network[3].start(now_ms=network.now_ms)
    network.pass_time(30_000)
    survivor.propose(b"c", now_ms=network.now_ms)
    network.settle()

    assert survivor.core.role is Role.LEADER and survivor.data == [b"a", b"c"]
    assert survivor.core.committed_index == survivor.core.last_index
    assert not [each for each in answered if isinstance(each, AppendAnswer) and not each.rejected]
    term = survivor.core.term
    later = 10 * PASSED
    for message in (
        Vote(*head(2, 1, later), 99, later - 1),
        Append(*head(2, 1, later), survivor.core.last_index, survivor.core.term, 1, 1),
    ):
        survivor.receive((message, ()), now_ms=network.now_ms)
    assert (survivor.core.role, survivor.core.term) == (Role.LEADER, term)
    assert survivor.core.dropped["abandoned_member"] >= 2


def test_new_members_join_and_are_as_deaf_to_those_given_up() -> None:
    """Who was given up is handed on with each configuration."""
    network = bereaved()
    survivor = network[1]
    go_on_alone(survivor, 2, 3, now_ms=network.now_ms)
    survivor.sync()
    network.settle()
    new = network.add(4)
    for step in (Configuration((1,), (4,), (2, 3)), Configuration((1, 4), (), (2, 3))):
        survivor.configure(step, now_ms=network.now_ms)
        network.settle()
        network.pass_time(1000)
    assert new.data == [b"a"] and new.core.configuration == Configuration((1, 4), (), (2, 3))
    new.receive((Vote(*head(3, 4, 10 * PASSED), 99, 9 * PASSED), ()), now_ms=network.now_ms)
    assert new.core.dropped["abandoned_member"] == 1
    assert new.core.term == survivor.core.term

    survivor.crash()
    network[2].start(now_ms=network.now_ms)
    network[3].start(now_ms=network.now_ms)
    network.pass_time(20_000)
    assert 4 not in network.leaders(), "one of two elects nobody, whatever those given up say"


def test_no_step_changes_who_was_given_up() -> None:
    """Only a decision does, and none of them ever comes back."""
    alone = Configuration((1,), (), (2, 3))
    for step in (
        Configuration((1,), (4,)),
        Configuration((1,), (4,), (2,)),
        alone.with_learner(2),
    ):
        with pytest.raises(ConfigurationRefused, match="abandoned"):
            check_step(alone, step)
    check_step(alone, alone.with_learner(4))


def test_a_survivor_that_may_have_forgotten_something_goes_on_too() -> None:
    """Its mark asks for others that are gone; the decision is about that as well."""
    network = Network(logs={1: entries_of(1, 1, 1)})
    survivor = network[1]
    survivor.forget(1, now_ms=0)
    go_on_alone(survivor, 2, 3, now_ms=0)
    survivor.sync()

    assert survivor.core.role is Role.LEADER and not survivor.core.recovering and not survivor.recovering
