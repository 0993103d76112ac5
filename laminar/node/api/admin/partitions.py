"""Routes of a partition's placement for operators: pin it to nodes, unpin it, prefer a leader."""

from __future__ import annotations

from laminar.http.api.documents import administration as documents
from laminar.http.api.documents.partitions import LeavingReplica
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.placement.preferred_leaders import transfer
from laminar.node.placement.wanted import belonging_weights, wanted_nodes
from membership.records import CatalogState, PartitionRecord, Pin
from membership.requests import PinPartition, PreferLeaders

OWNER = "operator"
"""The recorded owner of each pin that a request of this API created."""


class PlacementRoutes:
    """The handlers of the routes of a partition's placement."""

    def __init__(self, services: ShardServices, topics: TopicLookup, placement: PlacementCall) -> None:
        self._services = services
        self._topics = topics
        self._placement = placement

    async def describe(self, request: Request, topic: str, partition: str) -> Response:
        """Answer GET /v1/admin/topics/{topic}/partitions/{partition} with its placement in the catalog."""
        await self._placement.newest_view()
        return self._answer(topic, partition)

    def _answer(self, topic: str, partition: str, *, status: int = 200) -> Response:
        record = self._topics.partition_record(topic, partition)
        pin = record.pin
        return Response.json(
            documents.PartitionPlacement(
                topic=topic,
                partition=record.number,
                state=record.state,
                version=record.version,
                replicas=[
                    documents.PlacedReplica(
                        each.node, each.replica_id, made=each.made, lost=each.lost, abandoned=each.abandoned
                    )
                    for each in record.replicas
                ],
                leaving=[LeavingReplica(each.replica.node, each.why) for each in record.leaving],
                wanted=wanted_nodes(self._state, record),
                pin=None if pin is None else documents.PlacementPin(pin.nodes, pin.owner, pin.reason),
                preferred_leader=record.preferred_leader or None,
                why=record.why,
            ),
            status=status,
        )

    @property
    def _state(self) -> CatalogState:
        message = self._services.view.message
        assert message is not None, "a view with topics has a catalog"
        return message.catalog

    async def pin(self, request: Request, topic: str, partition: str) -> Response:
        """Answer PUT /v1/admin/topics/{topic}/partitions/{partition}/pin: pin it to nodes."""
        wanted = json_body(request, documents.NewPin)
        record = self._topics.partition_record(topic, partition)
        self._check(wanted, record)
        await self._set(topic, partition, Pin(wanted.nodes, OWNER, wanted.reason))
        return self._answer(topic, partition)

    def _check(self, wanted: documents.NewPin, record: PartitionRecord) -> None:
        """Refuse a pin with a repeated node, one that may hold no replicas, or a wrong number of nodes.

        Raises:
            Problem: 422 `invalid`.
        """
        may_hold = belonging_weights(self._state).keys()
        unfit = sorted(set(wanted.nodes) - may_hold)
        if unfit:
            raise Problem(
                "invalid",
                f"these nodes are unknown, are draining or may hold no replicas: {', '.join(unfit)}",
                field="nodes",
                value=", ".join(wanted.nodes),
                limit=", ".join(sorted(may_hold)),
            )
        if len(set(wanted.nodes)) != len(wanted.nodes):
            raise Problem("invalid", "a node is named twice", field="nodes", value=", ".join(wanted.nodes))
        topic = self._topics.record(record.topic)
        if len(wanted.nodes) != topic.replicas and not wanted.allow_other_number:
            raise Problem(
                "invalid",
                f"topic {topic.name!r} has {topic.replicas} replicas, not {len(wanted.nodes)}",
                field="nodes",
                value=len(wanted.nodes),
                limit=topic.replicas,
                hint="`allow_other_number` pins to another number of nodes.",
            )
        fewest = topic.settings.get("min_replicas", 1)
        if isinstance(fewest, int) and fewest > len(wanted.nodes):
            raise Problem(
                "invalid",
                f"min_replicas of topic {topic.name!r} is {fewest}: nothing could be appended",
                field="nodes",
                value=len(wanted.nodes),
                limit=fewest,
            )

    async def unpin(self, request: Request, topic: str, partition: str) -> Response:
        """Answer DELETE /v1/admin/topics/{topic}/partitions/{partition}/pin: unpin it from nodes."""
        await self.set_back(topic, partition)
        return self._answer(topic, partition)

    async def set_back(self, topic: str, partition: str) -> None:
        """Remove a partition's pin to nodes, so that placement chooses its nodes again.

        Raises:
            Problem: 404 if the partition is gone; or the catalog refuses the change, or has no leader.
        """
        await self._set(topic, partition, None)

    async def _set(self, topic: str, partition: str, pin: Pin | None) -> None:
        def change() -> PinPartition:
            record = self._topics.partition_record(topic, partition)
            return PinPartition(f"{topic}/{record.number}", record.version, pin)

        await self._placement.change(change, absent=lambda: self._gone(topic, partition))

    async def leader(self, request: Request, topic: str, partition: str) -> Response:
        """Answer POST /v1/admin/topics/{topic}/partitions/{partition}/leader: prefer a node as leader."""
        node = json_body(request, documents.NewLeader).node
        record = self._topics.partition_record(topic, partition)
        fit = sorted(
            each.node
            for each in record.replicas
            if each.made and not each.lost and not each.abandoned and self._may_lead(each.node)
        )
        if node not in fit:
            raise Problem(
                "invalid",
                f"node {node!r} holds no replica of {topic}/{record.number} that may lead",
                field="node",
                value=node,
                limit=", ".join(fit),
            )
        await self._placement.change(
            lambda: PreferLeaders(transfer(self._state, f"{topic}/{record.number}", node)),
            absent=lambda: self._gone(topic, partition),
        )
        return self._answer(topic, partition, status=202)

    def _may_lead(self, node: str) -> bool:
        record = self._state.nodes.get(node)
        return record is not None and not record.draining and not record.rolled_back

    def _gone(self, topic: str, partition: str) -> Problem:
        return Problem(
            "no_such_partition", f"{topic}/{partition} is gone", field="partition", value=partition
        )
