"""Three journeys through a running node, each with a trace of its calls.

Append: the POST of one record to the partition's leader, one voter, `flush=commit`, until the answer is
there. Read: `topic.read()` of three records. Election: from the death of a leader to the new leader, on the
two members that are left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import laminar
from tests.node.trio import trio
from tests.traces.trace import Trace

TOPIC = "journey"
RECORDS = 3


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Append one record by HTTP, as curl does."""
    body = b"a record"
    writer.write(
        f"POST /v1/topics/{TOPIC}/partitions/0/records HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 20"), head
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))


async def _of_a_node(journey: str, folder: Path) -> Trace:
    async with laminar.embed(folder) as node:
        topic = await node.client.create_topic(TOPIC, partitions=1, replicas=1)
        host, _, port = node.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(RECORDS):  # each path is warm: the trace shows the ordinary one
            await _post(reader, writer)
        trace = Trace()
        if journey == "append":
            trace.start()
            await _post(reader, writer)
        else:
            async with topic.read() as records:
                await anext(aiter(records))
            trace.start()
            async with topic.read() as records:
                assert RECORDS == len([record async for record in records])
        trace.stop()
        writer.close()
        await writer.wait_closed()
    return trace


async def append(folder: Path) -> Trace:
    """Return the trace of one append."""
    return await _of_a_node("append", folder)


async def read(folder: Path) -> Trace:
    """Return the trace of one read of three records."""
    return await _of_a_node("read", folder)


async def election(folder: Path) -> Trace:
    """Return the trace of one election."""
    async with trio(seed=7) as members:
        leader = await members.leader()
        others = [member for member in members.alive if member is not leader]
        trace = Trace()

        def elected() -> bool:
            with trace.paused():
                return any(member.replica.core.leader_id == member.replica_id for member in others)

        trace.start()
        await leader.kill()
        while not elected():  # noqa: ASYNC110  # to wait for an event would be a call of the product
            await asyncio.sleep(0)
        trace.stop()
    return trace


JOURNEYS = {"append": append, "read": read, "election": election}


def trace_of(journey: str, *, runs: int = 5, enough: int = 0) -> Trace:
    """Return the shortest trace of `journey` in `runs` runs, each on a node with a new data folder.

    The shortest has the least of what else a node does by its timers meanwhile. After one of at most `enough`
    moves there are no more runs.
    """
    traces: list[Trace] = []
    while len(traces) < runs and not any(trace.figures().moves <= enough for trace in traces):
        with TemporaryDirectory() as folder:
            traces.append(asyncio.run(JOURNEYS[journey](Path(folder) / "data")))
    return min(traces, key=lambda trace: trace.figures().moves)
