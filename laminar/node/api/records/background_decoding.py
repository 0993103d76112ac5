"""Decoding of large bodies in a thread, in the order in which they came for a partition.

A batch from outside is decoded completely before it is appended. For megabytes that takes longer than the
event loop's other work may wait. A body that arrives for the same partition meanwhile is appended after the
earlier one, however short it is: otherwise a producer's numbered batches would change their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from laminar.http.api.append_body import Append, parses_long
from laminar.http.protocol.messages import Request, Response
from laminar.node.partition.partition import Partition

Then = Callable[[Append], Response | Awaitable[Response]]


class BackgroundDecoding:
    """The decoding of one shard's bodies: small ones at once, large ones in a thread, in order.

    `parse(request)` decodes a body, or raises `Problem`; `off_loop(parse, request)` runs it in a thread.
    """

    def __init__(
        self, parse: Callable[[Request], Append], off_loop: Callable[..., asyncio.Future[Append]]
    ) -> None:
        self._parse = parse
        self._off_loop = off_loop
        self._loop = asyncio.get_running_loop()
        # By partition with bodies under way: a future that is done when the last of them has been handled.
        # A short body for any other partition may be decoded at once.
        self.last: dict[Partition, asyncio.Future[None]] = {}

    async def parsed(self, request: Request) -> Append:
        """Return the body's records or batches, decoded in a thread if that takes long."""
        if parses_long(request):
            return await self._off_loop(self._parse, request)
        return self._parse(request)

    def in_turn(self, request: Request, partition: Partition, then: Then) -> asyncio.Task[Response]:
        """Return the answer of `then`, called with the body decoded in a thread, after all earlier bodies."""
        before = self.last.get(partition)
        passed = self.last[partition] = self._loop.create_future()
        parsed = self._off_loop(self._parse, request)

        def let_pass() -> None:
            if not passed.done():
                passed.set_result(None)
            if self.last.get(partition) is passed:
                del self.last[partition]

        async def answer() -> Response:
            if before is not None:
                await asyncio.wait((before,))
            answered = then(await parsed)
            let_pass()
            return answered if isinstance(answered, Response) else await answered

        task = self._loop.create_task(answer())
        # Also if the body was refused, so that later bodies do not wait for ever.
        task.add_done_callback(lambda done: let_pass())
        return task
