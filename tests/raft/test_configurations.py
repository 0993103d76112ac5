"""Configuration changes in a running group: thesis chapter 4, and the pitfalls 6, 7, 8, 15, 16 and 17."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from raft import Configuration, ConfigurationRefused, Entry, HardState, Role
from raft.configuration import check_step
from raft.messages import Append, AppendAnswer, PreVoteAnswer, TimeoutNow, Vote, VoteAnswer
from raft.quorum import majority
from tests.raft.harness import Network, Replica, entries_of, head, sent


def refusal(replica: Replica, configuration: Configuration) -> str:
    with pytest.raises(ConfigurationRefused) as refused:
        replica.configure(configuration, now_ms=0)
    return refused.value.reason


def test_a_replica_is_replaced_through_a_learner() -> None:
    """Add, promote, remove: one at a time, each committed before the next; the group writes on throughout."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.add(4)
    network.configuration = leader.core.configuration
    for step in (
        leader.core.configuration.with_learner(4),
        Configuration((1, 2, 3, 4)),
        Configuration((1, 2, 4)),
    ):
        leader.configure(step, now_ms=network.now_ms)
        network.settle()
        network.pass_time(250)
        leader.propose(b"x", now_ms=network.now_ms)
        network.settle()
        assert leader.core.configuration == step

    assert network[4].data == leader.data == [b"a", b"x", b"x", b"x"]
    assert network[4].core.configuration == Configuration((1, 2, 4))
    assert set(leader.core.progress) == {1, 2, 4}


def test_pitfall_06_no_change_before_an_entry_of_its_own_term_is_committed() -> None:
    """Two leaders could else each change the same old configuration, with majorities that don't meet."""
    network = Network(4)
    network.drop = lambda message: isinstance(message, AppendAnswer)
    leader = network.elect(1)
    assert refusal(leader, Configuration((1, 2, 3))) == "no_commit_in_term"

    network.heal()
    network.pass_time(600)
    leader.configure(Configuration((1, 2, 3)), now_ms=network.now_ms)
    assert leader.core.configuration == Configuration((1, 2, 3))


def test_pitfall_06_the_history_that_lost_data_is_refused() -> None:
    """Ongaro's counterexample (raft-dev, 2015-07-10): the change of a new leader waits for its own no-op."""
    network = Network(4)
    first = network.elect(1)
    network.isolate(1)
    first.configure(Configuration((1, 2, 3, 4), (5,)), now_ms=0)
    network.settle()
    network.drop = lambda message: isinstance(message, AppendAnswer)
    network.pass_time(4_000)
    second = network.leader()

    assert second.replica_id != 1
    assert second.core.configuration == Configuration((1, 2, 3, 4))
    remaining = {1, 2, 3, 4} - {second.replica_id}
    assert refusal(second, Configuration(tuple(remaining))) == "no_commit_in_term"


def test_pitfall_07_one_uncommitted_change_at_a_time_in_force_at_once() -> None:
    """A change counts from its append: the next is refused until it is committed, by *its* majority."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(2)
    network.isolate(3)
    leader.configure(Configuration((1, 2)), now_ms=0)
    assert leader.core.configuration == Configuration((1, 2))
    assert refusal(leader, Configuration((1,))) == "change_pending"

    # The removed replica's copy counts for nothing, the remaining one's commits it.
    leader.sync()
    leader.receive((AppendAnswer(*head(3, 1, 1), 2), ()), now_ms=0)
    assert leader.core.committed_index == 1
    leader.receive((AppendAnswer(*head(2, 1, 1), 2), ()), now_ms=0)
    assert leader.core.committed_index == 2


def test_pitfall_07_a_change_inherited_from_an_earlier_term_is_pending_too() -> None:
    """A new leader's log may hold an uncommitted change; its own no-op commits that first."""
    change = Entry(2, 1, b"configuration", 1, Configuration((1, 2, 3), (4,)))
    network = Network(3, logs={1: [*entries_of(1), change]}, hard_states={1: HardState(1)})
    leader = network[1]
    network.drop = lambda message: isinstance(message, AppendAnswer)
    network.elect(1)

    assert leader.core.configuration == Configuration((1, 2, 3), (4,))
    assert refusal(leader, Configuration((1, 2, 3))) == "no_commit_in_term"


