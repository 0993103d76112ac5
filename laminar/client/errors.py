"""The client's exceptions: one family under `Error`.

A server's problem document (RFC 9457) becomes the class that its code stands for, with every field kept; the
client's own refusals use the same classes with codes of their own. No other exception leaves the client's
public functions for a fault of the network or the server.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.http.api.problems import CODES
from laminar.http.protocol.answer import TlsFailed


class Error(Exception):
    """Base of the client's errors. ``str()`` says what happened and, where known, what to do about it.

    ``code`` is stable, for programs to compare. ``status`` is the HTTP status, or 0 for an error that the
    client itself raises. ``outcome`` says whether a change was made: ``"not_applied"``, ``"unknown"``, or
    None where that was not stated. ``fields`` has all further members of the server's answer.
    """

    code: str
    status: int
    field: str | None
    value: Any
    limit: Any
    hint: str | None
    retriable: bool
    outcome: str | None
    retry_after_ms: int | None
    fields: dict[str, Any]

    def __init__(
        self,
        message: str,
        *,
        code: str = "error",
        status: int = 0,
        field: str | None = None,
        value: Any = None,
        limit: Any = None,
        hint: str | None = None,
        retriable: bool = False,
        outcome: str | None = None,
        retry_after_ms: int | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.field = field
        self.value = value
        self.limit = limit
        self.hint = hint
        self.retriable = retriable
        self.outcome = outcome
        self.retry_after_ms = retry_after_ms
        self.fields = dict(fields or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.code} {self.message!r}>"


class ConfigError(Error):
    """The client was given an argument or setting that it cannot use; nothing was sent."""


class AuthError(Error):
    """Base of `Unauthorized` and `Forbidden`: the cluster refused the client's token or its rights."""


class Unauthorized(AuthError):
    """The request had no token, or one that is unknown, revoked or expired (401). Nothing was changed."""


class Forbidden(AuthError):
    """The token does not permit this (403): ``value`` is the role that it lacks. Nothing was changed."""


class Untrusted(Error):
    """No TLS connection to a node was made; the message names CA and host. Nothing was sent."""


class NotFound(Error):
    """There is no such topic, partition, record or cursor."""


class AlreadyExists(Error):
    """The object exists already: with another configuration, or at all if ``exist_ok`` is false."""


class PreconditionFailed(Error):
    """A conditional change was refused, because another client has changed the object meanwhile."""


class OffsetExpired(Error):
    """The requested records were trimmed; ``fields`` have the earliest offset that is left."""


class Fenced(Error):
    """A newer producer, consumer or writer of the same name took over, so this one is refused."""


class Late(Error):
    """The outcome of a job was reported too late and changed nothing: another consumer has or gets the job.

    For a nack or a release it can also mean that an earlier attempt of the same report succeeded, and its
    answer was lost.
    """


class Retry(Exception):
    """Raised by a handler of `Channel.work`: its job failed and is given out again after `delay` seconds.

    If `delay` is None, it is given out again after the pause of the channel's settings. The attempt counts
    towards the channel's `max_attempts`.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.delay = delay


class NotDrained(Error):
    """A step was refused because a cursor has not acknowledged all records of a partition that has ended.

    ``limit`` names what is left to acknowledge: the partitions with their ends, or cursors.
    """


class Sealed(Error):
    """The caller named a partition that takes no more records, because others have replaced it.

    ``limit`` is the version of the topic's route that names its successors.
    """


class Overloaded(Error):
    """A limit on buffered bytes or requests is reached, in the client or at the server.

    ``field``, ``value`` and ``limit`` say which one.
    """


class Unavailable(Error):
    """No node could answer at the moment: no leader, no connection, or a node that is shutting down."""


class TimedOut(Unavailable, TimeoutError):
    """The deadline passed; the message says what was waited for. Nothing was changed."""


class OutcomeUnknown(Error, TimeoutError):
    """A change may have been made or not: its answer was lost, and it could not be repeated in time."""


def client_closed(*, maybe_applied: bool) -> Error:
    """Return the error for a request whose client was closed; `maybe_applied` says that it was sent."""
    if maybe_applied:
        return OutcomeUnknown(
            "the client was closed before the answer came", code="client_closed", outcome="unknown"
        )
    return Unavailable("the client was closed", code="client_closed", outcome="not_applied")


def no_partition(partition: int, numbers: Collection[int], *, topic: str = "the topic") -> ConfigError:
    """Return the error for a partition that is not among `numbers`, the partitions of a topic."""
    return ConfigError(
        f"{topic} has no partition {partition}: it has {len(numbers)}, the last is {max(numbers)}",
        code="no_partition",
        field="partition",
        value=partition,
        limit=max(numbers),
    )


def untrusted(failure: TlsFailed) -> Untrusted:
    """Return the error for a TLS connection that could not be made."""
    return Untrusted(str(failure), code="tls_failed", hint=failure.hint, outcome="not_applied")


def error_of_batch(error: Error, *, maybe_applied: bool) -> Error:
    """Return `error` as the error of one batch of records, with the `outcome` of that batch.

    A batch that cannot be sent because an earlier batch failed gets the error of that batch. But if an
    earlier request may have appended this batch (`maybe_applied`), its outcome is ``"unknown"``.
    """
    if not maybe_applied or error.outcome == "unknown":
        return error
    if error.code == "client_closed":
        return client_closed(maybe_applied=True)
    own = copy.copy(error)
    own.outcome = "unknown"
    return own


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A record without a receipt, in a `ProduceError`.

    ``outcome`` is ``"unknown"`` if the record may have been appended, else ``"not_applied"``.
    """

    value: bytes
    key: bytes | None
    partition: int
    outcome: str
    error: Error


