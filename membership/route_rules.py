"""The rules of changes to a topic's route: partitions split, merge and move, by pure steps.

A *change* replaces neighbouring partitions, its *inputs*, by new ones over the same range, its *outputs*. A
*seal* is the entry that ends an input for good. The catalog decides only what all must agree on; the proposer
of a step knows whether an input may be sealed, and whether its seal is on the disks of a majority. The
functions are rules as in `catalog_rules`: each compares and sets, so another proposer can continue at any
step, and a repeated step has the outcome `exists`.

1. Every route of a topic gives each logical partition to one partition.
2. A number is given to a partition once, also if its change is cancelled or it is reclaimed.
3. A topic has one change under way at most: two could cut and merge the same range.
4. A change that is closing is never cancelled, and its inputs never take records again.
5. The command that reports a change's last seal (or closes the change by force) makes its route the topic's
   route, in one step: no earlier state has that route, and none has neither route.
6. A seal that is recorded does not change.
7. A partition is reclaimed (deleted, as nothing reads it any more) only after the partitions that it
   replaced: else a reader that is still at one of those would miss records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from membership.catalog_rules import GROUP_ID_BYTES, tombstone_of
from membership.changes import Change, next_state, same_state
from membership.limit_rules import over_limit
from membership.records import (
    CatalogState,
    KeyRange,
    Output,
    PartitionRecord,
    ReplicaRecord,
    RouteChange,
    RouteRecord,
    TopicRecord,
)
from membership.requests import (
    BeginChange,
    CancelChange,
    ChangeRoute,
    CloseChange,
    Outcome,
    ReclaimPartition,
    ReportSeal,
)

LOGICAL_PARTITIONS = 65_536
"""A topic's keys are hashed to this many logical partitions, which its routes divide.

As in `laminar.wire.key_route`, which clients have without this package; a test compares the two.
"""

MOST_PARTITIONS = 4_096
"""Most partitions of a topic that changes may make, with the sealed ones that are not reclaimed."""

MOST_ENDS = 1_000
"""Ends of partitions that are kept; beyond that the oldest changes go whose inputs are all reclaimed."""

MOST_KEPT_ENDS = 4_096
"""Most ends that are kept in any case: no change begins while an old partition keeps more."""

MAX_WAIT_MS = 24 * 3_600_000


def change_route(state: CatalogState, request: ChangeRoute) -> Change:
    """Perform one step of a change of a topic's route: dispatch on the kind of the request."""
    topic = state.topics.get(request.step.topic)
    if topic is None:
        return same_state(state, "absent", f"no topic {request.step.topic!r}")
    match request.step:
        case BeginChange() as begin:
            return begin_change(state, topic, begin)
        case CloseChange() as close:
            return close_change(state, topic, close)
        case CancelChange() as cancel:
            return cancel_change(state, topic, cancel)
        case ReportSeal() as report:
            return report_seal(state, topic, report)
        case ReclaimPartition() as reclaim:
            return reclaim_partition(state, topic, reclaim)


# -- routes ----------------------------------------------------------------------------------


def route_of(topic: TopicRecord) -> RouteRecord:
    """Return a topic's present route: which partition holds which logical partitions."""
    if topic.route is not None:
        return topic.route
    size, rest = divmod(LOGICAL_PARTITIONS, topic.partitions)
    ranges, first = [], 0
    for number in range(topic.partitions):
        ranges.append(KeyRange(number, first, size + (number < rest)))
        first += ranges[-1].size
    return RouteRecord(0, ranges)


def kept_routes(topic: TopicRecord) -> Iterator[RouteRecord]:
    """Yield the topic's routes, newest first: the present one, and those before each recorded change."""
    route = route_of(topic)
    yield route
    for change in reversed(topic.changes or ()):
        ranges = _replaced(route.ranges, [each.range for each in change.outputs], change.inputs)
        route = RouteRecord(change.version - 1, ranges)
        yield route


def _replaced(ranges: Sequence[KeyRange], old: Sequence[KeyRange], new: Sequence[KeyRange]) -> list[KeyRange]:
    """Return a route's ranges with those of `new` in place of those of `old`, which cover the same."""
    gone = {each.number for each in old}
    at = next(place for place, each in enumerate(ranges) if each.number in gone)
    return [*ranges[:at], *new, *ranges[at + len(old) :]]


# -- steps of a change -----------------------------------------------------------------------


