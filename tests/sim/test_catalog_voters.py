"""Group 0 loses its voters one after another: topics and placement survive what partitions survive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from laminar.log.disk.disk import Buffer
from laminar.node.consensus.outbox import BULK_FRAME_BYTES
from laminar.node.consensus.replica import Replica
from laminar.node.transport.handshake import Channel
from laminar.node.transport.transport import Peer
from membership.catalog import Catalog
from membership.requests import (
    AlterNode,
    RemoveNode,
    Result,
)
from raft.values import Role
from tests.long_examples import long
from tests.sim.clients import Client
from tests.sim.machine import Machine
from tests.sim.scene import REPLACED_SOON, Scene, replaced
from tests.sim.simulation import TOPIC

JSON = {"content-type": "application/json"}


def replica_of(machine: Machine) -> Replica | None:
    """A running node's replica of group 0."""
    controller = machine.controller
    return controller.group.replica if controller is not None and controller.group is not None else None


def leader(scene: Scene) -> Machine | None:
    """The node that leads the catalog, and knows that it does."""
    leading = [m for m in scene.world.up if (r := replica_of(m)) is not None and r.core.is_leader]
    return max(leading, key=lambda m: replica_of(m).core.term) if leading else None  # type: ignore[union-attr]


def voters(scene: Scene) -> str:
    """Names of the nodes that vote, as the leader has them by now; empty when nobody leads."""
    machine = leader(scene)
    replica = replica_of(machine) if machine is not None else None
    if replica is None or replica.core.committed_index < replica.log.last_index:
        return ""
    return "".join(sorted(node for _, node in replica.configuration_record.voters))


def until_voters(scene: Scene, wanted: str) -> None:
    assert scene.world.loop.run_until(lambda: voters(scene) == wanted, at_most_s=60.0), (
        f"{wanted} were to vote, there are {voters(scene)!r} of {scene.world.up}"
    )


def until_moved(scene: Scene, *gone: Machine) -> None:
    """Until the topic has three voters again, none of them on these nodes, and the catalog knows."""
    away = {machine.node for machine in gone}

    def moved() -> bool:
        machine = leader(scene)
        if machine is None or machine.controller is None or not all(replaced(scene, each) for each in gone):
            return False
        record = machine.controller.state().partitions[f"{TOPIC}/0"]
        places = [*record.replicas, *(each.replica for each in record.leaving)]
        return not away & {each.node for each in places}

    assert scene.world.loop.run_until(moved, at_most_s=120.0), f"{gone} still hold replicas"
    scene.world.loop.run_for(1.0)  # until then the last change of voters may be the leader's alone


def make_topic(scene: Scene, name: str, *, node: str) -> int:
    """Ask a node for a topic: the catalog has a quorum and everybody's ear. The HTTP status."""
    maker = Client(scene.world, scene.watch, 90 + len(name), topic=name, partitions=1)
    body = msgspec.json.encode({"partitions": 1, "replicas": 2})

    async def make() -> int:
        maker.connect()
        for _ in range(20):
            answer = await maker.request(node, 0, "PUT", f"/v1/topics/{name}", JSON, body)
            if answer.status in (200, 201):
                break
        return answer.status

    made = scene.world.loop.start(maker.life, make())
    assert scene.world.loop.run_until(made.done, at_most_s=300.0), "no answer"
    return made.result()


def join(scene: Scene, node: str, *, through: str) -> Machine:
    """One more machine."""
    machine = Machine(scene.world, node, shards=1, join=(through,))
    scene.world.machines[node] = machine
    machine.start()
    assert scene.world.loop.run_until(scene.world.all_known, at_most_s=60.0), f"{node} never joins"
    return machine


def test_a_controller_is_lost_where_its_messages_are_sent() -> None:
    """A refused connect is reported by its address: as gossip announces it, whatever the catalog has."""
    scene = Scene(14)
    until_voters(scene, "abc")
    controller, replica = scene.world.machines["a"].controller, replica_of(scene.world.machines["a"])
    assert controller is not None and replica is not None and controller.view.message is not None
    controller.view.message.catalog.nodes["b"].peer_ports[0] += 1

    sent_to = controller.address_of("b", replica)

    assert sent_to == controller.address_of_peer(Peer("b", 0, b"one life"))
    assert sent_to != controller.view.address("b", 0)


def test_five_nodes_that_die_one_after_another_keep_their_catalog_down_to_two() -> None:
    """Each is given up before the next one dies; then the founder comes back to a catalog without it."""
    scene = Scene(11, nodes=5, node_settings=REPLACED_SOON)
    a, b, c, *_ = scene.world.machines.values()
    until_voters(scene, "abcde")
    scene.load()
    for gone, left in ((a, "bcde"), (b, "cde")):
        gone.kill()
        until_voters(scene, left)
        until_moved(scene, a, gone)
    scene.calm()
    c.kill()
    scene.world.loop.run_for(30.0)
    assert voters(scene) == "cde", "the third keeps its seat: nobody can take it"
    assert make_topic(scene, "late", node="e") == 201

    a.start()
    until_voters(scene, "ade")
    b.start()
    c.start()
    until_voters(scene, "abcde")
    assert make_topic(scene, "later", node="a") == 201
    scene.check()


