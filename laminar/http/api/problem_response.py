"""Answers to errors: the only module that turns errors of the HTTP protocol into problems."""

from __future__ import annotations

from typing import Final

from laminar.http.api.problems import CODES, PROBLEM_TYPE, Problem, code_of_status
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.messages import Response

_PROBLEM_BLOCK: Final = f"Content-Type: {PROBLEM_TYPE}\r\n".encode("ascii")


def problem_response(problem: Problem) -> Response:
    """Return the HTTP response for a problem, with the problem as its JSON body (RFC 9457)."""
    return Response(problem.status, problem.all_headers(), problem.encode(), header_block=_PROBLEM_BLOCK)


def problem_of(error: HttpError) -> Problem:
    """Return the problem for an HTTP error.

    Its code is the error's `reason`, if that is a code of the table, else the general code of the status.
    """
    return Problem(
        error.reason if error.reason in CODES else code_of_status(error.status),
        error.detail,
        field=error.field,
        value=error.value,
        limit=error.limit,
        headers=error.headers,
    )


def answer_error(error: BaseException) -> Response | None:
    """Return the response for an error of a request; None for an exception that is neither of the two kinds.

    It is `HttpServer`'s `on_error`; the two kinds are `HttpError` and `Problem`.
    """
    if isinstance(error, HttpError):
        error = problem_of(error)
    return problem_response(error) if isinstance(error, Problem) else None
