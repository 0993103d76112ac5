"""Reads sealed segments from their files, in threads of their own.

Readers of cold records share the log's few reader threads by turns; a catch-up of gigabytes has no place in
that queue. So it reads the files itself, with aiofiles. What is read is not trusted: the receiver verifies
every batch.
"""

from __future__ import annotations

import aiofiles


async def read_bytes(path: str, position: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from `position` on.

    Raises:
        OSError: the file cannot be read.
    """
    async with aiofiles.open(path, "rb", buffering=0) as file:
        await file.seek(position)
        parts = []
        while size > 0:
            part = await file.read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
    return b"".join(parts)
