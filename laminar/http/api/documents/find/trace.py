"""Documents of the trace: the events of traced records, each with the client that caused it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from laminar.http.api.documents.find.search import Left, NotSearched, Searched
from laminar.http.api.documents.shared import Answer, Count, Time


class TraceEvent(Answer):
    """An event of a record, and the client that caused it; docs/trace.md lists the words of `event`.

    `group` is the id of the partition, and `entry` the Raft index of the entry that records the event.
    `principal` is the client, `address` its address, and `node` the node to which it sent the request; the
    first two are left out if the cluster itself caused the event. `parent_id` is that of the record's
    `traceparent` header.
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
    """The events that one request found, in order of time, and how far it searched.

    To continue the search, pass `after`; it is null if everything was searched.
    """

    events: list[TraceEvent]
    searched: Searched
    left: Left
    not_searched: list[NotSearched]
    after: str | None
