"""Delayed records of a topic: lists of pending ones, and changes of single ones (docs/delay.md)."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from laminar.client.delivery_time import Delay, DeliverAt, span_ms, time_ms
from laminar.client.errors import ConfigError
from laminar.client.net.session import Session, topic_path

_PAGE = 1000
# From the year 1 to the year 9999.
_LONGEST_MS = 315_537_897_600_000
# Of spans of this length few are between 1970 and 9999.
_ALL_MS = 366 * 86_400_000


class DelayedState(NamedTuple):
    """The state of a delayed record: ``pending``, ``published`` or ``cancelled``.

    `deliver_at` is the time when readers get the record, while it is pending; else None.
    """

    id: str
    state: Literal["pending", "published", "cancelled"]
    deliver_at: datetime.datetime | None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> DelayedState:
        """Return the state that the JSON of an answer describes."""
        at = answer.get("deliver_at")
        return cls(str(answer["id"]), answer["state"], None if at is None else _moment(at))


class DelayedRecord(NamedTuple):
    """A delayed record that is pending: `partition` stores it, and readers get it at `deliver_at`."""

    id: str
    partition: int
    deliver_at: datetime.datetime
    value_bytes: int
    key: bytes | None
    tag: str | None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> DelayedRecord:
        """Return the record that one row of a list describes."""
        key = answer.get("key")
        raw = base64.b64decode(answer["key_base64"]) if "key_base64" in answer else None
        return cls(
            id=str(answer["id"]),
            partition=int(answer["partition"]),
            deliver_at=_moment(answer["deliver_at"]),
            value_bytes=int(answer["value_bytes"]),
            key=raw if key is None else str(key).encode(),
            tag=answer.get("tag"),
        )


class DelayedCount(NamedTuple):
    """The number of pending records due in the span of time from `at` on, and the bytes of their values."""

    at: datetime.datetime
    records: int
    bytes: int


class DelayedQuestions:
    """The HTTP requests about the delayed records of one topic: state, cancel, move, list, count."""

    def __init__(self, session: Session, topic: str) -> None:
        self._session = session
        self._path = f"{topic_path(topic)}/delayed"

    async def ask(self, id: str, *, timeout_s: float | None = None) -> DelayedState:
        """Return the state of the delayed record with this id."""
        return DelayedState.from_answer(await self._session.get_json(self._of(id), timeout_s=timeout_s))

    async def cancel(self, id: str, *, timeout_s: float | None = None) -> DelayedState:
        """Cancel a delayed record; return its state after that."""
        answer = await self._session.call("DELETE", self._of(id), timeout_s=timeout_s)
        return DelayedState.from_answer(answer.json())

    async def move(
        self, id: str, deliver_at: DeliverAt | Literal["now"], *, timeout_s: float | None = None
    ) -> DelayedState:
        """Change the delivery time of a delayed record; return its state after that."""
        at = deliver_at if deliver_at == "now" else time_ms(deliver_at)
        answer = await self._session.call(
            "PATCH",
            self._of(id),
            body=msgspec.json.encode({"deliver_at": at}),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout_s,
        )
        return DelayedState.from_answer(answer.json())

    async def page(
        self, asked: Mapping[str, str], after: str | None
    ) -> tuple[list[DelayedRecord], str | None]:
        """Return a page of the pending records, and the `after` of the next page; None at the end."""
        query = {**asked, "limit": str(_PAGE)} | ({} if after is None else {"after": after})
        answer = await self._session.get_json(f"{self._path}?{urlencode(query)}")
        return [DelayedRecord.from_answer(each) for each in answer["records"]], answer.get("next")

    async def count(self, asked: Mapping[str, str], bucket: Delay | None) -> list[DelayedCount]:
        """Count the pending records by spans of time, each `bucket` long; without it in one count."""
        bucket_ms = _ALL_MS if bucket is None else span_ms(bucket, field="bucket", limit_ms=_LONGEST_MS)
        answer = await self._session.get_json(
            f"{self._path}?{urlencode({**asked, 'bucket_ms': str(bucket_ms)})}"
        )
        found = [
            DelayedCount(_moment(each["at"]), int(each["records"]), int(each["bytes"]))
            for each in answer["buckets"]
        ]
        if bucket is None and found:
            return [
                DelayedCount(
                    found[0].at, sum(each.records for each in found), sum(each.bytes for each in found)
                )
            ]
        return found

    def _of(self, id: str) -> str:
        if not isinstance(id, str):
            raise ConfigError(
                "the id of a delayed record is text; a receipt with an offset has none",
                code="invalid",
                field="id",
                value=id,
            )
        return f"{self._path}/{quote(id, safe='')}"


def asked_of(
    start: DeliverAt | None, end: DeliverAt | None, key: str | bytes | None = None
) -> dict[str, str]:
    """Return the query parameters that select records of `key`, due from `start` to before `end`."""
    asked: dict[str, str] = {}
    if start is not None:
        asked["from"] = str(time_ms(start))
    if end is not None:
        asked["to"] = str(time_ms(end))
    if key is not None:
        asked["key"] = key if isinstance(key, str) else key.decode()
    return asked


def _moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
