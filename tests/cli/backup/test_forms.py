"""`laminar topic export` in the forms for other programs: JSON lines, CSV and Parquet."""

from __future__ import annotations

import csv
import errno
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from laminar.client.backup.folder import FileWriter
from laminar.client.sync.client import Client
from tests.cli.backup.backups import LARGE, exported, stored
from tests.cli.conftest import Command


def test_lines_are_for_other_programs(
    topic: str, client: Client, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    assert 0 == laminar("topic", "export", topic, str(folder), "--format", "jsonl").code
    files = sorted(folder.glob("0/*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_bytes().splitlines()]
    assert list(range(100, 179)) == [line["offset"] for line in lines]
    assert {"key": "k", "value": "", "tag": "täg", "headers_base64": {"h": "AP8="}}.items() <= lines[
        50
    ].items()
    [large] = [line for line in lines if "value_bytes" in line]
    assert LARGE == (folder / f"0/{large['offset']:020}.value").read_bytes()

    before = dict(stored(folder))
    (folder / f"1/{60:020}.jsonl").write_text("of a killed export")
    client.topic(topic).append(b"later", partition=1)
    assert 0 == laminar("topic", "export", topic, str(folder), "--format", "jsonl").code
    after = dict(stored(folder))
    assert {"manifest.json", f"1/{60:020}.jsonl"} == {
        name for name in after if after[name] != before.get(name)
    }
    assert "later" == json.loads(after[f"1/{60:020}.jsonl"])["value"]
    other = laminar("topic", "export", topic, str(folder))
    assert 2 == other.code and "of form jsonl" in other.err
    refused = laminar("topic", "import", str(folder), "--as", f"{topic}-lines")
    assert 1 == refused.code and "unsupported" in refused.err


def test_csv_has_each_record_and_nothing_that_a_spreadsheet_calculates(
    topic: str, client: Client, laminar: Command, tmp_path: Path
) -> None:
    values = ["=1+1", "+1", "-1", "@A1", "\t=1", "1", 'a "b",\r\nc', "'=1"]
    for value in values:
        client.topic(topic).append(value.encode(), key="=k", headers={"h": b"=h"}, partition=3)
    assert 0 == laminar("topic", "export", topic, str(tmp_path / "a"), "--format", "csv").code

    rows = csv_rows(tmp_path / "a", 3)
    assert ["'=1+1", "'+1", "'-1", "'@A1", "'\t=1", "1", 'a "b",\r\nc', "'=1"] == [
        each["value"] for each in rows
    ]
    assert {("'=k", '{"h":"=h"}')} == {(each["key"], each["headers"]) for each in rows}
    rows = csv_rows(tmp_path / "a", 0)
    assert list(map(str, range(100, 179))) == [each["offset"] for each in rows]
    first = rows[50]
    assert ("k", "", "täg", '{"h":"AP8="}', bytes(range(16)).hex(), "2020-09-13T12:26:40.000Z") == tuple(
        first[name] for name in ("key", "value", "tag", "headers_base64", "trace_id", "timestamp")
    )
    [large] = [each for each in rows if each["value_bytes"]]
    assert (str(len(LARGE)), "") == (large["value_bytes"], large["value"])


def csv_rows(folder: Path, partition: int) -> list[dict[str, str]]:
    found = []
    for path in sorted(folder.glob(f"{partition}/*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found += list(csv.DictReader(file))
    return found


def test_parquet_has_each_record(
    topic: str, client: Client, on_node: str, laminar: Command, tmp_path: Path
) -> None:
    """Read back by another reader of the format it is what a consumer reads; run again it goes on."""
    folder = tmp_path / "a"
    exported(on_node, topic, folder, form="parquet")
    client.topic(topic).append(b"later", partition=1)
    again = laminar("topic", "export", topic, str(folder), "--format", "parquet")
    assert 0 == again.code and b"new are 1 records" in again.out, again

    found = {
        (partition, each["offset"]): each
        for partition in range(4)
        for path in sorted(folder.glob(f"{partition}/*.parquet"))
        for each in pyarrow.parquet.read_table(path, partitioning=None).to_pylist()
    }

    assert len(list(folder.glob("1/*.parquet"))) > 2, "one file would show little"
    read = {
        (each.partition, each.offset): (
            each.key,
            None if each.large_bytes is not None else each.value,
            each.tag,
            dict(each.headers),
            each.timestamp,
            each.trace_id,
            each.large_bytes,
        )
        for each in client.topic(topic).read()
    }
    assert read == {
        place: (
            each["key"],
            each["value"],
            each["tag"],
            dict(each["headers"] or ()),
            round(each["timestamp"].timestamp() * 1000),
            each["trace_id"],
            each["value_bytes"],
        )
        for place, each in found.items()
    }
    refused = laminar("topic", "import", str(folder), "--as", f"{topic}-parquet")
    assert 1 == refused.code and "unsupported" in refused.err


def test_an_export_to_parquet_that_ends_in_the_middle_leaves_no_half_file(
    topic: str, on_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    write = FileWriter.write
    left = 4

    def fail(writer: FileWriter, data: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, data)

    monkeypatch.setattr(FileWriter, "write", fail)
    with pytest.raises(OSError, match="No space"):
        exported(on_node, topic, folder, form="parquet")
    assert all(b"PAR1" == data[-4:] for name, data in stored(folder) if name.endswith(".parquet"))
    assert not [name for name, _ in stored(folder) if ".writing-" in name]
    monkeypatch.undo()
    assert exported(on_node, topic, folder, form="parquet")[0].records


def test_parquet_needs_its_library(
    laminar: Command, on_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    ran = laminar("topic", "export", "any", str(tmp_path / "a"), "--format", "parquet")

    assert 2 == ran.code and "pip install 'laminar-mq[arrow]'" in ran.err
    assert not (tmp_path / "a").exists()
