"""Reads sealed segments from their files, in threads of their own.

Readers of old records share the log's few reader threads, and a catch-up of gigabytes would delay them all.
So a catch-up reads the files itself, with aiofiles. The bytes are not verified here: the receiver verifies
every batch.
"""

from __future__ import annotations

import aiofiles


async def read_bytes(path: str, position: int, size: int) -> bytes:
    """Return `size` bytes of a file from `position` on; fewer if the file ends before.

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
