"""When a change of a topic's route closes, waits, or is cancelled: the decision alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from laminar.node.routes.messages import PartitionAnswer
from laminar.node.routes.plan import (
    ABANDON_MS,
    FRESH_MS,
    HOLD_BEFORE_MS,
    LEAST_MS,
    SILENT_MS,
    Decision,
    Round,
    decide,
    waits_of_closing,
)
from membership.records import KeyRange, Output, RouteChange, Seal

READY = PartitionAnswer(leads=True)
BUSY = PartitionAnswer(leads=True, under_way=2, prepared=1)
FULL = PartitionAnswer(leads=True, refused="the disk of this node is full")
ALL = {0: READY, 1: READY, 2: READY}


def change(*, wait_ms: int = 60_000, abandon: bool = False, force: bool = False) -> RouteChange:
    """Return a merge of 0 and 1 to 2."""
    return RouteChange(
        7,
        1,
        [KeyRange(0, 0, 100), KeyRange(1, 100, 100)],
        [Output(2, 0, 200, b"g" * 16)],
        "weak" if force else "strict",
        "preparing",
        0,
        wait_ms,
        abandon,
        force,
    )


def after(
    answers: Mapping[int, PartitionAnswer],
    under_way: RouteChange | None = None,
    *,
    held: bool = False,
    age_ms: int = 5,
    elapsed_ms: int = 400,
    creating: tuple[int, ...] = (),
    silent_ms: Mapping[int, int] | None = None,
) -> Decision:
    return decide(
        under_way or change(),
        Round(1_000, held, False, answers),
        creating=creating,
        silent_ms=silent_ms or {},
        elapsed_ms=elapsed_ms,
        now_ms=1_000 + age_ms,
    )


def test_a_change_closes_when_all_were_ready_and_held_in_one_round() -> None:
    """Ready alone is not enough: something may have begun since."""
    ready = after(ALL)
    assert ("wait", (), True, True) == (ready.action, ready.waits_for, ready.hold, ready.at_once)
    assert "close" == after(ALL, held=True).action


def test_answers_that_are_old_close_nothing() -> None:
    """The hold may be over by the time that the seals come."""
    assert "wait" == after(ALL, held=True, age_ms=FRESH_MS).action


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({1: READY, 2: READY}, "partition 0 has no leader"),
        ({**ALL, 1: BUSY}, "partition 1: 2 transactions or uploads are under way, 1 of them prepared"),
        ({0: READY, 1: READY}, "partition 2 has no leader yet"),
        ({**ALL, 2: FULL}, "partition 2: the disk of this node is full"),
    ],
)
def test_what_is_in_the_way_is_named_and_cancels_in_the_end(
    answers: Mapping[int, PartitionAnswer], said: str
) -> None:
    waiting = after(answers, held=True)
    assert ("wait", (said,)) == (waiting.action, waiting.waits_for)
    over = after(answers, held=True, elapsed_ms=60_000)
    assert ("cancel", (said,)) == (over.action, over.waits_for)


def test_an_output_that_is_not_made_is_waited_for() -> None:
    waiting = after({0: READY, 1: READY}, creating=(2,))
    assert ("wait", ("partition 2 is being made",), False) == (
        waiting.action,
        waiting.waits_for,
        waiting.hold,
    )


def test_before_the_end_of_its_time_a_change_has_its_inputs_hold() -> None:
    """Else a partition where something always begins is never ready."""
    busy = {**ALL, 1: BUSY}
    assert not after(busy, elapsed_ms=60_000 - HOLD_BEFORE_MS - 1).hold
    assert after(busy, elapsed_ms=60_000 - HOLD_BEFORE_MS).hold


def test_with_no_time_a_change_closes_only_if_nothing_is_under_way() -> None:
    """It still waits for its outputs, and for a leader."""
    at_once = change(wait_ms=0)
    assert "cancel" == after({**ALL, 1: BUSY}, at_once, elapsed_ms=300).action
    assert "wait" == after(ALL, at_once, elapsed_ms=300).action
    assert "close" == after(ALL, at_once, held=True, elapsed_ms=300).action
    assert "wait" == after({0: READY, 1: READY}, at_once, elapsed_ms=LEAST_MS - 1).action
    assert "cancel" == after({0: READY, 1: READY}, at_once, elapsed_ms=LEAST_MS).action


def test_what_is_in_the_way_is_dropped_at_the_end_if_that_was_asked_for() -> None:
    """A prepared batch is not: it may be decided. So the change is cancelled some time later."""
    busy, asked = {**ALL, 1: BUSY}, change(abandon=True)
    assert not after(busy, asked, elapsed_ms=59_999).drop
    dropping = after(busy, asked, held=True, elapsed_ms=60_000)
    assert ("wait", True, True) == (dropping.action, dropping.drop, dropping.hold)
    assert "cancel" == after(busy, asked, elapsed_ms=60_000 + ABANDON_MS).action
    assert not after(busy, elapsed_ms=59_999).drop


def test_a_forced_change_goes_on_without_an_input_that_is_silent() -> None:
    lacking, forced = {1: READY, 2: READY}, change(force=True)
    assert "wait" == after(lacking, forced, held=True, silent_ms={0: SILENT_MS - 1}).action
    assert "close" == after(lacking, forced, held=True, silent_ms={0: SILENT_MS}).action
    assert "wait" == after(lacking, held=True, silent_ms={0: SILENT_MS}).action


def test_a_closing_change_names_the_inputs_that_are_not_sealed() -> None:
    closing = RouteChange(
        7, 1, change().inputs, change().outputs, "strict", "closing", 0, 0, seals={0: Seal(1, 2, 3)}
    )
    answers: dict[int, PartitionAnswer] = {}
    said = waits_of_closing(closing, Round(0, True, False, answers))
    assert ("partition 1 has no leader that seals it",) == said
    said = waits_of_closing(closing, Round(0, True, False, {1: BUSY}))
    assert ("partition 1: 2 transactions or uploads are under way, 1 of them prepared",) == said
