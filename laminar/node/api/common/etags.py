"""Entity tags of resources that have a version: an ETag is the version in quotes."""

from __future__ import annotations

from laminar.http.api.problems import Problem


def etag(version: int) -> tuple[str, str]:
    """Return the header of an answer that shows this version."""
    return ("ETag", f'"{version}"')


def names(etags: str, version: int) -> bool:
    """Return whether `etags`, of If-Match or If-None-Match, has the version (RFC 9110, 13.1)."""
    return etags == "*" or f'"{version}"' in [each.strip() for each in etags.split(",")]


def required(if_match: str | None, *, what: str) -> str:
    """Return the If-Match header of a change, which `what` (a kind of resource) needs.

    Raises:
        Problem: 428 `if_match_required`.
    """
    if if_match is None:
        raise Problem("if_match_required", f"send If-Match with the {what}'s ETag", field="if-match")
    return if_match


def changed(if_match: str, version: int, *, what: str) -> Problem:
    """Return 412 `precondition_failed` for a resource that has this version by now."""
    return Problem(
        "precondition_failed",
        f"the {what} has changed in the meantime",
        field="if-match",
        value=if_match,
        limit=f'"{version}"',
    )
