"""Convert the JSON document of a search to the arguments of scans, and to places for partitions' leaders."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from laminar.http.api.documents.find import search as documents
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import parse_time
from laminar.node.api.find.places import next_number
from laminar.node.api.find.steps import Place
from laminar.node.find.where import JsonEquals, Where
from membership.records import TopicRecord

Places = Place | Mapping[int, Place]
"""One place for all partitions, or places by partition number."""


def place_in(place: Places, number: int, default: str) -> Place:
    """Return the place in one partition; `default` (earliest or latest) if `place` has none for it."""
    return place if isinstance(place, Place) else place.get(number, Place(default))


def where_of(asked: documents.Where) -> Where:
    """Return the conditions on records in the form that scans use. Raises 422 `invalid`."""
    key = None if asked.key is None else asked.key.encode()
    if asked.key_base64 is not None:
        if key is not None:
            raise _invalid("where.key", asked.key, "give one of key and key_base64")
        try:
            key = base64.b64decode(asked.key_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _invalid("where.key_base64", asked.key_base64[:80], f"not base64: {error}") from error
    json = None
    if asked.json is not None:
        json = JsonEquals(asked.json.path.split("."), asked.json.equals)
    return Where(
        key,
        None if asked.trace_id is None else bytes.fromhex(asked.trace_id),
        asked.tag,
        {name: value.encode() for name, value in (asked.headers or {}).items()},
        None if asked.contains is None else asked.contains.encode(),
        json,
    )


def places_of(asked: documents.Search, topic: TopicRecord) -> tuple[Places, Places | None]:
    """Return the places where the search begins and ends; None for no end. Raises 422 `invalid`."""
    first = _place(asked.from_, "from", topic)
    if not asked.follow:
        if asked.wait_ms:
            raise _invalid("wait_ms", asked.wait_ms, "only a search that follows waits")
        return first, _place(asked.to, "to", topic)
    if asked.to != "latest":
        raise _invalid("to", str(asked.to)[:80], "a search that follows has no end")
    if asked.order == "newest":
        raise _invalid("order", asked.order, "a search that follows begins with the oldest", limit="oldest")
    return first, None


def _place(given: str | dict[str, int], field: str, topic: TopicRecord) -> Places:
    if isinstance(given, dict):
        found = {}
        for text, offset in given.items():
            known = text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < next_number(topic)
            if not known:
                raise _invalid(
                    f"{field}.{text[:20]}", text[:80], f"topic {topic.name!r} has no such partition"
                )
            found[int(text)] = Place(offset=offset)
        return found
    if given in ("earliest", "latest"):
        return Place(given)
    return Place(time_ms=parse_time(given, field=field))


def _invalid(field: str, value: object, why: str, *, limit: str | None = None) -> Problem:
    return Problem("invalid", why, field=field, value=value, limit=limit, outcome="not_applied")
