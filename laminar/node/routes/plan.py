"""The next step of a change of a topic's route that is under way: a decision, as a pure function.

A change replaces its *inputs* (partitions that are sealed) by its *outputs* (new partitions over the same
keys). The catalog's leader polls the leaders of both in rounds, and decides from one round: the change closes
when all inputs are ready *at the same time*, so that their seals are milliseconds apart. An input is ready if
no transaction or upload is under way there, and none may begin for a while, because the round asked the input
to *hold*. What has begun goes on, so each input becomes ready at some time, or the change is cancelled at the
end of its `wait_ms`. Until it is closed a change can be cancelled without harm.

What a change promises (docs/routes.md) does not depend on these rules: they keep waits short.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from laminar.node.routes.messages import PartitionAnswer
from membership.records import RouteChange

ROUND_MS = 200
"""The pause between two rounds."""

HOLD_MS = 2_000
"""How long an input that is asked to hold begins nothing."""

FRESH_MS = 1_000
"""How old the answers may be by which a change closes: the inputs still hold when it is committed."""

HOLD_BEFORE_MS = 10_000
"""From this time before the end of its time a change has its inputs hold, though not all are ready."""

LEAST_MS = 5_000
"""How long a change waits at least for its outputs to be made, and for leaders: also with `wait_ms` 0."""

ABANDON_MS = 10_000
"""How long a change that abandons what is in its way waits for the rest, after its time is over."""

SILENT_MS = 3_000
"""How long no leader of an input answers before a forced change goes on without it."""

Action = Literal["wait", "close", "cancel"]


@dataclass(frozen=True, slots=True)
class Round:
    """One poll of a change's inputs and outputs, from which `decide` tells whether the change may close.

    `asked_ms` is when the poll began (monotonic clock); `answers` has the answer of each partition's leader,
    by the partition's number. `held` says whether the poll asked the inputs to hold (begin no transaction or
    upload for `HOLD_MS`); `dropped`, whether it asked them to drop those that are not prepared.
    """

    asked_ms: int
    held: bool
    dropped: bool
    answers: Mapping[int, PartitionAnswer]


@dataclass(frozen=True, slots=True)
class Decision:
    """The action to take after a round, and what the next round asks of the inputs (`hold`, `drop`).

    `waits_for` has the reasons for waiting or cancelling, as text for people.
    """

    action: Action
    waits_for: tuple[str, ...]
    hold: bool = False
    drop: bool = False
    at_once: bool = False
    """Whether the next round begins without a pause."""


def decide(
    change: RouteChange,
    last: Round,
    *,
    creating: Collection[int],
    silent_ms: Mapping[int, int],
    elapsed_ms: int,
    now_ms: int,
) -> Decision:
    """Return whether a `preparing` change is to wait, close or be cancelled after the round `last`.

    `creating` are the outputs that some node has still to create; `silent_ms` says, by input, for how long no
    leader of it has answered. `elapsed_ms` is the time since the change began, `now_ms` the monotonic clock.
    """
    making = _making(change, last, creating)
    absent, busy = _inputs(change, last, silent_ms)
    waits_for = (*making, *absent, *busy)
    rest_ms = change.wait_ms - elapsed_ms
    hold = not waits_for or (not making and rest_ms <= HOLD_BEFORE_MS)
    drop = change.abandon and rest_ms <= 0 and bool(busy)
    if not waits_for and last.held and now_ms - last.asked_ms < FRESH_MS:
        return Decision("close", (), hold=True)
    patience_ms = change.wait_ms
    if not busy:  # its outputs, or an election, or the round in which all hold
        patience_ms = max(patience_ms, LEAST_MS)
    elif change.abandon:
        patience_ms += ABANDON_MS
    if elapsed_ms >= patience_ms:
        return Decision("cancel", waits_for or ("answers that take too long",))
    at_once = (hold and not last.held and not waits_for) or (drop and not last.dropped)
    return Decision("wait", waits_for, hold=hold, drop=drop, at_once=at_once)


def waits_of_closing(change: RouteChange, last: Round) -> tuple[str, ...]:
    """Return which seals a `closing` change waits for: one text for people for each unsealed input."""
    found = []
    for held in change.inputs:
        if held.number in change.seals:
            continue
        answer = last.answers.get(held.number)
        if answer is None:
            found.append(f"partition {held.number} has no leader that seals it")
        elif answer.under_way:
            found.append(_in_the_way(held.number, answer))
        else:
            found.append(f"partition {held.number} is being sealed")
    return tuple(found)


def _making(change: RouteChange, last: Round, creating: Collection[int]) -> list[str]:
    """Return, as texts for people, what is missing before the outputs can take records."""
    found = []
    for output in change.outputs:
        answer = last.answers.get(output.number)
        if output.number in creating:
            found.append(f"partition {output.number} is being made")
        elif answer is None:
            found.append(f"partition {output.number} has no leader yet")
        elif answer.refused:
            found.append(f"partition {output.number}: {answer.refused}")
    return found


def _inputs(change: RouteChange, last: Round, silent_ms: Mapping[int, int]) -> tuple[list[str], list[str]]:
    """Return which inputs have no leader, and which are not ready."""
    absent, busy = [], []
    for held in change.inputs:
        answer = last.answers.get(held.number)
        if answer is None:
            if not (change.force and silent_ms.get(held.number, 0) >= SILENT_MS):
                absent.append(f"partition {held.number} has no leader")
        elif answer.under_way:
            busy.append(_in_the_way(held.number, answer))
    return absent, busy


def _in_the_way(number: int, answer: PartitionAnswer) -> str:
    return (
        f"partition {number}: {answer.under_way} transactions or uploads are under way, "
        f"{answer.prepared} of them prepared"
    )
