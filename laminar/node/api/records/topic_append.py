"""Appends to a topic: this shard cuts the records by key and appends each part at its partition's leader.

The route of the topic may change meanwhile. A part that is refused as its partition is sealed, or not open
yet, was certainly not appended: it waits for the next route in this node's view and is cut again, so a client
that knows no routes sees none change. A part whose outcome is unknown stays unknown.

A request with an idempotency key may have been sent before, by an older route. So each part of it is looked
up in the sealed partitions that held its keys while keys are remembered, oldest first, and only the rest is
appended (rule `lookup` of `docs/routes.md#producers`). The answer of a sealed partition never changes: so of
two attempts that meet, both find the same rest.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, cast

import msgspec

from laminar.batch import BATCH_TYPE, Header
from laminar.http.api.append_body import Append, records_of
from laminar.http.api.deadlines import APPEND_ATTEMPTS_S, FORWARDED_APPEND_S, LOOK_UP_PAUSE_S, ROUTE_WAIT_S
from laminar.http.api.documents import records as documents
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.http.api.roles import SYSTEM_PREFIX
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.api.common.attempts import LEADER_MOVED, merge_receipts
from laminar.node.api.common.forwarding import (
    FORWARDED,
    KEYED,
    PART,
    PLAIN,
    Exchange,
    PassedRequest,
    PassedResponse,
    decode_response,
    requester_if_traced,
)
from laminar.node.api.common.leader_call import LeaderCall, RetryPolicy, append_policy
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.background_decoding import BackgroundDecoding, source_of
from laminar.node.api.records.idempotency import KEY_TIME, BatchIdentity, build_identified, identity_of, named
from laminar.node.api.records.new_ids import NewIds
from laminar.node.fair.bulk import BULK_BYTES
from laminar.node.partition.deduplication import find_key
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import seal_uncommitted
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.idempotency_keys import AGE_MS
from laminar.node.routes.lineage import ended_ranges
from laminar.node.trace.partition_trace import asked_by
from laminar.node.trace.ring import Who
from laminar.node.transport.transport import Peer
from laminar.wire.delayed import parse_id
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key
from membership.records import KeyRange, TopicRecord

# A sealed partition is asked for a key for so long after its seal: an hour more than it remembers keys, as
# the clocks of nodes differ.
ASKED_MS = AGE_MS + 3_600_000
# Most sealed partitions that are asked at the same time.
ASKED_AT_ONCE = 64
# Bytes of requests that wait for a route in one shard. Those whose clients are gone wait too, and count
# nowhere else.
MOST_WAITING_BYTES = 64 << 20
_ROUTE_CHANGES = frozenset({"sealed", "changing"})


class LookUpRequest(msgspec.Struct, frozen=True, array_like=True):
    """To the leader of a sealed partition: what was appended with this idempotency key?

    `key_id` and `content` are the hashes of the key and of the request (`KeyEntry`), `made_ms` is when the
    key was made, as the client says.
    """

    topic: str
    partition: int
    key_id: bytes
    content: int
    made_ms: int | None = None


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The answer: the first offset and the count of the records; no records: nothing was appended.

    `delayed` is the number of the first if they are delayed, and `due_ms` are their times (`Receipt`).
    """

    offset: int = 0
    count: int = 0
    delayed: int | None = None
    due_ms: list[int] = []


class _Part(NamedTuple):
    """The records of a request that one partition gets, and their rows in its rest."""

    number: int
    rows: Sequence[int]
    records: Records


