"""The progress of channels in the partitions of a topic, as reported by the partitions' leaders.

A channel's progress is recorded in the partitions' logs. So a description asks the leader of each partition,
waits for none longer than `ANSWER_S`, and names those that did not answer. A leader answers once its log is
committed up to the end that it had at the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.api.common.attempts import keep_code
from laminar.node.api.common.leader_call import LeaderCall, RetryPolicy
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channels import MAX_OPEN, MAX_OPEN_HERE, Channel, Why
from laminar.node.transport.transport import Peer

ANSWER_S = 2.0
_POLICY = RetryPolicy(
    attempts_s=ANSWER_S, pause_s=0.05, repeatable=True, conclude=keep_code, election_wait_s=ANSWER_S
)


class ChannelQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The question to a partition's leader for the state of a channel; `channel` 0 asks for all channels."""

    topic: str
    partition: int
    channel: int = 0


class ChannelState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a channel in one partition.

    `version` is that of the settings that the leader applies. `next` is the offset of the first record that
    was never given out, `end` the end offset. Numbers of records: `depth` at most are still to be given out,
    `out` are out (given out, not acknowledged yet), `pinned` of these are to be acknowledged by a
    transaction, `aside` wait for another attempt, `dead` have failed too often, `lost` left the log before
    they were done. `oldest_ms` is the time at which the oldest record was appended that is neither done nor
    dead; 0 if there is none. `blocked` says that too many records are out or aside to give out more.
    `kept_bytes` is the size of the log that retention would trim if this channel did not need it; other
    channels may need it, too.
    """

    partition: int
    channel: int
    version: int
    next: int
    end: int
    depth: int
    out: int
    aside: int
    dead: int
    lost: int
    oldest_ms: int
    blocked: bool
    pinned: int = 0
    kept_bytes: int = 0


class ChannelStates:
    """Asks the leaders of partitions for the states of channels, and answers for partitions led here."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def of(self, topic: str, numbers: Iterable[int], channel: int = 0) -> dict[int, list[ChannelState]]:
        """Return a channel's states by partition (0: those of all channels), if its leader answers."""
        asked = list(numbers)
        answers = await asyncio.gather(*(self._ask(topic, number, channel) for number in asked))
        return {number: states for number, states in zip(asked, answers, strict=True) if states is not None}

    async def _ask(self, topic: str, number: int, channel: int) -> list[ChannelState] | None:
        question = ChannelQuestion(topic, number, channel)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._leaders.ask(
                    "channel_states", question, list[ChannelState], here=self._here, policy=_POLICY
                )
        except (Problem, TimeoutError):
            return None

    async def _here(self, partition: Partition, question: ChannelQuestion) -> list[ChannelState]:
        end = await partition.reader.confirmed_end()
        seen = Receipt(partition.number, 0, 0)
        await partition.appends.when_committed(partition.log.last_index, seen, copied=False)
        channels = partition.state.channels
        found = [each for each in channels.by_id.values() if question.channel in (0, each.id)]
        full = channels.open >= MAX_OPEN_HERE
        return [await state_of(partition, each, end=end, full=full) for each in found]

    async def on_channel_states(self, peer: Peer, payload: bytes) -> list[ChannelState]:
        """Answer another shard with the states of channels in a partition that this shard leads."""
        question = msgspec.msgpack.decode(payload, type=ChannelQuestion)
        partition = self._leaders.led_here(question.topic, question.partition)
        return await self._here(partition, question)


async def state_of(partition: Partition, channel: Channel, *, end: int, full: bool) -> ChannelState:
    """Return the state of a channel in a partition, as its leader reports it.

    `full` says that too many records of the partition are given out or wait for another attempt.
    """
    waiting = [offset for offset, each in channel.aside.items() if each.why is not Why.DEAD]
    last, kept = channel.last(end), partition.context.kept_log
    oldest = min((channel.next, *channel.out, *waiting))
    state = ChannelState(
        partition=partition.number,
        channel=channel.id,
        version=channel.version,
        next=channel.next,
        end=end,
        depth=channel.depth(end),
        out=len(channel.out),
        aside=len(waiting),
        dead=len(channel.aside) - len(waiting),
        lost=channel.lost,
        oldest_ms=0,
        blocked=full or channel.open >= MAX_OPEN,
        pinned=len(channel.pins),
        kept_bytes=0 if kept is None else kept.bytes_of(channel.id),
    )
    # The table may change while the log is read, so the state is computed before, at one moment.
    return state if oldest >= last else replace(state, oldest_ms=await _appended_ms(partition, oldest))


async def _appended_ms(partition: Partition, offset: int) -> int:
    """Return the append time of a record in ms, or that of the first retained record if this one is trimmed.

    Returns 0 if the time cannot be read now.
    """
    copy = partition.state.channels.copies.get(offset)
    if copy is not None:
        return copy.time_ms
    try:
        index = await partition.log.find_offset(max(offset, partition.start_offset))
        return 0 if index is None else (await partition.log.find_index_entry(index)).append_time_ms
    except StorageError:
        return 0
