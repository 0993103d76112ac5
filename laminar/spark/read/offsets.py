"""Offsets of a streaming query as Spark journals them, and places to start or end. Pure.

Spark compares offsets as JSON *text*: the same positions in another order would be news for ever. So
there is one way to write them, keys sorted::

    {"TOPIC:PARTITION": n, ..., "ids": {"TOPIC:PARTITION": "ID", ...}, "v": 2}

The ids are those of the partitions (`/partitions` shows them): a topic that is deleted and made again has
others, and offsets of the old one mean nothing in it.

A query's first offset is symbolic, ``{"start": ..., "v": 2}``: Spark asks for it again after a restart
within batch 0, and "latest" would then mean something later, with the records between lost. The first
`latestOffset` makes it concrete: the end of batch 0 also says, as ``since``, where that batch begins. So the
journal has it before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

VERSION: Final = 2
# As in the Kafka source's JSON.
LATEST: Final = -1
EARLIEST: Final = -2

Partition = tuple[str, int]
Positions = dict[Partition, int]
# The id of each partition.
Ids = dict[Partition, str]


@dataclass(frozen=True, slots=True)
class Offset:
    """An offset of the journal that is not symbolic. `since`: where the batch begins that it is the end of,
    if that is the query's first.
    """

    positions: Positions
    ids: Ids
    since: Positions | None = None


def partition_key(partition: Partition) -> str:
    """``TOPIC:PARTITION``; a colon is in no topic's name."""
    return f"{partition[0]}:{partition[1]}"


def encode(
    positions: Mapping[Partition, int],
    ids: Mapping[Partition, str] | None = None,
    *,
    since: Mapping[Partition, int] | None = None,
) -> dict[str, Any]:
    """The one offset that stands for these positions and ids, in the order in which it is written."""
    flat: dict[str, Any] = dict(_keyed(positions))
    if ids is not None:
        flat["ids"] = _keyed(ids)
    if since is not None:
        flat["since"] = _keyed(since)
    flat["v"] = VERSION
    return dict(sorted(flat.items()))


def _keyed(values: Mapping[Partition, Any]) -> dict[str, Any]:
    return dict(sorted((partition_key(partition), value) for partition, value in values.items()))


def decode(offset: Mapping[str, Any]) -> Offset:
    """An offset that is not symbolic. ValueError if another version wrote it.

    What version 1 wrote does not say which partitions it belongs to: nobody can tell whether they are still
    the same.
    """
    version = offset.get("v", VERSION)
    if version != VERSION:
        raise ValueError(
            f"the checkpoint's offsets are of version {version}; this program reads {VERSION}."
            " Begin with a new checkpoint, or with the version of Laminar that wrote this one"
        )
    since = offset.get("since")
    return Offset(
        {partition: int(n) for partition, n in _by_partition(offset).items()},
        {partition: str(id_) for partition, id_ in _by_partition(offset.get("ids", {})).items()},
        None if since is None else {partition: int(n) for partition, n in _by_partition(since).items()},
    )


def _by_partition(keyed: Mapping[str, Any]) -> dict[Partition, Any]:
    found = {}
    for key, value in keyed.items():
        topic, colon, number = key.rpartition(":")
        if colon:
            found[(topic, int(number))] = value
    return found


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
            meaning = {self.kind: _keyed(self.values)}
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
    return Place(kind, values={partition: int(n) for partition, n in _by_partition(given).items()})


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
