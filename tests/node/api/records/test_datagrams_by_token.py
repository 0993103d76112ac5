"""Appends by datagram where tokens are asked for: whose they are, what they may do, and for how long."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

import laminar
from laminar.batch import build
from laminar.client.errors import Forbidden, OutcomeUnknown, Unauthorized
from laminar.client.produce import datagram_proof
from laminar.node.partition.state.producers import KEPT_MS
from laminar.node.secret.keys import Keys
from laminar.testing.cluster import LocalCluster
from laminar.wire.datagram import MINUTES_VALID, Answer, DatagramCodec, Forged, Question, Receipt
from tests.node.api.asking import fresh_metrics, until

SECRET = "the secret of the nodes of this test"
QUIET_S = 0.3


class Guarded:
    """A node that asks for tokens."""

    def __init__(self, url: str, admin: str) -> None:
        self.url = url
        self.admin = admin
        self.opened = ExitStack()
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def ask(self, method: str, path: str, token: str, **more: object) -> httpx.Response:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {token}"}, **more)  # type: ignore[arg-type]

    def token(self, name: str, *grants: tuple[str, str]) -> str:
        given = [{"role": role, "prefix": prefix} for role, prefix in grants]
        made = self.ask("POST", "/v1/admin/tokens", self.admin, json={"name": name, "grants": given})
        assert 201 == made.status_code, made.text
        return str(made.json()["token"])

    def key(self, token: str) -> dict[str, object]:
        answer = self.ask("GET", "/v1/datagram-key", token)
        assert 200 == answer.status_code, answer.text
        assert "no-store" == answer.headers["cache-control"]
        found: dict[str, object] = answer.json()
        return found

    def audited(self, principal: str, credential: str) -> dict[str, object]:
        """Return what the audit has first of a datagram of this credential, as soon as it is there."""
        path = "/v1/topics/_audit/partitions/0/records"
        until, offset = time.monotonic() + 60, 0
        while time.monotonic() < until:
            page = self.ask("GET", f"{path}?offset={offset}&wait_ms=1000", self.admin)
            for record in page.json().get("records", ()):
                noted: dict[str, object] = json.loads(record["value"])
                offset = record["offset"] + 1
                if (principal, credential, "UDP") == tuple(
                    noted.get(name) for name in ("principal", "credential", "method")
                ):
                    return noted
        raise AssertionError(f"nothing of {principal} is in the audit")

    def figure(self, name: str) -> float:
        with httpx.Client(
            base_url=self.url, timeout=60, trust_env=False, headers={"Authorization": f"Bearer {self.admin}"}
        ) as http:
            lines = fresh_metrics(http).splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(f"{name}{{"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    settings = {"access": "tokens", "secret": SECRET}
    with LocalCluster(tmp_path_factory.mktemp("node"), nodes=1, shards=1, settings=settings) as node:
        made = Guarded(node.urls[0], node.admin_token)
        with made.opened, made.http:
            yield made


class Asker:
    """A producer with a socket and a token's key."""

    def __init__(self, guarded: Guarded, token: str) -> None:
        given = guarded.key(token)
        self.credential, self.minute = str(given["credential"]), int(str(given["minute"]))
        assert self.credential == token.split("_")[1]
        self.codec = DatagramCodec(bytes.fromhex(str(given["key"])))
        self.producer_id = os.urandom(16)
        self.sock = guarded.opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        parts = urlsplit(guarded.url)
        self.sock.connect((parts.hostname, parts.port))
        self.sock.settimeout(60)

    def question(self, topic: str, *, sequence: int = 0, minutes: int = 0, credential: str = "") -> bytes:
        frame = build([b"x"], producer_id=self.producer_id, sequence=sequence)
        asked = Question(topic, 0, os.urandom(8), frame)
        return self.codec.encode_question(asked.by(credential or self.credential, self.minute + minutes))

    def ask(self, datagram: bytes) -> Answer:
        self.sock.send(datagram)
        return self.codec.decode_answer(self.sock.recv(2_000))

    def is_silent_for(self, datagram: bytes) -> bool:
        self.sock.settimeout(QUIET_S)
        try:
            self.sock.send(datagram)
            self.sock.recv(2_000)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(60)
        return False


@pytest.fixture
def topic(guarded: Guarded, request: pytest.FixtureRequest) -> str:
    name = f"orders-{abs(hash(request.node.name))}"
    made = guarded.ask("PUT", f"/v1/topics/{name}", guarded.admin, json={"partitions": 1, "replicas": 1})
    assert 201 == made.status_code, made.text
    return name


