"""Messages between nodes about a change of a topic's route, beside the catalog's commands.

They are sent only while a change is under way, so only to programs that know them (docs/upgrading.md).
"""

from __future__ import annotations

import msgspec


class RouteProgress(msgspec.Struct, frozen=True):
    """The progress of changes to a topic's route (which partition holds which keys).

    It tells what the change under way waits for, and why the previous change was cancelled, if it was.

    Only the catalog's leader has this, in memory: the catalog does not record it, and a new leader begins
    without it.
    """

    id: int = 0
    """The change that is under way; 0: none that this leader has looked at."""
    waits_for: list[str] = []
    """What it waits for, as text for people."""
    cancelled: int = 0
    """The last change that this leader cancelled because its time was over; 0: none."""
    because: list[str] = []
    """What that change was waiting for."""


QUESTION = "route_question"
"""The method of a shard that answers a `PartitionQuestion`."""

SYNCED_SEAL = "route_synced_seal"
"""The method of a shard that answers a `SealQuestion`."""


class PartitionQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Ask a replica of an input or output of a change what prevents the change from closing.

    If the replica leads, it begins no transaction and no upload for `hold_ms` (0: no restriction), and with
    `drop` drops those that are under way and not prepared.
    """

    group: bytes
    hold_ms: int = 0
    drop: bool = False


class PartitionAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A replica's answer to a `PartitionQuestion`; if it does not lead, all fields have their defaults."""

    leads: bool = False
    under_way: int = 0
    """Transactions and uploads that are not published."""
    prepared: int = 0
    """Those of them that may be decided."""
    refused: str = ""
    """Why it takes no records now, as text for people; empty if it does."""


class SealQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Ask a replica of an input to sync its log; it answers with the seal (the last entry) in its log."""

    group: bytes


class SealAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The index and term of the seal in a replica's log, once it is on its disk; both 0 if there is none."""

    index: int = 0
    term: int = 0
