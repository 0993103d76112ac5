"""Rules of the SWIM core, in a simulated network."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swimprotocol.packet import Ack, Gossip, Ping, PingReq, Source
from swimprotocol.status import Status

from membership.gossip.packets import ADDRESS, LEFT, Datagram
from membership.gossip.precedence import follow, newer
from membership.gossip.swim import Swim, SwimSettings
from tests.long_examples import long
from tests.membership.gossip.swim_world import World, address

SEEDS = range(5)


def claim(name: str, clock: int, status: Status = Status.ONLINE, **metadata: bytes) -> Gossip:
    """A claim as somebody else tells it."""
    known = {ADDRESS: address(name).encode(), **metadata} if status != Status.OFFLINE else None
    return Gossip(Source("n9", b"teller"), name, clock, status, known)


@pytest.mark.parametrize("count", [2, 3, 10, *long(40)])
def test_a_join_is_known_to_all_within_log_n_rounds(count: int) -> None:
    """Rounds are gossip periods; three receivers a round leave room below 2 log2 N + 2."""
    for seed in SEEDS:
        world = World(seed)
        world.cluster(count)
        joined_ms = world.now_ms

        world.add("n200", seeds=["n0"])
        assert world.run_until(world.agreed, limit_ms=20_000)

        rounds = (world.now_ms - joined_ms) / world.settings.gossip_period_ms
        assert rounds <= 2 * math.log2(count + 1) + 2


@pytest.mark.parametrize("count", [2, 3, 10, *long(40)])
def test_a_silent_death_is_known_to_all_after_probe_and_suspicion(count: int) -> None:
    """First suspect, then offline: some seconds, growing with log N only."""
    for seed in SEEDS:
        world = World(seed)
        names = world.cluster(count)
        died_ms = world.now_ms

        world.kill(names[-1])
        assert world.run_until(partial(world.all_see, names[-1], Status.OFFLINE), limit_ms=20_000)

        assert world.now_ms - died_ms <= 7_000 + 3_000 * max(0.0, math.log10(count) - 0.3)
        assert {names[-1]} == {name for _, _, name, status in world.declared if status != Status.ONLINE}


def test_a_farewell_needs_no_suspicion() -> None:
    """A member that goes is offline everywhere within a few rounds, also where it is told second-hand."""
    world = World(1)
    world.cluster(20)
    world.declared.clear()
    leaving = world.members["n7"]

    leaving.leave()
    world._collect("n7")
    world.kill("n7")

    assert world.run_until(partial(world.all_see, "n7", Status.OFFLINE), limit_ms=2_000)
    assert {Status.OFFLINE} == {status for _, _, name, status in world.declared if name == "n7"}
    assert leaving.deadline_ms() is None


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_pitfall_24_lossy_links_never_bury_the_living(loss: float) -> None:
    """Five minutes of ten members with lost datagrams: suspicions, all refuted, and nobody offline."""
    world = World(7, loss=loss)
    world.cluster(10)
    world.declared.clear()

    world.run(300_000)

    statuses = Counter(status for _, _, _, status in world.declared)
    assert statuses[Status.OFFLINE] == 0
    assert statuses[Status.SUSPECT] > 0
    assert world.run_until(world.agreed, limit_ms=5_000)


def test_one_cut_link_leaves_both_ends_online() -> None:
    """Others try in their place (ping-req): a link is not a member."""
    world = World(3)
    world.cluster(5)
    world.declared.clear()
    world.cut = lambda sender, receiver: {sender, receiver} == {"n1", "n2"}

    world.run(60_000)

    assert world.declared == []
    assert world.agreed()


def test_a_member_cut_off_from_all_is_offline_and_comes_back() -> None:
    """After a partition both sides find each other without being told, and nobody else is buried on the
    way.
    """
    world = World(4)
    names = world.cluster(6)
    world.cut = lambda sender, receiver: (sender in ("n4", "n5")) != (receiver in ("n4", "n5"))
    world.run(15_000)
    assert {"n0", "n1", "n2", "n3"} == world.online("n0")
    assert {"n4", "n5"} == world.online("n4")
    world.declared.clear()

    world.cut = lambda sender, receiver: False

    assert world.run_until(world.agreed, limit_ms=15_000)
    world.run(20_000)
    assert world.agreed()
    assert not [d for d in world.declared if d[3] == Status.OFFLINE]
    assert len(names) == 6


def test_a_long_partition_heals_through_the_seeds() -> None:
    """Also when each side has forgotten the other."""
    world = World(5)
    world.cluster(4)
    world.cut = lambda sender, receiver: (sender == "n3") != (receiver == "n3")
    world.run(120_000)
    assert world.status("n0", "n3") is None
    assert world.members["n3"].peers == {}

    world.cut = lambda sender, receiver: False

    assert world.run_until(world.agreed, limit_ms=10_000)


def test_pitfall_24_a_stalled_loop_does_not_accuse_others() -> None:
    """Lifeguard: woken late, a member extends every deadline and doubts itself."""
    world = World(6)
    world.cluster(5)
    swim = world.members["n2"]

    def probing() -> bool:
        return swim._probe is not None and not swim._probe.answered

    for _ in range(10):
        world.run_until(probing, limit_ms=2_000)
        world.declared.clear()
        world.stall("n2", 2_500)
        world.run(10_000)

        accused = {name for _, _, name, status in world.declared if status != Status.ONLINE}
        assert accused <= {"n2"}
        assert not [d for d in world.declared if d[3] == Status.OFFLINE]
    assert world.agreed()


def test_doubt_grows_with_lateness_and_goes_with_answers() -> None:
    """It stretches the own timeouts while it lasts, up to a bound."""
    world = World(8)
    world.cluster(3)
    world.stall("n1", 2_000)
    world.run(2_100)
    stalled = world.members["n1"].doubt

    world.run(20_000)

    assert stalled > 0
    assert world.members["n1"].doubt == 0


def test_a_suspected_member_refutes_with_a_higher_clock() -> None:
    """Only the member itself raises its clock."""
    world = World(9)
    world.cluster(4)
    clock = world.members["n1"].own.clock

    world.deliver("n2", "n3", Datagram(claim("n1", clock, Status.SUSPECT)))
    assert world.status("n2", "n1") == Status.SUSPECT

    assert world.run_until(world.agreed, limit_ms=2_500)
    assert world.members["n1"].own.clock == clock + 1
    assert world.members["n1"].refutations == 1


def test_a_restarted_member_is_back_at_once_and_old_news_do_not_undo_it() -> None:
    """Its clock starts higher; claims about its former life are too old to count."""
    world = World(10)
    world.cluster(4)
    old = world.members["n2"].own.clock
    world.kill("n2")
    world.run(8_000)
    assert world.status("n0", "n2") == Status.OFFLINE

    world.add("n2", seeds=["n0"])
    assert world.run_until(world.agreed, limit_ms=2_000)
    world.deliver("n0", "n3", Datagram(claim("n2", old, Status.OFFLINE)))

    assert world.agreed()


def test_a_member_whose_clock_went_back_catches_up() -> None:
    """It hears of its former life's death and takes a higher clock."""
    world = World(11)
    world.cluster(4)
    world.kill("n2")
    world.run(8_000)

    world.add("n2", seeds=["n0"], clock=1)

    assert world.run_until(world.agreed, limit_ms=5_000)


