"""Where the catalog's leader places new replicas, in whole clusters."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.node.catalog.controller import Controller
from laminar.node.catalog.messages.requests import (
    ConfirmRequest,
    DeleteTopicRequest,
    PlacementRequest,
    TopicRequest,
)
from laminar.node.transport.rpc import PeerLost
from membership.catalog import NotCatalogLeader
from membership.records import CatalogState
from membership.requests import AddReplicas, AlterTopic, Result
from raft.values import Role
from tests.sim.scene import Scene


def test_the_first_topic_of_a_fresh_leader_is_spread_over_the_nodes() -> None:
    """In the instant in which it begins to lead it has heard nobody yet, and only itself would count."""
    own = Scene(70, nodes=4, topic_settings={})
    world = own.world
    world.loop.run_for(5.0)
    former = world.catalog_leader()
    assert former is not None
    former[0].kill()

    def leader() -> list[Controller]:
        return [
            each.controller
            for each in world.up
            if each.controller is not None
            and each.controller.group is not None
            and each.controller.group.replica.core.role is Role.LEADER
        ]

    assert world.loop.run_until(lambda: bool(leader()), at_most_s=30.0)
    (fresh,) = leader()
    asked = TopicRequest("spread", partitions=12, replicas=1, settings={})
    answer = world.loop.run_until_complete(fresh.service.ask(asked))

    assert answer.result is not None and answer.result.ok, answer
    placed = fresh.state().partitions_of("spread")
    assert {each.node for each in world.up} == {record.replicas[0].node for record in placed}
    world.close()


@pytest.mark.parametrize("seed", range(3))
def test_who_knows_no_leader_asks_the_others_and_has_its_request_carried_out_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that the leader takes long for, given up and sent again, would find its own work done: the
    answer to a deletion would be that there is no such topic.
    """
    own = Scene(80 + seed, topic_settings={})
    world = own.world
    world.loop.run_for(5.0)
    leader = world.catalog_leader()
    assert leader is not None
    asker, third = (each for each in world.up if each is not leader[0])
    assert asker.controller is not None
    service = asker.controller.service
    asked = TopicRequest("soon-gone", partitions=1, replicas=3, settings={})
    world.loop.run_until_complete(service.ask(asked))

    async def unheard(request: Any) -> Any:
        raise NotCatalogLeader(None)

    monkeypatch.setattr(service, "_perform", unheard)
    third.kill()
    assert world.loop.run_until(lambda: service._others() == [leader[0].name], at_most_s=60.0)
    for machine in world.up:
        machine.slow_disk_s = 8.0
    answer = world.loop.run_until_complete(service.ask(DeleteTopicRequest("soon-gone", None)))

    assert answer.result is not None and "deleted" == answer.result.outcome, answer
    world.close()


@pytest.mark.parametrize("dead", [False, True])
def test_a_former_leader_that_an_old_copy_names_is_not_asked_for_ever(
    dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the leader, if it is alive; else the others do. A node that was removed has such a copy."""
    own = Scene(85, topic_settings={})
    world = own.world
    world.loop.run_for(5.0)
    leader = world.catalog_leader()
    assert leader is not None
    asker, former = (each for each in world.up if each is not leader[0])
    assert asker.controller is not None
    service = asker.controller.service
    if dead:
        former.kill()

    async def old(request: Any) -> Any:
        raise NotCatalogLeader(former.name)

    monkeypatch.setattr(service, "_perform", old)
    answer = world.loop.run_until_complete(service.ask(ConfirmRequest([])))

    assert not answer.error and answer.version == leader[1].state().version, answer
    world.close()


def test_who_lost_an_answer_does_not_take_its_own_work_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's connection ends behind a deletion. Asked again it says that there is no such topic: that
    may be the deletion's own doing, so its outcome is unknown.
    """
    own = Scene(84, topic_settings={})
    world = own.world
    world.loop.run_for(5.0)
    leader = world.catalog_leader()
    assert leader is not None
    asker = next(each.controller for each in world.up if each is not leader[0])
    assert asker is not None
    for name in ("gone", "there"):
        asked = TopicRequest(name, partitions=1, replicas=3, settings={})
        world.loop.run_until_complete(asker.service.ask(asked))
    call = asker.transport.call
    lost: list[bytes] = []

    async def answer_lost(address: Any, method: str, payload: bytes, **more: Any) -> bytes:
        answer = await call(address, method, payload, **more)
        if method == "catalog" and not lost:
            lost.append(answer)
            raise PeerLost("the connection ended", sent=True)
        return answer

    monkeypatch.setattr(asker.transport, "call", answer_lost)
    answer = world.loop.run_until_complete(asker.service.ask(DeleteTopicRequest("gone", None)))
    assert lost and "unknown" == answer.error, answer
    lost.clear()
    answer = world.loop.run_until_complete(asker.service.ask(TopicRequest("there", 1, 3, {})))
    assert lost and answer.result is not None and "exists" == answer.result.outcome, answer
    world.close()


def test_a_step_that_is_refused_is_not_repeated_until_something_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each refusal is an entry of group 0, which keeps all of them for ever."""
    own = Scene(92, topic_settings={}, node_settings={"settle_ms": 500})
    world = own.world
    world.loop.run_for(5.0)
    refused: list[int] = []

    def refuse(state: CatalogState, request: AddReplicas) -> tuple[CatalogState, Result]:
        refused.append(state.version)
        return state, Result("conflict", state.version, "a test")

    monkeypatch.setattr("membership.placement_rules.add_replicas", refuse)
    leader = world.catalog_leader()
    assert leader is not None and leader[1].group is not None
    asked = TopicRequest("small", partitions=1, replicas=1, settings={})
    assert world.loop.run_until_complete(leader[1].service.ask(asked)).result is not None
    version = leader[1].state().topics["small"].version
    change = PlacementRequest(AlterTopic("small", version, 3))
    answer = world.loop.run_until_complete(leader[1].service.ask(change))
    assert answer.result is not None and answer.result.ok, answer
    world.loop.run_for(20.0)

    group = leader[1].group
    before = group.replica.log.last_index
    world.loop.run_for(20.0)
    assert refused and group.replica.log.last_index == before
    world.close()
