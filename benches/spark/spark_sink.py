"""The part of `make bench-spark` that writes: Spark's sink into a live cluster, beside the sink alone.

Rows of 1 KiB values, from Spark's memory, go through the sink into a topic; beside it, in turns, through the
same sink that throws its frames away where it would send them. Then what a micro-batch costs from topic to
topic, exactly once. It knows no cluster: `bench_spark` has one.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benches.spark.spark_discard import PARTITIONS, DiscardSource
from benches.spark.spark_rig import cpu_by_pid, spark_pids, used_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benches.spark.bench_spark import Rig

VALUE_BYTES = 1024
# What is to be reached, both sides measured in one run.
OF_DISCARDED, MICRO_BATCH_MS = 0.6, 180


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rows: int = 400_000
    rounds: int = 3
    warm_rounds: int = 1
    micro_batches: int = 40
    warm_batches: int = 5  # the first of a query start workers


QUICK = Sizes(rows=2_000, rounds=1, warm_rounds=0, micro_batches=3, warm_batches=1)


def measure(rig: Rig, sizes: Sizes) -> None:
    """Everything, on a cluster and a session that are there."""
    _writes(rig, sizes)
    _micro_batches(rig, sizes)


def _writes(rig: Rig, sizes: Sizes) -> None:
    rig.spark.dataSource.register(DiscardSource)
    value = f"cast(rpad(id, {VALUE_BYTES}, 'x') as binary) as value"
    every = rig.spark.range(0, sizes.rows, 1, PARTITIONS)
    rows = every.selectExpr("cast(id % 10000 as string) as key", value).persist()
    assert rows.count() == sizes.rows
    frames = {"value": rows.select("value"), "key and value": rows}
    cases = {
        f"{form}, {columns}": (form, frame)
        for columns, frame in frames.items()
        for form in ("laminar", "laminar-discard")
    }
    topics = {name: f"written-{number}" for number, name in enumerate(cases)}
    for topic in topics.values():
        rig.client.create_topic(topic, partitions=PARTITIONS, replicas=rig.replicas)
    took: dict[str, list[float]] = {name: [] for name in cases}
    cpu_s: dict[str, list[float]] = {name: [0.0, 0.0] for name in cases}
    for number in range(sizes.rounds + sizes.warm_rounds):
        for name, (form, frame) in cases.items():
            nodes_s, spark_s = rig.nodes_cpu_s(), cpu_by_pid(spark_pids(rig.spark))
            began = time.perf_counter()
            _write(frame, form, rig.endpoints, topics[name])
            if number >= sizes.warm_rounds:
                took[name].append(time.perf_counter() - began)
                cpu_s[name][0] += rig.nodes_cpu_s() - nodes_s
                cpu_s[name][1] += used_s(spark_s, cpu_by_pid(spark_pids(rig.spark)))
    rows.unpersist()
    for name, (form, _) in cases.items():
        written = sum(rig.client.topic(topics[name]).offsets().values())
        expected = sizes.rows * (sizes.rounds + sizes.warm_rounds) if form == "laminar" else 0
        assert written == expected, f"{name}: {written} records of {expected} are there"
    gb = sizes.rows * VALUE_BYTES / 1e9
    for name, seconds in took.items():
        nodes, spark = (each / gb / sizes.rounds for each in cpu_s[name])
        median_s = statistics.median(seconds)
        say(
            f"into {name:<32} {median_s:6.2f} s {gb * 1000 / median_s:8,.0f} MB/s;"
            f" CPU s a GB: nodes {nodes:.2f}, Spark {spark:.2f}"
        )
    began = time.perf_counter()
    rig.topic("produced", rows=sizes.rows, value=b"x" * VALUE_BYTES)
    say(f"the client's own producer: {gb * 1000 / (time.perf_counter() - began):,.0f} MB/s, keys and values")
    for columns in frames:
        alone, whole = (
            statistics.median(took[f"{form}, {columns}"]) for form in ("laminar-discard", "laminar")
        )
        ratio = alone / whole
        met = "met" if ratio >= OF_DISCARDED else "MISSED"
        say(f"{columns}: {ratio:.2f} of the sink that throws its frames away (aim {OF_DISCARDED}: {met})")


def _write(frame: DataFrame, form: str, endpoints: str, topic: str) -> None:
    options = {"laminar.endpoints": endpoints, "topic": topic}
    frame.write.format(form).options(**options).mode("append").save()


def _micro_batches(rig: Rig, sizes: Sizes) -> None:
    """Batches of about one record a partition, from topic to topic, exactly once."""
    count = sizes.micro_batches * PARTITIONS
    rig.topic("tiny-in", rows=count, value=b"x")
    rig.client.create_topic("tiny-out", partitions=PARTITIONS, replicas=rig.replicas)
    query = (
        rig.spark.readStream.format("laminar")
        .options(**{"laminar.endpoints": rig.endpoints, "subscribe": "tiny-in"})
        .options(startingOffsets="earliest", maxOffsetsPerTrigger=str(PARTITIONS))
        .load()
        .select("value")
        .writeStream.format("laminar")
        .options(**{"laminar.endpoints": rig.endpoints, "topic": "tiny-out"})
        .option("checkpointLocation", str(rig.folder / "checkpoint-sink"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    told = [each["durationMs"] for each in query.recentProgress if each["numInputRows"]][sizes.warm_batches :]
    copied = sum(rig.client.topic("tiny-out").offsets().values())
    assert copied == count, f"{copied} records were copied"
    whole = statistics.median(each["triggerExecution"] for each in told)
    parts = {name: statistics.median(each[name] for each in told) for name in ("walCommit", "addBatch")}
    met = "met" if whole <= MICRO_BATCH_MS else "MISSED"
    say(
        f"a micro-batch from topic to topic, exactly once: {whole:.0f} ms (aim {MICRO_BATCH_MS}: {met}),"
        f" of it {parts['addBatch']:.0f} ms reading, staging and committing; {len(told)} batches"
    )


def say(text: str) -> None:
    print(text, flush=True)
