"""Steps of channels, cursors and groups that a shard passes on: no principal has all calls of the leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from laminar.node.api.channels.steps import ReceiveRequest
from laminar.node.api.common.forwarding import FOR_PRINCIPAL, ForPrincipal
from laminar.node.api.common.passed_turns import SHARE
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.rpc import MAX_CALLS_IN_PROGRESS
from laminar.node.transport.transport import TcpAddress, Transport
from laminar.testing.cluster import LocalCluster
from membership.catalog import CODE_VERSION

SECRET = "a secret of the nodes of this test"
MOST = MAX_CALLS_IN_PROGRESS * SHARE // (SHARE + 1)
WAIT_S = 60


def passing_on() -> Transport:
    """A shard of another node, as far as a leader can tell."""
    return Transport(
        cluster_id=lambda: None,
        node="stranger",
        role=1,
        nonce=b"n" * 16,
        secrets=Keyring([SECRET]),
        code_version=CODE_VERSION,
    )


async def until_known(http: httpx.AsyncClient) -> None:
    """Wait until a shard knows the first token, which no request has made."""
    while 401 == (await http.get("/v1/whoami")).status_code:
        pass


async def test_consumers_that_wait_leave_calls_for_others(tmp_path: Path) -> None:
    """Of more than a process works on some are refused, of that principal alone; others' steps are not."""
    settings = {"access": "tokens", "secret": SECRET}
    with LocalCluster(tmp_path / "node", nodes=1, shards=2, settings=settings) as cluster:
        member, admin = cluster.members[0], {"authorization": f"Bearer {cluster.admin_token}"}
        https = [
            httpx.AsyncClient(
                base_url=f"http://{member.host}:{member.port + 1 + shard}",
                headers=admin,
                timeout=WAIT_S,
                trust_env=False,
            )
            for shard in range(2)
        ]
        for http in https:
            await until_known(http)
        tokens = {}
        for who in ("many", "other"):
            grants = [{"role": "admin", "prefix": "t"}]
            made = await https[0].post("/v1/admin/tokens", json={"name": who, "grants": grants})
            tokens[who] = {"authorization": f"Bearer {made.json()['token']}"}
        assert 201 == (await https[0].put("/v1/topics/t", json={"partitions": 1})).status_code
        assert 201 == (await https[0].put("/v1/topics/t/channels/c", json={})).status_code
        redirects = [
            (await http.get("/v1/topics/t/partitions/0/offsets?at=end", headers={"laminar-redirect": "1"}))
            for http in https
        ]
        leader = [answer.status_code for answer in redirects].index(307) ^ 1
        door = https[1 - leader]
        channel = (await door.get("/v1/topics/t/channels/c")).json()["id"]
        nodes = (await door.get("/v1/cluster")).json()["nodes"]
        host, _, port = nodes[0]["peer"].rpartition(":")
        address = TcpAddress(host, int(port) + 1 + leader)

        transport = passing_on()

        def receive(who: str, wait_ms: int) -> asyncio.Future[bytes]:
            step = msgspec.msgpack.encode(ReceiveRequest("t", 0, channel, 0, wait_ms))
            payload = msgspec.msgpack.encode(ForPrincipal(who, "channel_receive", step))
            return asyncio.ensure_future(transport.call(address, FOR_PRINCIPAL, payload, timeout=WAIT_S))

        waiting = [receive("many", 1000 * WAIT_S) for _ in range(MOST - 30)]
        while True:
            call = receive("many", 1000 * WAIT_S)
            await receive("other", 0)  # so that one was begun, or refused
            if call.done():
                break
            waiting.append(call)
            assert len(waiting) < MAX_CALLS_IN_PROGRESS
        status, problem = msgspec.msgpack.decode(call.result())
        assert (503, "overloaded", "not_applied") == (status, problem["code"], problem["outcome"])
        assert abs(len(waiting) - MOST) < 4 and not any(each.done() for each in waiting)
        # The other call that was in progress then took room as well: there is room for one more or two.
        for _ in range(4):
            waiting.append(receive("many", 1000 * WAIT_S))
            await asyncio.wait(waiting[-1:], timeout=0.3)
        steps = (
            ("POST", "/v1/topics/t/channels/c/receive", {"max": 1, "wait_ms": 1}, 200),
            ("GET", "/v1/topics/t/cursors", None, 200),
            ("PUT", "/v1/topics/t/groups/g/members/m", {"mode": "clustering", "session_ms": 10_000}, 200),
        )
        for method, target, document, status in steps:
            for who, wanted in (("many", 503), ("other", status)):
                answer = await door.request(method, target, json=document, headers=tokens[who])
                assert wanted == answer.status_code, (who, target, answer.text)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await transport.close()
        for http in https:
            await http.aclose()
