"""`/openapi.json` and `/docs`: the tables of routes and errors, for programs and for people.

Everything in the OpenAPI document follows from `routes`: schemas are those that msgspec makes of the structs
that handlers decode and encode, so the document cannot promise other members than the code has.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from typing import Any, Final

import msgspec

from laminar.batch import BATCH_TYPE
from laminar.http.api.append_body import (
    ARROW_TYPE,
    ENVELOPE_LINES_TYPE,
    ENVELOPES_TYPE,
    JSON_TYPE,
    NDJSON_TYPE,
)
from laminar.http.api.documents.server import ProblemDocument
from laminar.http.api.json_envelope import Envelope, Envelopes
from laminar.http.api.parameters import PATH, Parameter
from laminar.http.api.problems import LISTED, PROBLEM_TYPE
from laminar.http.api.roles import Needs
from laminar.http.api.routes import ROUTES, Body, Reply, Route
from laminar.wire.channels import PLACES_AS_TEXT, STREAM_TYPE

_NAME: Final = re.compile(r"\{(\w+)\}")
_ABOUT: Final = (
    "A replicated, partitioned log. HEAD is answered wherever GET is. Further headers, and what the formats "
    "of records mean: docs/protocol.md."
)
_BYTES: Final[dict[str, Any]] = {"type": "string", "format": "binary"}
_TEXT: Final[dict[str, Any]] = {"type": "string"}
_TEXTS: Final = (NDJSON_TYPE, ENVELOPE_LINES_TYPE, STREAM_TYPE, "text/plain", "text/html")
_PROBLEM: Final = {"$ref": "#/components/responses/Problem"}
_TOKEN, _CERTIFICATE = "token", "certificate"
_SECURITY_SCHEMES: Final = {
    _TOKEN: {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "lam_ID_SECRET",
        "description": "A token, which an admin makes with POST /v1/admin/tokens. With access=open a node "
        "asks for none.",
    },
    _CERTIFICATE: {
        "type": "mutualTLS",
        "description": "A client certificate whose subject an admin has named in POST /v1/admin/tokens.",
    },
}


_DOCS_STYLE: Final = (
    "body{font:15px/1.5 system-ui;margin:2em auto;max-width:70em;padding:0 1em}"
    "th{text-align:left}td,th{padding:.2em 1em .2em 0;vertical-align:top}"
    "tr:target{background:#ffd}"
)
_DOCS_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_DOCS_STYLE.encode()).digest()).decode()
DOCS_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_DOCS_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The policy of `docs_page`: nothing but its own style, known by its hash."""


def _ref(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _content(content: Mapping[str, type[msgspec.Struct] | None]) -> dict[str, Any]:
    """Return OpenAPI's `content` of a body: by media type, the schema of its struct, or of text or bytes."""
    found = {}
    for media_type, kind in content.items():
        if kind is not None:
            found[media_type] = {"schema": _ref(kind)}
        elif media_type == JSON_TYPE:
            found[media_type] = {"schema": {}}
        else:
            found[media_type] = {"schema": _TEXT if media_type in _TEXTS else _BYTES}
    return found


def _records() -> dict[str, Any]:
    """Return OpenAPI's `content` of an append's body: the types that Laminar knows, and any other type."""
    envelopes = {"anyOf": [_ref(Envelope), {"type": "array", "items": _ref(Envelope)}, _ref(Envelopes)]}
    plain = dict.fromkeys([JSON_TYPE, NDJSON_TYPE, ENVELOPE_LINES_TYPE, BATCH_TYPE, ARROW_TYPE, "*/*"])
    return {ENVELOPES_TYPE: {"schema": envelopes}} | _content(plain)


def _parameter(row: Parameter) -> dict[str, Any]:
    shown = {"name": row.name, "in": row.place, "description": row.description, "schema": row.schema}
    return shown | {"required": True} if row.required else shown


def _response(reply: Reply) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": reply.description}
    return shown | {"content": _content(reply.content)} if reply.content else shown


def _security(needs: Needs) -> list[dict[str, list[str]]]:
    """Return OpenAPI's security requirements of a route: a token or a certificate, with the role.

    They are empty for a public route. If one of several roles is enough, none is named, because OpenAPI would
    require all of them.
    """
    if needs.what == "public":
        return []
    roles: list[str] = [] if needs.what in ("any", "describe") else [needs.what]
    return [{_TOKEN: roles}, {_CERTIFICATE: roles}]


def _needed(needs: Needs) -> str:
    """Return a sentence for people that says which role a route needs, and on which names."""
    if needs.what == "public":
        return "Needs no token."
    if needs.what == "any":
        return "Needs a token, and no role."
    role = "one of the roles read, write, admin" if needs.what == "describe" else f"the role {needs.what}"
    names = " and ".join(f"the {name}" for name in needs.named_by) or "everything"
    return f"Needs {role} on {names}."


def _refusals(needs: Needs) -> dict[str, Any]:
    """Return OpenAPI's responses that refuse a client: 403, 429, and 401 unless the route is public."""
    names = {"403": "Forbidden", "429": "TooMuch"}
    if needs.what != "public":
        names = {"401": "Unauthorized"} | names
    return {status: {"$ref": f"#/components/responses/{name}"} for status, name in names.items()}


def _problem(description: str, **headers: str) -> dict[str, Any]:
    """Return OpenAPI's response for a problem.

    `headers` are descriptions of response headers; the names have ``_`` in place of ``-``.
    """
    shown: dict[str, Any] = {
        "description": description,
        "content": {PROBLEM_TYPE: {"schema": _ref(ProblemDocument)}},
    }
    if headers:
        shown["headers"] = {
            name.replace("_", "-"): {"description": text, "schema": _TEXT} for name, text in headers.items()
        }
    return shown


def _operation(route: Route) -> dict[str, Any]:
    path = tuple(PATH[name] for name in _NAME.findall(route.template))
    shown: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "description": _needed(route.needs),
        "security": _security(route.needs),
        "parameters": [_parameter(row) for row in (*path, *route.parameters)],
        "responses": {str(reply.status): _response(reply) for reply in route.replies}
        | _refusals(route.needs)
        | {"default": _PROBLEM},
    }
    if route.document is not None:
        required = any(field.required for field in msgspec.structs.fields(route.document))
        shown["requestBody"] = {"content": _content({JSON_TYPE: route.document}), "required": required}
    elif route.body is Body.RECORDS:
        shown["requestBody"] = {"content": _records()}
    return shown


