"""Tokens and TLS, by the client's side: who gets the token, what is trusted, and what is said of a refusal.

The nodes are those of `conftest`, with certificates of a CA that the tests make.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import laminar
from laminar import aio
from laminar.client.net import authorization
from tests.certificates import Authority, Pair
from tests.client.conftest import FakeCluster

HOSTS = ("127.0.0.1", "localhost")
# A certificate that is not accepted is no outage: it is said long before the deadline of a call.
SOON_S = 20.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Pair:
    return authority.node("n1", *HOSTS)


@contextmanager
def fakes(*certificates: Pair, nodes: int = 3) -> Iterator[FakeCluster]:
    """Nodes with these certificates, or `nodes` without; with a topic `t` of four partitions."""
    fake = FakeCluster(len(certificates) or nodes, certificates=certificates)
    fake.start()
    fake.create("t", 4)
    try:
        yield fake
    finally:
        fake.stop()


@pytest.fixture
def tls(certificate: Pair) -> Iterator[FakeCluster]:
    """Three nodes that speak TLS, and accept the token `good`."""
    with fakes(certificate, certificate, certificate) as fake:
        fake.tokens = {"good": set()}
        yield fake


def named(url: str, host: str) -> str:
    """Return `url` with another host."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host}:{parts.port}"


# -- over TLS, with a token ----------------------------------------------------------------------


def test_the_sync_face_works_over_tls_with_a_token(tls: FakeCluster, authority: Authority) -> None:
    with laminar.connect(tls.urls[0], token="good", ca=authority.pem) as client:
        topic = client.topic("t")
        topic.append(b"first", partition=0)
        with topic.producer(batch_bytes=2_000) as producer:
            for number in range(2_000):
                producer.send(b"%d" % number, partition=number % 4)
        read = [record.text for record in topic.read(partitions=[0])]

    assert ["first", *map(str, range(0, 2_000, 4))] == read
    assert {"Bearer good"} == {token for _, token in tls.heard}
    assert {0, 1, 2} == {node for node, _ in tls.heard}


async def test_the_aio_face_works_over_tls_with_a_token(tls: FakeCluster, authority: Authority) -> None:
    """Named producers, long polls and large batches too."""
    async with aio.connect(tls.urls, token="good", ca=authority.pem.read_text()) as client:
        topic = client.topic("t")
        async with topic.producer(name="copier", batch_bytes=100_000) as producer:
            for number in range(1, 301):
                producer.send(bytes(1_000), partition=0, number=number)
        reader = topic.read(partitions=[0], follow=True)
        async with reader:
            first = await anext(aiter(reader))

    assert (0, 1_000) == (first.offset, len(first.value))
    assert 300 == len(tls.values("t", 0))


@pytest.mark.parametrize("face", ["sync", "aio"])
def test_the_environment_says_token_and_ca(
    tls: FakeCluster, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, face: str
) -> None:
    (tmp_path / "token").write_text("good\n")
    monkeypatch.setenv("LAMINAR_URL", ",".join(tls.urls))
    monkeypatch.setenv("LAMINAR_CA", str(authority.pem))
    monkeypatch.setenv("LAMINAR_TOKEN_FILE", str(tmp_path / "token"))

    async def listed() -> list[str]:
        async with aio.connect() as client:
            return await client.topics()

    if face == "aio":
        assert ["t"] == asyncio.run(listed())
    else:
        with laminar.connect() as client:
            assert ["t"] == client.topics()


# -- what is not trusted -------------------------------------------------------------------------


def untrusted(act: Callable[[], object]) -> laminar.Untrusted:
    began = time.monotonic()
    with pytest.raises(laminar.Untrusted) as failed:
        act()
    assert time.monotonic() - began < SOON_S
    assert not failed.value.retriable and "not_applied" == failed.value.outcome
    return failed.value


def test_nodes_of_another_ca_are_refused_at_once(tls: FakeCluster, stranger: Authority) -> None:
    """The token is not sent, and the error says which CA and which host."""
    with laminar.connect(tls.urls, token="good", ca=stranger.pem) as client:
        error = untrusted(lambda: client.topic("t").append(b"a"))
        untrusted(client.topics)
        untrusted(lambda: list(client.topic("t").read()))

    assert str(stranger.pem) in str(error) and "127.0.0.1" in str(error) and "LAMINAR_CA" in str(error)
    assert "tls_failed" == error.code and not tls.heard


def test_the_system_s_cas_know_no_cluster(tls: FakeCluster) -> None:
    with laminar.connect(tls.urls, token="good") as client:
        assert "the system's CAs" in str(untrusted(client.topics))


