"""Find the row of the table of routes that matches a request's method and path.

The path is compared segment by segment. The segments are already percent-decoded, so that an encoded slash in
a topic's name does not begin a new segment. HEAD matches every row of GET.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from laminar.http.api.names import check_name
from laminar.http.api.parameters import MAX_NUMBER
from laminar.http.api.problem_response import problem_of
from laminar.http.api.problems import Problem
from laminar.http.api.routes.route import Route
from laminar.http.api.routes.table import ROUTES
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.request_head import split_path

# Numbers with more digits than any partition or offset has are refused before they are converted.
_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,15})\Z", re.ASCII)


class Match(NamedTuple):
    """The operation that a request asks for, and the values of the path's parameters by name."""

    operation: str
    params: dict[str, str]


@dataclass(slots=True)
class _Step:
    """A node of the tree of paths, with what may follow: literal segments, or else one parameter."""

    literals: dict[str, _Step] = field(default_factory=dict)
    parameter: str = ""
    below_parameter: _Step | None = None
    operations: dict[str, str] = field(default_factory=dict)


def _grow(routes: Iterable[Route]) -> _Step:
    root = _Step()
    for route in routes:
        step = root
        for segment in split_path(route.template):
            if not segment.startswith("{"):
                step = step.literals.setdefault(segment, _Step())
                continue
            name = segment[1:-1]
            assert step.parameter in ("", name), f"{route.template}: {step.parameter} and {name}"
            step.parameter = name
            step.below_parameter = step.below_parameter or _Step()
            step = step.below_parameter
        assert route.method not in step.operations, f"{route.method} {route.template} occurs twice"
        step.operations[route.method] = route.operation
    return root


_ROOT: Final = _grow(ROUTES)


def match(method: str, path: str) -> Match:
    """Return the operation for a method and the path of a request target, with decoded parameters.

    Raises:
        Problem: 404 `not_found` for an unknown path, 405 with `Allow` for another method, or 422 for a
            parameter that cannot be a topic's name or a number.
    """
    try:
        segments = split_path(path)
    except HttpError as error:
        raise problem_of(error) from error
    return match_segments(method, segments, path=path)


def match_segments(method: str, segments: tuple[str, ...], *, path: str) -> Match:
    """Return the match of a request whose path is split and decoded already (`Request.segments`).

    Result and errors are those of `match`.
    """
    step: _Step | None = _ROOT
    params: dict[str, str] = {}
    for segment in segments:
        assert step is not None
        below = step.literals.get(segment)
        if below is None and step.parameter and segment:
            below = step.below_parameter
            params[step.parameter] = segment
        step = below
        if step is None:
            break
    if step is None or not step.operations:
        raise Problem("not_found", "there is no such path", field="path", value=path)
    operation = step.operations.get("GET" if method == "HEAD" else method)
    if operation is None:
        allowed = ", ".join(_allowed(step.operations))
        raise Problem(
            "method_not_allowed", field="method", value=method, limit=allowed, headers=[("Allow", allowed)]
        )
    _check(params)
    return Match(operation, params)


_QUERIES: Final = {route.operation: frozenset(route.query) for route in ROUTES}


def check_query(operation: str, query: Mapping[str, str]) -> None:
    """Raise 422 if `query` has a parameter that the operation does not read, such as a misspelt one."""
    for name in query:
        if name not in _QUERIES[operation]:
            known = ", ".join(sorted(_QUERIES[operation])) or "none"
            raise Problem(
                "invalid", "there is no such query parameter here", field=name, value=query[name], limit=known
            )


def _allowed(operations: Mapping[str, str]) -> list[str]:
    return sorted([*operations, "HEAD"] if "GET" in operations else operations)


def _check(params: Mapping[str, str]) -> None:
    for name, value in params.items():
        if name in ("topic", "cursor", "channel", "sink", "group", "member", "upload"):
            check_name(value, field=name)
        elif name in ("partition", "offset", "number", "part", "version"):
            if not _NUMBER.match(value):
                raise Problem("invalid", f"{name} is a decimal number", field=name, value=value)
            if name in ("number", "version") and int(value) > MAX_NUMBER:
                raise Problem("invalid", f"{name} is too large", field=name, value=value, limit=MAX_NUMBER)
