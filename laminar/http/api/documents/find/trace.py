"""The trace of records: what happened to them, and who did it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from laminar.http.api.documents.find.search import Left, NotSearched, Searched
from laminar.http.api.documents.shared import Answer, Count, Time


class TraceEvent(Answer):
    """What happened to a record, and who did it; docs/trace.md lists the words of `event`.

    `group`: id of the partition. `entry`: Raft index of the entry that says so. `principal`, `address` and
    `node`: who asked, from where, and which node; without the first two the cluster did it by itself.
    `parent_id`: of the record's `traceparent`.
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
    """The events that one request found, by time, and how far it looked. `after` null: that is all."""

    events: list[TraceEvent]
    searched: Searched
    left: Left
    not_searched: list[NotSearched]
    after: str | None
