"""The pure decisions: what an answer means, where a request goes, how long to wait."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.client import errors
from laminar.client.policy.retry import (
    REDIRECTS_AT_ONCE,
    Backoff,
    Step,
    StepTimeout,
    Verdict,
    judge_answer,
    judge_loss,
)
from laminar.client.policy.routing import (
    AVOID_MS,
    Balancer,
    Place,
    Replica,
    SessionOffsets,
    TopicMap,
    readers,
)
from laminar.http.api.problems import CODES
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route


def judged(status: int, code: str | None = None, **more: object) -> Verdict:
    values = {"location": None, "retry_after_ms": None, "repeatable": True, **more}
    return judge_answer(status=status, code=code, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [200, 201, 202, 204, 304])
def test_good_answers_are_done(status: int) -> None:
    assert Step.DONE is judged(status).step


def test_a_quota_is_asked_for_again_only_where_time_helps() -> None:
    """After as long as the server says: a rate comes back. Without a time something is to be deleted."""
    rate = judged(429, "quota", retry_after_ms=750, repeatable=False, outcome="not_applied")
    assert (Step.RETRY, 750, False) == (rate.step, rate.wait_ms, rate.maybe_applied)
    assert Step.FAIL is judged(429, "quota").step
    assert Step.RETRY is judged(429, None).step  # of a proxy, which says nothing


def test_a_redirect_is_followed_at_once_but_not_for_ever() -> None:
    """Two nodes that name each other are asked with pauses after the third hop."""
    first = judged(307, location="http://b")
    tired = judged(307, location="http://b", redirects=REDIRECTS_AT_ONCE)

    assert (Step.FOLLOW, "http://b", True) == (first.step, first.location, first.stale)
    assert (Step.RETRY, "http://b") == (tired.step, tired.location)


@pytest.mark.parametrize("code", [code for code, row in CODES.items() if row.retriable])
def test_what_the_table_calls_retriable_is_retried(code: str) -> None:
    """Every code of the table that may be retried is, even a change that must not be doubled."""
    assert Step.RETRY is judged(CODES[code].status, code, repeatable=False, retry_after_ms=5).step


@pytest.mark.parametrize(
    "code", [code for code, row in CODES.items() if not row.retriable and row.status != 504]
)
def test_what_the_table_calls_lasting_is_an_error(code: str) -> None:
    assert Step.FAIL is judged(CODES[code].status, code).step


def test_every_family_of_the_table_is_an_exception() -> None:
    """from_problem gives the class the table names, with status, hint and further fields."""
    for code, row in CODES.items():
        error = errors.from_problem(
            row.status, {"code": code, "limit": 3, "who": "n1", "retry_after_ms": 5}, asked="GET /x"
        )
        assert isinstance(error, getattr(errors, row.family)), code
        assert (code, row.retriable, 3, {"who": "n1", "retry_after_ms": 5}) == (
            error.code,
            error.retriable,
            error.limit,
            error.fields,
        )


def test_a_missing_leader_is_asked_for_at_our_own_pace() -> None:
    """Retry-After is in whole seconds and an election is not; other waits are obeyed."""
    assert 0 == judged(503, "no_leader", retry_after_ms=1000).wait_ms
    assert 700 == judged(503, "overloaded", retry_after_ms=700).wait_ms


def test_an_unknown_outcome_is_repeated_only_if_that_cannot_double() -> None:
    assert Step.RETRY is judged(504, "outcome_unknown").step
    assert Step.FAIL is judged(504, "outcome_unknown", repeatable=False).step
    assert judged(503, "no_leader", outcome="unknown").maybe_applied
    assert Step.FAIL is judged(503, "no_leader", outcome="unknown", repeatable=False).step
    assert not judged(503, "no_leader", outcome="not_applied").maybe_applied
    assert Step.FAIL is judge_loss(sent=True, repeatable=False).step
    assert Step.RETRY is judge_loss(sent=False, repeatable=False).step
    assert judge_loss(sent=True, repeatable=True).maybe_applied
    assert not judge_loss(sent=False, repeatable=True).maybe_applied


@given(st.integers(), st.integers(0, 5000))
def test_pauses_grow_to_a_ceiling(seed: int, attempts: int) -> None:
    """Each pause is within the upper half of its bound, however many came before."""
    backoff = Backoff(rng=random.Random(seed), attempts=attempts)
    bound = min(250, 10 << min(attempts, 16))

    assert (bound + 1) // 2 <= backoff.next_ms() <= bound


def test_a_step_gets_the_time_that_it_takes() -> None:
    timeout = StepTimeout(least_s=2.0, most_s=30.0)
    timeout.failed(0.1, 2.0)  # refused at once: more time would not have helped
    assert timeout.seconds == 2.0
    for expected in (4.0, 8.0, 16.0, 30.0, 30.0):
        timeout.failed(timeout.seconds, timeout.seconds)
        assert timeout.seconds == expected
    timeout.failed(4.0, 4.0)  # one of several at once, which began before the others failed
    assert timeout.seconds == 30.0
    for expected in (15.0, 12.0, 12.0):
        timeout.succeeded(3.0)
        assert timeout.seconds == expected
    for _ in range(3):
        timeout.succeeded(0.01)
    assert timeout.seconds == 2.0


def test_equal_replicas_take_turns() -> None:
    """Three of like latency share reads evenly though one is a little faster."""
    balancer = Balancer()
    for _ in range(300):
        url = balancer.choose(["a", "b", "c"], now_ms=0)
        assert url is not None
        balancer.started(url)
        balancer.finished(url, latency_us={"a": 520.0, "b": 600.0, "c": 1000.0}[url])

    assert {"a": 100, "b": 100, "c": 100} == {url: load.requests for url, load in balancer.loads.items()}


def test_the_least_busy_comes_first_then_the_fastest() -> None:
    balancer = Balancer()
    for url, latency_us in (("slow", 9000.0), ("fast", 300.0)):
        balancer.started(url)
        balancer.finished(url, latency_us=latency_us)

    assert "fast" == balancer.choose(["slow", "fast"], now_ms=0)
    balancer.started("fast")
    assert "slow" == balancer.choose(["slow", "fast"], now_ms=0)


def test_who_failed_rests_unless_all_do() -> None:
    balancer = Balancer()
    balancer.started("a")
    balancer.failed("a", now_ms=1000)

    assert "b" == balancer.choose(["a", "b"], now_ms=1000 + AVOID_MS - 1)
    assert "a" == balancer.choose(["a"], now_ms=1001)
    assert None is balancer.choose([], now_ms=0)


def test_the_map_knows_the_leaders_own_shard() -> None:
    """Of two URLs for the leader, its replica's is taken: the other reaches any shard."""
    row = {
        "partition": 0,
        "leader": {"node": "b", "url": "http://b:1"},
        "replicas": [
            {"node": "a", "url": "http://a:11/", "reachable": False},
            {"node": "b", "url": "http://b:12"},
        ],
    }
    places = TopicMap.from_answer({"partitions": [row]}, now_ms=5)

    assert "http://b:12" == places.leader(0)
    assert ["http://b:12"] == readers(places.replicas(0), places.leader(0), from_leader=False)
    places.forget_leader(0, "http://elsewhere")
    assert "http://b:12" == places.leader(0)
    places.forget_leader(0, "http://b:12")
    assert (None, True) == (places.leader(0), places.stale)
    assert None is places.leader(7)


