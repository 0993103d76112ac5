"""The pipelines: what they promise, on topics that were filled with known faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import laminar
from laminar.spark.pipelines.session import cluster_options
from tests.long_examples import long

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Topic = laminar.Topic[bytes]
RECORDS = 900
KEYS = 17


def fill(topic: Topic, count: int, *, first: int = 0) -> None:
    with topic.producer() as producer:
        for number in range(first, first + count):
            producer.send(
                b"%d" % number,
                b"key %d" % (number % KEYS),
                tag=f"tag {number % 3}",
                headers={"id": b"%d" % number},
                timestamp_ms=1_700_000_000_000 + number * 60_000,
            )


@pytest.fixture
def make(client: laminar.Client, topic: Topic) -> Callable[[str], Topic]:
    """``make("out")``: another topic of this test's own, with four partitions."""
    return lambda name: client.create_topic(f"{topic.name}-{name}", partitions=4, replicas=1)


def by_key(topic: Topic) -> dict[bytes | None, list[tuple[int, str | None, dict[str, bytes], int]]]:
    found: dict[bytes | None, list[tuple[int, str | None, dict[str, bytes], int]]] = {}
    for record in topic.read():
        row = (int(record.raw), record.tag, dict(record.headers), record.timestamp)
        found.setdefault(record.key, []).append(row)
    return found


def test_an_archive_goes_on_and_is_replayed_once(
    spark: SparkSession, url: str, topic: Topic, make: Callable[[str], Topic], tmp_path: Path
) -> None:
    """Topic to Parquet in two runs, and into another topic in slices: every record, each key in order."""
    from laminar.spark.pipelines.archive import archive, check
    from laminar.spark.pipelines.replay import replay

    cluster, folder, out = cluster_options(url), str(tmp_path / "archive"), make("out")
    told: list[int] = []
    fill(topic, RECORDS)
    first = archive(spark, cluster, topic.name, folder, batch_records=400, progress=told.append)
    fill(topic, 100, first=RECORDS)
    second = archive(spark, cluster, topic.name, folder)
    held = check(spark, folder)
    job: dict[str, Any] = {"slice_records": 150, "checkpoint": str(tmp_path / "replay")}
    done = replay(spark, cluster, out.name, archive=folder, **job)
    fill(topic, 5, first=RECORDS + 100)
    archive(spark, cluster, topic.name, folder)
    again = replay(spark, cluster, out.name, archive=folder, **job)

    assert (RECORDS, 100, RECORDS) == (first, second, told[-1])
    assert RECORDS + 100 == sum(each.records for each in held)
    assert all((0, 0, 0) == (each.first_offset, each.missing, each.doubled) for each in held)
    assert (RECORDS + 100, 0) == (done.records, done.slices_before)
    assert (0, 0, done.slices) == (again.records, again.slices, again.slices_before)
    assert [RECORDS + 100 + n for n in range(5)] == sorted(
        row[0] for key, rows in by_key(topic).items() for row in rows if row not in by_key(out)[key]
    )
    assert RECORDS + 100 == sum(map(len, by_key(out).values()))
    with pytest.raises(ValueError, match="belongs to a replay with slice_records 150, not 7"):
        replay(spark, cluster, out.name, archive=folder, **{**job, "slice_records": 7})


def test_a_replay_that_died_goes_on(
    spark: SparkSession, url: str, topic: Topic, make: Callable[[str], Topic], tmp_path: Path
) -> None:
    """Behind the last slice that was committed; of a time range, and into the same partitions."""
    from laminar.spark.pipelines.replay import replay

    class Died(Exception):
        pass

    def die(done: int, slices: int) -> None:
        if done == 2:
            raise Died

    fill(topic, RECORDS)
    out = make("out")
    given: dict[str, Any] = {"topic": topic.name, "slice_records": 60, "keep_partitions": True}
    given |= {"checkpoint": str(tmp_path)}
    given |= {"since_ms": 1_700_000_000_000 + 100 * 60_000, "until_ms": 1_700_000_000_000 + 700 * 60_000}
    with pytest.raises(Died):
        replay(spark, cluster_options(url), out.name, **given, progress=die)
    # As a command with relative times does when it is given again.
    given |= {"since_ms": 1_700_000_000_000 + 200 * 60_000, "until_ms": None}
    done = replay(spark, cluster_options(url), out.name, **given)

    assert 2 == done.slices_before
    wanted = {key: [row for row in rows if 100 <= row[0] < 700] for key, rows in by_key(topic).items()}
    assert wanted == by_key(out)
    assert {r.key: r.partition for r in topic.read()} == {r.key: r.partition for r in out.read()}


def test_an_audit_finds_what_was_planted_and_nothing_else(
    spark: SparkSession, url: str, topic: Topic, make: Callable[[str], Topic], tmp_path: Path
) -> None:
    """One lost, one doubled, one reordered, one unclaimed; each with its key and place."""
    from laminar.spark.pipelines.audit import audit, read_claims

    def finding(told: Any, kind: str) -> list[str]:
        [found] = [each for each in told.findings if each.kind == kind]
        assert found.count == len(found.examples)
        return [each["id"] for each in found.examples]

    numbers = list(range(RECORDS))
    claims = tmp_path / "claims.jsonl"
    claims.write_text("".join(json.dumps({"id": str(n), "ordinal": n}) + "\n" for n in numbers))
    fill(topic, RECORDS)
    faulty = make("faulty")
    # 34 comes after 51, its key's next; 300 is missing, 400 is there twice, 9000 was never claimed.
    planted = [n for n in numbers if n not in (34, 300)]
    planted.insert(planted.index(51) + 1, 34)
    planted += [400, 9_000]
    with faulty.producer() as producer:
        for number in planted:
            producer.send(b"%d" % number, b"key %d" % (number % KEYS))

    sound = audit(spark, cluster_options(url), topic.name, read_claims(spark, str(claims)), id="header:id")
    told = audit(spark, cluster_options(url), faulty.name, read_claims(spark, str(claims)))

    assert sound.sound and (RECORDS, RECORDS) == (sound.claims, sound.records)
    assert not told.sound and (RECORDS, RECORDS + 1) == (told.claims, told.records)
    assert ["300"] == finding(told, "lost")
    assert ["400"] == finding(told, "doubled")
    assert ["34"] == finding(told, "reordered")
    assert ["9000"] == finding(told, "unclaimed")


@pytest.mark.parametrize("master", ["local[1]", *long("local-cluster[1,2,1024]")])
def test_a_pipeline_runs_as_a_command_on_an_executor_of_its_own(
    url: str, topic: Topic, tmp_path: Path, master: str
) -> None:
    """``laminar pipeline archive``, in the driver, and with an executor that is a process beside it."""
    fill(topic, 200)
    command = [sys.executable, "-m", "laminar.cli", "pipeline", "archive", topic.name, str(tmp_path / "out")]
    command += ["--url", url, "--json", "--master", master]
    command += ["--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr[-3_000:]
    held = json.loads(done.stdout)
    assert topic.offsets() == {each["partition"]: each["records"] for each in held}
    assert not any(each["missing"] or each["doubled"] for each in held)
    assert "200 records written" in done.stderr


@pytest.mark.parametrize("given", ["offset", "header:", "json:x", "id"])
def test_an_id_that_is_no_place_in_a_record_is_refused(spark: SparkSession, given: str) -> None:
    """The message says what there is."""
    from laminar.spark.pipelines.audit import identity

    with pytest.raises(ValueError, match=f"an id must be key, value, header:NAME or json:.*not '{given}'"):
        identity(given)
