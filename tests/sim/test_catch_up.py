"""A replica that was away for too long: whole clusters, in which the log's start has moved on meanwhile."""

from __future__ import annotations

import random

import pytest

from laminar.log.disk.errors import DamagedRange
from laminar.node.catch_up.messages import DAMAGED, PIECE
from laminar.node.partition.partition import Partition
from laminar.node.transport.rpc import RemoteError
from laminar.node.transport.transport import Peer
from tests.long_examples import long
from tests.sim.scene import Scene


def test_a_replica_whose_entries_are_gone_gets_whole_segments() -> None:
    """Three nodes, one away while retention moves on: it comes back with a new log, and nothing is lost."""
    scene = Scene(1)
    away = scene.follower()
    held = scene.leave_behind(away)
    away.start()

    scene.until_installed(away)
    scene.calm()
    caught_up = scene.held(away)
    assert caught_up.log.start.index >= held.log.last_index
    # The manifest names the new log: nothing leads from the old one to it any more.
    shard = away.shard_processes[0]
    assert [entry.log_id for entry in shard.storage.manifest.entries] == [caught_up.log.log_id]
    scene.check()


def test_what_was_caught_up_outlives_a_restart() -> None:
    """The derived state beside the new log is as whole as the log."""
    scene = Scene(2)
    away = scene.follower()
    scene.leave_behind(away)
    away.start()
    scene.until_installed(away)
    away.cut_power(keep=0.0)
    away.start()
    scene.calm()
    scene.check()


def test_pitfall_34_a_new_log_is_of_the_incarnation_that_the_old_one_had() -> None:
    """Else what a former life acknowledged, and lost, would count again."""
    scene = Scene(5)
    away = scene.follower()
    log = scene.held(away).log
    log.recovering = True  # as a recovery that found a loss would have it
    log.set_recovering(recovering=True, incarnation=log.incarnation + 1)
    scene.world.loop.run_for(1.0)
    scene.leave_behind(away)
    away.start()
    scene.until_installed(away)
    scene.calm()
    assert scene.held(away).log.incarnation == 1
    scene.check()


@pytest.mark.parametrize("seed", [0, *long(1, 2, 3)])
def test_pitfall_49_power_cuts_and_deaths_at_any_moment_of_a_catch_up(seed: int) -> None:
    """Receiver, source and leader end again and again meanwhile; retention goes on. Never half a log."""
    scene = Scene(100 + seed, disk_s=0.02)
    rng = random.Random(seed)
    away = scene.follower()
    scene.leave_behind(away)
    away.start()
    for _ in range(8):
        scene.world.loop.run_for(rng.random() * 3)
        victim = away if rng.random() < 0.7 else rng.choice(list(scene.world.machines.values()))
        scene.end_and_start_again(victim, rng, by_power=0.7)
    scene.calm()
    scene.check()


def test_a_replica_that_lacks_most_of_a_log_gets_whole_segments_too() -> None:
    """Also where appends could serve it: they know no pace."""
    scene = Scene(3, topic_settings={})
    away = scene.follower()
    away.kill()
    scene.load()
    scene.world.loop.run_for(15.0)
    away.slow_disk_s = 0.5
    away.start()

    scene.until_installed(away)
    scene.calm()
    scene.check()


def test_a_catch_up_that_comes_to_nothing_leaves_the_replica_to_appends() -> None:
    """A receiver without room refuses each offer; it is served all the same, entry by entry."""
    scene = Scene(4, topic_settings={})
    away = scene.follower()
    away.kill()
    scene.load()
    scene.world.loop.run_for(15.0)
    away.slow_disk_s = 1.0
    away.start()
    assert scene.world.loop.run_until(lambda: bool(away.shard_processes), at_most_s=5.0)
    for shard in away.shard_processes:
        shard.catch_up.installer._refusal = lambda peer, offer: "no room"  # type: ignore[method-assign]
    scene.calm()

    assert scene.installed(away) == 0
    assert sum(s.catch_up.lagging.offers for m in scene.world.up for s in m.shard_processes) > 0
    scene.check()


def test_a_catch_up_that_fails_again_and_again_is_begun_ever_more_slowly() -> None:
    """Its source has lost an entry: else whole logs would be copied on and on, each into the trash."""
    scene = Scene(5)
    world, loop = scene.world, scene.world.loop
    away = scene.follower()
    scene.leave_behind(away)
    scene.calm()
    answers = {shard: shard.methods[PIECE] for machine in world.up for shard in machine.shard_processes}

    async def damaged(peer: Peer, payload: bytes) -> bytes:
        raise RemoteError(DAMAGED, "an entry is damaged here")

    for shard in answers:
        shard.methods[PIECE] = damaged
    away.start()
    loop.run_for(60.0)
    assert 3 <= sum(shard.catch_up.installer.abandoned for shard in away.shard_processes) <= 8

    for shard, answer in answers.items():
        shard.methods[PIECE] = answer
    scene.until_installed(away)
    scene.check()


def test_repair_follows_a_replica_to_its_new_log() -> None:
    """What the old log lacked is asked for no more, and what rots in the new one is healed."""
    scene = Scene(3)
    world, loop = scene.world, scene.world.loop
    away = scene.follower()
    others = [node for node in world.machines if node != away.node]

    def damaged(index: int) -> Partition:
        """Its replica, which has met an entry that rotted."""
        partition = scene.held(away)
        log = partition.log
        away.disk.rot(log.segment_of(index).file.path, log.index_entry(index).position + 130, 4)

        async def meet() -> None:
            with pytest.raises(DamagedRange):
                await log.read(index, index, max_bytes=1)

        log._recent.clear()
        loop.run_until_complete(meet())
        return partition

    scene.load()
    loop.run_for(5.0)
    world.cut([(away.node, node) for node in others] + [(node, away.node) for node in others])
    loop.run_for(10.0)
    held = scene.held(away)
    scene.until_the_start_passes(held.log.last_index)
    old = damaged(held.log.first_index + 1)
    world.cut([])
    scene.until_installed(away, at_most_s=120.0)
    scene.calm()

    repairs = away.shard_processes[0].repairs
    asked = repairs.asked
    loop.run_for(60.0)
    assert repairs.asked == asked and not repairs.gone()
    caught_up = scene.held(away)
    assert caught_up.log is not old.log
    damaged(caught_up.log.first_index + 1)
    loop.run_for(10.0)
    assert repairs.repaired == 1 and not caught_up.log.quarantine
    scene.check()
