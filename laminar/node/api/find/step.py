"""One step of a search: ask partitions, some at a time, until the time is over or the answer is full.

Each offset of the range is searched, left for the next step, or reported as not searched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from laminar.http.api.append_body import JSON_TYPE
from laminar.http.api.documents.find import search as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Response
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.services import ShardServices
from laminar.node.api.find.asked import Places as Asked
from laminar.node.api.find.asked import place_in
from laminar.node.api.find.places import UNKNOWN, Places
from laminar.node.api.find.steps import BoundsRequest, Place, ScanRequest, SearchSteps
from laminar.node.find.examine import Found, Skipped, Wanted
from laminar.node.find.scan import NO_END, Scanned, Span
from membership.records import TopicRecord

STEP_S: Final = 2.0
"""How long one request searches."""
MOST_ANSWER_BYTES: Final = 4 << 20
MOST_AT_ONCE: Final = 16
"""The most partitions that are asked at a time."""
MOST_WAITED_FOR: Final = 256
"""The most partitions that are asked at a time while all only wait for new records."""
FOLLOW_S: Final = 1.0
"""The longest wait that a shard is asked for, so that no wait lasts longer after its client has gone."""
BOUNDS_S: Final = 0.5
"""How long the leader of a partition may take to answer with the bounds of the search there."""
_GRACE_S: Final = 0.02
_PAUSE_S: Final = 0.05
_LONG_PAUSE_S: Final = 0.25


class Rest(msgspec.Struct):
    """What a step's answer has besides records: amounts searched and left, gaps, and the next token."""

    searched: documents.Searched
    left: documents.Left
    not_searched: list[documents.NotSearched]
    after: str | None


