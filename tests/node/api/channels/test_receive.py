"""A request for jobs over several partitions: one whose leader does not answer keeps no other's jobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.http.api.documents.jobs import Receive
from laminar.http.api.problems import Problem
from laminar.node.access.principals import ANONYMOUS, ANYONE
from laminar.node.api.channels import jobs as module
from laminar.node.api.channels import streams
from laminar.node.api.channels.job_documents import HEARTBEAT
from laminar.node.api.channels.jobs import JobRoutes
from laminar.node.api.channels.steps import Given, ReceiveRequest, SettleRequest
from laminar.node.channels.open_records.jobs import Run
from laminar.node.host.clock import Clock
from laminar.node.trace.ring import Who
from membership.records import ChannelRecord, TopicRecord

CHANNEL = 7
PARTITIONS = (0, 1)


class Leaders:
    """What the leaders of the partitions answer, by a function of the test."""

    def __init__(self, receive: Callable[[ReceiveRequest], Any]) -> None:
        self.asked: list[ReceiveRequest] = []
        self.settled: asyncio.Queue[SettleRequest] = asyncio.Queue()
        self._receive = receive

    async def receive(self, request: ReceiveRequest) -> Given | None:
        self.asked.append(request)
        answer: Given | None = await self._receive(request)
        return answer

    async def settle(self, request: SettleRequest) -> None:
        self.settled.put_nowait(request)


def routes(leaders: Leaders) -> JobRoutes:
    found = JobRoutes(None, None, leaders)  # type: ignore[arg-type]  # they are not asked here
    found._turn = -1
    return found


def topic() -> TopicRecord:
    return TopicRecord(name="t", partitions=len(PARTITIONS), replicas=1, settings={}, created_ms=0, version=1)


def given(request: ReceiveRequest) -> Given:
    """A job, or that there is one."""
    return Given(request.partition, 0, [Run(0, 1, 5, 1)] if request.wanted else [], [])


async def received(found: JobRoutes, wait_ms: int = 600_000) -> list[Given]:
    return await found.receive_from(topic(), CHANNEL, Receive(max=1, wait_ms=wait_ms))


async def test_a_partition_without_a_leader_keeps_no_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives too late goes back at once."""
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    elected = asyncio.Event()

    async def receive(request: ReceiveRequest) -> Given | None:
        if request.partition == 0:
            await elected.wait()
        return given(request)

    leaders = Leaders(receive)
    (one,) = await asyncio.wait_for(received(routes(leaders)), 60)
    assert one.partition == 1 and leaders.settled.empty()

    elected.set()
    back = await asyncio.wait_for(leaders.settled.get(), 60)

    assert (back.partition, back.channel) == (0, CHANNEL)
    assert [(step.verb, step.named.first) for step in back.steps] == [("release", 0)]


async def test_the_partition_that_is_asked_first_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs are taken while no other has any."""
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    asked_others = asyncio.Event()

    async def receive(request: ReceiveRequest) -> Given | None:
        if request.partition == 0:
            await asked_others.wait()
            return given(request)
        asked_others.set()
        await asyncio.sleep(request.wait_ms / 1000)
        return None

    leaders = Leaders(receive)
    (one,) = await asyncio.wait_for(received(routes(leaders)), 60)
    assert one.partition == 0 and leaders.settled.empty()


async def test_an_answer_is_not_as_large_as_there_are_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one leader gives is bounded, and so is what a request is given of all; the rest waits."""
    monkeypatch.setattr(module, "MAX_BYTES", 100)

    async def receive(request: ReceiveRequest) -> Given | None:
        return Given(request.partition, 0, [Run(0, 1, 5, 1)], [bytes(60)])

    taken = await routes(Leaders(receive))._take("t", [0, 1, 2], CHANNEL, Receive(max=10))
    assert [0, 1] == [each.partition for each in taken]


async def test_a_channel_that_is_nowhere_open_yet_is_not_asked_for_in_a_loop() -> None:
    """It is asked again after a pause that grows."""

    async def receive(request: ReceiveRequest) -> Given | None:
        raise Problem("being_created", "not open yet", outcome="not_applied")

    leaders = Leaders(receive)
    assert await received(routes(leaders), 400) == []
    assert len(leaders.asked) < 100, "it is asked as fast as it answers"


async def test_a_stream_says_now_and_then_that_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while its leader has no answer: it goes on when there is one."""
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(streams, "ASK_S", 0.02)
    monkeypatch.setattr(streams, "PAUSE_S", 0.01)
    led = False

    async def receive(request: ReceiveRequest) -> Given | None:
        if not led:
            raise Problem("no_leader", "nobody leads", outcome="not_applied")
        return None

    leaders = Leaders(receive)

    async def record(name: str, channel: str) -> ChannelRecord:
        return ChannelRecord(CHANNEL, CHANNEL, {}, 2)

    services = SimpleNamespace(
        settings=SimpleNamespace(max_job_streams=1),
        view=SimpleNamespace(code_version=streams.STREAMS_SINCE, credentials={}),
        clock=Clock(),
        rng=random.Random(1),
    )
    channels = SimpleNamespace(record=record, topic=lambda name: topic())
    jobs = JobRoutes(services, channels, leaders)  # type: ignore[arg-type]
    body = jobs._streams.response("t", "c", CHANNEL, Receive(credit=1), ANYONE, Who()).body
    assert isinstance(body, AsyncGenerator)

    async with asyncio.timeout(60):
        assert HEARTBEAT == await anext(body)
        with pytest.raises(Problem, match="quota"):
            await jobs._streams.check(ANONYMOUS)
        led = True
        assert [HEARTBEAT] * 2 == [await anext(body), await anext(body)]
    await body.aclose()
    assert 0 == jobs._streams.open


async def test_no_principal_has_all_streams() -> None:
    """Alone it may have four fifths; the others find room. Where no one is asked for all are for anyone."""
    services = SimpleNamespace(
        settings=SimpleNamespace(max_job_streams=10),
        view=SimpleNamespace(code_version=streams.STREAMS_SINCE, credentials={}),
        clock=Clock(),
        rng=random.Random(1),
    )
    opened = streams.JobStreams(services, None, None, None)  # type: ignore[arg-type]
    opened.open = 8
    opened._open_of["many"] = 8
    with pytest.raises(Problem, match="8 of them of 'many'"):
        await opened.check("many")
    await opened.check("other")
    opened._open_of[ANONYMOUS] = 8
    await opened.check(ANONYMOUS)
    opened.open = 10
    for name in ("other", ANONYMOUS):
        with pytest.raises(Problem, match="quota"):
            await opened.check(name)
