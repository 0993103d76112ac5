"""Answers to errors: the only module that turns errors of the HTTP protocol into problems."""

from __future__ import annotations

from typing import Final

from laminar.http.api.problems import CODES, PROBLEM_TYPE, Problem, code_of_status
from laminar.http.protocol.errors import HttpError
from laminar.http.protocol.messages import Response

_PROBLEM_BLOCK: Final = f"Content-Type: {PROBLEM_TYPE}\r\n".encode("ascii")


def problem_response(problem: Problem) -> Response:
    """Return the answer (RFC 9457) that carries a problem."""
    return Response(problem.status, problem.all_headers(), problem.encode(), header_block=_PROBLEM_BLOCK)


def problem_of(error: HttpError) -> Problem:
    """Return the problem of an HTTP error: by its reason, if that is an error code, else by its status."""
    return Problem(
        error.reason if error.reason in CODES else code_of_status(error.status),
        error.detail,
        field=error.field,
        value=error.value,
        limit=error.limit,
        headers=error.headers,
    )


def answer_error(error: BaseException) -> Response | None:
    """Return the answer to an error, for `HttpServer`'s `on_error`; None for an unexpected exception."""
    if isinstance(error, HttpError):
        error = problem_of(error)
    return problem_response(error) if isinstance(error, Problem) else None
