"""Partitions that get more replicas, and fewer, under load and while nodes die."""

from __future__ import annotations

from typing import Any

import pytest

from membership.catalog import NotCatalogLeader, OutcomeUnknown
from membership.records import PartitionRecord
from membership.requests import AddReplicas, AlterTopic, PlacementChange, RemoveReplica
from tests.sim.machine import Machine
from tests.sim.scene import SMALL, SOON, Scene, members
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
            await catalog.enable(1)
            return bool((await catalog.change_placement(step)).ok)
        except (NotCatalogLeader, OutcomeUnknown):
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


def replicas_wanted(scene: Scene, number: int) -> None:
    """So many replicas are asked for."""
    change(scene, lambda state: AlterTopic(TOPIC, state.topics[TOPIC].version, number))


def grow(scene: Scene) -> None:
    """The partition gets a replica on each node that has none."""
    replicas_wanted(scene, 3)

    def step(state: Any) -> AddReplicas:
        record = state.partitions[KEY]
        free = sorted(state.nodes.keys() - {each.node for each in record.replicas})
        return AddReplicas(KEY, record.group, record.version, free)

    change(scene, step)


def shrink(scene: Scene, replica_id: int) -> None:
    """One replica shall leave."""

    def step(state: Any) -> RemoveReplica:
        record = state.partitions[KEY]
        return RemoveReplica(KEY, record.group, record.version, replica_id)

    change(scene, step)


def voters(scene: Scene) -> int:
    return len(members(scene)[0]) if not members(scene)[1] else 0


def restart(machine: Machine) -> None:
    """It dies and is back at once."""
    machine.kill()
    machine.start()


def test_a_partition_grows_from_one_to_three_under_load() -> None:
    """Learners first, all of them, and then one promotion right after the other."""
    scene = scene_of(1, replicas=1, topic_settings={})
    scene.load()
    scene.world.loop.run_for(10.0)
    seen: list[tuple[int, int]] = []

    def grown() -> bool:
        names, learners = members(scene)
        if names and (len(names), learners) not in seen:
            seen.append((len(names), learners))
        return len(names) == 3

    grow(scene)

    assert scene.world.loop.run_until(grown, at_most_s=60.0), members(scene)
    assert [(1, 2), (2, 1), (3, 0)] == seen[-3:] and (2, 0) not in seen
    scene.calm()
    scene.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flush", ["commit", "interval"])
def test_a_partition_grows_while_its_nodes_die_between_the_steps(seed: int, flush: str) -> None:
    """Each of them once, the only voter among them, at every number of members."""
    settings: dict[str, int | str] = SMALL | ({"flush": flush} if flush == "interval" else {})
    scene = scene_of(10 + seed, replicas=1, topic_settings=settings, disk_s=0.01)
    loop = scene.world.loop
    scene.load()
    loop.run_for(10.0)
    grow(scene)
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
    scene.load()
    loop.run_for(10.0)
    away.kill()
    grow(scene)
    loop.run_for(30.0)
    assert ({holder}, 2) == members(scene)
    away.start()

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=60.0), members(scene)
    scene.calm()
    scene.check()


def test_a_partition_shrinks_to_one_and_the_newest_leaves_first() -> None:
    """Also when it leads: then another does, and nothing is lost. What left is deleted."""
    scene = scene_of(3, replicas=3, node_settings=SOON, topic_settings={})
    loop = scene.world.loop
    scene.load()
    loop.run_for(10.0)
    for left in (2, 1):
        replicas_wanted(scene, left)
        newest = max(record_of(scene).replicas, key=lambda each: each.replica_id)
        led = next(p for m, p in scene.watch.partitions(TOPIC, 0) if m.name == newest.node)
        leader = next(p for _, p in scene.watch.partitions(TOPIC, 0) if p.leads)
        if leader is not led:
            leader.context.driver.transfer(leader.replica, newest.replica_id)
            assert loop.run_until(lambda led=led: bool(led.leads), at_most_s=10.0)  # type: ignore[misc]
        shrink(scene, newest.replica_id)

        def gone(left: int = left) -> bool:
            record = record_of(scene)
            return voters(scene) == left and not record.leaving and not record.removed

        assert loop.run_until(gone, at_most_s=60.0), (members(scene), record_of(scene))
        assert len(scene.watch.partitions(TOPIC, 0)) == left
    scene.calm()
    scene.check(replicas=1)


def test_what_left_may_come_back_under_another_id() -> None:
    """Three, two, three: the node of the one that left gets a new one, also while it is away."""
    scene = scene_of(4, replicas=3, topic_settings=SMALL)
    loop = scene.world.loop
    scene.load()
    loop.run_for(10.0)
    replicas_wanted(scene, 2)
    newest = max(record_of(scene).replicas, key=lambda each: each.replica_id)
    shrink(scene, newest.replica_id)
    assert loop.run_until(lambda: voters(scene) == 2 and not record_of(scene).leaving, at_most_s=60.0)
    away = next(m for m in scene.world.machines.values() if m.name == newest.node)
    restart(away)
    grow(scene)

    assert loop.run_until(lambda: voters(scene) == 3, at_most_s=60.0), members(scene)
    assert newest.replica_id < max(each.replica_id for each in record_of(scene).replicas)
    scene.calm()
    scene.check()
