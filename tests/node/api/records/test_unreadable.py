"""Batches that a producer wrote so that nobody can read them, as logs from before they were checked have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from laminar.batch import BATCH_TYPE, Header, build
from laminar.client.consume.fetchers import Fetchers
from laminar.http.api.append_body import ARROW_TYPE, JSON_TYPE, NDJSON_TYPE
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.api.records.record_value import RecordValueRoutes
from laminar.node.partition.partition import Partition
from tests.node.alone import lone_partition
from tests.node.attacks.test_batches import poisoned
from tests.node.services import Services, exchange

KINDS = ["zstd", "tag", "headers", "header-name"]


async def aside(job: Callable[[], Any]) -> Any:
    """As the server's thread for what takes long."""
    return job()


class Readers:
    """The read routes of one partition, without a server."""

    def __init__(self, partition: Partition) -> None:
        services, asking = Services([partition], elsewhere=["here"]), exchange()
        locator = Locator(services, asking)
        leaders = LeaderCall(services, locator)
        self.routes = FetchRoutes(services, asking, leaders, TopicLookup(services.view))
        self.values = RecordValueRoutes(services, self.routes, locator)

    async def fetch(self, query: str = "", accept: str = JSON_TYPE) -> Response:
        head = RequestHead("GET", f"/x?{query}", {"accept": accept})
        connection: Any = None
        return await self.routes.records(Request(head, b"", connection), "t", "0")

    async def one(self, offset: int) -> Response:
        connection: Any = None
        return await self.values.value(
            Request(RequestHead("GET", "/x", {}), b"", connection), "t", "0", str(offset)
        )


@asynccontextmanager
async def poisoned_partition(directory: Path, kind: str) -> AsyncIterator[Readers]:
    """Records 0, 2 and 3 are good, 1 is not."""
    async with lone_partition(directory) as partition:
        junk = bytearray(poisoned()[kind])
        for frame in (build([b"0"], tags=["t"]), junk, build([b"2"], tags=["t"]), build([b"3"])):
            await partition.appends.append_frame(frame, Header.unpack(frame))
        yield Readers(partition)


def headers_of(response: Response) -> dict[str, str]:
    return dict(response.headers)


@pytest.mark.parametrize("accept", [JSON_TYPE, NDJSON_TYPE, ARROW_TYPE])
@pytest.mark.parametrize("kind", KINDS)
async def test_it_stops_nobody_for_ever(tmp_path: Path, kind: str, accept: str) -> None:
    """What lies before it is answered; it is named, as nothing to be tried again; skip goes on past it."""
    query = "fields=value,tag,headers&"
    async with poisoned_partition(tmp_path, kind) as readers:
        before = await readers.fetch(query, accept)
        assert "1" == headers_of(before)["Laminar-Next-Offset"]

        with pytest.raises(Problem) as named:
            await readers.fetch(f"{query}offset=1", accept)
        assert ("unreadable", 422, "offset", 1, 2) == (
            named.value.code,
            named.value.status,
            named.value.field,
            named.value.value,
            named.value.limit,
        )
        assert named.value.retry_after_ms is None

        past = await readers.fetch(f"{query}offset=1&on_damage=skip", accept)
        assert ("4", "1-1") == (
            headers_of(past)["Laminar-Next-Offset"],
            headers_of(past)["Laminar-Skipped-Offsets"],
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_read_of_one_record_or_by_tag_names_it_too(tmp_path: Path, kind: str) -> None:
    """Never as a mistake of the server's."""
    async with poisoned_partition(tmp_path, kind) as readers:
        with pytest.raises(Problem) as one:
            await readers.one(1)
        assert ("unreadable", 1, 2) == (one.value.code, one.value.value, one.value.limit)
        assert 200 == (await readers.one(2)).status

        tagged = await readers.fetch("tag=t&on_damage=skip")
        records = msgspec.json.decode(b"".join(bytes(part) for part in tagged.body))["records"]  # type: ignore[union-attr]
        assert [0, 2] == [record["offset"] for record in records]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_client_goes_on_past_it(tmp_path: Path, kind: str) -> None:
    """It decodes for itself what it gets as batches; what was left out is told."""
    async with poisoned_partition(tmp_path, kind) as readers:

        async def fetch(topic: str, partition: int, *, offset: int, **more: Any) -> Any:
            assert more["narrowed"] == {"on_damage": "skip"}
            response = await readers.fetch(f"offset={offset}&on_damage=skip", BATCH_TYPE)
            body = b"".join(bytes(part) for part in response.body)  # type: ignore[union-attr]
            named = {name.lower(): value for name, value in response.headers}
            return SimpleNamespace(body=memoryview(body), headers=named)

        session: Any = SimpleNamespace(
            fetch=fetch, loop=asyncio.get_running_loop(), seen=SimpleNamespace(advance=lambda *args: None)
        )
        skipped: list[tuple[int, int, int]] = []
        reading = Fetchers(
            session,
            "t",
            decode=bytes,
            follow=False,
            on_damage="skip",
            skipped=lambda *gone: skipped.append(gone),
        )
        reading.add(0, 0, 4)
        found = []
        while (batch := await reading.take()) is not None:
            found += [record.raw for record in batch.records()]

        assert ([b"0", b"2", b"3"], [(0, 1, 2)]) == (found, skipped)
