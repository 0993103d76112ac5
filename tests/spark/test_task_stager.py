"""The numbers of a task's stages, which say in what order a commit publishes them."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

import laminar
from laminar.client.net.endpoints import resolve
from laminar.spark.read import cluster as clusters
from laminar.spark.write.task_stager import ATTEMPT_BITS, COUNT_BITS, TASK_BITS, TaskStager, first_stage

LAST = (1 << TASK_BITS) - 1
HIGHEST = (1 << ATTEMPT_BITS) - 1


def test_tasks_never_meet_and_stand_in_their_order() -> None:
    """Whatever their attempts drew: two tasks with one number would be a write that can't be committed."""
    tasks = [*range(20_000), LAST - 1, LAST]
    beyond = 0
    for task in tasks:
        assert beyond <= first_stage(task, 0) <= first_stage(task, HIGHEST)
        beyond = first_stage(task, HIGHEST) + (1 << COUNT_BITS)
    assert beyond == 1 << 53, "all of the numbers that a stage may have"


@pytest.mark.parametrize(
    ("task", "attempts"), [(0, 1 << 21), (8_191, 1 << 21), (8_192, 1 << 10), (LAST, 1 << 10)]
)
def test_attempts_at_a_task_draw_from_all_the_room_there_is(task: int, attempts: int) -> None:
    """Where two draw the same, the later one may fail, and is made again."""
    room = first_stage(task, HIGHEST) - first_stage(task, 0) >> COUNT_BITS
    assert attempts - 1 == room


def test_more_tasks_than_there_are_numbers_for_are_refused() -> None:
    """Before such a task stages anything."""
    with pytest.raises(ValueError, match=r"task 16777216: .* at most 16777216 tasks"):
        first_stage(LAST + 1, 0)


def test_what_an_ended_partition_refuses_is_cut_anew(url: str, client: laminar.Client) -> None:
    """The task has the route of before a split and a merge; rows of one key stay in order."""
    import pyarrow

    topic = client.create_topic("cut-anew", partitions=2, replicas=1)
    here = clusters.cluster(resolve(url, None), timeout_ms=30_000)
    here.run(here.session.topic_map("cut-anew"))
    topic.split(0, at=9_000, wait=30)
    topic.merge([3, 1], wait=30)
    keys = [f"key {number % 17}" if number % 19 else None for number in range(3_000)]
    rows = [
        pyarrow.record_batch(
            {
                "value": [b"%d" % number + b"." * 2_000 for number in range(first, first + 500)],
                "key": keys[first : first + 500],
                "tag": [f"tag {number}" for number in range(first, first + 500)],
                "traceId": [number.to_bytes(16) for number in range(first, first + 500)],
            }
        )
        for first in range(0, 3_000, 500)
    ]
    stager = TaskStager(here, "cutter", number=0, epoch=1, task=3)
    staged = stager.stage(rows, {"value": 0, "key": 1, "tag": 2, "traceid": 3}, topic="cut-anew")
    assert staged is not None and 3_000 == staged.records
    sink = client.sink("cutter")
    sink.begin(epoch=1)
    assert "applied" == sink.commit(0, [staged], epoch=1)

    read = list(topic.read())
    assert list(range(3_000)) == sorted(int(record.value.rstrip(b".")) for record in read)
    last: dict[bytes | None, int] = {}
    for record in read:
        number = int(record.value.rstrip(b"."))
        assert (f"tag {number}", f"{number:032x}") == (record.tag, record.trace_id)
        key = keys[number]
        assert (None if key is None else key.encode()) == record.key
        if record.key is not None:
            assert last.get(record.key, -1) < number
            last[record.key] = number
