"""The flush policy of a log, which says when an append is acknowledged. Values only.

With `commit` that is when the journal's sync has returned. With `interval` it is when the append is written,
so that it survives the end of the process; it is synced within a number of milliseconds, or after a number of
records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPolicy:
    """A flush policy: `commit` if `interval_ms` is 0, else `interval`.

    Under `interval` a record is synced within `interval_ms`, or when there are `interval_records` unsynced
    records (0: there is no such limit).
    """

    interval_ms: int = 0
    interval_records: int = 0

    def __post_init__(self) -> None:
        assert self.interval_ms >= 0 and self.interval_records >= 0, f"a policy of {self}"
        assert self.interval_ms or not self.interval_records, "a limit of records goes with one of time"

    @property
    def is_interval(self) -> bool:
        """Whether appends are acknowledged before they are synced."""
        return self.interval_ms > 0

    @property
    def name(self) -> str:
        """The policy's name in settings and reports: ``commit`` or ``interval``."""
        return "interval" if self.interval_ms else "commit"


COMMIT = FlushPolicy()