def test_new_metadata_reach_all() -> None:
    """The newest word of a member about itself counts."""
    world = World(12)
    world.cluster(6)

    world.members["n4"].set_metadata({ADDRESS: address("n4").encode(), "shards": b"8"})

    def told() -> bool:
        claims = [swim.peers["n4"].claim for name, swim in world.members.items() if name != "n4"]
        return all((known.metadata or {}).get("shards") == b"8" for known in claims)

    assert world.run_until(told, limit_ms=2_000)
    assert world.agreed()


def test_metadata_longer_than_a_datagram_are_refused() -> None:
    """And what was said before stays."""
    world = World(13)
    swim = world.add("n0")
    own = swim.own

    with pytest.raises(ValueError, match="800"):
        swim.set_metadata({ADDRESS: b"10.0.0.0:7000", "pad": b"x" * 801})

    assert swim.own == own


def test_no_datagram_is_longer_than_the_limit_however_much_there_is_to_tell() -> None:
    """A long member list goes in several; the world asserts the bound on each datagram."""
    world = World(14)
    world.cluster(30, size=500)

    assert 1_000 < world.longest <= world.settings.max_body_bytes


def test_a_cluster_at_rest_falls_silent_but_for_probes() -> None:
    """Each piece of news is told at most factor * log2 N times by each; then a member sends a ping and an
    ack.
    """
    world = World(15)
    world.cluster(10)
    world.run(10_000)
    sent = world.sent

    world.run(60_000)

    assert (world.sent - sent) / 60 / 10 < 2.5


