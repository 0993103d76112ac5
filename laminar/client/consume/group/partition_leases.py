"""Leases: the partitions of a group's cursor that one member owns. Claim, commit, release.

The log of each partition records who owns it. Each step is a change of the cursor that names the owner and
the position that it expects, so the partition refuses a step that arrives late, twice or from a former owner.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from laminar.client.consume.cursors import cursor_path
from laminar.client.errors import (
    Error,
    Fenced,
    NotDrained,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    Unavailable,
)
from laminar.client.net.session import Session
from laminar.client.policy.assignment import Place, Places
from laminar.client.policy.retry import StepTimeout

# A step that a node does not answer within this time is sent to another node.
LEASE_ATTEMPT_S = 1.0
STEP_TIMEOUT_S = 2.0
# The same for steps that ask many partitions: where those are hundreds, and the nodes have other work.
LONGEST_STEP_S = 32.0
# A step that failed by these is made again later.
NOT_NOW = (Unavailable, OutcomeUnknown)


def is_gone(error: Error) -> bool:
    """Return whether `error` says that the partition is reclaimed: ended, acknowledged, and deleted."""
    return error.code == "no_such_partition"


class Lease:
    """A partition that this member owns, and how far it was read.

    Four positions say how far, each as the offset after the last record: `committed` is that of the cursor;
    `seen` is what the body of the program's loop has got; `handed` is the end of the last batch handed out,
    and `given` that of the last one which had records. Records that retention removed, or that a filter left
    out, count as seen. So once `given` is committed, the program is working on no record, and all that was
    seen may be committed. `valid` is false once the partition is released or another member owns it.
    """

    def __init__(self, partition: int, owner: str, position: int) -> None:
        self.partition = partition
        self.owner = owner
        self.committed = self.seen = self.handed = self.given = position
        self.valid = True
        # The final end, once it is known that the partition takes no more records.
        self.end: int | None = None
        # When it may be committed next, without the program, what was passed (the monotonic clock).
        self.pass_at_s = 0.0
        # When its release began, in seconds of the monotonic clock; None while it is not being released.
        self.leaving_s: float | None = None
        # The lock allows one change at a time. `attempted` has every position whose change may have been
        # carried out, or may be yet, because its answer was lost.
        self.lock = asyncio.Lock()
        self.attempted = {position}


class Leases:
    """The requests by which a member reads a group's cursor, claims partitions, commits and releases them.

    Except for `places` and `begin`, each request changes the cursor in one partition.
    """

    def __init__(self, session: Session, topic: str, cursor: str) -> None:
        self._session = session
        self._topic = topic
        self._path = cursor_path(topic, cursor)
        self._looking = StepTimeout(least_s=STEP_TIMEOUT_S, most_s=LONGEST_STEP_S)
        self._claiming = StepTimeout(least_s=STEP_TIMEOUT_S, most_s=LONGEST_STEP_S)

    @property
    def look_s(self) -> float:
        """Return the seconds that the last `places` took: long if a topic has hundreds of partitions."""
        return self._looking.took_s

    async def places(self) -> Places:
        """Read the cursor: position and owner by partition, ends of partitions, and which must wait."""
        timeout_s, began_s = self._looking.seconds, time.monotonic()
        try:
            answer = await self._session.call(
                "GET",
                self._path,
                accept=(404,),
                timeout_s=timeout_s,
                attempt_timeout_s=max(LEASE_ATTEMPT_S, timeout_s / 2),
            )
        except (Unavailable, OutcomeUnknown):
            self._looking.failed(time.monotonic() - began_s, timeout_s)
            raise
        self._looking.succeeded(time.monotonic() - began_s)
        return Places() if answer.status == 404 else _places(answer.json())

    async def begin(self, start: str, *, timeout_s: float) -> Places:
        """Give the cursor a position in partitions where it has none; return the cursor as `places` does.

        The position is `start`, but 0 in a partition that replaced one in which the cursor has a position:
        the group must read all of that partition. So call it when the topic's route has changed.
        """
        answer = await self._session.call(
            "PUT",
            self._path,
            body=msgspec.json.encode({"begin": start}),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout_s,
            attempt_timeout_s=timeout_s,
        )
        return _places(answer.json())

    async def claim(self, partition: int, place: Place, *, me: str, start: str) -> Lease | None:
        """Claim `partition` for member `me`, if the cursor's position and owner are still those of `place`.

        Return the lease; None if position or owner changed, if it is unknown whether the claim succeeded, if
        the partition is reclaimed, or if partitions that it replaced are not acknowledged to their ends.
        A cursor without a position begins at `start`: ``"earliest"``, ``"latest"`` or epoch milliseconds as
        text.
        """
        timeout_s, began_s = self._claiming.seconds, time.monotonic()
        try:
            position = place.position
            if position is None:
                position = await self._session.offset_at(self._topic, partition, start, timeout_s=timeout_s)
            await self._put(partition, position, place.position, me, place.owner, timeout_s)
        except (Unavailable, OutcomeUnknown):
            # Its partition asks the leaders of all partitions before it.
            self._claiming.failed(time.monotonic() - began_s, timeout_s)
            return None
        except (Fenced, NotDrained, PreconditionFailed):
            return None
        except NotFound as error:
            if not is_gone(error):
                raise
            return None
        self._claiming.succeeded(time.monotonic() - began_s)
        return Lease(partition, me, position)

    async def move(self, lease: Lease, position: int, *, timeout_s: float | None = None) -> None:
        """Commit `position`, if it is after the committed one and the lease is valid; else do nothing.

        Raises:
            Fenced: another member owns the partition.
            Error: as `Session.call` does.
        """
        async with lease.lock:
            if lease.valid and position > lease.committed:
                await self._change(lease, position, lease.owner, timeout_s)

    async def hand(self, lease: Lease, owner: str, *, timeout_s: float) -> None:
        """Make `owner` the owner of the partition ("" releases it), at the committed position.

        Raises:
            Fenced: another member owns the partition.
            Error: as `Session.call` does.
        """
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
                # If the cursor is at a position that we attempted, an earlier change whose answer was lost
                # was carried out: note its position, and try again from there.
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
            attempt_timeout_s=max(LEASE_ATTEMPT_S, (timeout_s or 0.0) / 2),
        )


def _places(document: dict[str, Any]) -> Places:
    """Return the cursor that the JSON of an answer describes."""
    owners = document.get("owners", {})
    return Places(
        places={
            int(number): Place(position=int(position), owner=str(owners.get(number, "")))
            for number, position in document["positions"].items()
        },
        numbers=frozenset(int(number) for number in document["lag"]),
        ends={int(number): int(end) for number, end in document.get("ends", {}).items()},
        waits_for=frozenset(int(number) for number in document.get("waits_for", {})),
    )
