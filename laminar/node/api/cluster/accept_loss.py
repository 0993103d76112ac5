"""An operator's decision to accept a loss, for a partition that would otherwise wait for absent replicas.

There are two cases (docs/consensus.md#accepting-a-loss). In the first a majority answers, but some of its
replicas may have forgotten what they acknowledged: their votes then count, for the best log among those that
answer. In the second a majority is gone for good: the catalog records that the group continues with the best
log that is left, and without the replicas that don't answer, which never take part again. The route reports
what may be lost, and accepts the loss only with `accept_loss=true`. Nothing calls it automatically.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from laminar.http.api.documents import partitions as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.replica_status import ReplicaState, ReplicaStatus
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.catalog.service import ReplicaRequest
from laminar.node.consensus.replica import Replica
from laminar.node.transport.transport import Peer, TransportError
from membership.records import (
    AcceptedLoss,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    AcceptLoss,
)
from raft.quorum import majority

_log = logging.getLogger("laminar.recover")

ASK_TIMEOUT_S = 5.0


class Release(Protocol):
    """The call that lets a recovering replica vote for logs that reach an entry (`Driver.release`)."""

    def __call__(self, replica: Replica, *, incarnation: int, last_term: int, last_index: int) -> bool:
        """Return whether the release took effect."""


class _Consent(msgspec.Struct, frozen=True, array_like=True):
    """An operator's consent, for one incarnation of a replica, to vote for the best log that answers.

    `last_term` and `last_index` are of the last entry of that log.
    """

    topic: str
    partition: int
    incarnation: int
    last_term: int
    last_index: int


class _Survey:
    """The state of a group without a leader, by its replicas' answers: who answers, and whose log is best."""

    def __init__(self, record: PartitionRecord, states: dict[tuple[int, str], ReplicaState]) -> None:
        self.place = f"{record.topic}/{record.number}"
        leaving = [each.replica for each in record.leaving]
        self.members = [each for each in (*record.replicas, *leaving) if not each.abandoned]
        self.here: dict[str, ReplicaState] = {}
        # Replicas whose nodes report that their files are gone: they will never answer.
        self.lost: set[str] = set()
        for replica in self.members:
            state = states.get((record.number, replica.node))
            if state is not None and state.lost:
                self.lost.add(replica.node)
            elif state is not None and not state.failed:
                self.here[replica.node] = state
        self.placed = [each for each in record.replicas if each.node in self.here and not each.abandoned]
        self.recovering = sorted(node for node, state in self.here.items() if state.recovering)
        self.absent = sorted({each.node for each in self.members} - self.here.keys())

    @property
    def voters(self) -> set[int]:
        """The voters, by the best log of the replicas that answer.

        A replica that the catalog placed but the group has not promoted yet is no voter.
        """
        voters = self.here[max(self._answering, key=self._end).node].voters if self.here else []
        return set(voters or (each.replica_id for each in self.members))

    @property
    def has_majority(self) -> bool:
        """Whether a majority of the voters answers."""
        voters = self.voters
        answering = sum(each.replica_id in voters for each in self._answering)
        return answering >= majority(len(voters))

    @property
    def best(self) -> ReplicaRecord:
        """The replica with the best log, with which the group is to continue.

        It has everything that any other replica that answers knows to be committed. A replica that is to
        leave is chosen only if a majority answers: then it leaves as soon as that majority has a leader.
        """
        return max(self._answering if self.has_majority else self.placed, key=self._end)

    @property
    def _answering(self) -> list[ReplicaRecord]:
        return [each for each in self.members if each.node in self.here]

    def _end(self, replica: ReplicaRecord) -> tuple[int, int]:
        state = self.here[replica.node]
        return state.last_term, state.last_index

    def refusal(self, alive: set[str]) -> str:
        """Return why no loss may be accepted; "" if an operator may accept it. `alive` are node names."""
        silent = [node for node in self.absent if node in alive and node not in self.lost]
        if any(state.leading for state in self.here.values()):
            return f"{self.place} has a leader: no loss needs to be accepted"
        if not self.placed:
            return f"no replica of {self.place} answers: there is nothing to go on with"
        if self.has_majority and not self.recovering:
            return (
                f"a majority of the replicas of {self.place} answers, and none may have forgotten anything: "
                "they elect a leader by themselves, or as soon as the others are started"
            )
        if silent and not self.has_majority:
            return (
                f"the replicas of {self.place} on {', '.join(silent)} do not take part, but these nodes are "
                "alive: start them again, or stop them for good"
            )
        return ""


