"""Where the catalog's leader places new replicas, in whole clusters."""

from __future__ import annotations

from laminar.node.catalog_service import TopicRequest
from laminar.node.controller import Controller
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
