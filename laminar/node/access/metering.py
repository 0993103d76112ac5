"""Count the bytes of bodies and answers of a principal whose bytes are limited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

from laminar.http.protocol.messages import Buffer, Request, Response
from laminar.node.access.meters import Meter
from laminar.node.host.clock import Clock


def metered(
    answer: Response | Awaitable[Response], request: Request, meter: Meter, clock: Clock
) -> Response | Awaitable[Response]:
    """Count a request's body if it came in chunks; return the answer, which is counted once it is made."""
    if request.head.chunked:
        meter.received(len(request.body), clock.monotonic_ms())
    if not meter.counts_answers or request.method == "HEAD":
        return answer
    if isinstance(answer, Response):
        return _counted(answer, meter, clock)
    return _when_made(answer, meter, clock)


async def _when_made(answer: Awaitable[Response], meter: Meter, clock: Clock) -> Response:
    return _counted(await answer, meter, clock)


def _counted(response: Response, meter: Meter, clock: Clock) -> Response:
    body = response.body
    if isinstance(body, AsyncIterator):
        response.body = _stream(body, meter, clock)
    elif isinstance(body, (bytes, bytearray, memoryview)):
        meter.sent(len(body), clock.monotonic_ms())
    else:
        meter.sent(sum(map(len, body)), clock.monotonic_ms())
    return response


async def _stream(parts: AsyncIterator[Buffer], meter: Meter, clock: Clock) -> AsyncIterator[Buffer]:
    """Count the parts of a stream.

    They are not delayed, because the stream was within the limit when it began.
    """
    try:
        async for part in parts:
            meter.sent(len(part), clock.monotonic_ms())
            yield part
    finally:
        close = getattr(parts, "aclose", None)
        if close is not None:
            await close()
