"""The table of all errors, and the exception that becomes an error's answer.

Every error that a client can see is a row of `CODES`. The problem documents (RFC 9457) that the server
answers, the list in `/docs` and `/openapi.json`, and the families by which the client chooses an exception
class are made from these rows. This module knows no transport and decides no retries; it says which errors
may be retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

PROBLEM_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "/docs/errors#"

Outcome = Literal["not_applied", "unknown"]


class ErrorCode(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of errors: a code, its meaning, and what a client may do about it.

    `retriable` tells whether the same request may succeed later; `outcome` tells whether the request may have
    been carried out; `hint` is advice for the client's user.
    """

    code: str
    status: int
    title: str
    retriable: bool = False
    hint: str = ""
    outcome: Outcome = "not_applied"
    # The client's exception class for this code (docs/clients.md#what-goes-wrong).
    family: str = "Error"
    # Whether `/docs` and `/openapi.json` list it; not while no request can lead to it yet.
    listed: bool = True


def _row(
    code: str,
    status: int,
    title: str,
    *,
    retriable: bool = False,
    hint: str = "",
    outcome: Outcome = "not_applied",
    family: str = "Error",
    listed: bool = True,
) -> ErrorCode:
    return ErrorCode(
        code=code,
        status=status,
        title=title,
        retriable=retriable,
        hint=hint,
        outcome=outcome,
        family=family,
        listed=listed,
    )


