"""The scrubber: it reads every segment again within some days, to find damage while it can be repaired.

It reads one range at a time in the readers' pool, at a limited rate: it never uses more than one of the
pool's threads, and does not delay the writers. It reads from the disk itself: cached pages are dropped
before, as they would hide damage there. The time of each segment's last verification is kept with its log, so
a restart continues where the scrubber was. Of the active segment it reads what is in the file for certain
(`Log.written_index`): entries that are still to be written are not damage. It finds and reports damage, and
repairs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import DiskError, EntriesTrimmed, StorageClosed, StorageError
from laminar.log.format.index_entry import IndexEntry
from laminar.log.format.settings import MIB, StorageSettings
from laminar.log.integrity.damage_registry import DamageRegistry, wall_ms
from laminar.log.partition_log.log import Log
from laminar.log.partition_log.readers import ReadRange, SegmentReader, read_frames
from laminar.log.segment.quarantine import Sealed, Unsealed
from laminar.log.segment.segment import IndexNotCached, Segment

_log = logging.getLogger("laminar.scrubber")

_PIECE_BYTES = MIB
_IDLE_S = 60.0
_HURRY_S = 1.0
# How often it is made durable which segments were verified.
_NOTE_EVERY_MS = 60_000
_DAY_MS = 24 * 3_600_000

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Due:
    """A segment to verify, and the time of its last verification (ms since the epoch)."""

    since_ms: int
    log: Log
    first_index: int


class Scrubber:
    """Verifies the checksums of all segments of the logs that `logs` returns, again and again.

    Run `run` as a task. The loop's thread only.
    """

    def __init__(
        self,
        logs: Callable[[], Iterable[Log]],
        *,
        damage_registry: DamageRegistry,
        readers: SegmentReader,
        settings: StorageSettings,
        clock_ms: Callable[[], int] = wall_ms,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._logs = logs
        self._damage = damage_registry
        self._readers = readers
        self._bytes_per_s = settings.scrub_bytes_per_s
        self._period_ms = settings.scrub_days * _DAY_MS
        self._clock_ms = clock_ms
        self._sleep = sleep
        self.verified_bytes = 0
        self.verified_segments = 0
        self.damaged_batches = 0
        self.errors = 0
        self._waiting: list[_Due] = []
        self._hurry = asyncio.Event()
        self._sealed_segments = 0

    async def run(self) -> None:
        """Run passes until the storage is closed, with a pause after each pass that was short."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self.run_pass()
            except StorageClosed:
                return
            if loop.time() - started < _IDLE_S:
                await self._pause()

    def expedite(self) -> None:
        """Begin the next pass soon, because damage was found: the log with it is verified as a whole then."""
        self._hurry.set()

    async def _pause(self) -> None:
        """Wait a minute, or until a second after `expedite` is called.

        In that second other readers may find more damage, which the same pass then looks at.
        """
        rest = asyncio.ensure_future(self._sleep(_IDLE_S))
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait((rest, hurry), return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
            hurry.cancel()
        if self._hurry.is_set():
            self._hurry.clear()
            await self._sleep(_HURRY_S)

    async def run_pass(self) -> None:
        """Read all damaged entries again, then verify every segment that is due.

        The segment that was verified longest ago comes first.
        """
        for log in list(self._logs()):
            try:
                await self._recheck(log)
            except (DiskError, EntriesTrimmed) as error:
                self.errors += 1
                _log.warning("%s: damaged entries cannot be rechecked: %s", log.name, error)
        self._waiting = self._due()
        before = self.verified_segments, self.verified_bytes, self.damaged_batches
        noted_ms = self._clock_ms()
        try:
            while self._waiting:
                due = self._waiting.pop()
                try:
                    await self._verify(due.log, due.first_index)
                except DiskError as error:
                    self.errors += 1
                    _log.warning(
                        "%s: segment %d cannot be verified: %s", due.log.name, due.first_index, error
                    )
                if not 0 <= self._clock_ms() - noted_ms < _NOTE_EVERY_MS:
                    self._damage.record_verified()
                    noted_ms = self._clock_ms()
        finally:
            self._damage.record_verified()
        segments, size, damaged = (
            self.verified_segments - before[0],
            self.verified_bytes - before[1],
            self.damaged_batches - before[2],
        )
        if segments:
            _log.info("%d segments (%d bytes) verified, %d batches damaged", segments, size, damaged)

    def _due(self) -> list[_Due]:
        """Return the segments to verify in this pass; the one verified longest ago comes last."""
        now_ms = self._clock_ms()
        found = []
        self._sealed_segments = 0
        for log in self._logs():
            suspicious, log.quarantine.suspicious = log.quarantine.suspicious, False
            segments = log.segments()
            for segment in segments[:-1]:
                self._sealed_segments += 1
                known = log.quarantine.sealed.get(segment.first_index)
                since_ms = known.verified_ms if known is not None else segment.last_row.append_time_ms
                if suspicious or known is None or not self._is_fresh(since_ms, now_ms):
                    found.append(_Due(since_ms, log, segment.first_index))
            if segments:
                last = segments[-1]
                begun_ms = self._verified_ms(log, last) or last.begun_ms
                since_ms = begun_ms or last.last_row.append_time_ms
                if suspicious or not begun_ms or not self._is_fresh(since_ms, now_ms):
                    found.append(_Due(since_ms, log, last.first_index))
        return sorted(found, key=lambda due: (due.since_ms, due.first_index), reverse=True)

    def _is_fresh(self, since_ms: int, now_ms: int) -> bool:
        """Return whether a segment was verified recently (at `since_ms`), so that it is not due.

        Recently means within half of the period. The other half is a reserve for a slow disk, for days in
        which the node was off, and for a clock that was set back.
        """
        return now_ms - self._period_ms // 2 < since_ms <= now_ms

    def _verified_ms(self, log: Log, last: Segment) -> int:
        """Return when the active segment was verified, in ms since the epoch; 0 if never."""
        known = log.quarantine.unsealed
        return known.verified_ms if known is not None and known.segment == last.first_index else 0

    async def _recheck(self, log: Log) -> None:
        """Read a log's damaged entries again, and remove the damaged ranges of those that are intact now.

        That happens if a crash came between a repair and its record, or if not the disk failed but, for
        example, its cable.
        """
        for damage in log.quarantine:
            if damage.term == 0 or not log.first_index <= damage.first_index <= log.last_index:
                continue
            segment = log.segment_of(damage.first_index)
            before = log.truncations
            row = await log.find_index_entry(damage.first_index)
            frames = await self._read(ReadRange(segment.file, [row], row.size), None)
            if frames and before == log.truncations:
                _log.warning("%s: entry %d is whole again", log.name, damage.first_index)
                self._damage.clear(log, damage.first_index)

    async def _verify(self, log: Log, first_index: int) -> None:
        """Verify the checksums of every frame of a segment, and that it fits its index row.

        If the log is truncated or trimmed meanwhile, the verification ends without a result.
        """
        before = log.truncations
        segment = next((each for each in log.segments() if each.first_index == first_index), None)
        if segment is None:
            return
        is_sealed = segment is not log.segments()[-1]
        digest = hashlib.sha256()
        whole = True
        index, last = first_index, min(segment.last_index, log.written_index)
        if last < (segment.last_index if is_sealed else first_index):
            return  # its entries are not in its file yet; the next pass verifies it
        while index <= last:
            try:
                rows = _rows_from(segment, index, last)
            except IndexNotCached as cold:
                await self._readers.load(cold, reader=self)
                if log.truncations != before:
                    return
                continue
            piece = ReadRange(segment.file, rows, sum(row.size for row in rows))
            frames = await self._read(piece, digest)
            if log.truncations != before:
                return
            self.verified_bytes += sum(map(len, frames))
            index += len(frames)
            if len(frames) < len(rows):
                if segment.is_unverified(index):
                    # The row may be wrong, and not the frame.
                    await self._readers.compare(segment, rows[len(frames)], reader=self)
                    if log.truncations != before:
                        return
                    continue
                whole = False
                index = self._damaged(log, segment, rows[len(frames) :])
        now_ms = self._clock_ms()
        if is_sealed:
            self.verified_segments += 1
            verified: Sealed | Unsealed = Sealed(
                last_index=last,
                last_term=segment.last_term,
                size=segment.size,
                digest=digest.digest() if whole else b"",
                verified_ms=now_ms,
            )
        else:
            last_term = log.term(last) or 0
            verified = Unsealed(segment=first_index, last_index=last, last_term=last_term, verified_ms=now_ms)
        self._damage.verified(log, first_index, verified)

    def _damaged(self, log: Log, segment: Segment, rows: list[IndexEntry]) -> int:
        """Report the damaged entry of the first of `rows`, if it is new; return the next index to verify."""
        index = rows[0].index
        if index <= log.start.index:
            return index + 1  # trimmed already; its file is removed with the rest of it
        if log.quarantine.at(index) is None:
            self.damaged_batches += 1
            log.found_damaged(ReadRange(segment.file, rows, 0))
        damage = log.quarantine.at(index)
        return index + 1 if damage is None else max(damage.last_index, index) + 1

    async def _read(self, piece: ReadRange, digest: hashlib._Hash | None) -> list[Buffer]:
        """Read a range from the disk, not the page cache, within the rate limit; return its intact frames."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        frames = await loop.run_in_executor(self._readers.executor, _read, piece, digest)
        pause_s = piece.size / self._bytes_per_s - (loop.time() - started)
        await self._sleep(max(pause_s, 0.0))
        return frames

    def statistics(self) -> dict[str, int]:
        """Return counters of this process, and gauges of the pass in progress.

        `oldest_unverified_age_s` is the time since the last verification of the segment that is next.
        """
        age_ms = self._clock_ms() - self._waiting[-1].since_ms if self._waiting else 0
        return {
            "verified_bytes": self.verified_bytes,
            "verified_segments": self.verified_segments,
            "sealed_segments": self._sealed_segments,
            "waiting_segments": len(self._waiting),
            "oldest_unverified_age_s": max(age_ms, 0) // 1000,
            "damaged_batches": self.damaged_batches,
            "errors": self.errors,
        }


def _rows_from(segment: Segment, index: int, last: int) -> list[IndexEntry]:
    """Return the index rows of the next range to read, from `index` on: at least one, up to `_PIECE_BYTES`.

    Raises:
        IndexNotCached: The row of `index` is not in memory.
    """
    rows: list[IndexEntry] = []
    size = 0
    try:
        for row in segment.rows(index, last):
            size += row.size
            if rows and size > _PIECE_BYTES:
                break
            rows.append(row)
    except IndexNotCached:
        if not rows:
            raise
    return rows


def _read(piece: ReadRange, digest: hashlib._Hash | None) -> list[Buffer]:
    """Return the intact frames of a range, read from the disk, not from the page cache. A reader's thread.

    `digest`, if given, is updated with the frames.
    """
    position = piece.rows[0].position
    try:
        file = piece.segment.data()
        file.drop_cached(piece.size, position)
    except StorageError:
        file = None  # `read_frames` reports the missing file
    frames = read_frames(piece)
    if digest is not None:
        for frame in frames:
            digest.update(frame)
    if file is not None:
        file.drop_cached(piece.size, position)
    return frames
