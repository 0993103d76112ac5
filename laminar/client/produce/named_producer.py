"""Named producers: the registration of a name, and the checkpoints that its earlier runs reached.

Each registration of a name gives its producer id a higher epoch. Before anything is sent, the epoch begins in
every partition. From then on no run of an older epoch can append, so the checkpoint that a partition reports
does not change any more by an older run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from laminar.client.net.session import Session, topic_path
from laminar.client.policy.resume_numbers import Numbers

AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Named:
    """The id and epoch of a named producer, and the numbers that were durable when it began."""

    producer_id: bytes
    epoch: int
    numbers: Numbers


async def register(session: Session, name: str, *, timeout_s: float | None) -> tuple[bytes, int]:
    """Register a producer's name; return its id and an epoch higher than all before."""
    answer = await session.call(
        "POST",
        "/v1/producers",
        body=msgspec.json.encode({"name": name}),
        # With this key, the name is registered once, however often and late the request arrives.
        headers={"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)},
        timeout_s=timeout_s,
    )
    identity = answer.json()
    return bytes.fromhex(identity["producer"]), int(identity["epoch"])


async def begin_named(
    session: Session, topic: str, name: str, *, partitions: Iterable[int], timeout_s: float | None
) -> Named:
    """Register the name, and begin its epoch in each of these partitions of the topic.

    Raises:
        Fenced: another client registered the name meanwhile.
        Error: as `Session.call` does.
    """
    producer_id, epoch = await register(session, name, timeout_s=timeout_s)
    places = await session.topic_map(topic, timeout_s=timeout_s)
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin(partition: int) -> tuple[int, int, int]:
        async with turns:
            answer = await session.call(
                "PUT",
                f"{topic_path(topic)}/partitions/{partition}/producers/{producer_id.hex()}?epoch={epoch}",
                first=places.leader(partition),
                timeout_s=timeout_s,
            )
        progress = answer.json()
        return partition, int(progress["checkpoint"]), int(progress["floor"])

    found = await asyncio.gather(*(begin(partition) for partition in partitions))
    floor = max((floor for _, _, floor in found), default=0)
    checkpoints = {partition: checkpoint for partition, checkpoint, _ in found}
    return Named(producer_id, epoch, Numbers(checkpoints, floor=floor, created_with=places.created_with))
