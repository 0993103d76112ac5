"""Rows that travel in the tasks' messages: which do, and how the driver stages them."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow

import laminar
from laminar.batch import Batch, build
from laminar.client.net.endpoints import resolve
from laminar.spark.read import cluster as clusters
from laminar.spark.write.held_rows import (
    HELD_BYTES,
    HeldRows,
    HeldStager,
    Placed,
    hold,
    joined,
    runs_of,
    take_small,
)
from laminar.spark.write.rows import STAGE_BYTES, Stage

POSITIONS = {"value": 0, "key": 1, "tag": 2, "traceid": 3}


def stage(partition: int, *values: bytes, topic: str = "t") -> Stage:
    return topic, partition, build(values), len(values)


def held(task: int) -> HeldRows:
    return HeldRows(task, (), {}, False)


def test_only_what_a_message_may_hold_is_taken() -> None:
    """The rest is neither read nor lost."""
    size = HELD_BYTES // 4
    rows = iter([pyarrow.record_batch({"value": [b"." * size]}) for _ in range(10)])

    first, whole = take_small(rows)

    assert not whole and HELD_BYTES < sum(batch.nbytes for batch in first) < HELD_BYTES + 2 * size
    assert len(first) + len(list(rows)) == 10
    assert take_small(iter(first[:2])) == (first[:2], True)
    assert take_small(iter([])) == ([], True)


def test_held_rows_stand_between_the_tasks_that_staged_their_own() -> None:
    runs = runs_of([held(7), held(0), held(1), held(4), held(9)], [8, 2])

    assert [[each.task for each in run] for run in runs] == [[0, 1], [4, 7], [9]]
    assert runs_of([], [1]) == []


def test_frames_of_a_partition_are_joined_in_order_up_to_the_size_of_a_stage() -> None:
    """Never those of two routes: a node checks where a frame belongs by its route."""
    large = b"." * (STAGE_BYTES * 2 // 3)
    given = [
        *(Placed(stage(0, b"a", b"b"), 1), Placed(stage(1, b"c"), 1), Placed(stage(0, b"d"), 1)),
        *(Placed(stage(0, b"e"), 2), Placed(stage(1, large), 1), Placed(stage(1, large), 1)),
        Placed(stage(0, b"f", topic="u"), 1),
    ]

    made = [
        (each.stage[:2], each.version, [bytes(value) for value in Batch(bytes(each.stage[2])).values])
        for each in joined(given)
    ]

    assert made == [
        (("t", 0), 1, [b"a", b"b", b"d"]),
        (("t", 1), 1, [b"c", large]),
        (("t", 1), 1, [large]),
        (("t", 0), 2, [b"e"]),
        (("u", 0), 1, [b"f"]),
    ]
    assert [each.stage[3] for each in joined(given)] == [3, 2, 1, 1, 1]


@pytest.mark.parametrize("known", ["before", "after"])
def test_a_route_that_changed_between_task_and_commit_breaks_no_order(
    url: str, client: laminar.Client, known: str, no_connection_is_left: None
) -> None:
    """Whether or not the driver has heard of the split and the merge; all columns are kept."""
    name = f"held-{known}"
    topic = client.create_topic(name, partitions=2, replicas=1)
    here = clusters.cluster(resolve(url, None), timeout_ms=30_000)
    here.run(here.session.topic_map(name))
    keys = [f"key {number % 17}" if number % 19 else None for number in range(600)]

    def task(number: int) -> HeldRows:
        mine = range(100 * number, 100 * number + 100)
        rows = pyarrow.record_batch(
            {
                "value": [b"%d" % each for each in mine],
                "key": [keys[each] for each in mine],
                "tag": [f"tag {each}" for each in mine],
                "traceId": [each.to_bytes(16) for each in mine],
            }
        )
        return hold(here, [rows], POSITIONS, topic=name, task=number)

    tasks = [task(number) for number in range(5)]
    topic.split(0, at=9_000, wait=30)
    topic.merge([3, 1], wait=30)
    if known == "after":
        here.run(here.session.map_by_others(name, avoid=(), wait_ms=0))
        tasks.append(task(5))  # cut by the new route
    else:
        tasks.append(task(5))
    stager = HeldStager(here, f"sink-{known}", number=0, epoch=1)
    staged = here.run(stager.stage(tasks[::-1], []))
    sink = client.sink(f"sink-{known}")
    sink.begin(epoch=1)
    assert "applied" == sink.commit(0, staged, epoch=1)

    read = list(topic.read())
    assert list(range(600)) == sorted(int(record.raw) for record in read)
    last: dict[bytes | None, int] = {}
    for record in read:
        number = int(record.raw)
        key = keys[number]
        assert (f"tag {number}", f"{number:032x}") == (record.tag, record.trace_id)
        assert (None if key is None else key.encode()) == record.key
        if record.key is not None:
            assert last.get(record.key, -1) < number
            last[record.key] = number
