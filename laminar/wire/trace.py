"""Events of the trace, which nodes write into the topic `_trace`, and the W3C header `traceparent`.

The value of each record of `_trace` is one `TraceRecord` as JSON: an event of some other record. The event's
key names that record (`event_key`), its trace id is that record's, and its header `key` has that record's
key.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, get_args

import msgspec

EventName = Literal[
    "appended",
    "scheduled",
    "published",
    "cancelled",
    "delivered",
    "acked",
    "nacked",
    "extended",
    "timed_out",
    "released",
    "dead",
    "replayed",
    "dropped",
]
EVENTS: Final = get_args(EventName)

TRACED: Final = r"^(off|all|sampled|0\.[0-9]{1,6})$"
"""What the setting `trace` may be: the records that have events in the trace."""

TRACEPARENT: Final = "traceparent"
"""The header of W3C Trace Context, of requests and of records."""
KEY_HEADER: Final = "key"
"""The header of a record of `_trace` that has the key of the record it is about."""

_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.DOTALL
)


class TraceParent(NamedTuple):
    """The content of a `traceparent`: trace id, span id (8 bytes), and whether the trace is sampled."""

    trace_id: bytes
    parent_id: bytes
    is_sampled: bool


def parse_traceparent(text: str) -> TraceParent | None:
    """Return the content of a `traceparent`; None if it is malformed and, as W3C demands, to be ignored."""
    found = _TRACEPARENT.match(text)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return TraceParent(bytes.fromhex(found[2]), bytes.fromhex(found[3]), bool(int(found[4], 16) & 1))


def event_key(group: bytes, offset: int) -> str:
    """Return the key of the events about the record at an offset of the partition with this group id."""
    return f"{group.hex()}/{offset}"


def delayed_key(group: bytes, number: int) -> str:
    """Return the key of the events about a delayed record before it is published; `number` is its number."""
    return f"{group.hex()}/delayed/{number}"


class TraceRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a record, and the client that caused it; a reader ignores unknown members.

    `principal`, `address` and `node` are the client, its address, and the node that it asked. If the cluster
    itself was the cause, the first two are empty and `node` is the leader's.
    """

    event: str
    at: str
    """The time of the entry that says so, as in RFC 3339."""
    topic: str
    partition: int
    group: str
    """Id of the partition, in hexadecimal: of a topic created again it is another one."""
    entry: int
    """Raft index of the entry; of an extension, which is none, the last one that was committed."""
    offset: int | None = None
    delayed: str | None = None
    """Of a delayed record: the partition that took it and the count there, from its id."""
    channel: str | None = None
    delivery: int | None = None
    attempt: int | None = None
    due: str | None = None
    reason: str = ""
    key: str | None = None
    key_base64: str | None = None
    """The record's key if it is no UTF-8."""
    trace_id: str | None = None
    parent_id: str | None = None
    """Of the record's `traceparent`: the span that appended it, in hexadecimal."""
    principal: str = ""
    address: str = ""
    member: str = ""
    """The producer's id, if it has one."""
    node: str = ""
