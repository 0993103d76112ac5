"""Recovering replicas: incarnations and goals (docs/consensus.md#recovering), each rule on its own.

A rule is tested by what would be lost without it: each test here fails when its rule is left out.
"""

from __future__ import annotations

import pytest

from raft import Append, Entry, HardState, Role, Settings
from raft.messages import AppendAnswer, Heartbeat, HeartbeatAnswer, PreVote, PreVoteAnswer, Vote, VoteAnswer
from tests.raft.harness import Network, Replica, entries_of, head, sent

ONE_BY_ONE = Settings(max_append_bytes=1)


def leads(replica: Replica) -> bool:
    return replica.core.role is Role.LEADER


def is_marked(replica: Replica) -> bool:
    return replica.core.recovering


def acknowledged_by_two() -> Network:
    """1 leads; `a` is on 1 and 2 and committed. 3 has not got it."""
    network = Network()
    network.elect(1)
    network.isolate(3)
    network[1].propose(b"a", now_ms=network.now_ms)
    network.settle()
    assert network[1].core.committed_index == 2
    network.heal()
    return network


def marked_follower(*terms: int, term: int) -> Replica:
    """Replica 2, back from a power loss as incarnation 1, with a log of these terms."""
    network = Network(logs={2: entries_of(*terms)}, hard_states={2: HardState(term)})
    replica = network[2]
    replica.forget(0, now_ms=0)
    return replica


def noops(term: int, first: int, last: int) -> tuple[Entry, ...]:
    return tuple(Entry(index, term, b"noop", 1) for index in range(first, last + 1))


def test_pitfall_34_a_marked_grant_elects_nobody_who_lacks_what_was_forgotten() -> None:
    """2 acknowledged `a` and lost it; with its grant counted as any other, 3 would lead without `a`."""
    network = acknowledged_by_two()
    network[2].forget(1, now_ms=network.now_ms)
    network.isolate(1)
    network.pass_time(20_000)

    assert network.leaders() == [] or network.leaders() == [1]
    assert not leads(network[2]) and not leads(network[3])

    network.heal()
    network.pass_time(20_000)
    network.leader().propose(b"b", now_ms=network.now_ms)
    network.settle()
    network.pass_time(1_000)
    assert [network[replica].data for replica in (1, 2, 3)] == [[b"a", b"b"]] * 3
    assert not is_marked(network[2]) and not network[2].recovering


def test_pitfall_34_a_marked_candidate_does_not_count_its_own_grant_as_any_other() -> None:
    """The other way round: 2 itself stands, with the grant of 3 that never had `a`."""
    network = acknowledged_by_two()
    network[2].forget(1, now_ms=network.now_ms)
    network.isolate(1)
    network[2].core.campaign(now_ms=network.now_ms)
    network[2].perform()
    network.pass_time(5_000)

    assert not leads(network[2])


def test_pitfall_34_when_too_many_forgot_all_replicas_must_answer() -> None:
    """Two of three are recovering: before all have told where their logs end nobody leads."""
    network = acknowledged_by_two()
    network[2].forget(1, now_ms=network.now_ms)
    network[3].forget(0, now_ms=network.now_ms)
    network.restart(1)
    network.pass_time(20_000)
    assert network.leaders() == []

    network.release(1, 2, 3)
    network.pass_time(20_000)
    assert network.leader().data == [b"a"]
    assert not any(is_marked(network[replica]) for replica in (1, 2, 3))


def test_pitfall_34_grants_say_that_their_voter_is_marked() -> None:
    """Pre-votes and votes alike, also the refusals."""
    replica = marked_follower(1, term=1)
    replica.core.expire(now_ms=0)

    ready = replica.receive((PreVote(*head(3, 2, 2), 1, 1), ()), now_ms=0)
    assert [
        (m.granted, m.recovering) for m in sent(ready, PreVoteAnswer) if isinstance(m, PreVoteAnswer)
    ] == [(True, True)]
    ready = replica.receive((Vote(*head(3, 2, 2), 1, 1), ()), now_ms=0)
    assert [(m.granted, m.recovering) for m in sent(ready, VoteAnswer) if isinstance(m, VoteAnswer)] == [
        (True, True)
    ]


