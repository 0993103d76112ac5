"""A person's word for a partition that waits: the loss of what only an absent replica may hold is accepted.

Replicas that may have forgotten what they acknowledged elect nobody without the others
(docs/consensus.md#accepting-a-loss). If those never come back, only a person can say so. This route names
what may be lost, and with `accept_loss` lets the marks of the replicas that answer fall. Nothing calls it by
itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from laminar.http.errors import Problem
from laminar.http.messages import Request, Response
from laminar.node.api.exchange import Exchange
from laminar.node.api.replica_states import ReplicaState, ReplicaStates
from laminar.node.api.topics import TopicRoutes
from laminar.node.transport import Peer
from raft.quorum import majority

if TYPE_CHECKING:
    from laminar.node.shard import Shard

ASK_TIMEOUT_S = 5.0


class _Word(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int


class RecoverRoutes:
    """The handler of one route, and the method by which it asks the replicas' shards."""

    def __init__(self, shard: Shard, exchange: Exchange, topics: TopicRoutes, states: ReplicaStates) -> None:
        self._shard = shard
        self._exchange = exchange
        self._topics = topics
        self._states = states

    async def recover(self, request: Request, topic: str, partition: str) -> Response:
        """POST .../partitions/{partition}/recover?accept_loss=true; without it, what would be lost."""
        accept = request.query.get("accept_loss", "false")
        if accept not in ("true", "false"):
            raise Problem(
                "invalid",
                "accept_loss is true or false",
                field="accept_loss",
                value=accept,
                limit="true, false",
            )
        record = self._topics.partition_record(topic, partition)
        number = record.number
        states = await self._states.of(topic)
        nodes = [replica.node for replica in record.replicas]
        here = {
            node: state
            for node in nodes
            if (state := states.get((number, node))) is not None and not state.lost
        }
        self._refuse_unless_waiting(topic, number, nodes, here)
        marked = sorted(node for node, state in here.items() if state.marked)
        best = max(here.values(), key=lambda state: (state.last_term, state.last_index))
        answer: dict[str, Any] = {
            "topic": topic,
            "partition": number,
            "accept_loss": accept == "true",
            "marked": marked,
            "absent": sorted(set(nodes) - here.keys()),
            # It goes on with the log of this one: what only an absent replica has behind it is given up.
            "goes_on_from": best.node,
            "kept_offset": best.last_offset,
            "accepted": [],
        }
        if accept == "true":
            answer["accepted"] = [node for node in marked if await self._tell(node, topic, number)]
        return Response.json(answer)

    def _refuse_unless_waiting(
        self, topic: str, number: int, nodes: list[str], here: dict[str, ReplicaState]
    ) -> None:
        problem = ""
        if any(state.leading for state in here.values()):
            problem = f"{topic}/{number} has a leader: it waits for nobody"
        elif not any(state.marked for state in here.values()):
            problem = (
                f"no replica of {topic}/{number} that answers may have forgotten anything: start the others"
            )
        elif len(here) < majority(len(nodes)):
            problem = (
                f"{len(here)} of {len(nodes)} replicas of {topic}/{number} answer: they could elect nobody"
            )
        if problem:
            raise Problem(
                "precondition_failed",
                problem,
                field="partition",
                value=number,
                limit=majority(len(nodes)),
                outcome="not_applied",
            )

    async def _tell(self, node: str, topic: str, number: int) -> bool:
        """Let the mark fall on one node; whether it did, durably."""
        view = self._shard.view
        if node == self._shard.boot.node and (topic, number) in self._shard.partitions:
            return await self._accept(topic, number)
        address = view.partition_address(node, topic, number)
        if address is None:
            return False
        try:
            fell: bool = await self._exchange.ask(
                address, "accept_loss", _Word(topic, number), kind=bool, timeout_s=ASK_TIMEOUT_S
            )
        except Problem:
            return False  # it is not among those that the answer names; the word may be given again
        return fell

    async def on_accept_loss(self, peer: Peer, payload: bytes) -> bool:
        """Another shard passes a person's word on."""
        word = msgspec.msgpack.decode(payload, type=_Word)
        return await self._accept(word.topic, word.partition)

    async def _accept(self, topic: str, number: int) -> bool:
        partition = self._shard.partitions.get((topic, number))
        if partition is None or partition.replica.core.leader_id:
            return False
        self._shard.driver.accept_loss(partition.replica)
        await self._shard.storage.sync()
        return True
