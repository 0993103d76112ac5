"""Producers' identities: an id and an epoch, for programs that number their appends themselves.

A producer without a name gets a random id and epoch 0, and nothing is stored. Ids cannot be guessed from
other ids, because a client that knows an id may append with it. A name has one id: each program that takes
the name gets this id with the next epoch, so that partitions refuse the previous program with the name once
the newer one has appended a batch. Names are stored like sinks, by the coordinators
(`laminar.node.partition.state.sinks`). They are not stored in the catalog, because programs start often,
while the catalog's log is never trimmed, is replayed at each start, and each change of it is sent to all
processes.
"""

from __future__ import annotations

import os

from laminar.http.api.documents import transactions as documents
from laminar.http.api.names import check_name
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of, principal_of
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.services import ShardServices
from laminar.node.api.records.idempotency import key_of
from laminar.node.api.transactions.sinks import SinkRoutes


class ProducerRoutes:
    """The handler of the route that gives producers their ids and epochs."""

    def __init__(self, services: ShardServices, sinks: SinkRoutes) -> None:
        self._services = services
        self._sinks = sinks

    async def begin(self, request: Request) -> Response:
        """Answer POST /v1/producers with a producer's id, and the epoch that begins now."""
        name = json_body(request, documents.NewProducer).name
        producer, epoch = os.urandom(16), 0
        if name is not None:
            principal_of(request).require("write", name)
            named = key_of(request) or self._services.rng.randbytes(16).hex()
            taken = await self._sinks.take_name(
                check_name(name, field="name"), producer, named, principal=owner_of(request)
            )
            producer, epoch = taken.producer, taken.epoch
        return Response.json(documents.Producer(producer.hex(), epoch, name), status=201)
