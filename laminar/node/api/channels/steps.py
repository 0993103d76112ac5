"""Steps of consumers in one partition of a channel, each carried out by the partition's leader.

A step may be repeated. Records that were given out in an answer that was lost stay out until their delivery
expires; then another consumer gets them.
"""

from __future__ import annotations

from heapq import nsmallest

import msgspec

from laminar.http.api.deadlines import FORWARDED_APPEND_S, STEP_ATTEMPTS_S, STEP_PAUSE_S
from laminar.http.api.problems import Problem
from laminar.node.api.common.attempts import keep_code
from laminar.node.api.common.forwarding import requester_for
from laminar.node.api.common.leader_call import STEP, LeaderCall, RetryPolicy
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.open_records.jobs import Run
from laminar.node.channels.open_records.search import Budget, Found, Page, Wanted, offsets_of, page_of
from laminar.node.channels.requests import Step
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Why
from laminar.node.transport.transport import Peer
from laminar.wire.channels import Named

ASK_S = 2.0
"""The longest wait for records that one request asks a leader for; a consumer's longer wait asks again."""
_ASK = RetryPolicy(
    attempts_s=ASK_S, pause_s=STEP_PAUSE_S, repeatable=True, conclude=keep_code, election_wait_s=ASK_S
)
# A request without an answer may have given out records, so it is not repeated.
_RECEIVE = RetryPolicy(attempts_s=STEP_ATTEMPTS_S, pause_s=STEP_PAUSE_S, repeatable=False, conclude=keep_code)


class ReceiveRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to receive up to `wanted` records of a channel; 0 only waits until there is one."""

    topic: str
    partition: int
    channel: int
    wanted: int
    wait_ms: int
    timeout_ms: int | None = None


class Given(msgspec.Struct, frozen=True, array_like=True):
    """Records given out by a leader (fields as in `Jobs`).

    Empty `runs` say that records are available, but that none was given out.
    """

    partition: int
    floor: int
    runs: list[Run]
    frames: list[bytes]
    late: list[int] = []


class SettleRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to acknowledge, release, nack or extend deliveries of one partition."""

    topic: str
    partition: int
    channel: int
    steps: list[Step]


class SettleAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The number of records whose step took effect, and the records whose delivery was over (`late`)."""

    done: int
    late: list[Named]


class EndedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for the deliveries of a stream that are over; waits up to `wait_ms` until one is.

    `stream` is the random number of the stream, `named` lists its deliveries.
    """

    topic: str
    partition: int
    channel: int
    stream: int
    named: list[Named]
    wait_ms: int


class EndedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The deliveries that committed entries have ended; `late` counts their records that expired."""

    ended: list[Named]
    late: int


class PlaceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to move a channel to `place`: an offset, ``earliest``, ``latest``, or a time in ms as text."""

    topic: str
    partition: int
    channel: int
    place: int | str
    drop: bool = False


class AsideRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to list the records that are aside or dead, or to retry or drop dead ones.

    `what` is "aside", "dead", "retry" or "drop". The last two apply to `offsets`, or to all if that is None.
    The first two list the records that match `wanted` from offset `after` on, until the `budget` for reads is
    used up. Without a budget they list up to `limit` records from memory, without keys and tags.
    """

    topic: str
    partition: int
    channel: int
    what: str
    offsets: list[int] | None = None
    after: int = 0
    limit: int = 0
    wanted: Wanted = Wanted()
    budget: Budget | None = None


class AsideRecord(msgspec.Struct, frozen=True, array_like=True):
    """A record that is aside (it waits for another attempt, or is dead).

    `due_ms` is the time of the next attempt, or that of its death. With `is_read` False the record could not
    be read, so its key and tag are unknown.
    """

    partition: int
    offset: int
    attempts: int
    due_ms: int
    is_dead: bool
    waits_for_key: bool
    reason: str
    key: bytes | None = None
    tag: str | None = None
    is_read: bool = True


class AsideAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The number of records that are aside or dead, or that were retried or dropped; and the listed records.

    `next` is the offset at which the next page begins; None after the last. `left` is the rest of the budget;
    None if the request had none, or the answer is that of an older program without budgets.
    """

    count: int
    records: list[AsideRecord]
    next: int | None = None
    left: Budget | None = None


