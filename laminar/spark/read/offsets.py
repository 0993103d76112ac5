"""Offsets of a streaming query as Spark writes them to its journal, and where queries start or end. Pure.

Spark's journal is the folder ``offsets`` of a query's checkpoint. Spark compares offsets as JSON *text*, so
the same positions in another order would count as new records. So there is one way to write them, with sorted
keys::

    {"TOPIC:PARTITION": n, ..., "ids": {"TOPIC:PARTITION": "ID", ...}, "v": 2}

``ids`` has the id of each partition, as the API's ``/partitions`` shows it. A topic that is deleted and
created again has partitions with other ids, and offsets of the old ones mean nothing in them.

A query's first offset is *symbolic*, ``{"start": ..., "v": 2}``, and all others are *concrete*. Spark asks
for the first offset again after a restart within batch 0. If it were concrete, "latest" would then be a later
offset, and the records in between would be lost. The first `latestOffset` resolves it: the end of batch 0
also holds, as ``since``, the positions where that batch begins. So Spark's journal has them before anything
is read.
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
    """A concrete offset (one with numbers) of Spark's journal: the next offset and the id of each partition.

    `since` is set only in the end offset of a query's first batch: the positions where that batch begins.
    """

    positions: Positions
    ids: Ids
    since: Positions | None = None


def partition_key(partition: Partition) -> str:
    """Return ``TOPIC:PARTITION``. No topic's name holds a colon."""
    return f"{partition[0]}:{partition[1]}"


def encode(
    positions: Mapping[Partition, int],
    ids: Mapping[Partition, str] | None = None,
    *,
    since: Mapping[Partition, int] | None = None,
) -> dict[str, Any]:
    """Return these positions and ids as an offset for Spark, with its keys in the canonical order."""
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
    """Return the content of a concrete offset (one with positions), decoded from Spark's JSON document.

    Raises:
        ValueError: when another version wrote it. Version 1 wrote no ids, so it is unknown whether its
            partitions still exist.
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
class OffsetSpec:
    """The start or end of a query as its options give it, before the cluster resolves it to offsets.

    `kind` is ``earliest``, ``latest``, ``offsets`` (`values` by partition, which may be LATEST or EARLIEST),
    ``timestamp`` (`time_ms`, in epoch ms, for all partitions) or ``timestamps`` (`values` by partition, in
    epoch ms).
    """

    kind: str
    time_ms: int = 0
    values: Mapping[Partition, int] = field(default_factory=dict)

    def symbol(self) -> dict[str, Any]:
        """Return the symbolic offset of a query that starts here, with keys in canonical order."""
        meaning: Any = self.kind
        if self.kind == "timestamp":
            meaning = {self.kind: self.time_ms}
        elif self.values:
            meaning = {self.kind: _keyed(self.values)}
        return {"start": meaning, "v": VERSION}


AT_EARLIEST: Final = OffsetSpec("earliest")
AT_LATEST: Final = OffsetSpec("latest")


def spec_of_symbol(offset: Mapping[str, Any]) -> OffsetSpec | None:
    """Return the start that a symbolic offset names; None if the offset is concrete."""
    meaning = offset.get("start")
    if meaning is None:
        return None
    if isinstance(meaning, str):
        return OffsetSpec(meaning)
    ((kind, given),) = meaning.items()
    if kind == "timestamp":
        return OffsetSpec(kind, time_ms=int(given))
    return OffsetSpec(kind, values={partition: int(n) for partition, n in _by_partition(given).items()})


def parse_offsets(text: str, *, option: str, names: Mapping[str, int]) -> dict[Partition, int]:
    """Return offsets by partition from the Kafka source's JSON, ``{"TOPIC": {"0": 23, "1": -2}}``.

    `names` maps each word that the option permits to the negative number that stands for it in the JSON, as
    "latest" to -1; no other negative offset is permitted. `option` is the option's name, for errors.

    Raises:
        ValueError: for any other text.
    """
    form = f'{option} must be {", ".join(repr(name) for name in names)} or JSON as {{"topic": {{"0": 23}}}}'
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
