"""Reads that wait for new records: an append wakes all of them, and stops nobody for it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.node.attacks.victim import MOST_BLOCKED_S, cpu_s, victim

POLL = (
    b"GET /v1/topics/polled/partitions/0/records?offset=%d&max_bytes=1&wait_ms=30000 HTTP/1.1\r\n"
    b"Host: localhost\r\n\r\n"
)
_BODY = b'{"max":1,"wait_ms":30000}'
RECEIVE = (
    b"POST /v1/topics/polled/channels/c/receive HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
CONNECTIONS, PIPELINED = 20, 500
# What the node computes before another client is answered, in CPU time: a busy machine takes none.
MOST_CPU_S = 1.5


@pytest.mark.parametrize("request_bytes", [POLL % 0, RECEIVE], ids=["fetch", "receive"])
async def test_an_append_that_many_reads_wait_for_is_answered_at_once(request_bytes: bytes) -> None:
    """Twenty connections with 500 long polls each, of records or of jobs: no more are begun than one may
    wait for, and these are woken in parts, so that another client is served between them.
    """
    with victim() as node:
        url = node.http.base_url
        assert 201 == node.http.put("/v1/topics/polled", json={"partitions": 1}).status_code
        assert 201 == node.http.put("/v1/topics/polled/channels/c", json={}).status_code
        connections = [await asyncio.open_connection(url.host, url.port) for _ in range(CONNECTIONS)]
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            for _, writer in connections:
                writer.write(request_bytes * PIPELINED)
                await writer.drain()
            # They were sent before this one, which is answered after their heads were read.
            assert 200 == (await client.get("/v1/topics/polled")).status_code

            used = [cpu_s(node.pids)]
            made = await client.post("/v1/topics/polled/partitions/0/records", content=b"x")
            used.append(cpu_s(node.pids))
            other = await client.get("/v1/topics/innocent")
            used.append(cpu_s(node.pids))

        assert (201, 200) == (made.status_code, other.status_code)
        assert max(each.elapsed.total_seconds() for each in (made, other)) < MOST_BLOCKED_S
        for reader, writer in connections:
            if request_bytes is not RECEIVE:  # a job is given to one of them
                await reader.readuntil(b"\r\n\r\n")
            writer.close()
        append_s, other_s = used[1] - used[0], used[2] - used[1]
        print(f"until the append's answer {append_s:.2f} s of CPU, until another's {other_s:.2f} s")
        assert append_s < MOST_CPU_S
        assert other_s < MOST_CPU_S
        assert node.unharmed()
