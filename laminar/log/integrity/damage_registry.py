"""The damage registry: it records damage, reports it, and writes repaired bytes.

There is one for all logs of a storage. It writes each log's document of damage
(`laminar.log.segment.quarantine`) in the writer's thread, so after everything that was recorded before. It
reports damage to the caller's `on_damage`, which may fetch the bytes from another replica, and writes intact
bytes to their place. Damage is recorded before anything else happens to the bytes, and cleared only when
intact bytes are durable. The registry does not know replicas: it checks offered bytes by the log's own
entries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from laminar.batch import HEADER_SIZE, BatchError, Header, verify
from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import DamagedRange, DiskError, RepairRefused, StorageError
from laminar.log.format.index_entry import UNKNOWN_KIND, IndexEntry, pack_row
from laminar.log.partition_log.log import Log
from laminar.log.segment.index_rebuild import packed
from laminar.log.segment.quarantine import Damage, Sealed, Unsealed, document

_log = logging.getLogger("laminar.damage")

Doing = Callable[[Callable[[], None]], "asyncio.Future[None]"]


def wall_ms() -> int:
    """Return the wall-clock time in ms, which advances while the process does not run."""
    return int(time.time() * 1000)


class DamageRegistry:
    """The registry of damage in all logs of a storage: it records, reports and repairs damaged entries."""

    def __init__(self, in_writer: Doing, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        """Make a registry.

        `in_writer` runs a function in the segment writer's thread, after all work that was submitted to that
        thread before, and returns a future. `clock_ms` returns the time in ms since the epoch.
        """
        self._in_writer = in_writer
        self._clock_ms = clock_ms
        # Called once with each damaged range, when it is found: so that the node fetches the entries from
        # another replica.
        self.on_damage: Callable[[Log, DamagedRange], None] | None = None
        # Called before `on_damage`: the rest of that log should be verified soon.
        self.on_suspicion: Callable[[], None] | None = None
        # Logs with segments that were verified since their documents were written.
        self._unnoted: dict[Log, None] = {}
        self.found = 0
        self.repaired = 0
        self.refused_repairs = 0

    def adopt(self, log: Log) -> None:
        """Add a log: record and report the damage that its readers find, and repair its entries."""
        log.watch_damage(on_damage=partial(self._on_damage, log), repairer=partial(self.repair, log))

    def _on_damage(self, log: Log, damage: Damage) -> None:
        self.found += 1
        log.quarantine.clear(damage.first_index)
        log.quarantine.add(msgspec.structs.replace(damage, found_ms=self._clock_ms()))
        log.quarantine.suspicious = True
        error = damage.error(log.files.directory)
        _log.error("%s: %s; everything else of this log is served", log.name, error)
        self.record(log)
        if self.on_suspicion is not None:
            self.on_suspicion()
        if self.on_damage is not None:
            self.on_damage(log, error)

    def record(self, log: Log) -> asyncio.Future[None]:
        """Write a log's quarantine (its damaged ranges), as it is now, to its document.

        The future is done when the document is durable. If the disk refuses, the quarantine stays in memory
        only, and the future succeeds. It fails only with `StorageClosed`, which may be ignored.
        """
        payload = log.quarantine.encode()

        def write() -> None:
            files = log.files
            # A log that was deleted or replaced meanwhile keeps its record where it was.
            if not files.disk.exists(files.directory):
                return
            try:
                document(files.disk, files.directory).write(payload)
            except DiskError as error:
                _log.warning("%s: the record of its damage cannot be written: %s", log.name, error)

        future = self._in_writer(write)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def clear(self, log: Log, index: int) -> asyncio.Future[None]:
        """Remove the damaged range of an entry that was read intact.

        Returns a future that is done when that is durable, as that of `record`.
        """
        log.quarantine.clear(index)
        return self.record(log)

    def verified(self, log: Log, first_index: int, verified: Sealed | Unsealed) -> None:
        """Note that a segment was verified, with the result; `record_verified` makes the note durable."""
        if isinstance(verified, Sealed):
            log.quarantine.forget_verified(first_index)
            log.quarantine.sealed[first_index] = verified
        else:
            log.quarantine.unsealed = verified
        self._unnoted[log] = None

    def record_verified(self) -> None:
        """Write the documents of the logs of which segments were verified since the last call.

        A document is written as a whole, in the thread of all segment writes. If it were written after each
        segment, the work would grow with the square of their number. If a crash loses the note, the segment
        is verified again.
        """
        unnoted, self._unnoted = self._unnoted, {}
        for log in unnoted:
            self.record(log)

    # Repair

    async def repair(self, log: Log, index: int, frame: Buffer) -> None:
        """Write `frame` in the place of a damaged entry; durable on return.

        `frame` must be the missing batch: its checksums must be right, and it must agree with its index row
        if the row is intact, else with the entries before and after it and with the room between them.
        Consecutive entries without rows must be repaired in order. For an entry without a row, the caller
        must know that the frame is the committed one. A crash leaves the entry either damaged or repaired.

        Raises:
            RepairRefused: The frame is not the missing batch.
            DiskError: The frame cannot be written; the entry is as damaged as before.
        """
        try:
            header = verify(frame)
            following = await self._previous_term_of(log, index + 1)
            row, rows = _rows_with(log, index, header, following)
        except (BatchError, RepairRefused) as error:
            self.refused_repairs += 1
            raise RepairRefused(f"{log.name}, entry {index}: {error}") from error
        segment = log.segment_of(index)
        slot = index - segment.first_index
        truncations = log.truncations
        # From here to `_in_writer` nothing may be awaited: a truncation recorded later is applied
        # later.
        await self._in_writer(lambda: segment.file.repair(row.position, frame, slot, rows))
        damage = log.quarantine.at(index)
        if damage is None and log.truncations == truncations:
            self.repaired += 1  # the scrubber has read the entry back, and cleared it, before this line
            return
        if damage is None or damage.position != row.position:
            return  # truncated meanwhile
        segment.replace_rows(index, rows)
        log.grown(segment, row.position + row.size)
        log.quarantine.clear(index)
        log.quarantine.forget_verified(segment.first_index)
        if damage.last_index > index:
            log.quarantine.add(
                msgspec.structs.replace(
                    damage,
                    first_index=index + 1,
                    first_offset=header.next_offset,
                    position=row.position + row.size,
                    size=max(damage.size - row.size, 0),
                )
            )
        self.repaired += 1
        _log.warning("%s: entry %d (term %d) is repaired", log.name, index, header.term)
        await self.record(log)

    async def _previous_term_of(self, log: Log, index: int) -> int | None:
        """Return the term that an entry names for the one before it; None if the entry cannot be read."""
        if index > log.last_index or log.quarantine.at(index) is not None:
            return None
        try:
            frames = await log.read(index, index, max_bytes=1)
        except StorageError:
            return None
        return Header.unpack(frames[0]).prev_term


def _rows_with(log: Log, index: int, header: Header, following: int | None) -> tuple[IndexEntry, bytes]:
    """Compare `header` with everything known about the damaged entry; return (its new row, packed rows).

    The packed rows are those to write from the entry on: its own, and a new first row of the entries after it
    that are still damaged, if any. `following` is the `prev_term` of the next entry; None if that entry
    cannot be read.

    Raises:
        RepairRefused: The header disagrees with what is known.
    """
    damage = log.quarantine.at(index)
    if damage is None:
        raise RepairRefused("this entry is not known as damaged")
    size = HEADER_SIZE + header.body_length
    old = log.index_entry(index)
    known = old.kind != UNKNOWN_KIND
    last = index == damage.last_index
    # A hole up to the end of its segment: its bytes may take the room that they need.
    open_end = not known and not old.size and damage.last_index == log.segment_of(index).last_index
    if index != damage.first_index:
        raise RepairRefused(f"the entries before it, from {damage.first_index} on, come first")
    wanted = {
        "index": (index, header.index),
        "term": (old.term if known else header.term, header.term),
        "previous term": (log.term(index - 1) or header.prev_term, header.prev_term),
        "term, by the entry after it": (header.term if following is None else following, header.term),
        "first offset": (old.base_offset, header.base_offset),
        "end offset": (old.next_offset if known or last else header.next_offset, header.next_offset),
        "size": (size if open_end else old.size if known or last else min(size, old.size), size),
    }
    for name, (expected, found) in wanted.items():
        if expected != found:
            raise RepairRefused(f"the {name} is {expected}, not {found}")
    row = IndexEntry(
        index=index,
        term=header.term,
        base_offset=header.base_offset,
        count=header.count,
        position=old.position,
        size=size,
        append_time_ms=header.append_time_ms,
        kind=header.kind,
        tag_mask=header.tag_mask,
    )
    rows = packed(row)
    if not known and not last:
        rest = max(damage.next_offset - header.next_offset, 0)
        rows += pack_row(
            *(0, header.next_offset, row.position + size, 0, 0, rest),
            *(max(damage.size - size, 0), UNKNOWN_KIND),
        )
    return row, rows
