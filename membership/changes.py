"""What a rule of the catalog returns: the state afterwards, and the result for the sender of the command."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from membership.records import CatalogState
from membership.requests import Outcome, Result

Change = tuple[CatalogState, Result]


def same_state(state: CatalogState, outcome: Outcome, detail: str = "", **more: Any) -> Change:
    """Return the state as it is, and a result with this outcome."""
    return state, Result(outcome, state.version, detail, **more)


def next_state(state: CatalogState, outcome: Outcome, result: dict[str, Any], **fields: Any) -> Change:
    """Return the state of the next version with these fields changed, and a result with this outcome."""
    after = replace(state, version=state.version + 1, **fields)
    return after, Result(outcome, after.version, **result)
