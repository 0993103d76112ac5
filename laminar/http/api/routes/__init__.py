"""The table of routes: it maps a method and a path to the name of an operation.

The node maps operation names to handlers. OpenAPI and `/docs` are made from the same rows, which name the
types of parameters, bodies and answers. The rows are in a module for each subject, and `table` joins them;
`route` has the class of a row; `matching` finds the row of a request.
"""

from __future__ import annotations

from laminar.http.api.routes.matching import Match, check_query, match, match_segments
from laminar.http.api.routes.route import Body, Reply, Route
from laminar.http.api.routes.table import BODIES, NEEDS, ROUTES

__all__ = [
    "BODIES",
    "NEEDS",
    "ROUTES",
    "Body",
    "Match",
    "Reply",
    "Route",
    "check_query",
    "match",
    "match_segments",
]
