"""Partitions that have lost a majority of their disks: a person decides, and the lost ones come back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.leader_duties import LeaderDuties
from laminar.node.catalog.local_replica import CATALOG_NAME
from laminar.node.catalog.recovery import StoppedNode
from laminar.node.consensus.replica import TERMS_PASSED
from tests.sim.machine import DATA, Machine
from tests.sim.scene import LIGHT_PAUSE_S, REPLACED_SOON, SOON, Scene, members
from tests.sim.simulation import TOPIC
from tests.sim.test_full_disk import begin, deaths

RECOVER = f"/v1/topics/{TOPIC}/partitions/0/recover"


def post(scene: Scene, node: str, target: str) -> tuple[int, dict[str, Any]]:
    asked = begin(scene, node, "POST", target, {})
    assert scene.world.loop.run_until(asked.done, at_most_s=60.0), target
    answer = asked.result()
    return answer.status, msgspec.json.decode(answer.body) if answer.body else {}


def bereaved(seed: int, **options: object) -> tuple[Scene, Machine, list[Machine]]:
    """Five nodes, two of which held two of the three replicas and are gone; the third holds all of it."""
    settings = {**REPLACED_SOON, "replace_after_ms": 0} | dict(options.pop("node_settings", {}))  # type: ignore[call-overload]
    scene = Scene(seed, nodes=5, topic_settings={}, node_settings=settings, **options)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    scene.calm()
    holders = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)]
    survivor = scene.follower()
    gone = [machine for machine in holders if machine is not survivor]
    for machine in gone:
        machine.kill()
    scene.world.loop.run_for(20.0)
    assert not any(partition.leads for _, partition in scene.watch.partitions(TOPIC, 0))
    return scene, survivor, gone


def leads(scene: Scene, machine: Machine) -> bool:
    partition = scene.partition(machine)
    return partition is not None and partition.leads


def test_a_partition_whose_majority_is_gone_goes_on_with_what_survives_and_gets_new_replicas() -> None:
    """The answer says what may be lost; without the word nothing is done; then the rest comes by itself."""
    scene, survivor, gone = bereaved(3, node_settings={"replace_after_ms": 5000})
    asked = next(machine for machine in scene.world.up if machine is not survivor).node
    end = scene.held(survivor).log.next_offset
    names = sorted(machine.node for machine in gone)

    status, plan = post(scene, asked, RECOVER)
    assert (200, names, [survivor.node], end, []) == (
        status,
        *(plan["abandoned"], plan["answering"], plan["kept_offset"], plan["accepted"]),
    )
    scene.world.loop.run_for(20.0)
    assert not leads(scene, survivor)
    status, done = post(scene, asked, RECOVER + "?accept_loss=true")
    assert (200, [survivor.node]) == (status, done["accepted"])
    assert scene.world.loop.run_until(lambda: leads(scene, survivor), at_most_s=20.0)
    assert scene.held(survivor).end_offset == end

    def made_anew() -> bool:
        voters, learners = members(scene)
        return len(voters) == 3 and not voters & set(names) and not learners

    assert scene.world.loop.run_until(made_anew, at_most_s=120.0), members(scene)
    status, _ = post(scene, asked, RECOVER + "?accept_loss=true")
    assert status == 412, "it has a leader"
    scene.world.close()


async def _places_nothing(lead: LeaderDuties, group: CatalogGroup, *, gone: set[str], now_ms: int) -> None:
    return None


def test_those_given_up_come_back_together_and_neither_lead_nor_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were a majority. Before they hear one another they hear from the catalog what was decided, also
    where no other node has taken their places yet.
    """
    monkeypatch.setattr(LeaderDuties, "_place", _places_nothing)
    scene, survivor, gone = bereaved(4)
    status, _ = post(scene, survivor.node, RECOVER + "?accept_loss=true")
    assert status == 200
    assert scene.world.loop.run_until(lambda: leads(scene, survivor), at_most_s=20.0)
    term = scene.held(survivor).replica.core.term
    assert term > TERMS_PASSED, "those given up reach none of its terms by elections of theirs"
    led: set[str] = set()

    def watch() -> bool:
        led.update(machine.node for machine in gone if leads(scene, machine))
        return False

    for machine in gone:
        machine.start()
    for client in scene.clients:
        client.stopping = False
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_until(watch, at_most_s=40.0)
    scene.calm()

    assert set() == led
    assert leads(scene, survivor) and scene.held(survivor).replica.core.term == term
    left_behind = scene.held(survivor).replica.configuration.abandoned
    assert len(left_behind) == 2
    for machine in gone:
        partition = scene.partition(machine)
        assert partition is not None and partition.replica.replica_id in left_behind
        assert partition.replica.failure is not None
    scene.world.close()


def test_nothing_is_given_up_while_a_node_is_alive_that_does_not_answer() -> None:
    """It may hold what is to be given up: it is to be started again, or stopped for good."""
    scene, survivor, gone = bereaved(5)
    deaths(scene)
    back = gone[0]
    back.start()
    assert scene.world.loop.run_until(lambda: scene.partition(back) is not None, at_most_s=60.0)
    scene.held(back).stop(AssertionError("a mistake"))
    scene.world.loop.run_for(20.0)
    status, _ = post(scene, survivor.node, RECOVER + "?accept_loss=true")

    assert status == 412
    assert not leads(scene, survivor)
    scene.world.close()


def test_the_catalog_goes_on_with_one_of_three_and_then_its_partitions_do() -> None:
    """Two machines are lost with their disks: the folder of the third, and two words of a person."""
    scene = Scene(6, topic_settings={}, node_settings=SOON)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    scene.calm()
    survivor, *lost = scene.world.machines.values()
    end = scene.held(survivor).end_offset
    for machine in (survivor, *lost):
        machine.kill()
    node = StoppedNode(survivor.disk, DATA)
    assert 3 == len(asyncio.run(node.describe()).voters)
    epoch = asyncio.run(node.recover())
    node.close()
    catalog = next(group for group in scene.watch.groups.values() if group.name == CATALOG_NAME)
    catalog.configuration = None  # what a person decides is no step
    survivor.start()
    assert scene.world.loop.run_until(
        lambda: (led := scene.world.catalog_leader()) is not None and led[0] is survivor, at_most_s=60.0
    )
    assert survivor.controller is not None and survivor.controller.epoch == epoch
    assert scene.world.loop.run_until(lambda: scene.partition(survivor) is not None, at_most_s=60.0)
    scene.world.loop.run_for(15.0)
    assert not leads(scene, survivor)

    status, done = post(scene, survivor.node, RECOVER + "?accept_loss=true")
    assert (200, [survivor.node]) == (status, done["accepted"])
    held = scene.held(survivor)
    assert scene.world.loop.run_until(lambda: held.leads and held.end_offset == end, at_most_s=20.0)
    scene.world.close()
