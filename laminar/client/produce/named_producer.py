"""Named producers: the registration of a name, and the checkpoints that its earlier runs reached.

Each registration of a name gives its producer id a higher epoch. Before anything is sent, the epoch begins in
every partition, also in those that have ended. From then on no run of an older epoch can append, so the
checkpoint that a partition reports does not change any more by an older run.

When the producer later continues in partitions that replace others, its epoch begins there (`begin_in`). A
run that was replaced must not append there: it may still have records that the newest run has appended
already.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from laminar.client.errors import NotFound, Unavailable
from laminar.client.net.attempts import now_ms
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.lineage import Lineage
from laminar.client.policy.resume_numbers import Numbers, Reached
from laminar.client.policy.retry import Backoff
from laminar.wire.key_route import Route

AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Named:
    """A run of a named producer that has begun.

    It has the producer's id and epoch, the topic's route, and the record numbers that are durable already.
    """

    producer_id: bytes
    epoch: int
    numbers: Numbers
    route: Route


@dataclass(frozen=True, slots=True)
class _Progress:
    checkpoint: int
    floor: int
    sealed: bool


async def register(session: Session, name: str, *, timeout_s: float | None) -> tuple[bytes, int]:
    """Register a run of the producer `name`; return its 16-byte id and its epoch, higher than all before."""
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


async def lineage_of(session: Session, topic: str, *, timeout_s: float | None = None) -> Lineage:
    """Request the lineage of a topic (its route, and which partitions replaced which) from any node."""
    return Lineage.from_answer(await session.get_json(f"{topic_path(topic)}/routes", timeout_s=timeout_s))


async def begin_named(session: Session, topic: str, name: str, *, timeout_s: float | None) -> Named:
    """Register a run of the producer `name`, and begin its epoch in each partition of the topic.

    Raises:
        Fenced: another client registered the name meanwhile.
        Unavailable: no node knows which partitions replaced one that has ended.
        Error: as `Session.call` does.
    """
    deadline_ms = now_ms() + int(1000 * (session.timeout_s if timeout_s is None else timeout_s))
    producer_id, epoch = await register(session, name, timeout_s=timeout_s)
    created_with = (await session.topic_map(topic, timeout_s=timeout_s)).created_with
    backoff = Backoff(rng=session.rng)
    found: dict[int, _Progress] = {}
    while True:
        lineage = await lineage_of(session, topic, timeout_s=timeout_s)
        wanted = [number for number in lineage.partitions if number not in found]
        found |= await _begin(session, topic, wanted, producer_id, epoch, timeout_s=timeout_s)
        missing = [number for number in lineage.partitions if number not in found]
        ended = [number for number in lineage.route.numbers if number in found and found[number].sealed]
        if not missing and not ended:
            break
        # Of the nodes that were asked for the route or for a partition one does not know the newest ones yet.
        if now_ms() > deadline_ms:
            what = f"{topic}: partitions {missing + ended} are not known, or have ended"
            raise Unavailable(what, code="changing", retriable=True)
        await asyncio.sleep(backoff.next_ms() / 1000)
    numbers = Numbers(
        floor=max((each.floor for each in found.values()), default=0), created_with=created_with
    )
    for number, reached in _reached(lineage, found).items():
        numbers.learn(number, reached)
    return Named(producer_id, epoch, numbers, lineage.route)


async def begin_in(
    session: Session,
    topic: str,
    lineage: Lineage,
    *,
    known: Collection[int],
    ended: Collection[int],
    producer_id: bytes,
    epoch: int,
) -> dict[int, Reached]:
    """Begin a producer's epoch in partitions that a newer route added; return earlier runs' progress in them.

    The epoch has begun already in the partitions `known`. Of these, the sealed ones (`ended`) are asked
    again: a newer run may have appended there the records that this run was about to send. Partitions that
    were both created and sealed since the last call are asked for the same reason.

    Raises:
        Fenced: a newer run of the program has begun.
        Unavailable: the node that was asked does not know one of the partitions yet.
        Error: as `Session.call` does.
    """
    wanted = [number for number in lineage.partitions if number in ended or number not in known]
    found = await _begin(session, topic, wanted, producer_id, epoch, timeout_s=None)
    if len(found) < len(wanted):
        what = f"{topic} has partitions that not all nodes know yet"
        raise Unavailable(what, code="changing", retriable=True)
    return _reached(lineage, found)


def _reached(lineage: Lineage, found: dict[int, _Progress]) -> dict[int, Reached]:
    return {
        number: Reached(found[number].checkpoint, held, lineage.inputs_of(number))
        for number, held in lineage.partitions.items()
        if number in found
    }


async def _begin(
    session: Session,
    topic: str,
    partitions: Iterable[int],
    producer_id: bytes,
    epoch: int,
    *,
    timeout_s: float | None,
) -> dict[int, _Progress]:
    """Begin the epoch in these partitions; return the progress by partition, except those not found."""
    places = await session.topic_map(topic, timeout_s=timeout_s)
    turns = asyncio.Semaphore(AT_ONCE)

    async def begin(partition: int) -> tuple[int, _Progress | None]:
        async with turns:
            try:
                answer = await session.call(
                    "PUT",
                    f"{topic_path(topic)}/partitions/{partition}/producers/{producer_id.hex()}?epoch={epoch}",
                    first=places.leader(partition),
                    timeout_s=timeout_s,
                )
            except NotFound as error:
                if error.code == "no_such_producer":
                    return partition, _Progress(0, 0, sealed=True)  # it has ended, and keeps no new epoch
                if error.code != "no_such_partition":
                    raise
                return partition, None  # the asked node does not know it yet, or it was reclaimed meanwhile
        said = answer.json()
        return partition, _Progress(int(said["checkpoint"]), int(said["floor"]), bool(said.get("sealed")))

    answers = await asyncio.gather(*(begin(partition) for partition in partitions))
    return {partition: progress for partition, progress in answers if progress is not None}