class _Whole:
    """A request: the logical partitions of its records, and what became of them.

    `rest` are the records without a receipt yet, and `places` their logical partitions; None is any.
    `without` are sealed partitions that have nothing of it. `held_bytes` is what it counts for among the
    requests that wait for a route.
    """

    def __init__(
        self,
        topic: str,
        append: Append,
        *,
        logical: int | None,
        mark: BatchIdentity | None,
        principal: str = "",
        who: Who | None = None,
    ) -> None:
        """`principal` asks: a key that is new counts for its limits, and parts that are passed on say so.

        `who` is the same for the trace; None: the topic has none.
        """
        assert append.records is not None, "parsed for a topic"
        self.topic = topic
        self.mark = mark
        self.principal = principal
        self.who = who
        self.rest = append.records
        places: list[int | None] = [None] * len(self.rest)
        if logical is not None:
            places = [logical] * len(self.rest)
        elif append.places is not None:
            places = append.places
        if mark is not None and None in places:
            # So that records without a key go to the same partition when the request is repeated.
            without = logical_of_key(mark.producer_id)
            places = [without if each is None else each for each in places]
        self.places = places
        self.receipts: list[Receipt] = []
        self.without: set[int] = set()
        self.held_bytes = 0
        self.source: object = None

    def keep(self, rows: Sequence[int]) -> None:
        """Let the rest be the records at these rows of it, in that order."""
        self.rest, self.places = self.rest.take(rows), [self.places[row] for row in rows]

    def times_in(self, places: range) -> list[int]:
        """Return the times (ms) of the records of the rest in these logical partitions, in order."""
        times = self.rest.delivery_times or [None] * len(self.rest)
        return [time or 0 for time, place in zip(times, self.places, strict=True) if place in places]

    def split(self, route: Route, spread: int) -> list[_Part]:
        """Return the rest by partition; what may be in any is in `spread`."""
        places = set(self.places)
        if len(places) == 1:
            (place,) = places
            number = spread if place is None else route.partition_of(place)
            return [_Part(number, range(len(self.rest)), self.rest)]
        rows: defaultdict[int, list[int]] = defaultdict(list)
        if None in places:
            for row, place in enumerate(self.places):
                rows[spread if place is None else route.partition_of(place)].append(row)
        else:
            for row, number in enumerate(route.partitions_of(cast("list[int]", self.places))):
                rows[number].append(row)
        if len(rows) == 1:
            return [_Part(next(iter(rows)), range(len(self.rest)), self.rest)]
        return [_Part(number, chosen, self.rest.take(chosen)) for number, chosen in rows.items()]

    def fail(self, failures: Sequence[BaseException]) -> NoReturn:
        """Raise the problem of these failures, and of what is durable all the same."""
        for failure in failures:
            if isinstance(failure, Problem):
                named(failure, self.mark)
        merge_receipts([*self.receipts, *failures], self.topic)
        raise AssertionError("no failure was given")