def begin_change(state: CatalogState, topic: TopicRecord, request: BeginChange) -> Change:
    """Record a change, and its outputs as partitions in state `creating`; assign their numbers and ids."""
    version = route_of(topic).version
    if _was_begun(topic, request):
        return same_state(state, "exists", topic=topic)
    if topic.change is not None:
        return _conflict(state, topic, f"change {topic.change.id} is under way")
    if version != request.after:
        return _conflict(state, topic, f"route is {version}")
    wanted = set(request.inputs)
    inputs = [each for each in route_of(topic).ranges if each.number in wanted]
    wrong = _wrong_change(topic, inputs, request)
    if wrong:
        return same_state(state, "invalid", wrong)
    quota = _over_quota(topic, request)
    if quota:
        return same_state(state, "quota", quota)
    over = over_limit(state, topic.owner, partitions=len(request.groups))
    if over is not None:
        return state, over
    unfit = _unfit(state, request)
    if unfit:
        return _conflict(state, topic, unfit)

    change_id = state.version + 1
    number, replica_id = topic.next_partition or topic.partitions, state.next_replica_id
    outputs, partitions = [], {}
    for held, group, nodes in zip(_cut(inputs, request.cuts), request.groups, request.placement, strict=True):
        replicas = []
        for node in nodes:
            replicas.append(ReplicaRecord(replica_id, node, state.nodes[node].store_id))
            replica_id += 1
        outputs.append(Output(number, held.start, len(held), group))
        partitions[f"{topic.name}/{number}"] = PartitionRecord(
            topic.name,
            number,
            group,
            "creating",
            replicas,
            request.begun_ms,
            origin=change_id,
            first=held.start,
            size=len(held),
        )
        number += 1
    change = RouteChange(
        change_id,
        version + 1,
        inputs,
        outputs,
        request.order,
        "preparing",
        request.begun_ms,
        request.wait_ms,
        request.abandon,
        request.force,
    )
    topic = replace(
        topic,
        next_partition=number,
        listed=[*topic.all_numbers, *(each.number for each in outputs)],
        change=change,
    )
    return _with_topic(
        state,
        "created",
        topic,
        partitions=state.partitions | partitions,
        next_replica_id=replica_id,
    )


def close_change(state: CatalogState, topic: TopicRecord, request: CloseChange) -> Change:
    """Let a change's inputs be sealed, for good; refused until all its outputs are live.

    With force, for changes with weak order only, the change is done at once: it does not wait for the seals.
    """
    change = topic.change
    if change is None or change.id != request.id:
        return _not_under_way(state, topic, request.id)
    force = change.force or request.force
    if force and change.order != "weak":
        return same_state(state, "invalid", "the order of a strict change needs the seals of all inputs")
    if change.state == "closing" and not force:
        return same_state(state, "exists", topic=topic)
    creating = [each.number for each in change.outputs if _record(state, topic, each).state != "live"]
    if creating:
        return _conflict(state, topic, f"partitions {creating} are still being created")
    change = replace(change, state="closing", force=force)
    topic = _done(state, topic, change) if force else replace(topic, change=change)
    return _with_topic(state, "updated", topic)


def cancel_change(state: CatalogState, topic: TopicRecord, request: CancelChange) -> Change:
    """Cancel a change that is not closing yet: its outputs are deleted, their numbers never used again."""
    change = topic.change
    if change is None or change.id != request.id:
        done = topic.changes or []
        if any(each.id == request.id for each in done):
            return _conflict(state, topic, f"change {request.id} is done")
        forgotten = bool(done) and done[0].version > 1 and request.id < done[0].id
        if forgotten or not 0 < request.id <= state.version:
            return same_state(state, "absent", f"no change {request.id} is known")
        return same_state(state, "exists", topic=topic)
    if change.state != "preparing":
        return _conflict(state, topic, f"change {change.id} is {change.state}: its inputs may be sealed")
    return _without(
        state,
        replace(topic, change=None),
        [_record(state, topic, each) for each in change.outputs],
        request.cancelled_ms,
    )