def test_a_founder_that_comes_back_among_strangers_follows_them() -> None:
    """All whom it knew are gone, and it votes no more. It hears by gossip where they are; its own log says
    that it is one of three who might elect it.
    """
    scene = Scene(12, node_settings=REPLACED_SOON)
    a, b, c = scene.world.machines.values()
    until_voters(scene, "abc")
    a.kill()
    d = join(scene, "d", through="b")
    join(scene, "e", through="c")
    join(scene, "f", through="d")
    until_voters(scene, "bcdef")
    until_moved(scene, a)
    b.kill()
    until_voters(scene, "cdef")
    until_moved(scene, a, b)
    c.kill()
    until_voters(scene, "def")
    until_moved(scene, a, b, c)

    before = {term for group in scene.watch.groups.values() for term in group.leaders}
    a.start()
    assert scene.world.loop.run_until(lambda: replica_of(a) is not None, at_most_s=1.0)
    own = replica_of(a)
    assert own is not None and {n for _, n in own.configuration_record.voters} == {"a", "b", "c"}
    assert scene.world.loop.run_until(lambda: "a" in {n for _, n in _learners(scene)}, at_most_s=60.0)
    assert scene.world.loop.run_until(
        lambda: {node for _, node in own.configuration_record.voters} == set("def"), at_most_s=60.0
    ), "nobody tells it"
    assert own.core.role is Role.FOLLOWER
    assert {term for group in scene.watch.groups.values() for term in group.leaders} == before
    d.kill()
    until_voters(scene, "aef")
    assert make_topic(scene, "late", node="e") == 201
    scene.world.close()


def _learners(scene: Scene) -> tuple[tuple[int, str], ...]:
    machine = leader(scene)
    replica = replica_of(machine) if machine is not None else None
    return replica.configuration_record.learners if replica is not None else ()


def test_a_leader_that_has_not_applied_all_that_is_committed_takes_no_step() -> None:
    """By an old state of the catalog a node that joined since would be removed from group 0."""
    scene = Scene(15)
    until_voters(scene, "abc")
    first = leader(scene)
    late = next(machine for machine in scene.world.machines.values() if machine is not first)
    assert first is not None and first.controller is not None and late.controller is not None
    led, held = first.controller.group, late.controller.group
    assert led is not None and held is not None
    read, goes_on = held._read, asyncio.Event()

    async def slow(index: int) -> list[Buffer]:
        await goes_on.wait()
        return await read(index)

    held._read = slow  # type: ignore[method-assign]
    scene.world.machines["d"] = Machine(scene.world, "d", shards=1, join=(first.node,))
    scene.world.machines["d"].start()
    assert scene.world.loop.run_until(lambda: "d" in {node for _, node in _learners(scene)}, at_most_s=60.0)
    first.controller.driver.transfer(led.replica, held.replica.replica_id)
    assert scene.world.loop.run_until(lambda: leader(scene) is late, at_most_s=60.0)
    scene.world.loop.run_for(5.0)
    assert leader(scene) is late and "d" not in held.catalog.state().nodes

    assert "d" in held.replica.configuration_record.nodes().values()
    goes_on.set()
    assert scene.world.loop.run_until(lambda: "d" in held.catalog.state().nodes, at_most_s=60.0)
    assert make_topic(scene, "late", node="d") == 201
    scene.world.close()


def test_a_new_node_gets_a_long_catalog_in_bounded_pieces_and_then_votes() -> None:
    """Group 0's log is never trimmed. While it is replayed it speaks of the first nodes only."""
    scene = Scene(13, nodes=4, node_settings=REPLACED_SOON)
    a, b, *_ = scene.world.machines.values()
    # The founder, and the two that came first.
    assert scene.world.loop.run_until(lambda: len(voters(scene)) == 3, at_most_s=60.0)
    a.kill()
    until_voters(scene, "bcd")
    until_moved(scene, a)
    machine = leader(scene)
    assert machine is not None and machine.controller is not None and machine.controller.group is not None
    catalog = machine.controller.group.catalog

    async def change(times: int) -> list[Result]:
        results = []
        for number in range(times):
            record = catalog.state().topics[TOPIC]
            results.append(
                await catalog.update_topic_settings(
                    TOPIC, {"retention_ms": 10**9 + number}, version=record.version
                )
            )
        return results

    changed = scene.world.loop.start(next(iter(machine.running.values())).life, change(200))
    assert scene.world.loop.run_until(changed.done, at_most_s=60.0)
    assert all(result.ok for result in changed.result())
    sizes: list[int] = []

    def tap(sender: object, address: object, channel: Channel, payload: bytes) -> None:
        if channel is Channel.BULK:
            sizes.append(len(payload))

    scene.world.wires.tap = tap
    size_bytes = machine.controller.group.replica.log.size_bytes
    f = join(scene, "f", through="d")
    b.kill()
    until_voters(scene, "cdf")
    assert sum(sizes) > size_bytes and max(sizes) < min(BULK_FRAME_BYTES, size_bytes / 4)
    assert f.controller is not None and f.controller.state() == machine.controller.state()
    scene.world.close()


