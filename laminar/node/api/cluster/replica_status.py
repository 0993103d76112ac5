"""States of a topic's replicas, gathered from the shards that have them.

Each shard knows its own replicas only. A shard that is asked for a topic asks all shards that own some of its
partitions, and shows the replicas of those that do not answer as unreachable. So a description never waits
for a dead node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Literal

import msgspec

from laminar.http.api.documents import partitions as documents
from laminar.http.api.documents.key_routes import KeyRoute
from laminar.http.api.parameters import MAX_DESCRIBE_WAIT_MS
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.health import in_sync_of
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.partition.partition import Partition
from laminar.node.routes.lineage import Lineage, lineages_of
from laminar.node.transport.transport import Peer
from laminar.wire.key_route import Route
from membership.records import (
    ReplicaRecord,
)

Drains = Callable[[str, int], Awaitable[tuple[list[str], dict[str, int]]]]

DESCRIBE_TIMEOUT_S = MAX_DESCRIBE_WAIT_MS / 1000
# A request that waits for the leaders waits this much longer for the other replicas.
OTHERS_WAIT_S = 0.1
MOST_DAMAGE_SHOWN = 100


class ReplicaState(msgspec.Struct, frozen=True):
    """One shard's report on its replica of a partition."""

    partition: int
    node: str
    leader: str = ""
    leading: bool = False
    term: int = 0
    start_offset: int = 0
    end_offset: int = 0
    committed_index: int = 0
    last_index: int = 0
    bytes: int = 0
    in_sync: list[str] = []
    # The replica may have forgotten what it acknowledged.
    recovering: bool = False
    incarnation: int = 0
    # The replica ids of the voters, as its log has them.
    voters: list[int] = []
    # The end of its log, committed or not: the last entry's term, and the offset after the last record.
    last_term: int = 0
    last_offset: int = 0
    # Its leader's log lacks entries that are committed here, so it accepts nothing more: its group went on
    # without them, by an operator's decision or after more replicas forgot them than a group survives.
    abandoned: bool = False
    # (first offset, offset after the last) of each damaged range; the two are equal for a control entry.
    damaged: list[tuple[int, int]] = []
    # While catch-up builds a new log for it: bytes received, and bytes in all.
    catch_up: tuple[int, int] | None = None
    # Its files are missing or can't be trusted: it takes no part, and only partition and node are known.
    lost: bool = False
    # Why it takes no part until a restart: the error of a bug in its state, or of its log; else empty.
    failed: str = ""
    # Its group's id in hex. A deleted topic's replica may still exist when a topic of the same name is made.
    group: str = ""
    # Index and term of the partition's seal, if it is synced in this replica's log; (0, 0): it is not.
    synced_seal: tuple[int, int] = (0, 0)


