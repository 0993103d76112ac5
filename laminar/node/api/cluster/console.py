"""Routes of the web console: they serve its static files. Its scripts fetch their data by other routes."""

from __future__ import annotations

from typing import Final

from laminar.console.files import INDEX, POLICY, console_files
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Page, Request, Response

_ALWAYS: Final = (
    ("Content-Security-Policy", POLICY),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),  # kept by the browser, and asked for again by its ETag
    ("Vary", "Accept-Encoding"),
)


class ConsoleRoutes:
    """The handlers of the console's routes; without `is_on` they answer 404."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._files = console_files() if is_on else {}

    def index(self, request: Request) -> Response:
        """Answer GET /console/."""
        return self.file(request, INDEX)

    def moved(self, request: Request) -> Response:
        """Answer GET /console with a redirect to `/console/`: links in the page are relative to that."""
        if not self._is_on:
            raise _not_found(request)
        return Response(308, [("Location", "console/")])

    def file(self, request: Request, file: str) -> Response:
        """Answer GET /console/{file}, compressed if the client takes that."""
        found = self._files.get(file)
        if found is None:
            raise _not_found(request)
        gzipped = _takes_gzip(request.headers.get("accept-encoding", ""))
        etag = f'"{found.digest}{"-gz" if gzipped else ""}"'
        headers = [("ETag", etag), *_ALWAYS]
        if etag in request.headers.get("if-none-match", ""):
            return Page(304, headers)
        headers.append(("Content-Type", found.media_type))
        if gzipped:
            headers.append(("Content-Encoding", "gzip"))
        return Page(200, headers, found.gzipped if gzipped else found.body)


def _not_found(request: Request) -> Problem:
    return Problem("not_found", "there is no such path", field="path", value=request.path)


def _takes_gzip(accepted: str) -> bool:
    """Return whether `Accept-Encoding` names gzip with a weight above 0."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "").rstrip("0.") != "q="
    return False
