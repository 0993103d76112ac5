"""The error of the HTTP protocol: a message is refused, with a status.

It knows no media type and no table of codes: the server's `on_error` makes an answer of it.
Reference: RFC 9110, section 15.
"""

from __future__ import annotations

from collections.abc import Iterable


class HttpError(Exception):
    """A message that is refused.

    `reason` is a short name of what is wrong, such as ``malformed``; `field` names the part of the message,
    `value` is what was found there and `limit` what would be allowed. `headers` belong into the answer.
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