def report_seal(state: CatalogState, topic: TopicRecord, request: ReportSeal) -> Change:
    """Record the seal of an input; the last input's seal makes the change's route the topic's route.

    After a change that was closed by force, a seal may be reported when the change is done already.
    """
    changes = [*(topic.changes or ()), *([] if topic.change is None else [topic.change])]
    change = next((each for each in changes if each.id == request.id), None)
    partition = state.partitions.get(f"{topic.name}/{request.number}")
    if change is None or request.number not in [each.number for each in change.inputs]:
        return same_state(state, "absent", f"partition {request.number} is no input of a change {request.id}")
    known = change.seals.get(request.number)
    if known is not None:
        if known == request.seal:
            return same_state(state, "exists", topic=topic)
        return _conflict(state, topic, f"partition {request.number} ended at offset {known.end_offset}")
    if partition is None or partition.group != request.group:
        return same_state(state, "absent", f"no such group as {topic.name}/{request.number}")
    if change.state == "preparing":
        return _conflict(state, topic, f"change {change.id} is not closing")
    if request.seal.index < 1 or request.seal.end_offset < 0 or request.seal.time_ms < 0:
        return same_state(state, "invalid", f"no end of a partition: {request.seal}")
    sealed = replace(change, seals=change.seals | {request.number: request.seal})
    if change.state == "done":
        changed = [sealed if each is change else each for each in topic.changes or ()]
        topic = replace(topic, changes=changed)
    elif len(sealed.seals) < len(sealed.inputs):
        topic = replace(topic, change=sealed)
    else:
        topic = _done(state, topic, sealed)
    return _with_topic(state, "updated", topic)


def reclaim_partition(state: CatalogState, topic: TopicRecord, request: ReclaimPartition) -> Change:
    """Delete a sealed partition whose predecessors are reclaimed; the topic keeps its range and its end."""
    partition = state.partitions.get(f"{topic.name}/{request.number}")
    if partition is None and 0 <= request.number < (topic.next_partition or topic.partitions):
        return same_state(state, "exists", topic=topic)
    if partition is None or partition.group != request.group:
        return same_state(state, "absent", f"no such group as {topic.name}/{request.number}")
    changes = topic.changes or []
    if not any(request.number in each.seals for each in changes):
        return _conflict(state, topic, f"partition {request.number} is not sealed")
    origin = next((each for each in changes if each.id == partition.origin), None)
    before = [each.number for each in origin.inputs if each.number in topic.all_numbers] if origin else []
    if before:
        return _conflict(state, topic, f"partition {request.number} succeeds {before}, not reclaimed yet")
    return _without(state, topic, [partition], request.reclaimed_ms)


# -- what a step compares --------------------------------------------------------------------


def _was_begun(topic: TopicRecord, request: BeginChange) -> bool:
    """Return whether this request, or an equal one, has begun a change that is under way or done."""
    kept = [*(topic.changes or ()), *([] if topic.change is None else [topic.change])]
    change = next((each for each in kept if each.version == request.after + 1), None)
    if change is None or change.order != request.order:
        return False
    inputs = sorted(each.number for each in change.inputs)
    return sorted(request.inputs) == inputs and request.cuts == [each.first for each in change.outputs[1:]]


def _wrong_change(topic: TopicRecord, inputs: Sequence[KeyRange], request: BeginChange) -> str:
    """Return why the request can't be a change of this topic's present route; empty if it can."""
    if not inputs or len(inputs) != len(request.inputs):
        return f"{request.inputs} are not partitions of the route, each once"
    if any(before.first + before.size != after.first for before, after in pairwise(inputs)):
        return f"partitions {request.inputs} are not neighbours"
    if len(inputs) > 1 and request.cuts:
        return "partitions are merged to one, or one is split"
    bounds = [inputs[0].first, *request.cuts, inputs[-1].first + inputs[-1].size]
    if any(first >= after for first, after in pairwise(bounds)):
        return f"cuts {request.cuts} do not rise inside {bounds[0]} to {bounds[-1] - 1}"
    if not len(request.cuts) + 1 == len(request.groups) == len(request.placement):
        return f"{len(request.cuts)} cuts, {len(request.groups)} groups, {len(request.placement)} places"
    if any(len(group) != GROUP_ID_BYTES or not any(group) for group in request.groups):
        return f"a group id is {GROUP_ID_BYTES} bytes and not zero"
    if len(set(request.groups)) != len(request.groups):
        return "two partitions with one group id"
    for nodes in request.placement:
        if not 1 <= len(nodes) <= topic.replicas or len(set(nodes)) != len(nodes):
            return f"{topic.replicas} replicas placed on {nodes}"
    if request.force and request.order != "weak":
        return "the order of a strict change needs the seals of all inputs"
    if not 0 <= request.wait_ms <= MAX_WAIT_MS:
        return f"wait_ms is 0 to {MAX_WAIT_MS}"
    return ""


