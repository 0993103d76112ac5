"""Balance by load in a whole cluster: appends to all partitions of one leader, and what then moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from laminar.node.catalog import balancing
from laminar.node.catalog.balancing import PAUSE_MS, ROUND_MS, ROUNDS
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import BalanceRequest
from laminar.node.placement import load
from tests.sim.clients import Client
from tests.sim.scene import Scene
from tests.sim.simulation import TOPIC

PARTITIONS = 6
# As `load.SMALL`, for a simulated load: a few requests per second.
SMALL = (1e6, 1e6, 1e6, 1.0, 1e12)


class Hot(Client):
    """A producer that appends to a few partitions."""

    partitions_of_it: tuple[int, ...] = ()

    async def _run(self, pause_s: float) -> None:
        self.connect()
        while not self.stopping:
            await asyncio.sleep(pause_s)
            for partition in self.partitions_of_it:
                await self._append(partition)


def scene_of(*, nodes: int = 3, replicas: int = 3, **settings: Any) -> Scene:
    return Scene(
        91,
        nodes=nodes,
        replicas=replicas,
        partitions=PARTITIONS,
        topic_settings={},
        node_settings=settings,
    )


def leaders(scene: Scene) -> dict[int, str]:
    """The node that leads each partition."""
    return {
        number: machine.name
        for number in range(PARTITIONS)
        for machine, partition in scene.watch.partitions(TOPIC, number)
        if partition.leads
    }


def preferred(scene: Scene) -> dict[int, str]:
    state = scene.world.catalog()
    assert state is not None
    return {each.number: each.preferred_leader for each in state.partitions_of(TOPIC)}


def asked(scene: Scene, *, act: bool = False) -> CatalogAnswer:
    leader = scene.world.catalog_leader()
    assert leader is not None
    answer: CatalogAnswer = scene.world.loop.run_until_complete(leader[1].service.ask(BalanceRequest(act)))
    return answer


def begun(scene: Scene) -> tuple[str, tuple[int, ...]]:
    """Let every partition be led by its preferred leader, and append to all of one node's."""
    loop = scene.world.loop
    even = loop.run_until(
        lambda: (
            Counter(preferred(scene).values()) == dict.fromkeys("abc", 2)
            and leaders(scene) == preferred(scene)
        ),
        at_most_s=60.0,
    )
    assert even, (preferred(scene), leaders(scene))
    hot = leaders(scene)[0]
    numbers = tuple(number for number, name in leaders(scene).items() if name == hot)
    append_to(scene, *numbers)
    return hot, numbers


def append_to(scene: Scene, *numbers: int) -> Hot:
    """Append to these partitions until all is calm."""
    client = Hot(scene.world, scene.watch, 50, topic=TOPIC, partitions=PARTITIONS)
    client.partitions_of_it = numbers
    client.start(pause_s=0.5)
    scene.clients.append(client)
    return client


@pytest.mark.long
def test_two_hot_partitions_of_one_node_get_two_leaders_and_then_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "_SMALL", SMALL)
    scene = scene_of(balance_threshold=1.25)
    loop = scene.world.loop
    hot, numbers = begun(scene)
    loop.run_for(60.0)
    waiting = asked(scene, act=True).balance
    assert waiting is not None and not waiting.done and "loads are measured first" in waiting.because, waiting
    assert {leaders(scene)[number] for number in numbers} == {hot}

    swapped = loop.run_until(
        lambda: len({leaders(scene)[number] for number in numbers if number in leaders(scene)}) == 2,
        at_most_s=(PAUSE_MS + ROUNDS * ROUND_MS) / 1000 + 30.0,
    )
    assert swapped, asked(scene)
    before = preferred(scene)
    assert Counter(before.values()) == dict.fromkeys("abc", 2)
    loop.run_for(1.3 * PAUSE_MS / 1000)
    assert preferred(scene) == before
    rest = asked(scene).balance
    assert rest is not None and rest.move == "none" and "no move lowers that" in rest.because, rest
    scores = {node.node: node.score for node in rest.nodes}
    assert len(scores) == 3 and all(score is not None for score in scores.values())
    scene.calm()
    scene.check()


def test_it_waits_for_its_hours_and_a_request_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_SMALL", SMALL)
    scene = scene_of(balance_threshold=1.25, balance_hours="")
    loop = scene.world.loop
    for machine in scene.world.up:
        assert machine.controller is not None
        now = machine.controller.clock.wall_ms() // 3_600_000 % 24
        machine.controller.service._balancer._hours = f"{(now + 2) % 24:02}-{(now + 3) % 24:02}"
    hot, numbers = begun(scene)
    loop.run_for((PAUSE_MS + ROUNDS * ROUND_MS) / 1000 + 60.0)
    assert {leaders(scene)[number] for number in numbers} == {hot}

    dry = asked(scene).balance
    assert dry is not None and (dry.move, dry.done) == ("swap_leaders", False)
    assert {leaders(scene)[number] for number in numbers} == {hot}
    acted = asked(scene, act=True).balance
    assert acted is not None and (acted.move, acted.done) == ("swap_leaders", True)
    assert loop.run_until(
        lambda: len({leaders(scene)[number] for number in numbers if number in leaders(scene)}) == 2,
        at_most_s=30.0,
    )
    again = asked(scene, act=True).balance
    assert again is not None and not again.done and "loads are measured first" in again.because
    scene.calm()
    scene.check()


def pins(scene: Scene) -> dict[int, list[str]]:
    state = scene.world.catalog()
    assert state is not None
    return {each.number: each.pin.nodes for each in state.partitions_of(TOPIC) if each.pin is not None}


def test_an_only_replica_moves_by_a_pin_and_back_when_the_load_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing can be led elsewhere, so the planner moves a replica, and its records with it."""
    monkeypatch.setattr(load, "_SMALL", SMALL)
    monkeypatch.setattr(balancing, "PARTITION_REST_MS", 60_000)
    scene = scene_of(nodes=4, replicas=1, balance_threshold=1.25)
    loop = scene.world.loop
    assert loop.run_until(lambda: len(leaders(scene)) == PARTITIONS, at_most_s=60.0)
    home = leaders(scene)
    hot = next(name for name, count in Counter(home.values()).most_common() if count > 1)
    numbers = tuple(number for number, name in home.items() if name == hot)
    client = append_to(scene, *numbers)
    assert loop.run_until(lambda: bool(pins(scene)), at_most_s=PAUSE_MS / 1000 + 90.0), asked(scene)
    ((moved, (target,)),) = pins(scene).items()
    assert moved in numbers and target != hot
    assert loop.run_until(lambda: leaders(scene).get(moved) == target, at_most_s=60.0)

    client.stopping = True
    assert loop.run_until(
        lambda: not pins(scene) and leaders(scene) == home, at_most_s=4 * PAUSE_MS / 1000 + 900.0
    ), asked(scene)
    scene.calm()
    scene.check(replicas=1)


def test_it_is_off_by_default_and_says_so() -> None:
    scene = scene_of()
    scene.world.loop.run_for(30.0)
    off = asked(scene, act=True).balance
    assert off is not None and not off.done and off.because.startswith("balance_threshold is 0")
    assert [node.load for node in off.nodes] == [None] * 3
    scene.calm()
    scene.check()
