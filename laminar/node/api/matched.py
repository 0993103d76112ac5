"""Match a request's head to a route: its operation, the names in its path, and facts that follow from these.

The match is computed once for all requests with an equal head, which share the parsed head, and is stored
there.
"""

from __future__ import annotations

from typing import NamedTuple

from laminar.http.api.cross_site import check_body_type
from laminar.http.api.names import SYSTEM_TOPICS, TRACE_TOPIC
from laminar.http.api.parameters import GUARANTEES
from laminar.http.api.problems import Problem
from laminar.http.api.roles import ADMIN_OF_ALL, METRICS, PUBLIC
from laminar.http.api.routes import NEEDS, ROUTES, check_query, match
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.principals import Principal
from laminar.node.api.common.json_body import most_document_bytes
from laminar.node.api.find.step import MOST_ANSWER_BYTES
from laminar.node.api.records.fetch import DEFAULT_BYTES
from laminar.node.api.records.stale_routes import route_said

# By header that makes a request safe to repeat: the operations that honour it. Others refuse a request with
# it: if they ignored it, a client would repeat the request, and it would be carried out twice.
_IDEMPOTENCY_HEADERS = {
    header.name.lower(): frozenset(route.operation for route in ROUTES if header in route.parameters)
    for header in GUARANTEES
}
# The permitted changes of an internal topic: operators' decisions on its placement, and to accept a loss.
# `update_topic` may change only the number of replicas, and retention of `_audit` (`TopicRoutes.update`).
_ON_THE_SYSTEMS = frozenset(
    ("recover_partition", "update_topic", "pin_partition", "unpin_partition", "prefer_leader")
)

# Operations that change nothing, although their method is POST.
_SYSTEMS_TAKE = _ON_THE_SYSTEMS | {"search"}

# By internal topic further permitted operations: the cursors of programs that export the trace.
_TAKES_TOO = {TRACE_TOPIC: frozenset(("set_cursor", "delete_cursor"))}

# Reads whose method is POST, with the most bytes of their answers; one that waits counts like a fetch.
_READ_BY_POST = {"search": MOST_ANSWER_BYTES, "receive_jobs": DEFAULT_BYTES}

# Operations that every client may request while a topic is imported: descriptions, and to delete it.
_WHILE_IMPORTING = frozenset(
    (
        *("create_topic", "describe_topic", "delete_topic", "list_partitions", "describe_partition"),
        *("list_routes", "describe_route", "digest", "recover_partition"),
        *("pin_partition", "unpin_partition", "prefer_leader"),
    )
)


class Matched(NamedTuple):
    """The operation of a route that matches a request's head, with the names in the path."""

    operation: str
    params: dict[str, str]
    most_document_bytes: int | None
    principal: Principal | None = None
    """The principal of the head's token; None before its check, without a token or without access control."""
    is_counted: bool = False
    """Whether it counts in the rate limits of principals. Requests of operators and their monitors do not."""
    is_systems: bool = False
    """Whether only nodes may request it, because it changes an internal topic."""
    place: tuple[str, int] | None = None
    """The topic and the number of the partition that the path names, if it names one."""
    is_of_topic: bool = False
    """Whether the topic that the path names must exist."""
    waits_for_import: bool = True
    """Whether it is refused while the topic is being imported."""
    may_wait: bool = False
    """Whether the request may wait for records, or search for a long time."""
    answer_bytes: int = 0
    """The most bytes of the answer of a read by POST; 0 for other operations."""

    def check_system(self) -> None:
        """Refuse an operation on an internal topic that only nodes may carry out.

        Raises:
            Problem: 422 `invalid`.
        """
        if self.is_systems:
            topic = self.params["topic"]
            raise Problem(
                "invalid",
                f"{topic} is an internal topic and cannot be created, changed or appended to",
                field="topic",
                value=topic,
                outcome="not_applied",
            )

    def check_document(self, size: int) -> None:
        """Refuse a JSON body that is too large to be decoded on the event loop.

        Raises:
            Problem: 413 `too_large`.
        """
        most = self.most_document_bytes
        if most is not None and size > most:
            raise Problem("too_large", "the document is too large", field="body", value=size, limit=most)


def matched_of(head: RequestHead) -> Matched:
    """Return the route and parameters that match a request's head; they are computed once for each head.

    Raises:
        Problem: 400, 404, 405, 415 or 422: no route matches, or the route does not take a header or
            parameter.
    """
    if head.memo is None:
        head.memo = _match(head)
    matched: Matched = head.memo
    return matched


def _match(head: RequestHead) -> Matched:
    found = match(head.method, head.path)
    operation, params = found.operation, found.params
    for name, operations in _IDEMPOTENCY_HEADERS.items():
        if name in head.headers and operation not in operations:
            supported = ", ".join(sorted(operations))
            raise Problem(
                "invalid",
                f"{name} is not supported on this route; it is supported on: {supported}",
                field=name,
                value=head.headers[name],
            )
    route_said(head.headers)
    if head.query:
        check_query(operation, head.query)
    check_body_type(head, operation)
    topic, reads = params.get("topic"), head.method in ("GET", "HEAD")
    return Matched(
        operation,
        params,
        most_document_bytes(operation),
        is_counted=NEEDS[operation] not in (PUBLIC, METRICS, ADMIN_OF_ALL),
        is_systems=topic in SYSTEM_TOPICS
        and not reads
        and operation not in _SYSTEMS_TAKE
        and operation not in _TAKES_TOO.get(topic, ()),
        place=_place_of(topic, params.get("partition")),
        is_of_topic=topic is not None and operation != "create_topic",
        waits_for_import=operation not in _WHILE_IMPORTING,
        may_wait="wait_ms" in head.query or operation in _READ_BY_POST,
        answer_bytes=_READ_BY_POST.get(operation, 0),
    )


def _place_of(topic: str | None, number: str | None) -> tuple[str, int] | None:
    if topic is None or number is None or not (number.isascii() and number.isdigit() and len(number) <= 9):
        return None
    return topic, int(number)