def test_a_name_that_the_certificate_lacks_is_said(authority: Authority) -> None:
    elsewhere = authority.node("n2", "node1.example")
    with fakes(elsewhere) as fake:
        with laminar.connect(named(fake.urls[0], "localhost"), ca=authority.pem) as client:
            error = untrusted(client.topics)

    assert "Hostname mismatch" in str(error) and "localhost" in str(error)


def test_an_expired_certificate_is_said(authority: Authority) -> None:
    with fakes(authority.node("old", *HOSTS, days=-1)) as fake:
        with laminar.connect(fake.urls, ca=authority.pem) as client:
            error = untrusted(client.topics)

    assert "certificate has expired" in str(error) and "renew" in str(error)


def test_one_node_with_an_expired_certificate_stops_no_call_to_the_others(
    certificate: Pair, authority: Authority
) -> None:
    """What another node can answer, it answers; what only that node could, fails soon and clearly."""
    old = authority.node("old", *HOSTS, days=-1)
    with fakes(certificate, old, certificate) as fake:
        with laminar.connect(fake.urls, ca=authority.pem) as client:
            for _ in range(10):
                assert ["t"] == client.topics()
            topic = client.topic("t")
            topic.append(b"a", partition=0)
            error = untrusted(lambda: topic.append(b"b", partition=1))
            assert ["a"] == [record.text for record in topic.read(partitions=[0])]

    assert "certificate has expired" in str(error)


def test_a_producer_fails_its_records_when_the_leader_s_certificate_is_refused(
    certificate: Pair, stranger: Authority, authority: Authority
) -> None:
    with fakes(certificate, stranger.node("n1", *HOSTS)) as fake:
        with laminar.connect(fake.urls[0], ca=authority.pem) as client:
            with pytest.raises(laminar.ProduceError) as failed:
                with client.topic("t").producer() as producer:
                    producer.send(b"fits", partition=0)
                    producer.send(b"fails", partition=1)

    (lost,) = failed.value.undelivered
    assert (b"fails", "not_applied") == (lost.value, lost.outcome)
    assert isinstance(lost.error, laminar.Untrusted)


def test_https_never_becomes_http(certificate: Pair, authority: Authority) -> None:
    """Where the cluster names a node without TLS, nothing is sent to it."""
    with fakes(certificate) as secure, fakes(nodes=1) as plain:
        secure.urls.append(plain.urls[0])
        secure.topics["t"][1].leader = 1
        with laminar.connect(secure.urls[0], ca=authority.pem) as client:
            error = untrusted(lambda: client.topic("t").append(b"a", partition=1))

    assert f"{plain.urls[0]} is not connected to without TLS" in str(error)
    assert not plain.requests


@pytest.mark.parametrize("ca", ["missing", "empty"])
def test_a_ca_file_that_is_none_is_a_mistake_of_the_caller(tmp_path: Path, ca: str) -> None:
    (tmp_path / "empty").write_text("")
    client = laminar.connect("https://127.0.0.1:1", ca=tmp_path / ca)
    with pytest.raises(laminar.ConfigError, match=ca) as failed:
        client.topics()

    assert ("bad_ca", "ca", str(tmp_path / ca)) == (failed.value.code, failed.value.field, failed.value.value)


# -- who gets the token --------------------------------------------------------------------------


