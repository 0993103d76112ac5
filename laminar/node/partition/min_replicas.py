"""`min_replicas`: the number of replicas that must have an append on disk before it is acknowledged.

A majority of the voters commits an entry. A topic may ask for more: then the answer to an append waits,
beyond the commit, until `min_replicas` voters have the entry on disk, and appends are refused while fewer
voters than that are in sync. A committed entry without all its copies is committed all the same: readers see
it, and later leaders keep it. So an append whose entry is committed but lacks a copy ends as
`outcome_unknown`, never as refused.

Entries that a partition writes for itself (a cursor's position, a log's start) wait for the commit alone.
Reference: Kafka's `min.insync.replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.http.api.problems import Problem
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.problems import too_few_replicas
from laminar.node.partition.receipts import Waiter, Window, fail
from raft.progress import Flow
from raft.quorum import majority


class Copies:
    """The rule of `min_replicas` for one partition, and the appends that wait for copies of their entry."""

    def __init__(self, context: PartitionContext) -> None:
        self._context = context
        # The topic's `min_replicas`; its shard changes it when the catalog does.
        self.wanted = 1
        # By index: the appends that wait for copies of an entry that is committed.
        self._waiters: dict[int, list[Waiter]] = {}

    def check(self) -> None:
        """Raise 503 `too_few_replicas` while fewer voters are in sync than the topic wants. Leader only."""
        wanted = self.wanted
        if wanted <= 1:
            return
        in_sync = [self._context.replica.nodes[member] for member in self.in_sync()]
        if len(in_sync) < wanted:
            voters = self._context.voters
            raise too_few_replicas(self._context.name, in_sync, replicas=voters, wanted=wanted)

    def in_sync(self) -> list[int]:
        """Return the voters in sync: heard from lately, and with all committed entries or receiving them."""
        replica = self._context.replica
        found = []
        for member in replica.configuration.voters:
            progress = replica.core.progress.get(member)
            if progress is None or not self._context.is_active(member):
                continue
            if progress.flow is Flow.REPLICATE or progress.match_index >= self._context.committed_index:
                found.append(member)
        return found

    @property
    def acknowledged_index(self) -> int:
        """Index of the last entry that is committed and on `min_replicas` replicas. Leader only."""
        index, wanted = self._context.state.committed_index, self.wanted
        if wanted > 1:
            voters = self._context.replica.configuration.voters
            if wanted > majority(len(voters)):
                return min(index, self._copied_index(voters))
        return index

    def window(self) -> Window:
        """Return up to where the log is acknowledged now (index and offset). Leader only.

        Looking up the offset may block on the disk if copies of old entries are missing. So call it only for
        an answer that contains the window, not after each Raft input.
        """
        return self.window_up_to(self.acknowledged_index)

    def window_up_to(self, index: int) -> Window:
        """Return the window up to entry `index`, which must be the present `acknowledged_index`."""
        context = self._context
        replica = context.replica
        voters = len(replica.configuration.voters)
        return Window(replica.term, index, context.log.offset_after(index), voters)

    def _copied_index(self, voters: Sequence[int]) -> int:
        """Return the index up to which at least `min_replicas` voters have the log on disk."""
        if self.wanted > len(voters):
            return 0
        matches = sorted((self._context.replica.counted_index(voter) for voter in voters), reverse=True)
        return matches[self.wanted - 1]

    def are_there(self, index: int) -> bool:
        """Return whether the committed entry `index` is on `min_replicas` replicas."""
        return index <= self.acknowledged_index

    def await_them(self, index: int, waiter: Waiter) -> None:
        """Resolve `waiter` when the committed entry `index` has its copies.

        If this replica does not lead, `waiter` fails at once with `outcome_unknown`.
        """
        if not self._context.replica.core.is_leader:
            fail(waiter.future, self._lost())
            return
        self._waiters.setdefault(index, []).append(waiter)
        self._context.replica.on_match = self._resolve

    def _resolve(self) -> None:
        """Resolve the appends whose entries have their copies now."""
        index = self.acknowledged_index
        copied = [waiting for waiting in self._waiters if waiting <= index]
        if copied:
            window = self.window()
            for done in copied:
                for waiter in self._waiters.pop(done):
                    waiter.acknowledge(window)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if not self._waiters:
            self._context.replica.on_match = None

    def lost_leadership(self) -> None:
        """Fail the appends that wait for copies: only a leader knows which entries the replicas have."""
        if self._waiters:
            self.fail_all(self._lost())

    def _lost(self) -> Problem:
        detail = f"committed in {self._context.name}, and the leader that counted its copies leads no longer"
        return Problem("outcome_unknown", detail)

    @property
    def waits(self) -> bool:
        """Whether an append waits for copies."""
        return bool(self._waiters)

    def expire(self, *, latest_s: float) -> None:
        """Fail the appends that began to wait at `latest_s` or before (the loop's time)."""
        if not self._waiters:
            return
        detail = f"committed by a majority, and fewer than min_replicas ({self.wanted}) replicas have it"
        for index, waiters in list(self._waiters.items()):
            for waiter in waiters:
                if waiter.since_s <= latest_s:
                    fail(waiter.future, Problem("outcome_unknown", detail))
            left = [waiter for waiter in waiters if not waiter.future.done()]
            if left:
                self._waiters[index] = left
            else:
                del self._waiters[index]
        self._stop_listening()

    def fail_all(self, problem: Problem) -> None:
        """Fail all appends that wait for copies, as this replica will not learn of their copies."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                fail(waiter.future, problem)
        self._waiters.clear()
        self._stop_listening()
