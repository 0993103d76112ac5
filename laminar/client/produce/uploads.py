"""Uploads of one record from a stream of bytes, in parts: one part is sent while the next one is filled.

A part is kept until it is durable. It may be sent several times, for example after an election: its number
makes that safe. So an upload needs the memory of two parts. At the end the leader compares length and
checksum of the stream with the parts that it has, before the record gets its offset. A stream that ends
within its first part is appended as an ordinary record.

A partition waits for its uploads before it ends (is replaced by a split, merge or move), unless an operator
abandons them. So only the first part can find its partition ended: it is refused, and the upload begins in
the partition that replaced the ended one, with the bytes that it has in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

from laminar.batch import BATCH_TYPE, BatchError, build
from laminar.checksum import crc32c
from laminar.client.codecs import not_bytes
from laminar.client.errors import Error, Sealed, no_partition
from laminar.client.net.attempts import now_ms
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.retry import Backoff
from laminar.client.policy.routing import TopicMap
from laminar.client.produce.sender import unbuildable
from laminar.client.records import Receipt
from laminar.http.protocol.answer import Answer
from laminar.wire.key_route import Route

# The appends of all other clients wait while a part is handled and written to the journal, on each replica.
# So parts are small, and one is sent at a time.
PART_BYTES = 1 << 18
# A record has at most 50,000 parts. With the default size the first 5 GB are sent in parts of that size; then
# the size doubles every `_OF_ONE_SIZE` parts.
_SMALL_ONES = 20_000
_OF_ONE_SIZE = 5_000
ABORT_TIMEOUT_S = 2.0
# The number of bytes of each `read` of a source that has such a method.
READ_BYTES = 1 << 18


def part_bytes(number: int, first_bytes: int, limit_bytes: int) -> int:
    """Return the length of part `number`, from 0.

    It is `first_bytes`; from part 20,000 on it doubles every 5,000 parts, up to `limit_bytes`.
    """
    doublings = max(0, number - _SMALL_ONES + _OF_ONE_SIZE) // _OF_ONE_SIZE
    return max(first_bytes, min(first_bytes << doublings, limit_bytes))


class Upload:
    """The upload of one record into a partition: `write`, then `finish` or `abort`, from one task at a time.

    The caller chose `partition` by version `route` of the topic's route. If the partition has ended before
    the upload begins, `chosen` returns the partition to use instead, from a newer route; it is None if the
    program named the partition, and the upload then fails with `Sealed`. `first_bytes` is the length of the
    first parts. `small` appends a value that fits into one part as an ordinary record. `timeout_s` limits
    each request.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        partition: int,
        *,
        route: int,
        chosen: Callable[[Route], int] | None,
        key: bytes | None,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
        trace_id: bytes | None,
        first_bytes: int,
        timeout_s: float,
        small: Callable[[bytes], Awaitable[Receipt]],
    ) -> None:
        self._session = session
        self._topic = topic
        self._partition = partition
        self._route = route
        self._chosen = chosen
        self._id = os.urandom(16).hex()
        try:
            self._record = build(
                [b""],
                keys=[key],
                tags=[tag],
                headers=[headers],
                timestamps=[timestamp_ms],
                trace_ids=[trace_id],
            )
        except (BatchError, TypeError, ValueError) as error:
            raise unbuildable(error) from None
        self._first_bytes = self._limit_bytes = first_bytes
        self._timeout_s = timeout_s
        self._small = small
        self._held = bytearray()
        self._checksum = 0
        self.size_bytes = 0
        self.parts = 0
        self._under_way: asyncio.Task[Any] | None = None

    async def write(self, chunk: bytes) -> None:
        """Add bytes to the value. If the part that is being filled is full, wait for the one under way.

        Raises:
            Error: the part under way failed.
        """
        if type(chunk) is not bytes and (wrong := not_bytes(chunk)) is not None:
            raise wrong
        view = memoryview(chunk).cast("B")
        self._checksum = crc32c(view, self._checksum)
        self.size_bytes += len(view)
        while len(view):
            wanted = part_bytes(self.parts, self._first_bytes, self._limit_bytes)
            if len(self._held) == wanted:
                # A full part is sent only when more bytes come, so that a value of exactly one part is
                # `small`.
                await self._send_held()
                continue
            taken = wanted - len(self._held)
            self._held += view[:taken]
            view = view[taken:]

    async def finish(self) -> Receipt:
        """Send the last part and append the record; return its receipt when it is durable."""
        if not self.parts:
            return await self._small(bytes(self._held))
        await self._send_held()
        await self._sent()
        answer = await self._call(
            "POST",
            f"?parts={self.parts}&size_bytes={self.size_bytes}&crc32c={self._checksum:08x}",
            bytes(self._record),
            {"Content-Type": BATCH_TYPE, "Laminar-Route": str(self._route)},
        )
        said = answer.json()
        durable = said["durable"]
        return Receipt(
            self._partition,
            int(said["placed"][0]["offset"]),
            int(durable["replicas"]),
            bool(durable["synced"]),
        )

    async def abort(self) -> None:
        """Remove the uploaded parts. If that fails, the partition removes them later by itself."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
        if self.parts and not self._session.closed:
            with contextlib.suppress(Error):
                await self._session.call("DELETE", self._path, timeout_s=ABORT_TIMEOUT_S)

    async def _send_held(self) -> None:
        held, self._held = self._held, bytearray()
        number = self.parts
        self.parts += 1
        if number == 0:
            limits = await self._session.get_json("/v1/limits", timeout_s=self._timeout_s)
            self._limit_bytes = int(limits["max_body_bytes"])
        await self._sent()
        call = self._call("PUT", f"/parts/{number}", held) if number else self._begin(held)
        self._under_way = self._session.loop.create_task(call)

    async def _begin(self, part: bytearray) -> Answer:
        """Send the first part; if its partition has ended, send it to the one that replaced it."""
        while True:
            try:
                return await self._call("PUT", "/parts/0", part)
            except Sealed as sealed:
                if self._chosen is None:
                    raise
                places = await self._followed(sealed)
                self._partition, self._route = self._chosen(places.route), places.route.version

    async def _followed(self, sealed: Sealed) -> TopicMap:
        """Return the topic's map with the route after `sealed`. Raises `sealed` if no node has it in time."""
        wanted = sealed.limit if isinstance(sealed.limit, int) else self._route + 1
        deadline_ms = now_ms() + int(1000 * self._timeout_s)
        backoff = Backoff(rng=self._session.rng)
        while True:
            places = await self._session.topic_map(self._topic, timeout_s=self._timeout_s)
            if places.route.version >= wanted:
                return places
            if now_ms() > deadline_ms:
                raise sealed
            places.stale = True
            await asyncio.sleep(backoff.next_ms() / 1000)

    @property
    def _path(self) -> str:
        return f"{topic_path(self._topic)}/partitions/{self._partition}/uploads/{self._id}"

    async def _sent(self) -> None:
        """Wait until the part under way is durable, if there is one; raise its error."""
        if self._under_way is not None:
            await self._under_way

    async def _call(
        self, method: str, more: str, body: bytes | bytearray, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await self._session.call(
            method,
            self._path + more,
            body=body,
            headers=headers,
            timeout_s=self._timeout_s,
            first=await self._leader(),
        )

    async def _leader(self) -> str | None:
        """Return the URL of the partition's leader; None if the leader is not known or failed lately.

        A request sent to any other node would be forwarded, and the bytes of the part sent twice.
        """
        places = await self._session.topic_map(self._topic, timeout_s=self._timeout_s)
        url = places.leader(self._partition)
        if url is not None and self._session.balancer.is_avoided(url, now_ms=now_ms()):
            places.forget_leader(self._partition, url)
            return None
        return url


async def chunks_of(source: Any) -> AsyncIterator[bytes]:
    """Yield the bytes of `source`: an async iterable, or a stream with an async `read`.

    Raises:
        TypeError: it is neither.
    """
    read = getattr(source, "read", None)
    if read is not None:
        while chunk := await read(READ_BYTES):
            yield chunk
    elif isinstance(source, AsyncIterable):
        async for chunk in source:
            yield chunk
    else:
        kind = type(source).__name__
        raise TypeError(f"a stream gives bytes by `async for` or `await read(n)`, which {kind} does not")


def joined_chunks_of(source: Any) -> Iterator[bytes]:
    """Yield the bytes of `source`, a file or an iterable of bytes, whose small pieces are joined.

    Raises:
        TypeError: it is neither, or is itself bytes or text.
    """
    read = getattr(source, "read", None)
    if read is not None:
        while chunk := read(READ_BYTES):
            yield chunk
        return
    if not isinstance(source, Iterable) or isinstance(source, (bytes, bytearray, memoryview, str)):
        raise TypeError(f"a stream is a file or gives bytes by `for`, which {type(source).__name__} does not")
    held = bytearray()
    for chunk in source:
        if type(chunk) is not bytes and (wrong := not_bytes(chunk)) is not None:
            raise wrong
        if not held and len(chunk) >= READ_BYTES:
            yield chunk
            continue
        held += chunk
        if len(held) >= READ_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def check_partition(topic: str, partition: int, numbers: Sequence[int]) -> None:
    """Raise `ConfigError` if `partition` is not in `numbers`, the partitions of the topic."""
    if partition not in numbers:
        raise no_partition(partition, numbers, topic=f"topic {topic}")