_ROWS: Final = (
    # The request itself is wrong: sending it again changes nothing.
    _row("malformed", 400, "The request cannot be read", hint="`field` names what could not be read."),
    _row(
        "bad_checksum",
        400,
        "A checksum does not match",
        hint="The bytes were changed in transit; build the batch again.",
    ),
    _row("invalid", 422, "A value is not allowed"),
    _row(
        "idempotency_key_reused",
        422,
        "The idempotency key was used with another body",
        hint="Use a new key for a new request.",
    ),
    _row(
        "unauthorized",
        401,
        "The request has no valid token or certificate",
        hint="Send `Authorization: Bearer` with a token. An admin makes tokens with POST /v1/admin/tokens.",
        family="AuthError",
    ),
    _row(
        "forbidden",
        403,
        "The principal may not do this",
        hint="`value` is the missing role, `limit` the name on which it is missing; empty: everything. GET "
        "/v1/whoami lists your grants.",
        family="AuthError",
    ),
    _row(
        "cross_site",
        403,
        "A web page of another site may not make this request",
        hint="The setting `origins` lists sites whose pages may.",
        family="AuthError",
    ),
    _row("not_found", 404, "There is no such resource", hint="GET /docs lists all paths.", family="NotFound"),
    _row(
        "no_such_topic",
        404,
        "There is no such topic",
        hint="Create it with PUT /v1/topics/{topic}.",
        family="NotFound",
    ),
    _row("no_such_partition", 404, "The topic has no such partition", family="NotFound"),
    _row("no_such_cursor", 404, "There is no such cursor", family="NotFound"),
    _row(
        "no_such_channel",
        404,
        "The topic has no such channel",
        hint="Create it with PUT /v1/topics/{topic}/channels/{channel}.",
        family="NotFound",
    ),
    _row(
        "no_such_sink",
        404,
        "There is no such sink",
        hint="Begin it with POST /v1/sinks/{sink}.",
        family="NotFound",
    ),
    _row("no_such_producer", 404, "The partition has nothing durable of this producer", family="NotFound"),
    _row("no_such_record", 404, "There is no record at this offset yet", family="NotFound"),
    _row("no_such_delayed_record", 404, "No delayed record has this id", family="NotFound"),
    _row("no_such_group", 404, "There is no such group", family="NotFound"),
    _row("no_such_token", 404, "There is no such token", family="NotFound"),
    _row("no_such_node", 404, "There is no such node", family="NotFound"),
    _row(
        "no_such_operation",
        404,
        "There is no such operation under way",
        hint="GET /v1/admin/operations lists them; one that has ended is not listed any more.",
        family="NotFound",
    ),
    _row(
        "no_such_route",
        404,
        "The topic has no route of this version, and no change makes one",
        hint="GET /v1/topics/{topic}/routes has the present version; a change may have been cancelled.",
        family="NotFound",
    ),
    _row(
        "method_not_allowed",
        405,
        "The resource does not support this method",
        hint="`Allow` lists the methods.",
    ),
    _row("not_acceptable", 406, "None of the accepted media types can be produced"),
    _row(
        "request_timeout",
        408,
        "The request was not received in time",
        hint="Send the rest of a begun request without long pauses.",
    ),
    _row("already_exists", 409, "It exists already, with other settings", family="AlreadyExists"),
    _row("fenced", 409, "A newer producer, sink or consumer has taken over", family="Fenced"),
    _row(
        "in_progress",
        409,
        "A request with this idempotency key, or this batch's commit, is still running",
        hint="Send the same again a little later.",
    ),
    _row(
        "late",
        409,
        "A job's delivery is over",
        hint="Nothing of this batch is committed. The job comes again, or another consumer has it.",
        family="Late",
    ),
    _row("no_stage", 409, "Stages of this batch are missing", hint="Stage the batch again."),
    _row(
        "stages_lost",
        409,
        "Committed stages of a batch are lost on every replica of a partition",
        hint="This sink cannot continue. Append what is missing, and continue with a sink of another name.",
        outcome="unknown",
    ),
    _row("already_committed", 409, "This batch is committed already"),
    _row(
        "other_batch",
        409,
        "Another batch is committed under this number",
        hint="Nothing of it is written. The driver may have lost count, or gone back to an older state.",
    ),
    _row(
        "out_of_sequence",
        409,
        "The sequence does not follow the last one",
        hint="`limit` is the sequence expected next.",
    ),
    _row(
        "unknown_producer",
        409,
        "The partition does not know this producer",
        hint="Take a new producer id with POST /v1/producers.",
    ),
    _row(
        "key_expired",
        409,
        "The idempotency key is older than what the partition remembers",
        hint="Check whether the first request took effect; under a new key it is another request.",
        outcome="unknown",
    ),
    _row(
        "sealed",
        409,
        "The partition has ended, and accepts no more records",
        hint="`limit` is the version of the route that names the partitions that replace it.",
        family="Sealed",
    ),
    _row(
        "stale_route",
        409,
        "The partition was chosen by a route of the topic that is too old",
        hint="`limit` is the present version: GET /v1/topics/{topic}/routes, and choose again.",
    ),
    _row(
        "not_drained",
        409,
        "Partitions before this one are not acknowledged to their ends",
        hint="`limit` has these partitions, and their ends. Try again when a consumer has read them.",
        family="NotDrained",
    ),
    _row("node_in_use", 409, "The node cannot be removed yet", hint="`detail` says what comes first."),
    _row(
        "not_cancellable",
        409,
        "This operation cannot be cancelled by DELETE",
        hint="`detail` says what to do instead.",
    ),
    _row("offset_expired", 410, "The offset lies before the partition's start", family="OffsetExpired"),
    _row(
        "partition_recreated",
        410,
        "The partition of this id was deleted, and another has its name",
        hint="`limit` is the id of the partition that has the name now.",
        family="NotFound",
    ),
    _row(
        "delayed_record_ended",
        410,
        "The delayed record was published or cancelled",
        hint="It is not remembered which.",
        family="NotFound",
    ),
    _row("precondition_failed", 412, "The condition of the request is not met"),
    _row("too_large", 413, "The body or a record is too large", hint="GET /v1/limits lists all limits."),
    _row("target_too_long", 414, "The request target is too long"),
    _row("unsupported_media_type", 415, "The body's type or encoding is not supported"),
    _row("offset_beyond_end", 416, "The offset lies beyond the partition's end"),
    _row("range_not_satisfiable", 416, "The range lies past the value's end"),
    _row(
        "unreadable",
        422,
        "The producer of these records wrote them in a form that cannot be read",
        hint="`on_damage=skip` skips them.",
        family="Unreadable",
    ),
    _row(
        "expectation_failed", 417, "The expectation is not supported", hint="Only `Expect: 100-continue` is."
    ),
    _row(
        "wrong_host",
        421,
        "The Host header names another server",
        hint="The setting `hosts` lists further names of the node.",
    ),
    _row(
        "not_a_replica",
        503,
        "This node holds no replica of the partition",
        retriable=True,
        hint="Ask again for the partition's replicas.",
        family="Unavailable",
    ),
    _row(
        "not_leader",
        503,
        "This replica does not lead the partition",
        retriable=True,
        hint="`Laminar-Leader`, if there, names the leader.",
        family="Unavailable",
    ),
    _row(
        "if_match_required",
        428,
        "The change needs an If-Match header",
        hint="GET the resource and send its ETag.",
    ),
    _row("headers_too_large", 431, "The head of the request is too large"),
    # The server's state is wrong: the same request may succeed later.
    _row(
        "quota",
        429,
        "A quota is used up",
        retriable=True,
        hint="Retry after `retry_after_ms`. Without it, retrying does not help: `field` names what to "
        "reduce, or which limit to raise.",
        family="Overloaded",
    ),
    _row("no_leader", 503, "The partition has no leader at the moment", retriable=True, family="Unavailable"),
    _row("overloaded", 503, "A resource of the node is exhausted", retriable=True, family="Overloaded"),
    _row(
        "replica_lagging",
        503,
        "The replica has not reached `min_offset` yet",
        retriable=True,
        family="Unavailable",
    ),
    _row(
        "draining",
        503,
        "The node is stopping",
        retriable=True,
        hint="Send the request to another node.",
        family="Unavailable",
    ),
    _row("node_silent", 503, "The node does not answer", retriable=True, family="Unavailable"),
    _row("not_ready", 503, "The node is still starting", retriable=True, family="Unavailable"),
    _row(
        "being_created",
        503,
        "The topic or channel is still being created",
        retriable=True,
        family="Unavailable",
    ),
    _row(
        "changing",
        503,
        "The route of the partition's keys is being changed",
        retriable=True,
        family="Unavailable",
    ),
    _row(
        "too_few_nodes",
        503,
        "Too few nodes are alive for the number of replicas",
        hint="Start more nodes, or ask for fewer replicas. A topic's `allow_fewer_replicas` takes as many as "
        "there are. The nodes' `default_replicas` applies to `_transactions`, and where no number is given.",
        family="Unavailable",
    ),
    _row(
        "not_enabled",
        503,
        "A node's program does not know this command yet",
        hint="Upgrade the nodes that `detail` names; the command is enabled when all know it.",
        family="Unavailable",
    ),
    _row(
        "too_few_replicas",
        503,
        "Fewer replicas of the partition are in sync than its topic's `min_replicas`",
        retriable=True,
        hint="GET the topic's partitions to see which replica lags or does not answer.",
        family="Unavailable",
    ),
    _row(
        "damaged",
        503,
        "The records here are damaged and being repaired",
        retriable=True,
        family="Unavailable",
    ),
    _row("disk_full", 507, "The disk is full", retriable=True, family="Overloaded"),
    _row(
        "outcome_unknown",
        504,
        "Whether the request took effect is not known",
        hint="Repeat it with the same idempotency key or sequence, or where doubling does no harm.",
        outcome="unknown",
        family="OutcomeUnknown",
    ),
    _row("not_implemented", 501, "The server does not support this"),
    _row("unsupported_version", 505, "Only HTTP/1.0 and HTTP/1.1 are supported"),
    _row(
        "internal_error",
        500,
        "An internal error of the server",
        hint="`detail` names the line in the node's log.",
        outcome="unknown",
    ),
)

