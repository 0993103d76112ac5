"""Worlds of routes: `make sim-many` runs more of them (`routes.py`)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from laminar.http.api.problems import Problem
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import BeginRouteRequest, CatalogRequest, RouteProgressRequest
from membership.records import TopicRecord
from tests.long_examples import long
from tests.sim.routes import busy, options_of, simulate
from tests.sim.scene import LIGHT_PAUSE_S, REPLACED_SOON, Scene
from tests.sim.simulation import TOPIC
from tests.sim.test_lost_majority import RECOVER, leads, post


@pytest.mark.parametrize("seed", [1, *long(3, 12)])
def test_no_record_is_lost_doubled_or_out_of_order_over_changes(seed: int) -> None:
    """Partitions split, merge and move, and nodes die, lose power and are cut off at every step."""
    outcome = simulate(busy(seed))

    assert outcome.exercised["changes done"] and outcome.exercised["batches that went to an output"]
    assert outcome.exercised["commits of members"]
    assert outcome.exercised["records compared along lineages"] > outcome.acknowledged / 2


def test_the_same_seed_gives_the_same_history() -> None:
    options = replace(options_of(5), trouble_s=15.0)

    assert simulate(options).digest == simulate(options).digest


def ask(scene: Scene, request: CatalogRequest) -> CatalogAnswer:
    """Ask the catalog's leader."""
    leader = scene.world.catalog_leader()
    assert leader is not None
    machine, controller = leader
    life = next(each.life for each in machine.running.values() if each.process is controller)
    asked = scene.world.loop.start(life, controller.service.ask(request))
    assert scene.world.loop.run_until(asked.done, at_most_s=30.0), request
    return asked.result()


def topic_of(scene: Scene) -> TopicRecord:
    state = scene.world.catalog()
    assert state is not None
    return state.topics[TOPIC]


def test_a_leader_that_has_lost_its_seal_takes_no_record_and_seals_again() -> None:
    """A person gave up the replicas that had it: records here would be beside those of the outputs."""
    settings = {**REPLACED_SOON, "replace_after_ms": 0}
    scene = Scene(7, nodes=5, topic_settings={}, node_settings=settings)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    behind = scene.follower()
    behind.kill()
    holders = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)]
    begun = ask(scene, BeginRouteRequest(TOPIC, 0, [0], [30_000], "strict", 30_000))
    assert begun.result is not None and begun.result.outcome == "created", begun
    assert scene.world.loop.run_until(lambda: topic_of(scene).change is None, at_most_s=40.0)
    assert topic_of(scene).route is not None
    scene.calm()
    seals = (topic_of(scene).changes or [])[0].seals
    for machine in holders:
        machine.kill()
    scene.world.loop.run_for(5.0)
    (group,) = (each for each in scene.watch.groups.values() if each.name == f"{TOPIC}/0")
    behind.start()
    assert scene.world.loop.run_until(lambda: scene.partition(behind) is not None, at_most_s=60.0)
    partition = scene.held(behind)
    assert partition.state.succession.sealed is None
    scene.world.loop.run_for(10.0)
    # What the others had behind it is given up.
    group.give_up(partition.log.last_index)
    status, done = post(scene, behind.node, RECOVER + "?accept_loss=true")
    assert (200, [behind.node]) == (status, done["accepted"])
    taken: list[str] = []

    def refuses() -> bool:
        if not leads(scene, behind):
            return False
        try:
            waiting = partition.appends.closed()
            if waiting is not None:
                waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        except Problem as problem:
            taken.append(problem.code)
        else:
            taken.append("open" if partition.state.succession.takes_records else "waits")
        return partition.state.committed_seal is not None

    assert scene.world.loop.run_until(refuses, at_most_s=60.0), taken
    assert "open" not in taken, taken
    assert scene.world.loop.run_until(lambda: partition.kept_seal is not None, at_most_s=30.0)
    assert seals == (topic_of(scene).changes or [])[0].seals, "the end that is recorded stands"
    scene.world.close()


