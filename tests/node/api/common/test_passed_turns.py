"""Requests that other shards passed on: principals take turns, and none has all calls of the process."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from laminar.http.api.problems import Problem
from laminar.http.protocol.flows import REQUEST, TURN, Flow
from laminar.http.protocol.messages import Later, Response
from laminar.http.server.turns import Turns
from laminar.node.api.common.forwarding import (
    FOR_PRINCIPAL,
    Exchange,
    answering,
    ask_for,
    asking,
    decode_for_principal,
    who_asks,
)
from laminar.node.api.common.passed_turns import SHARE, PassedTurns
from laminar.node.trace.ring import Who
from laminar.node.transport.rpc import MAX_CALLS_IN_PROGRESS
from laminar.node.transport.transport import Address, Peer, TcpAddress
from membership.limit_rules import LIMITS_SINCE


class Leader:
    """A shard that is passed requests by others. Its answers become due together."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.working = 0
        self.log: list[str] = []
        self.due: list[asyncio.Future[str]] = []
        self.passed = PassedTurns(lambda: self.turns, in_progress=lambda: self.working)

    async def pass_on(self, flow: Flow, name: str) -> Response:
        """Pass a request on."""

        def carry_out() -> Later:
            self.log.append(f"begun {name}")
            future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.due.append(future)
            return Later(future, make)

        def make(text: str) -> Response:
            self.log.append(f"made {name}")
            return Response(200, body=text.encode())

        self.working += 1
        try:
            return await self.passed.answer(flow, 0, carry_out)
        finally:
            self.working -= 1


async def test_what_becomes_due_at_once_is_answered_in_turns() -> None:
    """Between the answers of many others' appends another principal's request is begun."""
    leader, many, other = Leader(), Flow(), Flow()
    floods = [asyncio.ensure_future(leader.pass_on(many, "many")) for _ in range(300)]
    neighbour = asyncio.ensure_future(leader.pass_on(other, "first"))
    while len(leader.due) < 301:  # noqa: ASYNC110  # each pass of the loop is looked at
        await asyncio.sleep(0)
    leader.log.clear()
    for future in leader.due:
        future.set_result("done")
    later = asyncio.ensure_future(leader.pass_on(other, "second"))
    assert b"done" == (await neighbour).body
    await asyncio.gather(*floods)
    assert leader.log.index("begun second") <= 2 * REQUEST * TURN
    assert 300 == leader.log.count("made many")
    leader.due[-1].set_result("done")
    await later
    assert 0 == leader.turns.flows


async def test_one_principal_leaves_calls_for_the_others() -> None:
    """What is beyond its share is refused before anything is done, and others' are not."""
    leader, many = Leader(), Flow()
    floods = [asyncio.ensure_future(leader.pass_on(many, "many")) for _ in range(MAX_CALLS_IN_PROGRESS)]
    share = MAX_CALLS_IN_PROGRESS * SHARE // (SHARE + 1)
    while leader.log.count("begun many") < share:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0)
    refused = [task.exception() for task in floods if task.done()]
    assert MAX_CALLS_IN_PROGRESS - leader.working == len(refused) == len(floods) - share
    assert {"overloaded not_applied"} == {
        f"{each.code} {each.outcome}" for each in refused if isinstance(each, Problem)
    }
    others = [asyncio.ensure_future(leader.pass_on(Flow(), "other")) for _ in range(50)]
    while leader.log.count("begun other") < 50:  # noqa: ASYNC110  # as above
        await asyncio.sleep(0)
    for future in leader.due:
        future.set_result("done")
    await asyncio.gather(*floods, *others, return_exceptions=True)
    assert 50 == leader.log.count("made other")
    assert 0 == leader.turns.flows


async def test_a_problem_is_answered_as_it_is() -> None:
    """And the request counts no more."""
    leader, flow = Leader(), Flow()

    def refuse() -> Response:
        raise Problem("not_leader", "not here", outcome="not_applied")

    with pytest.raises(Problem, match="not here"):
        await leader.passed.answer(flow, 0, refuse)
    assert not flow.is_used and 0 == leader.turns.flows


MANY = Who("many", "10.0.0.7", "n7")


class Callee:
    """Another shard, which notes the methods that it is asked for, each with its principal."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.who: list[Who] = []
        self.version = LIMITS_SINCE
        self.exchange = Exchange(self, code_version=lambda: self.version)

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Answer with null."""
        principal = ""
        if method == FOR_PRINCIPAL:
            asked = decode_for_principal(payload)
            principal, method = asked.principal, asked.method
            self.who.append(asked.who(Peer("passes", 1, b"n" * 16)))
        self.asked.append((principal, method))
        return msgspec.msgpack.encode((0, None))

    async def ask(self, method: str) -> None:
        """Ask for a method."""
        await self.exchange.ask(TcpAddress("a", 1), method, [], kind=None, timeout_s=1)


async def test_only_what_a_clients_request_asks_for_names_its_principal() -> None:
    """And only steps; not before all nodes know how, and not what is asked on behalf of another shard."""
    callee, peer = Callee(), Peer("n", 1, b"n" * 16)

    async def on_call(peer: Peer, payload: bytes) -> None:
        await callee.ask("group")

    async def nested() -> None:
        await answering(on_call)(peer, b"")
        ask_for(MANY, is_passed=True)
        await callee.ask("sinks")
        assert who_asks() == MANY

    await asking(MANY, callee.ask("cursor"))
    await asking(MANY, callee.ask("accept_loss"))
    await callee.ask("cursor")
    await asking(MANY, nested())
    callee.version -= 1
    await asking(MANY, callee.ask("cursor"))
    assert [
        ("many", "cursor"),
        ("", "accept_loss"),
        ("", "cursor"),
        ("", "group"),
        ("", "sinks"),
        ("", "cursor"),
    ] == callee.asked
    assert [MANY] == callee.who


async def test_who_asks_is_known_where_a_step_is_carried_out() -> None:
    """In the tasks that it begins as well. What an older program passes on came from its node."""

    async def step() -> list[Who | None]:
        return [who_asks(), *await asyncio.gather(asyncio.create_task(_who()))]

    async def _who() -> Who | None:
        return who_asks()

    assert [MANY] * 2 == await asking(MANY, step())
    assert [None] * 2 == await step()
    older = decode_for_principal(msgspec.msgpack.encode(["many", "cursor", b""]))
    assert Who("many", "", "n1") == older.who(Peer("n1", 1, b"n" * 16))
