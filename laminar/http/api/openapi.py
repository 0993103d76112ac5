"""`/openapi.json` and `/docs`: the tables of routes and errors, for programs and for people."""

from __future__ import annotations

import re
from functools import lru_cache
from html import escape
from typing import Any

from laminar.http.api.problems import CODES, PROBLEM_TYPE
from laminar.http.api.routes import ROUTES, Body

_NAME = re.compile(r"\{(\w+)\}")


# Parameters that are whole numbers; some of the same names are texts elsewhere.
_PATH_NUMBERS = frozenset({"partition", "offset", "version", "number", "part"})
_QUERY_NUMBERS = frozenset(
    "limit max_bytes wait_ms to min_offset logical epoch sequence stage before parts size_bytes".split()
)


def _schema(name: str, numbers: frozenset[str]) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0} if name in numbers else {"type": "string"}


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of every route; errors are one shared response."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        if route.template.startswith("/docs/"):
            continue  # the same page as /docs
        operation: dict[str, Any] = {
            "operationId": route.operation,
            "summary": route.summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": _schema(name, _PATH_NUMBERS)}
                for name in _NAME.findall(route.template)
            ]
            + [
                {"name": name, "in": "query", "schema": _schema(name, _QUERY_NUMBERS)} for name in route.query
            ],
            "responses": {
                "2XX": {"description": "done"},
                "default": {"$ref": "#/components/responses/Problem"},
            },
        }
        if route.body is not Body.NONE:
            document = {"application/json": {"schema": {"type": "object"}}}
            operation["requestBody"] = {"content": document if route.body is Body.JSON else {"*/*": {}}}
        paths.setdefault(route.template, {})[route.method.lower()] = operation
    problem = {
        "type": "object",
        "required": ["type", "title", "status", "code", "outcome"],
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": sorted(CODES)},
            "outcome": {"type": "string", "enum": ["not_applied", "unknown"]},
            "detail": {"type": "string"},
            "hint": {"type": "string"},
            "field": {"type": "string"},
            "value": {},
            "limit": {},
            "retry_after_ms": {"type": "integer"},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Laminar", "version": "v1"},
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "responses": {
                "Problem": {
                    "description": "an error (RFC 9457)",
                    "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
            },
        },
    }


@lru_cache(maxsize=1)
def docs_page() -> str:
    """Return one HTML page without assets: routes, then errors, each error with its anchor."""
    routes = "".join(
        f"<tr><td>{route.method}</td><td><code>{escape(route.template)}</code></td>"
        f"<td>{escape(route.summary)}</td><td>{escape(', '.join(route.query))}</td></tr>"
        for route in ROUTES
    )
    errors = "".join(
        f'<tr id="{row.code}"><td>{row.status}</td><td><code>{row.code}</code></td>'
        f"<td>{escape(row.title)}</td><td>{'yes' if row.retriable else 'no'}</td>"
        f"<td>{escape(row.hint)}</td></tr>"
        for row in CODES.values()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Laminar</title>"
        "<style>body{font:15px/1.5 system-ui;margin:2em auto;max-width:70em;padding:0 1em}"
        "th{text-align:left}td,th{padding:.2em 1em .2em 0;vertical-align:top}"
        "tr:target{background:#ffd}</style>"
        "<h1>Laminar</h1><h2>Routes</h2>"
        f"<table><tr><th>method<th>path<th>what it does<th>query{routes}</table>"
        '<p>The same as <a href="/openapi.json">OpenAPI</a>.</p><h2 id="errors">Errors</h2>'
        f"<table><tr><th>status<th>code<th>meaning<th>retry?<th>what to do{errors}</table></html>"
    )
