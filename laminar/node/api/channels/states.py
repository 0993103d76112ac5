"""Where channels stand in the partitions of a topic, as their leaders say.

A channel's place is in the partitions' logs. So a description asks the leader of each partition, waits for
none of them longer than `ANSWER_S`, and says which did not answer. A leader answers when all that it has seen
in its log is committed.
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
    """Ask the leader of a partition where a channel stands; `channel` 0: where all do."""

    topic: str
    partition: int
    channel: int = 0


class ChannelState(msgspec.Struct, frozen=True, array_like=True):
    """Where a channel stands in one partition.

    `version`: of the settings that are in force. `next`: the first record that was never given out, before
    the end offset `end`. `depth`: how many are to be given out yet, at most. `aside`: without the dead ones.
    `lost`: how many left the log before they were done. `oldest_ms`: when the oldest record was
    appended that is neither done nor dead; 0: there is none. `blocked`: too many are open for new ones.
    `pinned`: those of `out` that a transaction is to acknowledge. `kept_bytes`: of the log, what retention
    would trim if the channel, maybe with others, let it.
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
    """Asks the leaders of partitions where channels stand, and answers others where this shard leads."""

    def __init__(self, services: ShardServices, leaders: LeaderCall) -> None:
        self._services = services
        self._leaders = leaders

    async def of(self, topic: str, numbers: Iterable[int], channel: int = 0) -> dict[int, list[ChannelState]]:
        """Return, by partition, where a channel (0: all) stands; without those whose leaders don't answer."""
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
        """Answer another shard for a partition that is led here."""
        question = msgspec.msgpack.decode(payload, type=ChannelQuestion)
        partition = self._leaders.led_here(question.topic, question.partition)
        return await self._here(partition, question)


async def state_of(partition: Partition, channel: Channel, *, end: int, full: bool) -> ChannelState:
    """Return where a channel stands before `end`; `full`: its partition has too many open records."""
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
    # The table may change while the log is read: what is said is of one moment.
    return state if oldest >= last else replace(state, oldest_ms=await _appended_ms(partition, oldest))


async def _appended_ms(partition: Partition, offset: int) -> int:
    """Return when a record was appended, or the first one that is left; 0 if that cannot be read now."""
    copy = partition.state.channels.copies.get(offset)
    if copy is not None:
        return copy.time_ms
    try:
        index = await partition.log.find_offset(max(offset, partition.start_offset))
        return 0 if index is None else (await partition.log.find_index_entry(index)).append_time_ms
    except StorageError:
        return 0