class Step:
    """One step of a search: asks partitions for a limited time, and collects records for one answer."""

    def __init__(
        self,
        services: ShardServices,
        steps: SearchSteps,
        topic: TopicRecord,
        places: Places,
        wanted: Wanted,
        first: Asked,
        end: Asked | None,
    ) -> None:
        self._services = services
        self._steps = steps
        self._topic = topic
        self._places = places
        self._wanted = wanted
        self._first = first
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + STEP_S
        self._left = deque(places.spans)
        self._found: list[Found] = []
        self._size = 0
        self._records = 0
        self._bytes = 0
        self._by_index = 0
        self._skipped: list[tuple[int, Skipped]] = []
        # By partition the nodes that were asked in vain since the search of it last advanced.
        self._tried: dict[int, set[str]] = {}
        self._damage: dict[int, tuple[int, int]] = {}
        # Partitions whose end was reached: the search only waits for new records there.
        self._at_end: set[int] = set()
        # Partitions whose leader did not answer in this step with the bounds of the search.
        self._unknown: set[int] = set()
        self._refusal: Problem | None = None
        self._moved = False

    def add_new_partitions(self) -> None:
        """Search also the partitions that were created since the search began, from their beginning."""
        for number in self._topic.numbers:
            partition = self._services.view.partition(self._topic.name, number)
            if number >= self._places.newest and partition is not None:
                self._left.append(Span(number, partition.group, 0, NO_END))
        self._places.newest = max(self._places.newest, *(n + 1 for n in self._topic.numbers))

    async def run(self, *, wait_s: float) -> None:
        """Search until the time is over, the answer is full, or nothing is left; then wait up to `wait_s`.

        It waits only if nothing was found, until one of the partitions has new records.

        Raises:
            Problem: 503 `overloaded` if no shard had room for this search.
        """
        wait_until_s = self._loop.time() + wait_s
        has_begun = False
        while self._left and not self._is_full:
            is_waiting = wait_s > 0 and all(span.number in self._at_end for span in self._left)
            now_s = self._loop.time()
            if is_waiting:
                if self._found or now_s >= wait_until_s:
                    break
            elif (now_s >= self._until_s and has_begun) or (
                not wait_s and all(span.high == NO_END and span.number in self._at_end for span in self._left)
            ):
                break
            left_s = wait_until_s - now_s if is_waiting else 0.0
            began_s, has_begun = now_s, True
            if not await self._round(wait_s=min(left_s, FOLLOW_S)):
                pause_s = _PAUSE_S
                if self._refusal is not None or (is_waiting and self._loop.time() - began_s < _PAUSE_S):
                    pause_s = _LONG_PAUSE_S
                await asyncio.sleep(min(pause_s, left_s) if is_waiting else pause_s)
        if self._refusal is not None and not self._moved:
            raise self._refusal

    @property
    def _is_full(self) -> bool:
        return len(self._found) >= self._wanted.limit or self._size >= MOST_ANSWER_BYTES

    async def _round(self, *, wait_s: float) -> bool:
        """Ask the partitions that have waited longest; return whether the search of any advanced."""
        known = [span for span in await asyncio.gather(*map(self._known, self._chosen(wait_s))) if span]
        groups: dict[str, list[Span]] = {}
        asked_of: set[int] = set()
        where: dict[str, ReplicaEndpoint | None] = {}
        for span in known:
            node, endpoint = self._replica_of(span)
            if node is None:
                self._give_up_here(span)
                continue
            place = "" if endpoint is None else endpoint.url
            groups.setdefault(place, []).append(span)
            asked_of.add(span.number)
            where[place] = endpoint
        asked = [self._ask(where[place], spans, len(groups), wait_s) for place, spans in groups.items()]
        ended = await (_first_found(asked) if wait_s else asyncio.gather(*asked))
        answered = [each for some in ended for each in some]
        names = {span.number for span, _ in answered}
        # Put back the spans of shards that were still waiting.
        self._left.extend(span for span in known if span.number in asked_of - names)
        moved = self._merge(answered)
        self._moved |= moved
        return moved

    def _chosen(self, wait_s: float) -> list[Span]:
        """Remove the spans that are asked next from those left, and return them."""
        most = MOST_WAITED_FOR if wait_s else MOST_AT_ONCE
        if all(span.number in self._unknown for span in self._left):
            self._unknown.clear()
        chosen = [span for span in self._left if span.number not in self._unknown][:most]
        taken = {span.number for span in chosen}
        self._left = deque(span for span in self._left if span.number not in taken)
        return chosen

    # -- bounds ----------------------------------------------------------------------------

    async def _known(self, span: Span) -> Span | None:
        """Return a span with its bounds; None if it cannot be searched now, or is over."""
        partition = self._services.view.partition(self._topic.name, span.number)
        if partition is None:
            if span.low != UNKNOWN and span.high != NO_END:
                self._skip(span.number, Skipped(span.low, span.high, "expired"))
            self._moved = True
            return None
        if span.low == UNKNOWN:
            request = BoundsRequest(
                self._topic.name,
                span.number,
                place_in(self._first, span.number, "earliest"),
                self._end_of(span.number),
            )
            try:
                async with asyncio.timeout_at(min(self._until_s, self._loop.time() + BOUNDS_S)):
                    answer = await self._steps.bounds(request)
            except (Problem, TimeoutError):
                span = self._named(span, request)
                if span.low == UNKNOWN:
                    self._put_back_unknown(span)
                    return None
            else:
                if answer.group != span.group:
                    self._put_back_unknown(span)
                    return None
                span = Span(span.number, span.group, answer.low, answer.high)
        if span.low == span.high:
            self._moved = True
            return None
        return span

    def _put_back_unknown(self, span: Span) -> None:
        self._unknown.add(span.number)
        self._left.append(span)

    def _end_of(self, number: int) -> Place | None:
        return None if self._end is None else place_in(self._end, number, "latest")

    def _named(self, span: Span, request: BoundsRequest) -> Span:
        """Return a span with the bounds of the request if these are offsets; else the span as it is."""
        low, end = request.first.offset, request.end
        if low is None or end is None or end.offset is None:
            return span
        return Span(span.number, span.group, low, max(low, end.offset))

    # -- replicas --------------------------------------------------------------------------

    def _replica_of(self, span: Span) -> tuple[str | None, ReplicaEndpoint | None]:
        """Return the next node to ask, and its endpoint (None for this shard); no node if all were asked."""
        topic, services, locator = self._topic.name, self._services, self._steps.locator
        tried = self._tried.get(span.number, set())
        if (topic, span.number) in services.partitions and services.node not in tried:
            return services.node, None
        leader = locator.known_leader(topic, span.number)
        others = [*([] if leader is None else [leader]), *locator.replicas(topic, span.number)]
        own = services.view.shard_url(services.node, services.number)
        for each in others:
            if each.node not in tried and each.url != own:
                return each.node, each
        return None, None

    def _give_up_here(self, span: Span) -> None:
        """Skip records that are damaged on all replicas that answer; else ask all replicas again later."""
        self._tried.pop(span.number, None)
        damage = self._damage.pop(span.number, None)
        if damage is not None:
            first, end = damage
            if self._wanted.newest:
                self._skip(span.number, Skipped(max(first, span.low), span.high, "damaged"))
                span = Span(span.number, span.group, span.low, max(first, span.low))
            else:
                end = end if span.high == NO_END else min(end, span.high)
                self._skip(span.number, Skipped(span.low, end, "damaged"))
                span = Span(span.number, span.group, end, span.high)
            self._moved = True
        if span.low != span.high:
            self._left.append(span)

    async def _ask(
        self, where: ReplicaEndpoint | None, spans: list[Span], groups: int, wait_s: float
    ) -> list[tuple[Span, Scanned]]:
        """Ask a shard to scan spans; return each span's result. It is unchanged if the shard is silent."""
        wanted = msgspec.structs.replace(
            self._wanted,
            limit=self._wanted.limit - len(self._found),
            most_bytes=max(1, (MOST_ANSWER_BYTES - self._size) // groups),
        )
        budget_s = max(0.0, self._until_s - self._loop.time())
        request = ScanRequest(self._topic.name, spans, wanted, int(budget_s * 1000), int(wait_s * 1000))
        try:
            scanned = {each.number: each for each in await self._steps.scan(where, request)}
        except Problem as problem:
            if problem.code == "overloaded":
                self._refusal = problem
            scanned = {}
        absent = {span.number: Scanned(span.number, span.low, span.high, "absent") for span in spans}
        ended = [(span, scanned.get(span.number, absent[span.number])) for span in spans]
        node = self._services.node if where is None else where.node
        for span, each in ended:
            if each.ended:
                self._tried.setdefault(span.number, set()).add(node)
                if (each.low, each.high) != (span.low, span.high):
                    self._tried[span.number] = {node}
                    self._damage.pop(span.number, None)
                if each.ended == "damaged":
                    self._damage[span.number] = each.damaged
            else:
                self._tried.pop(span.number, None)
                self._damage.pop(span.number, None)
        return ended

    # -- what was found --------------------------------------------------------------------

    def _merge(self, ended: Sequence[tuple[Span, Scanned]]) -> bool:
        """Take the records found, by append time, while there is room; put back the rest of the spans.

        Returns whether the search of any span has advanced.
        """
        taken = self._take([each for _, each in ended])
        has_moved = False
        for span, each in ended:
            low, high, number = each.low, each.high, span.number
            is_whole = taken[number] == len(each.found)
            if not is_whole:
                offset = each.found[taken[number]].offset
                low, high = (low, offset + 1) if self._wanted.newest else (offset, high)
            is_over = low == high or (high == NO_END and each.is_final and is_whole)
            skipped = [
                part for part in (_outside(part, low, high) for part in each.skipped) if part is not None
            ]
            for part in skipped:
                self._skip(number, part)
            moved = low - span.low if high == NO_END else (span.high - span.low) - (high - low)
            self._records += moved - sum(part.end - part.start for part in skipped)
            self._bytes += each.bytes
            self._by_index += each.segments_by_index
            has_moved |= moved > 0 or is_over
            if each.is_at_end and is_whole:
                self._at_end.add(number)
            else:
                self._at_end.discard(number)
            if not is_over:
                self._left.append(Span(number, span.group, low, high))
        return has_moved

    def _take(self, scans: Sequence[Scanned]) -> dict[int, int]:
        """Take records, by append time, while there is room; return the number taken of each partition."""
        taken = {each.number: 0 for each in scans}
        by_number = {each.number: each.found for each in scans}
        sign = -1 if self._wanted.newest else 1
        while True:
            heads = [
                (sign * found[taken[number]].time_ms, number)
                for number, found in by_number.items()
                if taken[number] < len(found)
            ]
            if not heads or self._is_full:
                return taken
            _, number = min(heads)
            record = by_number[number][taken[number]]
            if self._found and self._size + len(record.document) > MOST_ANSWER_BYTES:
                self._size = MOST_ANSWER_BYTES
                return taken
            taken[number] += 1
            self._found.append(record)
            self._size += len(record.document)

    def _skip(self, number: int, skipped: Skipped) -> None:
        if skipped.end > skipped.start:
            self._skipped.append((number, skipped))

    # -- the answer ------------------------------------------------------------------------

    def answer(self) -> Response:
        """Return the HTTP answer: the records found, and how far this step has searched."""
        body = b'{"records":[%b],%b\n' % (
            b",".join(each.document for each in self.found()),
            msgspec.json.encode(self.rest())[1:],
        )
        return Response(200, [("Content-Type", JSON_TYPE)], body)

    def found(self) -> list[Found]:
        """Return the records found, sorted by append time."""
        self._found.sort(key=attrgetter("time_ms"), reverse=self._wanted.newest)
        return self._found

    def rest(self) -> Rest:
        """Return the other parts of the answer: what was searched, what is left, and the next token."""
        spans = list(self._left)
        self._places.spans = spans
        left = documents.Left(
            sum(span.high - span.low for span in spans if span.low != UNKNOWN and span.high != NO_END),
            len(spans),
        )
        return Rest(
            documents.Searched(self._records, self._bytes, self._by_index),
            left,
            [
                documents.NotSearched(number, each.start, each.end, each.why)
                for number, each in _joined(self._skipped)
            ],
            self._places.token() if spans else None,
        )


async def _first_found(
    asked: Sequence[Coroutine[Any, Any, list[tuple[Span, Scanned]]]],
) -> list[list[tuple[Span, Scanned]]]:
    """Return the answers of shards that may wait: all that have arrived when the first has found records."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(scanned.found for each in done for _, scanned in each.result()):
                await asyncio.wait(tasks, timeout=_GRACE_S)
                break
        return [each.result() for each in tasks if each.done()]
    finally:
        for each in tasks:
            each.cancel()


def _outside(skipped: Skipped, low: int, high: int) -> Skipped | None:
    """Return the part of a skipped range outside of `low` to `high`, which is still left; None if empty."""
    start, end = skipped.start, skipped.end
    if high == NO_END or start < low:
        end = min(end, low)
    elif low < high:
        start = max(start, high)
    return Skipped(start, end, skipped.why) if start < end else None


def _joined(skipped: Sequence[tuple[int, Skipped]]) -> list[tuple[int, Skipped]]:
    """Return the ranges with adjacent ones joined."""
    found: list[tuple[int, Skipped]] = []
    for number, each in sorted(skipped, key=lambda row: (row[0], row[1].start)):
        if (
            found
            and found[-1][0] == number
            and found[-1][1].why == each.why
            and found[-1][1].end >= each.start
        ):
            last = found.pop()[1]
            each = Skipped(last.start, max(last.end, each.end), each.why)
        found.append((number, each))
    return found
