"""Reading sealed segments as they lie there, off the loop and past the log's own readers.

Whoever reads cold records takes turns with others in the log's few reader threads; a catch-up of gigabytes
has no place in that queue. So it reads the files by itself, with aiofiles. Nothing read here is believed: the
receiver verifies every batch.
"""

from __future__ import annotations

import aiofiles


async def read_bytes(path: str, position: int, size: int) -> bytes:
    """Up to `size` bytes of a file from `position` on. Raises OSError."""
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
