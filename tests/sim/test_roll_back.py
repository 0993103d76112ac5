"""A node whose data folder is put back to an older copy: whole clusters, in which it must not vote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from laminar.node.catalog import rollback_guard as module
from laminar.node.catalog.messages.requests import TopicRequest
from laminar.node.consensus.replica import TERMS_FORGOTTEN
from laminar.node.host.failed_logs import RestartToRecover
from laminar.node.runtime.process import Process
from laminar.node.shard.shard import Shard
from tests.long_examples import long
from tests.sim.clients import REQUEST_TIMEOUT_S
from tests.sim.machine import Machine
from tests.sim.scene import Scene, replaced, scene_of
from tests.sim.simulation import TOPIC

if TYPE_CHECKING:
    from tests.disks.fault_disk import FaultDisk


def scene(seed: int) -> Scene:
    return Scene(seed, topic_settings={})


def go_on(scene: Scene, machine: Machine, picture: FaultDisk) -> None:
    """The machine is started again, and the others hear of that; then its disk is what it was before."""
    machine.kill()
    machine.start()
    assert scene.world.loop.run_until(lambda: scene.world.all_remember(machine), at_most_s=30.0)
    scene.world.loop.run_for(10.0)
    machine.kill()
    machine.put_back(picture)
    machine.start()


def abandoned(machine: Machine) -> bool:
    return not machine.up and "is an older copy" in machine.unrecoverable


def test_a_node_whose_folder_was_put_back_ends_and_says_why() -> None:
    """The others show it; with its newest folder it is as before."""
    own = scene(1)
    world, victim = own.world, own.follower()
    own.load()
    picture = victim.picture()
    go_on(own, victim, picture)

    assert world.loop.run_until(lambda: abandoned(victim), at_most_s=30.0), victim.unrecoverable
    world.loop.run_for(2.0)
    for machine in world.up:
        assert machine.controller is not None
        assert machine.controller.state().nodes[victim.node].rolled_back
    # However often it is tried.
    victim.start()
    assert world.loop.run_until(lambda: abandoned(victim), at_most_s=30.0), victim.unrecoverable
    victim.put_back_newest()
    victim.start()
    own.calm()
    assert not any(m.controller.state().nodes[victim.node].rolled_back for m in world.up if m.controller)
    own.check()


@pytest.mark.parametrize("seed", [0, *long(1, 2)])
def test_a_copy_put_back_elects_nobody_who_lacks_what_it_acknowledged(seed: int) -> None:
    """Two of three acknowledge while the third is cut off; one of them is put back, and the other dies."""
    own = scene(10 + seed)
    world, victim = own.world, own.follower()
    picture = victim.picture()
    victim.kill()
    victim.start()
    assert world.loop.run_until(lambda: world.all_remember(victim), at_most_s=30.0)
    assert world.loop.run_until(lambda: own.partition(victim) is not None, at_most_s=30.0)
    lagging, rest = sorted(
        (machine for machine in world.up if machine is not victim), key=lambda m: own.partition(m) is None
    )
    world.cut([(lagging.node, each.node) for each in (victim, rest)])
    world.cut([*world.wires.cuts, *((each.node, lagging.node) for each in (victim, rest))])
    own.load()
    world.loop.run_for(20.0)
    victim.kill()
    rest.kill()
    victim.put_back(picture)
    world.cut([])
    victim.start()
    # Neither may lead, and the copy must not say that it has forgotten nothing: nothing is served.
    world.loop.run_for(30.0)
    assert not any(partition.leads for _, partition in own.watch.partitions(TOPIC, 0))
    rest.start()
    assert world.loop.run_until(lambda: abandoned(victim), at_most_s=60.0), victim.unrecoverable
    victim.put_back_newest()
    victim.start()
    own.calm()
    own.check()


def test_a_copy_from_within_the_last_start_is_seen_when_a_page_was_turned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that has run for long, and whose disk is replaced by a backup of last night."""
    monkeypatch.setattr(module, "TICK_MS", 20_000)
    own = scene(20)
    world, victim = own.world, own.follower()
    own.load()
    picture = victim.picture()
    world.loop.run_for(45.0)
    assert world.all_remember(victim)
    victim.kill()
    victim.put_back(picture)
    victim.start()

    assert world.loop.run_until(lambda: abandoned(victim), at_most_s=30.0), victim.unrecoverable
    victim.put_back_newest()
    victim.start()
    own.calm()
    own.check()


def test_a_copy_too_young_to_be_seen_is_shown_by_the_leader_what_it_acknowledged() -> None:
    """It comes back marked, as a new incarnation, and is trusted again when it has everything.

    It may have voted, in a term that it forgot, for a candidate that counts that vote only now. So it takes
    part from a later term on: with an older leader's entries it would commit what that candidate lacks.
    """
    own = scene(60)
    world, victim = own.world, own.follower()
    own.load()
    world.loop.run_for(5.0)
    picture = victim.picture()
    world.loop.run_for(5.0)
    victim.kill()
    victim.put_back(picture)
    victim.start()

    def came_back() -> bool:
        partition = own.partition(victim)
        if partition is None or partition.replica.failure is not None:
            return False
        return partition.log.incarnation > 0 and not partition.replica.core.recovering

    assert world.loop.run_until(came_back, at_most_s=60.0), own.partition(victim)
    assert own.held(victim).replica.core.term > TERMS_FORGOTTEN
    own.calm()
    assert victim.holds_all()
    own.check()