# Faults found by running swim-protocol 0.6.3, each mended here.


def test_failure_detection_goes_on_after_a_time_without_any_peer() -> None:
    """swim-protocol: with no peers an assertion ends failure detection for good."""
    world = World(20)
    world.add("n0")
    world.run(10_000)

    world.add("n1", seeds=["n0"])
    assert world.run_until(world.agreed, limit_ms=2_000)
    world.kill("n1")

    assert world.run_until(lambda: world.status("n0", "n1") == Status.OFFLINE, limit_ms=10_000)


def test_every_live_member_is_probed_in_every_round() -> None:
    """swim-protocol: WeakShuffle loses live members when others go, and a lost one is never probed again."""
    world = World(21)
    world.cluster(8)
    for name in ("n6", "n7"):
        world.kill(name)
    world.run(10_000)
    world.add("n6", seeds=["n0"])
    world.run(10_000)
    swim = world.members["n0"]
    live = world.members.keys() - {"n0"}

    for _ in range(20):
        swim._round.clear()
        targets = []
        for _ in live:
            target = swim._next_target()
            assert target is not None
            targets.append(target.claim.name)
        assert live == set(targets)


@pytest.mark.parametrize("others", [0, 1, 2, 3, 5])
def test_asking_for_more_helpers_than_there_are_ends(others: int) -> None:
    """swim-protocol: find(3) can loop for ever, and find(exclude=) returns the excluded."""
    world = World(22)
    world.cluster(others + 2)
    swim = world.members["n0"]

    for _ in range(50):
        helpers = swim._some_available(3, besides="n1")
        names = {helper.claim.name for helper in helpers}
        assert len(names) == len(helpers) == min(3, others)
        assert names <= world.members.keys() - {"n0", "n1"}


def test_the_target_of_a_probe_is_not_asked_to_probe_itself() -> None:
    """swim-protocol: find(exclude=) returns the excluded, in a third of draws among three."""
    world = World(27)
    world.cluster(3)
    world.kill("n1")
    asked: list[str] = []
    swim = world.members["n0"]
    collect = world._collect

    def watch(name: str) -> None:
        asked.extend(to for to, datagram in swim._outbox if isinstance(datagram.packet, PingReq))
        collect(name)

    world._collect = watch  # type: ignore[method-assign]

    world.run(3_000)

    assert {address("n2")} == set(asked)


def test_a_doubted_member_is_told_by_whoever_meets_it() -> None:
    """In the ping that is sent to it and in the answer to its own: only it can refute."""
    world = World(28)
    world.cluster(2)
    swim, clock = world.members["n0"], world.members["n1"].own.clock
    swim.receive(Datagram(claim("n1", clock, Status.SUSPECT)), sender=address("n2"), now_ms=world.now_ms)
    swim._piggyback.discard("n1")

    swim._ping(swim.peers["n1"])
    ping = Datagram(Ping(world.members["n1"].source), 1)
    swim.receive(ping, sender=address("n1"), now_ms=world.now_ms)

    told = [[(u.name, u.status) for u in datagram.updates] for _, datagram in swim.take_outbox()]
    assert 2 == len(told)
    assert all(("n1", Status.SUSPECT) in updates for updates in told)


def test_an_answer_to_a_former_life_is_passed_over() -> None:
    """swim-protocol: a GossipAck of a former life ends the packet handler with an assertion."""
    world = World(23)
    world.cluster(3)
    former = world.members["n1"]
    world.kill("n1")
    swim = world.add("n1", seeds=["n0"])
    assert world.run_until(world.agreed, limit_ms=5_000)
    before = (swim._probe, swim.doubt)

    for number in (former._number, 0, 1 << 61):
        world.deliver("n1", "n0", Datagram(Ack(world.members["n0"].source), number))
    world.deliver("n1", "n1", Datagram(Ping(former.source)))

    assert before == (swim._probe, swim.doubt)
    assert swim.namesakes == 1
    world.run(20_000)
    assert world.agreed()


