"""The history of one record: its append, deliveries, failures and end, as its partition's log has them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from laminar.client.net.session import Session, topic_path
from laminar.client.search import FoundRecord


class RecordEvent(NamedTuple):
    """One event of a record, such as a delivery, and its time; docs/search.md lists the words of `event`.

    `entry` is the Raft index of the log entry that records the event. `due` is the time of the record's next
    attempt; of a delivery, the time until which the consumer has the record.
    """

    event: str
    at: datetime.datetime
    entry: int
    channel: str | None
    cursor: str | None
    delivery: int | None
    attempt: int | None
    due: datetime.datetime | None
    reason: str

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> RecordEvent:
        """Return the event that one row of an answer describes."""
        due = answer.get("due")
        return cls(
            event=str(answer["event"]),
            at=datetime.datetime.fromisoformat(answer["at"]),
            entry=int(answer["entry"]),
            channel=answer.get("channel"),
            cursor=answer.get("cursor"),
            delivery=answer.get("delivery"),
            attempt=answer.get("attempt"),
            due=None if due is None else datetime.datetime.fromisoformat(due),
            reason=answer.get("reason", ""),
        )


class RecordHistory(NamedTuple):
    """The events of a record, in the order of the log, and its state.

    `now` has by channel the record's state: waiting, out (given to a consumer), aside (waits for another
    attempt), dead or done. `record` is None if retention has removed the record. `is_complete` is False if
    retention removed entries that may be about the record, or some cannot be read.
    """

    record: FoundRecord | None
    events: list[RecordEvent]
    now: Mapping[str, str]
    is_complete: bool


async def history_of(
    session: Session, topic: str, partition: int, offset: int, *, timeout_s: float | None
) -> RecordHistory:
    """Request the history of the record at `offset`, page by page, and return all of it.

    Raises:
        NotFound: there is no such record yet.
    """
    path = f"{topic_path(topic)}/partitions/{partition}/records/{offset}/history"
    events: list[RecordEvent] = []
    after: str | None = None
    while True:
        query = "" if after is None else f"?{urlencode({'after': after})}"
        answer = await session.get_json(path + query, timeout_s=timeout_s)
        events += map(RecordEvent.from_answer, answer["events"])
        after = answer["after"]
        if after is None:
            record = answer["record"]
            return RecordHistory(
                None if record is None else FoundRecord.from_answer(record),
                events,
                answer["now"],
                bool(answer["complete"]),
            )
