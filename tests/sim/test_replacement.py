"""Replicas that get new places: whole clusters that lose a node, or a replica, for good."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from membership.records import Pin
from membership.requests import (
    PinPartition,
)
from tests.long_examples import long
from tests.sim import environment
from tests.sim.machine import Machine
from tests.sim.scene import LIGHT_PAUSE_S, REPLACED_SOON, SMALL, Scene, members, replaced, scene_of
from tests.sim.simulation import TOPIC


@pytest.mark.parametrize("retention", [{}, SMALL])
def test_replicas_of_a_node_that_is_gone_for_good_are_made_anew_elsewhere(
    retention: dict[str, int | str],
) -> None:
    """Removed, added, promoted: three voters again, the same bytes, nothing acknowledged is lost."""
    scene = scene_of(1, topic_settings=retention)
    gone = scene.follower()
    if retention:
        scene.load()  # as much as retention takes away again
    else:
        scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(20.0)
    gone.kill()

    assert scene.world.loop.run_until(lambda: replaced(scene, gone), at_most_s=120.0), members(scene)
    scene.calm()
    scene.check()


def test_a_new_replica_gets_its_log_at_the_pace_although_no_segment_is_sealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By appends all that a dead node held would be sent at once, and delay everybody's appends."""
    monkeypatch.setattr(environment, "SIZES", replace(environment.SIZES, segment_size_bytes=64 << 20))
    scene = scene_of(1, topic_settings={})
    gone = scene.follower()
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(20.0)
    held = scene.held(gone).log
    assert not held.sealed_segments() and held.size_bytes > scene.options.node_settings["catch_up_bytes"]
    gone.kill()

    assert scene.world.loop.run_until(lambda: replaced(scene, gone), at_most_s=120.0), members(scene)
    assert sum(scene.installed(machine) for machine in scene.world.up) == 1
    scene.calm()
    scene.check()


def test_a_lost_replica_is_shown_until_its_group_has_let_go_of_it() -> None:
    """Its own node says so before the catalog can be told; then who leaves, and why."""
    scene = Scene(7, node_settings=REPLACED_SOON)
    wiped = scene.follower()
    away = next(m for m in scene.world.machines.values() if m is not wiped)
    held = scene.partition(wiped)
    assert held is not None
    scene.load()
    scene.world.loop.run_for(20.0)
    scene.calm()
    away.kill()
    wiped.kill()
    wiped.disk.remove_tree(held.log.files.directory)
    wiped.start()
    asker = scene.clients[0]
    seen: set[str] = set()

    def look() -> bool:
        """Ask the wiped node; whether all is as it should be again."""

        async def ask() -> dict[str, Any]:
            answer = await asker.request(wiped.node, 0, "GET", f"/v1/topics/{TOPIC}/partitions", {}, b"")
            found: dict[str, Any] = msgspec.json.decode(answer.body)["partitions"][0] if answer.body else {}
            return found

        asked = scene.world.loop.start(asker.life, ask())
        assert scene.world.loop.run_until(asked.done, at_most_s=60.0)
        found = asked.result()
        states = {each["node"]: each["state"] for each in found.get("replicas", ())}
        seen.add(states.get(wiped.node, ""))
        seen.update(f"leaving {each['node']} {each['why']}" for each in found.get("leaving", ()))
        return set(states.values()) == {"made"} and not found["leaving"]

    deadline = scene.world.loop.time() + 60.0
    while "lost" not in seen and scene.world.loop.time() < deadline:
        look()
        scene.world.loop.run_for(0.2)
    assert "lost" in seen and not any(each.startswith("leaving") for each in seen)
    away.start()
    while not look() and scene.world.loop.time() < deadline + 120.0:
        scene.world.loop.run_for(0.01)
    assert f"leaving {wiped.node} lost" in seen, seen
    assert scene.world.loop.time() < deadline + 120.0, seen
    scene.world.close()


