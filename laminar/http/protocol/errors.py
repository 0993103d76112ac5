"""The exception by which the HTTP code refuses a message.

It has a status, but neither a body nor a code of the API: the server's `on_error` makes the answer from it.
Reference: RFC 9110, section 15.
"""

from __future__ import annotations

from collections.abc import Iterable


class HttpError(Exception):
    """A message is refused; the answer has the given status.

    `reason` is a short name of the fault, such as ``malformed``. `field` names the part of the message that
    is wrong, `value` is what was found there, and `limit` is what would be allowed. `headers` are added to
    the answer.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        detail: str = "",
        *,
        field: str | None = None,
        value: object = None,
        limit: object = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(status, reason, detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.field = field
        self.value = value
        self.limit = limit
        self.headers = list(headers)

    def __str__(self) -> str:
        parts = [f"{self.status} {self.reason}: {self.detail}"]
        parts += [f"{name}={given!r}" for name, given in self._particulars() if given is not None]
        return " ".join(parts)

    def _particulars(self) -> tuple[tuple[str, object], ...]:
        return ("field", self.field), ("value", self.value), ("limit", self.limit)
