"""Quiet groups on real drivers: what they rest on, and what wakes them (docs/consensus.md#quiescence)."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

from laminar.node.consensus.quiescence import ELECTION_COST_MS, Notice, Quiescence
from laminar.node.transport.transport import Address, Peer, TcpAddress
from raft.configuration import Configuration
from raft.values import Role
from tests.node.trio import CALM, CALM_S, Member, Trio, batch, send, trio


async def quiet(cluster: Trio) -> None:
    """Wait until every replica is quiet."""
    await cluster.until(lambda: all(m.replica.core.quiesced for m in cluster.alive), what="all quiet")


async def at_rest(cluster: Trio) -> Member:
    """Write `x`, and wait until all have fallen quiet; returns who leads."""
    leader = await cluster.leader()
    await send(leader, batch(0, b"x"))
    await quiet(cluster)
    return leader


async def test_a_group_with_nothing_to_do_rests_on_one_beat_and_serves_at_once() -> None:
    """Its leader stays the leader, and the next append wakes it."""
    async with trio(settings=CALM) as cluster:
        leader = await at_rest(cluster)
        term = leader.replica.core.term
        await asyncio.sleep(CALM_S)
        assert all(member.replica.core.quiesced for member in cluster.alive)
        assert all(member.driver.statistics()["keepalives_sent"] for member in cluster.alive)

        await send(leader, batch(1, b"y"))
        await cluster.settled()
        await quiet(cluster)
        assert term == leader.replica.core.term
        assert [b"x", b"y"] == cluster.followers(leader)[0].values()


async def test_pitfall_42_a_quiet_leader_restarted_within_the_timeout_is_replaced() -> None:
    """Its process is there again, in another life, in which it leads nothing: the boot nonce tells."""
    async with trio() as cluster:
        leader = await at_rest(cluster)
        term = leader.replica.core.term
        await leader.kill()
        await leader.start()

        await cluster.until(
            lambda: any(m.partition.leads and m.replica.core.term > term for m in cluster.alive),
            what="a leader of a later term",
        )
        await send(await cluster.leader(), batch(1, b"y"))
        await cluster.settled()
        cluster.check_equal()


def one_that_rests() -> tuple[Quiescence, Any]:
    """A process with one quiet follower of replica 1 on node `a`."""
    core = SimpleNamespace(role=Role.FOLLOWER, leader_id=1, quiesced=True, quiesce_peers=(1,), term=1)
    replica: Any = Stub(group=b"g", core=core, nodes={1: "a", 2: "b"})
    quiescence = Quiescence(
        replicas={b"g": replica},
        election_timeout_ms=1500,
        heartbeat_ms=200,
        address_of=lambda node, replica: None,
        address_of_peer=lambda peer: None,
    )
    heard_from(quiescence, replica, 1, Peer("a", 1, b"one life"))
    return quiescence, replica


class Stub:
    """A replica, by what `Quiescence` looks at."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def heard_from(quiescence: Quiescence, replica: Any, member: int, peer: Peer) -> None:
    quiescence.member_seen(replica, member, quiescence.contact(peer, now_ms=0))


def test_pitfall_42_a_new_life_is_told_by_its_nonce_alone() -> None:
    """The end of the connection may have gone unnoticed, and the process that came back may not drive the
    group at all: its keepalives say nothing of the one that led.
    """
    quiescence, replica = one_that_rests()
    quiescence.contact(Peer("a", 1, b"one life"), now_ms=1)
    assert not quiescence.notices

    quiescence.contact(Peer("a", 1, b"another life"), now_ms=2)
    assert [Notice(replica, [1], ELECTION_COST_MS)] == quiescence.take_notices(10)
    assert not quiescence.notices


def test_pitfall_44_a_loop_that_is_always_late_still_notices_a_silent_leader() -> None:
    """One late turn is forgiven; a process that is busy for long must not take the dead for living."""
    quiescence, replica = one_that_rests()
    assert quiescence.processed(replica)
    now_ms = 0
    while now_ms < 6000 and not quiescence.notices:
        due_ms = quiescence.next_keepalive_ms(now_ms)
        assert due_ms is not None
        now_ms = due_ms + 150
        quiescence.keepalives(now_ms=now_ms, due_ms=due_ms)

    assert [[1]] == [notice.members for notice in quiescence.take_notices(10)]
    assert now_ms >= 1500 + 350, "the first was forgiven"


async def test_a_quiet_group_whose_wires_are_cut_silently_elects() -> None:
    """Nobody closes a connection: the beats stop, and the silence wakes those who rest."""
    async with trio() as cluster:
        leader = await at_rest(cluster)
        cluster.cut_off(leader.node)
        others = [member.node for member in cluster.followers(leader)]
        new = await cluster.leader(among=others)
        await send(new, batch(1, b"y"))
        cluster.heal()
        await cluster.settled()

        cluster.check_equal()
        assert [b"x", b"y"] == leader.values()


