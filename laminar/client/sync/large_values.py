"""Values as streams without a loop: the sync face of `consume.large_values`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from laminar.client.consume import large_values as aio_values
from laminar.client.consume.large_values import PIECE_BYTES
from laminar.client.sync.portal import Portal


class Value:
    """A record's value: ``with topic.open(partition, offset) as value``, then iterate or `read`.

    `read` is a file's: ``shutil.copyfileobj(value, file)``.
    """

    def __init__(self, portal: Portal, value: aio_values.Value) -> None:
        self.topic = value.topic
        self.partition = value.partition
        self.offset = value.offset
        self._portal = portal
        self._twin = value

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read(PIECE_BYTES):
            yield chunk

    # generated from laminar.client.consume.large_values.Value

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

    @property
    def size_bytes(self) -> int:
        """Length of the value in bytes; known within the block."""
        return self._twin.size_bytes

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer at the end of a piece; b"" at the end of the value.

        A negative `size` means all bytes that are left.

        Raises:
            Error: (``bad_checksum``) at the end, if the value differs from what was appended.
            OffsetExpired: the record was trimmed meanwhile.
        """
        return self._portal.run(lambda: self._twin.read(size))

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._portal.run(lambda: self._twin.close())