def test_a_map_has_the_numbers_that_are_listed_and_the_route_that_is_answered() -> None:
    """Beyond route 0 numbers have gaps, some take no records, and ranges do not rise with them."""
    rows = [{"partition": number, "leader": {"url": f"http://{number}:1"}} for number in (9, 2, 5)]
    route = Route(4, [0, 9_000, LOGICAL_PARTITIONS], [9, 5])

    known = TopicMap.from_answer(
        {"route": 4, "created_with": 1, "partitions": rows, "ranges": route.answer()["ranges"]}, now_ms=0
    )

    assert ((2, 5, 9), route, 1) == (known.numbers, known.route, known.created_with)
    assert "http://5:1" == known.leader(5)
    assert None is known.leader(0)
    older = TopicMap.from_answer({"route": 0, "partitions": [{"partition": 0}, {"partition": 1}]}, now_ms=0)
    assert ((0, 1), Route.even(2), 2) == (older.numbers, older.route, older.created_with)


def test_elsewhere_leaves_out_all_shards_of_a_node() -> None:
    """Who does not answer at one port will hardly answer at another."""
    places = {
        0: Place((Replica("a", "http://a:1"), Replica("b", "http://b:1"))),
        1: Place((Replica("a", "http://a:2"), Replica("b", "http://b:2"))),
    }
    known = TopicMap(Route.even(2), places)

    assert ["http://b:1", "http://b:2"] == known.elsewhere(["http://a:1"])
    assert 4 == len(known.elsewhere([]))


def test_a_map_is_stale_only_if_it_named_who_was_left() -> None:
    """One that names another by now needs no question."""
    known = TopicMap(Route.even(2), {0: Place((), "http://a:1"), 1: Place((), "http://b:1")})
    known.forget_leader(1, "http://a:1")
    assert (False, "http://b:1") == (known.stale, known.leader(1))
    known.forget_leader(0, "http://a:1")
    assert (True, None) == (known.stale, known.leader(0))


def test_all_replicas_read_when_none_was_reachable() -> None:
    """The last word on who is there is the read's own."""
    lost = [Replica("a", "u", reachable=False)]

    assert ["u"] == readers(lost, None, from_leader=False)
    assert [] == readers(lost, None, from_leader=True)
    assert ["l"] == readers([], "l", from_leader=False)


@given(st.lists(st.integers(0, 100)))
def test_seen_never_goes_back(offsets: list[int]) -> None:
    seen = SessionOffsets()
    for offset in offsets:
        seen.advance("t", 0, offset)

    assert max(offsets, default=0) == seen.next_offset("t", 0)
    assert 0 == seen.next_offset("t", 1)
    seen.forget("t")
    assert 0 == seen.next_offset("t", 0)
