"""A step of a search over replicas that fail, lag, are damaged or have no room: nothing is missing unsaid."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.find import step as step_module
from laminar.node.api.find.places import begin, parse, query_hash
from laminar.node.api.find.step import Step
from laminar.node.api.find.steps import BoundsAnswer, Place, ScanRequest, SearchSteps
from laminar.node.find.examine import Found, Skipped, Wanted
from laminar.node.find.scan import Scanned, Span
from laminar.node.find.where import Where
from tests.node.services import GROUP, TOPIC, Services, exchange

QUERY = query_hash("a search")
Replica = Callable[[Span, ScanRequest], Scanned]


def whole(span: Span, request: ScanRequest) -> Scanned:
    """A replica with all records: it finds each tenth."""
    offsets = range(span.low, span.high)
    found = [Found(n, n, b'{"offset":%d}' % n) for n in offsets if n % 10 == 0]
    if request.wanted.newest:
        return Scanned(span.number, span.low, span.low, found=found[::-1])
    return Scanned(span.number, span.high, span.high, found=found)


def behind(span: Span, request: ScanRequest) -> Scanned:
    """A replica that has nothing of it."""
    return Scanned(span.number, span.low, span.high, "behind")


def damaged(span: Span, request: ScanRequest) -> Scanned:
    """A replica that cannot read 40 to 49."""
    if span.low >= 50 or span.high <= 40:
        return whole(span, request)
    if request.wanted.newest:
        looked = whole(Span(0, GROUP, 50, max(50, span.high)), request)
        return Scanned(0, span.low, min(span.high, 50), "damaged", (40, 50), found=looked.found)
    looked = whole(Span(0, GROUP, min(span.low, 40), 40), request)
    return Scanned(0, max(span.low, 40), span.high, "damaged", (40, 50), found=looked.found)


def full(span: Span, request: ScanRequest) -> Scanned:
    """A shard on which other searches read."""
    raise Problem("overloaded", "no room", outcome="not_applied")


def gone(span: Span, request: ScanRequest) -> Scanned:
    """A node that does not answer."""
    raise Problem("no_leader", "lost", outcome="unknown", retry_after_ms=1)


async def search(
    replicas: dict[str, Replica], *, newest: bool = False, after: str | None = None
) -> dict[str, Any]:
    """Answer one step, with these replicas of the only partition; it has 100 records."""
    services = Services(elsewhere=replicas)

    async def scan(node: str, payload: bytes) -> list[Scanned]:
        request = msgspec.msgpack.decode(payload, type=ScanRequest)
        return [replicas[node](span, request) for span in request.spans]

    async def bounds(node: str, payload: bytes) -> BoundsAnswer:
        return BoundsAnswer(GROUP, 0, 100)

    async def leader(node: str, payload: bytes) -> str:
        return next(iter(replicas))

    methods: dict[str, Callable[[str, bytes], Awaitable[Any]]] = {
        "search_scan": scan,
        "search_bounds": bounds,
        "leader": leader,
    }
    locator = Locator(services, exchange(**methods))
    steps = SearchSteps(services, LeaderCall(services, locator))
    topic = services.view.topics()[TOPIC]
    partition = services.view.partition(TOPIC, 0)
    assert partition is not None
    places = begin(QUERY, topic, [partition]) if after is None else parse(after, QUERY)
    wanted = Wanted(Where(), newest, 100, 10, 1 << 20)
    step = Step(services, steps, topic, places, wanted, Place("earliest"), Place("latest"))
    await step.run(wait_s=0.0)
    body = step.answer().body
    assert isinstance(body, bytes)
    answer: dict[str, Any] = json.loads(body)
    return answer


def offsets(answer: dict[str, Any]) -> list[int]:
    return [each["offset"] for each in answer["records"]]


TENS = list(range(0, 100, 10))


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("bad", [behind, damaged, full, gone])
async def test_what_one_replica_cannot_another_does(bad: Replica, newest: bool) -> None:
    """Whatever is wrong with the first one that is asked."""
    answer = await search({"a": bad, "b": whole}, newest=newest)

    assert offsets(answer) == (TENS[::-1] if newest else TENS)
    assert (answer["after"], answer["not_searched"], answer["left"]["partitions"]) == (None, [], 0)
    assert answer["searched"]["records"] == 100


@pytest.mark.parametrize("newest", [False, True])
async def test_what_no_replica_can_read_is_said(newest: bool) -> None:
    """And the search goes on behind it."""
    answer = await search({"a": damaged, "b": damaged}, newest=newest)

    expected = [n for n in TENS if n != 40]
    assert offsets(answer) == (expected[::-1] if newest else expected)
    assert answer["not_searched"] == [{"partition": 0, "from": 40, "to": 50, "why": "damaged"}]
    assert answer["after"] is None and answer["searched"]["records"] == 90


@pytest.mark.parametrize("bad", [behind, gone])
async def test_what_no_replica_has_stays_in_the_token(bad: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step finds it."""
    monkeypatch.setattr(step_module, "STEP_S", 0.2)
    answer = await search({"a": bad, "b": bad})
    assert (offsets(answer), answer["not_searched"]) == ([], [])
    assert answer["left"] == {"records": 100, "partitions": 1}

    answer = await search({"a": bad, "b": whole}, after=answer["after"])
    assert offsets(answer) == TENS and answer["after"] is None


async def test_without_room_anywhere_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 503; a step that has looked at something is answered."""
    monkeypatch.setattr(step_module, "STEP_S", 0.2)
    with pytest.raises(Problem) as refused:
        await search({"a": full, "b": full})
    assert refused.value.code == "overloaded"


async def test_what_expired_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither searched nor left."""

    def trimmed(span: Span, request: ScanRequest) -> Scanned:
        looked = whole(Span(0, GROUP, max(span.low, 30), span.high), request)
        return msgspec.structs.replace(looked, skipped=[Skipped(span.low, 30, "expired")])

    answer = await search({"a": trimmed})
    assert answer["not_searched"] == [{"partition": 0, "from": 0, "to": 30, "why": "expired"}]
    assert (answer["searched"]["records"], offsets(answer)) == (70, TENS[3:])