def test_power_that_fails_when_the_mark_is_durable_takes_no_term_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark and the term in which it comes back are durable in one step."""
    own = scene(61)
    world, victim = own.world, own.follower()
    own.load()
    world.loop.run_for(5.0)
    picture = victim.picture()
    world.loop.run_for(5.0)
    victim.kill()
    victim.put_back(picture)
    fatal = Process.fatal
    cut: list[str] = []

    def cut_off(process: Process, error: BaseException | None) -> None:
        if isinstance(error, RestartToRecover) and isinstance(process, Shard) and not cut:
            cut.append(str(error))
            world.loop.call_in(None, 0.0, lambda: victim.cut_power(keep=0.0))
        fatal(process, error)

    monkeypatch.setattr(Process, "fatal", cut_off)
    victim.start()
    assert world.loop.run_until(lambda: bool(cut) and not victim.up, at_most_s=30.0)
    others = list(world.up)
    for other in others:
        other.pause()
    victim.start()
    assert world.loop.run_until(lambda: own.partition(victim) is not None, at_most_s=30.0)

    core = own.held(victim).replica.core
    assert core.recovering and core.term > TERMS_FORGOTTEN
    for other in others:
        other.resume()
    own.calm()
    own.check()


def test_a_copy_from_before_an_earlier_mark_is_heard_again() -> None:
    """The others know a later incarnation of its replica, and would drop all that it says for ever."""
    own = scene(62)
    world, victim = own.world, own.follower()
    own.load()
    world.loop.run_for(5.0)
    picture = victim.picture()
    log = own.held(victim).log
    log.set_recovering(recovering=True, incarnation=log.incarnation + 1)
    victim.shard_processes[0].fatal(RestartToRecover("as after damage"))

    def healed(incarnation: int) -> bool:
        held = own.partition(victim)
        if held is None or held.replica.failure is not None or held.log is log:
            return False
        return held.log.incarnation == incarnation and not held.replica.core.recovering

    assert world.loop.run_until(lambda: healed(1), at_most_s=60.0), own.partition(victim)
    victim.kill()
    victim.put_back(picture)
    victim.start()

    assert world.loop.run_until(lambda: healed(2), at_most_s=60.0), own.partition(victim)
    own.calm()
    assert victim.holds_all()
    own.check()


def test_a_catalog_that_went_back_takes_part_in_no_term_that_it_forgot() -> None:
    """Group 0 votes as all groups do. Its leader steps down once, and the catalog goes on."""
    own = scene(63)
    world, victim = own.world, own.follower()
    own.load()
    world.loop.run_for(5.0)
    picture = victim.picture()
    asked = TopicRequest("another", partitions=1, replicas=3, settings={})
    other = next(machine.controller for machine in world.up if machine is not victim)
    assert other is not None
    world.loop.run_until_complete(other.service.ask(asked))
    victim.kill()
    victim.put_back(picture)
    victim.start()

    def catalog_is_back() -> bool:
        controller = victim.controller
        if controller is None or controller.group is None or "another" not in controller.state().topics:
            return False
        core = controller.group.replica.core
        return not core.recovering and core.incarnation > 1

    assert world.loop.run_until(catalog_is_back, at_most_s=60.0)
    assert victim.controller is not None and victim.controller.group is not None
    assert victim.controller.group.replica.core.term > TERMS_FORGOTTEN
    assert world.loop.run_until(lambda: world.all_remember(victim), at_most_s=30.0)
    own.calm()
    own.check()


def test_replicas_of_a_node_that_was_put_back_are_made_anew_elsewhere() -> None:
    """As those of a node that lost its folder, and without waiting for its absence."""
    own = scene_of(30, topic_settings={})
    victim = own.follower()
    own.load()
    go_on(own, victim, victim.picture())

    assert own.world.loop.run_until(lambda: replaced(own, victim), at_most_s=60.0)
    own.calm()
    own.check()


def test_a_cluster_that_was_started_again_as_a_whole_is_as_before() -> None:
    """Also node by node, while no quorum is there, and often: a chain with more lives is the same chain."""
    own = scene(40)
    world = own.world
    own.load()
    world.loop.run_for(5.0)
    for machine in world.up:
        machine.kill()
    for machine in world.machines.values():
        for _ in range(3):
            machine.start()
            world.loop.run_for(0.7)
            machine.kill()
    for machine in world.machines.values():
        machine.start()
        world.loop.run_for(7.0)
    own.calm()
    assert not any(machine.unrecoverable for machine in world.machines.values())
    assert world.loop.run_until(lambda: all(world.all_remember(each) for each in world.up), at_most_s=30.0)
    assert all(m.controller is not None and len(m.controller.boot.boot_history) == 1 for m in world.up)
    own.check()


def test_an_only_voter_stands_when_the_catalog_has_confirmed_its_folder() -> None:
    """One replica, and the other nodes are down: nobody can say whether the folder is the newest."""
    own = Scene(50, nodes=3, topic_settings={}, replicas=1)
    world = own.world
    home = next(machine for machine, _ in own.watch.partitions(TOPIC, 0))
    own.load()
    world.loop.run_for(5.0)
    for machine in world.up:
        machine.kill()
    home.start()
    world.loop.run_for(20.0)
    held = own.partition(home)
    assert held is not None and not held.leads
    for machine in world.machines.values():
        if not machine.up:
            machine.start()

    assert world.loop.run_until(
        lambda: (found := own.partition(home)) is not None and found.leads, at_most_s=30.0
    )
    own.calm()
    world.loop.run_for(REQUEST_TIMEOUT_S)
    world.loop.run_until_complete(own.watch.check_end(TOPIC, 1))
    world.close()