class ChannelSteps:
    """Sends steps of consumers to partitions' leaders, and carries out those of partitions led here."""

    def __init__(self, deliveries: Deliveries, leaders: LeaderCall) -> None:
        self._deliveries = deliveries
        self._leaders = leaders

    # -- receive -------------------------------------------------------------------------

    async def receive(self, request: ReceiveRequest) -> Given | None:
        """Return the records that the leader gives out; None if it has none in time. Raises `Problem`."""
        return await self._leaders.ask(
            "channel_receive",
            request,
            Given | None,  # type: ignore[arg-type]
            here=self._receive,
            policy=_RECEIVE if request.wanted else _ASK,
            timeout_s=FORWARDED_APPEND_S + request.wait_ms / 1000,
        )

    async def _receive(self, partition: Partition, request: ReceiveRequest) -> Given | None:
        jobs = await self._deliveries.of(partition).receive(
            request.channel,
            wanted=request.wanted,
            wait_s=request.wait_ms / 1000,
            timeout_ms=request.timeout_ms,
            who=requester_for(partition),
        )
        if jobs is None:
            return None
        frames = list(map(bytes, jobs.frames))
        return Given(jobs.partition, jobs.floor, jobs.runs, frames, list(jobs.late))

    async def on_receive(self, peer: Peer, payload: bytes) -> Given | None:
        """Carry out a receive for another shard, on a partition that this one leads."""
        request = msgspec.msgpack.decode(payload, type=ReceiveRequest)
        return await self._receive(self._leaders.led_here(request.topic, request.partition), request)

    # -- settle --------------------------------------------------------------------------

    async def settle(self, request: SettleRequest) -> SettleAnswer:
        """Acknowledge, release, nack or extend deliveries at the leader; return its answer.

        Raises `Problem`.
        """
        return await self._leaders.ask(
            "channel_settle",
            request,
            SettleAnswer,
            here=self._settle,
            policy=STEP,
            timeout_s=FORWARDED_APPEND_S,
        )

    async def _settle(self, partition: Partition, request: SettleRequest) -> SettleAnswer:
        settled = await self._deliveries.of(partition).settle(
            request.channel, request.steps, who=requester_for(partition)
        )
        return SettleAnswer(settled.done, settled.late)

    async def on_settle(self, peer: Peer, payload: bytes) -> SettleAnswer:
        """Settle deliveries for another shard, on a partition that this one leads."""
        request = msgspec.msgpack.decode(payload, type=SettleRequest)
        return await self._settle(self._leaders.led_here(request.topic, request.partition), request)

    # -- deliveries that are over --------------------------------------------------------

    async def ended(self, request: EndedRequest) -> EndedAnswer:
        """Return the deliveries that are over; none if all are still out after the wait. Raises `Problem`."""
        return await self._leaders.ask(
            "channel_ended",
            request,
            EndedAnswer,
            here=self._ended,
            policy=_ASK,
            timeout_s=FORWARDED_APPEND_S + request.wait_ms / 1000,
        )

    async def _ended(self, partition: Partition, request: EndedRequest) -> EndedAnswer:
        ended, late = await self._deliveries.of(partition).ended(
            request.channel, request.stream, request.named, wait_s=request.wait_ms / 1000
        )
        return EndedAnswer(ended, late)

    async def on_ended(self, peer: Peer, payload: bytes) -> EndedAnswer:
        """Answer another shard with the deliveries that are over, for a partition that this one leads."""
        request = msgspec.msgpack.decode(payload, type=EndedRequest)
        return await self._ended(self._leaders.led_here(request.topic, request.partition), request)

    # -- places --------------------------------------------------------------------------

    async def seek(self, request: PlaceRequest) -> int:
        """Move a channel in one partition; return the offset from which it gives out now.

        Raises `Problem`.
        """
        return await self._leaders.ask(
            "channel_seek", request, int, here=self._seek, policy=STEP, timeout_s=FORWARDED_APPEND_S
        )

    async def _seek(self, partition: Partition, request: PlaceRequest) -> int:
        bounds = await partition.reader.confirmed_bounds()
        place = request.place
        if place == "earliest":
            offset = bounds.start
        elif place == "latest":
            offset = bounds.end
        elif isinstance(place, str):
            offset, _ = await partition.reader.at_time(bounds, int(place))
        elif not bounds.start <= place <= bounds.end:
            raise Problem(
                "invalid",
                f"{partition.context.name} has offsets from {bounds.start} to {bounds.end}",
                field=f"positions.{partition.number}",
                value=place,
                limit=bounds.end if place > bounds.end else bounds.start,
                outcome="not_applied",
            )
        else:
            offset = place
        await self._deliveries.of(partition).seek(
            request.channel, offset, drop=request.drop, who=requester_for(partition)
        )
        return offset

    async def on_seek(self, peer: Peer, payload: bytes) -> int:
        """Move a channel for another shard, in a partition that this one leads."""
        request = msgspec.msgpack.decode(payload, type=PlaceRequest)
        return await self._seek(self._leaders.led_here(request.topic, request.partition), request)

    # -- aside and dead ------------------------------------------------------------------

    async def aside(self, request: AsideRequest) -> AsideAnswer:
        """List records that are aside or dead, or retry or drop dead ones, at the leader.

        Raises `Problem`.
        """
        return await self._leaders.ask(
            "channel_aside", request, AsideAnswer, here=self._aside, policy=STEP, timeout_s=FORWARDED_APPEND_S
        )

    async def _aside(self, partition: Partition, request: AsideRequest) -> AsideAnswer:
        delivery = self._deliveries.of(partition)
        if request.what == "retry":
            count = await delivery.retry_dead(request.channel, request.offsets, who=requester_for(partition))
            return AsideAnswer(count, [])
        if request.what == "drop":
            count = await delivery.drop_dead(request.channel, request.offsets, who=requester_for(partition))
            return AsideAnswer(count, [])
        await partition.reader.confirmed_bounds()
        held = partition.state.channels.by_id.get(request.channel)
        if held is None:
            return AsideAnswer(0, [], left=request.budget)
        is_dead, after, wanted = request.what == "dead", request.after, request.wanted
        offsets = offsets_of(held, is_dead=is_dead, after=after, wanted=wanted)
        if request.budget is None:
            first = [Found(offset, held.aside[offset]) for offset in nsmallest(request.limit, offsets)]
            page = Page(first, None, None)
        else:
            page = await page_of(partition, held, offsets, wanted=wanted, budget=request.budget)
        records = [
            AsideRecord(
                partition.number,
                each.offset,
                each.aside.attempts,
                each.aside.due_ms,
                each.aside.why is Why.DEAD,
                each.aside.why is Why.BUSY,
                each.aside.reason,
                each.key,
                each.tag,
                each.is_read,
            )
            for each in page.records
        ]
        return AsideAnswer(len(offsets), records, page.next, page.left)

    async def on_aside(self, peer: Peer, payload: bytes) -> AsideAnswer:
        """For another shard, list or change the waiting and dead records of a partition led here."""
        request = msgspec.msgpack.decode(payload, type=AsideRequest)
        return await self._aside(self._leaders.led_here(request.topic, request.partition), request)