class Unreadable(Error):
    """The log has records that their producer encoded wrongly; ``limit`` is the offset after them."""


class ProduceError(Error):
    """Some records have no receipt: ``undelivered`` lists all of them, in order of sending."""

    def __init__(self, message: str, *, undelivered: Sequence[Undelivered], **more: Any) -> None:
        super().__init__(message, **more)
        self.undelivered = list(undelivered)


# For answers whose code is not in the table: a newer server's, or a proxy's.
_BY_STATUS: dict[int, type[Error]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    410: OffsetExpired,
    412: PreconditionFailed,
    429: Overloaded,
    502: Unavailable,
    503: Unavailable,
    504: OutcomeUnknown,
    507: Overloaded,
}
_FAMILIES: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (
        Error,
        ConfigError,
        AuthError,
        Unauthorized,
        Forbidden,
        NotFound,
        AlreadyExists,
        OffsetExpired,
        Fenced,
        Late,
        NotDrained,
        Overloaded,
        Unavailable,
        OutcomeUnknown,
        PreconditionFailed,
        Sealed,
        Unreadable,
    )
}
# Finer than the families.
_BY_CODE: dict[str, type[Error]] = {"unauthorized": Unauthorized, "forbidden": Forbidden}
# The outcome where the answer does not say it.
_OUTCOMES = {401: "not_applied", 403: "not_applied", 504: "unknown"}
TOKEN_HINT = (
    "give a token: token= or token_file=, --token-file; or LAMINAR_TOKEN or LAMINAR_TOKEN_FILE, which are "
    "not sent to a URL that is given, unless LAMINAR_URL has its host; `laminar token create` makes one"
)
# Hints of the server that name HTTP requests, and what to say instead: methods of this client.
_HINTS = {
    "no_such_topic": "client.create_topic(name) creates it.",
    "no_such_channel": "topic.channel(name, exist_ok=True) creates it.",
}
_MEMBERS = frozenset({"type", "title", "detail", "code", "status", "field", "value", "limit", "hint"})


def from_problem(status: int, problem: Mapping[str, Any], *, asked: str) -> Error:
    """Return the exception for an answer of `status` with the problem document `problem` ({} if it had none).

    `asked` is the request, such as ``PUT /v1/topics/a``: the message names it if the problem has no detail.
    """
    code = str(problem.get("code") or f"http_{status}")
    known = CODES.get(code)
    kind = _FAMILIES[known.family] if known is not None else _BY_STATUS.get(status, Error)
    if status == 412:
        kind = PreconditionFailed
    kind = _BY_CODE.get(code, kind)
    hint = TOKEN_HINT if kind is Unauthorized else _HINTS.get(code) or problem.get("hint")
    detail = problem.get("detail") or problem.get("title") or f"{asked} was answered with {status}"
    retry_after_ms = problem.get("retry_after_ms")
    retriable = known.retriable if known is not None else status in (429, 502, 503, 507)
    if code == "quota" and retry_after_ms is None:
        retriable = False  # no time gives it back
    outcome = problem.get("outcome")
    return kind(
        str(detail),
        code=code,
        status=status,
        field=problem.get("field"),
        value=problem.get("value"),
        limit=problem.get("limit"),
        hint=hint,
        retriable=retriable,
        outcome=str(outcome) if outcome else _OUTCOMES.get(status),
        retry_after_ms=retry_after_ms if isinstance(retry_after_ms, int) else None,
        fields={name: value for name, value in problem.items() if name not in _MEMBERS},
    )
