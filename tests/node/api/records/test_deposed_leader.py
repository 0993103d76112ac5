"""What a leader says that was deposed and has not noticed: nothing by its tables, which are out of date."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from laminar.batch import BATCH_TYPE, build
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Response
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.consumers.cursor_steps import CursorRequest, CursorSteps
from laminar.node.api.consumers.gates import Gates
from laminar.node.api.records.datagrams import Datagrams
from laminar.node.partition.producer_progress import fence
from laminar.wire.datagram import Question
from tests.node.api.records.test_append_outcomes import appended, post, routes
from tests.node.services import TOPIC, Services, exchange
from tests.node.trio import Member, batch, send, trio

ANOTHER_LEADS = ("not_leader", "not_applied")
OLD_MS = "1000"
"""A time of a key long before all that is remembered."""


async def ask(member: Member, body: bytearray, **headers: str) -> Response:
    """The answer of a member that believes to lead, to an append."""
    assert member.partition.leads
    return await appended(
        routes(Services([member.partition])), post(body, content_type=BATCH_TYPE, **headers)
    )


def cursor_steps(services: Services) -> CursorSteps:
    leaders = LeaderCall(services, Locator(services, exchange()))
    return CursorSteps(services, leaders, TopicLookup(services.view), Gates(services, leaders))


async def told(asked: asyncio.Future[Response], heal: Callable[[], None]) -> tuple[str, str]:
    """Code and outcome of the problem, which is not said before the member hears of the others."""
    await asyncio.wait([asked], timeout=0.1)
    heal()
    with pytest.raises(Problem) as problem:
        await asked
    return problem.value.code, problem.value.outcome


async def all_told_not_leader(answers: Iterable[Awaitable[Any]]) -> None:
    """What was proposed by the member that is deposed ends with `not_leader`."""
    for answer in answers:
        with pytest.raises(Problem) as problem:
            await answer
        assert "not_leader" == problem.value.code


@pytest.mark.parametrize(
    ("before", "elsewhere", "asked", "ack"),
    [
        pytest.param([], [0], 1, "", id="unknown_producer"),
        pytest.param([0], [1], 2, "", id="out_of_sequence"),
        pytest.param([0], [1], 2, "accepted", id="accepted"),
    ],
)
async def test_a_batch_whose_predecessor_another_leader_has_is_not_out_of_order(
    before: list[int], elsewhere: list[int], asked: int, ack: str
) -> None:
    """A client in order takes the refusal for a loss, although nothing is lost."""
    async with trio() as cluster:
        old = await cluster.leader()
        for number in before:
            await send(old, batch(number, b"x"))
        await cluster.settled()
        old.clock.stop()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        for number in elsewhere:
            await send(new, batch(number, b"x"))

        assert old.partition.leads
        request = post(batch(asked, b"x"), content_type=BATCH_TYPE)
        request.query.update({"ack": ack} if ack else {})
        answer = asyncio.ensure_future(appended(routes(Services([old.partition])), request))
        assert ANOTHER_LEADS == await told(answer, cluster.heal)
        await send(new, batch(asked, b"x"))


async def test_what_was_proposed_and_is_lost_fences_no_producer() -> None:
    """The newer epoch is in the log of the deposed leader alone."""
    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, batch(0, b"x"))
        await cluster.settled()
        old.clock.stop()
        cluster.cut_off(old.node)
        lost = send(old, batch(0, b"y", epoch=1))
        fenced = asyncio.ensure_future(ask(old, batch(1, b"x")))
        begun = asyncio.ensure_future(fence(old.partition, b"p" * 16, 0))
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        assert 1 == (await send(new, batch(1, b"x"))).offset

        assert ANOTHER_LEADS == await told(fenced, cluster.heal)
        await all_told_not_leader((lost, begun))


async def test_a_key_that_another_leader_knows_has_not_expired_and_one_that_is_lost_was_not_used() -> None:
    """What is said of keys is of the log as it is, not of the deposed leader's."""
    async with trio() as cluster:
        old = await cluster.leader()
        await cluster.settled()
        old.clock.stop()
        cluster.cut_off(old.node)
        lost = asyncio.ensure_future(ask(old, build([b"a"]), idempotency_key="lost"))
        await asyncio.sleep(0)
        reused = asyncio.ensure_future(ask(old, build([b"b"]), idempotency_key="lost"))
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        first = await ask(new, build([b"c"]), idempotency_key="known")
        expired = asyncio.ensure_future(
            ask(old, build([b"c"]), idempotency_key="known", laminar_key_time=OLD_MS)
        )

        assert ANOTHER_LEADS == await told(expired, cluster.heal)
        await all_told_not_leader((lost, reused))
        again = await ask(new, build([b"c"]), idempotency_key="known", laminar_key_time=OLD_MS)
        assert first.body == again.body
        assert 201 == (await ask(new, build([b"b"]), idempotency_key="lost")).status


async def test_a_condition_and_a_cursor_are_compared_by_a_leader_that_leads() -> None:
    """Both would lose a race that they have won."""
    async with trio() as cluster:
        old = await cluster.leader()
        await send(old, batch(0, b"x", b"y"))
        await old.partition.cursor_commands.set(
            "c", 0, expected=None, check=True, owner="me", expected_owner="", now_ms=1
        )
        await cluster.settled()
        old.clock.stop()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        await send(new, batch(1, b"z"))
        for name, owner in (("c", "me"), ("new", "")):
            await new.partition.cursor_commands.set(
                name,
                1,
                expected=0 if owner else None,
                check=True,
                owner=owner,
                expected_owner=owner,
                now_ms=1,
            )

        steps = cursor_steps(Services([old.partition]))
        condition = asyncio.ensure_future(ask(old, build([b"z"]), if_match="3"))
        moved = CursorRequest(
            TOPIC, 0, "set", "c", 2, expected=1, check=True, owner="me", expected_owner="me"
        )
        deleted = CursorRequest(TOPIC, 0, "delete", "new")
        answers = [asyncio.ensure_future(steps._perform(old.partition, step)) for step in (moved, deleted)]
        assert ANOTHER_LEADS == await told(condition, cluster.heal)
        await all_told_not_leader(answers)


async def test_a_datagram_is_refused_by_a_leader_that_leads() -> None:
    """As a request is."""
    async with trio() as cluster:
        old = await cluster.leader()
        old.clock.stop()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        await send(new, batch(0, b"x"))
        services = Services([old.partition])
        served = Datagrams(
            services,
            Locator(services, exchange()),
            TopicLookup(services.view),
            sock=None,
            limits=Limits(),
        )
        frame = batch(1, b"x")
        asked = served._append(old.partition, Question(TOPIC, 0, b"n" * 8, frame), frame, "")
        await asyncio.wait([asked], timeout=0.1)
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await asked
        assert "not_leader" == problem.value.code
