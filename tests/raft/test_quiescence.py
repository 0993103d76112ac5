"""Idle groups fall quiet by agreement, and wake for anything (docs/consensus.md#quiescence)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from raft import Role
from raft.core import Core
from raft.election_timer import ElectionTimer
from raft.messages import Append, AppendAnswer, Heartbeat, HeartbeatAnswer, PreVote
from raft.quiescence import QuiesceOffer
from raft.values import Place
from tests.raft.harness import CLUSTER, GROUP, Network, Replica, noop, sent


def quiet(network: Network) -> list[int]:
    """Who is quiet."""
    return [replica.replica_id for replica in network.replicas.values() if replica.core.quiesced]


def resting(size: int = 3) -> Network:
    """A group that replica 1 leads, with one entry, fallen quiet."""
    network = Network(size)
    network.rests = True
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(1_000)
    assert quiet(network) == list(range(1, size + 1))
    return network


def test_pitfall_23_a_group_with_nothing_to_do_has_no_deadline_and_sends_nothing() -> None:
    """Thousands of idle groups would else beat five times a second each."""
    network = resting()
    readies = [len(replica.readies) for replica in network.replicas.values()]
    network.pass_time(3_600_000)

    assert [None] * 3 == [replica.core.deadline_ms() for replica in network.replicas.values()]
    assert readies == [len(replica.readies) for replica in network.replicas.values()]
    assert network.leaders() == [1]


def test_who_falls_quiet_knows_what_is_committed() -> None:
    """Readers of replicas would else wait for a commit index that nobody sends."""
    network = resting()

    assert {2} == {replica.core.committed_index for replica in network.replicas.values()}
    assert {2, 3} == set(network[1].core.quiesce_peers)
    assert [(1,), (1,)] == [tuple(network[follower].core.quiesce_peers) for follower in (2, 3)]


def test_a_new_leader_with_nothing_to_do_brings_rest_with_its_first_heartbeat() -> None:
    """Thousands may be elected at once, and beats of those that have a leader delay those that have none."""
    network = Network()
    network.rests = True
    network.elect(1)
    network.pass_time(200)

    assert quiet(network) == [1, 2, 3]


def test_a_proposal_after_the_no_op_keeps_a_new_leader_awake_at_its_first_heartbeat() -> None:
    """Where there is traffic there will be more of it."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(200)

    assert quiet(network) == []


def test_a_quiet_leader_rests_on_without_one_that_is_gone_but_never_without_a_majority() -> None:
    """Each of the others agreed; so nothing need be said, in thousands of groups, when one process ends."""
    network = resting()
    leader = network[1]
    network[3].crash()
    before = len(leader.readies)
    assert leader.core.quiesce_without([3])
    leader.perform()
    assert (leader.core.quiesced, set(leader.core.quiesce_peers)) == (True, {2})
    assert not any((*ready.messages, *ready.appends) for ready in leader.readies[before:])

    assert not leader.core.quiesce_without([2])
    assert set(leader.core.quiesce_peers) == {2}


def test_who_was_gone_when_the_group_rested_on_gets_all_when_it_is_back() -> None:
    """The leader asks where it stands: what was on its way to it may be lost."""
    network = resting()
    leader = network[1]
    network[3].crash()
    assert leader.core.quiesce_without([3])
    leader.propose(b"b", now_ms=network.now_ms)
    network.settle()
    network[3].start(now_ms=network.now_ms)
    network.pass_time(2_000)

    assert network[3].data == [b"a", b"b"]
    assert quiet(network) == [1, 2, 3]


def test_only_a_quiet_leader_rests_on() -> None:
    """A follower must find another leader, and one that is awake asks anew by itself."""
    network = resting()
    assert not network[2].core.quiesce_without([1])

    network[1].core.unquiesce(now_ms=network.now_ms)
    assert not network[1].core.quiesce_without([3])


def test_nobody_is_quiet_while_one_of_those_asked_lacks_an_entry() -> None:
    """The leader would not know when to send it."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    network.isolate(3)
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(1_400)
    assert not leader.core.quiesced

    network.heal()
    network.pass_time(2_000)
    assert quiet(network) == [1, 2, 3]
    assert network[3].data == [b"a"]


def test_a_group_rests_without_those_whose_process_is_gone_but_never_without_a_majority() -> None:
    """Else all groups of a cluster would beat while one node is away; and a minority decides nothing."""
    network = Network()
    network.rests = True
    network.elect(1)
    network[3].crash()
    network.absent = {3}
    network.pass_time(1_000)
    assert quiet(network) == [1, 2]

    network.absent = {2, 3}
    network[1].core.unquiesce(now_ms=network.now_ms)
    network.pass_time(1_000, settle=False)
    assert not network[1].core.quiesced


def test_a_follower_that_forgot_what_matched_is_asked_again_before_it_rests() -> None:
    """After a restart nothing is matched (invariant 6); the leader's own books would let it sleep unaware."""
    network = resting()
    network[2].crash()
    network[2].start(now_ms=network.now_ms)
    network[1].core.unquiesce(now_ms=network.now_ms)
    network.pass_time(1_000)

    assert quiet(network) == [1, 2, 3]
    assert network[2].core.committed_index == 2