def test_a_redirect_to_another_host_does_not_get_the_token(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a host that an answer names, without TLS. Nodes that were given pass requests on to it."""
    cluster.tokens = {"good": set()}
    first, cluster.urls[1] = cluster.urls[0], named(cluster.urls[1], "localhost")
    with laminar.connect(first, token="good") as client:
        client.cluster()
        topic = client.topic("t")
        topic.append(b"a", partition=0)
        cluster.topics["t"][0].leader = 1  # a redirect says so
        topic.append(b"b", partition=0)
        with topic.producer() as producer:
            for number in range(40):
                producer.send(b"%d" % number, partition=number % 4)
        assert 42 == len(list(topic.read()))
        for _ in range(10):
            assert ["t"] == client.topics()

    assert not [node for node, _ in cluster.heard if node == 1]
    assert {"Bearer good"} == {token for _, token in cluster.heard}
    (warning,) = [record.message for record in caplog.records if "token" in record.message]
    assert cluster.urls[1] in warning and "good" not in warning


def test_a_node_that_redirects_for_ever_gets_no_other_host_the_token(cluster: FakeCluster) -> None:
    """Also if it does not pass requests on, and does not name that host anywhere else."""
    cluster.tokens = {"good": set()}
    with fakes(nodes=1) as stranger:
        with laminar.connect(cluster.urls[0], token="good", timeout=3.0) as client:
            topic = client.topic("t")
            topic.append(b"a", partition=0)
            cluster.redirects_to = named(stranger.urls[0], "localhost")
            for refused in (lambda: topic.append(b"b", partition=0), client.topics):
                with pytest.raises(laminar.TimedOut, match="307"):
                    refused()

    assert not stranger.heard


def test_a_lying_cluster_does_not_get_the_token_sent_elsewhere(
    certificate: Pair, authority: Authority, stranger: Authority
) -> None:
    """Over TLS a host that was not given needs a certificate of the given CA, even with the system's."""
    with fakes(certificate) as fake, fakes(stranger.node("n1", *HOSTS)) as liar:
        fake.urls.append(named(liar.urls[0], "localhost"))
        for partition in fake.topics["t"]:
            partition.leader = 1
        with laminar.connect(fake.urls[0], token="good", ca=authority.pem) as client:
            untrusted(lambda: client.topic("t").append(b"a", partition=1))
            client.cluster()
            assert ["t"] == client.topics()

    assert not liar.heard and {"Bearer good"} == {token for _, token in fake.heard}


def test_over_tls_nodes_that_the_cluster_names_get_the_token(tls: FakeCluster, authority: Authority) -> None:
    """As they prove by a certificate of the same CA that they are of the cluster."""
    first, tls.urls[1] = tls.urls[0], named(tls.urls[1], "localhost")
    with laminar.connect(first, token="good", ca=authority.pem) as client:
        assert 1 == client.topic("t").append(b"a", partition=1).partition

    assert {(0, "Bearer good"), (1, "Bearer good")} <= set(tls.heard)


def test_without_a_ca_other_hosts_do_not_get_the_token() -> None:
    """The system's CAs vouch for every host of the world."""
    from laminar.client.net.endpoints import Endpoints

    secure = ("https://a:1", "https://b:1")
    assert not Endpoints(secure, "good").may_hear_token("https://c:1")
    assert Endpoints(secure, "good", ca="file").may_hear_token("https://c:1")
    assert not Endpoints(secure, "good", ca="file").may_hear_token("http://c:1")
    assert not Endpoints(secure, "good", ca="file").may_hear_token("http://a:1")
    # Without TLS anyone on the way may have named the host.
    assert not Endpoints(("https://a:1", "http://b:1"), "good", ca="file").may_hear_token("https://c:1")


# -- refusals ------------------------------------------------------------------------------------


def test_no_token_and_an_unknown_one_are_refused(cluster: FakeCluster) -> None:
    """At once; what to do is in the message, and the token is not."""
    cluster.tokens = {"good": set()}
    for token in (None, "s3cret"):
        began = time.monotonic()
        with laminar.connect(cluster.urls, token=token) as client:
            with pytest.raises(laminar.Unauthorized, match="LAMINAR_TOKEN") as failed:
                client.topic("t").append(b"a")
        assert time.monotonic() - began < SOON_S
        assert (401, "unauthorized", "not_applied") == (
            failed.value.status,
            failed.value.code,
            failed.value.outcome,
        )
        assert not failed.value.retriable and isinstance(failed.value, laminar.AuthError)
        assert "s3cret" not in str(failed.value) + repr(failed.value)


def test_a_missing_role_is_named(cluster: FakeCluster) -> None:
    cluster.tokens = {"reads": {"write"}}
    with laminar.connect(cluster.urls, token="reads") as client:
        topic = client.topic("t")
        assert [] == list(topic.read())
        with pytest.raises(laminar.Forbidden) as failed:
            topic.append(b"a")
        with pytest.raises(laminar.ProduceError) as undelivered:
            with topic.producer() as producer:
                producer.send(b"a", partition=0)

    assert ("role", "write") == (failed.value.field, failed.value.value)
    assert "not_applied" == failed.value.outcome and not failed.value.retriable
    assert isinstance(undelivered.value.undelivered[0].error, laminar.Forbidden)


@pytest.mark.parametrize("name", [None, "copier"])
async def test_a_producer_whose_token_is_revoked_fails_its_records(
    cluster: FakeCluster, name: str | None
) -> None:
    """They were not applied, and those before are there."""
    cluster.tokens = {"good": set()}
    async with aio.connect(cluster.urls, token="good") as client:
        with pytest.raises(laminar.ProduceError) as failed:
            async with client.topic("t").producer(name=name) as producer:
                first = producer.send(b"a", partition=0, number=1 if name else None)
                assert 0 == (await first).offset
                cluster.tokens = {}
                second = producer.send(b"b", partition=0, number=2 if name else None)
                with pytest.raises(laminar.Unauthorized):
                    await second

    assert [(b"b", "not_applied")] == [(each.value, each.outcome) for each in failed.value.undelivered]
    assert [b"a"] == cluster.values("t", 0)


@pytest.mark.parametrize("partitions", [None, 4])
async def test_datagrams_are_refused_where_tokens_are_asked_for(
    cluster: FakeCluster, partitions: int | None
) -> None:
    """At once: no node would answer them."""
    cluster.tokens = {"good": set()}
    async with aio.connect(cluster.urls, token="good") as client:
        async with client.topic("t").datagrams(partitions=partitions) as datagrams:
            with pytest.raises(laminar.ConfigError, match="take no datagrams") as failed:
                await datagrams.append(b"a")

    assert "no_datagrams" == failed.value.code


# -- rotation ------------------------------------------------------------------------------------


def replace(file: Path, text: str) -> None:
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    os.replace(fresh, file)


async def test_a_token_file_that_changed_is_read_again(cluster: FakeCluster, tmp_path: Path) -> None:
    """A token is replaced without a restart: a producer and a reader go on, and no record fails."""
    file = tmp_path / "token"
    file.write_text("old\n")
    cluster.tokens = {"old": set()}
    async with aio.connect(cluster.urls, token_file=file) as client:
        topic = client.topic("t")
        async with topic.producer(batch_bytes=300) as producer:
            deliveries = [producer.send(b"%04d" % n, partition=1) for n in range(200)]
            await deliveries[0]
            replace(file, "new\n")
            cluster.tokens = {"new": set()}
            deliveries += [producer.send(b"%04d" % n, partition=1) for n in range(200, 400)]
        offsets = [delivery.result().offset for delivery in deliveries]
        read = [record.text async for record in topic.read(partitions=[1])]

    assert list(range(400)) == offsets
    assert [f"{n:04}" for n in range(400)] == read
    assert "Bearer new" == cluster.heard[-1][1]


async def test_a_new_token_is_used_before_the_old_one_is_refused(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is looked at while all goes well. While it cannot be read, the last token holds."""
    monkeypatch.setattr(authorization, "LOOK_MS", 0)
    file = tmp_path / "token"
    file.write_text("old")
    cluster.tokens = {"old": set(), "new": set()}
    async with aio.connect(cluster.urls, token_file=file) as client:
        await client.topics()
        file.unlink()
        await client.topics()
        file.write_text("")
        await client.topics()
        replace(file, "new")
        await client.topics()
        await client.topic("t").append(b"a", partition=0)

    heard = [token for _, token in cluster.heard]
    assert ["Bearer old"] * 3 == heard[:3] and {"Bearer new"} == set(heard[3:])


async def test_a_refused_token_is_tried_again_only_while_it_is_new(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a node may not know a new token yet; one that it does not know later is wrong."""
    monkeypatch.setattr(authorization, "SETTLE_MS", 600_000)
    file = tmp_path / "token"
    file.write_text("old")
    cluster.tokens = {"old": set()}
    async with aio.connect(cluster.urls, token_file=file) as client:
        topic = client.topic("t")
        await topic.append(b"a", partition=0)
        cluster.tokens = {}
        replace(file, "new")
        appending = asyncio.create_task(topic.append(b"b", partition=0))
        listing = asyncio.create_task(client.topics())
        while ("Bearer new") not in {token for _, token in cluster.heard}:  # noqa: ASYNC110  # it is on another loop
            await asyncio.sleep(0.005)
        cluster.tokens = {"new": set()}
        assert 1 == (await appending).offset
        assert ["t"] == await listing

        monkeypatch.setattr(authorization, "SETTLE_MS", 0)
        cluster.tokens = {}
        before = len(cluster.heard)
        for refused in (client.topics(), topic.append(b"c", partition=0)):
            with pytest.raises(laminar.Unauthorized):
                await refused

    assert 2 == len(cluster.heard) - before


@pytest.mark.parametrize("content", [None, "", "two words", "tök"])
def test_a_file_without_a_token_is_a_mistake_of_the_caller(tmp_path: Path, content: str | None) -> None:
    """The error names the file, and not what is in it."""
    if content is not None:
        (tmp_path / "token").write_text(content)
    client = laminar.connect("http://127.0.0.1:1", token_file=tmp_path / "token")
    with pytest.raises(laminar.ConfigError) as failed:
        client.topics()

    assert "token_file" == failed.value.field and "words" not in str(failed.value)


def test_what_can_be_no_token_is_refused_without_being_shown() -> None:
    for wrong in ("line\r\nbreak", "two words", "", "tök"):
        with pytest.raises(laminar.ConfigError) as failed:
            laminar.connect("http://127.0.0.1:1", token=wrong)
        assert not wrong or wrong not in str(failed.value)
    with pytest.raises(laminar.ConfigError, match="not both"):
        laminar.connect("http://127.0.0.1:1", token="a", token_file="b")
