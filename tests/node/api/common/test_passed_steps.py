"""Steps of channels, cursors and groups that a shard passes on: no principal has all calls of the leader."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from laminar.node.api.common.passed_turns import SHARE
from laminar.node.transport.rpc import MAX_CALLS_IN_PROGRESS
from laminar.testing.cluster import LocalCluster
from tests.http.serving import read_answer

CONSUMERS = MAX_CALLS_IN_PROGRESS // 4
MOST = MAX_CALLS_IN_PROGRESS * SHARE // (SHARE + 1)


@dataclass
class Two:
    """Two shards: one leads the only partition of topic `t`, the other one is the door."""

    door: str
    leader: str
    tokens: dict[str, str]

    def request(self, who: str, method: str, target: str, document: object) -> bytes:
        """Return a request as it is sent."""
        body = json.dumps(document).encode()
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.tokens[who]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def ask(self, who: str, method: str, target: str, document: object = None) -> httpx.Response:
        """Ask the door."""
        headers = {"authorization": f"Bearer {self.tokens[who]}"}
        with httpx.Client(base_url=self.door, headers=headers, timeout=20, trust_env=False) as http:
            return http.request(method, target, json=document)

    def figure(self, url: str, name: str) -> float:
        """Return the largest value of a metric, of all processes."""
        headers = {"authorization": f"Bearer {self.tokens['all']}"}
        text = httpx.get(f"{url}/metrics", headers=headers, trust_env=False).text
        return max(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """One node of two shards, with a topic, a channel and three principals that both shards know."""
    settings = {"access": "tokens"}
    with LocalCluster(tmp_path_factory.mktemp("steps"), nodes=1, shards=2, settings=settings) as cluster:
        member = cluster.members[0]
        urls = [f"http://{member.host}:{member.port + 1 + shard}" for shard in range(2)]
        two = Two(urls[0], urls[1], {"all": cluster.admin_token})
        for who in ("many", "other"):
            asked = {"name": who, "grants": [{"role": "admin", "prefix": "t"}]}
            while (made := two.ask("all", "POST", "/v1/admin/tokens", asked)).status_code == 401:
                pass
            two.tokens[who] = made.json()["token"]
        assert two.ask("all", "PUT", "/v1/topics/t", {"partitions": 1}).status_code == 201
        assert two.ask("all", "PUT", "/v1/topics/t/channels/c", {}).status_code == 201
        for url in urls:
            for token in two.tokens.values():
                headers = {"authorization": f"Bearer {token}"}
                while httpx.get(f"{url}/v1/whoami", headers=headers, trust_env=False).status_code == 401:
                    pass
        headers = {"authorization": f"Bearer {cluster.admin_token}", "laminar-redirect": "1"}
        target = "/v1/topics/t/partitions/0/offsets"
        (door,) = (
            url
            for url in urls
            if httpx.get(url + target, headers=headers, trust_env=False).status_code == 307
        )
        two.door, two.leader = door, urls[1 - urls.index(door)]
        yield two


async def test_consumers_that_wait_leave_calls_for_others(two: Two) -> None:
    """More of one principal than a process works on: they are refused, and others' steps are not."""
    receive = two.request("many", "POST", "/v1/topics/t/channels/c/receive", {"max": 1, "wait_ms": 30_000})
    at = httpx.URL(two.door)
    streams = [await asyncio.open_connection(at.host, at.port) for _ in range(5)]
    for _, writer in streams:
        writer.write(receive * CONSUMERS)
    answers = [asyncio.create_task(read_answer(reader)) for reader, _ in streams]
    for url, name, least in (
        (two.door, "laminar_http_requests_total", 5 * CONSUMERS),
        (two.leader, "laminar_transport_calls_working", MOST - 8),
    ):
        while await asyncio.to_thread(two.figure, url, name) < least:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.1)
    for method, target, document, status in (
        ("GET", "/v1/topics/t/cursors", None, 200),
        ("PUT", "/v1/topics/t/groups/g/members/m", {"mode": "clustering", "session_ms": 10_000}, 200),
        ("POST", "/v1/topics/t/channels/c/receive", {"max": 1, "wait_ms": 1}, 200),
        ("POST", "/v1/topics/t/partitions/0/records", "x", 201),
    ):
        answer = await asyncio.to_thread(two.ask, "other", method, target, document)
        assert status == answer.status_code, (target, answer.text)
    for each in answers:
        each.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    for _, writer in streams:
        writer.transport.abort()
