"""Topics to back up, exports and imports of them, some that die on the way, and what a backup has."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import BATCH_TYPE, Batch, build, split
from laminar.batch.columns import Codec
from laminar.client.backup import restore
from laminar.client.backup.export import export_topic
from laminar.client.backup.folder import Folder
from laminar.client.backup.restore import plan_import
from laminar.client.client import connect
from laminar.client.net.session import Session
from laminar.client.sync.client import Client

numbers = count()
TIMES = (1_600_000_000_000, 1_600_000_000_001)
LARGE = bytes(range(256)) * 3_000
# So small that a partition has several files.
FILE_BYTES = 20_000


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
    name = f"saved-{next(numbers)}"
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
        url, lambda session: export_topic(session, topic, Folder(folder), file_bytes=FILE_BYTES, **more)
    )


class Killed(BaseException):
    """Stands for the end of a process; nothing may catch it."""


def killing(at: int) -> Callable[[], None]:
    """A function that raises when it is called for the time `at`, from 1."""
    calls = count(1)

    def call() -> None:
        if next(calls) == at:
            raise Killed

    return call


def begun(url: str, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, dies_after: int) -> bool:
    """Import a backup, and die when a request with this number is carried out; return whether it died."""
    place = Folder(folder)
    manifest, _, import_id = plan_import(place, name)
    kill, call = killing(dies_after), Session.call

    async def sent_and_killed(session: Session, *arguments: Any, **more: Any) -> Any:
        answer = await call(session, *arguments, **more)
        kill()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Session, "call", sent_and_killed)
        patch.setattr(restore, "REQUEST_BYTES", FILE_BYTES)
        try:
            in_session(url, lambda session: restore.import_topic(session, place, manifest, name, import_id))
        except Killed:
            return True
    return False
