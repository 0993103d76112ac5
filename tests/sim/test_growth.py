"""Partitions that get more replicas, fewer, and other leaders, under load and while nodes die."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from membership.catalog import NotCatalogLeader, NotEnabled, OutcomeUnknown
from membership.records import PartitionRecord, Pin, ReplicaRecord
from membership.requests import AlterNode, PinPartition, PlacementChange, PreferLeaders
from tests.long_examples import long
from tests.sim.machine import Machine
from tests.sim.scene import LIGHT_PAUSE_S, SMALL, SOON, Scene, members
from tests.sim.simulation import TOPIC

KEY = f"{TOPIC}/0"


def scene_of(seed: int, *, replicas: int, **options: object) -> Scene:
    """Three nodes and one partition with so many replicas, small segments."""
    return Scene(seed, replicas=replicas, **options)


def record_of(scene: Scene) -> PartitionRecord:
    """The partition in the catalog."""
    state = scene.world.catalog()
    assert state is not None
    return state.partitions[KEY]


def change(scene: Scene, wanted: Any) -> None:
    """Change the catalog: `wanted(state)` is decided on its leader's state, again until it is carried out."""
    loop = scene.world.loop

    async def ask(catalog: Any, step: PlacementChange) -> bool:
        try:
            return bool((await catalog.change_placement(step)).ok)
        except (NotCatalogLeader, NotEnabled, OutcomeUnknown):
            return False

    def asked() -> bool:
        leader = scene.world.catalog_leader()
        if leader is None or leader[1].group is None:
            return False
        machine, controller = leader
        life = next(each.life for each in machine.running.values() if each.process is controller)
        answer = loop.start(life, ask(leader[1].group.catalog, wanted(controller.state())))
        return loop.run_until(answer.done, at_most_s=10.0) and answer.result() is True

    for _ in range(20):
        if asked():
            return
        loop.run_for(1.0)
    raise AssertionError(f"the catalog refuses {wanted(scene.world.catalog())}")


def pin(scene: Scene, *nodes: str) -> None:
    """These nodes shall hold the partition, and no others; the planner adds and removes replicas."""
    wanted = Pin(list(nodes), "operator", "a test")
    change(scene, lambda state: PinPartition(KEY, state.partitions[KEY].version, wanted))


def all_nodes(scene: Scene) -> list[str]:
    return sorted(machine.name for machine in scene.world.machines.values())


def newest_of(scene: Scene) -> ReplicaRecord:
    """The replica with the highest id of those that are placed."""
    return max(record_of(scene).replicas, key=lambda each: each.replica_id)


def voters(scene: Scene) -> int:
    return len(members(scene)[0]) if not members(scene)[1] else 0


def restart(machine: Machine) -> None:
    """It dies and is back at once."""
    machine.kill()
    machine.start()


def test_a_partition_grows_from_one_to_three_under_load() -> None:
    """Learners first, all of them, and then one promotion right after the other."""
    scene = scene_of(1, replicas=1, topic_settings={})
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    seen: list[tuple[int, int]] = []

    def grown() -> bool:
        names, learners = members(scene)
        if names and (len(names), learners) not in seen:
            seen.append((len(names), learners))
        return len(names) == 3

    pin(scene, *all_nodes(scene))

    assert scene.world.loop.run_until(grown, at_most_s=60.0), members(scene)
    assert [(1, 2), (2, 1), (3, 0)] == seen[-3:] and (2, 0) not in seen
    scene.calm()
    scene.check()


@pytest.mark.parametrize("seed", [0, *long(1, 2)])
@pytest.mark.parametrize("flush", ["commit", "interval"])
def test_a_partition_grows_while_its_nodes_die_between_the_steps(seed: int, flush: str) -> None:
    """Each of them once, the only voter among them, at every number of members."""
    settings: dict[str, int | str] = SMALL | ({"flush": flush} if flush == "interval" else {})
    scene = scene_of(10 + seed, replicas=1, topic_settings=settings, disk_s=0.01)
    loop = scene.world.loop
    scene.load()
    loop.run_for(10.0)
    pin(scene, *all_nodes(scene))
    nodes = sorted(scene.world.machines)
    for number in range(9):
        known = [(p.leads, p.replica.configuration) for _, p in scene.watch.partitions(TOPIC, 0)]
        loop.run_until(
            lambda known=known: (
                known  # type: ignore[misc]
                != [(p.leads, p.replica.configuration) for _, p in scene.watch.partitions(TOPIC, 0)]
            ),
            at_most_s=3.0,
        )
        restart(scene.world.machines[nodes[(seed + number) % 3]])

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=120.0), members(scene)
    scene.calm()
    scene.check()