def _schemas() -> dict[str, Any]:
    """Return the JSON schemas of all structs that routes name, by the names of the structs."""
    kinds: dict[type[msgspec.Struct], None] = {ProblemDocument: None, Envelopes: None}
    for route in ROUTES:
        named = [route.document, *(kind for reply in route.replies for kind in reply.content.values())]
        kinds |= dict.fromkeys(kind for kind in named if kind is not None)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["ProblemDocument"]["properties"]["code"]["enum"] = sorted(LISTED)
    for name, forms in PLACES_AS_TEXT.items():
        schemas["ChannelSettings"]["properties"][name]["anyOf"] += forms
    return schemas


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes, as a dict; errors are one shared response."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        if not route.template.startswith("/docs/"):  # the same page as /docs
            paths.setdefault(route.template, {})[route.method.lower()] = _operation(route)
    problems = {
        "Problem": _problem("An error (RFC 9457)."),
        "Unauthorized": _problem(
            "Nothing proves who asks: no token, or one that is not known or has expired.",
            WWW_Authenticate="`Bearer`",
        ),
        "Forbidden": _problem(
            "The principal lacks a role: `value` is the role, `limit` the name that it is missing on, empty "
            "for everything. Or a page of another site asks."
        ),
        "TooMuch": _problem(
            "A quota is used up: `field` and `limit` say which.",
            Retry_After="Seconds after which to try again.",
        ),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Laminar", "version": "v1", "description": _ABOUT, "license": {"name": "MIT"}},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": problems,
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


@lru_cache(maxsize=1)
def docs_page() -> str:
    """Return the page `/docs` as HTML: a table of the routes, and one of the errors, each with an anchor."""
    routes = "".join(
        f"<tr><td>{route.method}</td><td><code>{escape(route.template)}</code></td>"
        f"<td>{escape(route.summary)}</td><td>{escape(', '.join(route.query))}</td>"
        f"<td>{escape(_needed(route.needs).removeprefix('Needs ').rstrip('.'))}</td></tr>"
        for route in ROUTES
    )
    errors = "".join(
        f'<tr id="{row.code}"><td>{row.status}</td><td><code>{row.code}</code></td>'
        f"<td>{escape(row.title)}</td><td>{'yes' if row.retriable else 'no'}</td>"
        f"<td>{escape(row.hint)}</td></tr>"
        for row in LISTED.values()
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Laminar</title>"
        f"<style>{_DOCS_STYLE}</style>"
        "<h1>Laminar</h1><h2>Routes</h2>"
        f"<table><tr><th>method<th>path<th>what it does<th>query<th>needs{routes}</table>"
        '<p>The same as <a href="/openapi.json">OpenAPI</a>.</p><h2 id="errors">Errors</h2>'
        f"<table><tr><th>status<th>code<th>meaning<th>retry?<th>what to do{errors}</table></html>"
    )
