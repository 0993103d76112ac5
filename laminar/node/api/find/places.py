"""The rest of a search (ranges of offsets not searched yet), and the token that passes it on.

The token is the whole state of a search: no node remembers searches. It grants no rights, so it is not
signed; its content is checked like any other part of a request. These are pure functions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec

from laminar.http.api.parameters import OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.node.find.scan import NO_END, Span
from membership.records import PartitionRecord, TopicRecord

UNKNOWN: Final = -2
"""The first offset of a span whose bounds are not known yet."""
_VERSION: Final = 1


class Places(msgspec.Struct, array_like=True):
    """The spans (ranges of partitions) that a search has not searched yet, in the order of the search.

    `query` is the hash of the search's conditions. A partition with a number of `newest` or above is newer
    than all that the search has seen.
    """

    version: int
    query: bytes
    newest: int
    spans: list[Span]

    def token(self) -> str:
        """Return the token: this object as URL-safe text."""
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


_decoder = msgspec.msgpack.Decoder(Places)


def query_hash(*parts: Any) -> bytes:
    """Return the hash of a search's conditions, by which a token of another search is recognised."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).digest()[:12]


def begin(query: bytes, topic: TopicRecord, chosen: Sequence[PartitionRecord]) -> Places:
    """Return the places at the beginning of a search: all of each chosen partition, with unknown bounds."""
    spans = [Span(each.number, each.group, UNKNOWN, UNKNOWN) for each in chosen]
    return Places(_VERSION, query, next_number(topic), spans)


def next_number(topic: TopicRecord) -> int:
    """Return the number of the topic's next new partition; no partition ever had it."""
    return topic.next_partition or topic.partitions


def parse(text: str, query: bytes) -> Places:
    """Decode the token with which a client continues a search; return the places that it holds.

    Raises:
        Problem: 422 `invalid` if it is no token, or that of another search.
    """
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        places = _decoder.decode(data)
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        _refuse(text, "this is no token of a search")
    if places.version != _VERSION:
        _refuse(text, "this token is from another version of the program: begin the search again")
    if places.query != query:
        _refuse(text, "this is the token of another search: give the same topic, `where`, bounds and order")
    numbers = [span.number for span in places.spans]
    if len(set(numbers)) != len(numbers) or not all(map(_holds, places.spans)):
        _refuse(text, "this is no token of a search")
    return places


def refuse_recreated(topic: str) -> NoReturn:
    """Raise 422 `invalid`: the token is of a topic that had this name before."""
    raise Problem(
        "invalid",
        f"this token is from an earlier topic {topic!r}, which was deleted: begin the search again",
        field="after",
        outcome="not_applied",
    )


def _holds(span: Span) -> bool:
    """Return whether a span from a token is valid: its bounds are unknown, without end, or in order."""
    if span.low == UNKNOWN:
        return span.high == UNKNOWN
    if not 0 <= span.low < OFFSET_LIMIT:
        return False
    return span.high == NO_END or span.low <= span.high <= OFFSET_LIMIT


def _refuse(text: str, why: str) -> NoReturn:
    raise Problem("invalid", why, field="after", value=text[:80], outcome="not_applied")
