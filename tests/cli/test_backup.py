"""`laminar topic export` and `laminar topic import`, on a real node: what comes back is what was there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import laminar as library
from laminar.batch import BATCH_TYPE, Batch, build, split
from laminar.batch.columns import Codec
from laminar.client.backup.export import export_topic
from laminar.client.backup.restore import import_topic, plan_import
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
    return name


@pytest.fixture
def topic(client: Client, on_node: str) -> str:
    return filled(client, on_node)


def records_of(client: Client, topic: str) -> dict[int, list[tuple[Any, ...]]]:
    """All of a topic's records as readers get them, with their offsets."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for each in client.topic(topic).partitions():
        found[each.partition] = [(each.start_offset, each.end_offset)]
    for batch in client.topic(topic).read().batches():
        for record in batch.records if hasattr(batch, "records") else batch:
            value: object = record.value
            found[batch.partition].append(
                (record.offset, record.key, value, record.tag, dict(record.headers), record.timestamp)
            )
    return found


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
