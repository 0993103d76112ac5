"""Open a replica from its log: replay the entries into its state, and make the Raft core that continues it.

The log is replayed from the newest snapshot of the state on. Which replica leads, and whether more is
committed, the core finds out later. A replica takes part only with the term and vote that it made durable:
one without them, or with a term that no election reaches, is refused (docs/consensus.md#identities).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from laminar.batch import Buffer, Header
from laminar.log.disk.errors import DamagedRange
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, StateMachine, replay
from laminar.node.host.clock import Clock
from raft.messages import NUMBER_LIMIT
from raft.values import HardState, Settings, Trace

_READ_BYTES = 4 * 1024 * 1024


class BadTerm(Exception):
    """The durable term is out of range: the replica cannot take part, but its process goes on."""


class ReplicaFactory:
    """Opens the replicas of one process. `trace(name)` returns the observer of a replica's core, or None."""

    def __init__(
        self,
        *,
        cluster_id: Callable[[], bytes | None],
        storage: Storage,
        settings: Settings,
        clock: Clock,
        rng: random.Random,
        trace: Callable[[str], Trace | None] = lambda name: None,
    ) -> None:
        self._cluster_id = cluster_id
        self._storage = storage
        self.settings = settings
        self._clock = clock
        self._rng = rng
        self._trace = trace

    async def open(
        self,
        entry: ReplicaEntry,
        *,
        name: str,
        machine: StateMachine,
        known_up_to: int = 0,
        configurations: Sequence[tuple[int, ConfigurationRecord]] = (),
        past_damage: Callable[[int], bool] = lambda index: False,
    ) -> Replica:
        """Return the replica that `entry` of the manifest names, its `machine` brought up to its log.

        `machine` already has the state up to the committed entry `known_up_to`, and `configurations` are
        the Raft configurations up to that entry, with their indexes; the log is replayed from the next entry
        on.
        `past_damage(index)` says whether the replay may skip that damaged entry.

        The caller must set `machine.replica` in the same turn of the loop, before messages arrive.

        Raises:
            DamagedRange: an entry that the machine needs is damaged.
            BadTerm: the replica's durable term is out of range.
        """
        cluster_id = self._cluster_id()
        assert cluster_id is not None
        log = self._storage.logs[self._storage.resolve(entry.log_id)]
        found: list[tuple[int, ConfigurationRecord]] = [
            (0, ConfigurationRecord(voters=tuple((replica, node) for replica, node in entry.voters))),
            *configurations,
        ]
        committed_index = max(log.start.index, known_up_to)
        index = committed_index + 1
        while index <= log.last_index:
            try:
                frames = await log.read(index, log.last_index, max_bytes=_READ_BYTES)
            except DamagedRange as damage:
                if not past_damage(index):
                    raise
                index = damage.last_index + 1
                continue
            found.extend(replay(frames, machine))
            committed_index = max(committed_index, replay_committed(frames))
            index += len(frames)
        hard = self._storage.hard_states.get(entry.replica_id)
        if hard is not None and hard.term >= NUMBER_LIMIT:
            raise BadTerm(
                f"{name}: its term {hard.term} is above {NUMBER_LIMIT - 1}, which no election reaches: it is "
                "from a forged message, and this replica cannot take part any more"
            )
        assert hard is not None or log.last_index == 0, f"{name}: a log without a term and vote is lost"
        if log.least_term > (hard.term if hard is not None else 0):
            # The folder is an older copy: in the terms below `least_term` this replica may have cast votes
            # that it no longer knows.
            self._storage.record_hard_state(entry.replica_id, term=log.least_term, vote=0)
            hard = self._storage.hard_states[entry.replica_id]
        return Replica(
            name=name,
            cluster=cluster_id,
            group=entry.group,
            replica_id=entry.replica_id,
            # The log's incarnation rises with every loss, and is durable since the recovery that found it.
            incarnation=entry.incarnation + log.incarnation,
            log=log,
            machine=machine,
            hard_state=HardState(hard.term, hard.vote) if hard is not None else HardState(),
            committed_index=min(committed_index, log.last_index),
            configurations=found,
            settings=self.settings,
            rng=random.Random(self._rng.getrandbits(64)),
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.wall_ms,
            trace=self._trace(name),
        )


def recovering_text(name: str, log: Log) -> str:
    """Return the log line about a replica that may have forgotten entries (docs/consensus.md#recovering)."""
    why = (
        "power was lost with flush=interval, so appends of the last interval may be gone here"
        if log.power_lost
        else "its journal or the end of its log is damaged"
    )
    return (
        f"{name}: {why}; it goes on at offset {log.next_offset} and takes part, but its vote does not count "
        "before a leader has sent it again what it may have forgotten"
    )


def replay_committed(frames: Sequence[Buffer]) -> int:
    """Return the highest commit index in these frames' headers, where leaders write it; 0 without frames.

    All entries up to it are committed. The last frame need not have the highest: a later leader may have
    known of fewer committed entries.
    """
    return max((Header.unpack(frame).committed_index for frame in frames), default=0)
