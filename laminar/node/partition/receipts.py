"""What somebody who appended waits for, and what he is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from laminar.http.api.problems import Problem


@dataclass(slots=True)
class Receipt:
    """Where records of one request lie: first offset and number."""

    partition: int
    offset: int
    count: int
    duplicate: bool = False


# Who asked for a batch, in the order of its records, and how many each gave.
Askers: TypeAlias = Sequence[tuple[asyncio.Future[Receipt], int]]


@dataclass(slots=True)
class Waiter:
    """Somebody who waits for an entry to be committed; with `copied` also for its topic's `min_replicas`."""

    future: asyncio.Future[Receipt]
    receipt: Receipt
    term: int
    since_s: float
    copied: bool = False


def fail(future: asyncio.Future[Receipt], problem: Problem) -> None:
    """Tell him, if nobody has told him anything yet."""
    if not future.done():
        future.set_exception(problem)
