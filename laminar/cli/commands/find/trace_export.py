"""`laminar trace export`: the events of the trace as spans of OpenTelemetry."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from laminar.cli.errors import UsageError, complain, line_of
from laminar.cli.options import ANY_CLUSTER, Cluster
from laminar.cli.output import ProgressLine
from laminar.client.errors import Error
from laminar.otel.installed import check_installed

if TYPE_CHECKING:
    from laminar.otel.export import Sent
    from laminar.otel.receiver import Receiver

TIMEOUT_S = 60.0
SHOWN_EACH_S = 1.0


def export(
    *,
    otlp: Annotated[
        str,
        Parameter(
            help="The receiver, http://HOST:4318, or a whole URL. Headers: OTEL_EXPORTER_OTLP_HEADERS."
        ),
    ],
    cursor: Annotated[str, Parameter(help="Go on at this cursor of _trace, and move it.")] = "otlp",
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Wait for more.")] = False,
    patience: Annotated[
        float, Parameter(help="Seconds to try again while the receiver takes nothing.")
    ] = 300.0,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Send the trace as spans to a receiver of OTLP, from where the last export ended. For admins."""
    if patience < 0:
        raise UsageError(f"--patience is 0 or more, not {patience:g}")
    check_installed()
    from laminar.otel.receiver import Receiver

    # What it has to say of an answer is said below.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    receiver = Receiver(otlp)
    shown = _Shown(receiver)
    try:
        asyncio.run(_run(receiver, cluster, shown, cursor=cursor, follow=follow, patience_s=patience))
    except KeyboardInterrupt:
        if not follow:
            raise
    finally:
        shown.end()
        receiver.close()


async def _run(
    receiver: Receiver, cluster: Cluster, shown: _Shown, *, cursor: str, follow: bool, patience_s: float
) -> None:
    from laminar.client.client import connect
    from laminar.otel.export import export_trace

    timeout_s = TIMEOUT_S if cluster.timeout is None else cluster.timeout
    async with connect(cluster.url, **cluster.proof, timeout=timeout_s) as client:
        sent = await export_trace(
            client,
            receiver,
            cursor=cursor,
            follow=follow,
            patience_s=patience_s,
            progress=shown.progress,
            waits=shown.waits,
        )
    print(f"{receiver.url}: {sent.spans:,} spans of {sent.events:,} events")


class _Shown:
    """The progress of the export, on standard error if that is a terminal, and once the reason of a wait."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._rejected = 0
        self._line = ProgressLine()
        self._next_s = time.monotonic() + SHOWN_EACH_S
        self._left_out = 0
        self._is_waiting = False

    def progress(self, sent: Sent) -> None:
        self._is_waiting = False
        if not self._rejected:  # the first are said at once, all of them at the end
            self._say_rejected()
        left_out = sent.skipped + sent.unreadable
        if left_out > self._left_out:
            complain(
                f"{left_out - self._left_out:,} records of _trace were trimmed, or can't be read: left out"
            )
            self._left_out = left_out
        if sys.stderr.isatty() and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SHOWN_EACH_S
            self._line.show(f"{sent.spans:,} spans of {sent.events:,} events")

    def waits(self, error: Error) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            complain(f"{line_of(error)}; trying again")

    def end(self) -> None:
        self._line.end()
        self._say_rejected()

    def _say_rejected(self) -> None:
        receiver = self._receiver
        if receiver.rejected > self._rejected:
            self._rejected = receiver.rejected
            complain(f"{receiver.url} rejected {receiver.rejected:,} spans: {receiver.why_rejected}")
