"""The rules by which a process restarts to recover logs that failed.

A write or sync of a segment that fails stops that log alone; everything it acknowledged is in the journal,
and only a recovery can write it to the segment again. So, after a pause, and when the disk has room again,
the process shuts down and its supervisor starts it again. The pause doubles with each such restart, until the
process has lived for an hour without one: so a disk that fails for good rarely interrupts the other logs.
"""

from __future__ import annotations

from laminar.log.disk.errors import DiskError
from laminar.log.storage import Storage

EXIT_TO_RECOVER = 75
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 3600.0
# Period of the check whether a log has failed; and, after the pause, of the check whether there is room.
CHECK_S = 2.0
# A process that lived this long without such a restart begins with the first pause again.
FORGIVEN_MS = 3_600_000


class RestartToRecover(Exception):
    """This process ends so that its failed logs are recovered; the text says which."""


def pause_s(recovery_restarts: int) -> float:
    """Return the seconds to wait before a restart to recover, after `recovery_restarts` of them in a row."""
    return min(FIRST_PAUSE_S * (1 << min(recovery_restarts, 16)), LONGEST_PAUSE_S)


def failed_logs(storage: Storage) -> list[str]:
    """Return, as text, name and fault of each log that has failed and takes no more entries."""
    return [f"{log.name} ({log.failure})" for log in storage.failed_logs()]


def is_retriable(error: DiskError) -> bool:
    """Return whether a recovery that failed with `error` may be retried once the disk has room."""
    return error.is_full