async def test_a_group_rests_without_a_member_that_is_gone_and_brings_it_up_when_it_is_back() -> None:
    """Also when nothing was asked of the group meanwhile."""
    async with trio() as cluster:
        leader = await cluster.leader()
        away = cluster.followers(leader)[0]
        await away.kill()
        await send(leader, batch(0, b"x"))
        await quiet(cluster)
        await away.start()
        await cluster.until(lambda: away.values() == [b"x"], what="it holds what it missed")

        await quiet(cluster)
        cluster.check_equal()


async def test_a_group_that_rests_without_a_member_is_not_woken_by_looking_for_it() -> None:
    """Each try to reach it is refused; that it is gone was known when the others fell quiet."""
    async with trio() as cluster:
        leader = await cluster.leader()
        away = cluster.followers(leader)[0]
        refused = 0
        lost = leader.transport.on_lost

        def count(whom: Peer | Address) -> None:
            nonlocal refused
            refused += whom == away.address
            lost(whom)

        leader.transport.on_lost = count
        await away.kill()
        await send(leader, batch(0, b"x"))
        await quiet(cluster)
        before = refused
        await cluster.until(lambda: refused >= before + 3, what="it is looked for")
        await quiet(cluster)
        woken = leader.driver.statistics()["unquiesced"]
        before = refused
        await cluster.until(lambda: refused >= before + 2, what="it is looked for again")
        assert woken == leader.driver.statistics()["unquiesced"]


async def test_a_quiet_leader_is_not_woken_by_the_end_of_one_of_its_followers() -> None:
    """It rests on the other one; and brings up the first when that is back."""
    async with trio() as cluster:
        leader = await at_rest(cluster)
        woken = leader.driver.statistics()["unquiesced"]
        away = cluster.followers(leader)[0]
        await away.kill()
        await cluster.until(lambda: len(leader.replica.core.quiesce_peers) == 1, what="it rests on one")
        assert leader.replica.core.quiesced
        assert woken == leader.driver.statistics()["unquiesced"]

        await away.start()
        await cluster.until(lambda: away.values() == [b"x"], what="it knows again what is committed")
        await quiet(cluster)
        assert 2 == len(leader.replica.core.quiesce_peers)
        await send(leader, batch(1, b"y"))
        await cluster.settled()
        cluster.check_equal()


async def test_a_quiet_leader_without_both_followers_wakes_and_steps_down() -> None:
    """Nobody may go on taking it for a leader."""
    async with trio() as cluster:
        leader = await at_rest(cluster)
        for follower in cluster.followers(leader):
            await follower.kill()
        await cluster.until(lambda: not leader.partition.leads, what="it leads no more")


async def test_a_quiet_leader_asks_anew_where_it_would_not_hear_that_a_follower_is_back() -> None:
    """A connect was refused while another connection with the same process stands: it never was away."""
    async with trio() as cluster:
        leader = await at_rest(cluster)
        woken = leader.driver.statistics()["unquiesced"]
        leader.driver.lost(cluster.followers(leader)[0].address)
        await quiet(cluster)

        assert woken + 1 == leader.driver.statistics()["unquiesced"]
        assert 2 == len(leader.replica.core.quiesce_peers)


def test_a_loss_is_news_for_the_groups_whose_leader_was_heard_from_there_last() -> None:
    """The report names the process or an address; a group whose leader has moved is not concerned."""
    where = {"a": TcpAddress("127.0.0.1", 1), "b": TcpAddress("127.0.0.1", 2)}
    replicas: dict[bytes, Any] = {}
    for group in (b"stays", b"moves"):
        core = SimpleNamespace(role=Role.FOLLOWER, leader_id=1, quiesced=False)
        replicas[group] = Stub(group=group, replica_id=2, core=core, nodes={1: "a", 2: "c"})
    quiescence = Quiescence(
        replicas=replicas,
        election_timeout_ms=1500,
        heartbeat_ms=200,
        address_of=lambda node, replica: where[node],
        address_of_peer=lambda peer: where[peer.node],
    )
    old, new = Peer("a", 1, b"one life"), Peer("b", 1, b"another")
    for replica in replicas.values():
        heard_from(quiescence, replica, 1, old)
    heard_from(quiescence, replicas[b"moves"], 1, new)

    for lost, group in ((old, b"stays"), (where["a"], b"stays"), (where["b"], b"moves"), (new, b"moves")):
        quiescence.lost(lost)
        assert [(group, [1])] == [
            (notice.replica.group, notice.members) for notice in quiescence.take_notices(9)
        ]
    quiescence.lost(TcpAddress("127.0.0.1", 3))
    assert not quiescence.notices

    where["b"] = where["a"]  # a wiped node is there again under another name, where the old one was
    quiescence.lost(where["a"])
    assert {b"stays", b"moves"} == {notice.replica.group for notice in quiescence.take_notices(9)}

    gone = [weakref.ref(replica) for replica in replicas.values()]
    for group in list(replicas):
        quiescence.removed(replicas.pop(group))
    del replica
    quiescence.lost(old)
    assert not quiescence.notices
    assert [None, None] == [each() for each in gone], "what was heard of a removed replica is kept"