CODES: Final[Mapping[str, ErrorCode]] = {row.code: row for row in _ROWS}
assert len(CODES) == len(_ROWS), "a code occurs twice"
# The codes that are documented.
LISTED: Final[Mapping[str, ErrorCode]] = {row.code: row for row in _ROWS if row.listed}

# Default `Retry-After` of a retriable answer, in ms.
DEFAULT_RETRY_AFTER_MS: Final = 200
# A client's values come back in problems; longer ones are cut to this.
LONGEST_VALUE: Final = 200


class Problem(Exception):
    """An error of the table, raised to be the answer to a request (a problem document, RFC 9457).

    `detail` says what happened in this case. `field` names what is wrong in the request, `value` is what was
    sent, and `limit` is what would have been allowed. `hint` and `outcome` replace those of the table.
    `headers` are added to the answer. `retry_after_ms` has a default if the code is retriable, but not if the
    problem is `final`, which means that a later retry alone does not help.
    """

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        field: str | None = None,
        value: Any = None,
        limit: Any = None,
        hint: str | None = None,
        retry_after_ms: int | None = None,
        outcome: Outcome | None = None,
        headers: Iterable[tuple[str, str]] = (),
        final: bool = False,
    ) -> None:
        row = CODES[code]
        super().__init__(code, detail)
        self.code = code
        self.status = row.status
        self.title = row.title
        self.detail = detail
        self.field = field
        self.value = _short(value)
        self.limit = limit
        self.hint = row.hint if hint is None else hint
        if retry_after_ms is None and row.retriable and not final:
            retry_after_ms = DEFAULT_RETRY_AFTER_MS
        self.retry_after_ms = retry_after_ms
        self.outcome: Outcome = row.outcome if outcome is None else outcome
        self.headers = list(headers)

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later, according to the table."""
        return CODES[self.code].retriable

    def __str__(self) -> str:
        parts = [f"{self.status} {self.code}: {self.detail or self.title}"]
        for name in ("field", "value", "limit"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        return " ".join(parts)

    def document(self) -> dict[str, Any]:
        """Return the members of the problem document; those without a value are left out."""
        document: dict[str, Any] = {
            "type": TYPE_PREFIX + self.code,
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "outcome": self.outcome,
        }
        for name in ("detail", "hint"):
            if getattr(self, name):
                document[name] = getattr(self, name)
        for name in ("field", "value", "limit", "retry_after_ms"):
            if getattr(self, name) is not None:
                document[name] = getattr(self, name)
        return document

    def encode(self) -> bytes:
        """Return the problem document as JSON, with a newline at its end."""
        return msgspec.json.encode(self.document()) + b"\n"

    def all_headers(self) -> list[tuple[str, str]]:
        """Return all headers of the answer: the problem's own, and `Retry-After` (s, rounded up) if known."""
        headers = list(self.headers)
        if self.retry_after_ms is not None:
            headers.append(("Retry-After", str(-(-self.retry_after_ms // 1000))))
        return headers

    @classmethod
    def decode(cls, body: bytes | bytearray | memoryview, *, status: int) -> Problem:
        """Return the problem in the body of a server's answer with this status.

        The body may be that of a newer server, or a proxy's page. For a code that this table lacks, or a body
        that is not a problem document, the general code of `status` is used, and the text becomes the detail.
        """
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            document = None
        if not isinstance(document, dict):
            text = bytes(body[:LONGEST_VALUE]).decode("utf-8", "replace")
            problem = cls(code_of_status(status), text)
            problem.status = status
            return problem
        code = document.get("code")
        known = isinstance(code, str) and code in CODES
        problem = cls(str(code) if known else code_of_status(status))
        problem.status = status
        problem.title = _text(document.get("title"), problem.title)
        problem.detail = _text(document.get("detail"), "")
        problem.hint = _text(document.get("hint"), "")
        field = document.get("field")
        problem.field = field if isinstance(field, str) else None
        problem.value = _short(document.get("value"))
        problem.limit = document.get("limit")
        wait_ms = document.get("retry_after_ms")
        if isinstance(wait_ms, int):
            problem.retry_after_ms = wait_ms
        elif code == "quota":
            problem.retry_after_ms = None  # it is a final one
        outcome = document.get("outcome")
        if outcome in ("not_applied", "unknown"):
            problem.outcome = outcome
        if not known and isinstance(code, str):
            problem.detail = f"{code}: {problem.detail}"
        return problem


_GENERAL: Final[Mapping[int, str]] = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    409: "in_progress",
    410: "offset_expired",
    412: "precondition_failed",
    413: "too_large",
    414: "target_too_long",
    415: "unsupported_media_type",
    416: "offset_beyond_end",
    421: "not_a_replica",
    422: "invalid",
    428: "if_match_required",
    429: "quota",
    431: "headers_too_large",
    501: "not_implemented",
    502: "outcome_unknown",
    503: "overloaded",
    504: "outcome_unknown",
    505: "unsupported_version",
    507: "disk_full",
}


def code_of_status(status: int) -> str:
    """Return the code of the table that is used for a status if nothing else is known about the error."""
    return _GENERAL.get(status, "internal_error" if status >= 500 else "malformed")


def _short(value: Any) -> Any:
    """Return a value in the form of a problem: numbers unchanged, else text, cut to `LONGEST_VALUE`."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if value.bit_length() < 64:
            return value
        # msgpack, in which problems travel between shards, has no larger ones; nor has Python a text for all.
        value = str(value) if value.bit_length() < 1024 else f"a whole number of {value.bit_length()} bits"
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value[: LONGEST_VALUE + 1]).decode("utf-8", "backslashreplace")
    if not isinstance(value, str):
        value = repr(value)
    return value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "…"


def _text(value: Any, default: str) -> str:
    return value if isinstance(value, str) else default


LIMIT_HINT: Final = (
    "GET /v1/whoami has your limits. Delete something, or ask an admin of everything to raise the limit."
)


def over_limit(
    what: str, value: int, limit: int, *, detail: str = "", retry_after_ms: int | None = None
) -> Problem:
    """Return the problem 429 `quota` for a principal that would exceed one of its limits.

    `what` is the limit's name, `value` the number that the principal would have, and `limit` the number that
    it may have. For a rate, `retry_after_ms` is the time until the request may be repeated.
    """
    return Problem(
        "quota",
        detail or f"the principal would have {value} {what}, and may have {limit}",
        field=what,
        value=value,
        limit=limit,
        hint=LIMIT_HINT if retry_after_ms is None else None,
        retry_after_ms=retry_after_ms,
        outcome="not_applied",
        final=retry_after_ms is None,
    )