def test_an_input_without_a_majority_is_not_sealed_and_a_forced_change_goes_on_without_it() -> None:
    """A strict change is cancelled, and says why. A forced one's input seals itself when it is led again."""
    settings = {**REPLACED_SOON, "replace_after_ms": 0}
    scene = Scene(9, nodes=5, topic_settings={}, node_settings=settings)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    scene.calm()
    gone = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)][:2]
    for machine in gone:
        machine.kill()
    scene.world.loop.run_for(20.0)
    strict = ask(scene, BeginRouteRequest(TOPIC, 0, [0], [30_000], "strict", 8_000))
    assert strict.result is not None and strict.result.outcome == "created", strict
    assert scene.world.loop.run_until(lambda: topic_of(scene).change is None, at_most_s=30.0)
    progress = ask(scene, RouteProgressRequest(TOPIC)).progress
    assert progress is not None and "partition 0 has no leader" in progress.because, progress
    assert topic_of(scene).route is None

    forced = BeginRouteRequest(TOPIC, 0, [0], [30_000], "weak", 8_000, force=True)
    assert ask(scene, forced).result is not None
    assert scene.world.loop.run_until(lambda: topic_of(scene).route is not None, at_most_s=30.0)
    (change,) = topic_of(scene).changes or []
    assert not change.seals
    opened = [each.number for each in change.outputs]

    def all_open() -> bool:
        found = [p for number in opened for _, p in scene.watch.partitions(TOPIC, number) if p.leads]
        return [p.state.succession.status for p in found] == ["open", "open"]

    assert scene.world.loop.run_until(all_open, at_most_s=30.0)
    for machine in gone:
        machine.start()
    assert scene.world.loop.run_until(lambda: bool((topic_of(scene).changes or [])[0].seals), at_most_s=60.0)
    scene.world.close()


def test_a_closing_change_is_forced_when_an_input_is_gone_for_long() -> None:
    """The same change, asked for with `force`, opens its outputs; only if its order is weak."""
    settings = {**REPLACED_SOON, "replace_after_ms": 0}
    scene = Scene(10, nodes=5, topic_settings={}, node_settings=settings)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    scene.calm()
    began = BeginRouteRequest(TOPIC, 0, [0], [30_000], "weak", 8_000)
    holders = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)]

    def kill(step: str, name: str, node: str) -> None:
        if step == "closing":
            for machine in holders[:2]:
                scene.world.loop.call_in(None, 0.0, machine.kill)

    scene.watch.routes.on_step = kill
    assert ask(scene, began).result is not None
    scene.world.loop.run_for(15.0)
    change = topic_of(scene).change
    assert change is not None and change.state == "closing", change
    progress = ask(scene, RouteProgressRequest(TOPIC)).progress
    assert progress is not None and ["partition 0 has no leader that seals it"] == progress.waits_for

    forced = ask(scene, msgspec.structs.replace(began, force=True))
    assert forced.result is not None and forced.result.outcome == "updated", forced
    assert topic_of(scene).route is not None
    for machine in holders[:2]:
        machine.start()
    assert scene.world.loop.run_until(lambda: bool((topic_of(scene).changes or [])[0].seals), at_most_s=60.0)
    scene.world.close()


def test_a_strict_change_goes_on_with_the_copy_of_an_input_that_comes_back() -> None:
    """While no disk of the input is left there is nothing to accept; one is enough: it is sealed at once."""
    settings = {**REPLACED_SOON, "replace_after_ms": 0}
    scene = Scene(10, nodes=7, topic_settings={}, node_settings=settings)
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    scene.calm()
    holders = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)]

    def kill(step: str, name: str, node: str) -> None:
        if step == "closing":
            for machine in holders:
                scene.world.loop.call_in(None, 0.0, lambda machine=machine: machine.up and machine.kill())

    scene.watch.routes.on_step = kill
    assert ask(scene, BeginRouteRequest(TOPIC, 0, [0], [30_000], "strict", 8_000)).result is not None
    scene.world.loop.run_for(30.0)
    change = topic_of(scene).change
    assert change is not None and (change.state, change.seals) == ("closing", {}), change
    other = scene.world.up[0].node
    status, _ = post(scene, other, RECOVER + "?accept_loss=true")
    assert status == 412, "nothing to go on with"

    holders[0].start()
    assert scene.world.loop.run_until(lambda: scene.partition(holders[0]) is not None, at_most_s=60.0)
    scene.world.loop.run_for(10.0)
    status, done = post(scene, other, RECOVER + "?accept_loss=true")
    assert (200, [holders[0].node]) == (status, done["accepted"])
    assert scene.world.loop.run_until(lambda: topic_of(scene).change is None, at_most_s=60.0)
    assert [0] == list((topic_of(scene).changes or [])[0].seals)
    scene.world.close()


@pytest.mark.parametrize("seed, trouble_s", [(10, 25.0), *long((12, 60.0), (18, 60.0))])
def test_no_partition_is_reclaimed_that_a_consumer_needs(seed: int, trouble_s: float) -> None:
    """Cursors are behind, away, rewound and deleted; the rules are in `reclaim_rules.py`."""
    outcome = simulate(replace(busy(seed, reclaim_pause_s=0.5), trouble_s=trouble_s))

    assert outcome.exercised["partitions reclaimed under faults"]
    assert outcome.exercised["reclaim: not_drained"] and outcome.exercised["reclaim: 200"]
    assert outcome.exercised["cursors in reclaimed partitions"]
