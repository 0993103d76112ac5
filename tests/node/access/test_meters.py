"""What a principal uses of a shard: rates, connections, and what is counted of refusals."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.node.access import meters as module
from laminar.node.access.meters import Meter, Meters
from membership.records import LimitRecord


def refusal(meter: Meter, body_bytes: int, now_ms: int) -> Problem:
    """The problem that a request gets."""
    with pytest.raises(Problem) as raised:
        meter.admit(body_bytes, now_ms)
    assert (429, "quota", "not_applied") == (raised.value.status, raised.value.code, raised.value.outcome)
    return raised.value


def admitted(meter: Meter, times: range, body_bytes: int = 0) -> int:
    """How many requests at these times, in ms, are let in."""
    count = 0
    for now_ms in times:
        try:
            meter.admit(body_bytes, now_ms)
        except Problem:
            continue
        count += 1
    return count


@pytest.mark.parametrize("limit", [1, 3, 50, 1000])
def test_no_more_than_the_rate_passes(limit: int) -> None:
    """In ten seconds that of eleven, as one second's may be saved up; and no less."""
    meter = Meter("m", {"requests_per_s": limit}, {})
    assert 10 * limit <= admitted(meter, range(5_000, 15_000)) <= 11 * limit
    # What comes all at once: one second's.
    assert limit == sum(admitted(meter, range(60_000, 60_001)) for _ in range(2 * limit))


def test_who_waits_as_long_as_it_is_told_is_let_in() -> None:
    """And one that comes a moment before is not."""
    meter = Meter("m", {"requests_per_s": 4}, {})
    for _ in range(4):
        meter.admit(0, 1000)
    problem = refusal(meter, 0, 1000)
    assert ("requests_per_s", 4, 4, 250) == (
        problem.field,
        problem.value,
        problem.limit,
        problem.retry_after_ms,
    )
    assert ("Retry-After", "1") in problem.all_headers()
    refusal(meter, 0, 1249)
    meter.admit(0, 1250)


def test_those_that_are_refused_at_once_come_back_one_after_the_other() -> None:
    """As fast as the bucket is filled, within a second. A new limit forgets them."""
    meter = Meter("m", {"requests_per_s": 4}, {})
    for _ in range(4):
        meter.admit(0, 1000)
    told = [refusal(meter, 0, 1000).retry_after_ms for _ in range(6)]
    assert [250, 500, 750, 1000, 1250, 1250] == told
    for wait_ms in (250, 500, 750, 1000):
        meter.admit(0, 1000 + wait_ms)
    meter.limit_to({"requests_per_s": 4, "connections": 1})
    assert 250 == refusal(meter, 0, 2000).retry_after_ms
    fast = Meter("m", {"bytes_in_per_s": 10**9}, {})
    fast.admit(2 * 10**9, 0)
    assert [1000, 1002, 1004] == [refusal(fast, 0, 0).retry_after_ms for _ in range(3)]


def test_a_large_body_passes_and_the_next_waits_for_it() -> None:
    """Otherwise none that is larger than a second's bytes could ever pass."""
    meter = Meter("m", {"bytes_in_per_s": 1000}, {})
    meter.admit(5000, 0)
    problem = refusal(meter, 1, 0)
    assert ("bytes_in_per_s", 5000, 1000, 4000) == (
        problem.field,
        problem.value,
        problem.limit,
        problem.retry_after_ms,
    )
    meter.admit(1, 4001)
    meter.received(10**9, 5000)  # in chunks, so that no head said it
    assert module.LONGEST_WAIT_MS == refusal(meter, 1, 6000).retry_after_ms


def test_what_was_sent_counts_against_the_next_request() -> None:
    """Not against the one that asked for it."""
    meter = Meter("m", {"bytes_out_per_s": 1000}, {})
    meter.admit(10**6, 0)
    assert meter.counts_answers
    meter.sent(1500, 0)
    assert ("bytes_out_per_s", 500) == (
        (found := refusal(meter, 0, 0)).field,
        found.retry_after_ms,
    )
    meter.admit(0, 501)


def test_a_refused_request_costs_nothing() -> None:
    """One limit that is reached does not use up the others."""
    meter = Meter("m", {"requests_per_s": 100, "bytes_in_per_s": 1}, {})
    meter.admit(2, 0)
    for _ in range(1000):
        refusal(meter, 0, 0)
    assert 99 == sum(admitted(meter, range(2001, 2002)) for _ in range(99))


def test_a_changed_limit_holds_at_once() -> None:
    """Also one that is taken away; a bucket whose rate stays is not filled by it."""
    meter = Meter("m", {"requests_per_s": 1}, {})
    meter.admit(0, 0)
    meter.limit_to({"requests_per_s": 1, "bytes_in_per_s": 5})
    assert "requests_per_s" == refusal(meter, 0, 0).field
    meter.limit_to({"requests_per_s": 2})
    meter.admit(0, 0)
    meter.limit_to({})
    assert not meter.is_limited
    assert 100 == admitted(meter, range(100))


def test_connections_are_refused_at_the_limit() -> None:
    """Those that are open stay."""
    meter = Meter("m", {"connections": 2}, {})
    meter.flow.connections = 1
    assert meter.connection_refusal() is None
    meter.flow.connections = 2
    problem: Any = meter.connection_refusal()
    assert ("connections", 3, 2, 1000) == (
        problem.field,
        problem.value,
        problem.limit,
        problem.retry_after_ms,
    )


def test_refusals_are_counted_for_so_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others together, and a name that has a count keeps it."""
    monkeypatch.setattr(module, "MOST_COUNTED", 2)
    meters = Meters()
    meters.follow({"*": LimitRecord("*", {"requests_per_s": 1})})
    for name in ("a", "b", "c", "d"):
        for _ in range(3):
            admitted(meters.of(name), range(1))
    assert {"a": 2, "b": 2, module.OTHERS: 4} == meters.refused


def test_meters_are_kept_while_there_is_a_credential_or_a_connection() -> None:
    """Names that come and go do not fill the memory."""
    meters = Meters()
    kept, gone, busy = (meters.of(name) for name in ("kept", "gone", "busy"))
    busy.flow.connections = 1
    meters.keep_only({"kept"})
    assert (kept, busy) == (meters.of("kept"), meters.of("busy")) and gone is not meters.of("gone")
