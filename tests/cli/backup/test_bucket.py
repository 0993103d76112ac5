"""Backups in a bucket: the same as in a folder, whatever breaks between, and whoever else writes there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from laminar.client.backup import bucket as bucket_module
from laminar.client.backup import object_store as store_module
from laminar.client.backup.export import export_topic
from laminar.client.backup.manifest import MANIFEST, Form
from laminar.client.backup.object_store import ObjectStore
from laminar.client.backup.restore import plan_import
from laminar.client.client import connect
from laminar.client.errors import ConfigError, Error
from laminar.client.sync.client import Client
from tests.cli.backup import object_store
from tests.cli.backup.backups import FILE_BYTES, Killed, bodies, exported, killing, stored
from tests.cli.backup.object_store import Cutting, objects
from tests.cli.backup.s3 import BUCKET, is_whole, place_of, to_bucket
from tests.cli.conftest import Command

pytestmark = pytest.mark.skipif(not object_store.can_be_had(), reason=object_store.WHY_NONE)


def test_a_bucket_has_what_a_folder_has_and_becomes_the_topic_again(
    kept: str, client: Client, on_node: str, s3: Any, prefix: str, laminar: Command, tmp_path: Path
) -> None:
    to_bucket(on_node, kept, place_of(prefix))
    exported(on_node, kept, tmp_path / "a")
    assert dict(stored(tmp_path / "a")) == objects(s3, BUCKET, prefix)

    ran = laminar("topic", "import", f"s3://{BUCKET}/{prefix}", "--as", f"{kept}-again")
    assert 0 == ran.code, ran.err
    assert f"s3://{BUCKET}/{prefix} is now topic {kept}-again" in ran.text
    exported(on_node, f"{kept}-again", tmp_path / "b")
    again = bodies(tmp_path / "b")
    assert bodies(tmp_path / "a")["1"] == again["1"] and {"0", "1"} <= again.keys()


def test_an_export_goes_on_where_it_ended_and_changes_no_file(
    topic: str, client: Client, on_node: str, s3: Any, prefix: str, laminar: Command
) -> None:
    to_bucket(on_node, topic, place_of(prefix))
    before = objects(s3, BUCKET, prefix)
    assert 0 == laminar("topic", "export", topic, f"s3://{BUCKET}/{prefix}").code
    assert before == objects(s3, BUCKET, prefix)
    client.topic(topic).append(b"later", partition=1)
    _, done = to_bucket(on_node, topic, place_of(prefix))
    assert (1, 1) == (done.records, done.files)
    after = objects(s3, BUCKET, prefix)
    assert {MANIFEST, f"1/{60:020}.batches"} == {name for name in after if after[name] != before.get(name)}
    assert is_whole(prefix)


@pytest.mark.parametrize("form", ["batch", "jsonl", pytest.param("parquet", marks=pytest.mark.long)])
def test_an_export_killed_anywhere_ends_the_same(
    form: Form, kept: str, on_node: str, s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a request, or after the store has carried it out."""
    to_bucket(on_node, kept, place_of(f"{prefix}-whole"), form=form)
    whole = objects(s3, BUCKET, f"{prefix}-whole")
    deaths = 0
    for at in count(1, 4):
        called = _dying(killing(at))
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "_call", called)
            try:
                to_bucket(on_node, kept, place_of(prefix), form=form)
            except Killed:
                deaths += 1
            else:
                break
    assert deaths > 3
    found = objects(s3, BUCKET, prefix)
    probes = {name for name in found if name.startswith(".writing-")}
    assert is_whole(prefix)
    if form == "batch":
        assert whole == {name: data for name, data in found.items() if name not in probes}
    else:  # what the killed ones wrote is gone, and what is there is listed
        assert _places(whole.keys()) == _places(found.keys() - probes)


def _dying(kill: Callable[[], None]) -> Callable[..., Any]:
    call = ObjectStore._call

    def called(store: ObjectStore, operation: str, *arguments: Any, **more: Any) -> Any:
        kill()
        answer = call(store, operation, *arguments, **more)
        if operation == "put_object":
            kill()
        return answer

    return called


