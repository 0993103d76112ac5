"""A trace of file system calls as recorder.c writes it, and how to run a program under the recorder."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("recorder.c")
_HEAD = struct.Struct("<IIQQQQQII")


class Kind(IntEnum):
    """What a call did; the numbers of recorder.c."""

    CREATE = 1
    MKDIR = 2
    RENAME = 3
    UNLINK = 4
    RMDIR = 5
    WRITE = 6
    TRUNCATE = 7
    ALLOCATE = 8
    SYNC = 9
    SYNC_ALL = 10


@dataclass(frozen=True, slots=True)
class Call:
    """One call that succeeded. Times are of CLOCK_MONOTONIC in ns; paths are relative to the root."""

    kind: Kind
    durable: bool
    began: int
    ended: int
    inode: int
    position: int
    # The bytes of a write, or the name (old name) of a change of names.
    first: bytes
    # The new name of a rename.
    second: bytes


def read(file: Path) -> list[Call]:
    """All calls in a trace, in the order in which they ended."""
    data = file.read_bytes() if file.exists() else b""
    found, at = [], 0
    while at < len(data):
        kind, durable, began, ended, inode, _, position, first, second = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = data[at : at + first], data[at + first : at + first + second]
        at += first + second
        found.append(Call(Kind(kind), bool(durable), began, ended, inode, position, *parts))
    return sorted(found, key=lambda call: call.ended)


def build(folder: Path) -> Path:
    """The recorder as a shared library in `folder`. Raises `CalledProcessError` without a compiler."""
    library = folder / "recorder.so"
    command = [
        "cc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(SOURCE),
    ]
    subprocess.run([*command, "-ldl"], check=True, capture_output=True)
    return library


def start(
    command: Sequence[str],
    *,
    library: Path | None,
    folder: Path,
    trace: Path,
    output: Path,
    settings: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m` with `command` in a session of its own, and record what it does to `folder`.

    Without `library` nothing is recorded. `settings` are further variables of its environment.
    """
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | dict(settings or {})
    if library is not None:
        environment |= {"LD_PRELOAD": str(library), "CRASH_ROOT": str(folder), "CRASH_TRACE": str(trace)}
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
