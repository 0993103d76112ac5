"""Reads of damaged records: another replica answers, or the reader gets an error, or skips the records.

Committed data is the same on all replicas, so a read of records that are damaged here is answered by another
replica, and the client notices nothing. If no replica has the data, `on_damage=skip` omits the range and
names it in a header; without that the answer is 503 `damaged`, with the offsets. A batch that its producer
encoded wrongly is unreadable on all replicas: it is skipped in the same way, or answered with 422
`unreadable`. No answer reveals the file or position of damaged bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlencode

from laminar.batch import BatchError, Buffer, Header
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.log.disk.errors import DamagedRange
from laminar.node.api.common.forwarding import FORWARDED
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.partition.partition import Partition

LOCAL = "laminar-local"
SKIPPED = "Laminar-Skipped-Offsets"
_KEPT = ("to", "limit", "max_bytes", "tag", "fields")

Pass = Callable[[Request, ReplicaEndpoint], Awaitable[Response]]


def skips(request: Request) -> bool:
    """Return whether the reader wants damaged records to be skipped (`on_damage=skip`).

    Raises:
        Problem: 422 for another value of `on_damage`.
    """
    wanted = request.query.get("on_damage", "fail")
    if wanted not in ("fail", "skip"):
        raise Problem("invalid", "on_damage must be `fail` or `skip`", field="on_damage", value=wanted)
    return wanted == "skip"


def problem_of(damage: DamagedRange, partition: Partition, *, node: str, offset: int) -> Problem:
    """Return the problem that answers a read of a damaged range."""
    return Problem(
        "damaged",
        f"offsets {damage.first_offset} to {damage.next_offset - 1} of {partition.topic}/{partition.number} "
        f"are damaged on {node}, and no other replica serves them",
        hint=f"`on_damage=skip`, or `offset={damage.next_offset}`, continues after them.",
        field="offset",
        value=offset,
        limit=damage.next_offset,
        retry_after_ms=1000,
        outcome="not_applied",
        headers=[("Laminar-Next-Offset", str(damage.next_offset))],
    )


async def elsewhere(
    request: Request, offset: int | None, replicas: Sequence[ReplicaEndpoint], ask: Pass
) -> Response | None:
    """Return another replica's answer to a read of records that are damaged here; None if none can answer.

    `offset` is the first offset of the fetch; None if the request has no offset. A request that another shard
    forwarded is not forwarded again, and None is returned.
    """
    if LOCAL in request.headers or FORWARDED in request.headers:
        return None
    target = request.target.partition("?")[0]
    if offset is not None:
        # With `min_offset` a replica that lags and lacks the record answers with a problem at once.
        query = {name: request.query[name] for name in _KEPT if name in request.query}
        target += "?" + urlencode({**query, "offset": offset, "min_offset": offset + 1})
    passed = Request(RequestHead(request.method, target, request.headers), b"", request.connection)
    for where in replicas:
        try:
            response = await ask(passed, where)
        except Problem:
            continue
        if response.status in (200, 206):
            return response
    return None


def without_bad_batches(
    frames: Sequence[Buffer], offset: int, *, read: Callable[[Sequence[Buffer], int], object], skip: bool
) -> tuple[list[Buffer], int, list[str]]:
    """Return the first run of readable batches, its first offset, and the ranges skipped before it.

    A bad batch has correct checksums but a body that contradicts itself, as its producer encoded it.
    `read(batches, offset)` decodes batches from an offset on, or raises `BatchError`. With `skip`, bad
    batches at the beginning are skipped. The run ends before a later bad batch.

    Raises:
        Problem: 422 `unreadable` if the first batch is bad and `skip` is False.
    """
    good: list[Buffer] = []
    skipped: list[str] = []
    for frame in frames:
        try:
            read([frame], offset)
        except BatchError as error:
            if good:
                break
            if not skip:
                raise unreadable(error, Header.unpack(frame)) from error
            header = Header.unpack(frame)
            skipped.append(f"{max(offset, header.base_offset)}-{header.next_offset - 1}")
            offset = header.next_offset
        else:
            good.append(frame)
    return good, offset, skipped


def unreadable(error: BatchError, header: Header) -> Problem:
    """Return the problem that answers a read of a batch that its producer encoded wrongly."""
    return Problem(
        "unreadable",
        f"records {header.base_offset} to {header.next_offset - 1} cannot be read: {error}",
        hint=f"`on_damage=skip`, or `offset={header.next_offset}`, continues after them.",
        field="offset",
        value=header.base_offset,
        limit=header.next_offset,
        headers=[("Laminar-Next-Offset", str(header.next_offset))],
    )
