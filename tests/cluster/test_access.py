"""Tokens in a cluster of real nodes: made once, known and revoked everywhere; and who else gets in."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from laminar.node.api.admin.seen_views import LONGEST_WAIT_S
from laminar.node.api.common.forwarding import FORWARDED, PassedRequest, PassedResponse
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import TcpAddress, Transport, TransportError
from laminar.testing.cluster import LocalCluster
from membership.catalog import CODE_VERSION
from tests.cluster.patience import PATIENCE_S, asked, until

SECRET = "a secret of the nodes of this test"
TOKENS = {"access": "tokens", "secret": SECRET}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes that ask for tokens."""
    folder = tmp_path_factory.mktemp("access")
    with LocalCluster(folder, nodes=3, shards=2, settings=TOKENS) as cluster:
        yield cluster


def ask(
    url: str, method: str, path: str, *, token: str = "", json: object = None, content: bytes | None = None
) -> httpx.Response:
    """Ask one node on a connection of its own, so any of its shards answers."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(timeout=PATIENCE_S, trust_env=False, headers=headers) as http:
        return asked(http, method, url + path, json=json, content=content)


def shard_urls(cluster: LocalCluster) -> list[str]:
    """The own port of every shard of every node."""
    nodes = ask(cluster.urls[0], "GET", "/v1/nodes", token=cluster.admin_token).json()["nodes"]
    return [shard["url"] for node in nodes for shard in node["shards"]]


def make_token(cluster: LocalCluster, name: str, *grants: tuple[str, str]) -> tuple[str, str]:
    """Make a token; return its text and its id."""
    document = {"name": name, "grants": [{"role": role, "prefix": prefix} for role, prefix in grants]}
    answer = ask(cluster.urls[1], "POST", "/v1/admin/tokens", token=cluster.admin_token, json=document)
    assert 201 == answer.status_code, answer.text
    return answer.json()["token"], answer.json()["id"]


def until_answered(url: str, path: str, token: str, status: int = 200) -> None:
    """Wait until a node knows a token, or with 401 that it is revoked."""
    until(lambda: status == ask(url, "GET", path, token=token).status_code, (url, path, status))


def test_one_node_makes_the_first_token(guarded: LocalCluster) -> None:
    """All have it in their views, one has it in its folder."""
    files = [node.data / "admin-token" for node in guarded.members if (node.data / "admin-token").exists()]
    assert 1 == len(files)
    token = guarded.admin_token
    for url in shard_urls(guarded):
        assert "admin" == ask(url, "GET", "/v1/whoami", token=token).json()["principal"]
    listed = ask(guarded.urls[2], "GET", "/v1/admin/tokens", token=token).json()["tokens"]
    assert ["admin"] == [each["name"] for each in listed]


def test_a_token_holds_on_every_shard_until_it_is_revoked(guarded: LocalCluster) -> None:
    """At once, when the answer is there; where that took the longest that it may, within the lag of views."""
    urls = shard_urls(guarded)
    assert 6 == len(urls)
    began = time.monotonic()
    token, number = make_token(guarded, "auditor", ("read", ""))
    made_s = time.monotonic() - began

    def answered(status: int) -> bool:
        return all(ask(url, "GET", "/v1/whoami", token=token).status_code == status for url in urls)

    assert answered(200) or made_s >= LONGEST_WAIT_S
    until(lambda: answered(200))
    with httpx.Client(base_url=urls[-1], timeout=PATIENCE_S, trust_env=False) as kept:
        kept.headers["authorization"] = f"Bearer {token}"
        assert 200 == kept.get("/v1/whoami").status_code
        began = time.monotonic()
        revoked = ask(
            guarded.urls[0], "DELETE", f"/v1/admin/tokens/{number}", token=guarded.admin_token
        ).status_code
        revoked_s = time.monotonic() - began
        assert answered(401) or revoked_s >= LONGEST_WAIT_S
        until(lambda: answered(401))
        assert (204, 401) == (revoked, kept.get("/v1/whoami").status_code)
    print(f"made on all shards after {1000 * made_s:.0f} ms, revoked after {1000 * revoked_s:.0f}")


def test_a_node_that_stands_still_holds_up_a_new_token_for_a_second(guarded: LocalCluster) -> None:
    """No longer; the others have it, and it has it once it goes on. Its controller, a voter, goes on."""
    stopped = guarded.members[2]
    document = msgspec.json.decode((stopped.data / "node.json").read_bytes())
    pids = [pid for role, pid in document["pids"].items() if "shard" in role]
    assert 2 == len(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        token, _ = make_token(guarded, "still", ("read", ""))
        assert time.monotonic() - began >= LONGEST_WAIT_S
        for member in guarded.members[:2]:
            until_answered(member.url, "/v1/whoami", token)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    until_answered(stopped.url, "/v1/whoami", token)


def test_a_forwarded_request_acts_for_its_principal(guarded: LocalCluster) -> None:
    """A node that holds no replica passes it on; the leader asks for no token again."""
    token, _ = make_token(guarded, "orders", ("write", "orders"), ("read", "orders"))
    made = ask(
        guarded.urls[0],
        "PUT",
        "/v1/topics/orders",
        token=guarded.admin_token,
        json={"replicas": 1, "partitions": 4},
    )
    assert 201 == made.status_code, made.text
    for url in shard_urls(guarded):
        until_answered(url, "/v1/whoami", token)
        for partition in range(4):
            path = f"/v1/topics/orders/partitions/{partition}/records"
            assert 201 == ask(url, "POST", path, token=token, content=b"x").status_code
            assert 200 == ask(url, "GET", path, token=token).status_code
            assert 401 == ask(url, "POST", path, content=b"x").status_code


async def passed(address: TcpAddress, secret: str | None, method: str, request: object) -> bytes:
    """Call a method of a process, as a node named `stranger` that does not belong to the cluster yet."""
    transport = Transport(
        cluster_id=lambda: None,
        node="stranger",
        role=1,
        nonce=b"n" * 16,
        secrets=Keyring([secret] if secret else []),
        code_version=CODE_VERSION,
    )
    try:
        return await transport.call(address, method, msgspec.msgpack.encode(request), timeout=PATIENCE_S)
    finally:
        await transport.close()


def test_a_local_process_without_the_secret_has_nothing_carried_out(guarded: LocalCluster) -> None:
    """At the peer ports, which take requests that were checked: only a node's word counts there."""
    document = ask(guarded.urls[0], "GET", "/v1/cluster", token=guarded.admin_token).json()
    host, _, port = document["nodes"][0]["peer"].rpartition(":")
    request = PassedRequest("GET", "/v1/topics", {"host": "x", FORWARDED: "1"}, bytearray(), "admin")
    for role in (1, 2):
        address = TcpAddress(host, int(port) + role)
        for secret in (None, "not the secret of the cluster"):
            with pytest.raises(TransportError):
                asyncio.run(passed(address, secret, "http", request))
        # With it the request is carried out, and its principal is only a name: it brings no grants.
        status, answer = msgspec.msgpack.decode(
            asyncio.run(passed(address, SECRET, "http", request)),
            type=tuple[int, PassedResponse],
        )
        assert (0, {"topics": [], "total": 0}) == (status, msgspec.json.decode(answer.body))


