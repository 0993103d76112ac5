"""Remote calls over links: ids, deadlines, answers and errors.

It knows the encoding of a call and which caller waits for which answer; connections are the business of
`laminar.node.transport.transport`. A caller gets the answer's bytes, `RemoteError` with the code of the other
side, `CallTimeout`, or `PeerLost` when the connection ended before the answer (the call may have been carried
out).

    CALL     id u64 | timeout_ms u32 | method length u16 | method utf-8 | payload
    ANSWER   id u64 | payload
    FAILURE  id u64 | msgpack [code, message]
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable

import msgspec

from laminar.node.transport.link import FrameKind, Link

log = logging.getLogger(__name__)

_CALL = struct.Struct("<QIH")
_ID = struct.Struct("<Q")
_FAILURE = msgspec.msgpack.Decoder(tuple[str, str])
MAX_CALLS_IN_PROGRESS = 1024
"""Most calls of peers that are worked on at a time; further ones are answered with the code `overloaded`."""


class TransportError(Exception):
    """A call got no answer; the subclasses say why."""


class PeerLost(TransportError, ConnectionError):
    """No connection, or it ended before the answer. The call's outcome is unknown unless `.sent` is False."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class CallTimeout(TransportError, TimeoutError):
    """No answer in time: the outcome is unknown."""


class RemoteError(TransportError):
    """The other side's handler refused or failed.

    A handler raises it to choose `.code`; else the code is `bug`.
    """

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message


class Calls:
    """The remote calls in progress: ours that wait for an answer, and those of peers that run here."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next_id = 1
        self._waiting: dict[int, tuple[asyncio.Future[bytes], Link]] = {}
        self._working: set[asyncio.Task[None]] = set()
        self.failed = 0
        self.answered = 0

    @property
    def waiting(self) -> int:
        """Number of our calls without an answer so far."""
        return len(self._waiting)

    @property
    def working(self) -> int:
        """Number of calls of peers that are not answered yet."""
        return len(self._working)

    async def call(self, link: Link, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Call `method` over `link` and return the answer; the link may still be opening.

        Raises:
            RemoteError: the other side refused or failed.
            CallTimeout: there was no answer within `timeout` seconds.
            PeerLost: the link ended before the answer.
        """
        name = method.encode()
        number = self._next_id
        self._next_id += 1
        head = _CALL.pack(number, max(1, int(timeout * 1000)), len(name)) + name
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._waiting[number] = (future, link)
        link.send(FrameKind.CALL, (head, payload), len(head) + len(payload))
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise CallTimeout(f"no answer to {method} within {timeout:g} s") from None
        finally:
            self._waiting.pop(number, None)

    def take_answer(self, kind: int, payload: memoryview) -> None:
        """Process an ANSWER or FAILURE; one that no caller waits for any more is dropped."""
        (number,) = _ID.unpack_from(payload)
        future, _link = self._waiting.get(number, (None, None))
        if future is None or future.done():
            return
        if kind == FrameKind.ANSWER:
            future.set_result(bytes(payload[_ID.size :]))
        else:
            future.set_exception(RemoteError(*_FAILURE.decode(payload[_ID.size :])))

    def link_lost(self, link: Link) -> None:
        """Fail every call that waits for an answer over `link`."""
        for future, waiting_on in list(self._waiting.values()):
            if waiting_on is link and not future.done():
                why = f"connection lost ({link.close_reason})" if link.close_reason else "connection lost"
                future.set_exception(PeerLost(why, sent=link.established))

    def take_call(
        self, link: Link, payload: memoryview, handler: Callable[[str, bytes], Awaitable[bytes]]
    ) -> None:
        """Run `handler(method, payload)` for a CALL, as a task of its own, and answer over the same link."""
        number, timeout_ms, length = _CALL.unpack_from(payload)
        end = _CALL.size + length
        method = bytes(payload[_CALL.size : end]).decode()
        if len(self._working) >= MAX_CALLS_IN_PROGRESS:
            _fail(link, number, "overloaded", f"{len(self._working)} calls in progress")
            return
        work = self._work(link, number, timeout_ms, method, bytes(payload[end:]), handler)
        task = self._loop.create_task(work, name=f"call {method}")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _work(
        self,
        link: Link,
        number: int,
        timeout_ms: int,
        method: str,
        payload: bytes,
        handler: Callable[[str, bytes], Awaitable[bytes]],
    ) -> None:
        try:
            # No caller reads an answer after its deadline, so no work is done past it.
            async with asyncio.timeout(timeout_ms / 1000):
                answer = await handler(method, payload)
        except RemoteError as error:
            self.failed += 1
            _fail(link, number, error.code, error.message)
        except TimeoutError:
            self.failed += 1
            _fail(link, number, "timeout", f"{method} took longer than {timeout_ms} ms")
        except Exception as error:
            self.failed += 1
            log.exception("call %s failed", method)
            _fail(link, number, "bug", f"{type(error).__name__}: {error}")
        else:
            self.answered += 1
            _answer(link, FrameKind.ANSWER, number, answer)

    async def close(self) -> None:
        """Cancel the calls of peers; calls of ours fail when their links end."""
        working = list(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


def _fail(link: Link, number: int, code: str, message: str) -> None:
    _answer(link, FrameKind.FAILURE, number, msgspec.msgpack.encode((code, message)))


def _answer(link: Link, kind: FrameKind, number: int, payload: bytes) -> None:
    if link.closing:
        return
    size = _ID.size + len(payload)
    if size > link.largest:
        _fail(link, number, "too_large", f"an answer of {size} bytes, at most {link.largest}")
        return
    if not link.has_room(size):
        # The caller does not read its answers. Dropping one would leave it waiting; so the connection ends.
        link.abort("answers are not read")
        return
    link.send(kind, (_ID.pack(number), payload), size)
