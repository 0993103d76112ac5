"""A log that failed comes back by itself: its process ends in order, and recovery writes it again.

A write or sync of a segment that fails stops that log alone; everything it acknowledged is in the journal,
and only a recovery can put it where it belongs. So, after a pause, and when the disk has room again, the
process ends as on an order to stop, and its supervisor starts it anew. Each time that this happens within an
hour the pause doubles: a disk that fails for good costs the other logs of the process a moment now and then.
"""

from __future__ import annotations

from laminar.log.disk.errors import DiskError
from laminar.log.storage import Storage

EXIT_COMEBACK = 75
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 3600.0
# How often somebody looks whether a log has failed, and then whether there is room.
LOOK_S = 2.0
# A process that has lived so long with no need to come back begins with the first pause again.
FORGIVEN_MS = 3_600_000


class ComeBack(Exception):
    """This process ends so that its failed logs are recovered; the text says which."""


def pause_s(comebacks: int) -> float:
    """How long to wait when it came back so often already."""
    return min(FIRST_PAUSE_S * (1 << min(comebacks, 16)), LONGEST_PAUSE_S)


def failed_logs(storage: Storage) -> list[str]:
    """Name and reason of each log that takes no more entries."""
    return [f"{log.name} ({log.failure})" for log in storage.logs.values() if log.failure is not None]


def may_pass(error: DiskError) -> bool:
    """Whether a recovery that failed is worth trying again by the same process: when there is room again."""
    return error.is_full
