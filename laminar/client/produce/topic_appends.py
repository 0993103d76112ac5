"""The ways to append to one topic: single records, producers, and uploads of large values.

Single appends of all tasks share one sender, which joins them into batches; each producer has its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from laminar.client.codecs import not_bytes
from laminar.client.errors import ConfigError, OutcomeUnknown
from laminar.client.net.session import Session
from laminar.client.policy.record_accumulator import RecordAccumulator
from laminar.client.produce.named_producer import Named, begin_named
from laminar.client.produce.producer import DEFAULT_BATCH_BYTES, Delivery, Guard, put_record
from laminar.client.produce.sender import Sender
from laminar.client.produce.uploads import Upload, check_partition
from laminar.client.records import Receipt
from laminar.client.trace_id import TraceId, trace_id_bytes
from laminar.wire.key_route import Route


class TopicAppends:
    """The append operations of the topic `name`, on the client's event loop; made without I/O."""

    def __init__(self, session: Session, name: str) -> None:
        self.name = name
        self._session = session
        self._appender: asyncio.Task[Sender] | None = None

    async def append(
        self,
        raw: Any,
        key: str | bytes | None,
        *,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
        partition: int | None,
        timeout: float | None,
        trace_id: bytes | None = None,
        deliver_at_ms: int | None = None,
    ) -> Receipt:
        """Append one record by the shared sender; return its receipt when it is durable.

        Raises:
            OutcomeUnknown: `timeout` seconds passed without a receipt.
        """
        sender = await self.shared_sender()
        accumulator = sender.accumulator
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        pending = put_record(
            accumulator,
            raw,
            key,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            partition=partition,
            number=None,
            trace_id=trace_id,
            deliver_at_ms=deliver_at_ms,
        )
        delivery = Delivery(pending, len(pending.values) - 1)
        sender.wake()
        if timeout is None:
            return await delivery
        try:
            async with asyncio.timeout(timeout):
                return await delivery
        except TimeoutError as error:
            if isinstance(error, OutcomeUnknown) or pending.settled:
                raise
            raise OutcomeUnknown(
                f"appending to {self.name}/{pending.partition} got no receipt within {timeout:g} s",
                code="outcome_unknown",
                outcome="unknown",
            ) from None

    async def shared_sender(self) -> Sender:
        """Return the sender that all single appends of this topic share; the first call opens it."""
        if self._appender is None or (
            self._appender.done() and (self._appender.cancelled() or self._appender.exception() is not None)
        ):
            self._appender = self._session.loop.create_task(self.open_sender(stop_on_failure=False))
        sender = self._appender.result() if self._appender.done() else await asyncio.shield(self._appender)
        # The calls of `append` raise their failures themselves: the list of failures is not used.
        sender.accumulator.failures.clear()
        return sender

    async def open_sender(
        self,
        *,
        stop_on_failure: bool,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        window: int = 4,
        timeout: float | None = None,
        guard: Guard | None = None,
        name: str | None = None,
    ) -> Sender:
        """Return a new sender for this topic, with a new producer id, or with that of the producer `name`.

        With `stop_on_failure` a batch that fails for good also fails those after it in its partition.
        """
        places = await self._session.topic_map(self.name, timeout_s=timeout)
        named: Named | None = None
        if name is not None:
            named = await begin_named(self._session, self.name, name, timeout_s=timeout)
        route = places.route if named is None else named.route
        accumulator = RecordAccumulator(
            route=route,
            batch_bytes=batch_bytes,
            window=window,
            stop_on_failure=stop_on_failure,
            first_place=self._session.rng.randrange(len(route)),
            numbers=named.numbers if named is not None else None,
            epoch=named.epoch if named is not None else 0,
            # What an older map lists is there, and has ended if the route lacks it.
            gone=[
                number
                for number in places.numbers
                if number not in route and places.route.version <= route.version
            ],
        )
        sender = Sender(
            self._session,
            self.name,
            accumulator,
            producer_id=os.urandom(16) if named is None else named.producer_id,
            epoch=None if named is None else named.epoch,
            timeout_s=self._session.timeout_s if timeout is None else timeout,
            guard=guard,
        )
        self._session.opened(sender)
        return sender

    async def begin_upload(
        self,
        key: str | bytes | None,
        *,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
        trace_id: TraceId | None,
        partition: int | None,
        part_bytes: int,
        timeout: float | None,
    ) -> Upload:
        """Return an upload of one record, for a caller that writes its value piece by piece.

        Raises:
            ConfigError: `part_bytes` is below 1, or the topic has no such partition.
        """
        if part_bytes < 1:
            raise ConfigError(
                "a part has at least one byte", code="bad_part", field="part_bytes", value=part_bytes, limit=1
            )
        trace = trace_id_bytes(trace_id)
        places = await self._session.topic_map(self.name, timeout_s=timeout)
        route = places.route
        raw_key = key.encode() if isinstance(key, str) else key
        if partition is not None:
            check_partition(self.name, partition, route.numbers)

        def chosen(route: Route) -> int:
            if raw_key is not None:
                return route.partition_of_key(raw_key)
            return route.numbers[self._session.rng.randrange(len(route))]

        async def small(value: bytes) -> Receipt:
            return await self.append(
                value,
                raw_key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                timeout=timeout,
                trace_id=trace,
            )

        return Upload(
            self._session,
            self.name,
            chosen(route) if partition is None else partition,
            route=route.version,
            chosen=chosen if partition is None else None,
            key=raw_key,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            trace_id=trace,
            first_bytes=part_bytes,
            timeout_s=self._session.timeout_s if timeout is None else timeout,
            small=small,
        )

    def forget(self) -> None:
        """Let the next single append open a new sender, because the topic was deleted."""
        self._appender = None