class AcceptLossRoutes:
    """The handler of the recover route, and the transport method by which it reaches the replicas' shards."""

    def __init__(
        self,
        services: ShardServices,
        exchange: Exchange,
        topics: TopicLookup,
        states: ReplicaStatus,
        *,
        release: Release,
    ) -> None:
        self._services = services
        self._release = release
        self._exchange = exchange
        self._topics = topics
        self._states = states

    async def recover(self, request: Request, topic: str, partition: str) -> Response:
        """Answer POST .../partitions/{partition}/recover?accept_loss=true; without it, what would be lost."""
        accept = request.query.get("accept_loss", "false")
        if accept not in ("true", "false"):
            raise Problem(
                "invalid",
                "accept_loss must be true or false",
                field="accept_loss",
                value=accept,
                limit="true, false",
            )
        record = self._topics.partition_record(topic, partition)
        survey = _Survey(record, await self._states.of(topic))
        alive = {each.node for each in survey.members if self._services.view.alive(each.node)}
        if problem := survey.refusal(alive):
            raise Problem(
                "precondition_failed",
                problem,
                field="partition",
                value=record.number,
                limit=majority(len(survey.voters)),
                outcome="not_applied",
            )
        best = survey.best
        state = survey.here[best.node]
        answer = documents.LossReport(
            topic=topic,
            partition=record.number,
            accept_loss=accept == "true",
            answering=sorted(survey.here),
            recovering=survey.recovering,
            absent=survey.absent,
            # With a majority absent replicas may come back; without one they are abandoned for good.
            abandoned=[] if survey.has_majority else survey.absent,
            # The group goes on with this node's log: entries after its end, which only absent replicas have,
            # are lost.
            goes_on_from=best.node,
            committed_offset=state.end_offset,
            kept_offset=state.last_offset,
            accepted=[],
        )
        if accept == "true" and survey.has_majority:
            reached = {
                each: await self._send_consent(each, topic, record.number, of=survey.here[each], latest=state)
                for each in sorted(survey.here)
            }
            # The consent goes also to replicas that are not recovering and vote without it: one of them may
            # be a learner whose log is the best.
            answer.accepted = [node for node in survey.recovering if reached[node]]
        elif accept == "true":
            await self._decide(record, survey, best, state)
            answer.accepted = [best.node]
        return Response.json(answer)

    async def _decide(
        self, record: PartitionRecord, survey: _Survey, best: ReplicaRecord, state: ReplicaState
    ) -> None:
        """Record the decision in the catalog; the shard with the best log carries it out."""
        gone = [each.replica_id for each in survey.members if each.node in survey.absent]
        loss = AcceptedLoss(
            kept=best.replica_id,
            abandoned=sorted(gone),
            last_index=state.last_index,
            last_term=state.last_term,
            kept_offset=state.last_offset,
            decided_ms=self._services.clock.wall_ms(),
        )
        word = AcceptLoss(survey.place, record.group, record.version, loss)
        try:
            answer = await self._services.ask_catalog(ReplicaRequest(word))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog cannot be asked: {error}") from error
        if answer.result is None:
            raise Problem(
                "no_leader",
                "the catalog has no leader at the moment: if its majority is lost for good, "
                "`laminar catalog recover` comes first",
            )
        if not answer.result.ok:
            raise Problem(
                "precondition_failed",
                f"{survey.place} has changed in the meantime: {answer.result.detail}",
                field="partition",
                value=record.number,
                outcome="not_applied",
            )

    async def _send_consent(
        self, node: str, topic: str, number: int, *, of: ReplicaState, latest: ReplicaState
    ) -> bool:
        """Give the consent to one node, so that its replica votes for the best log.

        Return whether it took effect there: False also if the node does not answer.
        """
        word = _Consent(topic, number, of.incarnation, latest.last_term, latest.last_index)
        view = self._services.view
        if node == self._services.node and (topic, number) in self._services.partitions:
            return self._accept(word)
        address = view.partition_address(node, topic, number)
        if address is None:
            return False
        try:
            took_effect: bool = await self._exchange.ask(
                address, "accept_loss", word, kind=bool, timeout_s=ASK_TIMEOUT_S
            )
        except Problem:
            return False  # the route's answer does not name this node; the operator may repeat the request
        return took_effect

    async def on_accept_loss(self, peer: Peer, payload: bytes) -> bool:
        """Take an operator's consent from another shard."""
        return self._accept(msgspec.msgpack.decode(payload, type=_Consent))

    def _accept(self, word: _Consent) -> bool:
        partition = self._services.partitions.get((word.topic, word.partition))
        if partition is None or partition.replica.core.leader_id:
            return False
        replica = partition.replica
        if not self._release(
            replica,
            incarnation=word.incarnation,
            last_term=word.last_term,
            last_index=word.last_index,
        ):
            return False
        _log.critical(
            "%s: continues from entry %d of term %d by decision; what only absent replicas hold is lost",
            *(replica.name, word.last_index, word.last_term),
        )
        return True
