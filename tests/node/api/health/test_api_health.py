"""GET /v1/health of a real node: what it calls a problem, how bad it is, and what it says to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.node.api.asking import unless_overloaded, until

MIB = 1 << 20


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node of two shards with small segments, and a mark that no disk of a test falls below."""
    settings = {
        "segment_size_bytes": MIB,
        "journal_file_bytes": 4 * MIB,
        "retention_check_ms": 50,
        "low_water_bytes": 1,
    }
    with LocalCluster(tmp_path_factory.mktemp("health"), nodes=1, shards=2, settings=settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def http(node: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=node.urls[0], timeout=60, trust_env=False) as client:
        yield client


def health(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/v1/health")
    assert 200 == answer.status_code, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until_found(http: httpx.Client, code: str, subject: str) -> dict[str, Any]:
    """The problem, once it is told."""
    return until_told(http, code, subject)[0]


def until_told(http: httpx.Client, code: str, subject: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The problem, and all that is told with it, once no shard is silent, as one is that is slow."""
    deadline = time.monotonic() + 60
    while True:
        told = health(http)
        for each in told["problems"]:
            if (code, subject) == (each["code"], each["subject"]) and not told["silent"]:
                return dict(each), told
        assert time.monotonic() < deadline, told
        time.sleep(0.1)


def until_gone(http: httpx.Client, code: str) -> None:
    deadline = time.monotonic() + 60
    while code in {each["code"] for each in health(http)["problems"]}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_node_without_a_problem_is_well(node: LocalCluster, http: httpx.Client) -> None:
    well: dict[str, object] = {"status": "well", "problems": [], "left_out": {}, "silent": []}
    well["nodes"] = [{"node": node.members[0].name, "answers": True, "leads": 0, "replicas": 0}]

    def is_well() -> bool:  # a shard that does not answer within a second is a problem
        return well.items() <= health(http).items()

    until(is_well, lambda: health(http))


def test_a_topic_with_fewer_replicas_than_it_asks_for_is_a_warning(http: httpx.Client) -> None:
    wanted = {"replicas": 3, "allow_fewer_replicas": True}
    assert 201 == http.put("/v1/topics/few", json=wanted).status_code

    found, told = until_told(http, "under_replicated", "few")

    assert "few has 1 of the 3 replicas asked for" == found["text"]
    assert ("warning", "warning") == (found["severity"], told["status"])
    assert "laminar operations list" in {each["command"] for each in found["do"]}
    assert 1 == told["nodes"][0]["leads"] == told["partitions"]
    assert 202 == http.delete("/v1/topics/few", headers={"If-Match": "*"}).status_code


def test_a_channel_that_keeps_the_log_is_named(http: httpx.Client) -> None:
    """Its consumers never came: the log is not trimmed."""
    wanted = {"settings": {"retention_bytes": 1}}
    assert 201 == http.put("/v1/topics/kept", json=wanted).status_code
    assert 201 == http.put("/v1/topics/kept/channels/billing", json={}).status_code
    for _ in range(3):
        post(http, "kept", bytes(MIB))

    found = until_found(http, "channel_blocked", "kept/0")

    assert "channel 'billing', which never gave out offset 0" in found["text"]
    assert "laminar channel describe kept CHANNEL" in {each["command"] for each in found["do"]}


def test_a_consumer_that_retention_will_overtake_and_one_that_it_has(http: httpx.Client) -> None:
    """The first while its records are the next to go, the second once they are gone."""
    assert 201 == http.put("/v1/topics/slow", json={}).status_code
    cursor = "/v1/topics/slow/cursors/report"
    for _ in range(3):
        post(http, "slow", bytes(MIB))
    placed = http.put(cursor, json={"positions": {"0": 0}})
    assert placed.status_code < 300, placed.text
    size = http.get("/v1/topics/slow/partitions/0").json()["bytes"]

    patch(http, "slow", {"retention_bytes": size})
    found = until_found(http, "overtaken_soon", "slow/report")
    patch(http, "slow", {"retention_bytes": 1})
    overtaken = until_found(http, "overtaken", "slow/report")

    assert "retention soon deletes records of partition 0 that report has not read" == found["text"]
    assert "records of partition 0 were deleted before report read them" in overtaken["text"]
    assert "laminar cursor set slow report --at earliest" == overtaken["do"][0]["command"]


def test_a_damaged_batch_that_no_other_replica_has_is_critical(
    node: LocalCluster, http: httpx.Client
) -> None:
    assert 201 == http.put("/v1/topics/rot", json={}).status_code
    post(http, "rot", b"a value that rots")
    for _ in range(20):  # so that it is in a sealed segment, and no longer in memory
        post(http, "rot", bytes(MIB))
    flip(node.members[0].data, b"a value that rots")

    # A disk that is slow has more of it in memory: then it is still whole.
    for _ in range(100):
        read = http.get("/v1/topics/rot/partitions/0/records/0")
        if read.status_code != 200:
            break
        assert b"a value that rots" == read.content
        post(http, "rot", bytes(MIB))
    assert 503 == read.status_code, read.text
    found = until_found(http, "damaged", "rot/0")

    assert ("critical", "critical") == (found["severity"], health(http)["status"])
    assert f"rot/0 is damaged on {node.members[0].name}: offsets 0 to 0" == found["text"]


def test_a_topic_whose_import_was_abandoned_is_named(
    node: LocalCluster, http: httpx.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """With how to go on, and how to drop it; not while its import goes on."""
    from laminar.cli import run

    import_id = "c" * 32
    assert 201 == http.put("/v1/topics/back", json={"settings": {"importing": import_id}}).status_code

    found = until_found(http, "import_stopped", "back")

    assert "warning" == found["severity"]
    assert "topic back is closed: no node that answers knows of a request of its import" == found["text"]
    assert ["laminar topic import FOLDER --as back", "laminar topic delete back"] == [
        each["command"] for each in found["do"]
    ]
    assert "T" in found["since"]
    run(["cluster", "status", "--url", node.urls[0]])
    assert "`laminar topic import FOLDER --as back`" in capfd.readouterr().out
    going_on = {"Laminar-Import": import_id}
    answer = http.get("/v1/topics/back/partitions/0/offsets?at=latest", headers=going_on)
    assert 200 == answer.status_code, answer.text
    until_gone(http, "import_stopped")
    assert 202 == http.delete("/v1/topics/back", headers={"If-Match": "*"}).status_code


def test_the_client_and_the_command_line_say_the_same(
    node: LocalCluster, http: httpx.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, as the damage is critical."""
    import laminar
    from laminar.cli import run

    with laminar.connect(node.urls[0]) as client:
        told = client.health()
    code = run(["cluster", "status", "--url", node.urls[0]])
    shown = capfd.readouterr().out

    assert 1 == code
    assert "critical" == told["status"]
    assert all(each["text"] in shown for each in told["problems"])
    assert "`laminar consume rot --on-damage skip`" in shown


def post(http: httpx.Client, topic: str, value: bytes) -> None:
    path = f"/v1/topics/{topic}/partitions/0/records"
    headers = {"Content-Type": "application/octet-stream"}
    answer = unless_overloaded(lambda: http.post(path, content=value, headers=headers))
    assert 201 == answer.status_code, answer.text


def patch(http: httpx.Client, topic: str, settings: dict[str, int]) -> None:
    answer = http.patch(f"/v1/topics/{topic}", json={"settings": settings}, headers={"If-Match": "*"})
    assert 200 == answer.status_code, answer.text


def flip(data: Path, value: bytes) -> None:
    """Turn one byte of a stored value over, once it is in its segment."""
    paths: list[Path] = []

    def is_stored() -> bool:
        paths[:] = [path for path in data.glob("logs/rot-0-*/*.log") if value in path.read_bytes()]
        return bool(paths)

    until(is_stored)
    for path in paths:
        at = path.read_bytes().index(value)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([value[0] ^ 1]))
