"""Clients and the command line in a cluster of real nodes that asks for tokens, without TLS and with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

import laminar
from laminar import aio
from tests.cluster.guarded import Guarded, run_laminar
from tests.cluster.patience import PATIENCE_S, until


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def guarded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("guarded"), tls=request.param) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def admin(guarded: Guarded) -> Iterator[laminar.Client]:
    with guarded.connect() as client:
        yield client


@pytest.fixture
def topic(admin: laminar.Client, request: pytest.FixtureRequest) -> str:
    """A topic named after the test."""
    name = request.node.name.replace("[", "-").replace("]", "")
    admin.create_topic(name, partitions=4)
    return str(name)


def make_token(guarded: Guarded, *grants: tuple[str, str]) -> tuple[str, str]:
    """Make a token that all shards know, and return its text and id."""
    asked = {"name": "billing", "grants": [{"role": role, "prefix": prefix} for role, prefix in grants]}
    with guarded.connect() as admin:
        made = admin.request_json("POST", "/v1/admin/tokens", asked)
    with guarded.connect(token=made["token"]) as client:
        until_all(guarded, client, known=True)
    return made["token"], made["id"]


def until_all(guarded: Guarded, client: laminar.Client, *, known: bool) -> None:
    """Wait until all shards know the client's credential, or none does.

    The answer to its change has waited for that, but for a second at most: a shard that stood still meanwhile
    learns of it later, and until then its 401 is final for a client.
    """
    with guarded.connect() as admin:
        urls = [shard["url"] for node in admin.cluster()["nodes"] for shard in node["shards"]]
    assert 2 * guarded.nodes == len(urls)
    status = 200 if known else 401
    for url in urls:
        until(partial(answers, client, url, status), (url, status))


def answers(client: laminar.Client, url: str, status: int) -> bool:
    return client.ask_node(url, "/v1/whoami", timeout=PATIENCE_S).status == status


def test_a_token_is_good_for_what_it_grants(guarded: Guarded, admin: laminar.Client, topic: str) -> None:
    """At once, though other nodes learn of it a little later."""
    text, _ = make_token(guarded, ("write", topic), ("read", topic))
    with guarded.connect(token=text) as client:
        handle = client.topic(topic)
        with handle.producer() as producer:
            for number in range(1_000):
                producer.send(b"%d" % number, key=str(number % 10))
        with handle.producer(name=topic) as named:
            named.send(b"1000", number=1)
        with handle.subscribe(group="group") as records:
            for read, _ in enumerate(records, 1):
                if read == 1_001:
                    break
            records.commit()
        with client.transaction(topic, 1) as tx:
            tx.append(topic, b"1001")
        assert 1_002 == len(list(handle.read()))
        until(lambda: [topic] == client.topics())
        assert [topic] == [each.sink for each in client.sinks()]
        for refused in (handle.delete, lambda: client.topic("other").append(b"a")):
            with pytest.raises(laminar.Forbidden):
                refused()
        with handle.datagrams() as datagrams:
            datagrams.append(b"1002")
            with pytest.raises(laminar.Forbidden):
                with client.topic("other").datagrams(partitions=1) as others:
                    others.append(b"a")
        assert 1_003 == len(list(handle.read()))


@pytest.mark.parametrize("guarded", [True], ids=["tls"], indirect=True)
async def test_a_certificate_proves_who_the_client_is(
    guarded: Guarded, admin: laminar.Client, topic: str
) -> None:
    """In both faces and on the command line, with the key in its own file or in the certificate's."""
    guarded.make_certificate("client", "robot")
    pem, key = guarded.certificates / "robot.pem", guarded.certificates / "robot.key"
    both = guarded.certificates / "both.pem"
    both.write_text(key.read_text() + pem.read_text())
    grants = [{"role": "write", "prefix": topic}]
    document = {"name": "robot", "grants": grants, "certificate": "CN=robot"}
    admin.request_json("POST", "/v1/admin/tokens", document)

    with laminar.connect(guarded.urls, ca=guarded.ca, certificate=both) as client:
        until_all(guarded, client, known=True)
        assert "robot" == client.request_json("GET", "/v1/whoami")["principal"]
        client.topic(topic).append(b"one")
        with pytest.raises(laminar.Forbidden):
            client.topic("other").append(b"a")
    async with aio.connect(guarded.urls, ca=guarded.ca, certificate=pem, key=key) as there:
        await there.topic(topic).append(b"two")
    shown = run_laminar(guarded, "whoami", "--certificate", str(pem), "--certificate-key", str(key))
    assert "robot" in shown.stdout, shown.stderr
    shown = run_laminar(guarded, "whoami", LAMINAR_CERTIFICATE=str(pem), LAMINAR_KEY=str(key))
    assert "robot" in shown.stdout, shown.stderr
    with laminar.connect(guarded.urls, ca=guarded.ca) as stranger, pytest.raises(laminar.Unauthorized):
        stranger.topics()
    with pytest.raises(laminar.ConfigError, match=r"robot.pem with .*ca.pem"):
        with laminar.connect(guarded.urls, ca=guarded.ca, certificate=pem, key=guarded.ca) as client:
            client.topics()