def test_no_learner_votes_while_another_is_away() -> None:
    """Its node dies before it is filled: the only voter goes on alone, and needs nobody."""
    scene = scene_of(2, replicas=1, topic_settings={})
    loop = scene.world.loop
    (holder,) = members(scene)[0]
    away = scene.world.machines["b" if holder == "c" else "c"]
    loop.run_for(10.0)
    scene.load(pause_s=LIGHT_PAUSE_S)
    pin(scene, *all_nodes(scene))
    assert loop.run_until(lambda: len(record_of(scene).replicas) == 3, at_most_s=60.0)
    away.kill()
    loop.run_for(30.0)
    assert ({holder}, 2) == members(scene)
    away.start()

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=60.0), members(scene)
    scene.calm()
    scene.check()


def test_an_only_voter_that_lost_its_power_leads_again_once_those_that_join_have_answered() -> None:
    """It may have forgotten that one of them votes. They hold less than it does, so nobody else can lead."""
    interval: dict[str, int | str] = {"flush": "interval", "flush_interval_ms": 500}
    scene = scene_of(8, replicas=1, topic_settings=interval)
    loop = scene.world.loop
    (holder,) = members(scene)[0]
    loop.run_for(10.0)
    scene.load()
    pin(scene, *all_nodes(scene))
    assert loop.run_until(lambda: len(record_of(scene).replicas) == 3, at_most_s=60.0)
    others = [machine for machine in scene.world.machines.values() if machine.name != holder]
    for machine in others:
        machine.kill()
    loop.run_for(5.0)
    scene.world.losing()
    scene.world.machines[holder].lose_power(keep=0.0)
    for machine in scene.world.machines.values():
        machine.start()

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=120.0), members(scene)
    scene.calm()
    scene.check()


def test_a_partition_shrinks_to_one_and_the_newest_leaves_first() -> None:
    """Also when it leads: then another does, and nothing is lost. What left is deleted."""
    scene = scene_of(3, replicas=3, node_settings=SOON, topic_settings={})
    loop = scene.world.loop
    scene.load(pause_s=LIGHT_PAUSE_S)
    loop.run_for(10.0)
    for left in (2, 1):
        newest = newest_of(scene)
        led = next(p for m, p in scene.watch.partitions(TOPIC, 0) if m.name == newest.node)
        leader = next(p for _, p in scene.watch.partitions(TOPIC, 0) if p.leads)
        if leader is not led:
            leader.context.driver.transfer(leader.replica, newest.replica_id)
            assert loop.run_until(lambda led=led: bool(led.leads), at_most_s=10.0)  # type: ignore[misc]
        pin(scene, *(each.node for each in record_of(scene).replicas if each is not newest))

        def gone(left: int = left) -> bool:
            record = record_of(scene)
            return voters(scene) == left and not record.leaving and not record.removed

        assert loop.run_until(gone, at_most_s=60.0), (members(scene), record_of(scene))
        assert len(scene.watch.partitions(TOPIC, 0)) == left
    scene.calm()
    scene.check(replicas=1)


def leader_of(scene: Scene) -> str:
    """The node that leads the partition; empty when none does."""
    return next((m.name for m, p in scene.watch.partitions(TOPIC, 0) if p.leads), "")


def counted(scene: Scene) -> dict[str, int]:
    """What the shards of all nodes that are up count of hand-overs."""
    every = [shard.leaders.statistics() for machine in scene.world.up for shard in machine.shard_processes]
    return {name: sum(each[name] for each in every) for name in every[0]}


def test_leaders_follow_the_preferred_leader_under_load() -> None:
    """From node to node, one hand-over each; after a restart of that node it leads again, once it is calm."""
    scene = scene_of(5, replicas=3, topic_settings={})
    loop = scene.world.loop
    scene.load(pause_s=0.2)
    loop.run_for(10.0)
    first = leader_of(scene)
    others = sorted(scene.world.machines.keys() - {first})
    for node in (*others, first):
        change(scene, lambda state, node=node: PreferLeaders({KEY: node}))
        assert loop.run_until(lambda node=node: leader_of(scene) == node, at_most_s=15.0), node  # type: ignore[misc]
    loop.run_for(5.0)
    assert (3, 0, 0) == tuple(counted(scene).values())

    restart(scene.world.machines[first])
    assert loop.run_until(lambda: leader_of(scene) not in ("", first), at_most_s=15.0)
    assert loop.run_until(lambda: leader_of(scene) == first, at_most_s=30.0)
    loop.run_for(30.0)
    assert leader_of(scene) == first
    scene.calm()
    scene.check()