def test_no_change_leaves_voters_of_which_no_majority_is_heard() -> None:
    """Of three one is silent: without the other one nothing could be committed, not even its return."""
    network = Network(3)
    leader = network.elect(1)
    network.pass_time(600)
    assert leader.core.majority_active((1, 2)) and leader.core.majority_active((1, 3))
    network.isolate(3)
    network.pass_time(4_000)
    assert refusal(leader, Configuration((1, 3))) == "no_majority"
    assert not leader.core.majority_active((1, 3))

    leader.configure(Configuration((1, 2)), now_ms=network.now_ms)
    network.settle()
    assert leader.core.configuration == Configuration((1, 2))
    assert leader.core.committed_index == leader.core.last_index


def test_a_voter_that_this_leader_never_heard_from_is_no_majority_s_second() -> None:
    """It was silent before this leader was elected, so no time was there to notice it."""
    network = Network(3)
    network.isolate(3)
    leader = network.elect(1)

    assert refusal(leader, Configuration((1, 3))) == "no_majority"
    leader.configure(Configuration((1, 2)), now_ms=network.now_ms)


@pytest.mark.parametrize("agreed", [True, False])
def test_a_voter_that_a_quiesced_group_is_without_is_no_majority_s_second(agreed: bool) -> None:
    """It was heard shortly before, and no timer runs by which the leader could notice its silence since."""
    network = Network(3)
    network.rests = True
    leader = network.elect(1)
    network.pass_time(200 if agreed else 0)
    assert agreed == leader.core.quiesced
    network[3].crash()
    network.absent = {3}
    assert leader.core.quiesce_without([3]) == agreed
    network.pass_time(800)
    assert leader.core.quiesced and set(leader.core.quiesce_peers) == {2}

    assert leader.core.majority_active((1, 2)) and not leader.core.majority_active((1, 3))
    assert refusal(leader, Configuration((1, 3))) == "no_majority"
    leader.configure(Configuration((1, 2)), now_ms=network.now_ms)


def test_a_learner_that_a_lone_voter_quiesced_without_is_not_promoted() -> None:
    """It held all that was committed; then its process ended, and nobody was left to ask."""
    network = Network(1)
    network.rests = True
    leader = network.elect(1)
    network.add(2)
    leader.configure(Configuration((1,), (2,)), now_ms=0)
    network.settle()
    network.pass_time(200)
    assert leader.core.majority_active((1, 2))
    network[2].crash()
    network.absent = {2}
    leader.core.unquiesce(now_ms=network.now_ms)
    network.pass_time(800)
    assert leader.core.quiesced and not leader.core.quiesce_peers

    assert not leader.core.majority_active((1, 2))


def test_pitfall_08_a_truncated_change_is_reverted() -> None:
    """The configuration is a function of the log: cut the entry, and what was in force before is again."""
    network = Network(3)
    old_leader = network.elect(1)
    network.isolate(1)
    old_leader.configure(Configuration((1, 2)), now_ms=0)
    old_leader.propose(b"lost", now_ms=0)
    network.settle()
    network.pass_time(5_000)
    assert network.leader().replica_id != 1
    assert old_leader.core.configuration == Configuration((1, 2))

    network.heal()
    network.pass_time(2_000)
    assert old_leader.core.configuration == Configuration((1, 2, 3))
    assert old_leader.data == []
    told = [ready.configuration for ready in old_leader.readies if ready.configuration is not None]
    assert told == [Configuration((1, 2)), Configuration((1, 2, 3))]


def test_pitfall_08_a_change_is_found_again_after_a_restart() -> None:
    """The constructor is told the configurations in the log; truncation pops them as before."""
    network = Network(3)
    leader = network.elect(1)
    leader.configure(Configuration((1, 2, 3), (4,)), now_ms=0)
    network.settle()
    replica = network.restart(2)
    assert replica.core.configuration == Configuration((1, 2, 3), (4,))

    foreign = (Append(*head(3, 2, 2), 1, 1, 0, 1), (Entry(2, 2, b"other", 1),))
    replica.receive(foreign, now_ms=0)
    assert replica.core.configuration == Configuration((1, 2, 3))


