"""`laminar topic export` and `laminar topic import`, on a real node: what comes back is what was there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

import laminar as library
from laminar.batch import BATCH_TYPE, Batch, build, split
from laminar.batch.columns import Codec
from laminar.client.backup import restore
from laminar.client.backup.export import export_topic
from laminar.client.backup.folder import Writer
from laminar.client.backup.lineage import whole_of
from laminar.client.backup.manifest import Manifest, PartitionBackup
from laminar.client.backup.restore import plan_import
from laminar.client.client import connect
from laminar.client.net.session import Session
from laminar.client.sync.client import Client
from tests.cli.conftest import Command, Ran

_numbers = count()
TIMES = (1_600_000_000_000, 1_600_000_000_001)
LARGE = bytes(range(256)) * 3_000
# So small that a partition has several files.
FILE_BYTES = 20_000


@pytest.fixture(scope="module")
def client(node_url: str) -> Iterator[Client]:
    with library.connect(node_url) as client:
        yield client


def post(url: str, topic: str, partition: int, *frames: bytes | bytearray) -> None:
    """Append batches as they are."""
    request = urllib.request.Request(
        f"{url}/v1/topics/{topic}/partitions/{partition}/records",
        b"".join(frames),
        {"Content-Type": BATCH_TYPE},
        method="POST",
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status in (200, 201)


def filled(client: Client, url: str) -> str:
    """A topic with all that a record can have; partition 0 was trimmed, and all of partition 2."""
    name = f"saved-{next(_numbers)}"
    topic = client.create_topic(name, partitions=4, settings={"retention_bytes": 1 << 40, "order": "weak"})
    for partition in (0, 2):
        for number in range(3):
            post(url, name, partition, build([b"old %d" % number] * 50))
        topic.delete_before(150 if partition == 2 else 100, partition=partition)
    post(
        url,
        name,
        0,
        build(
            [b"", b"two", b"three"],
            keys=[b"k", None, b""],
            timestamps=[TIMES[0], None, TIMES[1]],
            tags=["t\xe4g", None, "u"],
            headers=[{"h": b"\0\xff"}, None, {"a": b"1", "b": b"2"}],
            trace_ids=[bytes(range(16)), None, None],
        ),
        build([b"same " * 500] * 20, codec=Codec.ZSTD, timestamps=[TIMES[0]] * 20),
    )
    topic.append_stream([LARGE], key=b"big", tag="t", headers={"x": b"y"}, partition=0, part_bytes=100_000)
    with client.transaction(f"{name}-sink", 1) as transaction:
        for number in range(5):
            transaction.append(topic, b"staged %d" % number, key=b"k%d" % number, partition=0)
    for number in range(30):
        post(url, name, 1, build([os.urandom(1_000)] * 2, keys=[b"%d" % number] * 2))
    topic.set_cursor("bill", {0: 110, 1: 7})
    topic.set_cursor("ship", {2: 150})
    client.request_json(
        "PATCH", f"/v1/topics/{name}", {"settings": {"flush": "interval"}}, headers={"If-Match": "*"}
    )
    return name


@pytest.fixture
def topic(client: Client, on_node: str) -> str:
    return filled(client, on_node)


def stored(folder: Path) -> list[tuple[str, bytes]]:
    """The files of a folder by name, with their bytes; nothing else is there."""
    return [
        (str(each.relative_to(folder)), each.read_bytes())
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    ]


def bodies(folder: Path) -> dict[str, list[tuple[int, list[Any]]]]:
    """By partition what a backup's batches have, without their places and times of appending."""
    found: dict[str, list[tuple[int, list[Any]]]] = {}
    for path in sorted(folder.glob("*/*.batches")):
        for frame in split(path.read_bytes()):
            batch = Batch(frame)
            found.setdefault(path.parent.name, []).append(
                (
                    batch.base_offset,
                    [
                        (each.key, each.value, each.tag, dict(each.headers), each.timestamp, each.trace_id)
                        for each in batch
                    ],
                )
            )
    return found