class ReplicaStatus:
    """The states of a topic's replicas, gathered from the shards that have them."""

    def __init__(
        self,
        services: ShardServices,
        exchange: Exchange,
        *,
        catch_up_progress: Callable[[bytes], tuple[int, int] | None],
    ) -> None:
        self._services = services
        self._catch_up_progress = catch_up_progress
        self._exchange = exchange

    async def of(
        self, topic: str, *, wait_s: float = DESCRIBE_TIMEOUT_S, leaders: Collection[int] | None = None
    ) -> dict[tuple[int, str], ReplicaState]:
        """Return the states of a topic's replicas that report within `wait_s`, by partition and node.

        Once the leaders of the partitions in `leaders` have reported, it waits for the others only
        `OTHERS_WAIT_S` more.
        """
        services = self._services
        view = services.view
        records = view.partitions_of(topic)
        nodes = {
            replica.node
            for record in records
            for replica in (*record.replicas, *(each.replica for each in record.leaving))
        }
        owners = {
            (node, owner)
            for node in nodes
            for record in records
            if (owner := view.shard_on(node, topic, record.number)) is not None
        }
        found = self.own_states(topic)
        asked: list[asyncio.Future[list[ReplicaState]]] = []
        for node, owner in owners:
            address = view.address(node, owner + 1)
            if address is not None and (node, owner) != (services.node, services.number) and view.alive(node):
                asking = self._exchange.ask(
                    address, "describe", topic, kind=list[ReplicaState], timeout_s=wait_s
                )
                asked.append(asyncio.ensure_future(asking))
        await _until_reported(asked, found, leaders=leaders)
        known = ((view.partition(topic, state.partition), state) for state in found)
        return {
            (state.partition, state.node): state
            for record, state in known
            # The state of a lost or failed replica has no group.
            if record is not None and state.group in ("", record.group.hex())
        }

    def own_states(self, topic: str) -> list[ReplicaState]:
        """Return the states of this shard's replicas of a topic."""
        states = [
            ReplicaState(entry.partition, self._services.node, lost=True)
            for entry in self._services.lost
            if entry.topic == topic and (topic, entry.partition) not in self._services.partitions
        ]
        states += [
            ReplicaState(entry.partition, self._services.node, failed=reason)
            for entry, reason in self._services.failed.values()
            if entry.topic == topic and (topic, entry.partition) not in self._services.partitions
        ]
        for number, partition in self._own_partitions(topic):
            replica = partition.replica
            core = replica.core
            states.append(
                ReplicaState(
                    partition=number,
                    group=replica.group.hex(),
                    node=self._services.node,
                    leader=replica.leader_node or "",
                    leading=core.is_leader and replica.failure is None,
                    failed=str(replica.failure or ""),
                    term=core.term,
                    start_offset=partition.start_offset,
                    end_offset=partition.end_offset,
                    committed_index=partition.committed_index,
                    last_index=partition.log.last_index,
                    bytes=partition.log.size_bytes,
                    in_sync=in_sync_of(partition) if core.is_leader else [],
                    recovering=core.recovering,
                    incarnation=core.incarnation,
                    voters=sorted(replica.configuration.voters),
                    last_term=partition.log.last_term,
                    last_offset=partition.log.next_offset,
                    abandoned=bool(core.dropped.get("abandoned")),
                    synced_seal=partition.synced_seal,
                    catch_up=self._catch_up_progress(replica.group),
                    damaged=[
                        (each.first_offset, each.next_offset)
                        for each in itertools.islice(partition.log.quarantine, MOST_DAMAGE_SHOWN)
                    ],
                )
            )
        return states

    def _own_partitions(self, topic: str) -> Iterator[tuple[int, Partition]]:
        """Yield the numbers and partitions of a topic's replicas at this shard."""
        held = self._services.partitions
        known = self._services.view.topics().get(topic)
        if known is not None:
            for number in known.all_numbers:
                if (topic, number) in held:
                    yield number, held[topic, number]
            return
        for (name, number), partition in held.items():  # deleted, or newer than the view
            if name == topic:
                yield number, partition

    async def on_describe(self, peer: Peer, payload: bytes) -> list[ReplicaState]:
        """Answer another shard with the states of this shard's replicas of a topic."""
        return self.own_states(msgspec.msgpack.decode(payload, type=str))


def key_route(route: Route) -> KeyRoute:
    """Return the JSON document of a topic's route (which partition holds which keys)."""
    return msgspec.convert(route.answer(), KeyRoute)