def test_pitfall_15_learners_neither_count_nor_stand() -> None:
    """Their copies commit nothing, and they never ask for votes."""
    network = Network(3, learners=2)
    leader = network.elect(1)
    network.isolate(2)
    network.isolate(3)
    leader.propose(b"a", now_ms=0)
    network.settle()
    assert network[4].data == network[5].data == [b"a"]
    assert leader.core.committed_index == 1
    assert network[4].core.deadline_ms() is None

    network[4].core.campaign(now_ms=0)
    assert network[4].core.role is Role.FOLLOWER


def test_pitfall_15_a_learner_is_promoted_only_when_it_has_caught_up() -> None:
    """A voter that lacks the log would stall the group; it must hold the last heartbeat's commit."""
    network = Network(1, learners=1)
    leader = network.elect(1)
    network.isolate(2)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(200)
    assert refusal(leader, Configuration((1, 2))) == "not_caught_up"

    network.heal()
    network.pass_time(600)
    leader.configure(Configuration((1, 2)), now_ms=network.now_ms)
    network.settle()
    assert network[2].core.configuration == Configuration((1, 2))


def test_pitfall_15_no_learner_is_promoted_whose_connection_has_just_ended() -> None:
    """Its node was restarted, and it may have begun again with an empty log. A group of one voter would wait
    until it is filled, and could have gone on alone.
    """
    network = Network(1, learners=1)
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(500)
    assert leader.core.is_caught_up(2)
    network[2].crash()
    leader.core.unreachable(2)
    assert not leader.core.is_caught_up(2)
    assert refusal(leader, Configuration((1, 2))) == "not_caught_up"

    network[2].forget(2, now_ms=network.now_ms)
    network.pass_time(600)
    assert leader.core.is_caught_up(2) and network[2].data == [b"a"]
    leader.configure(Configuration((1, 2)), now_ms=network.now_ms)
    network.settle()
    assert leader.core.committed_index == 3


def test_pitfall_15_a_fresh_leader_promotes_nobody_of_whom_it_knows_nothing() -> None:
    """Before its first tick it has seen no commit index that a learner could be measured by."""
    network = Network(2, learners=1, logs=dict.fromkeys((1, 2), entries_of(1, 1, 1)))
    network.isolate(3)
    leader = network.elect(1)
    assert leader.core.committed_index == 4

    assert refusal(leader, Configuration((1, 2, 3))) == "not_caught_up"


def test_pitfall_15_a_learner_that_does_not_know_of_its_promotion_votes() -> None:
    """Who counts is a matter of the candidate's log; the promoted one's vote may be needed."""
    network = Network(2, learners=1)
    learner = network[3]

    ready = learner.receive((Vote(*head(1, 3, 1), 5, 1), ()), now_ms=0)

    assert ready.messages_after_sync == [VoteAnswer(*head(3, 1, 1), granted=True)]


def test_pitfall_16_of_two_voters_either_can_be_removed() -> None:
    """The remaining voter alone commits the removal of the other; of itself, the other's copy does."""
    for remaining in (1, 2):
        network = Network(2)
        leader = network.elect(1)
        if remaining == 1:
            network[2].crash()
        leader.configure(Configuration((remaining,)), now_ms=0)
        network.settle()
        network.pass_time(4_000)

        assert network.leaders() == [remaining]
        assert network[remaining].core.configuration == Configuration((remaining,))


def test_pitfall_16_a_leader_crashing_in_its_own_removal_does_not_block_the_group() -> None:
    """Only its log holds the removal, and no shorter log wins its vote: it stands, not counting itself."""
    network = Network(2)
    leader = network.elect(1)
    network.isolate(2)
    leader.configure(Configuration((2,)), now_ms=0)
    network.settle()
    network.restart(1)
    network.heal()
    network.pass_time(20_000)

    assert network.leaders() == [2]
    assert network[2].core.configuration == Configuration((2,))


