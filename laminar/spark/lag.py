"""The lag of each streaming query, computed by a listener in the driver from the progress that Spark reports.

Spark keeps no metrics of a Python source, but its progress reports hold two offsets: how far a query has
read, and how far it could have read. This module computes the lag of each partition from the two, and writes
lags in Prometheus' text format.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from laminar.spark.read.offsets import VERSION, Partition, Positions, decode

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The lag of one query by partition, as of its last batch.

    `lags` has the number of records that are committed and not read. They are counted with the ends that the
    query knew when it planned the batch. `read_to` has the offset after the last record read. `batch` is
    Spark's number of the batch; `name` is the query's name, or its id if it has none.
    """

    name: str
    batch: int
    read_to: Mapping[Partition, int]
    lags: Mapping[Partition, int]

    @property
    def total(self) -> int:
        """Records that the query has not read, over all partitions."""
        return sum(self.lags.values())

    @property
    def highest(self) -> int:
        """The largest lag of a partition: the Kafka source's ``maxOffsetsBehindLatest``."""
        return max(self.lags.values(), default=0)

    @property
    def lowest(self) -> int:
        """The smallest lag of a partition: the Kafka source's ``minOffsetsBehindLatest``."""
        return min(self.lags.values(), default=0)

    @property
    def mean(self) -> float:
        """The mean lag of the partitions: the Kafka source's ``avgOffsetsBehindLatest``."""
        return self.total / len(self.lags) if self.lags else 0.0


class LagListener(StreamingQueryListener):
    """A listener that keeps the lag of every query that reads from Laminar.

    Register it by ``spark.streams.addListener(lags)``; ``lags.serve(9464)`` serves it to Prometheus. `report`
    is called with each `QueryLag` as it arrives, on Spark's listener thread.
    """

    def __init__(self, report: Callable[[QueryLag], None] | None = None) -> None:
        self._report = report
        self._known: dict[str, QueryLag] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    def lags(self) -> list[QueryLag]:
        """Return the lag of each running query that has finished a batch, sorted by name."""
        with self._lock:
            return sorted(self._known.values(), key=lambda each: each.name)

    def prometheus(self) -> str:
        """Return all lags in Prometheus' text format."""
        lines = []
        for name, what, numbers in (
            ("laminar_spark_lag_records", "Records that a query has not read.", "lags"),
            ("laminar_spark_offset", "The offset to which a query has read.", "read_to"),
        ):
            lines += [f"# HELP {name} {what}", f"# TYPE {name} gauge"]
            for query in self.lags():
                for (topic, partition), number in sorted(getattr(query, numbers).items()):
                    labels = f'query="{_escaped(query.name)}",topic="{topic}",partition="{partition}"'
                    lines.append(f"{name}{{{labels}}} {number}")
        return "\n".join([*lines, ""])

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve `prometheus` to every GET, on a thread of its own, until `close`; return the port.

        With port 0 the system chooses a free one. Call `close` before another `serve`.
        """
        assert self._server is None, "serve was called twice"
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer with the lags."""
                body = listener.prometheus().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Log nothing: it would go to the driver's output."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        threading.Thread(target=self._server.serve_forever, name="laminar-lag", daemon=True).start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop the server of `serve`, if it runs. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    # -- what Spark calls ----------------------------------------------------------------------

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: there is no lag before the first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Keep and report the lag in a query's progress, if the query reads from Laminar."""
        progress = event.progress
        read_to: Positions = {}
        ends: Positions = {}
        for source in progress.sources:
            read, end = positions(source.endOffset), positions(source.latestOffset)
            if read is not None and end is not None:
                read_to |= read
                ends |= end
        if not ends:
            return
        lags = {partition: max(0, end - read_to.get(partition, 0)) for partition, end in ends.items()}
        found = QueryLag(progress.name or str(progress.id), progress.batchId, read_to, lags)
        with self._lock:
            self._known[str(progress.id)] = found
        if self._report is not None:
            self._report(found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: the last lag still holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query."""
        with self._lock:
            self._known.pop(str(event.id), None)


def positions(text: str | None) -> Positions | None:
    """Return the positions in `text`, an offset of a query's progress.

    None: the offset is another source's, or symbolic (`laminar.spark.read.offsets`), or there is none.
    """
    try:
        offset = json.loads(text or "")
    except ValueError:
        return None
    if not isinstance(offset, dict) or offset.get("v") != VERSION or "start" in offset:
        return None
    return decode(offset).positions


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
