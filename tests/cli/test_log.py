"""`laminar log`: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from laminar.log import StorageSettings, open_folder
from tests.cli.conftest import Command as Laminar

SMALL = StorageSettings(first_journal_file_bytes=1 << 17, journal_file_bytes=1 << 17)


async def fill(path: Path) -> None:
    async with open_folder(path, segment_size_bytes=2_000, settings=SMALL) as folder:
        orders = await folder.log("orders")
        for each in range(10):
            await orders.append([b"%d" % each * 100] * 3)
        await (await folder.log("empty")).accept_loss()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asyncio.run(fill(tmp_path / "data"))
    return tmp_path / "data"


def test_inspect_shows_logs_segments_and_the_journal(data: Path, laminar: Laminar) -> None:
    """As a table, as names, as one JSON document."""
    page = laminar("log", "inspect", str(data))
    names = laminar("log", "inspect", str(data), "-o", "names")
    document = json.loads(laminar("log", "inspect", str(data), "--json").text)

    assert page.code == names.code == 0
    assert "checkpoint of 2 logs" in page.text
    assert ["empty", "orders"] == names.text.split()
    assert [0, 30] == [each["end_offset"] for each in document["logs"]]
    (folder,) = (data / "logs").iterdir()
    segments = laminar("log", "inspect", str(folder), "-o", "names").text.split()
    assert [each["segment"] for each in document["logs"][1]["segments"]] == segments


def test_verify_names_what_is_damaged_and_ends_with_1(data: Path, laminar: Laminar) -> None:
    """File, position and offsets, in a line and in JSON; 0 and one line where all is whole."""
    assert 0 == laminar("log", "verify", str(data)).code
    segment = min(data.rglob("*.log"))
    rotten = bytearray(segment.read_bytes())
    rotten[300] ^= 4
    segment.write_bytes(rotten)

    page = laminar("log", "verify", str(data))
    document = json.loads(laminar("log", "verify", str(data), "--json").text)

    assert 1 == page.code
    assert f"{segment.relative_to(data)} at 0" in page.text
    assert "offsets 0 to 2" in page.text
    assert page.text.rstrip().endswith("damaged")
    assert document["damaged"]
    assert [str(segment)] == [each["file"] for each in document["findings"]]


def test_reindex_says_what_it_changed(data: Path, laminar: Laminar) -> None:
    """And verify is content afterwards."""
    index = min(data.rglob("*.index"))
    index.unlink()
    assert 1 == laminar("log", "verify", str(data)).code

    done = laminar("log", "reindex", str(data), "--json")

    assert 0 == done.code
    assert [str(index)] == [each["file"] for each in json.loads(done.text) if each["changed"]]
    assert 0 == laminar("log", "verify", str(data)).code


@pytest.mark.parametrize("command", ["inspect", "verify", "reindex"])
def test_what_is_no_folder_of_logs_is_one_line(command: str, tmp_path: Path, laminar: Laminar) -> None:
    ran = laminar("log", command, str(tmp_path))

    assert 1 == ran.code
    assert f"laminar: {tmp_path} is neither" in ran.err
    assert 1 == len(ran.err.splitlines())


async def test_what_was_not_verified_is_not_called_whole(tmp_path: Path) -> None:
    """A log in use that no checkpoint names yet: not a record of it was read, and that is no success."""
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        await (await folder.log("orders")).append([b"x"])
        command = [sys.executable, "-m", "laminar.cli", "log", "verify", str(tmp_path / "data")]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said = (await running.communicate())[0].decode()

    assert 1 == running.returncode
    assert said.rstrip().endswith("no record was verified"), said