def test_pitfall_17_a_removed_leader_steps_down_once_that_is_committed() -> None:
    """It leads, not counting itself, until the others hold its removal; then another may lead at once."""
    network = Network(3)
    leader = network.elect(1)
    ready = leader.configure(Configuration((2, 3)), now_ms=0)
    assert {m.receiver for m in sent(ready, Append)} == {2, 3}
    leader.sync()
    leader.receive((AppendAnswer(*head(2, 1, 1), 2), ()), now_ms=0)
    # One of two holds it, and the leader's own copy does not count.
    assert network.leaders() == [1]

    ready = leader.receive((AppendAnswer(*head(3, 1, 1), 2), ()), now_ms=0)
    assert ready.committed_index == 2
    assert network.leaders() == []
    assert leader.core.deadline_ms() is None
    assert len(sent(ready, TimeoutNow)) == 1
    network.settle()
    assert network.leaders() in ([2], [3])
    assert network.leader().core.term == 2


def test_pitfall_10_a_removed_replica_disturbs_nobody() -> None:
    """It never hears of its removal, and asks for votes for ever; nobody listens."""
    network = Network(3)
    leader = network.elect(1)
    leader.configure(Configuration((1, 2)), now_ms=0)
    network.settle()
    network.pass_time(60_000)

    assert network[3].core.configuration == Configuration((1, 2, 3))
    assert (network.leaders(), leader.core.term) == ([1], 1)


def test_pitfall_10_the_vote_of_a_removed_replica_elects_nobody() -> None:
    """A candidate counts the voters of its own configuration only."""
    network = Network(3)
    network.elect(1).configure(Configuration((1, 2)), now_ms=0)
    network.settle()
    network[1].crash()
    candidate = network[2]
    candidate.core.suspect_leader(now_ms=0)
    candidate.core.campaign(now_ms=0)
    candidate.receive((PreVoteAnswer(*head(3, 2, 2), granted=True), ()), now_ms=0)

    assert candidate.core.role is Role.PRE_CANDIDATE


def test_pitfall_19_a_follower_that_needs_what_is_gone_is_flagged_and_goes_on_after_catch_up() -> None:
    """Its next entry is before the leader's log: no appends go to it until it has been caught up."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    leader.propose(b"a", b"b", b"c", now_ms=0)
    network.settle()
    leader.log.trim(3)
    network.heal()
    network.pass_time(1_000)
    assert [i for i, progress in leader.core.progress.items() if progress.needs_catch_up] == [3]

    # Catch-up builds the log elsewhere and starts a core on it.
    replica = network[3]
    replica.durable_log.entries = list(network[2].log.entries)
    replica.durable_log.trim(3)
    network.restart(3)
    network.pass_time(1_000)
    leader.propose(b"d", now_ms=network.now_ms)
    network.settle()
    assert [i for i, progress in leader.core.progress.items() if progress.needs_catch_up] == []
    assert replica.core.committed_index == leader.core.committed_index == 5


def test_a_follower_that_lacks_much_is_left_to_other_means_until_it_holds_the_agreed_entry() -> None:
    """The leader asks it with each heartbeat, and sends it nothing before."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    leader.propose(b"a", b"b", b"c", b"d", now_ms=0)
    network.settle()
    network.heal()
    leader.core.catch_up(3, resume_index=4)
    network.pass_time(1_000)
    assert [i for i, progress in leader.core.progress.items() if progress.needs_catch_up] == [3]
    assert network[3].core.last_index < 4

    replica = network[3]
    replica.durable_log.entries = list(network[2].log.entries[:4])
    network.restart(3)
    network.pass_time(1_000)
    assert [i for i, progress in leader.core.progress.items() if progress.needs_catch_up] == []
    assert replica.core.committed_index == leader.core.committed_index


