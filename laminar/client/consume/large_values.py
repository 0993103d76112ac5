"""The value of one record as a stream of pieces, for values of any length; one piece is read ahead.

Each piece is a request of its own for a range of bytes, to any replica. So a slow reader occupies no
connection, and if a node dies the next piece comes from another one. At the end, length and checksum are
compared with those of the append: a value that is read to its end without an error is whole.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from laminar.checksum import crc32c
from laminar.client.errors import ConfigError, Error
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.routing import readers
from laminar.client.produce.uploads import check_partition
from laminar.http.protocol.answer import Answer

PIECE_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,16})-([0-9]{1,16})/([0-9]{1,16})\Z", re.ASCII)


class Value:
    """A record's value: ``async with topic.open(partition, offset) as value``, then iterate or `read`.

    `size_bytes` is known within the block. With `id_`, the value is read only from the partition that has
    this id: not from one of a topic that was deleted and created again under the same name.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        partition: int,
        offset: int,
        *,
        timeout_s: float | None,
        id_: str = "",
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self._session = session
        self._timeout_s = timeout_s
        self._query = f"?id={id_}" if id_ else ""
        self._size_bytes = 0
        self._etag = ""
        self._stated: int | None = None
        self._checksum = 0
        self._asked = 0  # position of the first byte that has not arrived
        self._given = 0  # position of the first byte that `read` has not returned
        self._here: memoryview = memoryview(b"")
        self._next: asyncio.Task[Answer] | None = None
        self._opened = False

    def __repr__(self) -> str:
        size = f"{self._given} of {self._size_bytes} bytes" if self._opened else "not open"
        return f"<Value {self.topic}/{self.partition}@{self.offset} {size}>"

    @property
    def size_bytes(self) -> int:
        """Length of the value in bytes; known within the block."""
        self._check_open()
        return self._size_bytes

    async def __aenter__(self) -> Self:
        places = await self._session.topic_map(self.topic, timeout_s=self._timeout_s)
        check_partition(self.topic, self.partition, places.numbers)
        answer = await self._ask(0)
        self._etag = answer.headers.get("etag", "")
        if answer.status == 206:
            found = _CONTENT_RANGE.match(answer.headers.get("content-range", ""))
            if found is None:
                raise self._wrong("content-range", answer.headers.get("content-range"))
            self._size_bytes = int(found[3])
            self._stated = int(answer.headers["laminar-crc32c"], 16)
        else:
            self._size_bytes = len(answer.body)
        self._opened = True
        self._take(answer, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read(PIECE_BYTES):
            yield chunk

    async def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer at the end of a piece; b"" at the end of the value.

        A negative `size` means all bytes that are left.

        Raises:
            Error: (``bad_checksum``) at the end, if the value differs from what was appended.
            OffsetExpired: the record was trimmed meanwhile.
        """
        self._check_open()
        if size < 0:
            return b"".join([chunk async for chunk in self])
        if not len(self._here) and self._given < self._size_bytes:
            assert self._next is not None, f"{self!r} has nothing on its way"
            answer, start = await asyncio.shield(self._next), self._asked
            self._next = None
            self._take(answer, start)
        chunk = bytes(self._here[:size])
        self._here = self._here[size:]
        self._given += len(chunk)
        return chunk

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._opened = False
        self._here = memoryview(b"")
        task, self._next = self._next, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _take(self, answer: Answer, start: int) -> None:
        """Check a piece that arrived, keep it for `read`, and request the next one or verify the checksum."""
        body = memoryview(answer.body)
        if answer.status == 206 or start:
            expected = f"bytes {start}-{start + len(body) - 1}/{self._size_bytes}"
            if answer.headers.get("content-range") != expected or answer.headers.get("etag") != self._etag:
                raise self._wrong("content-range", answer.headers.get("content-range"), expected)
        self._here = body
        self._checksum = crc32c(body, self._checksum)
        self._asked = start + len(body)
        if self._asked < self._size_bytes:
            self._next = self._session.loop.create_task(self._ask(self._asked))
        elif self._stated is not None and self._checksum != self._stated:
            raise Error(
                f"{self.topic}/{self.partition}: the value at {self.offset} is not what was appended",
                code="bad_checksum",
                field="crc32c",
                value=f"{self._checksum:08x}",
                limit=f"{self._stated:08x}",
            )

    async def _ask(self, start: int) -> Answer:
        places = await self._session.topic_map(self.topic, timeout_s=self._timeout_s)
        leader = places.leader(self.partition)
        return await self._session.call(
            "GET",
            f"{topic_path(self.topic)}/partitions/{self.partition}/records/{self.offset}{self._query}",
            headers={"Range": f"bytes={start}-{start + PIECE_BYTES - 1}"},
            timeout_s=self._timeout_s,
            among=readers(places.replicas(self.partition), leader, from_leader=False),
        )

    def _check_open(self) -> None:
        if not self._opened:
            raise ConfigError("a value is read inside of its block", code="not_open")

    def _wrong(self, field: str, value: object, limit: object = None) -> Error:
        return Error(
            f"reading {self.topic}/{self.partition} at {self.offset}: another answer than was asked for",
            code="gap",
            field=field,
            value=value,
            limit=limit,
        )
