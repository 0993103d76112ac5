"""The changes of placement that are under way, derived from the catalog.

An operation is a difference between what the catalog wants and what it records: there is no list of
operations beside it that could contradict it. An operation ends when the difference is gone, and is cancelled
by undoing the request for it. This module computes from a copy of the catalog, which may lag; the planner of
the catalog's leader takes the steps (docs/consensus.md#placement).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence

from laminar.http.api.documents.administration import Operation
from laminar.node.api.common.services import ShardServices
from laminar.node.placement.wanted import Wanted, belonging_weights, wanted_number
from membership.records import CatalogState, PartitionRecord, TopicRecord

_MOST_NAMED = 3
_STEP = "it is a step towards what is wanted: cancel the operation that wants it"


class Operations:
    """Lists the operations under way.

    It is given each new state of the catalog in turn, to compute only changes.
    """

    def __init__(self) -> None:
        self._wanted = Wanted(CatalogState())

    def of(self, state: CatalogState, *, alive: Collection[str]) -> list[Operation]:
        """Return the operations under way (drains, pins, moves, replica changes) in `state`, sorted by id.

        `alive` are the nodes that gossip counts as alive; an operation that waits for another node says so.
        """
        self._wanted.follow(state)
        belonging = belonging_weights(state)
        found = [_drain(state, name, alive=alive) for name, node in state.nodes.items() if node.draining]
        found += [each for topic in state.topics.values() for each in _of_topic(state, topic, len(belonging))]
        for key, partition in state.partitions.items():
            if partition.state == "live":
                found += self._of_set(state, key, partition, alive=alive, belonging=belonging)
                found += _steps(partition, alive=alive)
        return sorted(found, key=lambda each: each.id)

    def _of_set(
        self,
        state: CatalogState,
        key: str,
        partition: PartitionRecord,
        *,
        alive: Collection[str],
        belonging: Collection[str],
    ) -> Iterator[Operation]:
        """Yield an operation if a partition's replicas are not on the nodes of its pin or placement."""
        pin = partition.pin
        wanted = self._wanted.nodes(partition) if pin is None else pin.nodes
        held = {each.node for each in partition.replicas}
        extra = held - set(wanted)
        if not extra and held == set(wanted) and _is_settled(partition):
            return
        if pin is None and (
            len(held) != wanted_number(state, partition)
            or all(name in state.nodes and state.nodes[name].draining for name in extra)
        ):
            return  # shown as the topic's operation or a drain, or only a replica joins or leaves
        made = {each.node for each in partition.replicas if each.made}
        missing = [name for name in wanted if name not in made]
        kind, operation = "pin" if pin is not None else "move", f"{partition.topic}:{partition.number}"
        yield Operation(
            id=f"{kind}:{operation}",
            kind="pin" if pin is not None else "move",
            what=key,
            done=len(wanted) - len(missing),
            total=len(wanted),
            why=f"pinned by {pin.owner}: {pin.reason}"
            if pin is not None
            else f"by rank it belongs on {', '.join(wanted)}",
            blocked_by=[
                *(f"node {name} is not alive" for name in missing if name not in alive),
                *(f"node {name} may hold no replicas" for name in wanted if name not in belonging),
            ],
            cancel=f"DELETE /v1/admin/operations/pin:{operation}"
            if pin is not None
            else f"PUT /v1/admin/topics/{partition.topic}/partitions/{partition.number}/pin: a pin keeps it",
        )


class UnderWay:
    """The operations under way, as this shard's view has them.

    They are computed in a thread, because there may be many partitions, and only when the view has changed
    since the last time: a page that asks every few seconds gets the same list.
    """

    def __init__(self, services: ShardServices) -> None:
        self._services = services
        self._operations = Operations()
        self._one_at_a_time = asyncio.Lock()
        # The tables of the catalog and the nodes alive of which `_found` are the operations.
        self._tables: tuple[object, ...] = ()
        self._alive: set[str] = set()
        self._found: Sequence[Operation] = ()

    async def get(self) -> Sequence[Operation]:
        """Return the operations under way, sorted by id; callers must not change them."""
        # A task of its own: what a client that goes away began goes on to its end, and none begins beside it.
        return await asyncio.shield(asyncio.get_running_loop().create_task(self._newest()))

    async def _newest(self) -> Sequence[Operation]:
        async with self._one_at_a_time:
            view = self._services.view
            if view.message is None:
                return ()
            state = view.message.catalog
            tables = (state.nodes, state.topics, state.partitions)
            alive = {name for name in state.nodes if view.alive(name)}
            if alive != self._alive or [*map(id, tables)] != [*map(id, self._tables)]:
                found = await self._services.off_loop(self._of, state, alive)
                self._tables, self._alive, self._found = tables, alive, found
            return self._found

    def _of(self, state: CatalogState, alive: set[str]) -> list[Operation]:
        return self._operations.of(state, alive=alive)


