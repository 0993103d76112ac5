"""Three real nodes give up the same records, and come back with the start they had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.appends import append
from tests.cluster.load import converged
from tests.cluster.patience import asked, until

MIB = 1 << 20
TOPIC = "kept"


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes with small segments, whose leaders look for old records twenty times a second."""
    settings = {"segment_size_bytes": MIB, "journal_file_bytes": 4 * MIB, "retention_check_ms": 50}
    with LocalCluster(real_disk / "cluster", nodes=3, shards=2, settings=settings) as own:
        yield own


def starts(http: httpx.Client) -> list[set[int]]:
    """Of each partition, the start indexes of its replicas."""
    found = []
    for partition in http.get(f"/v1/topics/{TOPIC}/partitions").json()["partitions"]:
        told: set[int] = set()
        for replica in partition["replicas"]:
            path = f"/v1/topics/{TOPIC}/partitions/{partition['partition']}/digest"
            answer = http.get(f"{replica['url']}{path}", headers={"Laminar-Local": "1"})
            told.add(answer.json()["start_index"] if answer.status_code == 200 else -1)
        found.append(told)
    return found


def until_alike(http: httpx.Client, *, beyond: list[int]) -> list[int]:
    """Wait until all replicas of each partition begin at one entry behind `beyond`; these entries."""
    deadline = time.monotonic() + 120
    while True:
        found = starts(http)
        if all(len(told) == 1 and min(told) > before for told, before in zip(found, beyond, strict=True)):
            return [min(told) for told in found]
        assert time.monotonic() < deadline, f"replicas begin at {found}"
        time.sleep(0.05)


def patch(http: httpx.Client, **settings: Any) -> None:
    """Change settings of the version that was read; read again if it was old, or an answer was lost."""

    def is_changed() -> bool:
        etag = asked(http, "GET", f"/v1/topics/{TOPIC}").headers["etag"]
        answer = http.patch(f"/v1/topics/{TOPIC}", json={"settings": settings}, headers={"If-Match": etag})
        assert answer.status_code in (200, 412, 503, 504), answer.text
        return answer.status_code == 200

    until(is_changed, "a topic is changed by the ETag of a GET")


def trim_until(http: httpx.Client, url: str, *, before: int) -> None:
    """A leader that was just elected may not know yet how far the others are, and says who holds it back."""
    deadline = time.monotonic() + 120
    while True:
        answer = http.delete(url, params={"before": before})
        assert answer.status_code in (200, 503, 504), answer.text
        if answer.json().get("start_offset") == before:
            return
        assert answer.status_code != 200 or answer.json()["held_back_by"], answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


def described(http: httpx.Client, path: str) -> dict[str, Any]:
    """A partition, once its leader and both others say how far they are."""

    def whole() -> dict[str, Any] | None:
        found: dict[str, Any] = http.get(path).json()
        roles = [each.get("role") for each in found.get("replicas", ())]
        whole = sorted(roles, key=str) == ["follower", "follower", "leader"]
        return found if whole and found["end_offset"] is not None else None

    return until(whole, path) or {}


def test_replicas_move_their_start_alike_and_keep_it_over_a_restart(cluster: LocalCluster) -> None:
    """By a setting, then by hand through a node that does not lead; kill -9 of all in between."""
    with httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http:
        wish = {"partitions": 2, "replicas": 3}
        assert asked(http, "PUT", f"/v1/topics/{TOPIC}", json=wish).is_success
        for number in range(2):
            for _ in range(6):
                append(http, f"/v1/topics/{TOPIC}/partitions/{number}/records", b"x" * MIB)
        patch(http, retention_bytes=2 * MIB + 100_000)

        moved = until_alike(http, beyond=[0, 0])

        assert [] == asyncio.run(converged(cluster, TOPIC, 2))
        patch(http, retention_bytes=None)
        moved = until_alike(http, beyond=[index - 1 for index in moved])
        before = [described(http, f"/v1/topics/{TOPIC}/partitions/{number}") for number in range(2)]
        for number in range(3):
            cluster.kill(number)
        for number in range(3):
            cluster.spawn(number)
        cluster.wait_ready()
        assert [] == asyncio.run(converged(cluster, TOPIC, 2))
        assert moved == until_alike(http, beyond=[index - 1 for index in moved])

        for number, told in enumerate(before):
            path = f"/v1/topics/{TOPIC}/partitions/{number}"
            assert told["start_offset"] > 0
            now = described(http, path)
            assert (told["start_offset"], 6) == (now["start_offset"], now["end_offset"])
            assert 410 == http.get(f"{path}/records/0").status_code
            assert MIB == len(http.get(f"{path}/records/5").content)
            assert 6 == append(http, f"{path}/records", b"next")["placed"][0]["offset"]
            follower = next(replica["url"] for replica in now["replicas"] if replica["role"] == "follower")
            trim_until(http, f"{follower}{path}/records", before=6)

        until_alike(http, beyond=moved)
        assert [] == asyncio.run(converged(cluster, TOPIC, 2))
