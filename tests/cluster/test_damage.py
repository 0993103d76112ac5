"""Bytes that rot in a running cluster's files: never served, named, fetched elsewhere, stepped over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S, asked, until


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes of one shard."""
    with LocalCluster(tmp_path_factory.mktemp("damage"), nodes=3, shards=1) as cluster:
        yield cluster


def append(http: httpx.Client, topic: str, value: bytes) -> None:
    answer = asked(
        http,
        "POST",
        f"/v1/topics/{topic}/partitions/0/records",
        content=value,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert answer.status_code in (200, 201), answer.text


def fill(http: httpx.Client) -> None:
    """What was just written is served from memory for a while: push it out."""
    for _ in range(20):
        append(http, "fill", bytes(1 << 20))


def flip(data: Path, topic: str, value: bytes) -> None:
    """Turn one byte of a stored value over, in the one segment of this node's replica."""
    [path] = data.glob(f"logs/{topic}-0-*/*.log")
    # A node that stood still writes it later than a majority.
    until(lambda: value in path.read_bytes(), f"{value!r} is in {path}")
    at = path.read_bytes().index(value)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([value[0] ^ 1]))


def metric(http: httpx.Client, name: str) -> float:
    """A number of the node's one shard."""
    start = f'{name}{{process="shard-0"}} '
    [line] = [line for line in http.get("/metrics").text.splitlines() if line.startswith(start)]
    return float(line.removeprefix(start))


def damaged(http: httpx.Client) -> set[tuple[str, int, int]]:
    """Node, first and next offset of each damaged range, as far as nodes answer."""
    [partition] = http.get("/v1/topics/rot/partitions").json()["partitions"]
    return {(each["node"], each["first_offset"], each["next_offset"]) for each in partition["damaged"]}


def test_rot_on_a_minority_is_healed_and_on_all_replicas_is_named_and_skipped(
    three: LocalCluster,
) -> None:
    """One node's rot: another replica answers, and gives the entry back. All three: 503 with the offsets;
    `on_damage=skip` goes on.
    """
    with httpx.Client(base_url=three.urls[0], timeout=PATIENCE_S, trust_env=False) as http:
        assert asked(http, "PUT", "/v1/topics/rot", json={"partitions": 1}).is_success
        assert asked(http, "PUT", "/v1/topics/fill", json={"partitions": 1}).is_success
        for value in (b"first value", b"second value", b"third value"):
            append(http, "rot", value)
        fill(http)
        url = "/v1/topics/rot/partitions/0/records"

        flip(three.members[0].data, "rot", b"second value")
        answer = http.get(url, params={"offset": 1})
        assert 200 == answer.status_code, answer.text
        assert three.members[0].name != answer.headers["Laminar-Node"]
        assert ["second value", "third value"] == [each["value"] for each in answer.json()["records"]]
        assert b"second value" == http.get(f"{url}/1").content
        before = http.get(url, params={"offset": 0})
        assert "first value" == before.json()["records"][0]["value"]

        # What was found damaged is fetched from the others, and lies in its place again.
        [path] = three.members[0].data.glob("logs/rot-0-*/*.log")
        until(lambda: b"second value" in path.read_bytes(), "the entry is repaired")
        until(lambda: metric(http, "laminar_repair_repaired_total") == 1.0, "and counted")
        until(lambda: metric(http, "laminar_storage_damage_repaired_total") == 1.0, "also by the storage")
        until(lambda: metric(http, "laminar_storage_damage_quarantined") == 0.0, "nothing is damaged")
        assert 0.0 == metric(http, "laminar_repair_gone")

        # Others than those that were read: nobody has these in memory.
        for value in (b"fourth value", b"fifth value"):
            append(http, "rot", value)
        fill(http)
        for member in three.members:
            flip(member.data, "rot", b"fourth value")
        answer = http.get(url, params={"offset": 3})
        assert 503 == answer.status_code
        problem = answer.json()
        assert ("damaged", "offset", 3, 4) == tuple(
            problem[name] for name in ("code", "field", "value", "limit")
        )
        assert str(three.members[0].data) not in answer.text
        assert 503 == http.get(f"{url}/3").status_code
        # Not before: it would be repaired as soon as a read found it.
        flip(three.members[0].data, "rot", b"fifth value")
        answer = http.get(url, params={"offset": 3, "on_damage": "skip"})
        assert ["fifth value"] == [each["value"] for each in answer.json()["records"]]
        assert "3-3" == answer.headers["Laminar-Skipped-Offsets"]
        assert three.members[0].name != answer.headers["Laminar-Node"], "it has no whole bytes of the fifth"
        until(lambda: metric(http, "laminar_repair_repaired_total") == 2.0, "the fifth is repaired")
        answer = http.get(url, params={"offset": 3, "to": 4, "on_damage": "skip"})
        assert ([], "4") == (answer.json()["records"], answer.headers["Laminar-Next-Offset"])
        assert 422 == http.get(url, params={"on_damage": "ignore"}).status_code

        wanted = {(member.name, 3, 4) for member in three.members}
        until(lambda: damaged(http) == wanted, "all say which record it is")
        until(lambda: metric(http, "laminar_storage_damage_quarantined") == 1.0, "the fourth is left")
        until(lambda: metric(http, "laminar_repair_gone") == 1.0, "nobody has it, and it says so")
