"""Topics that come and go while disks are full: whole clusters, in which nothing ends for that."""

from __future__ import annotations

import asyncio
import errno

import msgspec

from tests.sim.clients import Answer
from tests.sim.machine import Machine
from tests.sim.scene import Scene
from tests.sim.simulation import TOPIC

JSON = "application/json"


def begin(
    scene: Scene, node: str, method: str, target: str, headers: dict[str, str], body: bytes = b""
) -> asyncio.Task[Answer]:
    """A request under way."""
    asker = scene.clients[0]
    return scene.world.loop.start(asker.life, asker.request(node, 0, method, target, headers, body))


def ask(scene: Scene, node: str, method: str, target: str, headers: dict[str, str]) -> Answer:
    """A request and its answer."""
    asked = begin(scene, node, method, target, headers)
    assert scene.world.loop.run_until(asked.done, at_most_s=60.0), f"{method} {target}"
    return asked.result()


def fill(machine: Machine, *, until_bytes: int) -> None:
    """No manifest can be written while there is less room than this; what is prepared can."""
    disk = machine.disk

    def full(operation: str, path: str) -> int | None:
        is_low = disk.room_bytes is not None and disk.room_bytes < until_bytes
        return errno.ENOSPC if is_low and operation in ("create", "write") and "manifest" in path else None

    disk.room_bytes = until_bytes // 2
    disk.error = full


def deaths(scene: Scene) -> list[BaseException]:
    """What processes end of, from now on."""
    found: list[BaseException] = []
    scene.world.process_failed = lambda machine, error: found.append(error)
    return found


def holds(machine: Machine, topic: str) -> bool:
    return any((topic, 0) in shard.partitions for shard in machine.shard_processes)


def test_a_topic_that_is_made_while_a_disk_is_full_is_made_there_when_there_is_room() -> None:
    """It ended the shard's process, and no recovery found room: all partitions of the node stayed away."""
    scene = Scene(3)
    full = scene.follower()
    other = next(machine for machine in scene.world.machines.values() if machine is not full)
    ended = deaths(scene)
    scene.load()
    scene.world.loop.run_for(5.0)
    fill(full, until_bytes=2_000_000)
    wanted = msgspec.json.encode({"partitions": 1, "replicas": 3})
    created = begin(scene, other.node, "PUT", "/v1/topics/second", {"content-type": JSON}, wanted)
    scene.world.loop.run_for(10.0)

    assert [] == ended
    assert not holds(full, "second") and holds(full, TOPIC)
    logs = sum(len(shard.storage.logs) for shard in full.shard_processes)
    scene.world.loop.run_for(5.0)
    assert logs == sum(len(shard.storage.logs) for shard in full.shard_processes), "a log for each try"
    full.disk.room_bytes = None
    assert scene.world.loop.run_until(lambda: holds(full, "second"), at_most_s=60.0)
    assert scene.world.loop.run_until(created.done, at_most_s=60.0)
    scene.calm()
    assert [] == ended
    scene.check()


def test_a_topic_is_deleted_on_full_disks_and_its_room_is_there_at_once() -> None:
    """Deleting is what people do about a full disk: it waits for no room, and the trash is emptied."""
    scene = Scene(4, topic_settings={})
    ended = deaths(scene)
    scene.load()
    scene.world.loop.run_for(20.0)
    scene.calm()
    machines = list(scene.world.machines.values())
    for machine in machines:
        fill(machine, until_bytes=50_000)
    scene.world.loop.run_for(5.0)
    etag = ask(scene, machines[0].node, "GET", f"/v1/topics/{TOPIC}", {}).headers["etag"]

    answer = ask(scene, machines[0].node, "DELETE", f"/v1/topics/{TOPIC}", {"if-match": etag})
    assert 200 <= answer.status < 300, answer

    def relieved() -> bool:
        shards = [shard for machine in machines for shard in machine.shard_processes]
        return (
            not any(holds(machine, TOPIC) for machine in machines)
            and not any(shard.storage.manifest.entries for shard in shards)
            and all((machine.disk.room_bytes or 0) > 50_000 for machine in machines)
        )

    assert scene.world.loop.run_until(relieved, at_most_s=20.0), [each.disk.room_bytes for each in machines]
    assert [] == ended
    scene.world.close()
