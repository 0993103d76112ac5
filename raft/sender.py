"""The messages of a leader: appends of limited size, probes, heartbeats.

This module makes the messages and records in `Progress` what was sent; to which replica something is sent,
and when, is decided in `raft.leadership`. An append only names the indexes of its entries: the driver reads
their frames from the log.
"""

from __future__ import annotations

from raft.effects import Effects, Identity
from raft.log import RaftLog
from raft.messages import Append, Heartbeat
from raft.progress import Flow, Progress
from raft.values import SendAppend, Settings


class Sender:
    """Makes and queues the messages of one leader in one term."""

    __slots__ = ("_effects", "_identity", "_log", "_max_append_bytes", "_term")

    def __init__(
        self, identity: Identity, log: RaftLog, effects: Effects, settings: Settings, *, term: int
    ) -> None:
        self._identity = identity
        self._log = log
        self._effects = effects
        self._max_append_bytes = settings.max_append_bytes
        self._term = term

    def entries(self, progress: Progress, last: int) -> None:
        """Send one append with the replica's next entries: up to `last` or as many as fit, but at least one.

        If there are no next entries, the append is empty: a probe. If our log no longer has them, nothing is
        sent, and the replica is set to catch-up.
        """
        log = self._log
        first = progress.next_index
        if first > last:
            self._append(progress, first - 1, 0, 0)
            return
        if first < log.first_index:
            progress.catch_up()
            return
        size = log.size
        limit_bytes = self._max_append_bytes
        end, size_bytes = first, size(first)
        while end < last:
            more = size_bytes + size(end + 1)
            if more > limit_bytes:
                break
            size_bytes = more
            end += 1
        self._append(progress, first - 1, end - first + 1, size_bytes)

    def probe(self, progress: Progress, prev_index: int) -> None:
        """Ask whether the replica holds our entry `prev_index`, without sending entries."""
        self._append(progress, prev_index, 0, 0)

    def _append(self, progress: Progress, prev_index: int, count: int, size_bytes: int) -> None:
        prev_term = self._log.term(prev_index)
        if prev_term is None:
            progress.catch_up()
            return
        commit = self._log.committed_index
        identity = self._identity
        message = Append(
            identity.cluster,
            identity.group,
            identity.replica_id,
            progress.replica_id,
            identity.incarnation,
            self._term,
            prev_index,
            prev_term,
            commit,
            count,
            progress.goal,
            progress.incarnation,
        )
        self._effects.appends.append(SendAppend(message, prev_index + 1, prev_index + count))
        progress.sent_commit = commit
        if count or progress.flow is Flow.PROBE:
            progress.sent(prev_index + count, size_bytes)

    def heartbeat(self, progress: Progress, round_: int, *, quiesce: bool = False) -> None:
        """Send a heartbeat, which is to be answered; with round 0 a commit notice, which is not."""
        commit = progress.sent_commit = self._log.committed_index
        held_term = self._log.term(progress.match_index) if progress.match_index else None
        self._effects.messages.append(
            Heartbeat(
                *self.head_to(progress.replica_id),
                commit,
                round_,
                progress.goal,
                progress.incarnation,
                quiesce,
                progress.match_index if held_term is not None else 0,
                held_term or 0,
            )
        )

    def head_to(self, receiver: int) -> tuple[bytes, bytes, int, int, int, int]:
        """Return the first fields of every message from this leader to `receiver`."""
        return *self._identity.head_to(receiver), self._term
