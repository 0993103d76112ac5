"""Decode large bodies in a thread, and append them in the order in which they arrived for a partition.

A client's batch is decoded completely before it is appended. For megabytes that takes longer than the event
loop's other work may wait, so a thread does it. Then the batch waits for its client's share of the bytes that
may be under way (`laminar.node.fair.bulk`). A body that arrives for the same partition meanwhile is appended
after the earlier one, however short it is: otherwise a producer's numbered batches would change their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from laminar.http.api.append_body import Append, parses_long
from laminar.http.api.roles import SYSTEM_PREFIX
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.fair.bulk import BULK_BYTES, Bulk
from laminar.node.partition.partition import Partition

Then = Callable[[Append], Response | Awaitable[Response]]


class BackgroundDecoding:
    """Decodes the bodies of one shard's requests: small ones at once, large ones in a thread, in order.

    `parse(request)` decodes a body, or raises `Problem`; `off_loop(parse, request)` runs it in a thread.
    `bulk` limits the bytes of large bodies under way, by client.
    """

    def __init__(
        self,
        parse: Callable[[Request], Append],
        off_loop: Callable[..., asyncio.Future[Append]],
        bulk: Bulk,
    ) -> None:
        self._bulk = bulk
        self._parse = parse
        self._off_loop = off_loop
        self._loop = asyncio.get_running_loop()
        # By partition with bodies under way: a future that is done when the last of them has been handled.
        # A short body for any other partition may be decoded at once.
        self._last: dict[Partition, asyncio.Future[None]] = {}

    async def parsed(self, request: Request) -> Append:
        """Return the body's records or batches, decoded in a thread if that takes long."""
        if parses_long(request):
            return await self._off_loop(self._parse, request)
        return self._parse(request)

    def at_once(self, request: Request, partition: Partition) -> bool:
        """Return whether a body may be decoded and appended at once.

        It may if it is not large, and no earlier body for this partition is still waiting.
        """
        if len(request.body) > BULK_BYTES:
            return False
        if not partition.topic.startswith(SYSTEM_PREFIX):  # appends of nodes about requests are of no client
            self._bulk.small(source_of(request))
        return partition not in self._last

    def in_turn(self, request: Request, partition: Partition, then: Then) -> asyncio.Task[Response]:
        """Return a task: call `then` with the decoded body after all earlier bodies, and return its answer.

        The bytes of a large body count as under way until that answer.
        """
        before = self._last.get(partition)
        passed = self._last[partition] = self._loop.create_future()
        parsed = self._off_loop(self._parse, request) if parses_long(request) else None
        size_bytes = len(request.body)

        def let_pass() -> None:
            if not passed.done():
                passed.set_result(None)
            if self._last.get(partition) is passed:
                del self._last[partition]

        async def answer() -> Response:
            if before is not None:
                await asyncio.wait((before,))
            append = self._parse(request) if parsed is None else await parsed
            if size_bytes <= BULK_BYTES:
                return await carried_out(append)
            async with self._bulk.share(client_of(request), size_bytes, source_of(request)):
                return await carried_out(append)

        async def carried_out(append: Append) -> Response:
            answered = then(append)
            let_pass()
            return answered if isinstance(answered, Response) else await answered

        task = self._loop.create_task(answer())
        # Also if the body was refused, so that later bodies do not wait for ever.
        task.add_done_callback(lambda done: let_pass())
        return task


def source_of(request: Request) -> object:
    """Return the source of a request: its connection, or in a forwarded one the client's address."""
    return getattr(request.connection, "address", "") or request.connection


def client_of(request: Request) -> str:
    """Return the client whose share of bulk a request uses: its principal, or without one its address."""
    connection = request.connection
    address: str = getattr(connection, "address", "") or connection.peer.rpartition(":")[0]
    return owner_of(request) or address
