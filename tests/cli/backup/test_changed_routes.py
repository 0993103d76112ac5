"""Backups of topics whose partitions were split, merged or reclaimed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import build
from laminar.client.backup import restore
from laminar.client.backup.folder import Folder
from laminar.client.backup.lineage import whole_of
from laminar.client.backup.manifest import Manifest, PartitionBackup
from laminar.client.backup.restore import plan_import
from laminar.client.net.session import Session
from laminar.client.sync.client import Client
from tests.cli.backup.backups import begun, bodies, exported, in_session, numbers, post
from tests.cli.conftest import Command


def test_partitions_that_were_split_and_merged_come_back(
    client: Client, on_node: str, laminar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"split-{next(numbers)}"
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
    name = f"late-{next(numbers)}"
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

    place = Folder(tmp_path / "a")
    manifest, _, import_id = plan_import(place, back)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "get_json", lagging)
        in_session(
            on_node,
            lambda session: restore.import_topic(session, place, manifest, back, import_id),
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
    name = f"reclaimed-{next(numbers)}"
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