def _over_quota(topic: TopicRecord, request: BeginChange) -> str:
    """Return, as text, which limit the change would exceed; empty if none."""
    partitions = len(topic.all_numbers) + len(request.groups)
    if partitions > MOST_PARTITIONS:
        return f"topic {topic.name!r} would have {partitions} partitions, of at most {MOST_PARTITIONS}"
    ends = sum(len(each.inputs) for each in topic.changes or ()) + len(request.inputs)
    if ends > MOST_KEPT_ENDS:
        assert topic.changes
        oldest = [each.number for each in topic.changes[0].inputs if each.number in topic.all_numbers]
        return f"{ends} ends of partitions of {topic.name!r} are kept, because of partitions {oldest}"
    return ""


def _unfit(state: CatalogState, request: BeginChange) -> str:
    """Return, as text, why the request's placement is outdated by the present state; empty if it is not."""
    nodes = {name for placed in request.placement for name in placed}
    unfit = sorted(name for name in nodes if name not in state.nodes or state.nodes[name].draining)
    if unfit:
        return f"placed on nodes that are not known, or draining: {unfit}"
    if any(state.partition_of_group(each) or each.hex() in state.tombstones for each in request.groups):
        return "a group id was used before"
    return ""


def _not_under_way(state: CatalogState, topic: TopicRecord, change_id: int) -> Change:
    """Return the result of a step whose change is not under way: `exists` if that is done, else a refusal."""
    if any(each.id == change_id for each in topic.changes or ()):
        return same_state(state, "exists", f"change {change_id} is done", topic=topic)
    return same_state(state, "absent", f"no change {change_id} is under way", topic=topic)


def _record(state: CatalogState, topic: TopicRecord, output: Output) -> PartitionRecord:
    return state.partitions[f"{topic.name}/{output.number}"]


# -- what a step sets ------------------------------------------------------------------------


def _cut(inputs: Sequence[KeyRange], cuts: Sequence[int]) -> list[range]:
    bounds = [inputs[0].first, *cuts, inputs[-1].first + inputs[-1].size]
    return [range(first, after) for first, after in pairwise(bounds)]


def _done(state: CatalogState, topic: TopicRecord, change: RouteChange) -> TopicRecord:
    """Return the topic with the change's route as its present one, and without old changes (`_shortened`)."""
    change = replace(change, state="done")
    ranges = _replaced(route_of(topic).ranges, change.inputs, [each.range for each in change.outputs])
    changes = [*(topic.changes or ()), change]
    return replace(
        topic, route=RouteRecord(change.version, ranges), change=None, changes=_shortened(topic, changes)
    )


def _shortened(topic: TopicRecord, changes: list[RouteChange]) -> list[RouteChange]:
    """Return the changes without the oldest, while too many ends are kept and their inputs are reclaimed."""
    ends, there = sum(len(each.inputs) for each in changes), set(topic.all_numbers)
    first = 0
    while ends > MOST_ENDS and not any(each.number in there for each in changes[first].inputs):
        ends -= len(changes[first].inputs)
        first += 1
    return changes[first:]


def _without(
    state: CatalogState, topic: TopicRecord, gone: Sequence[PartitionRecord], deleted_ms: int
) -> Change:
    """Remove partitions of the topic, and leave a tombstone for each of their groups."""
    numbers = {each.number for each in gone}
    topic = replace(topic, listed=[number for number in topic.all_numbers if number not in numbers])
    if topic.changes is not None:
        topic = replace(topic, changes=_shortened(topic, topic.changes))
    stones = {each.group.hex(): tombstone_of(each, deleted_ms, state.version + 1) for each in gone}
    return _with_topic(
        state,
        "deleted",
        topic,
        [each.group for each in gone],
        partitions=state.partitions.changed({f"{topic.name}/{number}": None for number in numbers}),
        tombstones=state.tombstones | stones,
    )


# -- results ---------------------------------------------------------------------------------


def _conflict(state: CatalogState, topic: TopicRecord, detail: str) -> Change:
    return same_state(state, "conflict", detail, topic=topic)


def _with_topic(
    state: CatalogState, outcome: Outcome, topic: TopicRecord, groups: Sequence[bytes] = (), **fields: Any
) -> Change:
    topic = replace(topic, version=state.version + 1)
    result = {"topic": topic, "groups": list(groups)}
    return next_state(state, outcome, result, topics=state.topics | {topic.name: topic}, **fields)
