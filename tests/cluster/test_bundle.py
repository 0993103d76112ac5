"""A bundle of a real node with tokens and TLS: what was planted in it is not in the bundle, in no form."""

from __future__ import annotations

import base64
import io
import json
import secrets
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import laminar
from tests.cluster.guarded import SECRET, Guarded, run_laminar
from tests.cluster.patience import PATIENCE_S, until


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with Guarded(tmp_path_factory.mktemp("guarded"), tls=True, nodes=2) as cluster:
        yield cluster


def _planted() -> str:
    return f"planted-{secrets.token_hex(12)}"


@pytest.fixture(scope="module")
def planted(guarded: Guarded) -> dict[str, str]:
    """By what each is: texts that clients and operators brought in, and nobody else may see."""
    found: dict[str, str] = {
        name: _planted()
        for name in (
            *("value", "key", "tag", "header", "header's value", "idempotency key", "delayed value"),
            *(
                "cursor",
                "channel",
                "group",
                "member",
                "producer",
                "sink",
                "principal",
                "reason",
                "path",
                "limit",
            ),
        )
    }
    with guarded.connect() as client:
        topic = client.create_topic("shown-topic", partitions=2, replicas=2)
        topic.append(
            found["value"].encode(),
            found["key"],
            tag=found["tag"],
            headers={found["header"]: found["header's value"].encode()},
        )
        topic.append(found["delayed value"].encode(), delay=3600)
        with topic.read(cursor=found["cursor"]) as reader:
            assert [record.key for record in reader] == [found["key"].encode()]
        channel = topic.channel(found["channel"], exist_ok=True)
        topic.append(b"a job", key="job")
        for job in channel.receive(max_jobs=10):
            job.nack(delay=3600, reason=found["reason"])
            break
        with topic.producer(name=found["producer"]) as producer:
            producer.send(b"1", number=1)
        with client.transaction(found["sink"], 1) as tx:
            tx.append(topic, b"2")
        client.request_json(
            *("POST", "/v1/topics/shown-topic/records"),
            {"records": [{"value": "v"}]},
            headers={"Idempotency-Key": found["idempotency key"]},
        )
        made = client.request_json(
            *("POST", "/v1/admin/tokens"),
            {"name": found["principal"], "grants": [{"role": "write", "prefix": found["limit"]}]},
        )
        found["token"] = made["token"]
        for url in guarded.urls:  # refusals are in the audit, and in logs
            with guarded.connect(url=url, token=made["token"]) as other, pytest.raises(laminar.Error):
                other.request_json("GET", f"/v1/topics/shown-topic/records/{found['path']}")
            with pytest.raises(laminar.Error), guarded.connect(url=url, token=_planted()) as nobody:
                nobody.topics()
    found |= {"secret": SECRET, "admin token": guarded.admin_token}
    for member in guarded.members:
        lines = (guarded.certificates / f"{member.name}.key").read_text().splitlines()
        found |= {f"TLS key {member.name} {number}": line for number, line in enumerate(lines[1:-1])}
    return found


def _forms(text: str) -> Iterator[bytes]:
    """Yield a text as it is, percent-encoded, in hex, and in base64 at each of the three places."""
    raw = text.encode()
    yield from (raw, quote(text, safe="").encode(), raw.hex().encode(), raw.hex().upper().encode())
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + raw)
        # Its first and last digits depend on what is beside it.
        middle = encoded[4 if shift else 0 : len(encoded) - 4]
        yield from (
            middle,
            base64.urlsafe_b64encode(bytes(shift) + raw)[4 if shift else 0 : len(encoded) - 4],
        )


def _found_in(content: bytes, planted: dict[str, str]) -> list[str]:
    """Return which of the planted texts are in some bytes, also a token's secret part alone."""
    parts = {
        f"{name}, {number}": part
        for name, text in planted.items()
        if "token" in name
        for number, part in enumerate(text.split("_", 2)[1:])
        if len(part) >= 8
    }
    return [name for name, text in (planted | parts).items() if any(form in content for form in _forms(text))]


def test_the_search_for_planted_texts_finds_them(planted: dict[str, str]) -> None:
    """Otherwise the next test could not fail."""
    for name, text in planted.items():
        for prefix in (b"", b"a", b"bc"):
            raw = prefix + text.encode() + b"z"
            for content in (raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw)):
                assert name in _found_in(content, {name: text}), content


def test_no_planted_text_is_in_the_bundle_of_a_node(guarded: Guarded, planted: dict[str, str]) -> None:
    for url in guarded.urls:  # each node answers for each
        with guarded.connect(url=url) as client:
            for member in guarded.members:
                body = until(partial(_taken, client, url, member.name))
                assert _found_in(body, planted) == []
                _check_whole(json.loads(body), member.name)
        with guarded.connect(url=url, token=planted["token"]) as other, pytest.raises(laminar.Forbidden):
            other.request_json("GET", f"/v1/nodes/{guarded.members[0].name}/bundle")


def _taken(client: laminar.Client, url: str, node: str) -> bytes:
    """Return the bundle of a node; nothing if a process of it, or the node, did not answer in its second."""
    answer = client.ask_node(url, f"/v1/nodes/{node}/bundle", timeout=PATIENCE_S)
    if answer.status == 503:
        assert answer.json()["code"] == "node_silent"
        return b""
    assert answer.status == 200
    return b"" if json.loads(bytes(answer.body))["silent"] else bytes(answer.body)


