"""Questions about delayed records of one partition, each answered by the partition's leader.

Each may be repeated: the answer shows whether a change was already made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from heapq import nsmallest
from typing import Final, TypeVar

import msgspec

from laminar.http.api.deadlines import FORWARDED_STEP_S
from laminar.http.api.documents.delayed import MAX_BUCKETS
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import EntriesTrimmed, StorageError
from laminar.node.api.common.forwarding import requester_for
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.delay.contents import Due, value_bytes, written_ms
from laminar.node.delay.publisher import Publisher, State
from laminar.node.delay.publishers import Publishers
from laminar.node.partition.partition import Partition
from laminar.node.trace.ring import Who
from laminar.node.transport.transport import Peer

_T = TypeVar("_T")

LIST_S: Final = 60.0
"""How long a leader may take for a list: it may have to read every entry with pending records."""


class DelayedQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Request for the state of a delayed record; with `due_ms` change its time first (-1: cancel it).

    `number` and `was_ms` are the number and the time in the record's id; times in ms.
    """

    topic: str
    partition: int
    number: int
    was_ms: int
    due_ms: int | None = None


class DelayedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The state of a delayed record, before the change if there is one. `due_ms` is a pending record's time.

    The leader remembers cancellations only for a while: a record due up to `forgotten_ms` with the state
    "published" may have been cancelled.
    """

    state: str
    due_ms: int = 0
    forgotten_ms: int = -1


class DelayedList(msgspec.Struct, frozen=True, array_like=True):
    """Request to list pending records with `from_ms` <= time < `to_ms`, at most `limit`.

    The list begins after the record `after` (time, number); `key` selects only records with this key. With
    `bucket_ms` records are counted in spans of this length instead.
    """

    topic: str
    partition: int
    from_ms: int
    to_ms: int
    after: tuple[int, int]
    limit: int
    key: bytes | None = None
    bucket_ms: int = 0


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A pending record in a list: its time, number, the time in its id (ms), size of its value, key, tag."""

    due_ms: int
    number: int
    was_ms: int
    value_bytes: int
    key: bytes | None
    tag: str | None


class DelayedListing(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `DelayedList`: pending records in order of time, or counts.

    `buckets` has, by the beginning (ms) of each span, the number of records and the bytes of their values.
    """

    records: list[Listed] = []
    buckets: dict[int, tuple[int, int]] = {}


class DelayedSteps:
    """Sends requests about delayed records to partitions' leaders, and answers for partitions led here."""

    def __init__(self, publishers: Publishers, leaders: LeaderCall) -> None:
        self._publishers = publishers
        self._leaders = leaders

    async def ask(self, question: DelayedQuestion) -> DelayedAnswer:
        """Return the state of a record from the leader, which makes the change if one is asked for.

        Raises `Problem`.
        """
        return await self._leaders.ask(
            "delayed", question, DelayedAnswer, here=self._answer, policy=STEP, timeout_s=FORWARDED_STEP_S
        )

    async def listing(self, asked: DelayedList) -> DelayedListing:
        """Return the list of pending records, or their counts, from the leader. Raises `Problem`."""
        return await self._leaders.ask(
            "delayed_list", asked, DelayedListing, here=self._list, policy=STEP, timeout_s=LIST_S
        )

    async def on_delayed(self, peer: Peer, payload: bytes) -> DelayedAnswer:
        """Answer another shard with the state of a delayed record of a partition that this shard leads."""
        question = msgspec.msgpack.decode(payload, type=DelayedQuestion)
        return await self._answer(self._leaders.led_here(question.topic, question.partition), question)

    async def on_delayed_list(self, peer: Peer, payload: bytes) -> DelayedListing:
        """Answer another shard with the pending records of a partition that this shard leads."""
        asked = msgspec.msgpack.decode(payload, type=DelayedList)
        return await self._list(self._leaders.led_here(asked.topic, asked.partition), asked)

    async def _answer(self, partition: Partition, question: DelayedQuestion) -> DelayedAnswer:
        publisher = self._publishers.of(partition)
        who = None if question.due_ms is None else requester_for(partition)
        return await _reading(self._changed(publisher, question, who))

    async def _changed(
        self, publisher: Publisher, question: DelayedQuestion, who: Who | None
    ) -> DelayedAnswer:
        number, was_ms = question.number, question.was_ms
        written = await publisher.written_ms(number)
        if written is not None and written != was_ms:
            return DelayedAnswer(State.UNKNOWN.value)
        if question.due_ms is not None:
            state = await publisher.change(number, question.due_ms, was_ms=was_ms, who=who)
            return DelayedAnswer(state.value, question.due_ms, publisher.delayed.forgotten_ms)
        state = await publisher.state(number)
        moved = publisher.delayed.moved.get(number)
        due_ms = was_ms if moved is None else moved.due_ms
        return DelayedAnswer(state.value, due_ms, publisher.delayed.forgotten_ms)

    async def _list(self, partition: Partition, asked: DelayedList) -> DelayedListing:
        publisher = self._publishers.of(partition)
        return await _reading(_listing(publisher, asked))


async def _reading(work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which reads entries. Raises 500 `damaged` if one cannot be read."""
    try:
        return await work
    except StorageError as error:
        raise Problem("damaged", str(error), outcome="not_applied") from error


async def _listing(publisher: Publisher, asked: DelayedList) -> DelayedListing:
    """List or count pending records; yield to the event loop after each entry that is read."""
    found: list[tuple[Due, Listed]] = []
    buckets: dict[int, tuple[int, int]] = {}
    table = publisher.delayed
    moved = {each.place.entry for each in table.moved.values()}
    for held in list(table.batches.values()):
        if (held.first_due_ms >= asked.to_ms or held.last_due_ms < asked.from_ms) and held.index not in moved:
            continue
        await asyncio.sleep(0)
        if held.index not in table.batches:
            continue  # its last records were published meanwhile, or copied
        try:
            batch = await publisher.contents.batch(held.index)
            in_span = await publisher.contents.due(held, from_ms=asked.from_ms, before_ms=asked.to_ms)
        except EntriesTrimmed:
            if held.index in table.batches:
                raise
            continue
        keys, tags = batch.keys, batch.tags
        due = [
            each
            for each in in_span
            if (each.due_ms, each.number) > asked.after
            and (asked.key is None or (keys is not None and keys[each.place.row] == asked.key))
        ]
        if asked.bucket_ms:
            _count(buckets, asked.bucket_ms, due, value_bytes(batch))
            if len(buckets) > MAX_BUCKETS:
                break  # the answer is refused
            continue
        for each in nsmallest(asked.limit, due):
            row = each.place.row
            found.append(
                (
                    each,
                    Listed(
                        each.due_ms,
                        each.number,
                        written_ms(batch, row),
                        len(batch.value(row)),
                        keys[row] if keys is not None else None,
                        tags[row] if tags is not None else None,
                    ),
                )
            )
        found = nsmallest(asked.limit, found, key=lambda each: each[0])
    return DelayedListing([listed for _, listed in found], buckets)


def _count(buckets: dict[int, tuple[int, int]], span_ms: int, due: list[Due], sizes: list[int]) -> None:
    """Add the numbers of records, and the bytes of their values, to the counts of their spans."""
    counts: dict[int, int] = {}
    found: dict[int, int] = {}
    for due_ms, _, place in due:
        span = due_ms // span_ms
        counts[span] = counts.get(span, 0) + 1
        found[span] = found.get(span, 0) + sizes[place.row]
    for span, count in counts.items():
        before = buckets.get(span * span_ms, (0, 0))
        buckets[span * span_ms] = (before[0] + count, before[1] + found[span])