class TopicAppends:
    """The handler of appends to a topic, and of other shards' questions about idempotency keys."""

    def __init__(
        self,
        services: ShardServices,
        exchange: Exchange,
        leaders: LeaderCall,
        topics: TopicLookup,
        *,
        parse: Callable[[Request], Append],
        new_ids: NewIds | None = None,
    ) -> None:
        """`parse` decodes a body; `new_ids` counts those of other routes, too."""
        self._new_ids = new_ids or NewIds(services)
        self._services = services
        self._exchange = exchange
        self._leaders = leaders
        self._topics = topics
        self._parse = parse
        self._decoding = BackgroundDecoding(self.parse, lambda *job: services.off_loop(*job), services.bulk)
        self._loop = asyncio.get_running_loop()
        self._spread = 0
        self._waiting_bytes = 0

    def parse(self, request: Request) -> Append:
        """Decode a body to records, and hash their keys; call it in a thread if the body is large.

        Raises:
            Problem: 400, 413 or 422.
        """
        append = self._parse(request)
        if append.records is None:
            append.records = records_of(append.frames)
        keys = append.records.keys
        if append.places is None and keys is not None and "logical" not in request.query:
            append.places = [None if key is None else logical_of_key(bytes(key)) for key in keys]
        return append

    async def topic(self, request: Request, topic: str) -> Response:
        """Answer POST /v1/topics/{topic}/records: partitions by `logical`, else by key, else round-robin."""
        record = self._topics.record(topic)
        append = await self._decoding.parsed(request)
        logical = integer(request, "logical", -1, minimum=0, maximum=LOGICAL_PARTITIONS - 1)
        given = logical if "logical" in request.query else None
        mark = identity_of(request, scope="topic")
        who = requester_if_traced(request, self._services.node, record.settings)
        whole = _Whole(topic, append, logical=given, mark=mark, principal=owner_of(request), who=who)
        whole.source = source_of(request)
        try:
            placed = await self._place(whole)
        finally:
            self._waiting_bytes -= whole.held_bytes
        headers = [
            ("Laminar-Node", self._services.node),
            ("Laminar-Route", str(self._topics.version(topic))),
        ]
        if any(receipt.duplicate for receipt in placed):
            headers.append(("Laminar-Replayed", "1"))
        flush = policy_of(record.settings).name
        answer = documents.Appended(
            sum(receipt.count for receipt in placed),
            [
                documents.Placed(receipt.partition, receipt.offset, receipt.count)
                for receipt in placed
                if receipt.delayed is None
            ],
            documents.Durability(self._replicas(topic, placed[0].partition), flush == "commit", flush),
        )
        ids = [text for receipt in placed for text in receipt.delayed_ids]
        if ids:
            answer.scheduled = ids
        return Response.json(answer, headers=headers)

    def _replicas(self, topic: str, number: int) -> int:
        record = self._services.view.partition(topic, number)
        return len(record.replicas) if record is not None else 0

    # -- routes that change --------------------------------------------------------------------

    async def _place(self, whole: _Whole) -> list[Receipt]:
        """Append a request's records, by as many routes as come meanwhile; return the receipts.

        Raises:
            Problem: that of a part that failed; 503 `changing` when no route comes that takes all of them.
        """
        deadline = self._loop.time() + ROUTE_WAIT_S
        oldest = 0
        while True:
            try:
                route = await self._route_from(whole.topic, oldest, deadline)
                await self._look_up(whole)
            except Problem as problem:
                if problem.code == "changing":
                    self._hold(whole)
                    if await self._pause(deadline):
                        continue
                whole.fail([problem])
            if not len(whole.rest):
                return whole.receipts
            self._spread = (self._spread + 1) % len(route)
            parts = whole.split(route, route.numbers[self._spread])
            answers = await asyncio.gather(
                *(self._append_part(whole, part.number, part.records) for part in parts),
                return_exceptions=True,
            )
            whole.receipts += [answer for answer in answers if isinstance(answer, Receipt)]
            refused, failed = _sorted_out(answers)
            if not refused and not failed:
                return whole.receipts
            if failed or self._loop.time() >= deadline:
                whole.fail(failed or [_changing(whole.topic)])
            whole.keep([row for place, _ in refused for row in parts[place].rows])
            for place, why in refused:
                if why.code == "sealed":
                    whole.without.add(parts[place].number)
                    oldest = max(oldest, route.version + 1, _version(why))
            self._hold(whole)
            if oldest <= route.version:
                await self._pause(deadline)

    def _hold(self, whole: _Whole) -> None:
        """Count the rest of a request among what waits here. Raises as `_place` if that is too much."""
        if whole.held_bytes:
            return
        size_bytes = whole.rest.size_bytes + 1
        if self._waiting_bytes + size_bytes > MOST_WAITING_BYTES:
            whole.fail([_changing(whole.topic)])
        whole.held_bytes = size_bytes
        self._waiting_bytes += size_bytes

    async def _route_from(self, topic: str, oldest: int, deadline: float) -> Route:
        """Return the topic's present route when it is of this version or later.

        Raises:
            Problem: 503 `changing` when none comes before the deadline (the loop's time).
        """
        while True:
            route = self._topics.route(self._topics.record(topic))
            if route.version >= oldest:
                return route
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise _changing(topic)
            await self._services.view_change(left_s)

    async def _pause(self, deadline: float) -> bool:
        """Wait a little, or for the next view; return False, at once, after the deadline."""
        left_s = deadline - self._loop.time()
        if left_s > 0:
            await self._services.view_change(min(left_s, LOOK_UP_PAUSE_S))
        return left_s > 0

    # -- what was appended before --------------------------------------------------------------

    async def _look_up(self, whole: _Whole) -> None:
        """Take the receipts of what sealed partitions have of a request with an idempotency key.

        Raises:
            Problem: 503 when one of them cannot be asked; 422 `idempotency_key_reused`; 409 `key_expired`.
        """
        mark = whole.mark
        if mark is None:
            return
        ended = self._ended(self._topics.record(whole.topic), whole.without)
        if not ended:
            return
        ordered = sorted(place for place in set(whole.places) if place is not None)
        held = [each for each in ended if _has_any(ordered, _range(each))]
        for first in range(0, len(held), ASKED_AT_ONCE):
            asked = held[first : first + ASKED_AT_ONCE]
            answers = await asyncio.gather(*(self._found(whole.topic, each.number, mark) for each in asked))
            for each, found in zip(asked, answers, strict=True):
                whole.without.add(each.number)
                if found.count:
                    here = _range(each)
                    whole.receipts.append(
                        Receipt(
                            *(each.number, found.offset, found.count),
                            duplicate=True,
                            delayed=found.delayed,
                            due_ms=found.due_ms or whole.times_in(here),
                        )
                    )
                    whole.keep([row for row, place in enumerate(whole.places) if place not in here])

    def _ended(self, record: TopicRecord, without: set[int]) -> list[KeyRange]:
        """Return the ranges of sealed partitions that may remember a key, oldest first."""
        if not record.changes:
            return []
        since_ms = self._services.clock.wall_ms() - ASKED_MS
        return [each for each in ended_ranges(record, since_ms=since_ms) if each.number not in without]

    async def _found(self, topic: str, number: int, mark: BatchIdentity) -> Found:
        asked = LookUpRequest(topic, number, mark.producer_id, mark.sequence, mark.made_ms)
        return await self._leaders.ask(
            "look_up", asked, Found, here=_found_here, policy=_LOOK_UP, timeout_s=FORWARDED_APPEND_S
        )

    async def on_look_up(self, peer: Peer, payload: bytes) -> Found:
        """Answer another shard what a sealed partition that is led here has of a request."""
        asked = msgspec.msgpack.decode(payload, type=LookUpRequest)
        return await _found_here(self._leaders.led_here(asked.topic, asked.partition), asked)

    # -- one part ------------------------------------------------------------------------------

    async def _append_part(self, whole: _Whole, number: int, records: Records) -> Receipt:
        """Append one partition's part at the partition's leader.

        With an idempotency key it is a batch with an identity, by which the leader recognises a second
        attempt.
        """
        mark = whole.mark
        part = records if mark is None else build_identified(records, mark)
        made_ms = None if mark is None else mark.made_ms

        async def here(partition: Partition) -> Receipt:
            bulk, size_bytes = self._services.bulk, records.size_bytes
            if size_bytes <= BULK_BYTES:
                if not whole.topic.startswith(SYSTEM_PREFIX):
                    bulk.small(whole.source)
                return await appended(partition)
            async with bulk.share(whole.principal or whole.topic, size_bytes, whole.source):
                return await appended(partition)

        async def appended(partition: Partition) -> Receipt:
            if isinstance(part, Records):
                with asked_by(partition.context.trace, whole.who):
                    receipt = partition.appends.append_records(part)
                return await receipt
            # A copy: the leader stamps it in place, and there may be another attempt.
            frame = bytearray(part)
            try:
                header = Header.unpack(frame)
                self._new_ids.count_batch(partition, header, whole.principal)
                with asked_by(partition.context.trace, whole.who):
                    receipt = partition.appends.append_frame(frame, header, key_made_ms=made_ms)
            except Problem as problem:
                receipt = partition.appends.refused(problem)
            return await receipt

        async def there(where: ReplicaEndpoint) -> Receipt:
            return await self._append_remote(where, whole, number, part, made_ms)

        policy = append_policy(repeatable=mark is not None, repeats_here=True)
        return await self._leaders(whole.topic, number, here=here, there=there, policy=policy)

    async def _append_remote(
        self,
        where: ReplicaEndpoint,
        whole: _Whole,
        number: int,
        part: Records | bytearray,
        made_ms: int | None,
    ) -> Receipt:
        headers = {"content-type": BATCH_TYPE, FORWARDED: "1", "host": "forwarded", PART: PLAIN}
        if isinstance(part, Records):
            frame = part.build()
        else:
            frame = part
            headers[PART] = KEYED
            if made_ms is not None:
                headers[KEY_TIME] = str(made_ms)
        target = f"/v1/topics/{whole.topic}/partitions/{number}/records"
        address = "" if whole.who is None else whole.who.address
        passed = PassedRequest("POST", target, headers, frame, whole.principal, address)
        response = await pass_append_on(self._exchange, where, msgspec.msgpack.encode(passed))
        assert isinstance(response.body, (bytes, bytearray, memoryview))
        answer = msgspec.json.decode(response.body, type=documents.Appended)
        replayed = any(name == "Laminar-Replayed" for name, _ in response.headers)
        if answer.scheduled:
            ids = [parse_id(text) for text in answer.scheduled]
            return Receipt(
                *(number, 0, len(ids)),
                duplicate=replayed,
                delayed=ids[0].number,
                due_ms=[each.due_ms for each in ids],
            )
        placed = answer.placed[0]
        return Receipt(placed.partition, placed.offset, placed.count, duplicate=replayed)


