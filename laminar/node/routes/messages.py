"""What nodes tell each other of a change of a topic's route, beside the catalog's commands.

All of it is sent only while a change is under way, so only to programs that know it (docs/upgrading.md).
"""

from __future__ import annotations

import msgspec


class RouteProgress(msgspec.Struct, frozen=True):
    """What the catalog's leader knows of a topic's changes that the catalog does not record.

    A new leader begins without it.
    """

    id: int = 0
    """The change that is under way; 0: none that this leader has looked at."""
    waits_for: list[str] = []
    """What it waits for, as text for people."""
    cancelled: int = 0
    """The last change that this leader cancelled because its time was over; 0: none."""
    because: list[str] = []
    """What that change was waiting for."""