def test_pitfall_34_a_mark_does_not_fall_by_length() -> None:
    """2 has an old tail as long as the goal; what the leader has there, it has not."""
    replica = marked_follower(1, 1, 1, 1, term=3)
    replica.receive((Heartbeat(*head(1, 2, 3), 3, 1, 3, 1), ()), now_ms=0)
    assert is_marked(replica)

    replica.receive(
        (Append(*head(1, 2, 3), 0, 0, 3, 3, 3, 1), (*entries_of(1, 1), *noops(3, 3, 3))), now_ms=0
    )
    replica.sync()
    assert not is_marked(replica) and replica.core.last_index == 3


def test_pitfall_34_a_mark_does_not_fall_before_the_goal_is_on_disk() -> None:
    """What is only in memory the next power loss takes again."""
    replica = marked_follower(1, term=3)
    append = Append(*head(1, 2, 3), 1, 1, 3, 2, 3, 1)
    replica.receive((append, noops(3, 2, 3)), now_ms=0)
    assert replica.core.committed_index == 3 and is_marked(replica)

    replica.sync()
    assert not is_marked(replica)


def test_pitfall_34_a_mark_does_not_fall_before_the_term_has_committed() -> None:
    """All is matched and durable; but until this leader's first entry is committed, another may come without
    what 2 has forgotten.
    """
    replica = marked_follower(1, term=3)
    replica.receive((Append(*head(1, 2, 3), 1, 1, 1, 2, 3, 1), noops(3, 2, 3)), now_ms=0)
    replica.sync()
    assert is_marked(replica) and replica.core.committed_index == 1

    ready = replica.receive((Heartbeat(*head(1, 2, 3), 2, 0, 3, 1), ()), now_ms=0)
    assert ready.recovered and not is_marked(replica)
    assert not replica.perform().recovered, "it is said once"


def test_pitfall_34_the_goal_covers_what_was_committed_when_the_incarnation_was_heard_first() -> None:
    """2 forgot `a` to `c`, which 3 never had: with the term's first entry as goal, 2 and 3 could lead without
    them as soon as that is there.
    """
    network = Network(settings=ONE_BY_ONE)
    network.elect(1)
    network.isolate(3)
    network[1].propose(b"a", b"b", b"c", now_ms=network.now_ms)
    network.settle()
    assert network[1].core.committed_index == 4
    network[2].forget(3, now_ms=network.now_ms)
    # Two more appends pass, the first of them the probe, then 1 is gone.
    passed: list[Append] = []

    def two_appends(message: object) -> bool:
        if isinstance(message, Append) and message.receiver == 2:
            passed.append(message)
            return message.entry_count > 0 and message.prev_index > 2
        return False

    network.drop = two_appends
    network.pass_time(3_000)
    assert {m.goal for m in passed if m.receiver_incarnation == 1} == {4}
    assert network[2].core.last_index == 3 and is_marked(network[2])
    network.heal()
    network.isolate(1)
    network.pass_time(20_000)
    assert not leads(network[2]) and not leads(network[3])


def test_pitfall_34_the_goal_reaches_the_terms_first_entry() -> None:
    """A leader that has just come knows no commit index; what an earlier one committed lies below its first
    entry.
    """
    log = entries_of(1, 1, 1)
    network = Network(logs={1: log, 2: log[:1], 3: log[:1]}, hard_states={2: HardState(1), 3: HardState(1)})
    network[2].forget(0, now_ms=0)
    network.drop = lambda message: isinstance(message, Append) and message.receiver == 2
    leader = network.elect(1)
    assert leader.core.progress[2].goal == 4

    # 2 matches what it holds, and the heartbeat's commit index says nothing against it.
    network[2].receive((Append(*head(1, 2, 2), 1, 1, 1, 0, 4, 1), ()), now_ms=network.now_ms)
    network[2].sync()
    assert is_marked(network[2])
    network.heal()
    network.pass_time(3_000)
    assert network[2].core.last_index == 4 and not is_marked(network[2])


def test_pitfall_34_a_goal_for_a_former_incarnation_is_none() -> None:
    """It was fixed before the loss, and what was acknowledged after it lies above."""
    replica = marked_follower(1, term=3)
    replica.receive((Append(*head(1, 2, 3), 1, 1, 2, 1, 2, 0), noops(3, 2, 2)), now_ms=0)
    replica.sync()
    assert replica.core.committed_index == 2 and is_marked(replica)

    replica.receive((Heartbeat(*head(1, 2, 3), 2, 0, 5, 1), ()), now_ms=0)
    assert is_marked(replica)
    replica.receive((Append(*head(1, 2, 3), 2, 3, 5, 3, 5, 1), noops(3, 3, 5)), now_ms=0)
    replica.sync()
    assert not is_marked(replica)


