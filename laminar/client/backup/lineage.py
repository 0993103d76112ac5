"""The changes of a topic's route in a backup, and their repetition by an import.

An import fills the inputs of a change, and then splits or merges them as the original topic did: the outputs
get the same numbers and key ranges, and begin at offset 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from laminar.client.backup.manifest import Manifest, PartitionBackup, wrong
from laminar.client.errors import Error
from laminar.client.policy.lineage import Lineage


@dataclass(slots=True, frozen=True)
class Change:
    """A change that made the route of this version: its inputs, and the logical partitions of its cuts."""

    version: int
    inputs: list[int]
    cuts: list[int]
    outputs: list[int]


def changes_of(manifest: Manifest, *, where: str) -> list[Change]:
    """Return the changes of a backup's topic, oldest first.

    Raises:
        Error: (`unsupported`) the cluster had forgotten the oldest ones, or one was cancelled, so that
            partitions would get other numbers; (`damaged`) the manifest contradicts itself.
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
    """Return the manifest with all partitions that its topic ever had, empty where they were reclaimed.

    Each cursor is at the end of such a partition, so that no consumer waits for it.

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
    """Return a cursor's positions without those behind a partition that it has not read to its end.

    They were read one after the other, and it may have gone on meanwhile. It begins there at 0, and gets
    again what it had.
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
