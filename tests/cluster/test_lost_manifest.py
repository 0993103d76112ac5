"""A node of real processes on which both copies of a manifest rot while it is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.cli import run
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.testing.cluster import LocalCluster, get_json
from router import owner_shard, partition_hash
from tests.cluster.appends import append
from tests.cluster.load import Load, converged, violations
from tests.cluster.patience import asked

PARTITIONS = 6
LOADED, ALONE = "loaded", "alone"


def partitions(url: str, topic: str) -> list[dict[str, Any]]:
    told = get_json(f"{url}/v1/topics/{topic}/partitions")
    return told["partitions"] if told else []


async def until(condition: Callable[[], bool], *, what: str) -> None:
    """It is asked of processes, which tell nobody."""
    deadline = time.monotonic() + 180
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.1)


def rot(home: Path) -> dict[str, bytes]:
    """Turn a bit over in each copy of its manifest; what they hold now."""
    found = {}
    for path in home.glob("manifest-*"):
        content = bytearray(path.read_bytes())
        content[20] ^= 1
        path.write_bytes(content)
        found[path.name] = bytes(content)
    assert 2 == len(found)
    return found


def create(url: str) -> None:
    """Two topics; that of one replica has a record in each partition."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for topic, replicas in ((ALONE, 1), (LOADED, 3)):
            wanted = {"partitions": PARTITIONS, "replicas": replicas}
            assert asked(http, "PUT", f"/v1/topics/{topic}", json=wanted).is_success
        for number in range(PARTITIONS):
            append(http, f"/v1/topics/{ALONE}/partitions/{number}/records", b"value")


def folders(data: Path, topic: str, shard: int) -> set[str]:
    """Of the logs of a topic that are a shard's of two."""
    numbers = [n for n in range(PARTITIONS) if owner_shard(partition_hash(topic, n), 2) == shard]
    return {path.name for n in numbers for path in data.glob(f"logs/{topic}-{n}-*")}


def accept(url: str, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A partition that lost its only replica is refused by its state and not served as empty, until a person
    lets it go on, for it and all others like it.
    """
    records = f"/v1/topics/{ALONE}/partitions/{number}/records"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert 503 == http.post(records, content=b"x").status_code
        assert 503 == http.get(records, params={"offset": 0, "read": "leader"}).status_code
        assert EXIT_FAILED == run(["cluster", "status", "--url", url])
        assert f"{ALONE}/{number}" in capfd.readouterr().out
        assert EXIT_FAILED == run(["group", "recover", f"{ALONE}/{number}", "--empty", "--url", url])
        assert EXIT_DONE == run(["group", "recover", "--all", "--accept-loss", "--empty", "--url", url])
        assert 0 == append(http, records, b"x")["placed"][0]["offset"]


async def test_the_node_starts_without_it_and_its_replicas_come_back_from_the_others(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """The node's other shard and its part of the catalog go on; nothing acknowledged is lost. What had no
    other replica is said to be lost, by name, and kept.
    """
    victim = cluster.members[2]
    await asyncio.to_thread(create, cluster.urls[0])
    load = Load(cluster.urls, LOADED)
    load.start()
    await load.more(1000)
    cluster.kill(2)
    home = victim.data / "shards/1-0"
    rotten = rot(home)
    other_shard, alone = folders(victim.data, LOADED, 1), folders(victim.data, ALONE, 0)
    assert other_shard and alone
    cluster.spawn(2)

    def healed() -> bool:
        told = partitions(cluster.urls[0], LOADED)
        states = [each for partition in told for each in partition["replicas"]]
        return (
            len(states) == 3 * PARTITIONS
            and all(each["state"] == "made" and each["in_sync"] for each in states)
            and not any(partition["leaving"] for partition in told)
            and "which are lost: " in victim.log.read_text()
        )

    await until(healed, what="all replicas are made and in sync")
    await load.more(1000)
    await load.finish()
    assert [] == await violations(cluster.urls, LOADED, load)
    assert [] == await converged(cluster, LOADED, PARTITIONS)
    assert other_shard == folders(victim.data, LOADED, 1), "the other shard's are what they were"
    assert rotten == {path.name: path.read_bytes() for path in (home / "damaged-1").glob("manifest-*")}
    log = victim.log.read_text()
    assert all(name in log for name in rotten) and f"{home}/damaged-1" in log

    gone = {int(name.split("-")[1]) for name in alone}
    assert all(f"{ALONE}/{number}" in log for number in gone)
    number = min(gone)

    def replaced() -> bool:
        """They have places on other nodes, which hold nothing of them."""
        told = [each for each in partitions(cluster.urls[0], ALONE) if each["partition"] in gone]
        return len(told) == len(gone) and all(
            [{"node": victim.name, "why": "lost"}] == each["leaving"]
            and each["replicas"][0]["reachable"]
            and each["leader"] is None
            for each in told
        )

    await until(replaced, what="what had no other replica has a place elsewhere")
    await asyncio.to_thread(accept, cluster.urls[0], number, capfd)
    await asyncio.to_thread(cluster.wait_ready, [2])
    assert alone <= {path.name for path in (victim.data / "logs").iterdir()}, "what was written is kept"


def test_a_node_whose_controller_lost_its_manifest_says_so_in_one_line_and_ends(
    cluster: LocalCluster,
) -> None:
    """Nobody else knows what its replica of the catalog has promised. Nothing is changed."""
    victim = cluster.members[2]
    cluster.kill(2)
    rotten = rot(victim.data / "controller")
    before = victim.log.read_text()
    cluster.spawn(2)
    assert victim.process is not None
    assert 1 == victim.process.wait(120)
    said = victim.log.read_text().removeprefix(before)
    [line] = [each for each in said.splitlines() if "no whole copy of manifest" in each]
    assert all(name in line for name in rotten) and str(victim.data / "controller") in line
    assert "under another name" in line and "Traceback" not in said
    assert rotten == {
        path.name: path.read_bytes() for path in (victim.data / "controller").glob("manifest-*")
    }