def test_dead_members_are_forgotten_and_nobody_brings_them_back() -> None:
    """swim-protocol: members are never forgotten."""
    world = World(24)
    world.cluster(6)
    world.kill("n5")
    world.run(world.settings.remember_ms + 15_000)
    assert all("n5" not in swim.peers for swim in world.members.values())

    for metadata in (None, {LEFT: b""}, claim("n5", 1).metadata):
        news = replace(claim("n5", 10**9, Status.OFFLINE), metadata=metadata)
        world.deliver("n0", "n1", Datagram(news))
    world.run(30_000)

    assert all("n5" not in swim.peers for swim in world.members.values())


def test_a_ping_req_for_a_stranger_is_passed_over() -> None:
    """swim-protocol makes a member of any name it is asked to ping."""
    world = World(25)
    world.cluster(2)

    world.deliver("n0", "n1", Datagram(PingReq(world.members["n1"].source, "n77"), 5))

    assert {"n1"} == world.members["n0"].peers.keys()


def test_relays_are_bounded() -> None:
    """A peer that asks for ping after ping can't fill the memory."""
    world = World(26)
    world.cluster(3)
    request = Datagram(PingReq(world.members["n1"].source, "n2"), 5)

    for _ in range(3_000):
        world.deliver("n0", "n1", request)

    assert len(world.members["n0"]._relays) == 1_000
    world.run(10_000)
    assert world.members["n0"]._relays == {}


statuses = st.sampled_from([Status.ONLINE, Status.SUSPECT, Status.OFFLINE])
claims = st.builds(
    lambda clock, status, left: replace(
        claim("n1", clock, status),
        metadata={LEFT: b""} if left and status == Status.OFFLINE else claim("n1", clock, status).metadata,
    ),
    st.integers(0, 3),
    statuses,
    st.booleans(),
)


@given(st.lists(claims, max_size=12))
def test_claims_about_a_member_only_move_forward(updates: list[Gossip]) -> None:
    """By clock, then severity; a second-hand death of an online member makes a suspect; metadata is never
    lost.
    """
    known = claim("n1", 0)
    for update in updates:
        if not newer(update, known):
            continue
        after = follow(update, known)
        farewell = update.metadata is not None and LEFT in update.metadata
        if known.status == Status.ONLINE and not farewell:
            assert after.status != Status.OFFLINE
        assert newer(after, known)
        assert after.metadata is not None and ADDRESS in after.metadata
        known = after


@given(st.data())
def test_any_datagrams_leave_a_core_that_goes_on(data: st.DataObject) -> None:
    """Whatever authenticated members say in whatever order: it stays itself, bounded, and has a deadline."""
    settings = SwimSettings()
    me = Source("n0", b"me")
    swim = Swim(
        source=me,
        clock=5,
        metadata={ADDRESS: address("n0").encode()},
        settings=settings,
        rng=random.Random(0),
        now_ms=0,
    )
    now_ms = 0
    names = st.sampled_from(["n0", "n1", "n2", "n3"])
    for _ in range(data.draw(st.integers(1, 15))):
        now_ms += data.draw(st.integers(0, 4_000))
        source = Source(data.draw(names), b"other")
        updates = tuple(
            claim(data.draw(names), data.draw(st.integers(0, 9)), data.draw(statuses))
            for _ in range(data.draw(st.integers(0, 3)))
        )
        packet = data.draw(
            st.sampled_from(
                [Ping(source), Ack(source), PingReq(source, "n2"), claim("n0", 7, Status.OFFLINE)]
            )
        )
        swim.receive(
            Datagram(packet, data.draw(st.integers(0, 3)), data.draw(st.booleans()), updates),
            sender=address("n1"),
            now_ms=now_ms,
        )
        swim.expire(now_ms=now_ms)
        swim.take_outbox()

        deadline_ms = swim.deadline_ms()
        assert deadline_ms is not None and deadline_ms > now_ms
        assert (swim.own.name, swim.own.status) == ("n0", Status.ONLINE)
        assert "n0" not in swim.peers
        assert 0 <= swim.doubt <= settings.max_doubt