def test_pitfall_34_a_new_leader_sets_a_new_goal() -> None:
    """What was matched with the former one, and its goal, say nothing in this term."""
    replica = marked_follower(1, term=3)
    replica.receive((Heartbeat(*head(1, 2, 3), 1, 1, 2, 1), ()), now_ms=0)
    replica.receive((Append(*head(3, 2, 4), 1, 1, 2, 1, 4, 1), noops(4, 2, 2)), now_ms=0)
    replica.sync()
    assert replica.core.committed_index == 2 and is_marked(replica)

    replica.receive((Append(*head(3, 2, 4), 2, 4, 4, 2, 4, 1), noops(4, 3, 4)), now_ms=0)
    replica.sync()
    assert not is_marked(replica)


def test_pitfall_34_a_match_does_not_outlive_its_incarnation() -> None:
    """`a` was acknowledged by 2 and forgotten; were that still counted, the leader would commit it alone."""
    network = Network()
    leader = network.elect(1)
    network.isolate(3)
    hold = [True]
    network.drop = lambda message: hold[0] and isinstance(message, AppendAnswer)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(100)
    assert leader.core.committed_index == 1
    # The acknowledgement is on its way when 2 loses power, and arrives behind the first word of its new life.
    late = AppendAnswer(*head(2, 1, leader.core.term, incarnation=0), 2)
    network[2].forget(1, now_ms=network.now_ms)
    network.packets.clear()
    word = AppendAnswer(*head(2, 1, leader.core.term, incarnation=1), 1)
    leader.receive((word, ()), now_ms=network.now_ms)
    leader.receive((late, ()), now_ms=network.now_ms)

    assert leader.core.committed_index == 1
    assert leader.core.progress[2].match_index == 1
    assert leader.core.dropped["old_incarnation"] == 1


def test_pitfall_34_a_new_incarnation_resets_the_match_and_ends_the_old_one() -> None:
    """What it acknowledged it may have lost; late acknowledgements of its former life are dropped."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    assert leader.core.progress[2].match_index == 2

    ready = leader.receive((HeartbeatAnswer(*head(2, 1, 1, incarnation=1), 0), ()), now_ms=0)
    assert leader.core.progress[2].match_index == 0
    probes = [m for m in sent(ready, Append) if isinstance(m, Append)]
    assert [(m.receiver_incarnation, m.goal) for m in probes] == [(1, 2)]
    leader.receive((AppendAnswer(*head(2, 1, 1, incarnation=0), 2), ()), now_ms=0)

    assert leader.core.progress[2].match_index == 0
    assert leader.core.dropped == {"old_incarnation": 1}


def test_a_leader_knows_of_a_voter_that_it_hears_whether_it_may_be_recovering() -> None:
    """From its first word in a new incarnation until it matches up to its goal."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    assert not any(map(leader.core.may_be_recovering, (1, 2, 3)))
    network[2].forget(1, now_ms=network.now_ms)
    leader.receive((HeartbeatAnswer(*head(2, 1, 1, incarnation=1), 0), ()), now_ms=network.now_ms)
    assert leader.core.may_be_recovering(2) and not leader.core.may_be_recovering(3)
    assert not network[3].core.may_be_recovering(2), "it does not lead"

    network.pass_time(1000)
    assert not leader.core.may_be_recovering(2)
    assert not network[2].core.recovering


def test_pitfall_34_the_goal_reaches_the_first_entry_of_the_term() -> None:
    """Not merely the commit index: what an earlier leader committed may lie between."""
    network = Network(logs={1: entries_of(1, 1)}, hard_states={1: HardState(1)})
    network.drop = lambda message: isinstance(message, Append)
    leader = network.elect(1)
    assert leader.core.committed_index == 0

    ready = leader.receive((HeartbeatAnswer(*head(2, 1, 2, incarnation=1), 0), ()), now_ms=0)

    assert [m.goal for m in sent(ready, Append) if isinstance(m, Append)] == [3]


