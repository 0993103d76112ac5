"""Retention: which records are expired, and when the log's start moves past them. Runs on the leader.

`expired_ends` finds the expired segments of one log. A sealed segment expires by age, if the append time of
its last batch is too long ago by this leader's clock, or by size, if all sealed segments together are too
large. The active segment never expires, except by age in a sealed partition, to which nothing is added any
more. Times that producers set do not count. `Retention` checks the partitions led here periodically, and
proposes the `log_start` entry by which all replicas trim the same records
(`laminar.node.consensus.log_start`).

The clock may be wrong. Append times never go back in a log, so if the clock is set back, nothing expires
until it has caught up. If the clock is set forward, records may expire early by the same time.

The start does not move past entries that a replica of the group still lacks, because the leader could not
send them any more. It waits `hold_ms` for such a replica, and not at all while the disk is nearly full. A
replica whose next entries are trimmed gets a new log (`laminar.node.catch_up`). For a replica in catch-up
only the entries that it has yet to read from this leader are kept.

Nor does the start move past records that a channel is not done with, not even on a full disk. The start waits
for records that were never given out (`Retention._is_awaited`). Records that are out (given out, not yet
acknowledged) or aside (to be given out again, or dead) are copied to the log's end first
(`laminar.node.channels.open_records.carrier`), as are delayed records in expired segments
(`laminar.node.delay.carrier`).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from laminar.http.api.problems import Problem
from laminar.node.consensus.replica import Replica
from laminar.node.host.clock import Clock
from laminar.node.host.periodic import Work
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channels import Channel
from laminar.node.partition.state.kept_log import Keeper, KeptLog, open_keeper

_log = logging.getLogger("laminar.retention")

# Partitions that are checked in one turn of the loop.
_AT_ONCE = 50

STEP_BYTES: Final = 64 << 20
"""About how many bytes are copied at once on a nearly full disk, before the log's start is moved."""

# A sealed segment: its last index, the append time (ms) of its last batch, its size in bytes.
Sealed = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """The retention settings of a topic: greatest age in ms, greatest size in bytes. None: no limit."""

    retention_ms: int | None = None
    retention_bytes: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Rules:
        """Return the rules in a topic's settings; a missing setting means no limit."""
        age, size = settings.get("retention_ms"), settings.get("retention_bytes")
        return cls(age if isinstance(age, int) else None, size if isinstance(size, int) else None)


def expired_ends(sealed: Iterable[Sealed], rules: Rules, *, now_ms: int) -> list[int]:
    """Return the index of the last entry of each expired segment, oldest first.

    `sealed` is oldest first, too. The search stops at the first segment that the rules keep, so the expired
    segments are the oldest ones of the log.
    """
    if rules.retention_ms is None and rules.retention_bytes is None:
        return []
    segments = list(sealed)
    kept_bytes = sum(size for _, _, size in segments)
    ends = []
    for last_index, last_ms, size in segments:
        too_old = rules.retention_ms is not None and now_ms - last_ms > rules.retention_ms
        too_much = rules.retention_bytes is not None and kept_bytes > rules.retention_bytes
        if not too_old and not too_much:
            break
        ends.append(last_index)
        kept_bytes -= size
    return ends


