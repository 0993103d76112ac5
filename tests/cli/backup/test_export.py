"""`laminar topic export`, on a real node: it goes on where it ended, and names what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from laminar.client.backup.folder import FileWriter
from laminar.client.sync.client import Client
from tests.cli.backup.backups import Killed, exported, killing, stored
from tests.cli.conftest import Command


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
            patch.setattr(FileWriter, "discard", lambda writer: writer._file.close())
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
    # Compiled modules would be cut off at that length, too, and left for others to load.
    environment = {**os.environ, "LAMINAR_URL": on_node, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", limited, *command], env=environment, capture_output=True, text=True
    )
    assert 1 == ran.returncode
    assert str(folder) in ran.stderr and "File too large" in ran.stderr, ran.stderr
    assert not [name for name, _ in stored(folder) if "writing" in name or name == "manifest.json"]

    assert 0 == laminar("topic", "export", topic, str(folder)).code
    assert 0 == laminar("topic", "import", str(folder), "--as", f"{topic}-back", "--dry-run").code


def test_a_folder_with_other_things_is_left_alone(
    topic: str, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    refused = laminar("topic", "export", topic, str(tmp_path))
    assert 2 == refused.code and "letter.txt" in refused.err
    assert ["letter.txt"] == os.listdir(tmp_path)
    assert 2 == laminar("topic", "import", str(tmp_path)).code
    assert 2 == laminar("topic", "import", str(tmp_path / "none")).code