def test_a_writer_appends_and_others_are_refused_by_their_grants(guarded: Guarded, topic: str) -> None:
    """As over HTTP: the same codes, and no word on whether a topic is there."""
    writer = Asker(guarded, guarded.token("w", ("write", "orders")))
    said = writer.ask(writer.question(topic)).body
    assert isinstance(said, Receipt) and (0, 1) == (said.offset, said.count)

    for grants in ([("read", "")], [("write", "other")], [("metrics", "")]):
        other = Asker(guarded, guarded.token(f"with-{grants[0][0]}", *grants))
        for name in (topic, "no-such-topic"):
            refused = other.ask(other.question(name)).body
            assert isinstance(refused, dict)
            assert (403, "forbidden", name) == (refused["status"], refused["code"], refused["limit"])
    admin = Asker(guarded, guarded.admin)
    refused = admin.ask(admin.question("_transactions")).body
    assert isinstance(refused, dict) and "invalid" == refused["code"]

    for principal, credential, status in (
        ("with-metrics", other.credential, 403),
        ("admin", admin.credential, 422),
    ):
        noted = guarded.audited(principal, credential)
        assert ("UDP", "127.0.0.1", status) == tuple(noted[n] for n in ("method", "address", "status"))
        assert "append_to_partition" == noted["operation"] and "partitions/0/records" in str(noted["path"])


def test_a_recorded_datagram_does_nothing_and_is_refused_later(guarded: Guarded, topic: str) -> None:
    """Within the minutes it is answered as a copy; after them it is refused, before it could be forgotten."""
    asker = Asker(guarded, guarded.token("w", ("write", "orders")))
    first = asker.question(topic)
    receipt, again = asker.ask(first).body, asker.ask(first).body
    assert isinstance(receipt, Receipt) and isinstance(again, Receipt)
    assert (receipt.offset, False, True) == (again.offset, receipt.duplicate, again.duplicate)
    # From the earliest to the latest minute at which it is taken.
    assert (2 * MINUTES_VALID + 1) * 60_000 < KEPT_MS

    for minutes in (-MINUTES_VALID - 2, MINUTES_VALID + 2, -asker.minute):
        refused = asker.ask(asker.question(topic, sequence=1, minutes=minutes)).body
        assert isinstance(refused, dict) and ("invalid", "minute") == (refused["code"], refused["field"])
        assert abs(refused["limit"] - asker.minute) <= 2
    records = guarded.ask("GET", f"/v1/topics/{topic}/partitions/0/records?offset=0", guarded.admin).json()
    assert 1 == len(records["records"])


def test_a_datagram_counts_for_the_limits_of_its_principal(guarded: Guarded, topic: str) -> None:
    """What is beyond them is refused as over HTTP; that of another principal is taken."""
    asker = Asker(guarded, guarded.token("limited", ("write", "orders")))
    other = Asker(guarded, guarded.token("free", ("write", "orders")))
    limits = "/v1/admin/limits/limited"
    headers = {"Authorization": f"Bearer {guarded.admin}", "If-Match": "*"}
    assert guarded.http.put(limits, json={"requests_per_s": 1}, headers=headers).status_code in (200, 201)
    until = time.monotonic() + 20
    sequence = 0
    while not isinstance(said := asker.ask(asker.question(topic, sequence=sequence)).body, dict):
        assert time.monotonic() < until
        sequence += 1
    assert (429, "quota", "requests_per_s", 1) == tuple(said[n] for n in ("status", "code", "field", "limit"))
    assert isinstance(other.ask(other.question(topic)).body, Receipt)

    assert 200 == guarded.http.put(limits, json={"producers": 1}, headers=headers).status_code
    token = guarded.token("limited", ("write", "orders"))
    first, second = Asker(guarded, token), Asker(guarded, token)
    assert isinstance(first.ask(first.question(topic)).body, Receipt)
    said = second.ask(second.question(topic)).body
    assert isinstance(said, dict)
    assert (429, "quota", "producers", 1) == tuple(said[n] for n in ("status", "code", "field", "limit"))
    assert isinstance(first.ask(first.question(topic, sequence=1)).body, Receipt)


