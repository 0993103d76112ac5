"""The pool: connections kept, shared and let go."""

from __future__ import annotations

import asyncio

import pytest

from laminar.client.net.pool import Pool
from laminar.http.client.connection import head_bytes
from laminar.http.protocol.answer import ConnectionFailed
from tests.http.serving import PATIENCE_S, Mirror, scripted, serving, until


def get(target: str) -> bytes:
    return head_bytes("GET", target, "x", {})


async def test_one_connection_serves_many_requests_and_a_closed_one_is_replaced() -> None:
    """What the server closed behind an answer is not lent again."""
    async with serving(Mirror()) as (server, url):
        pool = Pool(asyncio.get_running_loop(), connect_timeout_s=PATIENCE_S, idle_s=60)
        for _ in range(5):
            await pool.ask(url, get("/a"), timeout_s=PATIENCE_S)
        assert 1 == pool.opened
        await pool.ask(url, get("/close"), timeout_s=PATIENCE_S)
        assert 200 == (await pool.ask(url, get("/a"), timeout_s=PATIENCE_S)).status
        await pool.close()

        assert (2, 2) == (pool.opened, server.statistics()["connections"])


async def test_what_idled_too_long_is_not_used_again() -> None:
    """Rather a new connection than one that the server may be closing just now."""
    async with serving(Mirror()) as (_, url):
        pool = Pool(asyncio.get_running_loop(), connect_timeout_s=PATIENCE_S, idle_s=-1)
        for _ in range(3):
            assert 200 == (await pool.ask(url, get("/a"), timeout_s=PATIENCE_S)).status
        await pool.close()

        assert 3 == pool.opened


async def test_requests_at_a_time_have_a_connection_each() -> None:
    """A long poll holds up nobody; the shared connection is opened once for all who ask for it."""
    app = Mirror()
    async with serving(app) as (_, url):
        pool = Pool(asyncio.get_running_loop(), connect_timeout_s=PATIENCE_S, idle_s=60)
        polling = asyncio.ensure_future(pool.ask(url, get("/gate"), timeout_s=PATIENCE_S))
        await until(lambda: app.handled == ["/gate"])
        assert 200 == (await pool.ask(url, get("/a"), timeout_s=PATIENCE_S)).status
        app.gate.set()
        await polling
        first, second = await asyncio.gather(pool.shared(url), pool.shared(url))
        assert first is second is pool.shared_nowait(url)
        await pool.close()

        assert 3 == pool.opened
        assert pool.shared_nowait(url) is None


async def test_a_cancelled_request_is_given_up_at_the_server_too() -> None:
    """Its connection is not lent again: the answer would be taken for the next request's."""
    app = Mirror()
    async with serving(app) as (server, url):
        pool = Pool(asyncio.get_running_loop(), connect_timeout_s=PATIENCE_S, idle_s=60)
        asking = asyncio.ensure_future(pool.ask(url, get("/gate"), timeout_s=PATIENCE_S))
        await until(lambda: app.handled == ["/gate"])
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: app.cancelled == 1)
        assert 0 == server.statistics()["open_connections"]
        await pool.close()


async def test_closing_the_pool_fails_what_is_under_way() -> None:
    """It may have been acted on, and the failure says why."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()

    asked = asyncio.Event()
    async with scripted(silent) as url:
        pool = Pool(asyncio.get_running_loop(), connect_timeout_s=PATIENCE_S, idle_s=60)
        asking = asyncio.ensure_future(pool.ask(url, get("/"), timeout_s=PATIENCE_S))
        await asked.wait()
        await pool.close()

        with pytest.raises(ConnectionFailed, match="the client was closed") as failed:
            await asking
        assert failed.value.sent