def test_pitfall_50_a_node_that_was_only_away_deletes_what_was_removed_when_it_is_told() -> None:
    """It comes back with a replica of which the group has let go: kept until the leader's word, then gone."""
    scene = scene_of(2)
    away = scene.follower()
    held = scene.partition(away)
    assert held is not None
    removed_id = held.replica.replica_id
    scene.load(pause_s=LIGHT_PAUSE_S)
    away.kill()
    assert scene.world.loop.run_until(lambda: replaced(scene, away), at_most_s=120.0), members(scene)
    away.start()

    def deleted() -> bool:
        return bool(away.shard_processes) and all(
            removed_id not in {entry.replica_id for entry in shard.storage.manifest.entries}
            for shard in away.shard_processes
        )

    assert scene.world.loop.run_until(deleted, at_most_s=60.0), "the removed replica stays"
    scene.calm()
    scene.check()


def test_nothing_is_replaced_while_more_than_one_node_in_four_is_gone() -> None:
    """Two of four: it is the network, or the power, and not two machines that died."""
    scene = scene_of(3)
    holders = [machine for machine, _ in scene.watch.partitions(TOPIC, 0)]
    voters, _ = members(scene)
    away = [next(m for m in holders if m is not scene.world.machines["a"]), *()]
    away.append(next(m for m in scene.world.machines.values() if m not in holders))
    for machine in away:
        machine.kill()
    scene.world.loop.run_for(60.0)

    assert members(scene)[0] == voters
    for machine in away:
        machine.start()
    scene.calm()
    scene.check()


@pytest.mark.parametrize("seed", [0, *long(1, 2, 3)])
def test_deaths_while_replicas_move_lose_nothing(seed: int) -> None:
    """Power cuts and kills of everybody, again and again, while a node's replicas are made anew."""
    scene = scene_of(200 + seed, disk_s=0.01, topic_settings=SMALL)
    rng = random.Random(seed)
    gone = scene.follower()
    scene.load()
    scene.world.loop.run_for(15.0)
    gone.kill()
    rest = [machine for machine in scene.world.machines.values() if machine is not gone]
    for _ in range(8):
        scene.world.loop.run_for(rng.random() * 5)
        victim = rng.choice(rest)
        if rng.random() < 0.5:
            victim.cut_power(keep=rng.choice((0.0, 0.5, 1.0)))
        else:
            victim.kill()
        scene.world.loop.run_for(rng.random())
        victim.start()
    assert scene.world.loop.run_until(lambda: replaced(scene, gone), at_most_s=180.0), members(scene)
    scene.calm()
    scene.check()


def test_pitfall_35_a_replica_whose_files_are_gone_is_made_anew_under_another_id() -> None:
    """Also on the same node, and with no node to spare: what it promised, the group has let go of first."""
    scene = Scene(5, node_settings=REPLACED_SOON)
    wiped = scene.follower()
    held = scene.partition(wiped)
    assert held is not None
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(20.0)
    wiped.kill()
    wiped.disk.remove_tree(held.log.files.directory)
    wiped.start()

    def anew() -> bool:
        partition = scene.partition(wiped)
        return (
            len(members(scene)[0]) == 3
            and partition is not None
            and partition.replica.replica_id != held.replica.replica_id
            and partition.replica.replica_id in partition.replica.configuration.voters
        )

    assert scene.world.loop.run_until(anew, at_most_s=120.0), (
        members(scene),
        [(shard.lost, shard.storage.manifest.entries) for shard in wiped.shard_processes],
    )
    scene.calm()
    scene.check()


def test_a_replica_that_came_later_asks_those_who_hold_the_group_now_for_what_is_damaged() -> None:
    """Whom its group began with says nothing: of its own life it knows nobody before it has read its log."""
    scene = scene_of(6, topic_settings={})
    world = scene.world
    gone = scene.follower()
    holders = {machine.node for machine, _ in scene.watch.partitions(TOPIC, 0)}
    scene.load(pause_s=LIGHT_PAUSE_S)
    gone.kill()
    assert world.loop.run_until(lambda: replaced(scene, gone), at_most_s=120.0), members(scene)
    scene.calm()
    late = next(machine for node, machine in world.machines.items() if node not in holders)
    held = scene.partition(late)
    assert held is not None
    log = held.log
    index, _ = held.state.configurations_up_to(held.committed_index)[-1]
    row, path = log.index_entry(index), log.segment_of(index).file.path
    for shard in late.shard_processes:
        world.loop.run_until_complete(shard.storage.checkpoint())
    late.kill()
    for name in late.disk.list(log.files.directory):
        if name.startswith("derived"):
            late.disk.unlink(f"{log.files.directory}/{name}")
    late.disk.rot(path, row.position + 130, 4)
    late.start()

    assert world.loop.run_until(lambda: scene.partition(late) is not None, at_most_s=120.0), "it stays away"
    scene.check()