def _check_whole(bundle: dict[str, Any], node: str) -> None:
    """See that there is something in it."""
    assert bundle["node"] == node and bundle["silent"] == [] and bundle["left_out"] == {}
    assert bundle["settings"]["secret"] == {"value": "set", "is_default": False}
    assert bundle["settings"]["tls_key"]["value"] == "set"
    assert bundle["settings"]["access"] == {"value": "tokens", "is_default": True}
    assert {each["process"] for each in bundle["processes"]} == {"controller", "shard 0", "shard 1"}
    assert {each["topic"] for each in bundle["partitions"]} >= {"shown-topic"}
    assert any('topic="shown-topic"' in line for line in bundle["metrics"])
    for each in bundle["processes"]:
        assert each["loop"]["ticks"] > 0
        assert any(" run_process" in place for stack in each["threads"] for place in stack)
    lines = [line for each in bundle["processes"] for line in each["log"]]
    assert any(line["text"] != "(left out)" for line in lines)


def test_the_doctor_writes_the_bundles_of_all_nodes_into_a_file(
    guarded: Guarded, planted: dict[str, str], tmp_path: Path
) -> None:
    numbers = count()

    def taken() -> tuple[Path, dict[str, bytes]] | None:
        """The bundles; None if a process did not answer in its second."""
        file = tmp_path / f"bundle-{next(numbers)}.tar.gz"
        ran = run_laminar(guarded, "doctor", "--bundle", str(file), LAMINAR_TOKEN=guarded.admin_token)
        assert ran.returncode in (0, 1), ran.stderr
        assert f"{file}" in ran.stderr
        assert file.stat().st_mode & 0o777 == 0o600
        contents = {}
        with tarfile.open(fileobj=io.BytesIO(file.read_bytes())) as archive:
            for member in archive.getmembers():
                assert member.isfile() and member.name.startswith("laminar-bundle/")
                opened = archive.extractfile(member)
                assert opened is not None
                contents[member.name.removeprefix("laminar-bundle/")] = opened.read()
        nodes = [json.loads(contents.get(f"nodes/{each.name}.json", b"{}")) for each in guarded.members]
        return (file, contents) if all(each.get("silent") == [] for each in nodes) else None

    file, contents = until(taken)
    assert set(contents) == {"README.txt", "doctor.json", *(f"nodes/{m.name}.json" for m in guarded.members)}
    for name, content in contents.items():
        assert _found_in(content, planted) == [], name
    for member_ in guarded.members:
        _check_whole(json.loads(contents[f"nodes/{member_.name}.json"]), member_.name)
    checks = {line["check"] for line in json.loads(contents["doctor.json"])}
    assert {"clocks", "ports", "sync time", "open files", "versions", "names"} <= checks

    again = run_laminar(guarded, "doctor", "--bundle", str(file), LAMINAR_TOKEN=guarded.admin_token)
    assert again.returncode == 2 and "exists" in again.stderr  # nothing is overwritten
    refused = run_laminar(guarded, "doctor", "--bundle", str(tmp_path / "b"), LAMINAR_TOKEN=planted["token"])
    assert refused.returncode == 1 and "forbidden" in refused.stderr and not (tmp_path / "b").exists()


def test_threads_are_not_named_by_others(guarded: Guarded) -> None:
    """A name of a thread may be anything where a node runs in a program; places in the source are not."""
    assert threading.current_thread().name not in json.dumps(_bundle(guarded, 0)["processes"][0]["threads"])


def test_who_took_a_bundle_is_in_the_audit(guarded: Guarded) -> None:
    node = guarded.members[0].name
    with guarded.connect() as client:
        until(partial(_taken, client, guarded.urls[0], node))

        def is_told() -> bool:
            found = [json.loads(record.value) for record in client.topic("_audit").read()]
            return any(each["operation"] == "node_bundle" and each["status"] == 200 for each in found)

        until(is_told)


def test_of_a_node_that_is_gone_there_is_none(guarded: Guarded) -> None:
    """The last test: the node stays away."""
    there, gone = guarded.members
    guarded.kill(gone.number)
    with guarded.connect(url=guarded.urls[0]) as client:
        answer = client.ask_node(guarded.urls[0], f"/v1/nodes/{gone.name}/bundle", timeout=PATIENCE_S)
        assert (answer.status, answer.json()["code"]) == (503, "node_silent")
        missing = client.ask_node(guarded.urls[0], "/v1/nodes/nowhere/bundle", timeout=PATIENCE_S)
        assert (missing.status, missing.json()["code"]) == (404, "no_such_node")
        until(lambda: [there.name] == [each["node"] for each in client.cluster()["nodes"] if each["alive"]])
    ran = run_laminar(guarded, "doctor", "--json", LAMINAR_TOKEN=guarded.admin_token)
    lines = json.loads(ran.stdout)
    assert ran.returncode == 1
    assert [each["where"] for each in lines if each["check"] == "nodes"] == [gone.name]
    assert {each["where"] for each in lines if each["check"] == "disks"} == {there.name}


def _bundle(guarded: Guarded, number: int) -> dict[str, Any]:
    url = guarded.urls[number]
    with guarded.connect() as client:
        found: dict[str, Any] = json.loads(until(partial(_taken, client, url, guarded.members[number].name)))
    return found
