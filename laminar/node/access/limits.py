"""The limits of principals, as the catalog has them, and the problem of one that is reached."""

from __future__ import annotations

from typing import Final

from laminar.http.api.problems import Problem

HINT: Final = (
    "GET /v1/whoami has the limits. An admin of everything raises them, or something is to be deleted."
)


def over_limit(
    what: str, value: int, limit: int, *, detail: str = "", retry_after_ms: int | None = None
) -> Problem:
    """Return 429 `quota` for a principal at its limit `what`; of a rate with the time until it asks again."""
    return Problem(
        "quota",
        detail or f"the principal would have {value} {what}, and may have {limit}",
        field=what,
        value=value,
        limit=limit,
        hint=HINT if retry_after_ms is None else None,
        retry_after_ms=retry_after_ms,
        outcome="not_applied",
        final=retry_after_ms is None,
    )