def holders(partition: PartitionRecord) -> set[str]:
    """Return the nodes with a replica of the partition, also those whose replica is leaving."""
    return {each.node for each in partition.replicas} | {each.replica.node for each in partition.leaving}


def blocks_of_drain(state: CatalogState, name: str, *, alive: Collection[str]) -> list[str]:
    """Return a sentence for each reason why the drain of node `name` cannot end as things are."""
    belonging = belonging_weights(state).keys()
    short: dict[int, set[str]] = {}
    dead_targets, dead_beside = set[str](), set[str]()
    for partition in state.partitions.values():
        held = {each.node for each in partition.replicas}
        if name not in held:
            continue
        asked = wanted_number(state, partition)
        free = belonging - held
        dead_beside |= held - {name} - set(alive)
        if not free and len(held) <= asked:
            short.setdefault(asked, set()).add(partition.topic)
        elif free and not free & set(alive):
            dead_targets |= free
    found = [
        f"{asked} replicas are asked for, {_nodes(len(belonging))} would be left (topic {_named(topics)})"
        for asked, topics in sorted(short.items())
    ]
    if dead_targets:
        found.append(f"the nodes that could take its replicas are not alive: {_named(dead_targets)}")
    if dead_beside:
        found.append(
            f"partitions do not move while another of their nodes is not alive: {_named(dead_beside)}"
        )
    return found


def _drain(state: CatalogState, name: str, *, alive: Collection[str]) -> Operation:
    left = sum(name in holders(partition) for partition in state.partitions.values())
    return Operation(
        id=f"drain:{name}",
        kind="drain",
        what=name,
        done=len(state.partitions) - left,
        total=len(state.partitions),
        why=f"node {name} is to be emptied",
        blocked_by=blocks_of_drain(state, name, alive=alive),
        cancel=f"DELETE /v1/admin/operations/drain:{name}",
    )


def _of_topic(state: CatalogState, topic: TopicRecord, belonging: int) -> Iterator[Operation]:
    """Yield an operation if partitions of a topic have more or fewer replicas than the topic asks for.

    Only a replica that is made (created and caught up) counts, so a topic whose number of replicas grows
    is listed until its new replicas are made.
    """
    partitions = [
        each for each in state.partitions_of(topic.name) if each.pin is None and each.state == "live"
    ]
    if all(_has_as_asked(each, topic.replicas) for each in partitions):
        return
    blocked = []
    if topic.replicas > belonging:
        blocked = [f"{topic.replicas} replicas are asked for, {_nodes(belonging)} may hold replicas"]
    yield Operation(
        id=f"replicas:{topic.name}",
        kind="replicas",
        what=topic.name,
        done=sum(_has_as_asked(each, topic.replicas) for each in partitions),
        total=len(partitions),
        why=f"topic {topic.name} asks for {topic.replicas} replicas",
        blocked_by=blocked,
        cancel=f"PATCH /v1/topics/{topic.name} with another number of replicas",
    )


def _steps(partition: PartitionRecord, *, alive: Collection[str]) -> Iterator[Operation]:
    """Yield an operation for each replica of a live partition that joins or leaves."""
    place = f"{partition.topic}:{partition.number}"
    for replica in partition.replicas:
        if not replica.made:
            yield Operation(
                id=f"join:{place}:{replica.replica_id}",
                kind="join",
                what=f"{partition.topic}/{partition.number} on {replica.node}",
                done=0,
                total=1,
                why=partition.why,
                blocked_by=[] if replica.node in alive else [f"node {replica.node} is not alive"],
                cancel=_STEP,
            )
    for each in partition.leaving:
        yield Operation(
            id=f"leave:{place}:{each.replica.replica_id}",
            kind="leave",
            what=f"{partition.topic}/{partition.number} on {each.replica.node}",
            done=0,
            total=1,
            why=partition.why or each.why,
            blocked_by=[],
            cancel=_STEP,
        )


def _has_as_asked(partition: PartitionRecord, number: int) -> bool:
    """Return whether a partition has `number` replicas, all made, or one of them replacing one that moves."""
    moving = any(each.why == "moved" for each in partition.leaving)
    made = sum(each.made for each in partition.replicas)
    return len(partition.replicas) == number and (made == number or moving)


def _is_settled(partition: PartitionRecord) -> bool:
    return not partition.leaving and all(each.made for each in partition.replicas)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _named(names: Collection[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(sorted(names)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
