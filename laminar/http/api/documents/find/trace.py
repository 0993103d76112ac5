"""Documents of the trace: the events of records, and the client of each."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from laminar.http.api.documents.find.search import Left, NotSearched, Searched
from laminar.http.api.documents.shared import Answer, Count, Time


class TraceEvent(Answer):
    """An event of a record, and its client; docs/trace.md lists the words of `event`.

    `group` is the id of the partition, `entry` the Raft index of the entry that recorded the event.
    `principal`, `address` and `node` are the client, its address, and the node that it asked; the first two
    are missing if the cluster itself was the cause. `parent_id` is that of the record's `traceparent`.
    """

    event: str
    at: Time
    topic: str
    partition: Count
    group: str
    entry: Count
    node: str
    offset: Count | UnsetType = UNSET
    delayed: str | UnsetType = UNSET
    channel: str | UnsetType = UNSET
    delivery: Count | UnsetType = UNSET
    attempt: Count | UnsetType = UNSET
    due: Time | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    parent_id: str | UnsetType = UNSET
    principal: str | UnsetType = UNSET
    address: str | UnsetType = UNSET
    member: str | UnsetType = UNSET


class TraceFound(Answer):
    """The events that one request found, by time, and how far it searched. `after` is null at the end."""

    events: list[TraceEvent]
    searched: Searched
    left: Left
    not_searched: list[NotSearched]
    after: str | None
