"""Administrators, nodes that come and go, and cuts, in whole clusters: replicas end where they are wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from laminar.node.catalog.controller import Controller
from laminar.node.catalog.messages.requests import TopicRequest
from laminar.node.placement.preferred_leaders import transfer
from membership.catalog import NotEnabled
from membership.records import NodeRecord
from membership.requests import AlterNode, PreferLeaders, RemoveNode
from tests.long_examples import long
from tests.sim.cuts import run_world
from tests.sim.machine import Machine
from tests.sim.scene import SOON, Scene
from tests.sim.simulation import options_of, simulate

# Seeds of `make sim` that have administrators, of groups that go down to one replica and of others.
SEEDS = [seed for seed in range(1, 40) if options_of(seed).admin_pause_s][:4]


@pytest.mark.parametrize("seed", [*SEEDS[::2], *long(*SEEDS[1::2])])
def test_whatever_administrators_want_ends_in_its_place_and_loses_nothing(seed: int) -> None:
    """Joins, drains, removals, weights, zones, pins, numbers of replicas, two at once, under all faults."""
    outcome = simulate(replace(options_of(seed), trouble_s=60.0, fault_pause_s=6.0, admin_pause_s=4.0))

    assert outcome.acknowledged > 0 and outcome.faults.total() > 0
    assert sum(count for name, count in outcome.exercised.items() if name.endswith(" updated")) > 0


def test_cuts_in_configuration_changes_lose_nothing() -> None:
    """What clients were told, beside what every replica holds at the end; `make sim-cuts` for more."""
    counted = run_world(1, rounds=3)

    assert (counted.rounds, counted.lost, counted.doubled, counted.reordered) == (3, 0, 0, 0)
    assert counted.acknowledged > 0 and counted.configurations >= 3


def settled_scene(seed: int, **settings: int) -> Scene:
    """Four nodes, and a topic that is where it is wanted."""
    own = Scene(seed, nodes=4, node_settings={**SOON, **settings}, topic_settings={})
    assert own.world.loop.run_until(lambda: not own.watch.placement.out_of_place(), at_most_s=60.0)
    return own


def test_a_node_that_comes_and_goes_moves_nothing() -> None:
    """It is never away for long enough to lose a replica, nor there for long enough to get one."""
    own = settled_scene(1, replace_after_ms=10_000, settle_ms=5000)
    world = own.world
    world.loop.run_for(15.0)
    state = world.catalog()
    assert state is not None
    leader = world.catalog_leader()
    assert leader is not None
    flapping = next(each for each in world.up if each is not leader[0] and own.partition(each) is not None)
    asked = TopicRequest("many", partitions=6, replicas=3, settings={})
    world.loop.run_until_complete(leader[1].service.ask(asked))
    before = dict(own.watch.placement.steps)
    for _ in range(10):
        flapping.kill()
        world.loop.run_for(4.0)
        flapping.start()
        world.loop.run_for(3.0)

    assert dict(own.watch.placement.steps) == before
    world.loop.run_for(60.0)
    assert not own.watch.placement.out_of_place()
    assert dict(own.watch.placement.steps) == before
    world.close()


def ask(own: Scene, change: Any) -> Any:
    """Have the catalog's leader carry out a command; returns what it says."""
    world = own.world
    assert world.loop.run_until(lambda: world.catalog_leader() is not None, at_most_s=30.0)
    leader = world.catalog_leader()
    assert leader is not None and leader[1].group is not None
    catalog = leader[1].group.catalog
    return world.loop.run_until_complete(catalog.change_placement(change))


def test_an_operators_choice_of_a_leader_stands() -> None:
    """Beside a node that restarts, and though leaders are spread evenly: others are exchanged for it."""
    own = settled_scene(3, replace_after_ms=15_000, settle_ms=1000)
    world = own.world
    leader = world.catalog_leader()
    assert leader is not None
    asked = TopicRequest("many", partitions=8, replicas=3, settings={})
    world.loop.run_until_complete(leader[1].service.ask(asked))
    assert world.loop.run_until(lambda: not own.watch.placement.led_elsewhere(), at_most_s=60.0)
    state = world.catalog()
    assert state is not None
    former = state.partitions["many/0"].preferred_leader
    chosen = next(each.node for each in state.partitions["many/0"].replicas if each.node != former)
    assert ask(own, PreferLeaders(transfer(state, "many/0", chosen))).outcome == "updated"

    def stands() -> bool:
        now = world.catalog()
        assert now is not None
        return now.partitions["many/0"].preferred_leader == chosen

    assert world.loop.run_until(lambda: not own.watch.placement.led_elsewhere() and stands(), at_most_s=60.0)
    machine = next(each for each in world.up if each.name == chosen)
    machine.kill()
    world.loop.run_for(3.0)
    machine.start()
    assert world.loop.run_until(lambda: not own.watch.placement.led_elsewhere() and stands(), at_most_s=120.0)
    world.close()


