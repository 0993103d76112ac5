"""The receiver of spans: an endpoint of OTLP over HTTP, and what its answers mean.

OpenTelemetry's exporter counts any answer below 400 as success, follows redirects, and does not tell why a
request failed. An export that continues after spans that were not accepted has lost them, so this module
checks the answers itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan

from laminar.client.errors import ConfigError, Error, Unavailable

TIMEOUT_S: Final = 10.0
"""For one request; the exporter tries again within it."""
PATH: Final = "/v1/traces"
_AGAIN: Final = frozenset((408, 429))
"""Statuses, beside those from 500 on, after which the same is sent again."""
_SHOWN: Final = 200
"""Most characters of an answer in an error."""


class Receiver:
    """An endpoint that accepts spans. `rejected` counts the spans that it will never accept."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Create a client of the receiver at `url`; to a URL without a path, OTLP's path for spans is added.

        Raises:
            ConfigError: it is no URL of HTTP.
        """
        self.url = _endpoint(url)
        self.rejected = 0
        self.why_rejected = ""
        self._session = _Session()
        self._exporter = OTLPSpanExporter(self.url, session=self._session, timeout=timeout_s)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send spans; return when they are accepted. It blocks.

        Raises:
            Unavailable: the receiver does not answer, or cannot accept spans now; they may be sent again.
            Error: (`receiver_refused`) it does not accept spans, or not these.
        """
        self._session.begin()
        self._exporter.export(spans)
        answer, failure = self._session.answer, self._session.failure
        if answer is None:
            if failure is None or isinstance(failure, ValueError):  # not sent at all
                raise self._refused(f"spans cannot be sent: {failure or 'they are too large'}")
            raise Unavailable(
                f"{self.url} does not answer: {failure}", code="receiver_unavailable", retriable=True
            )
        status = answer.status_code
        if status in _AGAIN or status >= 500:
            raise Unavailable(
                f"{self.url} cannot take spans now: {status} {_shown(answer)}",
                code="receiver_unavailable",
                retriable=True,
            )
        if not 200 <= status < 300:
            raise self._refused(f"{self.url} takes no spans: {status} {_shown(answer)}")
        self._note_rejected(answer)

    def close(self) -> None:
        """Close the connections, and stop repeating requests."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # so it is there

    def _note_rejected(self, answer: requests.Response) -> None:
        """Count the spans that an answer refuses. Raises `Error` if the answer is none of OTLP."""
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            if kind == "application/json":
                said: Any = json.loads(answer.content or b"{}").get("partialSuccess") or {}
                rejected, why = int(said.get("rejectedSpans", 0)), str(said.get("errorMessage", ""))
            elif kind == "application/x-protobuf":
                partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
                rejected, why = partial.rejected_spans, partial.error_message
            elif answer.content:
                raise ValueError(kind)
            else:
                rejected, why = 0, ""
        except (DecodeError, ValueError, AttributeError, TypeError):
            said = f"{answer.status_code} with {kind or 'something'}"
            raise self._refused(f"{self.url} is no receiver of OTLP: it answers {said}") from None
        self.rejected += rejected
        self.why_rejected = why or self.why_rejected

    def _refused(self, text: str) -> Error:
        return Error(
            text,
            code="receiver_refused",
            field="otlp",
            value=self.url,
            hint="a receiver of OTLP over HTTP listens at http://HOST:4318, with the path /v1/traces",
        )


class _Session(requests.Session):
    """A session that keeps the last answer or error, and follows no redirect."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        """Forget the last answer and error."""
        self.answer: requests.Response | None = None
        self.failure: Exception | None = None

    def send(self, request: requests.PreparedRequest, **more: Any) -> requests.Response:
        """Send a request. Raises as `requests.Session.send`."""
        return super().send(request, **{**more, "allow_redirects": False})

    def request(self, *arguments: Any, **more: Any) -> requests.Response:
        """Make a request. Raises as `requests.Session.request`."""
        self.begin()
        try:
            self.answer = super().request(*arguments, **more)
        except Exception as error:
            self.failure = error
            raise
        return self.answer


def _endpoint(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{url!r} is no URL of a receiver",
            code="bad_url",
            field="otlp",
            value=url,
            hint="http://HOST:4318",
        )
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else url


def _shown(answer: requests.Response) -> str:
    return " ".join(f"{answer.reason or ''} {answer.text}".split())[:_SHOWN]