def test_a_node_that_only_gossip_does_not_see_keeps_its_replicas() -> None:
    """Its datagrams are lost, its connections stand: also when the catalog has nothing to do and rests on
    them.
    """
    scene = scene_of(7)
    unseen = scene.follower()
    voters, _ = members(scene)
    scene.world.loop.run_for(20.0)
    for machine in scene.world.machines.values():
        if machine is not unseen and machine.gossip is not None:
            scene.world.loop.call_in(machine.gossip.life, 0.01, machine.gossip.believe, unseen.node, False)
    scene.world.loop.run_for(60.0)

    assert members(scene) == (voters, 0)
    scene.calm()
    scene.check()


def wiped(scene: Scene, machine: Machine, name: str) -> None:
    """It comes back with an empty disk, at the same address."""
    machine.kill()
    machine.wipe(name, join=tuple(node for node in scene.world.machines if node != machine.node))
    machine.start()


def catalog_voters(scene: Scene) -> set[str]:
    """The nodes that vote in group 0, by its leader's word."""
    leader = scene.world.catalog_leader()
    if leader is None or leader[1].group is None:
        return set()
    replica = leader[1].group.replica
    return {replica.nodes[member] for member in replica.configuration.voters}


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_wiped_node_comes_back_under_a_new_name_and_takes_all_places_of_the_old_one(node: str) -> None:
    """Three of three: its replicas, and its vote in the catalog; also where the cluster was founded."""
    scene = Scene(7, node_settings=REPLACED_SOON)
    machine = scene.world.machines[node]
    scene.load(pause_s=LIGHT_PAUSE_S)
    scene.world.loop.run_for(10.0)
    wiped(scene, machine, f"{node}2")

    everybody = {each.name for each in scene.world.machines.values()}
    assert scene.world.loop.run_until(lambda: members(scene)[0] == everybody, at_most_s=120.0), members(scene)
    assert scene.world.loop.run_until(lambda: catalog_voters(scene) == everybody, at_most_s=60.0)
    scene.calm()
    scene.check()


def test_pitfall_35_a_wiped_node_is_refused_under_its_old_name() -> None:
    """It has votes and acknowledgements behind it that it does not know of: nothing of it may vote again."""
    scene = Scene(8, node_settings=REPLACED_SOON)
    machine = scene.follower()
    wiped(scene, machine, machine.node)

    assert scene.world.loop.run_until(lambda: not machine.up, at_most_s=60.0), "it is taken for the old one"
    assert "store_changed" in machine.unrecoverable
    scene.world.close()


def asked_to_move(scene: Scene, away: Machine) -> None:
    """The replica of one node shall go to the one that has none."""
    leader = scene.world.catalog_leader()
    assert leader is not None and leader[1].group is not None
    machine, controller = leader
    record = controller.state().partitions[f"{TOPIC}/0"]
    free = next(node for node in scene.world.machines if node not in {r.node for r in record.replicas})
    nodes = [free if each.node == away.node else each.node for each in record.replicas]
    step = PinPartition(f"{TOPIC}/0", record.version, Pin(nodes, "operator", "a test"))
    life = next(each.life for each in machine.running.values() if each.process is controller)
    asked = scene.world.loop.start(life, leader[1].group.catalog.change_placement(step))
    assert scene.world.loop.run_until(asked.done, at_most_s=10.0) and asked.result().ok


