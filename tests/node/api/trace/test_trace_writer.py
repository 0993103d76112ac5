"""The way of events into `_trace`: sent once, and dropped and counted where it takes none."""

from __future__ import annotations

import json

import pytest

from laminar.http.api.append_body import Append
from laminar.http.api.names import TRACE_TOPIC
from laminar.http.api.problems import Problem
from laminar.node.api.trace.trace_writer import TraceWriter
from laminar.node.trace.ring import Event, Known, Place, TraceRing, Who
from tests.node.services import Services

PLACE = Place("orders", 3, b"g" * 16)


class Topic:
    """The topic `_trace` as the writer sees it: it takes events, or refuses them."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.cannot_be_made: Problem | None = None
        self.made = 0
        self.tries: list[Append] = []
        self.ring = TraceRing()
        self.services = Services()
        self.writer = TraceWriter(self.services, self.ring, self.append, self.make)

    async def append(self, append: Append) -> None:
        self.tries.append(append)
        if self.problem is not None:
            raise self.problem

    async def make(self, topic: str, *, partitions: int, settings: object = None) -> None:
        assert (TRACE_TOPIC, 8) == (topic, partitions)
        self.made += 1
        if self.cannot_be_made is not None:
            raise self.cannot_be_made

    async def put_and_write(self, *, events: int = 1) -> dict[str, int]:
        for at in range(events):
            self.ring.put(Event("appended", 1_000, PLACE, at, 7, Who("app", "10.0.0.1", "n2")))
        work = self.writer._tick()
        assert work is not None
        await work
        self.writer._not_before_ms = 0
        return self.ring.statistics()


@pytest.fixture
async def topic() -> Topic:
    return Topic()


async def test_an_event_is_a_record_that_is_found_by_the_record_it_is_about(topic: Topic) -> None:
    topic.ring.know(PLACE.group, 0, Known(b"t" * 16, b"order-1", False, b"s" * 8))
    await topic.put_and_write(events=2)

    (append,) = topic.tries
    assert append.records is not None
    assert [f"{(b'g' * 16).hex()}/{at}".encode() for at in range(2)] == append.records.keys
    assert [b"t" * 16, None] == append.records.trace_ids
    assert [{"key": b"order-1"}, None] == append.records.headers
    assert {
        "event": "appended",
        "at": "1970-01-01T00:00:01.000Z",
        "topic": "orders",
        "partition": 3,
        "group": (b"g" * 16).hex(),
        "entry": 7,
        "offset": 0,
        "key": "order-1",
        "trace_id": (b"t" * 16).hex(),
        "parent_id": (b"s" * 8).hex(),
        "principal": "app",
        "address": "10.0.0.1",
        "node": "n2",
    } == json.loads(bytes(append.records.values[0]))


@pytest.mark.parametrize(
    "problem",
    [Problem("no_leader"), Problem("disk_full"), Problem("outcome_unknown"), RuntimeError("a bug")],
    ids=lambda problem: str(problem)[:20],
)
async def test_what_is_not_taken_is_dropped_and_counted_and_sent_once(
    topic: Topic, problem: Exception
) -> None:
    topic.problem = problem
    assert {"events": 3, "written": 0, "dropped": 3, "waiting": 0} == await topic.put_and_write(events=3)
    assert topic.writer._tick() is None, "it is not sent again"

    topic.problem = None
    assert {"events": 4, "written": 1, "dropped": 3, "waiting": 0} == await topic.put_and_write()
    assert 2 == len(topic.tries)


async def test_while_the_topic_cannot_be_made_it_is_asked_for_now_and_then(topic: Topic) -> None:
    topic.cannot_be_made = Problem("too_few_nodes")
    for _ in range(3):
        topic.ring.put(Event("appended", 1, PLACE, 0, 1, None))
        work = topic.writer._tick()
        assert work is not None
        await work

    assert (1, 3, []) == (topic.made, topic.ring.statistics()["dropped"], topic.tries)


async def test_a_disk_refuses_the_trace_before_all_else(topic: Topic) -> None:
    topic.services.space._low_water_bytes = 100
    topic.services.space.take(149, 1000)
    assert topic.services.space.refusal() is None
    assert 1 == (await topic.put_and_write())["dropped"]
    assert [] == topic.tries

    topic.services.space.take(151, 1000)
    assert 1 == (await topic.put_and_write())["written"]
