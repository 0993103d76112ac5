"""The journal (write-ahead log) of a storage: it writes frames into files, and syncs them.

It decides a frame's place, its LSN, and the `durable_lsn` in its head; it does not know what the records
mean. Unsynced frames lie in the current file only, and any sync covers all of them. Writes and syncs are for
one thread, the journal's. `prepare_spare` and `delete_before` run beside it in another, the background
thread; counters and flags (`wants_spare`, `starved`, `files`) are read in others. A failed write or sync
leaves the object unusable: the process ends and recovers (docs/storage.md#failures).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from laminar.histogram import Histogram
from laminar.log.commit.end_mark import End, EndMark
from laminar.log.disk.disk import Buffer, Disk, File
from laminar.log.disk.errors import DiskError
from laminar.log.format.journal_codec import FrameFlag, FrameHead, encode_frame, padded_size
from laminar.log.format.settings import MIB, StorageSettings

_log = logging.getLogger("laminar.storage")

_SPARE = "spare-"
# Files that are kept ready for use, at most: in a steady state each checkpoint frees one, while one is
# filled.
_MAX_SPARES = 2
_ZEROS = bytes(MIB)


def journal_name(number: int) -> str:
    """Return the name of a journal file."""
    return f"journal-{number}"


def journal_numbers(disk: Disk, store: str) -> list[int]:
    """Return the numbers of the journal files in a store directory, lowest first."""
    prefix = journal_name(0)[:-1]
    return sorted(
        int(name[len(prefix) :])
        for name in disk.list(store)
        if name.startswith(prefix) and name[len(prefix) :].isdigit()
    )


@dataclass(frozen=True, slots=True)
class Written:
    """The place of a frame in the journal.

    `end_position` is the position in file `file_number` at which the frame ends, or its twin (the second copy
    of its hard states) if it has one. `lsn` is that of the frame or twin, and `size` is the bytes of both.
    `file_size` is the size to which the file was filled with zeros before its use (0: it was not filled).
    """

    lsn: int
    file_number: int
    end_position: int
    size: int
    file_size: int = 0


class Journal:
    """The journal of a storage in one generation (from a start to the next); it begins with a new file.

    `lsn` is the LSN of the last frame written, `durable_lsn` that of the last frame known to be synced.
    """

    def __init__(
        self,
        disk: Disk,
        store: str,
        settings: StorageSettings,
        *,
        generation: int,
        seed: int,
        number: int,
        lsn: int,
    ) -> None:
        """Make the first file of the generation, with the given number.

        `number` must be above that of every file in the store directory, and `lsn` must be the highest LSN of
        any former generation. `seed` is the random part of `generation`.
        """
        self._disk = disk
        self._store = store
        self._settings = settings
        self.generation = generation
        self.seed = seed
        self.lsn = lsn
        self.durable_lsn = lsn
        # Bytes of frames that no sync has covered yet.
        self.unsynced_bytes = 0
        self._hard_state_lsn = 0
        # True during each write and sync, and so for good after one that raised: there may be pages that
        # count as clean and were never written.
        self._broken = False
        self.number = number
        for name in disk.list(store):
            if name.startswith(_SPARE):
                disk.unlink(os.path.join(store, name))
        self._capacity = self._filled = settings.first_journal_file_bytes
        self._end_mark = EndMark(disk, store)
        self._file = self._make(journal_name(number), self._capacity)
        self._position = 0
        # (name, capacity, filled with zeros up to). The journal's thread takes from it and another adds to
        # it, each by a single list operation.
        self._spares: list[tuple[str, int, int]] = []
        self._spares_made = 0
        self._syncs = self._syncs_us = self._longest_sync_us = 0
        self.sync_times = Histogram()
        self._preparing = False
        # By number: capacity, filled with zeros up to.
        self._capacities = {number: (self._capacity, self._filled)}
        # Whether there was no room on the disk for the last file that was to be made, or the current one.
        self._lacks_room = False

    def _make(self, name: str, size: int, *, beside_commits: bool = False) -> File:
        """Make a file filled with zeros: its disk space is certain, and its syncs take a third less time.

        With `beside_commits` each MiB is synced on its own, so that the sync of a commit waits for one MiB
        and not for the whole file.
        """
        file = self._disk.open(os.path.join(self._store, name), create=True, exclusive=True)
        for position in range(0, size, MIB):
            file.pwritev([_ZEROS[: size - position]], position)
            if beside_commits or position + MIB >= size:
                file.sync()
        self._disk.sync_directory(self._store)
        return file

    def open_generation(self) -> Written:
        """Write the first, empty frame of the generation, and sync it; return its place.

        Call it before the checkpoint that begins the generation is written.
        """
        return self.write([], records=0, hard_states=[])

    def write(
        self, parts: Sequence[Buffer], *, records: int, hard_states: Sequence[Buffer], sync: bool = True
    ) -> Written:
        """Write the records in `parts` as one frame; return the place of the frame.

        With `sync` the frame is durable on return, and so is every frame before it. Without, the kernel has
        the frame, and a later sync covers it. `hard_states` are those of the parts that are hard states (head
        and payload of each): they are written a second time, as a *twin* after the frame, with the same sync.

        Raises:
            DiskError: The write or sync failed; the journal must not be used any more.
        """
        assert not self._broken, "a journal is written to after a failed write or sync"
        self._broken = True
        length = sum(map(len, parts))
        twin_length = sum(map(len, hard_states))
        size = padded_size(length) + (padded_size(twin_length) if hard_states else 0)
        if self._position + size > self._capacity or self._better_is_ready(size):
            self._roll(size)
        flags = (FrameFlag.HARD_STATE if hard_states else 0) | (0 if records else FrameFlag.MARKER)
        buffers = self._encode(parts, flags=flags, records=records, length=length)
        if hard_states:
            # For the twin, the last LSN of a hard state is that of the frame before it.
            self._hard_state_lsn = self.lsn
            twin_flags = FrameFlag.HARD_STATE | FrameFlag.TWIN
            buffers += self._encode(
                hard_states, flags=twin_flags, records=len(hard_states) // 2, length=twin_length
            )
            self._hard_state_lsn = self.lsn
        if sync and not self.unsynced_bytes:
            began_s = time.monotonic()
            written = self._file.pwritev_synced(buffers, self._position)
            self._count_sync(began_s)
            self.durable_lsn = self.lsn
        else:
            written = self._file.pwritev(buffers, self._position)
            self.unsynced_bytes += size
            if sync:
                # A synced write covers its own bytes only.
                self._sync()
        assert written == size, f"a frame of {size} bytes took {written}"
        self._position += size
        self._broken = False
        return Written(self.lsn, self.number, self._position, size, self._filled)

    def sync(self) -> None:
        """Make every frame written so far durable.

        Raises:
            DiskError: The sync failed; the journal must not be used any more.
        """
        assert not self._broken, "a journal is synced after a failed write or sync"
        if self.unsynced_bytes:
            self._broken = True
            self._sync()
            self._broken = False

    def _sync(self) -> None:
        began_s = time.monotonic()
        try:
            self._file.sync()
        except DiskError:
            self._note_failure()
            raise
        self._count_sync(began_s)
        self.unsynced_bytes = 0
        self.durable_lsn = self.lsn

    def _count_sync(self, began_s: float) -> None:
        took_us = int((time.monotonic() - began_s) * 1e6)
        self._syncs += 1
        self._syncs_us += took_us
        self.sync_times.observe(took_us / 1e6)
        self._longest_sync_us = max(self._longest_sync_us, took_us)

    def mark_end(self) -> None:
        """Write the end mark, which says how far the journal reaches; sync it if all frames are durable."""
        self._end_mark.write(self._end(), sync=not self.unsynced_bytes)

    def _note_failure(self) -> None:
        """Record in the end mark that a sync failed, so that the next start does not trust the page cache.

        If the machine is not restarted before, that start would else take every frame written as kept. But
        the pages of a failed sync count as clean, so that the kernel may drop them: the frames in them may be
        lost, even frames that were acknowledged when they were written.
        """
        try:
            self._end_mark.write(self._end(failed=True), sync=False)
        except DiskError as error:
            _log.critical("%s: a failed sync cannot be recorded: %s", self._store, error)

    def _end(self, *, failed: bool = False) -> End:
        return End(
            generation=self.generation,
            seed=self.seed,
            lsn=self.lsn,
            durable_lsn=self.durable_lsn,
            hard_state_lsn=self._hard_state_lsn,
            failed=failed,
        )

    def _encode(self, parts: Sequence[Buffer], *, flags: int, records: int, length: int) -> list[Buffer]:
        self.lsn += 1
        head = FrameHead(
            flags=flags,
            generation=self.generation,
            lsn=self.lsn,
            durable_lsn=self.durable_lsn,
            hard_state_lsn=self._hard_state_lsn,
            records=records,
            length=length,
            file_size=self._filled,
        )
        return encode_frame(head, parts, self.seed)

    def _roll(self, size: int) -> None:
        """Continue in the next file: a spare file, if there is one with room for `size` bytes."""
        if self.unsynced_bytes:
            self._sync()
        self._file.close()
        self.number += 1
        path = os.path.join(self._store, journal_name(self.number))
        if self._spares and self._spares[0][1] >= size:
            name, self._capacity, self._filled = self._spares.pop(0)
            self._disk.rename(os.path.join(self._store, name), path)
            self._file = self._disk.open(path)
        else:
            # Not zero-filled: that would delay all commits. It is left when a filled one is ready.
            self._file = self._disk.open(path, create=True, exclusive=True)
            self._capacity, self._filled = max(size, self._next_capacity()), 0
            self._reserve()
        self._disk.sync_directory(self._store)
        self._capacities[self.number] = (self._capacity, self._filled)
        self._position = 0

    def _better_is_ready(self, size: int) -> bool:
        """Return whether to change to the next file: it is filled with zeros, and the current one is not.

        A file that is not filled syncs more slowly. The space that is reserved for it and not used becomes
        free when a checkpoint covers its frames.
        """
        return not self._filled and bool(self._spares) and self._spares[0][2] >= size

    def _reserve(self) -> None:
        """Reserve disk space for the current file; on a full disk let appends be refused (`starved`).

        The file is used all the same: smaller records, such as votes, may still find room.
        """
        try:
            self._file.reserve(self._capacity)
        except DiskError as error:
            if not error.is_full:
                raise
            self._lacks_room = True

    def _next_capacity(self) -> int:
        return min(4 * self._capacity, self._settings.journal_file_bytes)

    def wants_spare(self) -> bool:
        """Return whether the caller must now call `prepare_spare`, which makes the next file.

        That is so if the current file is half used, is not filled with zeros, or lacks disk space, and no
        next file is ready or being made. After True the result is False until `prepare_spare` has ended.
        """
        used = self._lacks_room or not self._filled or self._position >= self._capacity // 2
        wanted = used and not self._spares and not self._preparing
        self._preparing |= wanted
        return wanted

    @property
    def starved(self) -> bool:
        """Whether appends should be refused: the disk is full, and no next file is ready."""
        return self._lacks_room and not self._spares

    def prepare_spare(self) -> None:
        """Make the next file; if the disk is full, the journal is `starved` instead. The background thread.

        Only the thread that also runs `delete_before` may call it.

        Raises:
            DiskError: The file cannot be made, for another reason than a full disk.
        """
        self._spares_made += 1
        name = f"{_SPARE}{self._spares_made}"
        capacity = self._next_capacity()
        try:
            self._make(name, capacity, beside_commits=True).close()
        except DiskError as error:
            if not error.is_full:
                raise
            self._lacks_room = True
            self._disk.unlink(os.path.join(self._store, name))
            return
        finally:
            self._preparing = False
        self._spares.append((name, capacity, capacity))
        self._lacks_room = False

    def delete_before(self, number: int) -> None:
        """Remove the files with numbers below `number`, or keep them as spare files. The background thread.

        Call it only when a durable checkpoint covers all their frames. Then reuse is safe too: the frames
        that such a file still holds are of this generation and at or below the checkpoint's LSN, so no
        recovery takes them for new ones.
        """
        for old in journal_numbers(self._disk, self._store):
            if old >= number:
                break
            path = os.path.join(self._store, journal_name(old))
            capacity, filled = self._capacities.pop(old, (0, 0))
            is_kept = capacity == self._settings.journal_file_bytes and (filled or self._lacks_room)
            if is_kept and len(self._spares) < _MAX_SPARES:
                self._spares_made += 1
                name = f"{_SPARE}{self._spares_made}"
                self._disk.rename(path, os.path.join(self._store, name))
                self._spares.append((name, capacity, filled))
                self._lacks_room = False
            else:
                self._disk.unlink(path)

    @property
    def files(self) -> int:
        """Number of files that hold records not covered by a checkpoint, and the current one."""
        return len(self._capacities)

    def statistics(self) -> dict[str, int]:
        """Return the LSN, the current file and its use, and the number and times (µs) of syncs."""
        return {
            "lsn": self.lsn,
            "file": self.number,
            "files": self.files,
            "position": self._position,
            "capacity": self._capacity,
            "syncs": self._syncs,
            "syncs_us": self._syncs_us,
            "longest_sync_us": self._longest_sync_us,
        }

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._end_mark.close()
