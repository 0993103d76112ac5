"""A topic on an event loop: append, produce, read, cursors, descriptions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from laminar.client.codecs import Codec, not_bytes
from laminar.client.decisions_window import Outbox
from laminar.client.errors import OutcomeUnknown
from laminar.client.producer import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_BUFFER_BYTES,
    Delivery,
    Producer,
    lane_for,
)
from laminar.client.reader import (
    FETCH_BYTES,
    READ_AHEAD_BYTES,
    CursorState,
    Reader,
    Start,
    start_parameter,
)
from laminar.client.records import PartitionInfo, Receipt, TopicInfo, identity
from laminar.client.sender import Sender
from laminar.client.session import Session, topic_path
from laminar.route import Route

if TYPE_CHECKING:
    import contextlib

T = TypeVar("T")


class Topic(Generic[T]):
    """A topic by name; made by ``client.topic(name)`` without I/O. ``T`` is what its values are."""

    def __init__(self, session: Session, name: str, codec: Codec[T] | None) -> None:
        self.name = name
        self.codec = codec
        self._session = session
        self._appender: asyncio.Task[Sender] | None = None

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"

    # -- writing -------------------------------------------------------------------------------

    async def append(
        self,
        value: T,
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; durable as the topic promises when this returns.

        Appends that run at the same time are joined into batches. Never doubled, whatever happens
        on the way; `OutcomeUnknown` if the deadline passed without a receipt.
        """
        sender = await self._appending()
        outbox = sender.outbox
        raw: Any = value if self.codec is None else self.codec.encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        lane = lane_for(outbox, key, partition)
        if tag is None and headers is None and timestamp_ms is None:
            pending = outbox.put(raw, key, lane)
        else:
            pending = outbox.put_with(raw, key, lane, tag=tag, headers=headers, timestamp_ms=timestamp_ms)
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

    async def _appending(self) -> Sender:
        """The sender that all plain appends of this topic share."""
        if self._appender is None or (
            self._appender.done() and (self._appender.cancelled() or self._appender.exception() is not None)
        ):
            self._appender = self._session.loop.create_task(self.open_sender(stop_on_failure=False))
        sender = self._appender.result() if self._appender.done() else await asyncio.shield(self._appender)
        # Nobody asks for the failures of an append but the append itself.
        sender.outbox.failures.clear()
        return sender

    async def open_sender(
        self,
        *,
        stop_on_failure: bool,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        window: int = 4,
        timeout: float | None = None,
        guard: contextlib.AbstractContextManager[Any] | None = None,
    ) -> Sender:
        """An engine with an outbox for this topic's partitions, under a new producer id."""
        places = await self._session.topic_map(self.name, timeout_s=timeout)
        route = Route.even(len(places.places))
        outbox = Outbox(
            partitions=len(places.places),
            partition_of_key=route.partition_of_key,
            batch_bytes=batch_bytes,
            window=window,
            stop_on_failure=stop_on_failure,
            first_partition=self._session.rng.randrange(len(places.places)),
        )
        sender = Sender(
            self._session,
            self.name,
            outbox,
            producer_id=os.urandom(16),
            timeout_s=self._session.timeout_s if timeout is None else timeout,
            guard=guard,
        )
        self._session.senders.add(sender)
        return sender

    def producer(
        self,
        *,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        window: int = 4,
        timeout: float | None = None,
    ) -> Producer[T]:
        """A stream of records: batches of up to `batch_bytes`, up to `window` of a partition in flight.

        A record is sent as soon as its partition has nothing in flight, or a batch is full. `timeout`
        in seconds is how long a record may go without its receipt, over all retries.
        """

        async def begin() -> Sender:
            return await self.open_sender(
                stop_on_failure=True, batch_bytes=batch_bytes, window=window, timeout=timeout
            )

        return Producer(
            begin,
            topic=self.name,
            encode=None if self.codec is None else self.codec.encode,
            buffer_bytes=buffer_bytes,
        )

    # -- reading -------------------------------------------------------------------------------

    def read(
        self,
        start: Start = "earliest",
        *,
        follow: bool = False,
        cursor: str | None = None,
        partitions: Iterable[int] | None = None,
        from_leader: bool = False,
        timeout: float | None = None,
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Reader[T]:
        """Records from `start`, or from where `cursor` was committed, to the end as it is now.

        `start`: ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or ``{partition: offset}``. With
        `follow` it goes on for ever. `from_leader` reads only what is newest; without it any replica
        answers that is not behind what this client has seen. `read_ahead_bytes` is per partition.
        """
        decode: Any = identity if self.codec is None else self.codec.decode
        return Reader(
            self._session,
            self.name,
            start=start,
            follow=follow,
            cursor=cursor,
            partitions=partitions,
            from_leader=from_leader,
            decode=decode,
            timeout_s=timeout,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
        )

    async def cursors(self) -> list[str]:
        """The names of all cursors."""
        answer = await self._session.get_json(f"{topic_path(self.name)}/cursors")
        return [str(each["cursor"] if isinstance(each, dict) else each) for each in answer["cursors"]]

    async def cursor(self, name: str) -> dict[int, int]:
        """A cursor's committed positions by partition; {} if there is none."""
        return await CursorState(self._session, self.name, name).load()

    async def set_cursor(self, name: str, positions: Mapping[int, int]) -> None:
        """Move a cursor; `PreconditionFailed` if it was moved meanwhile."""
        state = CursorState(self._session, self.name, name)
        await state.load()
        await state.commit(positions)

    async def delete_cursor(self, name: str) -> None:
        await CursorState(self._session, self.name, name).delete()

    # -- describing ----------------------------------------------------------------------------

    async def describe(self) -> TopicInfo:
        return TopicInfo.from_answer(await self._session.get_json(topic_path(self.name)))

    async def partitions(self) -> list[PartitionInfo]:
        answer = await self._session.get_json(f"{topic_path(self.name)}/partitions")
        rows = [PartitionInfo.from_answer(row) for row in answer["partitions"]]
        return sorted(rows, key=lambda row: row.partition)

    async def offsets(self, at: str = "latest") -> dict[int, int]:
        """The offset in each partition at ``"earliest"``, ``"latest"`` or a time."""
        import time

        place = start_parameter(at, now_ms=time.time_ns() // 1_000_000)
        places = await self._session.topic_map(self.name)
        partitions = range(len(places.places))
        found = await asyncio.gather(
            *(self._session.offset_at(self.name, partition, place) for partition in partitions)
        )
        return dict(zip(partitions, found, strict=True))

    async def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records, as it is now; NotFound if it is gone."""
        description = await self._session.call("GET", topic_path(self.name), timeout_s=timeout)
        headers = {"If-Match": description.headers["etag"]} if "etag" in description.headers else {}
        await self._session.call(
            "DELETE", topic_path(self.name), headers=headers, accept=(404,), timeout_s=timeout
        )
        self._session.forget_topic(self.name)
        self._appender = None