def test_the_first_node_draws_a_secret_and_another_joins_with_its_file(tmp_path: Path) -> None:
    """On the loopback, where no one has set one; without the file the other does not start."""
    cluster = LocalCluster(tmp_path, nodes=2, shards=1, settings={"access": "tokens"})
    try:
        cluster.spawn(0)
        cluster.wait_ready([0])
        cluster.spawn(1)
        until(lambda: not cluster.members[1].running)
        said = cluster.members[1].log_tail()
        cluster.settings = {"access": "tokens", "secret_file": str(cluster.members[0].data / "secret")}
        cluster.spawn(1)
        cluster.wait_ready()

        assert "set secret_file" in said and "the first node's data folder" in said
        token = cluster.admin_token
        for url in cluster.urls:
            until_answered(url, "/v1/whoami", token)
        assert not (cluster.members[1].data / "secret").exists()
    finally:
        cluster.stop()


def test_data_stays_readable_with_its_token_after_all_nodes_restart(tmp_path: Path) -> None:
    """Credentials are in the catalog's log."""
    with LocalCluster(tmp_path, nodes=3, shards=1, settings=TOKENS) as cluster:
        token, _ = make_token(cluster, "keeper", ("write", "k"), ("read", "k"))
        gone, gone_number = make_token(cluster, "gone", ("admin", ""))
        admin = cluster.admin_token
        assert 201 == ask(cluster.urls[0], "PUT", "/v1/topics/k", token=admin, json={}).status_code
        revoked = ask(cluster.urls[0], "DELETE", f"/v1/admin/tokens/{gone_number}", token=admin)
        assert 204 == revoked.status_code, revoked.text
        for node in range(3):
            cluster.kill(node)
        for node in range(3):
            cluster.spawn(node)
        cluster.wait_ready()

        assert admin == cluster.admin_token
        for url in cluster.urls:
            until_answered(url, "/v1/topics/k", token)
            # A node that recovers may have a view from before the revocation.
            until_answered(url, "/v1/topics/k", gone, 401)
