"""A leader that is heard and whose entries do not come through."""

from __future__ import annotations

from laminar.node.transport.handshake import Channel
from tests.sim.test_recovering import Scene


def test_a_leader_whose_bulk_connections_are_stuck_gives_way() -> None:
    """Its heartbeats arrive, as they take other connections; others lead, and records are acknowledged."""
    scene = Scene(flush="commit")
    leader, _, _ = scene.sorted_out()
    scene.world.wires.stuck.add((leader.node, Channel.BULK))
    before = scene.client.acknowledged

    scene.until(lambda: scene.leader not in (None, leader), "another leader")
    scene.until(lambda: scene.client.acknowledged >= before + 20, "records")
    scene.world.wires.stuck.clear()
    scene.client.stopping = True
    scene.until(scene.whole, "the same everywhere")
    scene.world.close()
