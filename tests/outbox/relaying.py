"""A relay in a process of its own, killed by itself where it is said.

python -m tests.outbox.relaying URL TOPIC DRIVER PLACE [STEP COUNT]: with a step, SIGKILL comes the COUNTth
time that it is reached. Without one it runs until it is killed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import laminar
from laminar.client.sync.producer import Producer
from laminar.outbox import Relay
from laminar.outbox.databases import Database
from laminar.outbox.table import OutboxTable
from tests.outbox.applications import DRIVERS, connect_to

# By step, what is called next there: a class, its method, and whether the end is before or behind it.
STEPS: dict[str, tuple[type, str, bool]] = {
    "begun": (OutboxTable, "begin", False),
    "claiming": (OutboxTable, "_change", False),
    "claimed": (OutboxTable, "next_claim", False),
    "read": (OutboxTable, "rows", False),
    "sending": (Producer, "send", False),
    "sent": (Producer, "wait", True),
    "durable": (Producer, "wait", False),
    "deleting": (OutboxTable, "_delete", False),
    "connected": (Database, "try_lock", False),
}


def kill_at(step: str, count: int) -> None:
    kind, name, before = STEPS[step]
    original: Callable[..., Any] = getattr(kind, name)
    left = count

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if before and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, name, counted)


def load_before_fork() -> None:
    """Load what a relay loads when it begins (`tests/warm_start.py`)."""
    importlib.import_module("laminar.client.sync.client")
    for driver in DRIVERS:
        importlib.import_module("pg8000.dbapi" if driver == "pg8000" else driver)


def main(arguments: Sequence[str]) -> None:
    url, topic, driver, place, *at = arguments
    step, count = at or ("", "1")
    if step:
        kill_at(step, int(count))
    with laminar.connect(url, timeout=60) as client:
        said = False

        def connect() -> Any:
            nonlocal said
            # Within `run`, which handles SIGTERM by now.
            if not said:
                said = True
                print("running", flush=True)
            return connect_to(driver, place)

        Relay(connect, "outbox", client.topic(topic), "relay", max_rows=10, poll=0.02).run()


if __name__ == "__main__":
    main(sys.argv[1:])
