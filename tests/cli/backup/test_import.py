"""`laminar topic import`, on a real node: what comes back is what was there, once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import laminar as library
from laminar.client.backup import restore
from laminar.client.backup.folder import Folder
from laminar.client.backup.restore import plan_import
from laminar.client.net.session import Session
from laminar.client.sync.client import Client
from tests.cli.backup.backups import LARGE, begun, bodies, exported, in_session, stored
from tests.cli.conftest import Command, Ran


def test_out_and_in_again(topic: str, client: Client, laminar: Command, tmp_path: Path) -> None:
    first = laminar("topic", "export", topic, str(tmp_path / "a"))
    assert (0, "") == (first.code, first.err), first
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_bytes())
    assert [(100, 179), (0, 60), (150, 150)] == [
        (each["start_offset"], each["end_offset"]) for each in manifest["partitions"][:3]
    ]
    [value] = manifest["partitions"][0]["values"]
    assert LARGE == (tmp_path / "a" / value["name"]).read_bytes()

    back = laminar("topic", "import", str(tmp_path / "a"), "--as", f"{topic}-back")
    assert 0 == back.code, back
    assert 0 == laminar("topic", "export", f"{topic}-back", str(tmp_path / "b")).code
    assert bodies(tmp_path / "a") == bodies(tmp_path / "b")
    assert LARGE == (tmp_path / "b" / value["name"]).read_bytes()
    again = json.loads((tmp_path / "b" / "manifest.json").read_bytes())
    same = ("settings", "cursors", "created_with", "replicas")
    assert [manifest[name] for name in same] == [again[name] for name in same]
    assert {"0": 110, "1": 7} == again["cursors"]["bill"]
    for name in (topic, f"{topic}-back"):
        with client.topic(name).open(0, value["offset"]) as stream:
            assert LARGE == stream.read()
    # It is a topic as any other: it takes records at its end, and another import of it is refused.
    assert 179 == client.topic(f"{topic}-back").append(b"next", partition=0).offset
    refused = laminar("topic", "import", str(tmp_path / "a"), "--as", f"{topic}-back")
    assert 1 == refused.code and "already_exists" in refused.err


# The command in a process that kills itself: before the request, rename or sync with this number.
KILLS_ITSELF = """
import os, signal, sys
from itertools import count
from laminar.client.backup import export, restore
from laminar.client.net.session import Session
from laminar.cli import run

what, at = sys.argv[1], int(sys.argv[2])
calls = count(1)

def killing(function):
    def call(*arguments, **more):
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **more)
    return call

if what == "sync":
    os.fsync = killing(os.fsync)
else:
    Session.call = killing(Session.call)
