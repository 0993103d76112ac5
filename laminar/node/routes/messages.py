"""Messages between nodes about a change of a topic's route, beside the catalog's commands.

All of it is sent only while a change is under way, so only to programs that know it (docs/upgrading.md).
"""

from __future__ import annotations

import msgspec


class RouteProgress(msgspec.Struct, frozen=True):
    """The catalog leader's knowledge of a topic's changes that the catalog does not record.

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


QUESTION = "route_question"
"""The method of a shard that answers a `PartitionQuestion`."""

SYNCED_SEAL = "route_synced_seal"
"""The method of a shard that answers a `SealQuestion`."""


class PartitionQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Ask a replica of an input or output what prevents the change from closing.

    For `hold_ms` its leader begins no transaction and no upload (0: it begins them). With `drop` it drops
    those that are under way and not prepared.
    """

    group: bytes
    hold_ms: int = 0
    drop: bool = False


class PartitionAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a replica; only that of a leader says more."""

    leads: bool = False
    under_way: int = 0
    """Transactions and uploads that are not published."""
    prepared: int = 0
    """Those of them that may be decided."""
    refused: str = ""
    """Why it takes no records now, as text for people; empty if it does."""


class SealQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Ask a replica of an input to sync its log, and for the seal that is synced in it then."""

    group: bytes


class SealAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Index and term of the seal that a replica has synced; both 0: none."""

    index: int = 0
    term: int = 0
