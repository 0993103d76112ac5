"""Searches of a topic: the request, the records found, and the progress."""

from __future__ import annotations

import asyncio
import base64
import datetime
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from laminar.client.delivery_time import DeliverAt, time_ms
from laminar.client.errors import ConfigError, Unavailable
from laminar.client.net.session import Session, topic_path
from laminar.client.trace_id import TraceId, trace_id_bytes

Place = Literal["earliest", "latest"] | DeliverAt | Mapping[int, int]
"""An end of the log, a time of append, or offsets by partition."""

VALUE_BYTES: Final = 64 * 1024
_MOST: Final = 1_000
_WAIT_MS: Final = 5_000
_PAUSE_S: Final = 0.2


class FoundRecord(NamedTuple):
    """A record that was found. `value` is the beginning of its value; `size` is the whole size in bytes.

    `truncated` is true if the value is longer than the `value_bytes` that were requested. For a record larger
    than a batch `value` is empty.
    """

    partition: int
    offset: int
    timestamp: datetime.datetime
    key: bytes | None
    tag: str | None
    headers: Mapping[str, bytes]
    trace_id: str | None
    value: bytes
    size: int
    truncated: bool

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> FoundRecord:
        """Return the record that one row of an answer describes."""
        headers = {name: text.encode() for name, text in answer.get("headers", {}).items()}
        headers |= {name: base64.b64decode(text) for name, text in answer.get("headers_base64", {}).items()}
        return cls(
            partition=int(answer["partition"]),
            offset=int(answer["offset"]),
            timestamp=datetime.datetime.fromisoformat(answer["timestamp"]),
            key=_bytes(answer, "key"),
            tag=answer.get("tag"),
            headers=headers,
            trace_id=answer.get("trace_id"),
            value=_bytes(answer, "value") or b"",
            size=int(answer["size"]),
            truncated=bool(answer["truncated"]),
        )


class NotSearched(NamedTuple):
    """A range of offsets of a partition (`end` excluded) that was not searched, and why.

    ``damaged``: no replica that answers can read them. ``expired``: retention removed them first.
    ``unreadable``: a value that must be searched is too large.
    """

    partition: int
    start: int
    end: int
    why: str


class Search:
    """A search under way: ``async for record in search`` yields the records; attributes tell the progress.

    Each request searches for up to two seconds, and nodes keep no state: to stop, just request no more.
    """

    def __init__(self, session: Session, topic: str, asked: Mapping[str, Any], *, limit: int | None) -> None:
        self._session = session
        self._topic = topic
        self._asked = dict(asked)
        self._left_to_find = limit
        self._page: list[FoundRecord] = []
        self._moved_s = time.monotonic()
        self.is_done = False
        """Whether nothing is left: all was looked at, or `limit` records were found."""
        self.searched_records = 0
        self.searched_bytes = 0
        self.left_records = 0
        """Records that are left, in the partitions of which that is known."""
        self.left_partitions = 0
        self.not_searched: list[NotSearched] = []

    def __aiter__(self) -> AsyncIterator[FoundRecord]:
        return self

    async def __anext__(self) -> FoundRecord:
        while not self._page:
            if self.is_done:
                raise StopAsyncIteration
            self._page = (await self.next_page())[::-1]
        return self._page.pop()

    async def next_page(self) -> list[FoundRecord]:
        """Request the next step of the search; return the records found, often none. [] once `is_done`.

        Raises:
            Unavailable: nothing could be searched within the deadline, because no replica of the remaining
                partitions answers. Call again to continue.
        """
        if self.is_done:
            return []
        most = _MOST if self._left_to_find is None else min(self._left_to_find, _MOST)
        answer = (
            await self._session.call(
                "POST",
                f"{topic_path(self._topic)}/search",
                body=msgspec.json.encode(self._asked | {"limit": most}),
                headers={"Content-Type": "application/json"},
            )
        ).json()
        found = [FoundRecord.from_answer(each) for each in answer["records"]]
        skipped = [
            NotSearched(each["partition"], each["from"], each["to"], each["why"])
            for each in answer["not_searched"]
        ]
        before = self.left_records, self.left_partitions
        self._take(answer, found, skipped)
        moved = answer["searched"]["records"] > 0 or (self.left_records, self.left_partitions) != before
        if moved or self._asked.get("follow"):
            self._moved_s = time.monotonic()
        elif not self.is_done:
            await self._pause()
        return found

    def _take(
        self, answer: Mapping[str, Any], found: Sequence[FoundRecord], skipped: Sequence[NotSearched]
    ) -> None:
        self.searched_records += answer["searched"]["records"]
        self.searched_bytes += answer["searched"]["bytes"]
        self.left_records, self.left_partitions = answer["left"]["records"], answer["left"]["partitions"]
        self.not_searched += skipped
        self._asked["after"] = answer["after"]
        if self._left_to_find is not None:
            self._left_to_find -= len(found)
        self.is_done = answer["after"] is None or self._left_to_find == 0

    async def _pause(self) -> None:
        """Wait before the next request, because some partitions did not answer."""
        if time.monotonic() - self._moved_s >= self._session.timeout_s:
            self._moved_s = time.monotonic()
            raise Unavailable(
                f"{self.left_partitions} partitions of {self._topic} cannot be searched: no replica answers",
                code="no_leader",
                outcome="not_applied",
            )
        await asyncio.sleep(_PAUSE_S)


def asked_for(
    *,
    key: str | bytes | None = None,
    trace_id: TraceId | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    contains: str | None = None,
    json: tuple[str, Any] | None = None,
    partitions: Sequence[int] | None = None,
    start: Place = "earliest",
    end: Place = "latest",
    newest: bool = False,
    value_bytes: int = VALUE_BYTES,
    follow: bool = False,
) -> dict[str, Any]:
    """Return the JSON body of a search request. Raises `ConfigError` if a condition is malformed."""
    where: dict[str, Any] = {}
    if isinstance(key, str):
        where["key"] = key
    elif key is not None:
        where["key_base64"] = base64.b64encode(key).decode()
    if (trace := trace_id_bytes(trace_id)) is not None:
        where["trace_id"] = trace.hex()
    if json is not None:
        where["json"] = {"path": json[0], "equals": json[1]}
    where |= {
        name: value
        for name, value in (("tag", tag), ("headers", headers), ("contains", contains))
        if value is not None
    }
    asked: dict[str, Any] = {"where": where, "from": _place(start, "start"), "value_bytes": value_bytes}
    if partitions is not None:
        asked["partitions"] = list(partitions)
    if follow:
        return asked | {"follow": True, "wait_ms": _WAIT_MS}
    return asked | {"to": _place(end, "end"), "order": "newest" if newest else "oldest"}


def _place(place: Place, field: str) -> Any:
    if isinstance(place, Mapping):
        return {str(number): offset for number, offset in place.items()}
    if isinstance(place, str):
        if place not in ("earliest", "latest"):
            raise ConfigError(
                f"{field}: a place is earliest, latest, a time, or offsets by partition",
                code="invalid",
                field=field,
                value=place,
            )
        return place
    return str(time_ms(place))


def _bytes(answer: Mapping[str, Any], name: str) -> bytes | None:
    if f"{name}_base64" in answer:
        return base64.b64decode(answer[f"{name}_base64"])
    text = answer.get(name)
    return None if text is None else str(text).encode()