export.FILE_BYTES = restore.REQUEST_BYTES = 20_000
sys.exit(run(sys.argv[3:]))
"""


def in_process(what: str, at: int, *arguments: str) -> int:
    """Run a command that kills itself there; return its exit code."""
    command = [sys.executable, "-c", KILLS_ITSELF, what, str(at), *arguments]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_commands_killed_in_the_middle_go_on(
    topic: str, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    exported(on_node, topic, tmp_path / "whole")
    folder = tmp_path / "a"
    assert -signal.SIGKILL == in_process("sync", 5, "topic", "export", topic, str(folder))
    assert not (folder / "manifest.json").exists()
    exported(on_node, topic, folder)
    assert stored(tmp_path / "whole") == stored(folder)

    back = ("topic", "import", str(folder), "--as", f"{topic}-back")
    assert -signal.SIGKILL == in_process("call", 14, *back)
    assert 0 == laminar(*back).code
    assert 0 == laminar("topic", "export", f"{topic}-back", str(tmp_path / "b")).code
    assert bodies(folder) == bodies(tmp_path / "b")


def test_an_import_killed_at_any_request_doubles_nothing(
    topic: str, on_node: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(on_node, topic, tmp_path / "a")
    name = f"{topic}-back"
    deaths = 0
    for at in (1, 2, 3, 5, 7, 9, 12, 15, 19, 24, 30, 36, 43, 50):
        if not begun(on_node, tmp_path / "a", name, monkeypatch, dies_after=at):
            break
        deaths += 1
    assert deaths > 8
    assert "importing" not in client.topic(name).describe().raw["settings"]
    exported(on_node, name, tmp_path / "b")
    assert bodies(tmp_path / "a") == bodies(tmp_path / "b")


def test_only_the_importer_uses_a_topic_that_is_imported(
    topic: str,
    on_node: str,
    client: Client,
    laminar: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported(on_node, topic, tmp_path / "a")
    back = f"{topic}-back"
    assert begun(on_node, tmp_path / "a", back, monkeypatch, dies_after=14)
    path = f"/v1/topics/{back}"
    assert "creating" == client.topic(back).describe().raw["state"]
    for method, target, body in (
        ("POST", f"{path}/records", {"records": []}),
        ("POST", f"{path}/partitions/0/records", None),
        ("GET", f"{path}/partitions/0/records?offset=100", None),
        ("GET", f"{path}/partitions/0/offsets?at=latest", None),
        ("DELETE", f"{path}/partitions/0/records?before=999", None),
        ("PUT", f"{path}/cursors/c", {"positions": {"0": 1}}),
        ("GET", f"{path}/cursors", None),
        ("PUT", f"{path}/channels/c", {}),
        ("PUT", f"{path}/groups/g/members/m", {}),
        ("POST", f"{path}/search", {}),
        ("POST", f"{path}/routes", {"after": 0, "inputs": [0]}),
        ("PATCH", path, {"settings": {"importing": None}}),
        ("PUT", f"{path}/partitions/0/uploads/{'0' * 32}/parts/0", None),
        ("POST", f"/v1/sinks/s/batches/1/stages?topic={back}&partition=0&epoch=1&stage=1", None),
    ):
        assert (503, "being_created") == refusal(on_node, method, target, body), target
    assert (412, "precondition_failed") == refusal(
        on_node, "DELETE", f"{path}/partitions/0/records?before=999", None, {"Laminar-Import": "0" * 32}
    )
    deadline = time.monotonic() + 60
    with client.topic(back).datagrams(partitions=4) as datagrams:
        said = ""
        while "being imported" not in said:  # a slow node may not answer within 2 s
            assert time.monotonic() < deadline, said
            with pytest.raises(library.Error) as refused_datagram:
                datagrams.append(b"v", partition=0, timeout=2)
            said = str(refused_datagram.value)

    # Another backup of the topic does not go on with it; a new one may be made once it is deleted.
    client.topic(topic).append(b"later", partition=1)
    exported(on_node, topic, tmp_path / "a")
    refused = laminar("topic", "import", str(tmp_path / "a"), "--as", back)
    assert 1 == refused.code and "from another backup" in refused.err
    assert 0 == laminar("topic", "delete", back, "--yes").code
    assert 0 == laminar("topic", "import", str(tmp_path / "a"), "--as", back).code
    assert (412, "precondition_failed") == final_refusal(
        on_node, "DELETE", f"{path}/partitions/0/records?before=999", None, {"Laminar-Import": "0" * 32}
    )
    assert (416, "offset_beyond_end") == final_refusal(
        on_node, "DELETE", f"{path}/partitions/0/records?before=999", None
    )
    assert (422, "invalid") == final_refusal(
        on_node, "PATCH", path, {"settings": {"importing": "0" * 32}}, {"If-Match": "*"}
    )


def final_refusal(*request: Any) -> tuple[int, str]:
    """Return status and code once the shard that is asked has seen the end of the import."""
    deadline = time.monotonic() + 60
    while (found := refusal(*request)) == (503, "being_created"):
        assert time.monotonic() < deadline, "the import does not end"
        time.sleep(0.02)
    return found


def refusal(
    url: str, method: str, target: str, document: Any, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and code of a request that is refused."""
    body = b"x" if document is None and method != "GET" else json.dumps(document).encode()
    kind = "application/octet-stream" if document is None else "application/json"
    request = urllib.request.Request(
        url + target,
        body if method != "GET" else None,
        {"Content-Type": kind, **(headers or {})},
        method=method,
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["code"]


def test_a_damaged_backup_is_refused_before_anything_is_written(
    topic: str, on_node: str, client: Client, laminar: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    exported(on_node, topic, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    back = f"{topic}-back"
    names = [manifest["partitions"][1]["files"][0]["name"], manifest["partitions"][0]["values"][0]["name"]]
    for name in names:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(data)
        refused = laminar("topic", "import", str(folder), "--as", back)
        assert 1 == refused.code and "damaged" in refused.err and name in refused.err
        (folder / name).unlink()
        assert "missing" in laminar("topic", "import", str(folder), "--as", back).err
        (folder / name).symlink_to("/etc/passwd")
        assert 1 == laminar("topic", "import", str(folder), "--as", back).code
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    assert back not in client.topics()

    def changed(change: Callable[[dict[str, Any]], None]) -> Ran:
        other = json.loads(json.dumps(manifest))
        change(other)
        (folder / "manifest.json").write_text(json.dumps(other))
        return laminar("topic", "import", str(folder), "--as", back)

    secret = tmp_path / "secret"
    secret.write_bytes(b"not of the backup")
    digest = hashlib.sha256(b"not of the backup").hexdigest()

    def outside(name: str) -> Callable[[dict[str, Any]], None]:
        def change(document: dict[str, Any]) -> None:
            document["partitions"][1]["files"][0] |= {"name": name, "bytes": 17, "sha256": digest}

        return change

    def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
        def change(document: dict[str, Any]) -> None:
            for step in path[:-1]:
                document = document[step]
            document[path[-1]] = value

        return change

    for wrong in (
        outside("../secret"),
        outside(str(secret)),
        outside("1/../../secret"),
        outside("1/00000000000000000000.batches\n"),
        at("format", value=2),
        at("format", value=0),
        at("topic", value=3),
        at("partitions", 0, "start_offset", value=99),
        at("partitions", 1, "end_offset", value=10**17),
        at("partitions", 1, "files", 0, "next_offset", value=1),
        at("partitions", 1, "last_batch", "index", value=1),
        at("partitions", 0, "values", value=[]),
        at("partitions", 0, "partition", value=7),
        at("cursors", "bill", "0", value=-1),
        at("cursors", "bill", "9", value=1),
        at("cursors", "bill", "0", value=180),
        at("cursors", "a/b", value={"0": 1}),
        at("created_with", value=0),
        at("created_with", value=10**8),
    ):
        refused = changed(wrong)
        assert 1 == refused.code and ("damaged" in refused.err or "unsupported" in refused.err), refused
    assert back not in client.topics()


def test_a_topic_that_is_deleted_while_it_is_imported_ends_the_import(
    topic: str, on_node: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(on_node, topic, tmp_path / "a")
    name = f"{topic}-back"
    assert begun(on_node, tmp_path / "a", name, monkeypatch, dies_after=14)
    call, deleted = Session.call, False

    async def delete_first(session: Session, method: str, target: str, **more: Any) -> Any:
        nonlocal deleted
        if method == "POST" and not deleted:
            deleted = True
            await asyncio.to_thread(client.delete_topic, name)
        return await call(session, method, target, **more)

    place = Folder(tmp_path / "a")
    manifest, _, import_id = plan_import(place, name)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "call", delete_first)
        # A shard that was told of the deletion knows no such topic; one that checks the import first says so.
        refusal_of_either = pytest.raises(
            (library.PreconditionFailed, library.NotFound),
            match=r"not being filled by this import|there is no topic",
        )
        with refusal_of_either:
            in_session(
                on_node,
                lambda session: restore.import_topic(session, place, manifest, name, import_id),
            )
    deadline = time.monotonic() + 60
    while name in client.topics():  # another shard's view may lag
        assert time.monotonic() < deadline, "the topic is listed for ever"


def test_a_dry_run_changes_nothing(
    topic: str, on_node: str, client: Client, laminar: Command, tmp_path: Path
) -> None:
    exported(on_node, topic, tmp_path / "a")
    before = stored(tmp_path / "a")
    planned = laminar("topic", "import", str(tmp_path / "a"), "--as", f"{topic}-dry", "--dry-run", "--json")
    assert 0 == planned.code and json.loads(planned.out)["as"] == f"{topic}-dry"
    assert f"{topic}-dry" not in client.topics()
    assert before == stored(tmp_path / "a")
    there = laminar("topic", "import", str(tmp_path / "a"), "--dry-run")
    assert 0 == there.code and f"topic {topic} exists" in there.err
