"""Partitions of a group's cursor that one member owns: how they are claimed, moved and given back.

Ownership is in the partition's log, so each step is a change of the cursor that names its expected owner and
position: a step that comes late, or twice, or from a former owner, is refused there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from laminar.client.consume.cursors import cursor_path
from laminar.client.errors import Fenced, OutcomeUnknown, PreconditionFailed, Unavailable
from laminar.client.net.session import Session
from laminar.client.policy.assignment import Place

# A node that does not answer a step for so long is left for the next.
ATTEMPT_TIMEOUT_S = 1.0


class Lease:
    """A partition that this member owns.

    Offsets: `committed`, `seen` by the loop's body, `handed` out to it.
    """

    def __init__(self, partition: int, owner: str, position: int) -> None:
        self.partition = partition
        self.owner = owner
        self.committed = self.seen = self.handed = position
        self.valid = True
        # Since when it is being released, by the monotonic clock.
        self.leaving_s: float | None = None
        # One change at a time; a position whose change got no answer may stand, or come to stand.
        self.lock = asyncio.Lock()
        self.attempted = {position}


class Leases:
    """Changes of one cursor, a partition each."""

    def __init__(self, session: Session, topic: str, cursor: str) -> None:
        self._session = session
        self._topic = topic
        self._path = cursor_path(topic, cursor)

    async def places(self, *, timeout_s: float | None = None) -> dict[int, Place]:
        """Return position and owner by partition; a partition without a position is missing."""
        answer = await self._session.call(
            "GET", self._path, accept=(404,), timeout_s=timeout_s, attempt_timeout_s=ATTEMPT_TIMEOUT_S
        )
        if answer.status == 404:
            return {}
        document = answer.json()
        owners = document.get("owners", {})
        return {
            int(number): Place(position=int(position), owner=str(owners.get(number, "")))
            for number, position in document["positions"].items()
        }

    async def claim(
        self, partition: int, place: Place, *, me: str, start: str, timeout_s: float
    ) -> Lease | None:
        """Own `partition`, which is at `place`; return None if it is not any more, or its state is unknown.

        `start` is where a cursor begins that has no position yet.
        """
        try:
            position = place.position
            if position is None:
                position = await self._session.offset_at(self._topic, partition, start, timeout_s=timeout_s)
            await self._put(partition, position, place.position, me, place.owner, timeout_s)
        except (Fenced, PreconditionFailed, Unavailable, OutcomeUnknown):
            return None
        return Lease(partition, me, position)

    async def move(self, lease: Lease, position: int, *, timeout_s: float | None = None) -> None:
        """Commit `position`. Raises `Fenced` if another member owns it, or as a call does."""
        async with lease.lock:
            if lease.valid and position > lease.committed:
                await self._change(lease, position, lease.owner, timeout_s)

    async def hand(self, lease: Lease, owner: str, *, timeout_s: float) -> None:
        """Let `owner` own it ("": no member), at its present position. Raises `Fenced`, or as a call does."""
        async with lease.lock:
            if lease.valid:
                await self._change(lease, None, owner, timeout_s)
                lease.owner = owner
                lease.valid = owner != ""

    async def _change(self, lease: Lease, position: int | None, owner: str, timeout_s: float | None) -> None:
        while True:
            target = lease.committed if position is None else position
            lease.attempted.add(target)
            try:
                await self._put(lease.partition, target, lease.committed, owner, lease.owner, timeout_s)
            except PreconditionFailed as error:
                # An earlier change of ours, whose answer was lost, took place.
                if error.limit == lease.committed or error.limit not in lease.attempted:
                    raise
                lease.committed = int(error.limit)
                continue
            lease.committed = target
            lease.attempted = {target}
            return

    async def _put(
        self,
        partition: int,
        position: int,
        expected: int | None,
        owner: str,
        expected_owner: str,
        timeout_s: float | None,
    ) -> None:
        number = str(partition)
        body: dict[str, Any] = {
            "positions": {number: position},
            "expected": {number: expected},
            "owner": owner,
            "expected_owner": expected_owner,
        }
        await self._session.call(
            "PUT",
            self._path,
            body=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout_s,
            attempt_timeout_s=ATTEMPT_TIMEOUT_S,
        )
