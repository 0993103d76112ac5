"""Offsets of a streaming query as Spark journals them, and places to start or end. Pure.

Spark compares offsets as JSON *text*: the same positions in another order would be news for ever. So
there is one way to write them: ``{"TOPIC:PARTITION": n, ..., "v": 1}``, keys sorted, integers only.

A query's first offset is symbolic, ``{"start": ..., "v": 1}``: Spark asks for it again after a restart
within batch 0, and "latest" would then mean something later, with the records between lost. The first
`latestOffset` makes it concrete, and an empty batch 0 pins that in the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

VERSION: Final = 1
# As in the Kafka source's JSON.
LATEST: Final = -1
EARLIEST: Final = -2

Partition = tuple[str, int]
Positions = dict[Partition, int]


def partition_key(partition: Partition) -> str:
    """``TOPIC:PARTITION``; a colon is in no topic's name."""
    return f"{partition[0]}:{partition[1]}"


def encode(positions: Mapping[Partition, int]) -> dict[str, int]:
    """The one offset that stands for `positions`, in the order in which it is written."""
    flat = {partition_key(partition): int(offset) for partition, offset in positions.items()}
    flat["v"] = VERSION
    return dict(sorted(flat.items()))


def decode(offset: Mapping[str, Any]) -> Positions:
    """The positions of an offset that is not symbolic. ValueError if a newer version wrote it."""
    version = offset.get("v", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(f"the checkpoint's offsets are of version {version}; this program reads {VERSION}")
    positions: Positions = {}
    for key, value in offset.items():
        topic, colon, number = key.rpartition(":")
        if colon:
            positions[(topic, int(number))] = int(value)
    return positions


@dataclass(frozen=True, slots=True)
class Place:
    """Where to start or end: by `kind`, with values by partition where it needs some.

    Kinds: ``earliest``, ``latest``, ``offsets`` (`values` by partition, LATEST and EARLIEST too),
    ``timestamp`` (`time_ms`, for all partitions) and ``timestamps`` (`values` are epoch ms).
    """

    kind: str
    time_ms: int = 0
    values: Mapping[Partition, int] = field(default_factory=dict)

    def symbol(self) -> dict[str, Any]:
        """The symbolic offset of a query that starts here, in canonical order."""
        meaning: Any = self.kind
        if self.kind == "timestamp":
            meaning = {self.kind: self.time_ms}
        elif self.values:
            meaning = {self.kind: dict(sorted((partition_key(p), n) for p, n in self.values.items()))}
        return {"start": meaning, "v": VERSION}


AT_EARLIEST: Final = Place("earliest")
AT_LATEST: Final = Place("latest")


def place_of_symbol(offset: Mapping[str, Any]) -> Place | None:
    """The place that a symbolic offset names; None if the offset is concrete."""
    meaning = offset.get("start")
    if meaning is None:
        return None
    if isinstance(meaning, str):
        return Place(meaning)
    ((kind, given),) = meaning.items()
    if kind == "timestamp":
        return Place(kind, time_ms=int(given))
    return Place(kind, values=decode(given))


def parse_offsets(text: str, *, option: str, names: Mapping[str, int]) -> dict[Partition, int]:
    """``{"TOPIC": {"0": 23, "1": -2}}`` as the Kafka source has it; `names` are the numbers with a meaning.

    ValueError for anything else.
    """
    form = f'{option} is {", ".join(repr(name) for name in names)} or JSON as {{"topic": {{"0": 23}}}}'
    try:
        given = json.loads(text)
        found = {
            (str(topic), int(number)): int(offset)
            for topic, by_partition in given.items()
            for number, offset in by_partition.items()
        }
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{form}, not {text!r}") from None
    for (topic, number), offset in found.items():
        if number < 0 or (offset < 0 and offset not in names.values()):
            raise ValueError(f"{option}: there is no offset {offset} in {topic}/{number}")
    return found
