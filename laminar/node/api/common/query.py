"""Query parameters: whole numbers read from a request's query, and links to the next page of a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlencode

from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request

_WHOLE = re.compile(r"-?[0-9]{1,16}\Z", re.ASCII)


def integer(request: Request, name: str, default: int, *, maximum: int, minimum: int = 0) -> int:
    """Return the query parameter `name` as a whole number, or `default` if the query has none.

    Raises:
        Problem: 422 if it is no whole number, or not between `minimum` and `maximum`.
    """
    text = request.query.get(name)
    if text is None:
        return default
    # int() would also take signs, spaces, underscores and the digits of every script.
    if not _WHOLE.match(text):
        raise Problem("invalid", f"{name} must be a whole number", field=name, value=text, limit=maximum)
    value = int(text)
    if not minimum <= value <= maximum:
        raise Problem(
            "invalid",
            f"{name} must be between {minimum} and {maximum}",
            field=name,
            value=value,
            limit=maximum,
        )
    return value


def one_of(request: Request, name: str, values: Sequence[str]) -> str:
    """Return the query parameter `name`, one of `values`; the first of these if the query has none.

    Raises:
        Problem: 422 if it is none of `values`.
    """
    text = request.query.get(name, values[0])
    if text not in values:
        known = ", ".join(values)
        raise Problem("invalid", f"{name} must be one of {known}", field=name, value=text, limit=known)
    return text


def flag(request: Request, name: str) -> bool:
    """Return whether the query parameter `name` is ``true``; False if the query has none.

    Raises 422 if it is neither ``true`` nor ``false``.
    """
    return one_of(request, name, ("false", "true")) == "true"


def next_link(path: str, **query: str | int) -> tuple[str, str]:
    """Return the `Link` header for a list's next page; empty values of `query` are left out."""
    given = urlencode({name: value for name, value in query.items() if value != ""})
    return ("Link", f'<{path}?{given}>; rel="next"')
