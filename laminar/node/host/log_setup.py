"""The set-up of a process's log: one line per record on standard error, without ever blocking the loop.

Text on a terminal, JSON otherwise. A reader that stops reading must not stop the node: a line that does not
fit the pipe is dropped and counted, and the next one that fits is preceded by the number of dropped ones.
What is logged, and with which names, is up to each module (`logging.getLogger("laminar...")`).
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Callable

import msgspec

_STANDARD_ERROR = 2
_MAX_LINE_BYTES = 16 << 10
_EXTRA = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """A formatter of lines for people: `12:30:05.123 warning shard 1: transport: connection refused`.

    A stack trace is on the same line, its line ends escaped.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of text, its stack included."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("laminar.").removeprefix("node.")
        head = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {self._process}: {name}: "
        fields = "".join(f" {key}={value}" for key, value in _extra_fields(record).items())
        return _one_line(head + record.getMessage() + fields + _stack(self, record))


class JsonFormatter(logging.Formatter):
    """A formatter of one JSON object a line, for machines.

    Its keys: `time`, `level`, `process`, `logger`, `message`, `stack`, and extra fields.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one JSON object."""
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        stack = _stack(self, record)
        if stack:
            fields["stack"] = stack.strip()
        for key, value in _extra_fields(record).items():
            fields.setdefault(key, value)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _EXTRA}


def _stack(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n" + "\n".join(parts) if parts else ""


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


class NonBlockingHandler(logging.Handler):
    """A handler that writes each record with one call that can't block; `.dropped` counts those dropped."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        """Write to `write`, which returns how many bytes it took, or raises `BlockingIOError`."""
        super().__init__()
        self._write = write
        self.on_close: Callable[[], None] = lambda: None
        self._rest = b""
        self.dropped = 0

    def close(self) -> None:
        """Close the writer."""
        self.on_close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or drop and count it if that would block."""
        if self.dropped:
            notice = {"levelno": logging.WARNING, "levelname": "WARNING", "name": "laminar.log_setup"}
            notice |= {"msg": f"{self.dropped} lines of the log were dropped: its reader was too slow"}
            if self._offer(logging.makeLogRecord(notice)):
                self.dropped = 0
        if not self._offer(record):
            self.dropped += 1

    def _offer(self, record: logging.LogRecord) -> bool:
        """Write the rest of the last line, then this one; return False if nothing of this one went out."""
        line = self.format(record).encode(errors="backslashreplace")[:_MAX_LINE_BYTES] + b"\n"
        try:
            if self._rest:
                self._rest = self._rest[self._write(self._rest) :]
                if self._rest:
                    return False
            self._rest = line[self._write(line) :]
        except OSError:  # the pipe is full, or its reader is gone: only this line is lost
            return False
        return True


class NonBlockingWriter:
    """A writer to `fd` that doesn't wait, and leaves the descriptor's flags as they are for other users.

    If `fd` can't be opened again, as with another user's terminal, it may block as any program's write does.
    """

    def __init__(self, fd: int = _STANDARD_ERROR) -> None:
        self._socket: socket.socket | None = None
        self._fd = -1
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            # From journald. A socket can't be opened again, but each send can be made non-blocking by a flag.
            self._socket = socket.socket(fileno=os.dup(fd))
            return
        if stat.S_ISREG(os.fstat(fd).st_mode):
            # A file never makes us wait. It is not opened again, because a process that shares it
            # (`> log 2>&1`) shares its position too: with two positions, each would overwrite the other.
            self._fd = os.dup(fd)
            return
        try:
            # O_NONBLOCK would hold for the open file description, which we share with our parent and its
            # terminal: so open the file once more.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(f"/proc/self/fd/{fd}", flags)
        except OSError:
            self._fd = os.dup(fd)  # a file of another user: writes may block, as for any program

    def __call__(self, data: bytes) -> int:
        """Write `data` and return how many bytes went.

        Raises:
            BlockingIOError: none can be written now.
        """
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return os.write(self._fd, data)

    def close(self) -> None:
        """Close our own descriptor."""
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def set_up_logging(*, process: str, level: str, style: str = "auto") -> NonBlockingHandler:
    """Send the root logger's records of `level` and above to standard error.

    `style`: text, json or auto.
    """
    if style == "auto":
        style = "text" if sys.stderr is not None and sys.stderr.isatty() else "json"
    writer = NonBlockingWriter()
    handler = NonBlockingHandler(writer)
    handler.on_close = writer.close
    handler.setFormatter(TextFormatter(process) if style == "text" else JsonFormatter(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, NonBlockingHandler):
            old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler
