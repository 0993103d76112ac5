"""The carrying out of requests to the catalog, from any process of any node.

A request is carried out by the controller that leads group 0; any other controller forwards it, once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from laminar.node.catalog.balancing import Balancer
from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.messages.answers import CatalogAnswer, decode_answer, encode_answer
from laminar.node.catalog.messages.requests import (
    AccessRequest,
    BalanceRequest,
    BeginRouteRequest,
    CatalogRequest,
    ChannelRequest,
    ConfirmRequest,
    DeleteTopicRequest,
    LimitsRequest,
    LoadRequest,
    MadeRequest,
    NodeRequest,
    PlacementRequest,
    RemovedRequest,
    ReplicaRequest,
    RouteProgressRequest,
    RouteRequest,
    TopicRequest,
    TopicSettingsRequest,
    decode_request,
    encode_request,
)
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.catalog.route_requests import Refused, RouteRequests
from laminar.node.consensus.driver import Driver
from laminar.node.host.clock import Clock
from laminar.node.placement.wanted import belonging_weights, zones_of
from laminar.node.routes.messages import RouteProgress
from laminar.node.transport.rpc import PeerLost
from laminar.node.transport.transport import Transport, TransportError
from membership import channel_rules, credential_rules, limit_rules
from membership.catalog import NotCatalogLeader, NotEnabled, OutcomeUnknown
from membership.requests import (
    AlterTopic,
    RemoveNode,
    Result,
)
from router import partition_hash, place

LIVE_WAIT_S = 10.0
# How long a topic's creation waits for nodes that gossip does not know yet; and, counted from when this
# node began to lead the catalog, for nodes without contact to it as the leader.
COME_UP_WAIT_S = 2.0
FORWARD_TIMEOUT_S = 15.0
LEADER_WAIT_S = 5.0
LEADER_RETRY_S = 0.05
# After `ASK_OTHERS_AFTER_S` without a leader in this node's own copy of the catalog, other nodes are asked
# which node leads. Each may take `ASK_OTHER_TIMEOUT_S` to answer.
ASK_OTHERS_AFTER_S = 1.0
ASK_OTHER_TIMEOUT_S = 1.0


def _doubted(answer: CatalogAnswer, lost: bool) -> CatalogAnswer:
    """Return `answer`, or an unknown outcome if it is a refusal that an earlier attempt may have caused.

    `lost` says that an earlier attempt may have been carried out, because its answer was lost.
    """
    if not lost or answer.result is None or answer.result.outcome not in ("absent", "conflict"):
        return answer
    detail = f"an earlier try may have been carried out; now: {answer.result.detail or answer.result.outcome}"
    return CatalogAnswer(error="unknown", detail=detail)


class CatalogService:
    """Carries out catalog requests if this controller leads group 0; else forwards them to the leader."""

    def __init__(
        self,
        directory: NodeDirectory,
        *,
        balancer: Balancer,
        driver: Driver,
        transport: Transport,
        clock: Clock,
        rng: random.Random,
        max_partitions: int,
        progress_of: Callable[[str], RouteProgress] = lambda topic: RouteProgress(),
    ) -> None:
        self._directory = directory
        self._balancer = balancer
        self._driver = driver
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._max_partitions = max_partitions
        self._progress_of = progress_of
        self._routes = RouteRequests(directory, self, clock=clock, rng=rng, max_partitions=max_partitions)
        self._changed: list[asyncio.Future[None]] = []
        self._knows_all_s = 0.0

    @property
    def _group(self) -> CatalogGroup:
        group = self._directory.group
        if group is None:
            raise NotCatalogLeader(None)
        return group

    async def handle(self, payload: bytes) -> bytes:
        """Answer a call of the controller's `catalog` method."""
        try:
            request, passed_on = decode_request(payload)
        except msgspec.ValidationError as error:
            # Of a node with a newer program; such requests are sent only once all nodes know them.
            detail = f"the program of node {self._directory.node!r} does not know this request ({error})"
            return encode_answer(CatalogAnswer(error="not_enabled", detail=detail))
        return encode_answer(await self.ask(request, passed_on=passed_on))

    async def ask(self, request: CatalogRequest, *, passed_on: bool = False) -> CatalogAnswer:
        """Carry out a request, here or at the node that leads; wait up to `LEADER_WAIT_S` for a leader.

        With `passed_on` the request is not forwarded again: if this node does not lead, the answer is the
        error `no_leader` with the name of the leader, if this node knows it.

        Other nodes are asked for the leader too, because this node's replica may know none while there is
        one: it ignores leaders of a term below its own, and after its folder went back its term may be the
        highest.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + LEADER_WAIT_S
        named = ""
        others: list[str] = []
        failed: set[str] = set()
        lost = False
        while True:
            leader: str | None = None
            try:
                return _doubted(await self._perform(request), lost)
            except NotCatalogLeader as error:
                leader = error.leader
            except OutcomeUnknown as error:
                return CatalogAnswer(error="unknown", detail=str(error))
            if passed_on:
                return CatalogAnswer(error="no_leader", leader=leader or "")
            if named:
                # This node's copy may be old, and name a leader of before for good: the node was removed.
                leader, named = named, ""
            elif (leader is None or leader in failed) and loop.time() >= began + ASK_OTHERS_AFTER_S:
                others = others or self._others()
                leader = await self._who_leads(others.pop()) if others else ""
            if leader and leader != self._directory.node:
                answer = None
                try:
                    answer = await self._pass_on(leader, request, timeout_s=FORWARD_TIMEOUT_S)
                except TransportError as error:
                    # Requests compare and set, so asking again is safe. But if this attempt was carried out,
                    # the next is refused for that: see `_doubted`.
                    lost |= not isinstance(error, PeerLost) or error.sent
                if answer is not None and answer.error != "no_leader":
                    return _doubted(answer, lost)
                failed.add(leader)
                named = answer.leader if answer is not None and answer.leader != leader else ""
            if loop.time() >= deadline:
                return CatalogAnswer(error="no_leader", detail="the catalog has no leader now")
            await asyncio.sleep(LEADER_RETRY_S)

    def _others(self) -> list[str]:
        statuses, own = self._directory.statuses(), self._directory.node
        return [node for node, status in statuses.items() if status == "alive" and node != own]

    async def _who_leads(self, node: str) -> str:
        """Return the catalog's leader as another node knows it; empty if it knows none or does not answer.

        The node gets only this question, not the request itself. A request whose answer comes too late may
        have been carried out, and would be refused if repeated: a deletion, because there is no such topic.
        """
        try:
            answer = await self._pass_on(node, ConfirmRequest([]), timeout_s=ASK_OTHER_TIMEOUT_S)
        except TransportError:
            return ""
        if answer is None:
            return ""
        return answer.leader if answer.error else node

    async def _pass_on(
        self, leader: str, request: CatalogRequest, *, timeout_s: float
    ) -> CatalogAnswer | None:
        address = self._directory.address(leader)
        if address is None:
            return None
        payload = encode_request(request, passed_on=True)
        return decode_answer(await self._transport.call(address, "catalog", payload, timeout=timeout_s))

    async def _perform(self, request: CatalogRequest) -> CatalogAnswer:
        catalog = self._group.catalog
        now_ms = self._clock.wall_ms()
        match request:
            case TopicRequest():
                return await self._create_topic(request)
            case DeleteTopicRequest():
                result = await catalog.delete_topic(request.name, deleted_ms=now_ms, version=request.version)
            case TopicSettingsRequest():
                result = await catalog.update_topic_settings(
                    request.name, request.changes, version=request.version
                )
            case MadeRequest():
                result = await catalog.mark_made(request.groups, node=request.node, store_id=request.store_id)
            case RemovedRequest():
                result = await catalog.mark_removed(
                    request.groups, node=request.node, store_id=request.store_id
                )
            case NodeRequest():
                result = await catalog.register_node(request.record, former=request.former)
            case ReplicaRequest():
                result = await catalog.change_replicas(request.change)
            case PlacementRequest():
                return await self._change_placement(request)
            case ConfirmRequest():
                return await self._confirm(request)
            case LoadRequest():
                self._balancer.take(request.report, self._led_group())
                return CatalogAnswer()
            case BalanceRequest():
                balance = await self._balancer.answer(self._led_group(), act=request.act)
                return CatalogAnswer(balance=balance)
            case RouteRequest():
                result = await catalog.change_route(request.step)
            case BeginRouteRequest():
                return await self._begin_route(request)
            case RouteProgressRequest():
                self._led_group()
                return CatalogAnswer(progress=self._progress_of(request.topic))
            case ChannelRequest():
                return await self._change_channel(request)
            case AccessRequest():
                return await self._change_access(request)
            case LimitsRequest():
                return await self._change_limits(request)
        return CatalogAnswer(result=result)

    async def _confirm(self, request: ConfirmRequest) -> CatalogAnswer:
        await self._group.confirm()
        state = self._group.catalog.state()
        found = map(state.partition_of_group, dict.fromkeys(request.groups))
        asked = [record for record in found if record is not None]
        return CatalogAnswer(
            joining=[
                replica.replica_id
                for record in asked
                if record.state == "live"
                for replica in record.replicas
                if not replica.made
            ],
            removed=[replica.replica_id for record in asked for replica in record.removed],
            kept=[record.losses[-1].kept for record in asked if record.losses],
            version=state.version,
            creating=[record.group for record in asked if record.state == "creating"],
            deleted=[group for group in request.groups if group.hex() in state.tombstones],
            voters=self._voters(),
        )

    def _voters(self) -> list[str]:
        """Return the nodes that vote in group 0."""
        return sorted(node for _, node in self._group.replica.configuration_record.voters)

    def _led_group(self) -> CatalogGroup:
        """Return group 0. Raises `NotCatalogLeader` if this node does not lead it."""
        group = self._group
        if not group.replica.core.is_leader:
            raise NotCatalogLeader(group.replica.leader_node)
        return group

    async def _change_placement(self, request: PlacementRequest) -> CatalogAnswer:
        group, change = self._led_group(), request.change
        state = group.catalog.state()
        match change:
            case RemoveNode():
                in_use = self._use_of(change.node)
                if in_use:
                    return CatalogAnswer(error="node_in_use", detail=in_use)
            case AlterTopic(name=name, replicas=int(replicas)) if not request.allow_fewer_replicas:
                topic, belonging = state.topics.get(name), len(belonging_weights(state))
                if topic is not None and replicas > max(topic.replicas, belonging):
                    return CatalogAnswer(error="too_few_nodes", value=replicas, limit=belonging)
        try:
            return CatalogAnswer(result=await group.catalog.change_placement(change))
        except NotEnabled as error:
            return CatalogAnswer(error="not_enabled", detail=self._too_old(error.needed))

    def _use_of(self, name: str) -> str:
        """Return why a node may not be removed: what it is still used for, as text; "" if nothing is found.

        Reasons that the catalog's rules check by themselves are not named here.
        """
        if self._directory.statuses().get(name) in ("alive", "suspect"):
            return f"node {name!r} still runs: stop it first"
        if name in self._voters():
            return f"node {name!r} still votes in the catalog: drain it first, and wait until it does not"
        return ""

    def _too_old(self, needed: int) -> str:
        """Return, as text, which nodes' programs do not know code version `needed` of the commands."""
        nodes = self._group.catalog.state().nodes.values()
        old = sorted(record.node for record in nodes if record.code_version < needed)
        if not old:
            return "all nodes know this command by now; it is enabled in a moment"
        return f"the programs of these nodes are too old: {', '.join(old)} (code version {needed} is needed)"

    async def _create_topic(self, request: TopicRequest) -> CatalogAnswer:
        if not self._group.replica.core.is_leader:
            raise NotCatalogLeader(self._group.replica.leader_node)
        min_replicas = int(request.settings.get("min_replicas", 1))
        wanted = min_replicas if request.allow_fewer_replicas else request.replicas
        state = self._group.catalog.state()
        if state.topics.get(request.name) is None:
            most = self._max_partitions
            partitions = len(state.partitions) + request.partitions
            if partitions > most:
                return CatalogAnswer(error="quota", value=partitions, limit=most)
            await self.until_known(wanted)
            weights = self._directory.placement_weights()
            if len(weights) < wanted:
                return CatalogAnswer(error="too_few_nodes", value=wanted, limit=len(weights))
        weights, zones = self.weights_for(request.replicas), zones_of(state)
        result = await self._group.catalog.create_topic(
            request.name,
            partitions=request.partitions,
            replicas=request.replicas,
            settings=request.settings,
            groups=[self._rng.randbytes(16) for _ in range(request.partitions)],
            placement=[
                place(partition_hash(request.name, number), weights, request.replicas, zones=zones)
                for number in range(request.partitions)
            ],
            created_ms=self._clock.wall_ms(),
            owner=request.owner,
        )
        if result.outcome == "quota":
            return _over_limit(result)
        if result.ok:
            await self._until(lambda: self._is_live(request.name), LIVE_WAIT_S)
        return CatalogAnswer(result=result, version=self._group.catalog.state().version)

    async def _begin_route(self, request: BeginRouteRequest) -> CatalogAnswer:
        group = self._led_group()
        try:
            result = await self._routes.begin(group, request)
        except Refused as refused:
            return CatalogAnswer(
                error=refused.error,
                detail=refused.detail,
                value=refused.value,
                limit=refused.limit,
                what=refused.what,
            )
        except NotEnabled as error:
            return CatalogAnswer(error="not_enabled", detail=self._too_old(error.needed))
        return CatalogAnswer(result=result, version=group.catalog.state().version)

    async def _change_channel(self, request: ChannelRequest) -> CatalogAnswer:
        try:
            result = await self._led_group().catalog.change_channel(request.step)
        except NotEnabled as error:
            return CatalogAnswer(error="not_enabled", detail=self._too_old(error.needed))
        if result.outcome != "quota":
            return CatalogAnswer(result=result)
        if result.what:
            return _over_limit(result)
        limit = channel_rules.MAX_CHANNELS
        if result.topic is None or len(result.topic.channels or ()) < limit:
            limit = channel_rules.MOST_CHANNELS
        return CatalogAnswer(error="quota", detail=result.detail, value=limit + 1, limit=limit)

    async def _change_access(self, request: AccessRequest) -> CatalogAnswer:
        try:
            result = await self._led_group().catalog.change_access(request.step)
        except NotEnabled as error:
            return CatalogAnswer(error="not_enabled", detail=self._too_old(error.needed))
        if result.outcome != "quota":
            return CatalogAnswer(result=result)
        limit = credential_rules.MOST_CREDENTIALS
        return CatalogAnswer(error="quota", detail=result.detail, value=limit + 1, limit=limit)

    async def _change_limits(self, request: LimitsRequest) -> CatalogAnswer:
        catalog = self._led_group().catalog
        try:
            result = await catalog.change_limits(request.principal, request.limits, version=request.version)
        except NotEnabled as error:
            return CatalogAnswer(error="not_enabled", detail=self._too_old(error.needed))
        if result.outcome != "quota":
            return CatalogAnswer(result=result)
        limit = limit_rules.MOST_LIMITS
        return CatalogAnswer(error="quota", detail=result.detail, value=limit + 1, limit=limit)

    def led(self, leading: bool) -> None:
        """React to an election: this node's controller now leads the catalog (`leading`) or ceased to."""
        if leading:
            self._knows_all_s = asyncio.get_running_loop().time() + COME_UP_WAIT_S

    async def until_known(self, wanted: int) -> None:
        """Wait a short time for at least `wanted` nodes to be up, and for a new leader to hear from all."""
        await self._until(lambda: not self._may_come_up(wanted), COME_UP_WAIT_S)
        await self._first_round()

    async def _first_round(self) -> None:
        """Wait until a new leader has heard from all nodes, or `COME_UP_WAIT_S` after it began to lead.

        Before that only its own node seems alive, and would get all replicas of a new topic.
        """
        rest_s = self._knows_all_s - asyncio.get_running_loop().time()
        if rest_s > 0:
            await self._until(self._reaches_all, rest_s)

    def _reaches_all(self) -> bool:
        directory, replica = self._directory, self._group.replica
        statuses, nodes = directory.statuses(), self._group.catalog.state().nodes
        return not directory.nodes_without_status() and all(
            self._driver.is_active(replica, nodes[node].catalog_replica)
            for node in directory.placement_weights()
            if statuses.get(node) == "alive"
        )

    def weights_for(self, replicas: int) -> dict[str, float]:
        """Return, by node, the placement weights of the nodes that answer now; of all if too few answer.

        Gossip takes a second or two to see that a node is gone. Broken connections are seen at once.
        """
        directory, replica = self._directory, self._group.replica
        weights, statuses = directory.placement_weights(), directory.statuses()
        nodes = self._group.catalog.state().nodes
        answering = {
            node: weight
            for node, weight in weights.items()
            if statuses.get(node) == "alive" and self._driver.is_active(replica, nodes[node].catalog_replica)
        }
        return answering if len(answering) >= replicas else weights

    def _may_come_up(self, wanted: int) -> bool:
        """Return whether too few nodes are seen alive, but enough if those without a status are alive too.

        The gossip of a controller that has just started has not heard of every node yet.
        """
        directory = self._directory
        alive, unknown = len(directory.placement_weights()), directory.nodes_without_status()
        return alive < wanted <= alive + unknown

    def _is_live(self, name: str) -> bool:
        state = self._group.catalog.state()
        topic = state.topics.get(name)
        numbers = () if topic is None else topic.numbers
        return all(state.partitions[f"{name}/{number}"].state == "live" for number in numbers)

    def changed(self) -> None:
        """Wake the requests that wait for a change of the catalog's state."""
        waiting, self._changed = self._changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        async def wait() -> None:
            while not condition():
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._changed.append(future)
                await future

        return await _within(wait, timeout_s)


def _over_limit(result: Result) -> CatalogAnswer:
    """Return the error `quota` for a command that would exceed a principal's limit."""
    return CatalogAnswer(
        error="quota", detail=result.detail, what=result.what, value=result.value, limit=result.limit
    )


async def _within(work: Callable[[], Awaitable[Any]], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await work()
    except TimeoutError:
        return False
    return True
