"""Room on the disk: the low-water mark, and the trash that is emptied."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import laminar
from laminar.cli.exit_codes import EXIT_UNAVAILABLE
from laminar.log.disk.disk import RealDisk
from laminar.log.disk.trash import Trash
from laminar.node.host.disk_space import DiskSpace
from laminar.testing.nodes import serve
from tests.node.api.asking import ENVELOPE_LINES, Partition, problem, unless_overloaded, until

MIB = 1 << 20
DAY_MS = 24 * 3_600_000
CHANNEL = "/v1/topics/t/channels/billing"


def space(*, low_water_bytes: int = 1000, low_water_percent: float = 5.0) -> DiskSpace:
    return DiskSpace(RealDisk(), "/", low_water_bytes=low_water_bytes, low_water_percent=low_water_percent)


def test_the_mark_is_the_lesser_of_the_two() -> None:
    """A share of a small disk, a number of bytes on a large one."""
    disk = space()
    disk.take(60, 1200)
    assert (60, False) == (disk.threshold_bytes, disk.low)
    disk.take(59, 1200)
    assert disk.low
    disk.take(1_000_000, 1 << 40)
    assert (1000, False) == (disk.threshold_bytes, disk.low)


def test_refusing_ends_a_quarter_above_the_mark() -> None:
    """So it does not begin and end with every request; each change is told once."""
    disk = space()
    changes = []
    disk.on_change = lambda: changes.append(disk.low)
    seen = []
    for free_bytes in (1000, 999, 1000, 1249, 1250, 1000, 999):
        disk.take(free_bytes, 1 << 30)
        seen.append(disk.low)

    assert [False, True, True, True, False, False, True] == seen
    assert [True, False, True] == changes


def test_the_refusal_names_the_disk_the_value_and_the_limit() -> None:
    """507, to be tried again, nothing applied."""
    disk = space()
    assert disk.refusal() is None
    disk.take(500, 1 << 30)

    refusal = disk.refusal()

    assert refusal is not None
    assert ("disk_full", 507, "not_applied") == (refusal.code, refusal.status, refusal.outcome)
    assert ("disk_free_bytes", 500, 1000) == (refusal.field, refusal.value, refusal.limit)
    assert "the disk of / has 500 bytes free" in refusal.detail
    assert refusal.retry_after_ms


def test_consumers_are_refused_below_half_of_the_mark() -> None:
    """What they do lets records be deleted. But one that fails again and again must not fill the disk."""
    disk = space()
    seen = []
    for free_bytes in (999, 500, 499, 500, 624, 625, 499, 1250):
        disk.take(free_bytes, 1 << 30)
        refused = disk.consumer_refusal()
        seen.append((disk.low, refused is not None))
        if free_bytes == 499:
            assert refused is not None
            assert ("disk_full", 499, 500) == (refused.code, refused.value, refused.limit)
            assert "less than 500, half of the low-water mark of 1000" in refused.detail

    low, refused_too = (True, False), (True, True)
    assert [low, low, refused_too, refused_too, refused_too, low, refused_too, (False, False)] == seen


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 MiB; skipped where we may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root mounts a disk of a size of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def until_low(http: httpx.Client, wanted: bool) -> dict[str, object]:
    deadline = time.monotonic() + 120
    while True:
        ready: dict[str, object] = http.get("/readyz").json()
        if bool(ready["warnings"]) == wanted:
            return ready
        assert time.monotonic() < deadline, ready
        time.sleep(0.02)


def until_named(http: httpx.Client, partition: Partition) -> None:
    """The refusal, the node's warnings and the channel's description say that it keeps the log."""
    named = "channel 'billing', which never gave out offset 0"
    metric = 'laminar_channel_kept_bytes{topic="t",channel="billing"} '
    seen: list[object] = []

    def is_named() -> bool:  # by all of them alike: how much it keeps is looked at again and again
        refused = problem(partition.post(b"no"), 507, "disk_full")
        kept_bytes = http.get(CHANNEL).json()["kept_bytes"]
        warned = http.get("/readyz").json()["warnings"]
        told = http.get("/v1/health").json()
        lines = http.get("/metrics").text.splitlines()
        numbers = [float(line.removeprefix(metric)) for line in lines if line.startswith(metric)]
        seen[:] = refused, kept_bytes, warned, told, numbers
        return (
            kept_bytes >= 2 * MIB
            and refused["detail"].endswith(
                f"; {kept_bytes} bytes of t/0 are kept beyond its retention for {named}"
            )
            and "laminar channel seek" in refused["hint"]
            and f"channels keep logs beyond their retention: t/0, {kept_bytes} bytes, for {named}" in warned
            and {("disk_low", "critical"), ("channel_blocked", "critical")}
            <= {(each["code"], each["severity"]) for each in told["problems"]}
            and [kept_bytes] == numbers
        )

    until(is_named, lambda: seen)


def test_on_a_nearly_full_disk_appends_are_refused_and_all_else_goes_on(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads, topics, retention; appends come back by themselves once there is room.

    Until then it is said which channel keeps the log.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    settings: dict[str, str | int] = {
        "segment_size_bytes": MIB,
        "journal_file_bytes": 4 * MIB,
        "retention_check_ms": 20,
        "low_water_percent": "20",
    }
    ballast = small_disk / "ballast"
    with serve(settings=settings) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert 201 == http.put("/v1/topics/t", json={}).status_code
        assert 201 == http.put(CHANNEL, json={}).status_code
        partition = Partition(http, "t")
        for _ in range(4):
            assert 201 == unless_overloaded(lambda: partition.post(b"x" * MIB)).status_code
        until_low(http, False)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RealDisk().free_bytes(str(small_disk)) - 10 * MIB)

        ready = until_low(http, True)

        assert "low-water mark" in str(ready["warnings"])
        refused = problem(partition.post(b"no"), 507, "disk_full", field="disk_free_bytes")
        assert refused["value"] < refused["limit"] == 96 * MIB * 20 // 100
        assert "not_applied" == refused["outcome"]
        assert MIB == len(http.get(f"{partition.path}/records/3").content)
        assert 201 == http.put("/v1/topics/u", json={}).status_code, "the catalog goes on"
        assert 'laminar_disk_is_low{process="shard-0"} 1' in http.get("/metrics").text
        etag = http.get("/v1/topics/t").headers["etag"]
        http.patch("/v1/topics/t", json={"settings": {"retention_bytes": 0}}, headers={"If-Match": etag})
        until_named(http, partition)
        ran = subprocess.run(
            [sys.executable, "-m", "laminar.cli", "cluster", "doctor", "--json", "--url", url],
            capture_output=True,
            check=False,
        )
        findings = [each["finding"] for each in json.loads(ran.stdout)["findings"]]
        assert any("channel 'billing', which never gave out offset 0" in each for each in findings), findings
        assert 204 == http.delete(CHANNEL).status_code
        deadline = time.monotonic() + 120
        while not http.get(partition.path).json()["start_offset"]:
            assert time.monotonic() < deadline, "retention stands still"
            time.sleep(0.02)
        assert "billing" not in problem(partition.post(b"no"), 507, "disk_full")["detail"]

        ballast.unlink()
        until_low(http, False)
        assert 4 == partition.append("again")
        assert ["again"] == partition.values(offset=4)


def leave_free(ballast: Path, free_bytes: int) -> None:
    """Have the ballast leave about this much on its disk."""
    with ballast.open("ab") as file:
        size = file.tell() + RealDisk().free_bytes(str(ballast.parent)) - free_bytes
        file.truncate(min(size, file.tell()))
        os.posix_fallocate(file.fileno(), 0, size)


def until_received(http: httpx.Client) -> list[str]:
    """The tokens of all jobs that there are, as soon as the node sees that there is room for consumers."""
    tokens: list[str] = []
    deadline = time.monotonic() + 120
    while True:
        answer = http.post(f"{CHANNEL}/receive", json={"max": 100, "wait_ms": 0})
        if answer.status_code == 200 and not answer.json()["jobs"]:
            return tokens
        if answer.status_code == 200:
            tokens += [job["token"] for job in answer.json()["jobs"]]
        else:
            problem(answer, 507, "disk_full")
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)


def test_on_a_nearly_full_disk_consumers_go_on_and_make_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who works off a channel frees what it kept, and producers go on; no job is lost or skipped for it.

    Consumers have a reserve. When that is used up they are refused, too.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    settings: dict[str, str | int] = {
        "segment_size_bytes": MIB,
        "journal_file_bytes": 4 * MIB,
        "retention_check_ms": 20,
        "low_water_percent": "20",
    }
    ballast = small_disk / "ballast"
    with serve(settings=settings) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert 201 == http.put("/v1/topics/t", json={"settings": {"retention_bytes": 0}}).status_code
        assert 201 == http.put(CHANNEL, json={}).status_code
        partition = Partition(http, "t")
        for _ in range(20):
            assert 201 == unless_overloaded(lambda: partition.post(b"x" * MIB)).status_code
        leave_free(ballast, 8 * MIB)
        while "appends and consumers are refused" not in str(until_low(http, True)["warnings"]):
            time.sleep(0.02)
        problem(partition.post(b"no"), 507, "disk_full")
        for refused in (
            http.post(f"{CHANNEL}/receive", json={"max": 1, "wait_ms": 0}),
            http.put("/v1/topics/t/cursors/reader", json={"positions": {"0": 1}}),
        ):
            assert 96 * MIB * 10 // 100 >= problem(refused, 507, "disk_full")["limit"]

        leave_free(ballast, 14 * MIB)

        tokens = until_received(http)
        cursor = http.put("/v1/topics/t/cursors/reader", json={"positions": {"0": 20}})
        assert 200 == cursor.status_code
        problem(partition.post(b"no"), 507, "disk_full")
        assert 0 == http.get(partition.path).json()["start_offset"]
        acked = http.post(f"{CHANNEL}/acks", json={"ack": tokens}).json()
        assert {"done": 20, "late": []} == acked
        until_low(http, False)
        assert http.get(partition.path).json()["start_offset"]
        assert 20 == partition.append("again")


def test_trimming_a_full_disk_makes_room_at_once(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the segment that is written to: here it holds all there is. Until then a producer, of whom
    several batches are under way, is told that it is the disk.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    settings: dict[str, str | int] = {"journal_file_bytes": 4 * MIB, "low_water_percent": "20"}
    with serve(settings=settings) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert 201 == http.put("/v1/topics/t", json={}).status_code
        partition = Partition(http, "t")
        for _ in range(30):
            assert 201 == unless_overloaded(lambda: partition.post(b"x" * MIB)).status_code
        with (small_disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RealDisk().free_bytes(str(small_disk)) - 10 * MIB)
        until_low(http, True)

        with laminar.connect(url) as client, pytest.raises(laminar.ProduceError) as undelivered:
            with client.topic("t").producer(batch_bytes=1, timeout=5) as producer:
                for _ in range(8):
                    producer.send(b"no")
        assert all("low-water mark" in str(each.error) for each in undelivered.value.undelivered)

        command = [sys.executable, "-m", "laminar.cli", "produce", "t", "--url", url, "--timeout", "5"]
        produced = subprocess.run(command, input=b"no", capture_output=True, check=False)
        assert (EXIT_UNAVAILABLE, True) == (produced.returncode, b"low-water mark" in produced.stderr)

        trimmed = http.delete(f"{partition.path}/records", params={"before": 30}).json()

        assert 30 == trimmed["deleted"]
        until_low(http, False)
        assert 30 == partition.append("again")


def until_taken(partition: Partition, line: str) -> None:
    """What waits in the journal for room is tried again once a second: until then the disk is full."""
    deadline = time.monotonic() + 120
    while (answer := partition.post(line, ENVELOPE_LINES)).status_code != 201:
        problem(answer, 507, "disk_full")
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)


def fill(disk: Path) -> None:
    """To the last byte, as another program that uses the same disk may."""
    for number in range(100):
        free_bytes = RealDisk().free_bytes(str(disk))
        if not free_bytes:
            return
        with (disk / f"ballast-{number}").open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, free_bytes)
    raise AssertionError(f"{disk} has {free_bytes} bytes free")


@pytest.mark.parametrize("how", ["trimmed", "deleted"])
def test_a_disk_that_is_full_before_it_is_seen_to_be_low_gets_room_by_what_is_given_up(
    how: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more fits into a segment. The journal keeps what is acknowledged, and no log fails for it."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    settings: dict[str, str | int] = {
        "journal_file_bytes": 4 * MIB,
        "segment_size_bytes": MIB,
        "low_water_percent": "20",
    }
    with serve(settings=settings) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for topic in ("t", "u"):
            assert 201 == http.put(f"/v1/topics/{topic}", json={}).status_code
        kept, abandoned = Partition(http, "t"), Partition(http, "u")
        for _ in range(30):
            assert 201 == unless_overloaded(lambda: abandoned.post(b"x" * MIB)).status_code
        assert 0 == kept.append("before")
        until_low(http, False)

        fill(small_disk)

        taken = 0
        while (answer := kept.post(json.dumps({"value": str(taken)}), ENVELOPE_LINES)).status_code == 201:
            taken += 1
            assert taken < 10_000
        problem(answer, 507, "disk_full")
        written = ["before", *(str(number) for number in range(taken))]
        assert written == kept.values(limit=taken + 10)
        if how == "trimmed":
            trimmed = http.delete(f"{abandoned.path}/records", params={"before": 30}).json()
            assert 30 == trimmed["deleted"]
        else:
            etag = http.get("/v1/topics/u").headers["etag"]
            assert http.delete("/v1/topics/u", headers={"If-Match": etag}).is_success
        until_low(http, False)
        until_taken(kept, json.dumps({"value": "again"}))
        assert [*written, "again"] == kept.values(limit=taken + 10)
        if how == "trimmed":
            assert 30 == abandoned.append("again")
        assert taken + 2 == kept.append("at once")
        assert 'laminar_storage_failed_logs{process="shard-0"} 0' in http.get("/metrics").text


# -- the trash -------------------------------------------------------------------------------


def thrown_away(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "00000000000000000001.log").write_bytes(b"x")


async def test_trash_is_removed_a_day_after_it_was_first_seen(tmp_path: Path) -> None:
    """Also over restarts: the time is in the name. Nothing goes a moment earlier."""
    thrown_away(tmp_path, "t-0-00aa", "a@b-0-00bb")
    now_ms = 1_800_000_000_000
    await Trash(RealDisk(), str(tmp_path), keep_ms=DAY_MS).purge(now_ms=now_ms)
    assert {f"t-0-00aa@{now_ms}", f"a@b-0-00bb@{now_ms}"} == set(os.listdir(tmp_path))
    thrown_away(tmp_path, "u-0-00cc")

    after_restart = Trash(RealDisk(), str(tmp_path), keep_ms=DAY_MS)
    await after_restart.purge(now_ms=now_ms + DAY_MS - 1)
    assert 3 == len(os.listdir(tmp_path))
    await after_restart.purge(now_ms=now_ms + DAY_MS)

    assert [f"u-0-00cc@{now_ms + DAY_MS - 1}"] == os.listdir(tmp_path)
    assert 2 == after_restart.removed


async def test_when_space_is_low_the_trash_goes_at_once(tmp_path: Path) -> None:
    """What was stamped and what was not."""
    thrown_away(tmp_path, "t-0-00aa", "u-0-00bb@5")

    await Trash(RealDisk(), str(tmp_path), keep_ms=DAY_MS).purge(now_ms=6, everything=True)

    assert [] == os.listdir(tmp_path)


async def test_emptying_a_large_trash_leaves_the_loop_its_turns(tmp_path: Path) -> None:
    """Files go one by one in another thread."""
    thrown_away(tmp_path, "t-0-00aa@0")
    for number in range(30):
        (tmp_path / "t-0-00aa@0" / f"{number:020d}.log").write_bytes(b"x" * 1000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.create_task(count())
    await Trash(RealDisk(), str(tmp_path), keep_ms=DAY_MS).purge(now_ms=DAY_MS)
    counting.cancel()

    assert [] == os.listdir(tmp_path)
    assert turns > 30


async def test_no_trash_is_no_trouble(tmp_path: Path) -> None:
    """A node that never deleted anything has no such folder."""
    trash = Trash(RealDisk(), str(tmp_path / "none"), keep_ms=DAY_MS)

    await trash.purge(now_ms=1)

    assert 0 == trash.removed