def test_a_leader_alone_rests_at_once() -> None:
    """It has nobody to ask."""
    network = Network(1)
    network.rests = True
    network.elect(1)
    network.pass_time(400)

    assert network[1].core.quiesced
    assert not network[1].core.quiesce_peers


Request = Callable[[Core, int], object]
REQUESTS: dict[str, Request] = {
    "append": lambda core, now_ms: core.propose([noop(core.place())], now_ms=now_ms),
    "leader read": lambda core, now_ms: core.read_index(1, now_ms=now_ms),
    "hand-over": lambda core, now_ms: core.transfer_leadership(2, now_ms=now_ms),
    "news": lambda core, now_ms: core.unquiesce(now_ms=now_ms),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_a_local_request_wakes_the_leader(request_: Request) -> None:
    """And its followers, by what it sends; then all fall quiet again, the work done."""
    network = resting()
    leader = network[1]
    request_(leader.core, network.now_ms)
    leader.perform()
    assert not leader.core.quiesced
    assert leader.core.deadline_ms() is not None
    network.settle()

    network.pass_time(4_000)
    assert quiet(network) == [1, 2, 3]
    ends = {(r.core.last_index, r.core.committed_index) for r in network.replicas.values()}
    assert len(ends) == 1


def test_a_leader_read_at_a_quiet_group_is_confirmed_by_a_majority() -> None:
    """That all agreed to rest says nothing of now: another may have been elected meanwhile."""
    network = resting()
    network.isolate(1)
    network[1].core.read_index(7, now_ms=network.now_ms)
    network[1].perform()
    network.settle()
    network.pass_time(1_000)
    assert not network[1].reads

    network.heal()
    network.pass_time(400)
    assert network[1].reads == {7: 2}


def woken_by(network: Network, message: AppendAnswer | HeartbeatAnswer | PreVote, receiver: int) -> Replica:
    replica = network[receiver]
    replica.receive((message, ()), now_ms=network.now_ms)
    return replica


def test_a_follower_woken_by_another_tells_its_leader() -> None:
    """Else it would wait for heartbeats that nobody sends, and stand against a leader that lives."""
    network = resting()
    network.isolate(3)
    follower = woken_by(network, PreVote(CLUSTER, GROUP, 3, 2, 0, 2, 2, 1), 2)
    (answer,) = [m for m in sent(follower.readies[-1], HeartbeatAnswer) if isinstance(m, HeartbeatAnswer)]
    assert (answer.receiver, answer.round) == (1, 0)
    network.settle()

    assert not network[1].core.quiesced
    network.absent = {3}
    network.pass_time(5_000)
    assert (network.leaders(), network[1].core.term) == ([1], 1)
    assert {1, 2} <= set(quiet(network))


def test_one_that_wakes_while_others_still_agree_keeps_the_group_awake() -> None:
    """Or the leader would rest on somebody who keeps time, and stands soon."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    network.pass_time(399)
    leader.core.offer_quiesce()
    leader.core.expire(now_ms=400)
    offers = {m.receiver: m for m in sent(leader.perform(), Heartbeat) if isinstance(m, Heartbeat)}
    assert [True, True] == [offer.quiesce for offer in offers.values()]
    leader.receive((HeartbeatAnswer(CLUSTER, GROUP, 2, 1, 0, 1, offers[2].round, True), ()), now_ms=400)
    leader.receive((HeartbeatAnswer(CLUSTER, GROUP, 2, 1, 0, 1, 0), ()), now_ms=400)
    leader.receive((HeartbeatAnswer(CLUSTER, GROUP, 3, 1, 0, 1, offers[3].round, True), ()), now_ms=400)

    assert not leader.core.quiesced


def test_nobody_is_asked_to_rest_who_lacks_an_entry() -> None:
    """The leader's part of it: it knows by the acknowledgements, whatever a follower would answer."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    asked: list[Heartbeat] = []

    def lossy(message: object) -> bool:
        if isinstance(message, Heartbeat) and message.receiver == 3 and message.quiesce:
            asked.append(message)
        return isinstance(message, Append) and message.receiver == 3

    network.drop = lossy
    leader.propose(b"a", now_ms=0)
    network.settle()
    network.pass_time(1_400)
    assert leader.core.committed_index == 2 and network[3].core.last_index < 2
    assert asked == [] and not leader.core.quiesced


@pytest.mark.parametrize("commit", [1, 3])
def test_a_follower_does_not_rest_unless_its_log_ends_where_the_leaders_does(commit: int) -> None:
    """The follower's part of it: it lacks an entry, or knows of one that the leader has not committed."""
    network = Network()
    leader = network.elect(1)
    leader.propose(b"a", now_ms=0)
    network.settle()
    follower, term = network[2], leader.core.term
    assert follower.core.last_index == 2
    offer = Heartbeat(CLUSTER, GROUP, 1, 2, 0, term, commit, 9, quiesce=True)
    ready = follower.receive((offer, ()), now_ms=network.now_ms)
    assert not follower.core.quiesced
    assert [False] == [m.quiesce for m in sent(ready, HeartbeatAnswer) if isinstance(m, HeartbeatAnswer)]


def test_an_agreement_counts_for_the_offer_that_stands() -> None:
    """One that was withdrawn may be answered late."""
    quiescence = QuiesceOffer(no_op_index=1)
    quiescence.offer({2, 3})
    quiescence.begin(5)
    quiescence.withdraw()
    quiescence.offer({2, 3})
    quiescence.begin(9)

    assert not quiescence.is_answer(5, 2)
    assert quiescence.is_answer(9, 2)


def test_an_entry_between_offer_and_agreement_keeps_the_group_awake() -> None:
    """The agreement was to rest at another end of the log."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    network.pass_time(399)
    network.rests = False
    leader.core.offer_quiesce()
    leader.core.expire(now_ms=400)
    leader.perform()
    leader.propose(b"late", now_ms=400)
    network.settle()

    assert not leader.core.quiesced
    assert network[2].data == network[3].data == [b"late"]


def test_pitfall_42_followers_elect_when_the_one_they_rest_on_is_gone() -> None:
    """They keep no time while quiet, so whoever watches the leader's process wakes them."""
    network = resting()
    network[1].crash()
    network.pass_time(60_000)
    assert network.leaders() == []

    for follower in (2, 3):
        network[follower].core.suspect_leader(now_ms=network.now_ms)
        network[follower].perform()
    network.pass_time(400)
    assert len(network.leaders()) == 1


def test_a_wake_after_silence_counts_from_the_last_sign_of_life() -> None:
    """A group that rests fails over no later than one that beats."""
    network = resting()
    contact_ms = network.now_ms
    network[1].crash()
    network.now_ms += 1_500
    for follower in (2, 3):
        network[follower].core.unquiesce(now_ms=network.now_ms, contact_ms=contact_ms)
        network[follower].perform()
    network.pass_time(1_500 + 100)

    assert len(network.leaders()) == 1


def test_a_duplicate_of_an_old_offer_puts_nobody_to_sleep_for_long() -> None:
    """Its follower rests, the awake leader's next heartbeat wakes it."""
    network = Network()
    network.rests = True
    leader = network.elect(1)
    offers: list[Heartbeat] = []
    network.drop = lambda message: bool(
        isinstance(message, Heartbeat) and message.quiesce and not offers.append(message)  # type: ignore[func-returns-value]
    )
    network.pass_time(500)
    assert offers
    network.drop = lambda message: isinstance(message, HeartbeatAnswer) and message.quiesce
    network[2].receive((offers[0], ()), now_ms=network.now_ms)
    assert quiet(network) == [2]
    leader.core.read_index(1, now_ms=network.now_ms)
    leader.perform()
    network.settle()

    assert quiet(network) == []
    assert network[2].core.role is Role.FOLLOWER


def test_hasten_never_moves_an_election_away() -> None:
    """However many requests wait for it."""
    network = resting()
    follower = network[2]
    follower.core.suspect_leader(now_ms=network.now_ms, spread_ms=60_000)
    deadlines = []
    for _ in range(20):
        follower.core.expedite_election(now_ms=network.now_ms)
        deadlines.append(follower.core.deadline_ms())

    assert 1 == len(set(deadlines))
    assert deadlines[0] is not None and deadlines[0] <= network.now_ms + 150


def test_where_many_groups_elect_a_try_is_not_repeated_before_it_can_have_ended() -> None:
    """Repeated ballots would be most of the work of those that answer them."""
    for seed in range(50):
        timer = ElectionTimer(timeout_ms=1_500, rng=random.Random(seed), now_ms=0)
        timer.suspect(now_ms=0, spread_ms=3_000)
        assert 10 <= timer.deadline_ms <= 3_000
        timer.retry(now_ms=0)
        assert 187 <= timer.deadline_ms <= 750

        timer.expedite(now_ms=0)
        assert timer.deadline_ms <= 150


def test_an_election_is_over_when_its_winner_has_committed_in_its_term() -> None:
    """Its messages go on until then; so long it counts among those under way."""
    network = Network()
    candidate = network[1]
    electing = []
    candidate.on_ready = lambda ready: electing.append(candidate.core.is_electing)
    assert not candidate.core.is_electing
    network.elect(1)

    assert electing[0] and not electing[-1]
    assert not any(replica.core.is_electing for replica in network.replicas.values())


def test_the_place_of_the_next_entry_may_be_looked_at_without_waking() -> None:
    """Only a proposal is work."""
    network = resting()

    assert Place(3, 1, 1, 2) == network[1].core.place()
    assert network[1].core.quiesced