def test_a_follower_that_was_left_to_other_means_in_vain_gets_appends_again() -> None:
    """Taken back, the wish leaves no trace."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    leader.propose(b"a", b"b", b"c", now_ms=0)
    network.settle()
    leader.core.catch_up(3, resume_index=leader.core.committed_index)
    network.heal()
    network.pass_time(1_000)
    leader.core.resume(3)
    network.pass_time(1_000)
    assert network[3].core.committed_index == leader.core.committed_index


def test_a_replica_whose_log_is_replaced_votes_and_does_not_stand() -> None:
    """It would only disturb; its vote is as good as ever."""
    network = Network(3)
    network.elect(1)
    network[3].core.inhibit_campaign(True, now_ms=network.now_ms)
    assert network[3].core.deadline_ms() is None
    network.isolate(1)
    network.pass_time(10_000)
    assert network[2].core.is_leader

    network[3].core.inhibit_campaign(False, now_ms=network.now_ms)
    network.heal()
    network.isolate(2)
    network.pass_time(20_000)
    assert network[1].core.is_leader or network[3].core.is_leader


def steps_from(current: Configuration, ids: range) -> list[Configuration]:
    """Every configuration that `check_step` lets follow this one, found by trying all of them."""
    allowed = []
    members = [tuple(i for i in ids if bits >> i & 1) for bits in range(1 << len(ids))]
    for voters, learners in product(members, members):
        if set(voters) & set(learners):
            continue
        new = Configuration(tuple(i + 1 for i in voters), tuple(i + 1 for i in learners))
        try:
            check_step(current, new)
        except ConfigurationRefused:
            continue
        allowed.append(new)
    return allowed


def majorities(voters: tuple[int, ...]) -> list[set[int]]:
    return [set(some) for some in combinations(voters, majority(len(voters)))]


def test_pitfall_09_one_step_needs_no_joint_phase() -> None:
    """Joint consensus was decided against: every majority of a configuration meets every one of the next."""
    tried = 0
    for size, learners in product(range(1, 5), range(2)):
        current = Configuration(tuple(range(1, size + 1)), tuple(range(size + 1, size + learners + 1)))
        for new in steps_from(current, range(5)):
            tried += 1
            for one, other in product(majorities(current.voters), majorities(new.voters)):
                assert one & other, f"{current} to {new}: {one} and {other} don't meet"

    assert tried > 30


def test_pitfall_09_a_step_taken_twice_is_refused_by_name() -> None:
    """A controller that asks again after a lost answer changes nothing more."""
    network = Network(3)
    leader = network.elect(1)
    leader.configure(Configuration((1, 2, 3), (4,)), now_ms=0)
    network.settle()

    with pytest.raises(ConfigurationRefused) as again:
        leader.core.configuration.with_learner(4)
    assert again.value.reason == "already_member"
    assert refusal(leader, leader.core.configuration) == "not_one_step"


def test_pitfall_19_nobody_stands_while_the_leader_is_heard_and_its_log_is_elsewhere() -> None:
    """A follower flagged for catch-up is still sent heartbeats, hears the leader and stays quiet."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    leader.propose(b"a", b"b", b"c", now_ms=0)
    network.settle()
    leader.log.trim(3)
    network.heal()
    network.pass_time(60_000)

    assert leader.core.progress[3].needs_catch_up
    assert (network.leaders(), network[3].core.term, network[3].core.leader_id) == ([1], 1, 1)
    network.heal()
    before = len(network[3].readies)
    network.pass_time(60_000)
    stood = [ready.became for ready in network[3].readies[before:] if ready.became is not None]
    assert stood == []
    appended = [m for r in leader.readies[-50:] for m in sent(r, Append) if m.receiver == 3]
    assert all(isinstance(m, Append) and m.entry_count == 0 for m in appended)


def test_pitfall_50_a_removal_that_is_cut_leaves_the_replica_as_it_was() -> None:
    """It was never committed: the replica has its data, its vote, and everything that came since."""
    network = Network(5)
    old_leader = network.elect(1)
    old_leader.propose(b"a", now_ms=0)
    network.settle()
    # The removal of 5 reaches 5 itself, which believes it, and nobody else.
    network.isolate(1)
    old_leader.configure(Configuration((1, 2, 3, 4)), now_ms=0)
    change = old_leader.log.entries[-1]
    network[5].receive((Append(*head(1, 5, 1), 2, 1, 2, 1), (change,)), now_ms=0)
    network.settle()
    assert network[5].core.configuration == Configuration((1, 2, 3, 4))
    assert network[5].core.committed_index == 2
    network.pass_time(10_000)

    leader = network.leader()
    assert leader.replica_id in (2, 3, 4)
    network[2 if leader.replica_id != 2 else 3].crash()
    leader.propose(b"b", now_ms=network.now_ms)
    network.settle()
    assert network[5].core.configuration == Configuration((1, 2, 3, 4, 5))
    assert network[5].data == [b"a", b"b"]
    assert leader.core.committed_index == leader.core.last_index, "its copy counts: three of five"