def _on_leader(scene: Scene, work: Callable[[Catalog], Coroutine[Any, Any, Result]]) -> Result:
    """Have the catalog's leader do something."""
    machine = leader(scene)
    assert machine is not None and machine.controller is not None and machine.controller.group is not None
    done = scene.world.loop.start(
        next(iter(machine.running.values())).life, work(machine.controller.group.catalog)
    )
    assert scene.world.loop.run_until(done.done, at_most_s=60.0)
    result: Result = done.result()
    return result


def test_a_new_node_hears_a_leader_whose_name_another_folder_had() -> None:
    """While it replays the catalog, that has the former folder. By its starts the leader's is an old copy."""
    scene = Scene(16, nodes=4, node_settings=REPLACED_SOON)
    assert scene.world.loop.run_until(lambda: len(voters(scene)) == 3, at_most_s=60.0)
    first = leader(scene)
    assert first is not None
    voting, names = voters(scene), set(scene.world.machines)
    reused = scene.world.machines[next(name for name in voting if name != first.node)]
    spare = scene.world.machines[(names - set(voting)).pop()]

    async def change(catalog: Catalog) -> Result:
        for number in range(200):
            record = catalog.state().topics[TOPIC]
            result = await catalog.update_topic_settings(
                TOPIC, {"retention_ms": 10**9 + number}, version=record.version
            )
        return result

    async def drain(catalog: Catalog) -> Result:
        version = catalog.state().nodes[reused.node].version
        return await catalog.change_placement(AlterNode(reused.node, version, draining=True))

    async def remove(catalog: Catalog) -> Result:
        version = catalog.state().nodes[reused.node].version
        return await catalog.change_placement(RemoveNode(reused.node, version))

    assert _on_leader(scene, change).ok and _on_leader(scene, drain).ok
    removed = scene.world.loop.run_until
    assert removed(lambda: spare.node in voters(scene) and reused.node not in voters(scene), at_most_s=60.0)
    until_moved(scene, reused)
    reused.kill()
    assert _on_leader(scene, remove).ok
    reused.wipe(reused.node, join=(first.node,))
    reused.start()
    assert scene.world.loop.run_until(scene.world.all_known, at_most_s=60.0)
    spare.kill()
    assert scene.world.loop.run_until(lambda: reused.node in voters(scene), at_most_s=60.0)
    held, led = reused.controller, first.controller
    assert held is not None and held.group is not None and led is not None and led.group is not None
    led.driver.transfer(led.group.replica, held.group.replica.replica_id)
    assert scene.world.loop.run_until(lambda: leader(scene) is reused, at_most_s=60.0)

    newest = Machine(scene.world, "e", shards=1, join=(first.node,))
    scene.world.machines["e"] = newest
    newest.start()

    def follows() -> bool:
        group = newest.controller.group if newest.controller is not None else None
        return group is not None and group.catalog.state() == held.state()

    assert scene.world.loop.run_until(follows, at_most_s=60.0), "it hears its leader no more"
    assert leader(scene) is reused
    scene.world.close()


@pytest.mark.parametrize("seed", [0, *long(1, 2)])
def test_voters_that_die_and_come_back_at_any_moment_leave_one_catalog(seed: int) -> None:
    """Kills and power cuts while voters are swapped; watched: one leader a term, the same entries."""
    scene = Scene(300 + seed, nodes=5, node_settings=REPLACED_SOON | {"replace_after_ms": 2000}, disk_s=0.01)
    rng = scene.world.rng
    scene.load(pause_s=0.5)
    for _ in range(12):
        victim = rng.choice(list(scene.world.machines.values()))
        if victim.up:
            victim.cut_power(keep=rng.choice((0.0, 0.5, 1.0))) if rng.random() < 0.5 else victim.kill()
        else:
            victim.start()
        down = [m for m in scene.world.machines.values() if not m.up]
        if len(down) > 2:
            rng.choice(down).start()
        scene.world.loop.run_for(rng.random() * 12)
    for machine in scene.world.machines.values():
        if not machine.up:
            machine.start()
    until_voters(scene, "abcde")
    assert scene.world.loop.run_until(lambda: make_whole(scene), at_most_s=120.0)
    scene.calm()
    scene.check()


def make_whole(scene: Scene) -> bool:
    """Whether every node runs, and every copy of the catalog is the same."""
    states = [m.controller.state() for m in scene.world.machines.values() if m.controller is not None]
    return len(states) == len(scene.world.machines) and all(each == states[0] for each in states)
