"""The worker in examples/: real processes of it are killed, and no job is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import laminar
from laminar.testing.nodes import serve
from tests.docs.pages import ROOT, blocks_of

JOBS = 200
PATIENCE_S = 60
WORKER = ROOT / "examples" / "worker.py"


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a worker; all that are left are killed at the end."""
    with ExitStack() as ends:

        def begin(url: str) -> subprocess.Popen[bytes]:
            worker = ends.enter_context(subprocess.Popen([sys.executable, WORKER, url]))
            ends.callback(worker.kill)
            return worker

        yield begin


def lines_of(notes: Path, count: int) -> list[str]:
    """The lines, once there are `count` different ones."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        lines = notes.read_text().splitlines() if notes.exists() else []
        if len(set(lines)) >= count:
            return lines
        assert time.monotonic() < deadline, f"{len(set(lines))} of {count}"
        time.sleep(0.02)


def test_no_job_is_lost_when_workers_are_killed(
    start: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Two work, both are killed in between, others go on: each job is done, and few are done twice."""
    notes = tmp_path / "notes"
    with serve() as url, laminar.connect(url) as client:
        jobs = client.create_topic("jobs", partitions=2).name
        topic = client.topic(jobs, codec=laminar.json())
        with topic.producer() as producer:
            for number in range(JOBS):
                producer.send(
                    {"task": "note", "with": {"file": str(notes), "line": f"{number}"}}, key=f"{number}"
                )
        first, second = start(url), start(url)
        lines_of(notes, 20)
        first.kill()
        lines_of(notes, 40)
        second.kill()
        third = start(url)
        lines = lines_of(notes, JOBS)

        described = topic.channel("workers").describe()
        third.send_signal(signal.SIGTERM)
        assert 0 == third.wait(PATIENCE_S)

    assert {f"{number}" for number in range(JOBS)} == set(lines)
    # Those that were under way when a worker died: four each, and a line may be there before its end.
    assert len(lines) <= JOBS + 2 * 16
    assert 0 == described.dead


def test_it_is_short_and_shown_word_for_word() -> None:
    text = WORKER.read_text()

    assert len(text.splitlines()) <= 22
    assert [text] == [block.text for block in blocks_of("docs/clients.md") if block.text == text]