def test_a_marked_leaders_own_mark_falls_with_its_terms_first_entry_on_its_disk() -> None:
    """Committed by the others is not enough: its own copy is what its next grants vouch for."""
    network = Network()
    network.elect(1)
    for replica in (1, 2, 3):
        network[replica].forget(0, now_ms=network.now_ms)
    network.packets.clear()
    network.release(1, 2, 3)
    network[1].core.campaign(now_ms=network.now_ms)
    network[1].perform()
    while not network.leaders():
        if network.packets:
            network.deliver_one()
            continue
        for replica in (1, 2, 3):
            network[replica].sync()
    assert network.leaders() == [1] and is_marked(network[1])
    for _ in range(10):
        while network.packets:
            network.deliver_one()
        network[2].sync()
        network[3].sync()
    assert network[1].core.committed_index == network[1].core.last_index
    assert is_marked(network[1])

    network[1].sync()
    assert not is_marked(network[1]) and not network[1].recovering


def test_a_lone_voter_that_forgot_goes_on_with_what_is_left() -> None:
    """Once it is known that there are no others: that its own log cannot tell."""
    network = Network(1)
    network.elect(1).propose(b"a", b"b", now_ms=0)
    network.settle()
    network[1].forget(1, now_ms=0)
    network.pass_time(5_000)
    assert network.leaders() == []

    network.release(1)
    network.pass_time(5_000)

    assert network.leaders() == [1] and network[1].data == [b"a"]
    assert not is_marked(network[1])


def test_an_accepted_loss_releases_those_that_answer_and_only_a_person_accepts() -> None:
    """2 and 3 forgot, 1 is gone for good: by themselves they wait for ever."""
    network = acknowledged_by_two()
    network[2].forget(1, now_ms=network.now_ms)
    network[3].forget(0, now_ms=network.now_ms)
    network[1].crash()
    network.pass_time(20_000)
    assert network.leaders() == []

    network.release(2, 3)
    network.pass_time(20_000)
    assert len(network.leaders()) == 1
    assert not is_marked(network[2]) and not is_marked(network[3])


def test_a_replica_that_holds_what_was_given_up_neither_changes_nor_counts() -> None:
    """1 comes back with a committed entry of which a person accepted the loss. Others hold another in its
    place: were it cut, readers would have seen both; were it taken for the same, it would count for entries
    it does not hold.
    """
    network = acknowledged_by_two()
    network[2].forget(1, now_ms=network.now_ms)
    network[1].crash()
    network.release(2, 3)
    network.pass_time(20_000)
    leader = network.leader()
    leader.propose(b"b", now_ms=network.now_ms)
    network.settle()
    network[1].alive = True
    network.pass_time(20_000)

    assert network[1].data == [b"a"] and leader.data == [b"b"]
    assert network[1].core.dropped["abandoned"] > 0
    assert network.leader().core.progress[1].match_index < 2


def test_pitfall_53_a_replica_that_came_back_unnoticed_learns_what_is_committed() -> None:
    """Nobody's connection broke and nothing is proposed: the leader hears from its heartbeats' answers."""
    network = Network()
    network.elect(1).propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(1_000)
    network.restart(2)
    assert network[2].core.committed_index == 0
    network.pass_time(1_000)

    assert network[2].core.committed_index == 2


@pytest.mark.parametrize(
    ("held", "incarnation", "log_regressed"),
    [
        ((3, 2), 1, False),
        ((4, 2), 1, True),
        ((3, 1), 1, True),
        ((0, 0), 1, False),
        ((4, 2), 0, False),
        ((0, 0), 2, True),
        ((0, 0), 2**40, False),
    ],
)
def test_a_replica_is_told_what_it_acknowledged_and_finds_that_its_log_was_put_back(
    held: tuple[int, int], incarnation: int, log_regressed: bool
) -> None:
    """Less than that, or another entry there; of a former incarnation it is known already. One that was put
    back to before an earlier mark is of a former incarnation itself: nobody would hear it.
    """
    replica = marked_follower(1, 2, 2, term=2)
    beat = Heartbeat(*head(1, 2, 2), 1, 1, 0, incarnation, False, *held)
    answered = bool(sent(replica.receive((beat, ()), now_ms=0), HeartbeatAnswer))

    assert replica.core.log_regressed is log_regressed
    if log_regressed:
        assert replica.core.last_incarnation == incarnation
        ready = replica.receive((PreVote(*head(3, 2, 3), 9, 9), ()), now_ms=9000)
        assert not sent(ready, PreVoteAnswer), "one that has forgotten says nothing any more"
    else:
        assert answered