async def test_jobs_and_long_polls_go_on_over_a_rotation(
    guarded: Guarded, admin: laminar.Client, topic: str, tmp_path: Path
) -> None:
    """The second token is made and written, the first one revoked: no job and no record is lost or fails."""
    file = tmp_path / "token"
    old, old_id = make_token(guarded, ("read", topic), ("write", topic))
    file.write_text(old)
    admin.topic(topic).channel("work", exist_ok=True)
    done: list[bytes] = []
    async with aio.connect(guarded.urls, token_file=file, ca=guarded.ca) as client:
        handle = client.topic(topic)
        channel = await handle.channel("work")
        async with handle.producer() as producer:
            deliveries = [producer.send(b"%d" % number) for number in range(50)]
            async for job in channel.receive(max_jobs=10):
                await job.ack()
                done.append(job.raw)
                if len(done) == 50:
                    new, _ = make_token(guarded, ("read", topic), ("write", topic))
                    file.with_name("fresh").write_text(new)
                    os.replace(file.with_name("fresh"), file)
                    admin.request_json("DELETE", f"/v1/admin/tokens/{old_id}")
                    deliveries += [producer.send(b"%d" % number) for number in range(50, 100)]
                if len(done) == 100:
                    break
        assert all(delivery.result().offset >= 0 for delivery in deliveries)

    assert {b"%d" % number for number in range(100)} == set(done)
    with guarded.connect(token=old) as client:
        until_all(guarded, client, known=False)
        with pytest.raises(laminar.Unauthorized):
            client.topics()


def test_one_url_is_enough_for_a_client_with_a_token(
    guarded: Guarded, admin: laminar.Client, topic: str
) -> None:
    """Without TLS other hosts get no token, so the given node passes on what they are to do."""
    with guarded.connect(url=guarded.urls[1]) as client:
        handle = client.topic(topic)
        with handle.producer() as producer:
            for number in range(400):
                producer.send(b"%d" % number, partition=number % 4)
        assert 400 == len(list(handle.read()))


@pytest.mark.parametrize(
    "guarded",
    [pytest.param(True, id="tls"), pytest.param(False, id="plain", marks=pytest.mark.long)],
    indirect=True,
)
def test_the_command_line_makes_and_revokes_tokens(
    guarded: Guarded, admin: laminar.Client, topic: str, tmp_path: Path
) -> None:
    """A token from the first one to its end, with no token in any output but that of its creation."""
    (tmp_path / "admin").write_text(guarded.admin_token)
    file = tmp_path / "billing"
    as_admin = {"LAMINAR_TOKEN_FILE": str(tmp_path / "admin")}
    made = run_laminar(
        guarded,
        "token",
        "create",
        "cli",
        f"--grant=write:{topic}",
        "--expires=1d",
        f"--to={file}",
        **as_admin,
    )
    with guarded.connect(token=file.read_text().strip()) as client:
        until_all(guarded, client, known=True)
    produced = run_laminar(guarded, "produce", topic, str(tmp_path / "admin"), "--token-file", str(file))
    refused = run_laminar(guarded, "consume", topic, "--token-file", str(file))
    who = run_laminar(guarded, "whoami", "--json", "--token-file", str(file))
    listed = run_laminar(guarded, "token", "list", "--json", **as_admin)
    mine = {each["name"]: each for each in msgspec.json.decode(listed.stdout)}["cli"]
    shown = run_laminar(guarded, "token", "show", mine["id"], **as_admin)
    revoked = run_laminar(guarded, "token", "revoke", mine["id"], "--yes", **as_admin)
    with guarded.connect(token=file.read_text().strip()) as client:
        until_all(guarded, client, known=False)
    after = run_laminar(guarded, "whoami", LAMINAR_TOKEN=file.read_text().strip())
    gone = run_laminar(guarded, "token", "show", mine["id"], **as_admin)
    status = run_laminar(guarded, "cluster", "status", **as_admin)
    doctor = run_laminar(guarded, "cluster", "doctor", "--json", **as_admin)

    assert (0, 0, 0, 0, 0) == (
        made.returncode,
        produced.returncode,
        who.returncode,
        shown.returncode,
        revoked.returncode,
    ), made.stderr + produced.stderr + who.stderr + shown.stderr + revoked.stderr
    assert (1, True) == (refused.returncode, "forbidden: " in refused.stderr), refused.stderr
    assert "laminar whoami" in refused.stderr
    (row,) = msgspec.json.decode(who.stdout)
    assert ("cli", [{"role": "write", "prefix": topic}]) == (row["principal"], row["grants"])
    assert f"write:{topic}" in shown.stdout
    assert (1, True) == (after.returncode, "unauthorized: " in after.stderr)
    assert (1, True) == (gone.returncode, "no_such_token: " in gone.stderr)
    assert 0 == status.returncode, status.stdout
    assert not [
        each for each in msgspec.json.decode(doctor.stdout)["findings"] if "/readyz" in each["finding"]
    ]
    for ran in (made, produced, refused, who, listed, shown, revoked, after, gone, status, doctor):
        assert "lam_" not in ran.stdout + ran.stderr
