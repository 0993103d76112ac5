"""The rules of principals' limits: how they are set, and what a principal may own in the catalog.

The functions are rules as in `catalog_rules`. A principal owns no more objects than its limits allow, also if
it sends two requests at once. Lowered limits remove nothing.
"""

from __future__ import annotations

import re

from membership.changes import Change, next_state, same_state
from membership.records import ANY_PRINCIPAL, CatalogState, LimitRecord
from membership.requests import ChangeLimits, Outcome, Result

PRINCIPAL = re.compile(r"[A-Za-z0-9._-]{1,200}")
"""What the name of a principal looks like."""

LIMITS = (
    "requests_per_s",
    "bytes_in_per_s",
    "bytes_out_per_s",
    "connections",
    "topics",
    "partitions",
    "channels",
    "cursors",
    "sinks",
    "uploads",
    "producers",
)
"""The names of limits, as in `laminar.http.api.documents.access`; a test compares the two."""

MOST_LIMITS = 10_000
"""Most principals with limits of their own: every process has all of them in memory."""

HIGHEST_LIMIT = 2**53 - 1

LIMITS_SINCE = 7
"""The code version from which on principals have limits, and topics owners."""


def change_limits(state: CatalogState, request: ChangeLimits) -> Change:
    """Replace a principal's limits if they still have the request's version; empty limits remove the record.

    The same request once more changes nothing.
    """
    wrong = _wrong_limits(request)
    if wrong:
        return same_state(state, "invalid", wrong)
    known = state.limits.get(request.principal)
    if (known.limits if known is not None else {}) == request.limits:
        return same_state(state, "unchanged")
    if (known.version if known is not None else 0) != request.version:
        return same_state(state, "conflict", f"version is {known.version if known is not None else 0}")
    if not request.limits:
        return next_state(state, "deleted", {}, limits=state.limits.changed({request.principal: None}))
    if known is None and len(state.limits) >= MOST_LIMITS:
        return same_state(state, "quota", f"{MOST_LIMITS} principals have limits of their own")
    record = LimitRecord(request.principal, request.limits, state.version + 1)
    outcome: Outcome = "created" if known is None else "updated"
    return next_state(state, outcome, {}, limits=state.limits | {record.principal: record})


def _wrong_limits(request: ChangeLimits) -> str:
    if request.principal != ANY_PRINCIPAL and PRINCIPAL.fullmatch(request.principal) is None:
        return f"principal {request.principal!r} is not 1 to 200 of A-Z a-z 0-9 . _ -"
    for name, limit in request.limits.items():
        if name not in LIMITS:
            return f"there is no limit {name!r}: {', '.join(LIMITS)}"
        if not 0 < limit <= HIGHEST_LIMIT:
            return f"{name} {limit} is not 1 to {HIGHEST_LIMIT}"
    return ""


def owned_by(state: CatalogState, owner: str) -> dict[str, int]:
    """Return the numbers of topics, partitions and channels that a principal owns."""
    topics = [each for each in state.topics.values() if each.owner == owner]
    return {
        "topics": len(topics),
        "partitions": sum(len(each.all_numbers) for each in topics),
        "channels": sum(len(each.channels or ()) for each in topics),
    }


def over_limit(state: CatalogState, owner: str, **more: int) -> Result | None:
    """Return the refusal if `more` objects of an owner would exceed one of its limits; else None.

    The owner's objects are counted over all topics, which is only done if the owner has such a limit.
    """
    if not owner or not state.limits:
        return None
    limits = {name: state.limit(owner, name) for name in more}
    if not any(limit is not None for limit in limits.values()):
        return None
    owned = owned_by(state, owner)
    for name, limit in limits.items():
        value = owned[name] + more[name]
        if limit is not None and value > limit:
            detail = f"principal {owner!r} would have {value} {name}, and may have {limit}"
            return Result("quota", state.version, detail, what=name, value=value, limit=limit)
    return None
