"""A program that writes what it is to its standard output, and ends as its argument says.

As a node of a test it has the modules of a node, and some of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import laminar.node.__main__  # noqa: F401  # what a server has loaded before
from laminar.node.entry_points import default_entry_points
from laminar.node.host.fork import threads
from laminar.node.host.settings import Settings
from laminar.node.runtime.environment import Environment


def state() -> dict[str, object]:
    """What a start gives to a process, as far as two starts may be compared."""
    links = {int(fd): Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    signals = {each: str(signal.getsignal(each)) for each in signal.valid_signals()}
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "of C": {name: (getenv(name.encode()) or b"").decode() for name in (*os.environ, "ROOM")},
        "shown command": _shown("cmdline"),
        "shown environment": sorted(_shown("environ")),
        "folder": os.getcwd(),
        "files": sorted(
            [os.readlink(link).partition(":")[0], os.get_inheritable(fd)]
            for fd, link in links.items()
            if link.exists()
        ),
        "input": os.readlink("/proc/self/fd/0"),
        "leads": os.getpgrp() == os.getpid(),
        "session": os.getsid(0),
        "signals": signals,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0],
        "limits": Path("/proc/self/limits").read_text().splitlines(),
        "processors": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "files at most": resource.getrlimit(resource.RLIMIT_NOFILE),
        "flags": str(sys.flags),
        "path": sys.path,
        "threads": threads(),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.callbacks],
        "streams": [
            [each.encoding, each.errors, each.isatty(), each.line_buffering]
            for each in (sys.stdout, sys.stderr)
        ],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "network": os.readlink("/proc/self/ns/net"),
    }


def _shown(name: str) -> list[str]:
    return Path(f"/proc/self/{name}").read_bytes().rstrip(b"\0").decode().split("\0")


def main(arguments: Sequence[str]) -> int:
    """Write, and do what the first argument asks for."""
    default_entry_points(Settings(), Environment())
    chance = {"random": random.random(), "order": hash("order")}
    print(json.dumps({"state": state(), "modules": sorted(sys.modules), **chance}))
    atexit.register(print, "last words")  # not flushed, but by an orderly end
    match arguments[0]:
        case "three":
            return 3
        case "leave":
            sys.exit("a reason")
        case "raise":
            raise ZeroDivisionError
        case "stay":
            sys.stdout.flush()
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
