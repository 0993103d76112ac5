"""An operator's decision to accept a loss, for a partition that would otherwise wait for absent replicas.

There are two cases (docs/consensus.md#accepting-a-loss). In the first a majority answers, but some of its
replicas may have forgotten what they acknowledged: with the operator's consent their votes count, but only
for the best log among those that answer. In the second a majority is gone for good: the catalog records that
the group continues with the best log that is left, and without the replicas that don't answer, which never
take part again. The route reports what may be lost, and accepts the loss only with `accept_loss=true`.
Nothing calls it automatically.

If no replica answers, or only new ones with empty logs, no log is left to continue with. With
`empty=true` the group then continues without records: first one of its replicas is replaced in the catalog
(unless the planner has done so) by a new one on a node without a replica of the partition.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, Protocol

import msgspec

from laminar.http.api.documents import partitions as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.replica_status import ReplicaState, ReplicaStatus
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.catalog.messages.requests import ReplicaRequest
from laminar.node.consensus.replica import Replica
from laminar.node.placement.wanted import Wanted
from laminar.node.transport.transport import Peer, TransportError
from membership.records import (
    AcceptedLoss,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import AcceptLoss, ReplaceReplica
from raft.quorum import majority

_log = logging.getLogger("laminar.recover")

ASK_TIMEOUT_S = 5.0
# How long a new replica may take to be created and to answer; and the pause between two checks.
PLACED_S = 10.0
PLACED_PAUSE_S = 0.1


class Release(Protocol):
    """The type of `Driver.release`: let a recovering replica vote for logs that reach a given entry."""

    def __call__(self, replica: Replica, *, incarnation: int, last_term: int, last_index: int) -> bool:
        """Release the replica, as `Driver.release` does; return whether that took effect."""


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
    """The state of a group without a leader, as its replicas report it: which answer, which log is best."""

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
        """The replica ids of the voters, as configured in the best log of the replicas that answer.

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
    def holds_nothing(self) -> bool:
        """Whether no log is left to continue with: no replica answers, or only new ones with empty logs."""
        return not self.here or not (self.has_majority or self._end(self.best)[1])

    @property
    def ahead(self) -> str:
        """The node of a leaving replica whose log is better than that of `best`; "" if there is none."""
        last = max(self._answering, key=self._end)
        return last.node if self._end(last) > self._end(self.best) else ""

    @property
    def _answering(self) -> list[ReplicaRecord]:
        return [each for each in self.members if each.node in self.here]

    def _end(self, replica: ReplicaRecord) -> tuple[int, int]:
        state = self.here[replica.node]
        return state.last_term, state.last_index

    def refusal(self, alive: set[str], *, empty: bool) -> str:
        """Return why no loss may be accepted; "" if an operator may accept it.

        `alive` are node names. With `empty` the loss of all copies may be accepted, too.
        """
        silent = [node for node in self.absent if node in alive and node not in self.lost]
        if any(state.leading for state in self.here.values()):
            return f"{self.place} has a leader: no loss needs to be accepted"
        if self.here and not self.placed:
            return f"of {self.place} only replicas that are to leave answer: start the nodes of the others"
        if self.here and self.ahead:
            # The catalog lets no replica continue that is leaving; but its records are not lost.
            return (
                f"the replica of {self.place} on {self.ahead} is to leave, and holds more than those that "
                "stay and answer: start the nodes of the others. Only if none of them ever comes back, stop "
                f"{self.ahead} for good: that gives up what it holds"
            )
        if self.holds_nothing and not empty:
            return (
                f"no replica of {self.place} that answers holds anything: there is nothing to go on with. If "
                f"no copy ever comes back, `laminar group recover {self.place} --accept-loss --empty` gives "
                "its records up"
            )
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
    """The handler of the recover route, and the transport method that takes its consent to other shards."""

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
        """Answer POST .../partitions/{partition}/recover: accept a loss, or report what would be lost.

        Only `accept_loss=true` in the query accepts it.
        """
        accept, empty = _flag(request, "accept_loss"), _flag(request, "empty")
        record, survey = await self._surveyed(topic, partition, empty=empty)
        if not survey.here:
            if not accept:
                return Response.json(_all_lost(record, survey))
            await self._place_empty(record, survey)
            record, survey = await self._surveyed(topic, partition, empty=True)
            if not survey.here:
                raise Problem(
                    "no_leader", f"the new replica of {survey.place} does not answer yet: try again"
                )
        best = survey.best
        state = survey.here[best.node]
        answer = documents.LossReport(
            topic=topic,
            partition=record.number,
            accept_loss=accept,
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
        if accept and survey.has_majority:
            reached = {
                each: await self._send_consent(each, topic, record.number, of=survey.here[each], latest=state)
                for each in sorted(survey.here)
            }
            # The consent goes also to replicas that are not recovering and vote without it: one of them may
            # be a learner whose log is the best.
            answer.accepted = [node for node in survey.recovering if reached[node]]
        elif accept:
            await self._decide(record, survey, best, state)
            answer.accepted = [best.node]
        return Response.json(answer)

    async def _surveyed(self, topic: str, partition: str, *, empty: bool) -> tuple[PartitionRecord, _Survey]:
        """Return the partition and the state of its group, if an operator may accept a loss of it.

        Raises:
            Problem: 404; 412 `precondition_failed` with the reason why no loss may be accepted.
        """
        record = self._topics.partition_record(topic, partition)
        survey = _Survey(record, await self._states.of(topic))
        alive = {each.node for each in survey.members if self._services.view.alive(each.node)}
        if problem := survey.refusal(alive, empty=empty):
            raise _precondition_failed(problem, record, limit=majority(len(survey.voters)))
        return record, survey

    # -- no copy is left -----------------------------------------------------------------------

    async def _place_empty(self, record: PartitionRecord, survey: _Survey) -> None:
        """Replace one of the replicas, none of which answers, by a new one; return once the new one answers.

        If an old replica comes back before the loss is accepted, the group continues with its log: it is
        still a voter, and the new replica is not one yet.
        """
        # Preferably one that is not made: it has never voted, and others are not replaced before it is made.
        old = min(survey.members, key=lambda each: (each not in record.replicas, each.made))
        node = self._free_node(record, survey)
        if node is None:
            raise _precondition_failed(
                f"no live node without a replica of {survey.place} is available: start a new node", record
            )
        why: Literal["dead", "lost"] = "lost" if old.node in survey.lost else "dead"
        because = "an operator gave up what all replicas held"
        word = ReplaceReplica(survey.place, record.group, record.version, old.replica_id, why, node, because)
        refused = ""
        try:
            await self._ask(word, record)
        except Problem as problem:
            if problem.code != "precondition_failed":
                raise
            refused = problem.detail  # the planner may have been quicker
        try:
            async with asyncio.timeout(PLACED_S):
                await self._until_one_answers(record)
        except TimeoutError:
            detail = refused or f"the new replica of {survey.place} on {node} does not answer yet: retry"
            raise Problem("no_leader", detail) from None

    async def _until_one_answers(self, record: PartitionRecord) -> None:
        while True:
            await self._services.refresh_view()
            newer = self._topics.partition_record(record.topic, str(record.number))
            if _Survey(newer, await self._states.of(record.topic)).here:
                return
            await asyncio.sleep(PLACED_PAUSE_S)

    def _free_node(self, record: PartitionRecord, survey: _Survey) -> str | None:
        """Return the best live node that has no replica of the partition, not even a lost one."""
        view = self._services.view
        assert view.message is not None, "the view has the partition"
        taken = {each.node for each in survey.members}
        order = Wanted(view.message.catalog).order(record)
        return next((node for node in order if node not in taken and view.alive(node)), None)

    # -- the decision --------------------------------------------------------------------------

    async def _decide(
        self, record: PartitionRecord, survey: _Survey, best: ReplicaRecord, state: ReplicaState
    ) -> None:
        """Record the decision in the catalog.

        The shard with the best log carries it out when it sees the record.
        """
        gone = [each.replica_id for each in survey.members if each.node in survey.absent]
        loss = AcceptedLoss(
            kept=best.replica_id,
            abandoned=sorted(gone),
            last_index=state.last_index,
            last_term=state.last_term,
            kept_offset=state.last_offset,
            decided_ms=self._services.clock.wall_ms(),
        )
        await self._ask(AcceptLoss(survey.place, record.group, record.version, loss), record)

    async def _ask(self, word: AcceptLoss | ReplaceReplica, record: PartitionRecord) -> None:
        """Ask the catalog to carry out a step of the decision.

        Raises:
            Problem: 503 `no_leader`; 412 `precondition_failed` when the partition has changed.
        """
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
            detail = f"{word.partition} has changed in the meantime: {answer.result.detail}"
            raise _precondition_failed(detail, record)

    async def _send_consent(
        self, node: str, topic: str, number: int, *, of: ReplicaState, latest: ReplicaState
    ) -> bool:
        """Send the operator's consent to one node, so that its replica votes for the best log.

        Returns whether the consent took effect there; False also if the node does not answer.
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
        """Apply an operator's consent from another shard; return whether it took effect."""
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
            "%s: continues from entry %d of term %d by an operator's decision; later entries, which only "
            "absent replicas have, are lost",
            *(replica.name, word.last_index, word.last_term),
        )
        return True


def _flag(request: Request, name: str) -> bool:
    text = request.query.get(name, "false")
    if text not in ("true", "false"):
        raise Problem("invalid", f"{name} must be true or false", field=name, value=text, limit="true, false")
    return text == "true"


def _precondition_failed(detail: str, record: PartitionRecord, *, limit: int | None = None) -> Problem:
    return Problem(
        "precondition_failed",
        detail,
        field="partition",
        value=record.number,
        limit=limit,
        outcome="not_applied",
    )


def _all_lost(record: PartitionRecord, survey: _Survey) -> documents.LossReport:
    """Return the report of a loss of all records: no replica is left to continue with."""
    return documents.LossReport(
        topic=record.topic,
        partition=record.number,
        accept_loss=False,
        answering=[],
        recovering=[],
        absent=survey.absent,
        abandoned=survey.absent,
        goes_on_from="",
        committed_offset=0,
        kept_offset=0,
        accepted=[],
    )