def _places(names: Iterable[str]) -> list[str]:
    """Partition and offset of each file."""
    return sorted(name.split("-")[0].split(".")[0] for name in names)


@pytest.mark.parametrize("form", ["batch", "jsonl"])
@pytest.mark.parametrize("stops_at", ["create", "put_manifest"])
def test_of_two_exports_at_a_time_one_is_refused_and_the_backup_stays_whole(
    form: Form, stops_at: str, topic: str, client: Client, on_node: str, s3: Any, prefix: str
) -> None:
    """One stands still before it creates a file, or before its manifest, while another does all of it."""
    client.topic(topic).append(b"first", partition=1)
    place = place_of(prefix)
    go_on = getattr(place, stops_at)
    others = 0
    one_by_one = threading.Lock()  # partitions are written side by side, by threads

    def other_first(*arguments: Any) -> Any:
        nonlocal others
        with one_by_one:
            if not others:
                others += 1
                client.topic(topic).append(b"meanwhile", partition=1)
                to_bucket(on_node, topic, place_of(prefix), form=form)
                client.topic(topic).append(b"after", partition=1)
        return go_on(*arguments)

    setattr(place, stops_at, other_first)
    with pytest.raises(ConfigError) as refused:
        to_bucket(on_node, topic, place, form=form)
    assert ("in_use", 1) == (refused.value.code, others)
    assert is_whole(prefix)
    manifest, _ = to_bucket(on_node, topic, place_of(prefix), form=form)
    assert 63 == manifest.partitions[1].end_offset
    assert is_whole(prefix)
    listed = {file.name for each in manifest.partitions for file in [*each.files, *each.values]}
    assert {*listed, MANIFEST} == objects(s3, BUCKET, prefix).keys()


def test_many_exports_at_a_time_end_in_one_whole_backup(
    kept: str, on_node: str, s3: Any, prefix: str
) -> None:
    async def at_once() -> list[Any]:
        async with connect(on_node) as client:
            runs = (
                export_topic(client.session, kept, place_of(prefix), file_bytes=FILE_BYTES) for _ in range(4)
            )
            return await asyncio.gather(*runs, return_exceptions=True)

    ends = asyncio.run(at_once())
    assert all(isinstance(end, tuple) or getattr(end, "code", "") == "in_use" for end in ends), ends
    to_bucket(on_node, kept, place_of(prefix))
    assert is_whole(prefix)


@pytest.mark.parametrize("least", [0, 20, 150])
def test_requests_whose_answers_are_lost_are_repeated_and_change_nothing(
    least: int, kept: str, on_node: str, s3: Any, prefix: str, tmp_path: Path, cutting: Cutting
) -> None:
    """Each request is carried out, and its first answer ends after some bytes of its head, or before."""
    seen: set[str] = set()

    def first_time(request: str) -> int | None:
        repeated = request in seen
        seen.add(request)
        return None if repeated else least

    cutting.cut_answer = first_time
    to_bucket(on_node, kept, place_of(prefix))
    assert cutting.cuts == len(seen) > 9
    exported(on_node, kept, tmp_path / "a")
    assert dict(stored(tmp_path / "a")) == objects(s3, BUCKET, prefix)


def test_reads_go_on_where_their_connections_break(
    kept: str, on_node: str, s3: Any, prefix: str, cutting: Cutting
) -> None:
    to_bucket(on_node, kept, place_of(prefix))
    # A connection that breaks once more at once, after it was made again.
    cutting.cut_answer = lambda request: 5_000 if ".batches" in request or ".value" in request else None
    assert is_whole(prefix)
    assert cutting.cuts > 50


