"""Our server to other people's clients: httpx, requests, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from tests.http.serving import PATIENCE_S, Mirror, serving


async def test_httpx_is_served() -> None:
    """Kept connections, streamed bodies, redirects refused, problems."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 10_000

    app = Mirror()
    # By default httpx gives up after 5 s, and closes a connection that was idle for 5 s.
    patient: dict[str, Any] = {"timeout": PATIENCE_S, "limits": httpx.Limits(keepalive_expiry=PATIENCE_S)}
    async with (
        serving(app) as (server, url),
        httpx.AsyncClient(base_url=url, trust_env=False, **patient) as client,
    ):
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            answer = await client.request(method, "/v1/a b/é", params={"key": "S&O ü"})
            assert 200 == answer.status_code
            if method != "HEAD":
                assert {"key": "S&O ü"} == answer.json()["query"]
        assert 100_000 == (await client.post("/a", content=parts())).json()["length"]
        assert 5_000_000 == (await client.post("/a", content=b"y" * 5_000_000)).json()["length"]
        assert 200_000 == len((await client.get("/stream")).content)
        problem = await client.get("/problem")
        assert ("application/problem+json", "no_leader") == (
            problem.headers["content-type"],
            problem.json()["code"],
        )
        assert 1 == server.statistics()["connections"]
        assert 307 == (await client.post("/moved", content=b"hello")).status_code


async def test_requests_is_served() -> None:
    """It sends head and body apart, and streams in chunks."""

    def parts() -> Iterator[bytes]:
        for _ in range(10):
            yield b"x" * 10_000

    def ask(url: str) -> list[int]:
        with requests.Session() as session:
            session.trust_env = False
            lengths = [
                session.post(f"{url}/a", data=data, timeout=60).json()["length"]
                for data in (b"hi", b"y" * 3_000_000, parts())
            ]
            refused = session.post(f"{url}/refused", data=b"x" * 3_000_000, timeout=60)
            return [*lengths, refused.status_code, len(session.get(f"{url}/big", timeout=60).content)]

    async with serving(Mirror()) as (_, url):
        assert [2, 3_000_000, 100_000, 413, (3 << 20) + 5] == await asyncio.to_thread(ask, url)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_is_served(tmp_path: Path) -> None:
    """With 100-continue for large files, chunked from a pipe, HTTP/1.0, an offer of HTTP/2."""
    large = tmp_path / "large"
    large.write_bytes(b"z" * 4_000_000)

    async def curl(*arguments: str, stdin: bytes = b"") -> tuple[str, bytes]:
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sS", "--noproxy", "*", "-m", "60", "-w", "\n%{http_code}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, error = await process.communicate(stdin)
        assert process.returncode == 0, error
        body, _, status = output.rpartition(b"\n")
        return status.decode(), body

    async with serving(Mirror()) as (_, url):
        assert 2 == json.loads((await curl("-d", "hi", f"{url}/a"))[1])["length"]
        assert 4_000_000 == json.loads((await curl("-T", str(large), f"{url}/a"))[1])["length"]
        status, _ = await curl("-H", "Expect: 100-continue", "--data-binary", f"@{large}", f"{url}/refused")
        assert "413" == status
        streamed = await curl("-T", "-", f"{url}/a", stdin=b"piped")
        assert 5 == json.loads(streamed[1])["length"]
        assert ("200", 200_000) == (lambda found: (found[0], len(found[1])))(await curl(f"{url}/stream"))
        assert "200" == (await curl("-0", f"{url}/stream"))[0]
        assert "200" == (await curl("--http2", "-d", "hi", f"{url}/a"))[0]
        assert "200" == (await curl("-I", f"{url}/a"))[0]
        assert "400" == (await curl("-H", "Host:", f"{url}/a"))[0]
        both = await curl(f"{url}/a", f"{url}/b")
        assert both[0] == "200"
