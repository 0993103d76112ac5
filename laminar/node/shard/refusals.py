"""For which reason a shard takes no appends now: its disk or its journal is full, or space is low."""

from __future__ import annotations

from laminar.http.api.problems import Problem
from laminar.log.storage import Storage
from laminar.node.host.disk_space import DiskSpace


class Refusals:
    """The problems that one shard answers instead of taking an append; None if it takes it."""

    def __init__(self, storage: Storage, space: DiskSpace) -> None:
        self._storage = storage
        self._space = space

    def of_appends(self) -> Problem | None:
        """Return the problem for which no appends are taken now, or None."""
        return self._of_storage() or (self._space.refusal() if self._space.low else None)

    def of_trace(self) -> Problem | None:
        """Return the problem for which no events of the trace are taken now, or None.

        They are refused earlier than other appends while the disk fills.
        """
        return self._of_storage() or self._space.trace_refusal()

    def of_consumers(self) -> Problem | None:
        """Return the problem for which no cursors and receives of consumers are taken now, or None.

        They are refused later than other appends while the disk fills.
        """
        return self._of_storage() or self._space.consumer_refusal()

    def _of_storage(self) -> Problem | None:
        resource = self._storage.refusal
        if resource == "disk":
            return Problem("disk_full", "the disk of this node is full", field="disk", outcome="not_applied")
        if resource is not None:
            files, limit = self._storage.journal_files
            return Problem(
                "overloaded",
                f"the journal of this shard has {files} files without a checkpoint; the limit is {limit}",
                field="journal_files",
                value=files,
                limit=limit,
                retry_after_ms=100,
                outcome="not_applied",
            )
        return None
