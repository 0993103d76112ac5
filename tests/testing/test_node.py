"""laminar.testing.node: a real server, and nothing of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from pathlib import Path

import pytest

import laminar.testing
from laminar.testing import nodes


def servers_below(folder: str) -> list[int]:
    """Processes whose command line names a data folder below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def test_a_real_server_for_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records appended are read back; after the block no process and no file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with laminar.testing.node() as client:
        topic = client.create_topic("t", partitions=2)
        with topic.producer() as producer:
            for number in range(1_000):
                producer.send(b"%d" % number, key=b"%d" % (number % 5))
        read = sorted(int(record.value) for record in topic.read())

    assert list(range(1_000)) == read
    assert [] == servers_below(str(tmp_path))
    assert [] == list(tmp_path.iterdir())


def test_the_server_is_gone_after_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), laminar.testing.node():
        raise ZeroDivisionError

    assert [] == servers_below(str(tmp_path))


def test_a_server_that_does_not_end_is_killed_and_its_children_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is done none of them lives, so nothing is written to the folder that is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nodes, "STOP_TIMEOUT_S", 0.1)
    with nodes.serve():
        found = servers_below(str(tmp_path))
        for pid in found:
            os.kill(pid, signal.SIGSTOP)

    assert len(found) > 2
    assert [] == servers_below(str(tmp_path))
    assert [] == list(tmp_path.iterdir())


def test_a_server_that_cannot_start_says_why() -> None:
    """The exception carries the end of the server's log, not only a time-out."""
    with (
        pytest.raises(laminar.testing.ServerFailed, match=r"no_such_setting|ended with"),
        nodes.serve(settings={"no_such_setting": 1}),
    ):
        pass


async def test_the_async_twin() -> None:
    async with laminar.testing.aio_node() as client:
        topic = await client.create_topic("t", partitions=1)
        receipts = await asyncio.gather(*(topic.append(b"%d" % n) for n in range(50)))
        values = [record.raw async for record in topic.read()]

    assert set(range(50)) == {receipt.offset for receipt in receipts}
    assert {b"%d" % n for n in range(50)} == set(values)
