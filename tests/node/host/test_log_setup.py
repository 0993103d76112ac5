"""The log: one line a record, for people or machines, and never a reason to wait."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from laminar.node.host.log_setup import JsonFormatter, NonBlockingHandler, NonBlockingWriter, TextFormatter


def record(message: str, *, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    """One record of laminar.node.transport, with the exception being handled, if any."""
    return logging.getLogger("laminar.node.transport").makeRecord(
        "laminar.node.transport",
        level,
        "x.py",
        1,
        message,
        (),
        sys.exc_info() if sys.exc_info()[0] else None,
        extra=extra,
    )


def test_json_has_one_line_per_record_with_stack_and_fields() -> None:
    """Whatever is in the message."""
    try:
        raise ValueError("oh\nno")
    except ValueError:
        line = JsonFormatter("n1 shard 0").format(
            record("two\nlines", level=logging.ERROR, topic="t", raw=b"x")
        )

    fields = json.loads(line)
    assert "\n" not in line
    assert tuple(fields[name] for name in ("level", "process", "logger", "message", "topic")) == (
        "error",
        "n1 shard 0",
        "laminar.node.transport",
        "two\nlines",
        "t",
    )
    assert "ValueError: oh" in fields["stack"]
    assert fields["time"].endswith("Z")


def test_text_has_one_line_per_record_too() -> None:
    """A stack stays with its record, also through grep."""
    try:
        raise ValueError("oh no")
    except ValueError:
        line = TextFormatter("n1").format(record("it broke", level=logging.ERROR, topic="t"))

    assert "\n" not in line
    assert " error n1: transport: it broke topic=t\\nTraceback" in line


def test_a_full_pipe_drops_lines_and_says_later_how_many() -> None:
    """A reader that stopped reading must not stop the loop."""
    reading, writing = os.pipe()
    writer = NonBlockingWriter(writing)
    handler = NonBlockingHandler(writer)
    handler.setFormatter(JsonFormatter("n1"))

    for number in range(5000):  # for ever, if it waited: nobody reads
        handler.emit(record(f"line {number} {'x' * 300}"))
    assert handler.dropped > 0
    dropped = handler.dropped
    text = os.read(reading, 1 << 20)
    handler.emit(record("readable again"))
    text += os.read(reading, 1 << 20)

    messages = [json.loads(line)["message"] for line in text.splitlines()]
    assert f"{dropped} lines of the log were dropped: its reader was too slow" == messages[-2]
    assert messages[-1] == "readable again"
    assert len(messages) == 5000 - dropped + 2
    writer.close()
    os.close(reading)
    os.close(writing)


def test_the_shared_descriptor_stays_blocking() -> None:
    """O_NONBLOCK on it would break whoever shares it: a shell, our parent."""
    reading, writing = os.pipe()

    writer = NonBlockingWriter(writing)
    writer(b"x")

    assert os.get_blocking(writing)
    writer.close()
    os.close(reading)
    os.close(writing)


def test_a_socket_is_written_without_waiting() -> None:
    """The journal's standard error is one."""
    ours, theirs = socket.socketpair()
    write = NonBlockingWriter(ours.fileno())

    with pytest.raises(BlockingIOError):
        while True:
            write(b"x" * 10_000)

    assert ours.getblocking()
    write.close()
    ours.close()
    theirs.close()


def test_a_line_that_was_cut_is_finished_before_the_next() -> None:
    """Lines never mix."""
    out = bytearray()
    room = [10, 0, 1000, 1000]

    def write(data: bytes) -> int:
        taken = min(len(data), room.pop(0))
        if not taken:
            raise BlockingIOError(errno.EAGAIN, "full")
        out.extend(data[:taken])
        return taken

    handler = NonBlockingHandler(write)
    handler.setFormatter(logging.Formatter("%(message)s"))

    handler.emit(record("a line of twenty-five"))
    handler.emit(record("dropped"))
    assert handler.dropped == 1
    handler.dropped = 0
    handler.emit(record("next"))

    assert out == b"a line of twenty-five\nnext\n"


def test_who_shares_the_file_loses_no_line(tmp_path: Path) -> None:
    """As in `command > log 2>&1`: one position for both, so that neither writes over the other."""
    shared = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    write = NonBlockingWriter(shared)

    write(b"ours\n")
    os.write(shared, b"theirs\n")
    write(b"ours again\n")

    assert b"ours\ntheirs\nours again\n" == (tmp_path / "log").read_bytes()
    write.close()
    os.close(shared)
