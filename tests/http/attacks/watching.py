"""What the tests of attacks measure, in CPU: the longest turn of the loop, and what others wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from laminar.http.api.append_body import Append, parse_append, parses_long
from laminar.http.api.limits import Limits
from laminar.http.protocol.messages import Request, Response
from tests.http.serving import connect, read_answer

SAMPLE_S = 0.005
# No turn of the loop may burn more CPU than this, on a machine that is slow and loaded.
MOST_TURN_S = 0.25
# What another client waits at most, however busy the machine: only one that is blocked waits so long.
MOST_BLOCKED_S = 30
PROBE = b"GET /probe HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Appends:
    """An application that reads appends as a node does, and stores nothing."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts: list[int] = []

    def head(self, request: Request) -> Response | None:
        return None

    def parses_long(self, request: Request) -> bool:
        return parses_long(request)

    def parse(self, request: Request) -> Append:
        return parse_append(request, limits=self.limits, now_ms=lambda: 0)

    def handle(self, request: Request) -> Response:
        if request.method == "GET":
            return Response(200, body=b"here")
        append: Append = request.parsed or self.parse(request)
        assert append.records is not None
        self.counts.append(len(append.records))
        return Response(200, body=b"%d" % len(append.records))


class Watch:
    """`turn_s` is the most CPU that this thread's loop burned between two looks.

    `wait_s` is the most that all threads of this process burned while another client waited for an answer,
    `blocked_s` the longest such wait.
    """

    def __init__(self) -> None:
        self.turn_s = 0.0
        self.wait_s = 0.0
        self.blocked_s = 0.0
        self.answers = 0

    async def look(self) -> None:
        """Until cancelled."""
        before = time.thread_time()
        while True:
            await asyncio.sleep(SAMPLE_S)
            now = time.thread_time()
            self.turn_s = max(self.turn_s, now - before)
            before = now

    async def probe(self, url: str) -> None:
        """Another client that asks again and again, until cancelled."""
        reader, writer = await connect(url)
        try:
            while True:
                begun, begun_s = time.process_time(), time.monotonic()
                writer.write(PROBE)
                status, _, _ = await read_answer(reader)
                assert 200 == status
                self.wait_s = max(self.wait_s, time.process_time() - begun)
                self.blocked_s = max(self.blocked_s, time.monotonic() - begun_s)
                self.answers += 1
                await asyncio.sleep(SAMPLE_S)
        finally:
            writer.close()


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[Watch]:
    """While an attack runs: at its end no turn was too long, and another client was answered."""
    watch = Watch()
    tasks = [asyncio.create_task(watch.look()), asyncio.create_task(watch.probe(url))]
    await asyncio.sleep(2 * SAMPLE_S)
    watch.turn_s = 0.0
    try:
        yield watch
    finally:
        done = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    print(f"longest turn {watch.turn_s * 1000:.0f} ms, longest wait {watch.wait_s * 1000:.0f} ms")
    assert watch.turn_s < MOST_TURN_S, f"a turn of {watch.turn_s:.3f} s"
    assert watch.answers > 0
    assert watch.blocked_s < MOST_BLOCKED_S