def test_what_is_not_proven_is_dropped(guarded: Guarded, topic: str) -> None:
    """The cluster's secret, another token's key, one's own under another name, and a revoked one."""
    token = guarded.token("w", ("write", "orders"))
    asker, admin = Asker(guarded, token), Asker(guarded, guarded.admin)
    assert isinstance(asker.ask(asker.question(topic)).body, Receipt)
    before = guarded.figure("laminar_datagrams_forged_total")
    frame = build([b"x"], producer_id=os.urandom(16))
    of_cluster = DatagramCodec(SECRET.encode()).encode_question(Question(topic, 0, b"12345678", frame))
    unknown = Question(topic, 0, b"12345678", frame).by("00" * 8, admin.minute)
    forged = [
        of_cluster,
        asker.question(topic, credential=admin.credential),
        DatagramCodec(Keys(SECRET.encode()).datagrams_of("00" * 8)).encode_question(unknown),
        admin.question(topic)[:36],
    ]
    changed = bytearray(asker.question(topic))
    changed[33] ^= 1  # the minute
    assert all(asker.is_silent_for(each) for each in [*forged, bytes(changed)])
    until(lambda: before + 5 <= guarded.figure("laminar_datagrams_forged_total"))
    assert before + 5 == guarded.figure("laminar_datagrams_forged_total")

    revoked = guarded.ask("DELETE", f"/v1/admin/tokens/{asker.credential}", guarded.admin)
    assert 204 == revoked.status_code
    assert asker.is_silent_for(asker.question(topic, sequence=1))
    assert 401 == guarded.ask("GET", "/v1/datagram-key", token).status_code


def test_the_catalog_does_not_hold_what_a_datagram_needs(guarded: Guarded) -> None:
    """The key follows from the nodes' secret and the id; none of the token's record is in it."""
    token = guarded.token("w", ("write", "orders"))
    given = guarded.key(token)
    assert Keys(SECRET.encode()).datagrams_of(token.split("_")[1]).hex() == given["key"]
    assert given["key"] != guarded.key(guarded.admin)["key"]
    with pytest.raises(Forged):
        DatagramCodec(
            Keys(b"another secret of nodes").datagrams_of(str(given["credential"]))
        ).decode_question(Asker(guarded, token).question("t"))


async def test_the_client_needs_its_token_and_nothing_else(
    guarded: Guarded, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its clock stands still for hours, and when its token is revoked."""
    token = guarded.token("w", ("write", "orders"))
    reader = guarded.token("r", ("read", ""))
    async with laminar.aio.connect(guarded.url, token=token) as client:
        async with client.topic(topic).datagrams(secret="not asked for") as datagrams:
            assert 0 == (await datagrams.append(b"a")).offset
            datagrams._proof._minute -= 600.0
            assert 1 == (await datagrams.append(b"b")).offset
            largest = b"x" * 800
            assert 2 == (await datagrams.append(largest)).offset
            with pytest.raises(Forbidden):
                async with client.topic("other").datagrams(partitions=1) as others:
                    await others.append(b"c")
            monkeypatch.setattr(datagram_proof, "RENEW_S", 0.0)
            revoked = guarded.ask("DELETE", f"/v1/admin/tokens/{token.split('_')[1]}", guarded.admin)
            assert 204 == revoked.status_code
            with pytest.raises(OutcomeUnknown, match="token"):
                await datagrams.append(b"d", timeout=30)
            assert datagrams._proof.credential
    async with laminar.aio.connect(guarded.url, token=token) as client:
        async with client.topic(topic).datagrams(partitions=1) as datagrams:
            with pytest.raises(Unauthorized):
                await datagrams.append(b"e")
    values = guarded.ask("GET", f"/v1/topics/{topic}/partitions/0/records?offset=0", guarded.admin).json()
    assert ["a", "b", largest.decode()] == [record["value"] for record in values["records"]]
    assert 403 == guarded.ask("POST", f"/v1/topics/{topic}/records", reader, content=b"x").status_code


async def test_a_client_goes_on_when_the_secret_has_changed(tmp_path: Path) -> None:
    """Its key is asked for again, once nothing is answered any more; nothing is lost or doubled."""
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    settings = {"access": "tokens", "secret_file": str(file)}
    with LocalCluster(tmp_path / "node", nodes=1, shards=1, settings=settings) as node:
        guarded = Guarded(node.urls[0], node.admin_token)
        with guarded.opened, guarded.http:
            made = guarded.ask("PUT", "/v1/topics/t", guarded.admin, json={"partitions": 1, "replicas": 1})
            assert 201 == made.status_code
            before = guarded.key(guarded.admin)["key"]
            async with laminar.aio.connect(guarded.url, token=guarded.admin) as client:
                async with client.topic("t").datagrams() as datagrams:
                    assert 0 == (await datagrams.append(b"0")).offset
                    file.write_text("another secret of the nodes\n")
                    until(lambda: guarded.key(guarded.admin)["key"] != before)  # it looks every few seconds
                    assert 1 == (await datagrams.append(b"1", timeout=60)).offset
                    assert datagrams.resent > 0
