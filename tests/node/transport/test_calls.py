"""Calls: each gets its own answer, a refusal, its time-out, or word that the peer is lost."""

from __future__ import annotations

import asyncio
import os

import pytest

from laminar.node.transport.transport import CallTimeout, Peer, PeerLost, RemoteError
from tests.node.transport.ends import PATIENCE_S, Make, refusing, soon


async def answer_all(peer: Peer, method: str, payload: bytes) -> bytes:
    """The calls that the tests make."""
    if method == "refuse":
        raise RemoteError("not_leader", "ask b")
    if method == "break":
        raise ValueError("oh no")
    if method == "sleep":
        await asyncio.sleep(float(payload))
    return method.encode() + b":" + payload


async def test_calls_are_answered_concurrently_and_each_gets_its_own_answer(make: Make) -> None:
    """A slow one holds up nobody."""
    a, b = await make("a"), await make("b")
    go_on = asyncio.Event()

    async def answer(peer: Peer, method: str, payload: bytes) -> bytes:
        if method == "slow":
            await go_on.wait()
        return await answer_all(peer, method, payload)

    b.transport.on_call = answer

    slow = asyncio.ensure_future(a.transport.call(b.address, "slow", b"", timeout=PATIENCE_S))
    answers = await asyncio.gather(
        *(a.transport.call(b.address, "echo", b"%d" % number, timeout=PATIENCE_S) for number in range(100))
    )

    assert answers == [b"echo:%d" % number for number in range(100)]
    assert not slow.done()
    go_on.set()
    assert await slow == b"slow:"
    assert b.count("calls_answered") == 101


async def test_a_large_call_and_answer_pass(make: Make) -> None:
    """A snapshot of the catalog, say."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    payload = os.urandom(3 << 20)

    assert await a.transport.call(b.address, "echo", payload, timeout=PATIENCE_S) == b"echo:" + payload


async def test_a_refusal_keeps_its_code_and_a_failure_is_a_bug(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler's exception is logged where it happened; the caller learns its kind."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all

    with pytest.raises(RemoteError) as refused:
        await a.transport.call(b.address, "refuse", b"", timeout=PATIENCE_S)
    with pytest.raises(RemoteError) as broken:
        await a.transport.call(b.address, "break", b"", timeout=PATIENCE_S)

    assert (refused.value.code, refused.value.message) == ("not_leader", "ask b")
    assert (broken.value.code, broken.value.message) == ("bug", "ValueError: oh no")
    assert "call break failed" in caplog.text


async def test_a_call_ends_at_its_time_out_and_so_does_its_work(make: Make) -> None:
    """Nobody would read the answer."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    await a.transport.call(b.address, "echo", b"", timeout=PATIENCE_S)

    with pytest.raises(CallTimeout):
        await a.transport.call(b.address, "sleep", b"600", timeout=0.05)

    await soon(lambda: b.count("calls_working") == 0)
    assert a.count("calls_waiting") == 0
    assert await a.transport.call(b.address, "echo", b"", timeout=PATIENCE_S) == b"echo:"


async def test_a_call_over_a_lost_connection_fails_at_once(make: Make) -> None:
    """And says that it was sent: the outcome is unknown."""
    a, b = await make("a"), await make("b")
    b.transport.on_call = answer_all
    call = asyncio.ensure_future(a.transport.call(b.address, "sleep", b"600", timeout=600))
    await soon(lambda: b.count("calls_working") == 1)

    await b.transport.close(timeout=0.1)

    with pytest.raises(PeerLost) as lost:
        await asyncio.wait_for(call, PATIENCE_S)
    assert lost.value.sent


async def test_a_call_to_nobody_fails_at_once(make: Make) -> None:
    """A refused connect is an answer too."""
    a = await make("a")
    with refusing() as (_, address), pytest.raises(PeerLost) as lost:
        await asyncio.wait_for(a.transport.call(address, "hi", b"", timeout=600), PATIENCE_S)
    assert not lost.value.sent
