"""Entity tags of resources that have a version: an ETag is the version in quotes."""

from __future__ import annotations

from laminar.http.api.problems import Problem


def etag(version: int) -> tuple[str, str]:
    """Return the ETag header (name, value) of an answer that shows this version."""
    return ("ETag", f'"{version}"')


def names(etags: str, version: int) -> bool:
    """Return whether the header If-Match or If-None-Match, `etags`, names the version (RFC 9110, 13.1)."""
    return etags == "*" or f'"{version}"' in [each.strip() for each in etags.split(",")]


def required(if_match: str | None, *, what: str) -> str:
    """Return the If-Match header of a request if it has one; `what` is the kind of resource that requires it.

    Raises:
        Problem: 428 `if_match_required`.
    """
    if if_match is None:
        raise Problem("if_match_required", f"send If-Match with the {what}'s ETag", field="if-match")
    return if_match


def changed(if_match: str, version: int, *, what: str) -> Problem:
    """Return 412 `precondition_failed`: the resource now has `version`, which If-Match does not name."""
    return Problem(
        "precondition_failed",
        f"the {what} has changed in the meantime",
        field="if-match",
        value=if_match,
        limit=f'"{version}"',
    )