def in_session(url: str, work: Callable[[Session], Any], **more: Any) -> Any:
    """Run something with a session of its own."""

    async def run() -> Any:
        async with connect(url, **more) as client:
            return await work(client.session)

    return asyncio.run(run())


def exported(url: str, topic: str, folder: Path, **more: Any) -> Any:
    return in_session(
        url, lambda session: export_topic(session, topic, folder, file_bytes=FILE_BYTES, **more)
    )


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


def test_an_export_goes_on_where_it_ended(topic: str, client: Client, on_node: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    exported(on_node, topic, folder)
    before = dict(stored(folder))
    exported(on_node, topic, folder)
    assert before == dict(stored(folder))

    client.topic(topic).append(b"later", partition=1)
    client.topic(topic).set_cursor("bill", {1: 61})
    manifest, done = exported(on_node, topic, folder)
    assert (1, 1) == (done.records, done.files)
    after = dict(stored(folder))
    assert {"manifest.json", f"1/{60:020}.batches"} == {
        name for name in after if after[name] != before.get(name)
    }
    assert (61, 61) == (manifest.partitions[1].end_offset, manifest.cursors["bill"]["1"])
    assert 3 < len(manifest.partitions[1].files)


class Killed(BaseException):
    """Stands for the end of a process; nothing may catch it."""


def killing(at: int) -> Callable[[], None]:
    """A function that raises when it is called for the time `at`, from 1."""
    calls = count(1)

    def call() -> None:
        if next(calls) == at:
            raise Killed

    return call


def test_an_export_killed_anywhere_ends_the_same(
    topic: str, on_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(on_node, topic, tmp_path / "whole")
    whole = stored(tmp_path / "whole")
    folder = tmp_path / "killed"
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
    deaths = 0
    for at in cycle((1, 2, 3, 4)):
        kill = killing(at)
        with monkeypatch.context() as patch:
            for name, function in real.items():
                patch.setattr(os, name, _before(function, kill))
            # What a killed process leaves behind, too: no file is removed by an error on the way.
            patch.setattr(Writer, "discard", lambda writer: writer._file.close())
            try:
                exported(on_node, topic, folder)
            except Killed:
                deaths += 1
            else:
                break
    assert deaths > 5
    assert whole == stored(folder)


def _before(function: Callable[..., Any], kill: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        kill()
        return function(*arguments, **more)

    return call


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


def begun(url: str, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, dies_after: int) -> bool:
    """Import a backup, and die when a request with this number is carried out; return whether it died."""
    manifest, _, import_id = plan_import(folder, name)
    kill, call = killing(dies_after), Session.call

    async def sent_and_killed(session: Session, *arguments: Any, **more: Any) -> Any:
        answer = await call(session, *arguments, **more)
        kill()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Session, "call", sent_and_killed)
        patch.setattr(restore, "REQUEST_BYTES", FILE_BYTES)
        try:
            in_session(url, lambda session: restore.import_topic(session, folder, manifest, name, import_id))
        except Killed:
            return True
    return False


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


def test_a_topic_that_is_another_one_is_found(
    topic: str, on_node: str, client: Client, laminar: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    exported(on_node, topic, folder)
    before = stored(folder)
    client.delete_topic(topic)
    again = client.create_topic(topic, partitions=4)
    for number in range(200):
        again.append(b"%d" % number, partition=0)
    diverged = laminar("topic", "export", topic, str(folder))
    assert 1 == diverged.code and f"diverged: {topic}/0" in diverged.err and "offset 179" in diverged.err
    another = laminar("topic", "export", "another", str(folder))
    assert 2 == another.code and f"a backup of topic {topic!r}" in another.err
    assert before == stored(folder)


def test_a_batch_that_was_lost_is_found(topic: str, on_node: str, laminar: Command, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    exported(on_node, topic, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["partitions"][0]["last_batch"]["term"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    diverged = laminar("topic", "export", topic, str(folder))
    assert 1 == diverged.code and f"diverged: {topic}/0" in diverged.err

    manifest["partitions"][0]["last_batch"]["term"] -= 1
    manifest["partitions"][2]["end_offset"] = manifest["partitions"][2]["start_offset"] = 999
    (folder / "manifest.json").write_text(json.dumps(manifest))
    ended = laminar("topic", "export", topic, str(folder))
    assert 1 == ended.code and "ends at 150" in ended.err


def test_records_that_were_removed_before_they_were_exported_are_a_gap(
    topic: str, on_node: str, client: Client, laminar: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    exported(on_node, topic, folder)
    before = stored(folder)
    handle = client.topic(topic)
    handle.delete_before(60, partition=1)  # all of it is in the backup
    assert 0 == laminar("topic", "export", topic, str(folder)).code
    for number in range(3):
        handle.append(b"%d" % number, partition=1)
    handle.delete_before(62, partition=1)
    gap = laminar("topic", "export", topic, str(folder))
    assert 1 == gap.code and f"gap: {topic}/1: records 60 to 61" in gap.err
    assert before == stored(folder)


def test_a_full_disk_is_named_and_the_export_goes_on_later(
    topic: str, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    """The limit of a file's length is that of a disk: what does not fit is neither there nor in the way."""
    folder = tmp_path / "a"
    command = [sys.executable, "-m", "laminar.cli", "topic", "export", topic, str(folder)]
    limited = "import resource, signal, os, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    environment = {**os.environ, "LAMINAR_URL": on_node}
    ran = subprocess.run(
        [sys.executable, "-c", limited, *command], env=environment, capture_output=True, text=True
    )
    assert 1 == ran.returncode
    assert str(folder) in ran.stderr and "File too large" in ran.stderr, ran.stderr
    assert not [name for name, _ in stored(folder) if "writing" in name or name == "manifest.json"]

    assert 0 == laminar("topic", "export", topic, str(folder)).code
    assert 0 == laminar("topic", "import", str(folder), "--as", f"{topic}-back", "--dry-run").code


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

    manifest, _, import_id = plan_import(tmp_path / "a", name)
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
                lambda session: restore.import_topic(session, tmp_path / "a", manifest, name, import_id),
            )
    deadline = time.monotonic() + 60
    while name in client.topics():  # another shard's view may lag
        assert time.monotonic() < deadline, "the topic is listed for ever"


def test_parquet_needs_its_library(
    laminar: Command, on_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    ran = laminar("topic", "export", "any", str(tmp_path / "a"), "--format", "parquet")

    assert 2 == ran.code and "pip install 'laminar-mq[arrow]'" in ran.err
    assert not (tmp_path / "a").exists()


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


def test_a_folder_with_other_things_is_left_alone(
    topic: str, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    refused = laminar("topic", "export", topic, str(tmp_path))
    assert 2 == refused.code and "letter.txt" in refused.err
    assert ["letter.txt"] == os.listdir(tmp_path)
    assert 2 == laminar("topic", "import", str(tmp_path)).code
    assert 2 == laminar("topic", "import", str(tmp_path / "none")).code


def test_partitions_that_were_split_and_merged_come_back(
    client: Client, on_node: str, laminar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"split-{next(_numbers)}"
    topic = client.create_topic(name, partitions=2)

    def append(first: int) -> None:
        with topic.producer() as producer:
            for number in range(first, first + 40):
                producer.send(b"%d" % number, key=b"k%d" % (number % 8))

    append(0)
    client.topic(name).delete_before(5, partition=0)
    topic.split(0, into=2)
    append(40)
    topic.merge([2, 3])
    append(80)
    ends = topic.offsets("latest")
    topic.set_cursor("bill", {0: ends[0], 2: ends[2], 3: ends[3], 4: 3, 1: 7})
    topic.set_cursor("ship", {0: 6})
    manifest, _ = exported(on_node, name, tmp_path / "a")
    assert [0, 1, 2, 3, 4] == [each.partition for each in manifest.partitions]

    back = f"{name}-back"
    for at in (9, 20):
        assert begun(on_node, tmp_path / "a", back, monkeypatch, dies_after=at)
    imported = laminar("topic", "import", str(tmp_path / "a"), "--as", back)
    assert 0 == imported.code, imported
    again, _ = exported(on_node, back, tmp_path / "b")
    assert bodies(tmp_path / "a") == bodies(tmp_path / "b")
    assert [(each.start_offset, each.end_offset) for each in manifest.partitions] == [
        (each.start_offset, each.end_offset) for each in again.partitions
    ]
    assert manifest.routes["routes"] == again.routes["routes"]
    assert manifest.cursors == again.cursors
    assert {client.topic(name).partition_of(b"k%d" % n) for n in range(8)} == {
        client.topic(back).partition_of(b"k%d" % n) for n in range(8)
    }


def test_an_import_goes_on_when_a_node_that_it_asks_knows_the_last_change(
    client: Client, on_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards learn of a change one after the other; every second answer is the first one, again."""
    name = f"late-{next(_numbers)}"
    topic = client.create_topic(name, partitions=1)
    topic.append(b"v")
    topic.split(0, into=2)
    exported(on_node, name, tmp_path / "a")
    back = f"{name}-back"
    get_json, answers = Session.get_json, list[Any]()

    async def lagging(session: Session, target: str, **more: Any) -> Any:
        answer = await get_json(session, target, **more)
        if target != f"/v1/topics/{back}/routes":
            return answer
        answers.append(answer)
        return answers[0] if len(answers) % 2 == 0 else answer

    manifest, _, import_id = plan_import(tmp_path / "a", back)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "get_json", lagging)
        in_session(
            on_node, lambda session: restore.import_topic(session, tmp_path / "a", manifest, back, import_id)
        )
    assert [0, 1, 2] == sorted(client.topic(back).offsets("latest"))


def test_a_cursor_goes_on_before_what_it_may_not_have_read() -> None:
    """Positions are read one after the other: one that is behind its time is not passed by the next."""
    ranges = [{"from": 0, "to": 65_536, "partition": 1}]
    change = {
        "version": 1,
        "order": "strict",
        "inputs": [{"partition": 0, "from": 0, "to": 65_536, "end": 10, "reclaimed": False}],
        "outputs": ranges,
    }
    manifest = Manifest(
        format=1,
        topic="t",
        created_with=1,
        replicas=1,
        settings={},
        routes={
            "routes": [{"version": 1, "logical_partitions": 65_536, "ranges": ranges}],
            "changes": [change],
        },
        cursors={"behind": {"0": 9, "1": 3}, "drained": {"0": 10, "1": 3}, "absent": {"1": 3}},
        channels=[],
        delayed=0,
        partitions=[PartitionBackup(number, "", 10, 10, None, [], []) for number in (0, 1)],
    )
    assert {"behind": {"0": 9}, "drained": {"0": 10, "1": 3}, "absent": {}} == whole_of(
        manifest, where="here"
    ).cursors
    weak = msgspec.structs.replace(manifest, settings={"order": "weak"})
    assert manifest.cursors == whole_of(weak, where="here").cursors


def test_partitions_that_were_reclaimed_come_back_empty(
    client: Client, on_node: str, tmp_path: Path, laminar: Command
) -> None:
    name = f"reclaimed-{next(_numbers)}"
    topic = client.create_topic(name, partitions=1)
    for number in range(10):
        topic.append(b"%d" % number)
    topic.split(0, into=2)
    topic.set_cursor("bill", {0: 10, 1: 0, 2: 0})
    topic.reclaim(0)
    post(on_node, name, 1, build([b"next"]))
    manifest, _ = exported(on_node, name, tmp_path / "a")
    assert [1, 2] == [each.partition for each in manifest.partitions]
    assert 0 == laminar("topic", "import", str(tmp_path / "a"), "--as", f"{name}-back").code
    again, _ = exported(on_node, f"{name}-back", tmp_path / "b")
    assert [(10, 10), (0, 1), (0, 0)] == [(each.start_offset, each.end_offset) for each in again.partitions]
    assert {"0": 10, "1": 0, "2": 0} == again.cursors["bill"]
