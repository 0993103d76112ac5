"""Trace events of records: what happened to them, when, and which client did it (docs/trace.md)."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from laminar.client.errors import ConfigError
from laminar.client.net.session import Session

_STEP = 1_000


class TraceEvent(NamedTuple):
    """One event of a record, such as its append; docs/trace.md lists the words of `event`.

    `entry` is the Raft index of the log entry that records the event. `principal` is the client that caused
    it, `address` the client's address, `node` the node that it asked; the first two are empty if the cluster
    itself was the cause. `due` is, depending on the event, the time until which a consumer has the record,
    that of its next attempt, or that of its delivery. `delayed` names a delayed record: the partition that
    stored it, and a count there. `parent_id` is the span that appended the record, from its ``traceparent``.
    """

    event: str
    at: datetime.datetime
    topic: str
    partition: int
    offset: int | None
    entry: int
    principal: str
    address: str
    node: str
    channel: str | None
    delivery: int | None
    attempt: int | None
    due: datetime.datetime | None
    reason: str
    key: bytes | None
    trace_id: str | None
    member: str
    delayed: str | None
    parent_id: str | None = None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> TraceEvent:
        """Return the event that one row of an answer describes."""
        due, key = answer.get("due"), answer.get("key")
        return cls(
            event=str(answer["event"]),
            at=datetime.datetime.fromisoformat(answer["at"]),
            topic=str(answer["topic"]),
            partition=int(answer["partition"]),
            offset=answer.get("offset"),
            entry=int(answer["entry"]),
            principal=answer.get("principal", ""),
            address=answer.get("address", ""),
            node=answer.get("node", ""),
            channel=answer.get("channel"),
            delivery=answer.get("delivery"),
            attempt=answer.get("attempt"),
            due=None if due is None else datetime.datetime.fromisoformat(due),
            reason=answer.get("reason", ""),
            key=key.encode() if key is not None else _bytes(answer.get("key_base64")),
            trace_id=answer.get("trace_id"),
            member=answer.get("member", ""),
            delayed=answer.get("delayed"),
            parent_id=answer.get("parent_id"),
        )


class RecordTrace(NamedTuple):
    """The trace events that were found, by time.

    `is_complete` is False if there may be more events: beyond the limit, or in a part of the topic `_trace`
    (in which the cluster keeps them) that cannot be read.
    """

    events: list[TraceEvent]
    is_complete: bool


async def trace_of(
    session: Session,
    *,
    record: str | None,
    trace_id: str | None,
    key: str | None,
    limit: int,
    timeout_s: float | None,
) -> RecordTrace:
    """Request the events of one record, or of all records with a trace id or a key.

    Raises:
        ConfigError: not exactly one of `record`, `trace_id` and `key` is given, or `limit` is below 1.
    """
    given = {name: value for name, value in _by(record, trace_id, key).items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            "give one of record, trace_id and key", code="invalid", field="record", value=", ".join(given)
        )
    if limit < 1:
        raise ConfigError(f"limit={limit}", code="invalid", field="limit", value=limit)
    events: list[TraceEvent] = []
    after: str | None = None
    is_complete = True
    while True:
        query = {**given, "limit": min(_STEP, limit)} | ({} if after is None else {"after": after})
        answer = await session.get_json(f"/v1/trace?{urlencode(query)}", timeout_s=timeout_s)
        events += map(TraceEvent.from_answer, answer["events"])
        is_complete &= not answer["not_searched"]
        after = answer["after"]
        if after is None or len(events) >= limit:
            is_complete &= after is None and len(events) <= limit
            events.sort(key=lambda each: (each.at, each.entry))
            return RecordTrace(events[:limit], is_complete)


def _by(record: str | None, trace_id: str | None, key: str | None) -> dict[str, str | None]:
    return {"record": record, "trace_id": trace_id, "key": key}


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
