"""A receiver of OTLP over HTTP, which keeps the spans that it takes and answers as a test wants."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    """What a request is answered with; spans are kept if that is a success."""

    status: int = 200
    body: bytes = ExportTraceServiceResponse().SerializeToString()
    kind: str = PROTOBUF
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Span:
    """A span as it was sent, with what its request says that it is of."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: tuple[tuple[str, str | int], ...]
    error: str | None
    links: tuple[str, ...]
    service: str

    def __getitem__(self, name: str) -> str | int | None:
        return dict(self.attributes).get(name)


@dataclass
class Taken:
    """What a receiver has taken; `answer` says what a request is answered with, by its number from 0."""

    url: str
    spans: list[Span] = field(default_factory=list)
    requests: int = 0
    answer: Callable[[int], Answer] = lambda number: Answer()


@contextmanager
def receiving() -> Iterator[Taken]:
    """Run a receiver."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                number, taken.requests = taken.requests, taken.requests + 1
            answer = taken.answer(number)
            if 200 <= answer.status < 300 and self.path == "/v1/traces":
                taken.spans += spans_in(
                    gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
                )
            self.send_response(answer.status)
            for name, value in (("Content-Type", answer.kind), *answer.headers):
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def do_GET(self) -> None:
            """A page, where redirects lead to."""
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    lock = threading.Lock()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        taken = Taken(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield taken
        finally:
            server.shutdown()
            thread.join()


def spans_in(body: bytes) -> Iterator[Span]:
    """The spans of a request."""
    for of in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = next(
            each.value.string_value for each in of.resource.attributes if each.key == "service.name"
        )
        for scope in of.scope_spans:
            assert "laminar" == scope.scope.name
            for each in scope.spans:
                yield Span(
                    each.name,
                    each.kind,
                    each.trace_id.hex(),
                    each.span_id.hex(),
                    each.parent_span_id.hex(),
                    each.start_time_unix_nano,
                    each.end_time_unix_nano,
                    tuple(
                        (one.key, one.value.string_value or one.value.int_value) for one in each.attributes
                    ),
                    each.status.message if each.status.code == 2 else None,
                    tuple(link.span_id.hex() for link in each.links),
                    service,
                )
