"""The numbers of a task's stages, which say in what order a commit publishes them."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from laminar.spark.write.task_stager import ATTEMPT_BITS, COUNT_BITS, TASK_BITS, first_stage

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