async def pass_append_on(exchange: Exchange, where: ReplicaEndpoint, payload: bytes) -> Response:
    """Return another shard's answer to an append; raise the `Problem` that it answers."""
    passed: PassedResponse = await exchange.ask(
        where.address, "http", payload, kind=PassedResponse, timeout_s=FORWARDED_APPEND_S
    )
    response = decode_response(passed)
    if response.status >= 400:
        raise Problem.decode(passed.body, status=passed.status)
    response.headers = [*response.headers, ("Laminar-Leader", where.url)]
    return response


async def _found_here(partition: Partition, asked: LookUpRequest) -> Found:
    """Return what a sealed partition has of a request.

    Its log is final, but only a replica that knows the seal to be final has all of it: a deposed leader may
    lack the request, and one that is not sealed, or loses its seal with the power, may still get it.

    Raises:
        Problem: 503 `changing` while the seal is not known to be final; 422 `idempotency_key_reused`; 409
            `key_expired`.
    """
    if partition.context.final_seal is None:
        raise seal_uncommitted(partition.context.name)
    known = find_key(partition.context, asked.key_id, content=asked.content, made_ms=asked.made_ms)
    if known is None:
        return Found()
    if known[1].delayed is not None:
        receipt = await partition.appends.delayed_before(*known, [])
        return Found(receipt.offset, receipt.count, receipt.delayed, list(receipt.due_ms))
    receipt = await partition.appends.when_committed(*known)
    return Found(receipt.offset, receipt.count)