async def _until_reported(
    asked: list[asyncio.Future[list[ReplicaState]]],
    found: list[ReplicaState],
    *,
    leaders: Collection[int] | None,
) -> None:
    """Add each answer to `found`; once all `leaders` have reported, wait `OTHERS_WAIT_S` for the rest.

    A shard that answers with a problem, or too late, is left out.
    """
    loop = asyncio.get_running_loop()
    waiting = set(asked)
    until: float | None = None
    try:
        while waiting:
            left_s = None if until is None else max(0.0, until - loop.time())
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for answer in done:
                error = answer.exception()
                if error is None:
                    found.extend(answer.result())
                elif not isinstance(error, Problem):
                    raise error
            led = {state.partition for state in found if state.leading}
            if until is None and leaders is not None and led.issuperset(leaders):
                until = loop.time() + OTHERS_WAIT_S
    finally:
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class PartitionRoutes:
    """The handlers of the routes that describe partitions.

    `drains(topic, number)` returns the drained cursors of a partition, and the offsets of its other cursors.
    """

    def __init__(
        self, services: ShardServices, topics: TopicLookup, states: ReplicaStatus, *, drains: Drains
    ) -> None:
        self._services = services
        self._topics = topics
        self._states = states
        self._drains = drains

    async def partitions(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/partitions; with `wait_ms` as soon as all leaders are known.

        With `read=leader` the catalog's leader confirms first that the list of partitions and ids is current.
        """
        read = request.query.get("read", "replica")
        if read not in ("replica", "leader"):
            raise Problem("invalid", "read must be `replica` or `leader`", field="read", value=read)
        if read == "leader":
            await self._services.refresh_view()
        record = self._topics.record(topic)
        wait_ms = integer(request, "wait_ms", MAX_DESCRIBE_WAIT_MS, maximum=MAX_DESCRIBE_WAIT_MS)
        leaders = record.numbers if "wait_ms" in request.query else None
        states = await self._states.of(topic, wait_s=wait_ms / 1000, leaders=leaders)
        record = self._topics.record(topic)  # it may have been deleted while its shards were asked
        lineages = lineages_of(record)
        listed = [self._partition(topic, number, states, lineages[number]) for number in record.numbers]
        route = key_route(self._topics.route(record))
        return Response.json(
            documents.Partitions(topic, route.version, listed, route.ranges, record.partitions)
        )

    async def partition(self, request: Request, topic: str, partition: str) -> Response:
        """Answer GET /v1/topics/{topic}/partitions/{partition} with its leader, replicas and offsets."""
        self._topics.partition_record(topic, partition)
        states = await self._states.of(topic)
        record = self._topics.partition_record(topic, partition)
        lineage = lineages_of(self._topics.record(topic))[record.number]
        described = self._partition(topic, record.number, states, lineage)
        if lineage.status == "sealed":
            # Without its leader the rest is shown all the same.
            with contextlib.suppress(Problem, TimeoutError):
                async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                    drained, behind = await self._drains(topic, record.number)
                    described.drained_by, described.not_drained_by = drained, behind
        return Response.json(described)

    def _partition(
        self, topic: str, number: int, states: dict[tuple[int, str], ReplicaState], lineage: Lineage
    ) -> documents.Partition:
        view = self._services.view
        record = view.partition(topic, number)
        assert record is not None
        known = [state for (at, _), state in states.items() if at == number and not state.lost]
        leading = max((state for state in known if state.leading), key=lambda state: state.term, default=None)
        best = leading or max(known, key=lambda state: (state.term, state.committed_index), default=None)
        replicas = []
        for replica in record.replicas:
            state = states.get((number, replica.node))
            is_lost = replica.lost or (state is not None and state.lost)
            if state is not None and state.lost:
                state = None
            replicas.append(
                documents.ReplicaStatus(
                    node=replica.node,
                    url=view.partition_url(replica.node, topic, number),
                    role="leader" if leading is not None and leading.node == replica.node else "follower",
                    reachable=state is not None,
                    in_sync=leading is not None and replica.node in leading.in_sync,
                    reason=state.failed if state is not None else "",
                    state="lost" if is_lost else _replica_state(replica, state),
                    catch_up=(
                        documents.CatchUpProgress(*state.catch_up)
                        if state is not None and state.catch_up is not None
                        else None
                    ),
                    recovering=state.recovering if state is not None else None,
                    abandoned=state.abandoned if state is not None else None,
                    end_offset=state.end_offset if state is not None else None,
                    lag=best.end_offset - state.end_offset
                    if state is not None and best is not None
                    else None,
                )
            )
        return documents.Partition(
            partition=number,
            id=record.group.hex(),
            state=record.state,
            leader=(
                documents.Leader(leading.node, view.partition_url(leading.node, topic, number))
                if leading is not None
                else None
            ),
            term=best.term if best is not None else None,
            start_offset=best.start_offset if best is not None else None,
            end_offset=best.end_offset if best is not None else None,
            bytes=best.bytes if best is not None else None,
            damaged=[
                documents.DamagedOffsets(state.node, first, end)
                for state in known
                for first, end in state.damaged
            ],
            replicas=replicas,
            # Replicas that are being replaced, until their removal from the group is committed.
            leaving=[documents.LeavingReplica(each.replica.node, each.why) for each in record.leaving],
            status=lineage.status,
            start=lineage.range.first,
            to=lineage.range.first + lineage.range.size,
            inputs=lineage.inputs,
            outputs=lineage.outputs,
        )


def _replica_state(
    replica: ReplicaRecord, state: ReplicaState | None
) -> Literal["failed", "catching_up", "made", "joining"]:
    """Return the state of a replica that is not lost: `joining` until it is made, `failed` if it stopped."""
    if state is not None and state.failed:
        return "failed"
    if state is not None and state.catch_up is not None:
        return "catching_up"
    return "made" if replica.made else "joining"