def test_a_node_that_drains_ends_with_nothing_and_may_be_removed() -> None:
    """Its name is used again by an empty folder, whose history of starts is another and shorter one; the
    former folder is refused.
    """
    own = settled_scene(2, replace_after_ms=15_000, settle_ms=1000)
    world = own.world
    own.load()
    name = own.follower().name
    machine = world.machines[name]
    for _ in range(2):
        machine.kill()
        world.loop.run_for(1.0)
        machine.start()
        world.loop.run_for(5.0)

    def node() -> Any:
        state = world.catalog()
        assert state is not None
        return state.nodes[name]

    assert ask(own, AlterNode(name, node().version, draining=True)).outcome == "updated"
    assert ask(own, AlterNode(name, 0, draining=False)).outcome == "conflict"
    assert world.loop.run_until(lambda: not own.watch.placement.out_of_place(), at_most_s=60.0)
    assert own.partition(machine) is None
    own.calm()
    _remove(own, machine, node().version)
    assert "removed" in machine.unrecoverable
    machine.wipe(name, join=tuple(each for each in world.machines if each != name))
    machine.start()
    assert world.loop.run_until(
        lambda: _follows(own, machine) and not own.watch.placement.out_of_place(), at_most_s=60.0
    )
    assert not node().draining
    world.close()


def test_a_node_that_misses_its_own_removal_finds_out() -> None:
    """Cut off then, it gets no entry of the catalog any more: it went on for good, with an old copy."""
    own = settled_scene(2, replace_after_ms=600_000, settle_ms=1000)
    world = own.world
    name = own.follower().name
    machine = world.machines[name]
    told: list[Machine] = []
    world.gave_up = told.append

    def version() -> int:
        state = world.catalog()
        assert state is not None
        return state.nodes[name].version

    assert ask(own, AlterNode(name, version(), draining=True)).outcome == "updated"
    assert world.loop.run_until(lambda: not own.watch.placement.out_of_place(), at_most_s=60.0)
    world.loop.run_for(5.0)  # its vote on the catalog goes to another
    world.cut([pair for each in world.machines if each != name for pair in ((each, name), (name, each))])
    assert ask(own, RemoveNode(name, version())).outcome == "deleted"
    world.loop.run_for(5.0)
    world.cut([])
    assert world.loop.run_until(lambda: told == [machine], at_most_s=90.0), "it does not know"
    assert "removed" in machine.unrecoverable
    world.close()


def _remove(own: Scene, machine: Machine, version: int) -> None:
    told: list[Machine] = []
    own.world.gave_up = told.append
    machine.kill()
    assert ask(own, RemoveNode(machine.name, version)).outcome == "deleted"
    machine.start()
    assert own.world.loop.run_until(lambda: told == [machine], at_most_s=30.0)


def _follows(own: Scene, machine: Machine) -> bool:
    """Whether a machine's copy of the catalog is as new as the leader's, and names it."""
    state, controller = own.world.catalog(), machine.controller
    if state is None or controller is None or controller.group is None:
        return False
    return machine.name in state.nodes and controller.group.catalog.state().version == state.version


def test_a_command_waits_until_every_program_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of an older program would stop at a command that it does not know."""
    record = Controller._own_record
    former = {"a", "b", "c"}

    def own_record(controller: Controller) -> NodeRecord:
        own = record(controller)
        return msgspec.structs.replace(own, code_version=0) if own.node in former else own

    monkeypatch.setattr(Controller, "_own_record", own_record)
    own = Scene(4, node_settings={**SOON, "settle_ms": 1000}, topic_settings={})
    former -= {"a", "c"}
    own.world.loop.run_for(10.0)
    with pytest.raises(NotEnabled):
        ask(own, AlterNode("c", 0, set_weight=2.0))
    former.clear()
    own.world.loop.run_for(10.0)

    assert ask(own, AlterNode("c", 0, set_weight=2.0)).outcome == "updated"
    own.world.close()