def _cannot_ask(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the problem of a question that found no leader: it changes nothing, however it ended."""
    if last.code in LEADER_MOVED or last.code == "outcome_unknown":
        return Problem("no_leader", last.detail, outcome="not_applied")
    return last


_LOOK_UP = RetryPolicy(
    attempts_s=APPEND_ATTEMPTS_S, pause_s=LOOK_UP_PAUSE_S, repeatable=True, conclude=_cannot_ask
)


def _sorted_out(
    answers: Sequence[Receipt | BaseException],
) -> tuple[list[tuple[int, Problem]], list[BaseException]]:
    """Return the places of the parts that a changed route refused, with why; and the other failures."""
    refused: list[tuple[int, Problem]] = []
    failed: list[BaseException] = []
    for place, answer in enumerate(answers):
        if isinstance(answer, Problem) and answer.code in _ROUTE_CHANGES and answer.outcome == "not_applied":
            refused.append((place, answer))
        elif isinstance(answer, BaseException):
            failed.append(answer)
    return refused, failed


def _version(sealed: Problem) -> int:
    return sealed.limit if isinstance(sealed.limit, int) else 0


def _has_any(ordered: Sequence[int], held: range) -> bool:
    """Return whether any of these places, which rise, is in a range."""
    found = bisect_left(ordered, held.start)
    return found < len(ordered) and ordered[found] < held.stop


def _range(held: KeyRange) -> range:
    return range(held.first, held.first + held.size)


def _changing(topic: str) -> Problem:
    return Problem(
        "changing",
        f"no route of {topic} takes these records within {ROUTE_WAIT_S:g} s",
        outcome="not_applied",
    )