class Retention:
    """The retention of the partitions of one shard. `moved` counts how often it moved a log's start."""

    def __init__(
        self,
        *,
        clock: Clock,
        rules_of: Callable[[str], Rules],
        space_is_low: Callable[[], bool],
        hold_ms: int,
        reading_from: Callable[[bytes, int], int | None] = lambda group, member: None,
        keep_delayed: Callable[[Partition, int], None] = lambda partition, before: None,
        carry: Callable[[Partition, Sequence[int]], None] = lambda partition, ends: None,
    ) -> None:
        """Create the retention of one shard.

        `rules_of(topic)` returns a topic's present rules. `space_is_low()` says whether the disk is nearly
        full. `hold_ms` is how long entries are kept for a follower that lags. `reading_from(group, replica
        id)` returns the index that a replica in catch-up requested last, or None. `keep_delayed(partition,
        index)` starts to copy the pending delayed records of entries up to `index` to the log's end, so that
        the log may begin after `index`. `carry(partition, ends)` starts to copy the records that channels
        have out or aside before one of the segment ends `ends`, if that frees more than it takes.
        """
        self._keep_delayed = keep_delayed
        self._carry = carry
        self._clock = clock
        self._reading_from = reading_from
        self._rules_of = rules_of
        self._space_is_low = space_is_low
        self._hold_ms = hold_ms
        # By group, the time (monotonic ms) since which a start waits for a replica that lags.
        self._held: dict[bytes, int] = {}
        # By group, the channels and offsets that are open and kept the start at the last check.
        self._open_keepers: dict[bytes, frozenset[tuple[int, int]]] = {}
        self.moved = 0

    @property
    def held(self) -> int:
        """Number of partitions led here whose start waits, or has waited, for a replica that still lags."""
        return len(self._held)

    def floor(self, replica: Replica) -> int:
        """Return the lowest match index of the followers that are not in catch-up. Leader only.

        Return the log's last index if there are no such followers.
        """
        progress = replica.core.progress
        followers = [
            member
            for member in replica.configuration.members()
            if member != replica.replica_id and not (member in progress and progress[member].needs_catch_up)
        ]
        return min(map(replica.match_index, followers), default=replica.log.last_index)

    def _read_up_to(self, replica: Replica) -> int:
        """Return the index up to which every replica in catch-up has read; later entries are kept for them.

        Return the log's last index if no replica is in catch-up. Leader only.
        """
        reading = (self._reading_from(replica.group, member) for member in replica.configuration.members())
        return min((index - 1 for index in reading if index is not None), default=replica.log.last_index)

    def trimmable_index(self, partition: Partition, index: int) -> int:
        """Return the highest index, at most `index`, up to which the log may be trimmed now. Leader only.

        Entries after the returned index are kept for replicas that lack them. The first call that finds a
        lagging follower starts the `hold_ms` for which entries are kept for it. While the disk is nearly full
        nothing is kept for replicas.
        """
        replica = partition.replica
        low = self._space_is_low()
        if not low:
            # This ends by itself: a replica in catch-up makes progress, or soon no longer counts as a reader.
            index = min(index, self._read_up_to(replica))
        match_index = self.floor(replica)
        if match_index >= index:
            self._held.pop(replica.group, None)
            return index
        now_ms = self._clock.monotonic_ms()
        since_ms = self._held.setdefault(replica.group, now_ms)
        if now_ms - since_ms >= self._hold_ms or low:
            return index
        return match_index

    def check(self, partition: Partition) -> None:
        """Move a partition's start if a committed entry says so; as leader, propose the next start if due."""
        if partition.state.start_is_moving:
            partition.start_mover.carry_out()
        if not partition.leads:
            self._held.pop(partition.replica.group, None)
            self._note_keepers(partition, [])
            return
        if partition.state.start_is_moving:
            return
        log = partition.log
        expired = [
            end for end in self._expired_ends(partition) if log.start.index < end <= partition.committed_index
        ]
        self._note_keepers(partition, expired)
        ends = [end for end in expired if not self._is_awaited(partition, end)]
        if not ends:
            held = partition.replica.group in self._held
            if held and self.floor(partition.replica) >= partition.committed_index:
                self._held.pop(partition.replica.group, None)
            return
        highest = self.trimmable_index(partition, ends[-1])
        ends = [end for end in ends if end <= highest]
        free = self._ends_before_open(partition, ends)
        # Copies do not help where a transaction or damage keeps the log.
        kept_by_open = [end for end in ends if partition.start_mover.may_begin_after(end)]
        # Channels come first: delayed records are copied only before ends that no open record keeps.
        self._make_way(partition, [end for end in free if partition.start_mover.may_begin_after(end)])
        if len(free) < len(ends):
            self._carry(partition, kept_by_open)
        # If the log may not begin after the end of one segment, an earlier one is used, or none for now.
        index = max((end for end in free if partition.start_mover.possible_start(end) == end), default=0)
        if index:
            try:
                partition.start_mover.propose(index).add_done_callback(self._done)
            except Problem as problem:
                _log.warning(
                    "retention did not move the start of %s; the next check tries again: %s",
                    partition.replica.name,
                    problem,
                )

    def _make_way(self, partition: Partition, ends: Sequence[int]) -> None:
        """Start to copy delayed records that alone keep expired segments, if the copies are small enough."""
        delayed = partition.state.delayed
        if not len(delayed) or not ends or delayed.possible_start(ends[-1]) == ends[-1]:
            return
        segments = [(last, size) for last, _, size in partition.log.sealed()]
        segment_bytes = [0, *accumulate(size for _, size in segments)]
        batches, batch_bytes = delayed.copy_bytes()
        chosen = free_without = 0
        for end in ends:
            freed = segment_bytes[bisect_left(segments, (end + 1,))]
            takes = batch_bytes[bisect_left(batches, end + 1)]
            if not takes:
                free_without = freed
                continue
            if chosen and takes > STEP_BYTES and self._space_is_low():
                break
            if 2 * takes <= freed - free_without:
                chosen = end
        if chosen:
            self._keep_delayed(partition, chosen)

    def _expired_ends(self, partition: Partition) -> list[int]:
        """Return the index of the last entry of each expired segment, oldest first.

        If the partition is sealed, its active segment may expire by age, too. Its last index is that of the
        seal then, and its age is that of the seal, as no record is younger.
        """
        log, rules, now_ms = partition.log, self._rules_of(partition.topic), self._clock.wall_ms()
        segments = list(log.sealed())
        ends = expired_ends(segments, rules, now_ms=now_ms)
        seal = partition.state.committed_seal
        if (
            seal is not None
            and rules.retention_ms is not None
            and now_ms - seal.time_ms > rules.retention_ms
            and len(ends) == len(segments)
            and seal.index > max(ends, default=log.start.index)
        ):
            ends.append(seal.index)
        return ends

    def _is_awaited(self, partition: Partition, end: int) -> bool:
        """Return whether a channel has yet to give out a record of the entries up to `end`."""
        return any(self._awaited_by(partition, end))

    def _awaited_by(self, partition: Partition, end: int) -> Iterator[Channel]:
        """Yield the channels that have yet to give out a record of the entries up to `end`.

        A channel is no longer waited for when the entry is older than the topic's `retention_ms` plus the
        channel's `hold_ms`.
        """
        channels = partition.state.channels
        if not channels or partition.log.term(end) is None:
            return
        row = partition.log.index_entry(end)
        age_ms = self._clock.wall_ms() - row.append_time_ms
        kept_ms = self._rules_of(partition.topic).retention_ms or 0
        for channel in channels.by_id.values():
            unread = channel.next < (
                row.next_offset if channel.until is None else min(row.next_offset, channel.until)
            )
            if unread and age_ms <= kept_ms + channel.settings.hold_ms:
                yield channel

    def _note_keepers(self, partition: Partition, expired: Sequence[int]) -> None:
        """Note which channels keep the first expired segment, and with it the log's start.

        Records that are out or aside are usually copied before the next check. So a channel is named because
        of such a record only if the previous check found the record there, too.
        """
        group, channels = partition.replica.group, partition.state.channels
        before = self._open_keepers.pop(group, frozenset())
        partition.context.note_kept(None)
        if not expired or not channels or partition.log.term(expired[0]) is None:
            return
        row = partition.log.index_entry(expired[0])
        keepers = [
            Keeper(channel.id, channel.name, "unread", channel.next)
            for channel in self._awaited_by(partition, expired[0])
        ]
        unread = {each.channel for each in keepers}
        found = [
            open_keeper(
                channels,
                channel,
                start_offset=partition.start_offset,
                entry=expired[0],
                end_offset=row.next_offset,
            )
            for channel in channels.by_id.values()
            if channel.id not in unread and channel.open
        ]
        of_open = [each for each in found if each is not None]
        if of_open:
            self._open_keepers[group] = frozenset((each.channel, each.offset) for each in of_open)
        keepers += [each for each in of_open if (each.channel, each.offset) in before]
        if keepers:
            ends = [(last, size) for last, _, size in partition.log.sealed()]
            size = sum(size for last, size in ends if last <= expired[-1])
            if not ends or expired[-1] > ends[-1][0]:
                size = partition.log.size_bytes  # the seal is in the active segment
            partition.context.note_kept(KeptLog(tuple(keepers), row.next_offset, size))

    def _ends_before_open(self, partition: Partition, ends: Sequence[int]) -> list[int]:
        """Return those of `ends` up to which no record is out or aside without a copy in a later entry.

        Records that are out or aside are kept without a limit of time: they wait for a consumer, or, if they
        are dead, for an operator.
        """
        log, channels = partition.log, partition.state.channels
        if not channels.open:
            return list(ends)
        first_open = min(channels.uncopied(log.start.offset), default=log.next_offset)
        first_copy = min((copy.entry for copy in channels.copies.values()), default=log.last_index + 1)
        return [
            end
            for end in ends
            if end < first_copy
            and log.term(end) is not None
            and log.index_entry(end).next_offset <= first_open
        ]

    def _done(self, future: asyncio.Future[Receipt]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self.moved += 1
        elif isinstance(error, Problem):
            # Another replica leads, or the log failed: the next leader checks for itself.
            _log.debug("retention did not move a log's start: %s", error)
        else:
            raise error

    def check_all(self, partitions: Iterable[Partition]) -> Work | None:
        """Check all partitions in portions, between which other tasks of the loop run.

        The first portion is checked by this call. The check of the others is returned as work to be awaited;
        None if there is no more.
        """
        rest = list(partitions)
        if self._open_keepers:
            here = {partition.replica.group for partition in rest}
            self._open_keepers = {group: held for group, held in self._open_keepers.items() if group in here}
        self._check_some(rest[:_AT_ONCE])
        return self._check_rest(rest[_AT_ONCE:]) if len(rest) > _AT_ONCE else None

    async def _check_rest(self, rest: Sequence[Partition]) -> None:
        for first in range(0, len(rest), _AT_ONCE):
            await asyncio.sleep(0)
            self._check_some(rest[first : first + _AT_ONCE])

    def _check_some(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            if partition.replica.failure is not None:
                continue
            try:
                self.check(partition)
            except Problem as error:
                _log.debug("retention did not move a log's start; the next check tries again: %s", error)
            except Exception as error:  # noqa: BLE001  # stops this partition's replica
                partition.stop(error)
