"""Producers' identities: an id and an epoch, for programs that number their appends themselves.

Without a name it is an id that no other producer has, and nothing is remembered. A name belongs to one id:
each program that takes it gets the next epoch, so partitions refuse its previous holder from the newer one's
first batch on. Names are kept with sinks, by the coordinators (`laminar.node.partition.state.sinks`). Not in
the catalog, whose log is never trimmed and is replayed at each start, and whose every change goes to all
processes: programs begin often.
"""

from __future__ import annotations

from laminar.http.api import documents
from laminar.http.api.names import check_name
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.services import ShardServices
from laminar.node.api.records.idempotency import key_of
from laminar.node.api.transactions.sinks import SinkRoutes


class ProducerRoutes:
    """The handler that begins producers."""

    def __init__(self, services: ShardServices, sinks: SinkRoutes) -> None:
        self._services = services
        self._sinks = sinks

    async def begin(self, request: Request) -> Response:
        """Answer POST /v1/producers."""
        name = json_body(request, documents.NewProducer).name
        producer, epoch = self._services.rng.randbytes(16), 0
        if name is not None:
            named = key_of(request) or self._services.rng.randbytes(16).hex()
            taken = await self._sinks.take_name(check_name(name, field="name"), producer, named)
            producer, epoch = taken.producer, taken.epoch
        return Response.json(documents.Producer(producer.hex(), epoch, name), status=201)
