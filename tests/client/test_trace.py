"""The trace as a program asks for it, with a loop and without, on one node of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import laminar
from laminar.client.errors import ConfigError, NotFound
from laminar.testing import nodes

TRACE_ID = "ab" * 16


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with nodes.serve(shards=1) as url:
        with laminar.connect(url) as client:
            client.create_topic("parcels", settings={"trace": "all"})
            for n in range(4):
                client.topic("parcels").append(b"%d" % n, f"k{n % 2}", trace_id=TRACE_ID)
        yield url


async def test_events_are_found_by_record_trace_id_and_key(url: str) -> None:
    async with laminar.aio.connect(url) as client:
        async with asyncio.timeout(60):
            while len((found := await client.trace(trace_id=TRACE_ID)).events) < 4:
                pass  # they are written within half a second; each question is a search

        assert found.is_complete
        assert [("appended", n) for n in range(4)] == [(each.event, each.offset) for each in found.events]
        (event,) = (await client.trace(record="parcels/0/1")).events
        assert (b"k1", TRACE_ID, "anonymous") == (event.key, event.trace_id, event.principal)
        assert event.address.startswith("127.") and event.node and event.topic == "parcels"
        assert [0, 2] == [each.offset for each in (await client.trace(key="k0")).events]
        assert (2, False) == (
            len((part := await client.trace(trace_id=TRACE_ID, limit=2)).events),
            part.is_complete,
        )


def test_without_a_loop_it_is_the_same(url: str) -> None:
    with laminar.connect(url) as client:
        assert 2 >= len(client.trace(key="k1").events)
        with pytest.raises(NotFound):
            client.trace(record="none/0/0")
        for wrong in ({}, {"key": "a", "record": "b/0/0"}, {"key": "a", "limit": 0}):
            with pytest.raises(ConfigError):
                client.trace(**wrong)