def test_files_of_another_export_that_do_not_continue_ours_are_left_alone(
    topic: str, client: Client, on_node: str, s3: Any, prefix: str
) -> None:
    """Of two first exports, with a trim between them, both killed, neither blocks what comes after them."""
    to_bucket(on_node, topic, place_of(prefix))
    handle = client.topic(topic)
    handle.delete_before(30, partition=1)
    to_bucket(on_node, topic, place_of(f"{prefix}-b"))
    found = objects(s3, BUCKET, f"{prefix}-b")
    others = sorted(name for name in found if name.startswith("1/"))
    mine = sorted(name for name in objects(s3, BUCKET, prefix) if name.startswith("1/"))
    assert others[0] not in mine, "the trim moved where files begin"
    for name in [MANIFEST, *mine[2:]]:
        s3.delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")
    for name in others[1:]:
        s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=found[name])
    manifest, _ = to_bucket(on_node, topic, place_of(prefix))
    assert (0, 60) == (manifest.partitions[1].start_offset, manifest.partitions[1].end_offset)
    assert is_whole(prefix)


def test_an_object_that_was_changed_is_found(kept: str, on_node: str, s3: Any, prefix: str) -> None:
    to_bucket(on_node, kept, place_of(prefix))
    name = f"1/{0:020}.batches"
    data = bytearray(objects(s3, BUCKET, prefix)[name])
    data[len(data) // 2] ^= 1
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=bytes(data))
    with pytest.raises(Error) as damaged:
        plan_import(place_of(prefix), None)
    assert "damaged" == damaged.value.code and name in str(damaged.value)
    s3.delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")
    for work in (
        lambda: plan_import(place_of(prefix), None),
        lambda: to_bucket(on_node, kept, place_of(prefix)),
    ):
        with pytest.raises(Error) as missing:
            work()
        assert "damaged" == missing.value.code and "missing" in str(missing.value)


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_store_that_ignores_conditions_is_refused(
    ignored: str, kept: str, on_node: str, s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(prefix)
    put = place.store._client.put_object
    monkeypatch.setattr(
        place.store._client,
        "put_object",
        lambda **given: put(**{name: value for name, value in given.items() if name != ignored}),
    )
    with pytest.raises(Error) as refused:
        to_bucket(on_node, kept, place)
    assert "unsupported" == refused.value.code
    assert {} == objects(s3, BUCKET, prefix)


def test_a_value_larger_than_one_request_is_uploaded_in_parts(
    kept: str, on_node: str, s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "MOST_PUT_BYTES", 100_000)
    to_bucket(on_node, kept, place_of(prefix))
    assert is_whole(prefix)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("s3://", "bad_place"),
        ("s3://bucket", "bad_place"),
        ("s3://bucket/", "bad_place"),
        ("s3://Bu_CKET/a", "bad_place"),
        ("s3://bucket/a\nb", "bad_place"),
        ("s3:/bucket/a", "bad_place"),
        ("S3:/bucket/a", "bad_place"),
        ("s3://bucket/a/../b", "bad_place"),
        ("s3://bucket/a//b", "bad_place"),
        ("gs://bucket/a", "bad_place"),
        ("s3://there-is-no-such-bucket/a", "object_store"),
    ],
)
def test_a_wrong_place_is_named(
    place: str, code: str, on_node: str, as_configured: None, laminar: Command
) -> None:
    ran = laminar("topic", "export", "a-topic", place)
    assert ran.code in (1, 2) and ran.err.startswith(f"laminar: {code}: {place.splitlines()[0]}"), ran.err
    assert "field=to" in ran.err
    ran = laminar("topic", "import", place)
    assert ran.code in (1, 2) and f"{code}: {place.splitlines()[0]}" in ran.err and "field=from" in ran.err


