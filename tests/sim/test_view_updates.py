"""Shards follow the catalog by what changed; one that has another view gets the whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest, ConfirmRequest, TopicRequest
from laminar.node.runtime.cluster_view import ViewMessage
from tests.sim.machine import Machine
from tests.sim.scene import Scene

Asking = Callable[[CatalogRequest], Awaitable[CatalogAnswer]]


def make_topic(scene: Scene, name: str) -> None:
    leader = scene.world.catalog_leader()
    assert leader is not None
    asked = TopicRequest(name, partitions=2, replicas=3, settings={})
    answer = scene.world.loop.run_until_complete(leader[1].service.ask(asked))
    assert answer.result is not None and answer.result.ok, answer


def view(machine: Machine) -> ViewMessage:
    (shard, *_) = machine.shard_processes
    assert shard.view.message is not None
    return shard.view.message


@pytest.mark.parametrize("missed", [False, True])
def test_a_shard_has_the_controllers_view_also_when_it_missed_an_update(missed: bool) -> None:
    scene = Scene(90, topic_settings={})
    world = scene.world
    world.loop.run_for(5.0)
    machine = scene.follower()
    older = view(machine)
    make_topic(scene, "first")
    world.loop.run_for(2.0)
    if missed:
        machine.shard_processes[0].view.message = older
    make_topic(scene, "second")
    world.loop.run_for(2.0)

    controller = machine.controller
    assert controller is not None
    assert {"first", "second"} <= view(machine).catalog.topics.keys()
    assert view(machine).catalog == controller.state()
    world.close()


def test_updates_and_not_whole_views_are_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole view costs what the catalog holds, for each change and each shard."""
    scene = Scene(91, topic_settings={})
    world = scene.world
    world.loop.run_for(5.0)
    whole: list[str] = []
    for machine in world.up:
        for shard in machine.shard_processes:
            taken = shard.methods["view"]

            async def counted(peer: object, payload: bytes, taken: object = taken) -> bytes:
                whole.append("view")
                return await taken(peer, payload)  # type: ignore[operator, no-any-return]

            monkeypatch.setitem(shard.methods, "view", counted)
    make_topic(scene, "first")
    world.loop.run_for(2.0)

    assert all("first" in view(machine).catalog.topics for machine in world.up)
    assert not whole
    world.close()


def test_replicas_are_made_though_their_creation_was_not_confirmed_and_no_view_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader that was asked had just lost its majority, and nothing changes since."""
    scene = Scene(92, topic_settings={})
    world = scene.world
    world.loop.run_for(5.0)
    refused: list[str] = []
    for machine in world.up:
        for shard in machine.shard_processes:
            asking = shard.ask_catalog

            async def ask(
                request: CatalogRequest, *, asking: Asking = asking, node: str = machine.node
            ) -> CatalogAnswer:
                if refused.count(node) < 2 and isinstance(request, ConfirmRequest) and request.groups:
                    refused.append(node)
                    return CatalogAnswer(error="no_leader")
                return await asking(request)

            monkeypatch.setattr(shard, "ask_catalog", ask)
    make_topic(scene, "first")
    world.loop.run_for(2.0)

    assert refused
    assert all(
        record.state == "live"
        for machine in world.up
        for record in view(machine).catalog.partitions.values()
        if record.topic == "first"
    )
    world.close()
