"""Numbered appends that a shard passes on, many at once: turns at the leader keep their order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from laminar.testing.cluster import LocalCluster

APPENDS = 300
PRODUCER = "a" * 32


async def answered(host: str, port: int, requests: list[bytes]) -> list[int]:
    """Send all requests at once on one connection; return the status of each."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"".join(requests))
    found = []
    for _ in requests:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        found.append(int(head.split()[1]))
        length = head.index(b"content-length: ") + 16
        await reader.readexactly(int(head[length : head.index(b"\r\n", length)]))
    writer.close()
    return found


async def known(host: str, port: int, token: str) -> None:
    """Wait until a shard knows a token: another one made it."""
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"http://{host}:{port}", headers=headers, trust_env=False) as http:
        while 401 == (await http.get("/v1/whoami")).status_code:
            pass


async def test_appends_of_one_connection_keep_their_order_at_the_leader(tmp_path: Path) -> None:
    """While another principal floods it, too: a number that came before its turn would be refused."""
    settings = {"access": "tokens"}
    with LocalCluster(tmp_path / "node", nodes=1, shards=2, settings=settings) as cluster:
        member = cluster.members[0]
        shards = [member.port + 1 + shard for shard in range(2)]
        for port in shards:
            await known(member.host, port, cluster.admin_token)
        headers = {"authorization": f"Bearer {cluster.admin_token}"}
        async with httpx.AsyncClient(base_url=cluster.urls[0], headers=headers, trust_env=False) as http:
            grants = [{"role": "write", "prefix": "t"}]
            made = await http.post("/v1/admin/tokens", json={"name": "other", "grants": grants})
            assert 201 == made.status_code, made.text
            assert 201 == (await http.put("/v1/topics/t", json={"partitions": 1})).status_code
        for port in shards:
            await known(member.host, port, made.json()["token"])

        def append(token: str, numbered: str = "") -> bytes:
            return (
                "POST /v1/topics/t/partitions/0/records HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {token}\r\nContent-Type: application/octet-stream\r\n{numbered}"
                "Content-Length: 1\r\n\r\nx"
            ).encode()

        numbered = [
            append(
                cluster.admin_token,
                f"Laminar-Producer: {PRODUCER}\r\nLaminar-Epoch: {shard}\r\nLaminar-Sequence: {number}\r\n",
            )
            for shard in range(2)
            for number in range(APPENDS)
        ]
        # Both know the leader: what is asked while one looks it up may be overtaken.
        for port in shards:
            first = await answered(member.host, port, [append(cluster.admin_token)])
            assert [201] == first
        for shard, port in enumerate(shards):
            mine, *others = await asyncio.gather(
                answered(member.host, port, numbered[shard * APPENDS :][:APPENDS]),
                *(answered(member.host, each, [append(made.json()["token"])] * APPENDS) for each in shards),
            )
            assert {201} == set(mine)
            assert {201} == set().union(*others)
