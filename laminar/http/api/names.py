"""The rule for names of topics, cursors, sinks, groups and uploads. Clients check it too."""

from __future__ import annotations

import re
from typing import Final

from laminar.http.api.problems import Problem

TOPIC_PATTERN: Final = r"[A-Za-z0-9._-]{1,200}"

AUDIT_TOPIC: Final = "_audit"
"""The topic of what admins did and who was refused (`laminar.wire.audit`)."""
TRACE_TOPIC: Final = "_trace"
"""The topic of what happens to the records of topics that are traced (`laminar.wire.trace`)."""
SYSTEM_TOPICS: Final = frozenset(("_transactions", AUDIT_TOPIC, TRACE_TOPIC))
"""The topics that nodes make and write: a client may read them, and decide where they are."""

_TOPIC: Final = re.compile(TOPIC_PATTERN + r"\Z")


def check_name(value: str, *, field: str) -> str:
    """Return `value` unchanged if it may be the name of a topic or cursor; else raise 422 for `field`."""
    if not _TOPIC.match(value) or value in (".", ".."):
        raise Problem(
            "invalid",
            f"the name of a {field} must have 1 to 200 letters, digits, '.', '_' or '-'",
            field=field,
            value=value,
            limit=TOPIC_PATTERN,
        )
    return value
