"""Questions about the lineage of a topic's partitions, answered from the topic's record.

A change of a topic's route ends its *inputs* and begins its *outputs* over the same logical partitions
(`membership.route_rules`). The *ancestors* of a partition are its inputs, the inputs of these, and so on. The
records of a key lie in the ancestors of the partition that holds it now, oldest first, and then in that
partition.

The answers follow from one `TopicRecord`, which may be an old copy. `done` changes and reported seals never
change, so what an old copy says of them is true; it may lack the newest changes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from membership.records import KeyRange, RouteChange, Seal, TopicRecord
from membership.route_rules import route_of

Status = Literal["waiting", "open", "sealing", "sealed"]
State = Status | Literal["reclaimed"]


def order_setting_of(topic: TopicRecord) -> Literal["strict", "weak"]:
    """Return the topic's setting `order`: how a change of its route keeps the order of a key's records.

    With "strict" a consumer must have read the inputs to their ends before it reads an output; with "weak" it
    may read an output at once.
    """
    return "weak" if topic.settings.get("order") == "weak" else "strict"


def origin_of(topic: TopicRecord, number: int) -> RouteChange | None:
    """Return the change that made a partition, under way or done; None if it was made with its topic.

    None also if the change is no longer recorded; then all partitions before this one are reclaimed.
    """
    return next((each for each in _changes(topic) if number in [out.number for out in each.outputs]), None)


def end_change_of(topic: TopicRecord, number: int) -> RouteChange | None:
    """Return the change of the route that ends a partition, under way or done; None if there is none."""
    return next((each for each in _changes(topic) if number in [held.number for held in each.inputs]), None)


def seal_of(topic: TopicRecord, number: int) -> Seal | None:
    """Return the seal of a partition (its final end); None until its leader has reported one."""
    change = end_change_of(topic, number)
    return None if change is None else change.seals.get(number)


def state_of(topic: TopicRecord, number: int) -> State:
    """Return the state of a partition in the topic's routes.

    `waiting`: it is an output of a change that is not done. `open`: it takes records. `sealing`: a closing
    change ends it, and its leader has not reported the seal. `sealed`: its end is recorded. `reclaimed`: it
    was deleted.
    """
    origin, end = origin_of(topic, number), end_change_of(topic, number)
    if number not in topic.all_numbers:
        return "reclaimed"
    if origin is not None and origin.state != "done":
        return "waiting"
    if end is None or end.state == "preparing":
        return "open"
    return "sealed" if number in end.seals else "sealing"


def opened_in(topic: TopicRecord, number: int) -> int:
    """Return the version of the first route in which a partition takes records; 0 for the topic's first.

    Also 0 if the change that made it is no longer recorded: it is older than all that are recorded.
    """
    origin = origin_of(topic, number)
    return 0 if origin is None else origin.version


def outputs_of(topic: TopicRecord, number: int) -> list[int]:
    """Return the partitions that replaced a partition, in the order of their ranges; also those reclaimed.

    Empty until the change is done.
    """
    change = end_change_of(topic, number)
    if change is None or change.state != "done":
        return []
    return [each.number for each in change.outputs]


def inputs_of(topic: TopicRecord, number: int) -> list[int]:
    """Return the partitions that a partition replaces, in the order of their ranges; also those reclaimed."""
    origin = origin_of(topic, number)
    return [] if origin is None else [each.number for each in origin.inputs]


def ancestors_of(
    topic: TopicRecord, number: int, *, logical: int | None = None, only_strict: bool = False
) -> list[int]:
    """Return the ancestors of a partition that are not reclaimed, oldest first.

    With `logical` only those that held this logical partition. With `only_strict` only those that a consumer
    must have read to their ends before it reads this partition: the inputs of changes with strict order.
    """
    there = set(topic.all_numbers)
    found: list[int] = []
    wanted = {number}
    # An input of a change was made by an earlier one.
    for change in reversed(_changes(topic)):
        if wanted.isdisjoint(each.number for each in change.outputs):
            continue
        if only_strict and change.order == "weak":
            continue
        held = [
            each
            for each in change.inputs
            if logical is None or each.first <= logical < each.first + each.size
        ]
        wanted.update(each.number for each in held)
        found += [each.number for each in reversed(held) if each.number in there]
    return found[::-1]


def descendants_of(topic: TopicRecord, number: int) -> list[int]:
    """Return the partitions that replaced a partition, those that replaced these, and so on.

    Each comes after its inputs. Reclaimed ones are included. Only changes that are done are considered.
    """
    found: list[int] = []
    wanted = {number}
    for change in _changes(topic):
        if change.state == "done" and not wanted.isdisjoint(each.number for each in change.inputs):
            outputs = [each.number for each in change.outputs]
            wanted.update(outputs)
            found += outputs
    return found


def ended_ranges(topic: TopicRecord, *, since_ms: int) -> list[KeyRange]:
    """Return the ranges of the partitions that changes have ended and that are not reclaimed, oldest first.

    Those sealed before `since_ms` (ms since the epoch) are left out. After a forced change some may not be
    sealed yet: these are included.
    """
    there = set(topic.all_numbers)
    found: list[KeyRange] = []
    for change in topic.changes or ():
        for held in change.inputs:
            seal = change.seals.get(held.number)
            if held.number in there and (seal is None or seal.time_ms >= since_ms):
                found.append(held)
    return found


def generations(topic: TopicRecord) -> list[list[int]]:
    """Return the partitions that take or took records, in groups; ancestors are in earlier groups."""
    depth: dict[int, int] = {}
    for change in _changes(topic):
        below = 1 + max(depth.get(each.number, 0) for each in change.inputs)
        depth.update({each.number: below for each in change.outputs})
    found: dict[int, list[int]] = {}
    for number in topic.numbers:
        found.setdefault(depth.get(number, 0), []).append(number)
    return [found[each] for each in sorted(found)]


class Lineage(NamedTuple):
    """One partition's key range, status, predecessors (`inputs_of`) and successors (`outputs_of`)."""

    range: KeyRange
    status: Status
    inputs: list[int]
    outputs: list[int]


def lineages_of(topic: TopicRecord) -> dict[int, Lineage]:
    """Return by number the lineage of each partition that exists, in one pass over the changes."""
    ranges = {held.number: held for held in route_of(topic).ranges}
    inputs: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    states: dict[int, Status] = {}
    for change in _changes(topic):
        done, ended = change.state == "done", [held.number for held in change.inputs]
        for output in change.outputs:
            ranges.setdefault(output.number, output.range)
            inputs[output.number] = ended
            if not done:
                states[output.number] = "waiting"
        for held in change.inputs:
            ranges.setdefault(held.number, held)
            if change.state != "preparing":
                states[held.number] = "sealed" if held.number in change.seals else "sealing"
            if done:
                outputs[held.number] = [output.number for output in change.outputs]
    return {
        number: Lineage(
            ranges[number], states.get(number, "open"), inputs.get(number, []), outputs.get(number, [])
        )
        for number in topic.all_numbers
    }


def _changes(topic: TopicRecord) -> list[RouteChange]:
    return [*(topic.changes or ()), *([] if topic.change is None else [topic.change])]
