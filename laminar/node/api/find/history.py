"""The route of a record's history (appended, given out, acknowledged ...), read from its partition's log."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Final, NoReturn

import msgspec
from msgspec import UNSET

from laminar.batch import Batch, BatchError, Header, Kind
from laminar.http.api.append_body import JSON_TYPE
from laminar.http.api.documents.find import history as documents
from laminar.http.api.parameters import OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.log.format.index_entry import UNKNOWN_KIND
from laminar.node.api.records.fetch import DIGITS, FetchRoutes
from laminar.node.find.examine import encode
from laminar.node.find.history import KINDS, Event, EventName, History, Place
from laminar.node.find.pace import Cost, Pace
from laminar.node.find.scan import SLICE_BYTES, SLICE_FRAMES
from laminar.node.partition.partition import Partition

STEP_S: Final = 2.0
MAX_TOKEN: Final = 64 * 1024
# An entry whose frame and index entry are both unreadable may be of any kind, so it counts as one of these.
_READ: Final = KINDS | {UNKNOWN_KIND}
_VALUE_BYTES: Final = 4096


class _Token(msgspec.Struct, frozen=True, array_like=True):
    group: bytes
    offset: int
    place: Place


_decoder = msgspec.msgpack.Decoder(_Token)


class HistoryRoutes:
    """The handler of the route of a record's history."""

    def __init__(self, fetch: FetchRoutes, pace: Pace) -> None:
        self._fetch = fetch
        self._pace = pace

    async def history(self, request: Request, topic: str, partition: str, offset: str) -> Response:
        """Answer GET .../partitions/{partition}/records/{offset}/history with a record's events."""
        if not DIGITS.match(offset) or int(offset) >= OFFSET_LIMIT:
            raise Problem(
                "invalid", "an offset must be a number", field="offset", value=offset, limit=OFFSET_LIMIT
            )
        read = request.query.get("read", "leader")
        if read not in ("replica", "leader"):
            raise Problem("invalid", "read must be `replica` or `leader`", field="read", value=read)
        served = await self._fetch.serve_or_pass(request, topic, partition, leader=read == "leader")
        if isinstance(served, Response):
            return served
        wanted = int(offset)
        if wanted >= served.end_offset and not served.leads:
            led = await self._fetch.past_the_end(request, served)  # this replica may just lag behind
            if isinstance(led, Response):
                return led
            served = led
        if served.leads:
            await served.reader.confirmed_end()
        if wanted >= served.end_offset:
            raise Problem(
                "no_such_record",
                f"the partition ends at {served.end_offset}",
                field="offset",
                value=wanted,
                limit=served.end_offset,
            )
        names = {number: channel.name for number, channel in served.state.channels.by_id.items()}
        text = request.query.get("after")
        if text is None:
            place, first = await _begin(served, wanted)
            history = History(wanted, place, names)
            history.events += first
        else:
            history = History(wanted, _parse(text, served, wanted), names)
        last = served.committed_index
        async with self._pace.admitted():
            await self._read(served, history, last)
        return await self._answer(served, history, last)

    async def _read(self, partition: Partition, history: History, last: int) -> None:
        """Read entries into `history` until the time is over, the answer is full, or no entry is left."""
        loop, log = asyncio.get_running_loop(), partition.log
        until_s = loop.time() + STEP_S
        while history.index < last and len(history.events) < documents.MAX_EVENTS:
            cost = Cost()
            async with self._pace.turn(cost):
                first = history.index + 1
                try:
                    first, after = await log.find_kinds(first, last, _READ)
                    if first > last:
                        history.index = last
                        return
                    stop = min(after - 1, first + SLICE_FRAMES - 1)
                    frames = await log.read_promptly(first, stop, max_bytes=SLICE_BYTES)
                    cost.bytes = sum(map(len, frames))
                    await log.in_thread(cost.bytes, history.take, frames)
                except EntriesTrimmed:
                    history.lacks(log.start.index)
                except DamagedRange as damage:
                    history.lacks(max(first, damage.last_index))
            if loop.time() >= until_s:
                return

    async def _answer(self, partition: Partition, history: History, last: int) -> Response:
        record = await _record(partition, history.offset)
        is_done = history.index >= last
        now = None
        if is_done:
            known = history.states()
            now = {}
            for number, channel in partition.state.channels.by_id.items():
                word = known.get(number, "done" if channel.next > history.offset else "waiting")
                if word != "not_theirs":
                    now[channel.name] = word
        token = None
        if not is_done:
            data = msgspec.msgpack.encode(_Token(partition.replica.group, history.offset, history.place()))
            token = base64.urlsafe_b64encode(data).decode().rstrip("=")
        rest = {
            "events": list(map(_document, history.events)),
            "now": now,
            "complete": history.is_complete,
            "left": max(0, last - history.index),
            "after": token,
        }
        body = b'{"record":%b,%b\n' % (record or b"null", msgspec.json.encode(rest)[1:])
        bounds = partition.reader.bounds()
        headers = [("Content-Type", JSON_TYPE), *self._fetch.place(partition, bounds, bounds.end)]
        return Response(200, headers, body)


