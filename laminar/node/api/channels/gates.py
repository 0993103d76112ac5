"""The gate of an ordered channel: a new partition gives out nothing before its ancestors are drained.

A change of the topic's route seals partitions and creates others that follow them. The older records of a key
then lie in the ancestors of the partition that has the key now. So the leader of the new partition asks the
leaders of its ancestors, once in its term, whether the channel is done with them, before it gives out its
first record. A yes is final (`Delivery.is_drained`), unless a person moves the channel back in an ancestor.
`weak` changes have no gate (`laminar.node.api.consumers.gates`).
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from laminar.http.api.deadlines import FORWARDED_GATE_S
from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.services import ShardServices
from laminar.node.api.consumers.gates import GATE, Gates
from laminar.node.channels.deliveries import Deliveries
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer


class ChannelDrainQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The question to a partition's leader whether a channel has drained it (all its records are done)."""

    topic: str
    partition: int
    channel: int


class ChannelGates:
    """The gates (waits for drained ancestors) of the channels of all partitions that this shard leads."""

    def __init__(
        self, services: ShardServices, leaders: LeaderCall, gates: Gates, deliveries: Deliveries
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._gates = gates
        self._deliveries = deliveries
        deliveries.precedes = self.precedes

    async def precedes(self, partition: Partition, channel: int) -> bool:
        """Return whether a channel has drained all ancestors of this partition; False if that is unknown."""
        try:
            before = await self._gates.before(partition)
            answers = await asyncio.gather(
                *(self._ask(ChannelDrainQuestion(partition.topic, number, channel)) for number in before)
            )
        except Problem:
            # An ancestor may have been reclaimed since this view: then the channel had drained it.
            with contextlib.suppress(Problem):
                await self._services.refresh_view()
            return False
        return all(answers)

    async def _ask(self, question: ChannelDrainQuestion) -> bool:
        return await self._leaders.ask(
            "channel_drained", question, bool, here=self._answer, policy=GATE, timeout_s=FORWARDED_GATE_S
        )

    async def _answer(self, partition: Partition, question: ChannelDrainQuestion) -> bool:
        return await self._deliveries.of(partition).is_drained(question.channel)

    async def on_channel_drained(self, peer: Peer, payload: bytes) -> bool:
        """Answer another shard whether a channel is done with all records of a partition led here."""
        question = msgspec.msgpack.decode(payload, type=ChannelDrainQuestion)
        return await self._answer(self._leaders.led_here(question.topic, question.partition), question)
