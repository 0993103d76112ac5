"""A topic is imported while a node is gone: each replica begins at the offset of the backup, that one too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.client.backup.export import export_topic
from laminar.client.backup.folder import Folder
from laminar.client.backup.manifest import Manifest
from laminar.client.backup.restore import import_topic, plan_import
from laminar.client.client import connect
from laminar.client.net.session import Session
from laminar.testing.cluster import LocalCluster
from tests.cluster.load import converged


def exported(url: str, topic: str, folder: Path) -> Manifest:
    async def run() -> Manifest:
        async with connect(url, timeout=60) as client:
            return (await export_topic(client.session, topic, Folder(folder), file_bytes=20_000))[0]

    return asyncio.run(run())


def test_replicas_begin_alike_though_one_was_away(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with laminar.connect(cluster.urls, timeout=60) as client:
        topic = client.create_topic("t", partitions=2, replicas=3)
        for number in range(100):
            topic.append(b"%d" % number * 500, partition=number % 2)
        topic.delete_before(30, partition=0)
    manifest = exported(cluster.urls[0], "t", tmp_path / "a")
    assert [(30, 50), (0, 50)] == [(each.start_offset, each.end_offset) for each in manifest.partitions]
    _, name, import_id = plan_import(Folder(tmp_path / "a"), "back")
    call, gone = Session.call, False

    async def with_a_node_gone(session: Session, method: str, target: str, **more: Any) -> Any:
        nonlocal gone
        if method in ("DELETE", "POST") and not gone:
            gone = True
            cluster.kill(2)
        return await call(session, method, target, **more)

    async def run() -> None:
        async with connect(cluster.urls[:2], timeout=60) as client:
            await import_topic(client.session, Folder(tmp_path / "a"), manifest, name, import_id)

    monkeypatch.setattr(Session, "call", with_a_node_gone)
    asyncio.run(run())
    assert gone
    cluster.restart(2)
    assert [] == asyncio.run(converged(cluster, "back", 2))

    back = exported(cluster.urls[2], "back", tmp_path / "b")
    assert [(30, 50), (0, 50)] == [(each.start_offset, each.end_offset) for each in back.partitions]
    with laminar.connect(cluster.urls, timeout=60) as client:
        for partition in client.topic("back").partitions():
            assert partition.start_offset == manifest.partitions[partition.partition].start_offset
        for name in ("t", "back"):
            read = client.topic(name).read(partitions=[0])
            assert [(n // 2, b"%d" % n * 500) for n in range(60, 100, 2)] == [
                (record.offset, record.value) for record in read
            ]