def test_pitfall_50_what_was_moved_is_kept_until_no_loss_of_power_brings_it_back() -> None:
    """Who belongs to a group is synced before it counts, also where records are synced now and then only."""
    scene = scene_of(11, topic_settings={"flush": "interval", "flush_interval_ms": 20_000})
    scene.world.loop.run_for(25.0)
    away = scene.follower()
    asked_to_move(scene, away)
    assert scene.world.loop.run_until(lambda: replaced(scene, away), at_most_s=60.0), members(scene)
    scene.world.loop.run_for(5.0)
    scene.world.losing()
    for machine in scene.world.machines.values():
        machine.lose_power(keep=0.0)
    for machine in scene.world.machines.values():
        machine.start()

    assert scene.world.loop.run_until(lambda: bool(members(scene)[0]), at_most_s=60.0), "nobody leads"
    scene.calm()
    scene.check()


@pytest.mark.parametrize(
    ("marked", "again", "copied"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
)
def test_pitfall_34_a_learner_does_not_keep_what_all_voters_lost(
    monkeypatch: pytest.MonkeyPatch, marked: bool, again: bool, copied: bool
) -> None:
    """All lose power; only a learner's disk has what was committed last. It begins anew, with the group, and
    whoever reads there reads what the group has. Also before its log has the topic's policy, when no mark
    tells of the loss; where its node dies again meanwhile; and where a catch-up brought its log, which is
    synced as a whole.
    """
    interval: dict[str, int | str] = {"flush": "interval", "flush_interval_ms": 60_000}
    settings = REPLACED_SOON if copied else {**REPLACED_SOON, "catch_up_bytes": 1 << 30}
    scene = Scene(13, nodes=4, node_settings=settings, topic_settings=interval, disk_s=0.01)
    scene.load()
    scene.world.loop.run_for(3.0)
    if not marked:
        # A learner gets the topic's policy as soon as it is open. Here its shard does not come to that.
        async def not_yet() -> None:
            return

        for machine in scene.world.machines.values():
            for shard in machine.shard_processes:
                monkeypatch.setattr(shard._reconciler, "change_policies", not_yet)
    asked_to_move(scene, scene.follower())

    def ahead() -> Machine | None:
        """The home of a learner that knows of more than is committed than the voters have synced."""
        found = scene.watch.partitions(TOPIC, 0)
        led = [p.replica.configuration for _, p in found if p.leads]
        synced = [p.log.synced_index for _, p in found if led and p.replica.replica_id in led[0].voters]
        for machine, partition in found:
            if not led or len(synced) < 3 or partition.replica.replica_id not in led[0].learners:
                continue
            if partition.log.policy.is_interval != marked:
                machine.shard_processes[0].request_reconcile()
                continue
            # Who belongs to a group is synced before it counts, and with it all that came before.
            known = partition.state.configurations_up_to(partition.log.last_index)
            joined = known[-1][0] if known else 0
            if min(partition.state.stamped_index, partition.log.durable_index) > max(*synced, joined) + 3:
                return machine
        return None

    assert scene.world.loop.run_until(lambda: ahead() is not None, at_most_s=60.0), members(scene)
    learner = ahead()
    assert learner is not None
    held = scene.partition(learner)
    assert held is not None
    replica_id, last_index = held.replica.replica_id, held.committed_index
    assert scene.installed(learner) == copied
    for client in scene.clients:
        client.stopping = True
    scene.world.losing()
    for machine in scene.world.machines.values():
        machine.lose_power(keep=1.0 if machine is learner else 0.0)
    learner.start()
    if again:
        scene.world.loop.run_for(0.3)
        learner.kill()
        learner.start()
    assert scene.world.loop.run_until(lambda: scene.partition(learner) is not None, at_most_s=60.0)
    back = scene.partition(learner)
    assert back is not None
    assert (back.replica.replica_id, back.log.last_index) == (replica_id, 0) and last_index > 0
    assert back.replica.core.recovering and not back.replica.configuration.members()
    for machine in scene.world.machines.values():
        if machine is not learner:
            machine.start()

    def learned() -> bool:
        return learner.node in members(scene)[0] and all(
            entry.state == "made"
            for shard in learner.shard_processes
            for entry in shard.storage.manifest.entries
        )

    assert scene.world.loop.run_until(learned, at_most_s=120.0), members(scene)
    scene.calm()
    scene.check()
