"""The table of routes: method and path to the name of an operation.

The node maps operation names to handlers; OpenAPI and `/docs` are built from
the same rows. HEAD is answered wherever GET is. Matching is a walk over the
path's segments, already percent-decoded, so that a topic can't smuggle a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from laminar.http.api.names import check_name
from laminar.http.api.problem_response import problem_of
from laminar.http.api.problems import Problem
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.request_head import split_path

# Larger numbers than any partition's or offset's are refused before anything computes with them.
_NUMBER: Final = re.compile(r"(?:0|[1-9][0-9]{0,15})\Z", re.ASCII)


class Body(Enum):
    """The kind of body that an operation reads."""

    NONE = "none"
    JSON = "json"  # a document of ours
    RECORDS = "records"  # of any type; those of Laminar are read


class Route(NamedTuple):
    """A row: `template` has its parameters in braces; `query` names what the operation reads of it."""

    method: str
    template: str
    operation: str
    summary: str
    query: tuple[str, ...] = ()
    body: Body = Body.NONE


class Match(NamedTuple):
    """The operation that a request asks for, and its parameters."""

    operation: str
    params: dict[str, str]


_T: Final = "/v1/topics/{topic}"
_P: Final = _T + "/partitions/{partition}"
_S: Final = "/v1/sinks/{sink}"

_FETCH_QUERY: Final = (
    "offset",
    "since",
    "to",
    "limit",
    "max_bytes",
    "wait_ms",
    "tag",
    "read",
    "min_offset",
    "fields",
    "on_damage",
    "id",
)
_APPEND_QUERY: Final = ("key", "tag", "timestamp", "key_from", "tag_from")
_LIST_QUERY: Final = ("prefix", "limit", "after")

ROUTES: Final = (
    Route("GET", "/v1/topics", "list_topics", "List topics", _LIST_QUERY),
    Route("GET", _T, "describe_topic", "Describe a topic"),
    Route("PUT", _T, "create_topic", "Create a topic, if it isn't there yet", body=Body.JSON),
    Route("PATCH", _T, "update_topic", "Change a topic's settings by a merge patch", body=Body.JSON),
    Route("DELETE", _T, "delete_topic", "Delete a topic and its records"),
    Route(
        "GET",
        _T + "/partitions",
        "list_partitions",
        "List a topic's partitions with leaders and replicas",
        ("wait_ms", "read"),
    ),
    Route("GET", _P, "describe_partition", "Describe a partition"),
    Route("GET", _T + "/routes", "list_routes", "List the key ranges of a topic"),
    Route(
        "POST",
        _T + "/records",
        "append_to_topic",
        "Append records, to partitions chosen by key, by logical partition, or spread",
        (*_APPEND_QUERY, "logical"),
        body=Body.RECORDS,
    ),
    Route(
        "POST",
        _P + "/records",
        "append_to_partition",
        "Append records to a partition",
        (*_APPEND_QUERY, "ack"),
        body=Body.RECORDS,
    ),
    Route("GET", _P + "/records", "fetch", "Fetch records from an offset or a time", _FETCH_QUERY),
    Route(
        "DELETE",
        _P + "/records",
        "delete_records",
        "Delete the records before an offset",
        ("before", "dry_run"),
    ),
    Route(
        "POST",
        _P + "/recover",
        "recover_partition",
        "Accept the loss of what only absent replicas hold, where a partition waits for them",
        ("accept_loss",),
    ),
    Route("GET", _P + "/records/{offset}", "fetch_one", "Fetch one record's value", ("id",)),
    Route(
        "GET",
        _P + "/offsets",
        "offsets",
        "Find the offset at a time, the earliest or the latest",
        ("at", "read", "id"),
    ),
    Route(
        "GET",
        _P + "/producers/{producer}",
        "describe_producer",
        "Describe a producer's progress in a partition, or wait until its batch is durable",
        ("epoch", "sequence", "wait_ms"),
    ),
    Route(
        "PUT",
        _P + "/producers/{producer}",
        "fence_producer",
        "Begin an epoch of a producer in a partition: older ones are refused from now on",
        ("epoch",),
    ),
    Route(
        "PUT",
        _P + "/uploads/{upload}/parts/{part}",
        "upload_part",
        "Upload a part of a record that is larger than a request",
        body=Body.RECORDS,
    ),
    Route(
        "POST",
        _P + "/uploads/{upload}",
        "publish_upload",
        "Append the record whose parts were uploaded",
        (*_APPEND_QUERY, "parts", "size_bytes", "crc32c"),
        body=Body.RECORDS,
    ),
    Route("DELETE", _P + "/uploads/{upload}", "drop_upload", "Drop an upload's parts"),
    Route("GET", _P + "/digest", "digest", "Digest a replica's committed log", ("to_index",)),
    Route("GET", _T + "/cursors", "list_cursors", "List a topic's cursors", _LIST_QUERY),
    Route("GET", _T + "/cursors/{cursor}", "describe_cursor", "Describe a cursor: positions and lag"),
    Route("PUT", _T + "/cursors/{cursor}", "set_cursor", "Move a cursor, by compare-and-set", body=Body.JSON),
    Route("DELETE", _T + "/cursors/{cursor}", "delete_cursor", "Delete a cursor"),
    Route("GET", _T + "/groups/{group}", "describe_group", "Describe a group: members and cursors"),
    Route(
        "PUT",
        _T + "/groups/{group}/members/{member}",
        "renew_member",
        "Join a group or renew a member's session, and list the members",
        body=Body.JSON,
    ),
    Route("DELETE", _T + "/groups/{group}/members/{member}", "leave_group", "Leave a group"),
    Route(
        "POST",
        "/v1/producers",
        "begin_producer",
        "Get a producer's id and epoch; with a name, its previous holder is refused from now on",
        body=Body.JSON,
    ),
    Route("GET", "/v1/sinks", "list_sinks", "List sinks", _LIST_QUERY),
    Route("GET", _S, "describe_sink", "Describe a sink: its epoch, and the last batch that was committed"),
    Route(
        "POST",
        _S,
        "begin_sink",
        "Begin to drive a sink: older drivers are refused from now on",
        ("epoch", "once"),
    ),
    Route("DELETE", _S, "delete_sink", "Delete a sink: its driver is refused, and its name is free"),
    Route(
        "POST",
        _S + "/batches/{number}/stages",
        "stage",
        "Stage records of a batch for a partition: they are readable when the batch is committed",
        (*_APPEND_QUERY, "topic", "partition", "stage", "epoch"),
        body=Body.RECORDS,
    ),
    Route(
        "POST",
        _S + "/batches/{number}/pins",
        "pin_stages",
        "Keep stages of a batch in a partition, for a commit whose stages fill several requests",
        body=Body.JSON,
    ),
    Route(
        "PUT",
        _S + "/batches/{number}",
        "commit_batch",
        "Commit a batch: all its stages in all partitions, or nothing",
        body=Body.JSON,
    ),
    Route(
        "GET",
        "/v1/cluster",
        "cluster",
        "Describe the cluster, or wait for its next version",
        ("after", "wait_ms"),
    ),
    Route("GET", "/v1/nodes", "list_nodes", "List nodes"),
    Route("GET", "/v1/nodes/{node}", "describe_node", "Describe a node"),
    Route("GET", "/v1/version", "version", "Tell the server's version"),
    Route("GET", "/v1/limits", "limits", "Tell the limits of requests"),
    Route("GET", "/livez", "livez", "Tell whether the node lives"),
    Route("GET", "/readyz", "readyz", "Tell whether the node serves"),
    Route("GET", "/metrics", "metrics", "Metrics in Prometheus' text format"),
    Route("GET", "/openapi.json", "openapi", "This API as an OpenAPI document"),
    Route("GET", "/docs", "docs", "This API as a page"),
    Route("GET", "/docs/errors", "docs", "This API as a page: where the types of problems lead"),
)


@dataclass(slots=True)
class _Step:
    """A node of the tree: literal segments first, else one parameter."""

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
    """Return the operation for the path of a request target, with its parameters decoded.

    Raises:
        Problem: 404 `not_found`, 405 with `Allow`, or 422 for a topic or number that could never be one.
    """
    try:
        segments = split_path(path)
    except HttpError as error:
        raise problem_of(error) from error
    return match_segments(method, segments, path=path)


def match_segments(method: str, segments: tuple[str, ...], *, path: str) -> Match:
    """Return what `match` does, for segments already split and decoded (`Request.segments`)."""
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


BODIES: Final = {route.operation: route.body for route in ROUTES}
_QUERIES: Final = {route.operation: frozenset(route.query) for route in ROUTES}


def check_query(operation: str, query: Mapping[str, str]) -> None:
    """Refuse a parameter that the operation does not read: 422, as a typing error would go unnoticed."""
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
        if name in ("topic", "cursor", "sink", "group", "member", "upload"):
            check_name(value, field=name)
        elif name in ("partition", "offset", "number", "part") and not _NUMBER.match(value):
            raise Problem("invalid", f"{name} is a decimal number", field=name, value=value)