def test_what_was_proposed_before_a_hand_over_is_answered_and_nothing_after_it_is_taken() -> None:
    """The next leader has it all; what comes later is refused as not applied, so it may be sent again."""
    scene = scene_of(9, replicas=3, topic_settings={})
    loop = scene.world.loop
    loop.run_for(10.0)
    former = leader_of(scene)
    partition = next(p for m, p in scene.watch.partitions(TOPIC, 0) if m.name == former)
    heir = next(
        each for each in partition.replica.configuration.voters if each != partition.replica.replica_id
    )
    before = partition.end_offset
    answer = partition.appends.append_records(Records([b"before"]))
    loop.run_for(0.0)
    assert partition.log.next_offset == before + 1 and not answer.done(), "it is to be proposed only"
    partition.context.driver.transfer(partition.replica, heir)
    assert not partition.leads
    refused = partition.appends.append_records(Records([b"after"]))
    assert loop.run_until(refused.done, at_most_s=10.0)
    problem = refused.exception()
    assert isinstance(problem, Problem)
    assert ("not_leader", "not_applied") == (problem.code, problem.outcome)

    assert loop.run_until(answer.done, at_most_s=10.0)
    assert before == answer.result().offset
    assert loop.run_until(lambda: leader_of(scene) not in ("", former), at_most_s=10.0)
    scene.calm()
    scene.check()


def test_a_group_that_leads_itself_elsewhere_again_and_again_does_not_oscillate() -> None:
    """Its preferred leader loses the leadership each time: the hand-overs become rare."""
    scene = scene_of(6, replicas=3, topic_settings={})
    loop = scene.world.loop
    scene.load(pause_s=0.4)
    loop.run_for(10.0)
    away = next(node for node in scene.world.machines if node != leader_of(scene))
    change(scene, lambda state: PreferLeaders({KEY: away}))
    for _ in range(240):
        loop.run_for(0.5)
        partition = next((p for m, p in scene.watch.partitions(TOPIC, 0) if p.leads and m.name == away), None)
        if partition is not None:
            voters_ = partition.replica.configuration.voters
            other = next(each for each in voters_ if each != partition.replica.replica_id)
            partition.context.driver.transfer(partition.replica, other)
    assert counted(scene)["handed_over"] <= 10
    scene.calm()
    scene.check()


def test_after_a_rolling_restart_leaders_are_spread_again_within_a_minute() -> None:
    """Each node leads a third; while it was away the others led its share."""
    scene = scene_of(20, replicas=3, partitions=12, clients=0, topic_settings={})
    loop = scene.world.loop

    def spread() -> list[int]:
        led = Counter(
            machine.name
            for number in range(12)
            for machine, partition in scene.watch.partitions(TOPIC, number)
            if partition.leads
        )
        return sorted(led.values())

    assert loop.run_until(lambda: spread() == [4, 4, 4], at_most_s=60.0), spread()
    for machine in scene.world.machines.values():
        machine.kill()
        loop.run_for(5.0)
        machine.start()
        loop.run_for(5.0)
    assert spread() != [4, 4, 4]
    assert loop.run_until(lambda: spread() == [4, 4, 4], at_most_s=60.0), spread()
    scene.world.close()


def test_a_draining_node_leads_nothing() -> None:
    """It hands over at once, though it is preferred, and takes nothing while others die."""
    scene = scene_of(7, replicas=3, topic_settings={})
    loop = scene.world.loop
    scene.load(pause_s=LIGHT_PAUSE_S)
    loop.run_for(10.0)
    first = leader_of(scene)
    change(scene, lambda state: PreferLeaders({KEY: first}))
    change(scene, lambda state: AlterNode(first, state.nodes[first].version, draining=True))
    assert loop.run_until(lambda: leader_of(scene) not in ("", first), at_most_s=3.0)
    for node in sorted(scene.world.machines.keys() - {first}):
        restart(scene.world.machines[node])
        loop.run_for(10.0)
        assert leader_of(scene) not in ("", first)
    change(scene, lambda state: AlterNode(first, state.nodes[first].version, draining=False))
    change(scene, lambda state: PreferLeaders({KEY: first}))
    assert loop.run_until(lambda: leader_of(scene) == first, at_most_s=30.0)
    scene.calm()
    scene.check()


def test_what_left_may_come_back_under_another_id() -> None:
    """Three, two, three: the node of the one that left gets a new one, also while it is away."""
    scene = scene_of(4, replicas=3, topic_settings=SMALL)
    loop = scene.world.loop
    scene.load()
    loop.run_for(10.0)
    newest = newest_of(scene)
    pin(scene, *(node for node in all_nodes(scene) if node != newest.node))
    assert loop.run_until(lambda: voters(scene) == 2 and not record_of(scene).leaving, at_most_s=60.0)
    away = next(m for m in scene.world.machines.values() if m.name == newest.node)
    restart(away)
    pin(scene, *all_nodes(scene))

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=60.0), members(scene)
    assert newest.replica_id < max(each.replica_id for each in record_of(scene).replicas)
    scene.calm()
    scene.check()