def test_a_quiet_leader_looks_for_an_absent_learner_where_it_is_now() -> None:
    """Its node comes back at another address, and a learner asks no other replica for a leader."""
    where = {"b": TcpAddress("127.0.0.1", 1), "c": TcpAddress("127.0.0.1", 2)}
    core = SimpleNamespace(role=Role.LEADER, leader_id=1, quiesced=True, quiesce_peers=(2,), term=1)
    replica: Any = Stub(
        group=b"g",
        replica_id=1,
        core=core,
        nodes={1: "a", 2: "b", 3: "c"},
        configuration=Configuration((1, 2), (3,)),
    )
    quiescence = Quiescence(
        replicas={b"g": replica},
        election_timeout_ms=1500,
        heartbeat_ms=200,
        address_of=lambda node, replica: where.get(node),
        address_of_peer=lambda peer: None,
    )
    heard_from(quiescence, replica, 2, Peer("b", 1, b"one life"))
    assert quiescence.processed(replica)

    where["c"] = TcpAddress("127.0.0.1", 3)
    quiescence.addresses_changed()
    sent = quiescence.keepalives(now_ms=200, due_ms=200)
    assert [where["b"], where["c"]] == [address for address, _ in sent]
    assert 400 == quiescence.next_keepalive_ms(200)

    core.quiesced = False
    assert not quiescence.processed(replica)
    assert [] == quiescence.keepalives(now_ms=400, due_ms=400)
    assert quiescence.next_keepalive_ms(400) is None


def test_a_group_is_woken_for_a_member_whose_node_came_up_while_the_others_agreed() -> None:
    """It was absent when that was offered; nothing would ever bring it up to date."""
    core = SimpleNamespace(role=Role.LEADER, leader_id=1, quiesced=False, quiesce_peers=(2,), term=1)
    replica: Any = Stub(
        group=b"g",
        replica_id=1,
        core=core,
        nodes={1: "a", 2: "b", 3: "c"},
        configuration=Configuration((1, 2), (3,)),
    )
    quiescence = Quiescence(
        replicas={b"g": replica},
        election_timeout_ms=1500,
        heartbeat_ms=200,
        address_of=lambda node, replica: TcpAddress("127.0.0.1", 1),
        address_of_peer=lambda peer: None,
    )
    heard_from(quiescence, replica, 2, Peer("b", 1, b"one life"))
    assert [3] == quiescence.absent(replica)
    quiescence.contact(Peer("c", 1, b"one life"), now_ms=0)
    assert not quiescence.notices

    core.quiesced = True
    assert quiescence.processed(replica)
    assert [(b"g", [3])] == [(each.replica.group, each.members) for each in quiescence.take_notices(9)]


def test_a_quiet_leader_rests_on_without_a_process_though_its_node_has_another() -> None:
    """A node that is killed loses one process after another: thousands of groups would wake for each."""
    without: list[list[int]] = []

    def quiesce_without(gone: list[int]) -> bool:
        without.append(gone)
        core.quiesce_peers = tuple(each for each in core.quiesce_peers if each not in gone)
        return True

    core = SimpleNamespace(role=Role.LEADER, leader_id=1, quiesced=True, quiesce_peers=(2, 3), term=1)
    core.quiesce_without = quiesce_without
    replica: Any = Stub(
        group=b"g",
        replica_id=1,
        core=core,
        nodes={1: "a", 2: "b", 3: "c"},
        configuration=Configuration((1, 2, 3)),
    )
    quiescence = Quiescence(
        replicas={b"g": replica},
        election_timeout_ms=1500,
        heartbeat_ms=200,
        address_of=lambda node, replica: None,
        address_of_peer=lambda peer: TcpAddress(peer.node, peer.role),
    )
    process = Peer("c", 1, b"one life")
    heard_from(quiescence, replica, 2, Peer("b", 1, b"one life"))
    heard_from(quiescence, replica, 3, process)
    quiescence.contact(Peer("c", 2, b"another"), now_ms=0)
    assert quiescence.processed(replica)

    quiescence.lost(process)
    assert not quiescence.notices
    assert [[3]] == without

    quiescence.contact(process, now_ms=1)
    assert [[3]] == [each.members for each in quiescence.take_notices(9)], "it is back"
    core.quiesced = False
    assert not quiescence.processed(replica)
    core.quiesced, core.quiesce_peers = True, (2, 3)
    assert quiescence.processed(replica)

    quiescence.lost(TcpAddress("c", 1))
    assert [[3]] == [each.members for each in quiescence.take_notices(9)], (
        "it is connected: no return will be noticed"
    )
    assert [[3]] == without