def test_a_secret_in_a_place_or_an_endpoint_is_not_printed(
    as_configured: None, prefix: str, monkeypatch: pytest.MonkeyPatch, laminar: Command
) -> None:
    monkeypatch.setattr(store_module, "ATTEMPTS", 1)
    for place, endpoint in (
        ("s3://KEY:pa55@bucket/a", "http://127.0.0.1:9"),
        ("s3://KEY:x/pa55@bucket/a", "http://127.0.0.1:9"),
        ("s3://bucket/a?X-Amz-Signature=pa55", "http://127.0.0.1:9"),
        ("s3://bucket/a", "http://user:pa55@127.0.0.1:9"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        ran = laminar("topic", "import", place)
        assert ran.code and ("object_store" in ran.err or "bad_place" in ran.err)
        assert "pa55" not in ran.err, ran.err


def test_other_objects_below_the_prefix_are_refused(
    kept: str, on_node: str, s3: Any, prefix: str, laminar: Command
) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/photo.jpg", Body=b"")
    ran = laminar("topic", "export", kept, f"s3://{BUCKET}/{prefix}")
    assert 2 == ran.code and "not_a_backup" in ran.err and "photo.jpg" in ran.err
    ran = laminar("topic", "import", f"s3://{BUCKET}/{prefix}")
    assert 2 == ran.code and "not_a_backup" in ran.err


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, laminar: Command) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    ran = laminar("topic", "export", "a-topic", "s3://bucket/a")
    assert 2 == ran.code and "laminar-mq[s3]" in ran.err


def test_a_full_disk_for_temporary_files_is_named_and_its_file_is_removed(
    kept: str, on_node: str, s3: Any, prefix: str, tmp_path: Path
) -> None:
    """The limit of a file's length is that of a disk."""
    (tmp_path / "t").mkdir()
    limited = "import resource, signal, os, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "laminar.cli", "topic", "export", kept, f"s3://{BUCKET}/{prefix}"]
    environment = {**os.environ, "LAMINAR_URL": on_node, "TMPDIR": str(tmp_path / "t")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    ran = subprocess.run(
        [sys.executable, "-c", limited, *command], env=environment, capture_output=True, text=True
    )
    assert 1 == ran.returncode
    assert str(tmp_path / "t") in ran.stderr and "File too large" in ran.stderr, ran.stderr
    assert [] == list((tmp_path / "t").iterdir())
    to_bucket(on_node, kept, place_of(prefix))
    assert is_whole(prefix)


def test_an_export_is_interrupted_although_the_store_does_not_answer(
    kept: str, on_node: str, s3: Any, prefix: str
) -> None:
    """A second Ctrl-C ends it at once; it says so after the first."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "LAMINAR_URL": on_node, "AWS_ENDPOINT_URL_S3": url}
        command = [sys.executable, "-m", "laminar.cli", "topic", "export", kept, f"s3://{BUCKET}/{prefix}"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            with silent.accept()[0] as asked:
                assert asked.recv(1)
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None and "Ctrl-C again" in process.stderr.readline()
                process.send_signal(signal.SIGINT)
                assert -signal.SIGINT == process.wait(60)


def test_an_export_in_the_background_ignores_ctrl_c(kept: str, on_node: str, s3: Any, prefix: str) -> None:
    """As a shell lets a command that ends with `&` do."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignoring += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "laminar.cli", "topic", "export", kept, f"s3://{BUCKET}/{prefix}"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "LAMINAR_URL": on_node, "AWS_ENDPOINT_URL_S3": url}
        with subprocess.Popen([sys.executable, "-c", ignoring, *command], env=environment) as process:
            with silent.accept()[0] as asked:
                assert asked.recv(1)
                status = Path(f"/proc/{process.pid}/status").read_text()
                process.kill()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    assert int(ignored, 16) & 1 << signal.SIGINT - 1


def test_the_probes_of_killed_exports_are_removed_after_a_day(
    kept: str, on_node: str, s3: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/.writing-0", Body=b"1")
    s3.put_object(Bucket=BUCKET, Key=f"{prefix}/", Body=b"")  # as a page of a store makes a "folder"
    to_bucket(on_node, kept, place_of(prefix))
    assert ".writing-0" in objects(s3, BUCKET, prefix)
    monkeypatch.setattr(bucket_module, "PROBE_KEPT", timedelta(0))
    to_bucket(on_node, kept, place_of(prefix))
    assert not [name for name in objects(s3, BUCKET, prefix) if name.startswith(".")]


def test_the_manifest_is_json_with_the_names_of_the_objects(
    kept: str, on_node: str, s3: Any, prefix: str
) -> None:
    to_bucket(on_node, kept, place_of(prefix), form="jsonl")
    found = objects(s3, BUCKET, prefix)
    listed = json.loads(found[MANIFEST])["partitions"][1]["files"]
    lines = [json.loads(line) for each in listed for line in found[each["name"]].splitlines()]
    assert list(range(60)) == [line["offset"] for line in lines]
