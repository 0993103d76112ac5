"""Appends by datagram, without a loop: the twin of `laminar.client.produce.datagrams`."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

from laminar.client.produce import datagrams as aio_datagrams
from laminar.client.records import Receipt
from laminar.client.sync.portal import Portal
from laminar.client.trace_id import TraceId

T = TypeVar("T")


class Datagrams(Generic[T]):
    """Appends to one topic by UDP datagram, without a connection.

    ``with topic.datagrams() as datagrams: datagrams.append(b"21.5", key="sensor-7")``. Several threads may
    use it: records that they append to one partition at a time are sent together.
    """

    def __init__(self, portal: Portal, datagrams: aio_datagrams.Datagrams[T]) -> None:
        self._portal = portal
        self._twin = datagrams

    # generated from laminar.client.produce.datagrams.Datagrams, without end

    def __repr__(self) -> str:
        return repr(self._twin)

    def __enter__(self) -> Self:
        self._portal.run(lambda: self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._portal.closed:
            self._portal.run(lambda: self._twin.__aexit__(kind, error, trace))

    def statistics(self) -> dict[str, int]:
        """Return counts of datagrams sent, copies resent, redirects, and answers that failed their MAC."""
        return self._twin.statistics()

    @property
    def resent(self) -> int:
        """Number of times a batch was sent again."""
        return self._twin.resent

    def append(
        self,
        value: T,
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        trace_id: TraceId | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; return its receipt when it is durable as the topic's settings require.

        The record is sent again until it is answered, and never appended twice.

        Raises:
            Error: (``too_large``) the record does not fit into a datagram; (``forbidden``) the token lacks
                the role write on the topic.
            ConfigError: (``no_datagrams``) the cluster requires tokens, and its nodes are too old for that.
            OutcomeUnknown: the deadline passed without an answer.
            TimedOut: the deadline passed before the record was sent.
        """
        return self._portal.run(
            lambda: self._twin.append(
                value,
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                trace_id=trace_id,
                partition=partition,
                timeout=timeout,
            )
        )

    def close(self) -> None:
        """Stop sending. Idempotent. Appends without a receipt fail, those in flight with `OutcomeUnknown`."""
        self._portal.run(lambda: self._twin.close())
