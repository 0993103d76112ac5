"""A leader that is cut off in the instant of a configuration change, and a replica that forgets meanwhile.

The removal of the one replica that still holds everything is known to the leader that was cut off alone
(docs/consensus.md#recovering).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.machine import Machine
from tests.sim.scene import REPLACED_SOON, Scene


def apart(scene: Scene, *nodes: Machine) -> None:
    """Cut these off from all others, and from each other."""
    names = [machine.node for machine in scene.world.machines.values()]
    alone = {machine.node for machine in nodes}
    scene.world.cut([(a, b) for a in names for b in names if a != b and (a in alone or b in alone)])


def removes(scene: Scene, leader: Machine, member: int) -> bool:
    """Whether the leader has a removal of that replica in its log which is not committed."""
    core = scene.held(leader).replica.core
    appended = core._log.configurations.index
    return member not in core.configuration.voters and core.committed_index < appended


def loses_power(scene: Scene, machine: Machine, index: int) -> None:
    """What was not synced is gone."""
    # At once: the next step of the replacement would have the log synced.
    machine.cut_power(keep=0.0)


def loses_a_byte(scene: Scene, machine: Machine, index: int) -> None:
    """Killed, with one flipped byte where its journal has that entry."""
    log = scene.held(machine).log
    [frame] = scene.world.loop.run_until_complete(log.read(index, index, max_bytes=1))
    head = bytes(frame[:128])
    machine.kill()
    journals = [path for path, _ in machine.disk.files("data/shards") if "/journal-" in path]
    path, position = next((path, at) for path in journals if (at := machine.disk.held(path).find(head)) >= 0)
    machine.disk.rot(path, position + 64)


Forgets = Callable[[Scene, Machine, int], None]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("flush", "forgets"), [("interval", loses_power), ("commit", loses_a_byte)], ids=["interval", "commit"]
)
def test_pitfall_34_a_removal_is_cut_off_and_one_of_the_others_forgets(
    flush: str, forgets: Forgets, seed: int
) -> None:
    """{L, R, V}: L appends the removal of V and is alone. R and V acknowledge records, R forgets them. L and
    R are all voters that L knows of, but V holds the records.
    """
    settings: dict[str, int | str] = {"flush": flush}
    if flush == "interval":
        settings["flush_interval_ms"] = 60_000
    scene = Scene(seed, nodes=4, node_settings=REPLACED_SOON, topic_settings=settings)
    loop, watch = scene.world.loop, scene.watch
    scene.load(pause_s=0.1)
    assert loop.run_until(lambda: any(p.leads for _, p in watch.partitions("t", 0)), at_most_s=30.0)
    leader = next(m for m, p in watch.partitions("t", 0) if p.leads)
    others = [m for m, p in watch.partitions("t", 0) if not p.leads]
    voted, removed = others
    member = scene.held(removed).replica.replica_id
    apart(scene, removed)
    assert loop.run_until(lambda: removes(scene, leader, member), at_most_s=120.0), "nobody is removed"

    apart(scene, leader)
    end = scene.held(voted).log.last_index
    assert loop.run_until(
        lambda: any(
            p.leads and p.committed_index > end + 3 for m, p in watch.partitions("t", 0) if m in others
        ),
        at_most_s=60.0,
    ), "the others do not go on"
    forgets(scene, voted, end + 1)
    voted.start()
    # V hears last: L may stand first.
    apart(scene, removed)
    assert loop.run_until(lambda: scene.partition(voted) is not None, at_most_s=10.0)
    assert scene.held(voted).replica.core.recovering
    loop.run_for(12.0)
    scene.world.cut([])
    loop.run_for(5.0)
    scene.calm()
    scene.check()
