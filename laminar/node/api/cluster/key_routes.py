"""The HTTP route that describes a topic's key route (which partition has which keys) and its changes."""

from __future__ import annotations

from laminar.http.api.documents import key_routes as documents
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.replica_status import key_route
from laminar.node.api.common.topic_lookup import TopicLookup
from membership.records import KeyRange, RouteChange, TopicRecord


class KeyRoutes:
    """The handler of the HTTP route that describes a topic's key route."""

    def __init__(self, topics: TopicLookup) -> None:
        self._topics = topics

    async def routes(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic}/routes with the present route and its changes."""
        record = self._topics.record(topic)
        return Response.json(
            documents.KeyRoutes(
                topic,
                [key_route(self._topics.route(record))],
                [change_document(record, each) for each in record.changes or ()],
                None if record.change is None else change_document(record, record.change),
            )
        )


def change_document(topic: TopicRecord, change: RouteChange) -> documents.RouteChange:
    """Return the JSON document of a change of the topic's route."""
    return documents.RouteChange(
        id=change.id,
        version=change.version,
        order=change.order,
        state=change.state,
        begun=format_time(change.begun_ms),
        wait_ms=change.wait_ms,
        inputs=[_input(topic, change, held) for held in change.inputs],
        outputs=[
            documents.KeyRange(each.first, each.first + each.size, each.number) for each in change.outputs
        ],
    )


def _input(topic: TopicRecord, change: RouteChange, held: KeyRange) -> documents.RouteInput:
    seal = change.seals.get(held.number)
    return documents.RouteInput(
        partition=held.number,
        start=held.first,
        to=held.first + held.size,
        end=None if seal is None else seal.end_offset,
        sealed=None if seal is None else format_time(seal.time_ms),
        reclaimed=held.number not in topic.all_numbers,
    )