async def _begin(partition: Partition, offset: int) -> tuple[Place, list[Event]]:
    """Return the place where a record's history begins, and the events in the entry that has the record."""
    log = partition.log
    try:
        index = await log.find_offset(offset)
        if index is None:
            return Place(log.start.index, False), []
        row = await log.find_index_entry(index)
    except EntriesTrimmed:
        return Place(log.start.index, False), []
    except DamagedRange as damage:
        return Place(damage.last_index, False), []
    name: EventName = "published" if row.kind == Kind.PUBLISH else "appended"
    return Place(index, True), [Event(name, index, row.append_time_ms)]


async def _record(partition: Partition, offset: int) -> bytes | None:
    """Return the record's JSON as in answers of searches; None if the record is gone or cannot be read."""
    try:
        frames = await partition.reader.frames(offset, max_bytes=1)
        batch = Batch(frames[0], verified=True)
        return await partition.log.in_thread(
            len(frames[0]),
            encode,
            partition.number,
            batch,
            offset - Header.unpack(frames[0]).base_offset,
            value_bytes=_VALUE_BYTES,
        )
    except (DamagedRange, BatchError):
        return None
    except Problem as problem:
        if problem.code != "offset_expired":
            raise
        return None


def _document(event: Event) -> documents.Event:
    return documents.Event(
        event.name,
        format_time(event.time_ms),
        event.entry,
        channel=UNSET if event.channel is None else event.channel,
        cursor=UNSET if event.cursor is None else event.cursor,
        delivery=UNSET if event.delivery is None else event.delivery,
        attempt=UNSET if event.attempt is None else event.attempt,
        due=UNSET if event.due_ms is None else format_time(event.due_ms),
        reason=event.reason or UNSET,
    )


def _parse(text: str, partition: Partition, offset: int) -> Place:
    """Return the place in a token. Raises 422 `invalid` if it is not a token of this record's history."""
    if len(text) > MAX_TOKEN:
        _refuse(text, "this is no token of a history")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        token = _decoder.decode(data)
        History(offset, token.place, {})
    except (binascii.Error, ValueError, TypeError, LookupError, msgspec.MsgspecError):
        _refuse(text, "this is no token of a history")
    if (token.group, token.offset) != (partition.replica.group, offset):
        _refuse(text, "this is the token of another record")
    if token.place.index > partition.committed_index:
        raise Problem(
            "replica_lagging",
            "this replica does not know yet what the token has read",
            field="after",
            value=token.place.index,
            limit=partition.committed_index,
            retry_after_ms=50,
        )
    return token.place


def _refuse(text: str, why: str) -> NoReturn:
    raise Problem("invalid", why, field="after", value=text[:80], outcome="not_applied")
