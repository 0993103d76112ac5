"""What a driver is told of a commit that took several tries: what is not known is not denied."""

from __future__ import annotations

from typing import Any

import pytest

import laminar
from laminar import aio

FENCED = (409, {"code": "fenced", "outcome": "not_applied", "limit": 2})
BEGUN = (200, {"sink": "s", "epoch": 1, "committed": None, "publishing": False})


async def failed(cluster: Any, *answers: Any, timeout: float = 30.0) -> laminar.Error:
    """What a commit under epoch 1 raises that is answered so."""
    cluster.sink_answers.clear()
    cluster.sink_answers.append(BEGUN)
    async with aio.connect(cluster.urls) as client:
        sink = client.sink("s")
        await sink.begin()
        cluster.sink_answers.extend(answers)
        cluster.sink_answers.popleft()
        with pytest.raises(laminar.Error) as caught:
            await sink.commit(0, [], timeout=timeout)
    return caught.value


async def test_a_refusal_is_true_of_the_try_that_was_refused(cluster: Any) -> None:
    """An earlier one, whose answer was lost, may have been decided before a newer driver began."""
    at_once = await failed(cluster, FENCED)
    assert (laminar.Fenced, "not_applied") == (type(at_once), at_once.outcome)
    for before in (None, (504, {"code": "outcome_unknown", "outcome": "unknown"})):
        later = await failed(cluster, before, FENCED)
        assert (laminar.Fenced, "unknown") == (type(later), later.outcome)


@pytest.mark.parametrize(
    ("outcome", "kind"), [("unknown", laminar.OutcomeUnknown), ("not_applied", laminar.TimedOut)]
)
async def test_a_server_that_does_not_know_leaves_the_outcome_unknown(
    cluster: Any, outcome: str, kind: type[laminar.Error]
) -> None:
    """`TimedOut` says that nothing was changed: only where every answer said so, and no try was cut off."""
    answer = {"code": "busy", "outcome": outcome, "retry_after_ms": 60_000}
    error = await failed(cluster, (503, answer), timeout=2.5)

    assert (kind, outcome) == (type(error), error.outcome)


async def test_no_try_begins_that_the_deadline_would_cut_off(cluster: Any) -> None:
    """The wait ends 3 ms before it: a server may do what such a try asks for, and nobody would hear of it."""
    answer = {"code": "busy", "outcome": "not_applied", "retry_after_ms": 2_997}
    error = await failed(cluster, (503, answer), timeout=3.0)

    assert (laminar.TimedOut, "not_applied") == (type(error), error.outcome)
    assert 1 == sum(method == "PUT" for _, method, _ in cluster.requests)


async def test_what_some_partition_has_published_is_decided(cluster: Any) -> None:
    """Whatever is answered behind that: nobody is told that the batch is not committed."""
    published = (409, {"code": "already_committed", "outcome": "not_applied"})
    late = await failed(
        cluster, published, (503, {"code": "no_leader", "outcome": "not_applied"}), timeout=2.5
    )
    assert (laminar.OutcomeUnknown, "unknown") == (type(late), late.outcome)
    fenced = await failed(cluster, published, FENCED)
    assert (laminar.Fenced, "unknown") == (type(fenced), fenced.outcome)
