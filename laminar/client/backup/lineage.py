"""The splits and merges of a backup's topic, which an import repeats.

An import fills the partitions that a change replaced (its inputs), and then splits or merges them as the
original topic did: the new partitions (its outputs) get the same numbers and key ranges, from offset 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from laminar.client.backup.manifest import Manifest, PartitionBackup, wrong
from laminar.client.errors import Error
from laminar.client.policy.lineage import Lineage


@dataclass(slots=True, frozen=True)
class Change:
    """A split or merge that led to the route of this version.

    `inputs` are the partitions that it replaced, `outputs` the new ones, `cuts` the logical partitions at
    which all outputs but the first begin.
    """

    version: int
    inputs: list[int]
    cuts: list[int]
    outputs: list[int]


def changes_of(manifest: Manifest, *, where: str) -> list[Change]:
    """Return the changes of a backup's topic, oldest first.

    Raises:
        Error: (`unsupported`) the oldest changes are not known, or one was cancelled, so that partitions
            would get other numbers; (`damaged`) the manifest contradicts itself.
    """
    lineage = _lineage(manifest, where)
    found: list[Change] = []
    number = manifest.created_with
    for place, change in enumerate(lineage.changes, 1):
        outputs = sorted(change.outputs, key=lambda each: change.outputs[each].start)
        if change.version != place or outputs != list(range(number, number + len(outputs))):
            raise Error(
                f"{where}: not all changes of the topic's route are known, or one was cancelled: its "
                "partitions would get other numbers",
                code="unsupported",
                field="routes",
                value=outputs[:20],
                limit=number,
            )
        inputs = sorted(change.inputs, key=lambda each: each.held.start)
        found.append(
            Change(
                change.version,
                [each.partition for each in inputs],
                [change.outputs[each].start for each in outputs[1:]],
                outputs,
            )
        )
        number += len(outputs)
    return found


def whole_of(manifest: Manifest, *, where: str) -> Manifest:
    """Return the manifest with all partitions that its topic ever had; reclaimed (deleted) ones are empty.

    In a reclaimed partition each cursor is at the end, so that no consumer waits for its records.

    Raises:
        Error: (`damaged`) a partition is missing, or ends elsewhere than its route says.
    """
    lineage = _lineage(manifest, where)
    partitions = {each.partition: each for each in manifest.partitions}
    numbers = set(range(manifest.created_with)).union(*(each.outputs for each in lineage.changes))
    if partitions.keys() - numbers:
        raise wrong(where, "partitions", sorted(partitions.keys() - numbers), "those of its routes")
    ends: dict[str, int] = {}
    for number in sorted(numbers):
        ended, known = lineage.end_of(number), partitions.get(number)
        if known is None:
            if ended is None or not ended.reclaimed:
                raise wrong(where, "partitions", sorted(partitions), f"{number}, too")
            partitions[number] = PartitionBackup(number, "", ended.end, ended.end, None, [], [])
            ends[str(number)] = ended.end
        elif ended is not None and ended.end and ended.end != known.end_offset:
            raise wrong(where, f"partitions.{number}.end_offset", known.end_offset, ended.end)
    cursors = {name: ends | positions for name, positions in manifest.cursors.items()}
    if manifest.settings.get("order") != "weak":
        finals = {number: each.end_offset for number, each in partitions.items()}
        cursors = {name: _drained(lineage, positions, finals) for name, positions in cursors.items()}
    ordered = [partitions[number] for number in sorted(partitions)]
    return msgspec.structs.replace(manifest, partitions=ordered, cursors=cursors)


def _drained(lineage: Lineage, positions: dict[str, int], ends: dict[int, int]) -> dict[str, int]:
    """Return a cursor's positions, except in partitions whose ancestors it has not read to their ends.

    The export read the positions one after the other, while the cursor moved on. Without such a position the
    cursor begins in that partition at 0, and its consumers read some records again.
    """
    return {
        number: position
        for number, position in positions.items()
        if all(positions.get(str(each), 0) >= ends[each] for each in lineage.before(int(number)))
    }


def _lineage(manifest: Manifest, where: str) -> Lineage:
    try:
        return Lineage.from_answer(manifest.routes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise wrong(where, "routes", repr(error), "an answer of GET /v1/topics/{topic}/routes") from None
