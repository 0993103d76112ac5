"""Appends to a topic: this shard splits the records by key, and appends each part at its partition's leader.

The topic's route may change meanwhile. If a part is refused because its partition is sealed, or not open yet,
it was certainly not appended: it waits for the next route in this node's view and is split again, so a client
that knows nothing of routes does not notice the change. A part whose outcome is unknown stays unknown.

A request with an idempotency key may be a repetition, whose first attempt used an older route. So each part
is first looked up in the sealed partitions that had its keys during the time for which keys are remembered,
oldest first, and only the rest is appended (rule `lookup` of `docs/routes.md#producers`). The answer of a
sealed partition never changes, so two attempts at the same time find the same rest.
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

# How long after its seal a sealed partition is asked for a key: an hour more than it remembers keys, because
# the clocks of nodes differ.
ASKED_MS = AGE_MS + 3_600_000
# The most sealed partitions that are asked at the same time.
ASKED_AT_ONCE = 64
# The most bytes of requests that wait for a route in one shard. Requests whose clients are gone wait, too,
# and are limited nowhere else.
MOST_WAITING_BYTES = 64 << 20
_ROUTE_CHANGES = frozenset({"sealed", "changing"})


class LookUpRequest(msgspec.Struct, frozen=True, array_like=True):
    """The question to a sealed partition's leader which records it has of a request with an idempotency key.

    `key_id` and `content` are the hashes of the key and of the request (`KeyEntry`). `made_ms` is the time at
    which the key was created, as reported by the client.
    """

    topic: str
    partition: int
    key_id: bytes
    content: int
    made_ms: int | None = None


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `LookUpRequest`: the first offset and the number of records; 0 if none were appended.

    For delayed records `delayed` is the number of the first, and `due_ms` has their times (as in `Receipt`).
    """

    offset: int = 0
    count: int = 0
    delayed: int | None = None
    due_ms: list[int] = []


class _Part(NamedTuple):
    """The records of a request for one partition, and their rows in the request's rest."""

    number: int
    rows: Sequence[int]
    records: Records


class _Whole:
    """The progress of a request: its records without a receipt, and the receipts of the others.

    `rest` are the records without a receipt yet, `places` their logical partitions; None for any. `without`
    are the sealed partitions that are known to have no record of the request. `held_bytes` is its size in the
    limit of requests that wait for a route.
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
        """`principal` is the client's: a new key counts for its limits, also in forwarded parts.

        `who` is the requester for the trace; None if the topic has no trace.
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
        """Reduce the rest to the records at these rows of it, in this order."""
        self.rest, self.places = self.rest.take(rows), [self.places[row] for row in rows]

    def times_in(self, places: range) -> list[int]:
        """Return the times (ms) of the records of the rest in these logical partitions, in order."""
        times = self.rest.delivery_times or [None] * len(self.rest)
        return [time or 0 for time, place in zip(times, self.places, strict=True) if place in places]

    def split(self, route: Route, spread: int) -> list[_Part]:
        """Split the rest by partition; records that may go to any partition go to `spread`."""
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
        """Raise the problem of these failures; it lists the parts that are durable all the same."""
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
        """Create the handler: `parse` decodes a body.

        `new_ids`, shared with other routes, counts new keys.
        """
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
        """Append a request's records, split again whenever the route changes; return the receipts.

        Raises:
            Problem: the problem of a part that failed; 503 `changing` if no route in time takes them all.
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
        """Count the rest of a request in the limit of waiting requests. Raises 503 if that is exceeded."""
        if whole.held_bytes:
            return
        size_bytes = whole.rest.size_bytes + 1
        if self._waiting_bytes + size_bytes > MOST_WAITING_BYTES:
            whole.fail([_changing(whole.topic)])
        whole.held_bytes = size_bytes
        self._waiting_bytes += size_bytes

    async def _route_from(self, topic: str, oldest: int, deadline: float) -> Route:
        """Wait until the topic's route has at least version `oldest`, and return it.

        Raises:
            Problem: 503 `changing` if that is not so before the deadline (the loop's time).
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
        """Wait a little, at most until the next view; return False at once if the deadline has passed."""
        left_s = deadline - self._loop.time()
        if left_s > 0:
            await self._services.view_change(min(left_s, LOOK_UP_PAUSE_S))
        return left_s > 0

    # -- what was appended before --------------------------------------------------------------

    async def _look_up(self, whole: _Whole) -> None:
        """Look up a request with an idempotency key in sealed partitions, and add the receipts found there.

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
        """Return the key ranges of sealed partitions that may remember the request's key, oldest first."""
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
        """Answer another shard with the records of a request in a sealed partition that this shard leads."""
        asked = msgspec.msgpack.decode(payload, type=LookUpRequest)
        return await _found_here(self._leaders.led_here(asked.topic, asked.partition), asked)

    # -- one part ------------------------------------------------------------------------------

    async def _append_part(self, whole: _Whole, number: int, records: Records) -> Receipt:
        """Append one partition's part at the partition's leader.

        If the request has an idempotency key, the part is sent as a batch with an identity, by which the
        leader recognises a second attempt.
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
    """Return the records of a request that a sealed partition has.

    The log of a sealed partition is final, but only a replica that knows that the seal is final may answer: a
    deposed leader may lack the request's records, and a partition whose seal is not final (not synced on a
    majority yet) may still append them.

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
    """Return the problem of a look-up that found no leader.

    A look-up changes nothing, whatever its outcome.
    """
    if last.code in LEADER_MOVED or last.code == "outcome_unknown":
        return Problem("no_leader", last.detail, outcome="not_applied")
    return last


_LOOK_UP = RetryPolicy(
    attempts_s=APPEND_ATTEMPTS_S, pause_s=LOOK_UP_PAUSE_S, repeatable=True, conclude=_cannot_ask
)


def _sorted_out(
    answers: Sequence[Receipt | BaseException],
) -> tuple[list[tuple[int, Problem]], list[BaseException]]:
    """Return the indices and problems of parts refused because the route changed; and other failures."""
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
    """Return whether any of these logical partitions (in ascending order) is in a range."""
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
