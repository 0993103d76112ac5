"""When the snapshots of a shard's partitions are written: as their logs grow, and at an orderly end.

With snapshots of the partitions' state a start after a crash has little of the logs to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from laminar.log.storage import Storage
from laminar.node.host.periodic import Work
from laminar.node.partition import snapshot
from laminar.node.partition.partition import Partition

CHECK_S = 1.0


class Snapshots:
    """The snapshots of one shard's partitions."""

    def __init__(
        self,
        storage: Storage,
        watched: Callable[[Callable[[Partition], bool]], Callable[[], list[Partition]]],
    ) -> None:
        """Create it. `watched(keep)` returns a function that names the partitions to look at."""
        self._writer = snapshot.SnapshotWriter(storage)
        self._grown = watched(self._writer.due)

    def check(self) -> Work | None:
        """Return the work of writing the snapshots that are due, or None."""
        due = [partition for partition in self._grown() if self._writer.due(partition)]
        return self._write(due) if due else None

    async def _write(self, due: Sequence[Partition]) -> None:
        for partition in due:
            await self._writer.write(partition)

    async def write_at_end(self, partitions: Iterable[Partition]) -> None:
        """Write the snapshots that are worth it at an orderly end."""
        for partition in list(partitions):
            if partition.state.underived_bytes >= snapshot.WORTH_BYTES:
                await self._writer.write(partition)
