"""Machines whose shards lost their manifests: what was there is never born again, and comes by catch-up."""

from __future__ import annotations

import errno

import msgspec
import pytest

from laminar.node.partition.partition import Partition
from tests.sim.machine import Machine
from tests.sim.scene import LIGHT_PAUSE_S, REPLACED_SOON, Scene
from tests.sim.simulation import TOPIC

JSON = "application/json"


def lose_manifests(machine: Machine) -> None:
    """Both copies rot, in the homes of all its shards."""
    paths = [path for path, _ in machine.disk.files("data/shards") if "/manifest-" in path]
    assert paths
    for path in paths:
        machine.disk.rot(path, 20)


@pytest.mark.parametrize("leads", [True, False])
def test_replicas_of_a_home_that_lost_its_manifest_come_back_from_the_others(leads: bool) -> None:
    """Lost, and replaced by new ones on the same node: the same bytes, and nothing acknowledged is lost."""
    scene = Scene(31 + leads, node_settings=REPLACED_SOON)
    victim = next(m for m, p in scene.watch.partitions(TOPIC, 0) if p.leads == leads)
    former = scene.held(victim).replica.replica_id
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    victim.kill()
    lose_manifests(victim)
    victim.start()

    def replaced() -> bool:
        found = scene.partition(victim)
        if found is None:
            return False
        assert former != found.replica.replica_id, "it was born again"
        return found.replica.replica_id in found.replica.configuration.voters

    assert scene.world.loop.run_until(replaced, at_most_s=120.0)
    scene.calm()
    scene.check()


def test_a_replica_of_a_group_that_is_being_created_is_not_born_again() -> None:
    """Two of three have made it, and may have voted; one of the two loses its manifest before the third is
    there. It does not take part any more, and the group goes on when it is live.
    """
    scene = Scene(33, node_settings=REPLACED_SOON)
    loop = scene.world.loop
    victim, other, late = scene.world.machines.values()
    scene.load(pause_s=LIGHT_PAUSE_S)

    def full(operation: str, path: str) -> int | None:
        return errno.ENOSPC if operation == "create" and "manifest" in path else None

    late.disk.error = full
    asker = scene.clients[0]
    wanted = msgspec.json.encode({"partitions": 1, "replicas": 3})
    created = loop.start(
        asker.life,
        asker.request(other.node, 0, "PUT", "/v1/topics/second", {"content-type": JSON}, wanted),
    )

    def made(machine: Machine) -> bool:
        return machine in [m for m, _ in scene.watch.partitions("second", 0)]

    assert loop.run_until(lambda: made(victim) and made(other), at_most_s=30.0)
    catalog = scene.world.catalog()
    assert catalog is not None and catalog.partitions["second/0"].state == "creating"
    [former] = [r.replica_id for r in catalog.partitions["second/0"].replicas if r.node == victim.node]
    victim.kill()
    lose_manifests(victim)
    victim.start()
    loop.run_for(10.0)

    assert not made(victim)
    lost = [entry for shard in victim.shard_processes for entry in shard.lost]
    assert former in [entry.replica_id for entry in lost]
    late.disk.error = None

    def replaced() -> bool:
        found = [p.replica for m, p in scene.watch.partitions("second", 0) if m is victim]
        return bool(found) and found[0].replica_id in found[0].configuration.voters

    assert loop.run_until(replaced, at_most_s=120.0)
    [found] = [p.replica for m, p in scene.watch.partitions("second", 0) if m is victim]
    assert former < found.replica_id
    assert loop.run_until(created.done, at_most_s=60.0)
    assert loop.run_until(lambda: scene.watch.converged("second", 1, 3), at_most_s=60.0)
    scene.calm()
    scene.check()


def test_nothing_is_born_while_the_catalog_cannot_be_asked() -> None:
    """The others are away, and its own copy of the catalog says that there is nothing of which it knows."""
    scene = Scene(34, node_settings=REPLACED_SOON)
    loop = scene.world.loop
    victim = scene.follower()
    others = [m for m in scene.world.machines.values() if m is not victim]
    scene.load(pause_s=LIGHT_PAUSE_S)
    loop.run_for(5.0)
    for machine in (*others, victim):
        machine.kill()
    lose_manifests(victim)
    victim.start()
    loop.run_for(20.0)

    assert victim.shard_processes
    for shard in victim.shard_processes:
        assert not shard.storage.manifest.known and not shard.partitions and not shard.lost
    for machine in others:
        machine.start()
    assert loop.run_until(
        lambda: all(shard.storage.manifest.known for shard in victim.shard_processes), at_most_s=60.0
    )
    scene.calm()
    scene.check()


def test_a_partition_that_lost_its_only_replica_goes_on_elsewhere_by_a_persons_word() -> None:
    """Empty, on a node that holds nothing of it: its new replica has never heard of any configuration."""
    scene = Scene(35, node_settings=REPLACED_SOON)
    loop = scene.world.loop
    scene.load(pause_s=LIGHT_PAUSE_S)
    asker = scene.clients[0]

    def ask(node: str, method: str, target: str, body: bytes = b"") -> int:
        asked = loop.start(asker.life, asker.request(node, 0, method, target, {"content-type": JSON}, body))
        assert loop.run_until(asked.done, at_most_s=60.0)
        return asked.result().status

    def held() -> list[tuple[Machine, Partition]]:
        return list(scene.watch.partitions("alone", 0))

    wanted = msgspec.json.encode({"partitions": 1, "replicas": 1})
    assert 201 == ask("a", "PUT", "/v1/topics/alone", wanted)
    [(victim, former)] = held()
    other = next(m for m in scene.world.machines.values() if m is not victim)
    victim.kill()
    lose_manifests(victim)
    victim.start()
    assert loop.run_until(lambda: bool(held()), at_most_s=60.0), "its place is where it cannot be made"
    [(elsewhere, partition)] = held()
    assert elsewhere is not victim and former.replica.replica_id < partition.replica.replica_id
    loop.run_for(5.0)
    assert not partition.leads and 0 == partition.log.last_index

    scene.watch.groups[partition.replica.group].give_up(0)
    recover = "/v1/topics/alone/partitions/0/recover?accept_loss=true"
    assert 412 == ask(other.node, "POST", recover), "no copy of the records is left, and nobody accepted that"
    assert 200 == ask(other.node, "POST", f"{recover}&empty=true")

    assert loop.run_until(lambda: any(partition.leads for _, partition in held()), at_most_s=30.0)
    [(_, partition)] = held()
    assert partition.replica.failure is None
    assert loop.run_until(lambda: not any(shard.lost for shard in victim.shard_processes), at_most_s=60.0), (
        "the lost one stays in the manifest"
    )
    scene.calm()
    scene.check()
