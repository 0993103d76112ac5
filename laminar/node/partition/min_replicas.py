"""`min_replicas`: how many replicas must have an append before it is acknowledged, and be in sync to take it.

A majority of the voters commits an entry. A topic may ask for more than that. Then the answer of an append
waits, also after the commit, until so many voters have the entry on disk, and an append is refused while
fewer than `min_replicas` voters are in sync. Nothing of this changes what is committed: readers see it, and
a leader that comes later keeps it. So an append whose entry was committed and never got its last copy ends
as `outcome_unknown`, never as refused.

What a machine writes for itself (a cursor's position, a log's start) waits for the commit alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from laminar.http.api.problems import Problem
from laminar.node.partition.problems import too_few_replicas
from laminar.node.partition.receipts import Waiter, fail
from raft.progress import Flow
from raft.quorum import majority

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition


class Copies:
    """Of one partition's replica. `wanted` gives the topic's `min_replicas`; 1 if it has none."""

    def __init__(self, partition: Partition, *, wanted: Callable[[], int]) -> None:
        self._partition = partition
        self._wanted = wanted
        # By index: who waits for copies of an entry that is committed.
        self._waiters: dict[int, list[Waiter]] = {}

    def check(self) -> None:
        """Raise 503 `too_few_replicas` while fewer voters are in sync than the topic wants. Leader only."""
        wanted = self._wanted()
        if wanted <= 1:
            return
        in_sync = [self._partition.replica.nodes[member] for member in self.in_sync()]
        if len(in_sync) < wanted:
            raise too_few_replicas(self._partition, in_sync, wanted)

    def in_sync(self) -> list[int]:
        """Voters that were heard lately, and have all that is committed or are being sent it."""
        replica = self._partition.replica
        found = []
        for member in replica.configuration.voters:
            progress = replica.core.progress.get(member)
            if progress is None or not self._partition.hears(member):
                continue
            if progress.flow is Flow.REPLICATE or progress.match_index >= self._partition.committed_index:
                found.append(member)
        return found

    @property
    def acknowledged_index(self) -> int:
        """Entries up to here are committed and have all the copies that the topic asks for. Leader only."""
        partition = self._partition
        wanted, voters = self._wanted(), partition.replica.configuration.voters
        if wanted <= majority(len(voters)):
            return partition.committed_index
        if wanted > len(voters):
            return 0
        matches = sorted((partition.replica.match_index(voter) for voter in voters), reverse=True)
        return min(partition.committed_index, matches[wanted - 1])

    def are_there(self, index: int) -> bool:
        """Whether the committed entry `index` has its copies."""
        return index <= self.acknowledged_index

    def await_them(self, index: int, waiter: Waiter) -> None:
        """Answer `waiter` when the committed entry `index` has its copies."""
        if not self._partition.replica.core.is_leader:
            fail(waiter.future, self._lost())
            return
        self._waiters.setdefault(index, []).append(waiter)
        self._partition.replica.on_match = self._look

    def _look(self) -> None:
        """Some voter may have got further."""
        index = self.acknowledged_index
        for done in [waiting for waiting in self._waiters if waiting <= index]:
            for waiter in self._waiters.pop(done):
                if not waiter.future.done():
                    waiter.future.set_result(waiter.receipt)
        self._rest()

    def _rest(self) -> None:
        if not self._waiters:
            self._partition.replica.on_match = None

    def lost_leadership(self) -> None:
        """Only a leader knows who has what."""
        if self._waiters:
            self.fail_all(self._lost())

    def _lost(self) -> Problem:
        partition = self._partition
        return Problem(
            "outcome_unknown",
            f"committed in {partition.topic}/{partition.number}, and the leader that counted its copies is "
            "the leader no more",
        )

    def give_up(self, *, latest_s: float) -> None:
        """Answer those who have waited since `latest_s` or longer."""
        if not self._waiters:
            return
        detail = f"committed by a majority, and fewer than min_replicas ({self._wanted()}) replicas have it"
        for index, waiters in list(self._waiters.items()):
            for waiter in waiters:
                if waiter.since_s <= latest_s:
                    fail(waiter.future, Problem("outcome_unknown", detail))
            left = [waiter for waiter in waiters if not waiter.future.done()]
            if left:
                self._waiters[index] = left
            else:
                del self._waiters[index]
        self._rest()

    def fail_all(self, problem: Problem) -> None:
        """Nobody here will know when the copies are there."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                fail(waiter.future, problem)
        self._waiters.clear()
        self._rest()
