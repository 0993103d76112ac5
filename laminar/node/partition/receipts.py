"""Receipts of appends, and the futures that are resolved with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from laminar.http.api.problems import Problem
from laminar.wire.delayed import id_of


class Window(NamedTuple):
    """The end of what is acknowledged in a partition, as of one moment.

    Every entry up to `last_index`, and so every record before the offset `end`, is committed and on the
    topic's `min_replicas` replicas. `term` is the term of this leader, `voters` the number of voters.
    """

    term: int
    last_index: int
    end: int
    voters: int


@dataclass(slots=True)
class Receipt:
    """The result of one append: the partition, the first offset and the count of its records.

    Delayed records have no offset yet: `delayed` is the number of the first one (`delayed_records`), and
    `due_ms` are their delivery times, in order. `duplicate` is True if an earlier request appended the
    records and this one was a repetition of it. `window` is what was acknowledged in the partition at the
    moment of the acknowledgement; None before that, and for appends that do not wait for `min_replicas`.
    """

    partition: int
    offset: int
    count: int
    duplicate: bool = False
    delayed: int | None = None
    due_ms: Sequence[int] = field(default=(), compare=False)
    window: Window | None = field(default=None, compare=False)

    @property
    def delayed_ids(self) -> list[str]:
        """The ids of the records in order, if they are delayed; else empty."""
        if self.delayed is None:
            return []
        return [str(id_of(self.delayed + row, due_ms)) for row, due_ms in enumerate(self.due_ms)]


# The appends that one batch is made of, in the order of their records, with the number of records of each.
Appends: TypeAlias = Sequence[tuple[asyncio.Future[Receipt], int]]


@dataclass(slots=True)
class Waiter:
    """An append that waits for the commit of its entry; with `copied` also for its topic's `min_replicas`.

    `term` is the term in which the entry was proposed, `since_s` the loop's time at which the wait began.
    """

    future: asyncio.Future[Receipt]
    receipt: Receipt
    term: int
    since_s: float
    copied: bool = False

    def acknowledge(self, window: Window | None) -> None:
        """Resolve the append's future with its receipt, unless it is resolved already."""
        if not self.future.done():
            self.receipt.window = window
            self.future.set_result(self.receipt)


def fail(future: asyncio.Future[Receipt], problem: Problem) -> None:
    """Resolve `future` with `problem`, unless it is resolved already."""
    if not future.done():
        future.set_exception(problem)
