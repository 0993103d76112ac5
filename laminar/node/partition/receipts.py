"""Receipts of appends, and the futures that are resolved with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from laminar.http.api.problems import Problem
from laminar.wire.delayed import id_of


class Window(NamedTuple):
    """What is acknowledged in a partition, all of it at one moment.

    Up to entry `last_index`, before the offset `end`, everything is committed and has the copies that its
    topic asks for. `term` is this replica's; `voters` is over how many the partition is replicated.
    """

    term: int
    last_index: int
    end: int
    voters: int


@dataclass(slots=True)
class Receipt:
    """The place of the records of one append: their first offset and their count.

    `delayed` is the number of the first, if readers get them later (`delayed_records`): they have no offset.
    Then `due_ms` are their times, in order.
    `duplicate`: they were appended by an earlier request, of which this one was a repetition. `window` is
    that of the moment in which the append was acknowledged; None before that, and for what waits for no
    copies.
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
        """The ids of the records, if they are delayed, in order."""
        if self.delayed is None:
            return []
        return [str(id_of(self.delayed + row, due_ms)) for row, due_ms in enumerate(self.due_ms)]


# The appends that one batch is made of, in the order of their records, with the number of records of each.
Appends: TypeAlias = Sequence[tuple[asyncio.Future[Receipt], int]]


@dataclass(slots=True)
class Waiter:
    """An append that waits for the commit of its entry; with `copied` also for its topic's `min_replicas`.

    `term` is the term that the entry was proposed in, `since_s` the loop's time at that moment.
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
