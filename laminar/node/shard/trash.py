"""When the trash of a node is purged: it holds deleted logs until their time is over, or space is low."""

from __future__ import annotations

import asyncio

from laminar.log.disk.trash import Trash
from laminar.log.recovery.node import trash_directory
from laminar.node.host.clock import Clock
from laminar.node.host.disk_space import DiskSpace
from laminar.node.runtime.boot import Boot

TRASH_CHECK_S = 3600.0
# While space is low, the trash is emptied this often.
LOW_TRASH_CHECK_S = 1.0


async def purge_trash(boot: Boot, space: DiskSpace, clock: Clock) -> None:
    """Purge the node's trash at the start and every hour; empty it while disk space is low. Runs for ever.

    One shard of a node does this: it sets `space.on_change`, which has one user.
    """
    directory = trash_directory(boot.data_directory)
    trash = Trash(boot.environment.disk, directory, keep_ms=boot.settings.trash_ms)
    low = asyncio.Event()
    space.on_change = low.set
    while True:
        await trash.purge(now_ms=clock.wall_ms(), everything=space.low)
        low.clear()
        try:
            async with asyncio.timeout(LOW_TRASH_CHECK_S if space.low else TRASH_CHECK_S):
                await low.wait()
        except TimeoutError:
            continue
