"""The measures of a storage, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Sizes in bytes, times in ms."""

    # Above it `Log.segment_full` asks the leader to open the next segment.
    segment_size_bytes: int = 256 * MIB
    # A journal file is zero-filled before use: on written blocks a sync takes two thirds of the time. The
    # first file of a generation is small, so that a start is quick and an idle shard takes little room.
    first_journal_file_bytes: int = 4 * MIB
    journal_file_bytes: int = 64 * MIB
    # So many bytes of journal between two checkpoints; a start reads about as many.
    checkpoint_bytes: int = 64 * MIB
    # From so many journal files on that no checkpoint covers, `Storage.refusal` names the journal.
    max_journal_files: int = 8
    # One journal frame; what is above goes into the next.
    max_frame_bytes: int = 32 * MIB
    # Frames kept in memory for readers and followers, over all logs.
    recent_bytes: int = 16 * MIB
    # Synced frames are gathered up to so many bytes, or until it is quiet, before the segments' writer gets
    # them: one system call for many small batches of a segment.
    gather_bytes: int = 1 * MIB
    # Synced, but not yet in a segment: above it the next journal frame waits.
    max_unwritten_bytes: int = 32 * MIB
    # Writeback of a segment is begun every so many bytes, so that a checkpoint's sync finds little to do.
    writeback_bytes: int = 8 * MIB
    # Quiet for so long after a sync: an empty frame is written, so that a journal at rest never ends in one
    # that matters.
    idle_marker_ms: int = 4
    # The pause before a checkpoint or a journal file that failed, for want of room as a rule, is tried again.
    retry_ms: int = 1000
    # Of `interval` logs: so many bytes of journal may be acknowledged and not synced; above it a sync follows
    # at once. At most a quarter of `max_unwritten_bytes`, as they stay in memory until then.
    unsynced_bytes: int = 4 * MIB
    # A read larger than this is verified in a reader thread, not on the loop.
    inline_read_bytes: int = 1 * MIB
    reader_threads: int = 4
    # Every sealed segment is read again within so many days, at no more than so many bytes a second.
    scrub_days: int = 7
    scrub_bytes_per_s: int = 8 * MIB
    # Bytes of cold reads under way, so also of memory that they take.
    reader_bytes: int = 32 * MIB
    # Beside commits cold reads keep to this pace, in small pieces: a disk busy with a large read lets a sync
    # wait for milliseconds. Alone they go as fast as the disk does.
    cold_bytes_per_s: int = 64 * MIB
    cold_piece_bytes: int = 256 * KIB
    # Rows of the index kept in memory: 16 MiB stand for 1.2 GB of data in batches of 4 KiB, 70 GB in such of
    # 256 KiB.
    row_bytes: int = 16 * MIB
    # Files of segments that are open at once; those that wait for a sync are open beyond it.
    open_files: int = 512
    # Frames read ahead of small reads in sequence.
    ahead_bytes: int = 8 * MIB

    @property
    def checkpoint_due_bytes(self) -> int:
        """`checkpoint_bytes`, or less where journal files are so small that their number would come first.

        Else appends would be refused for the journal's sake before a checkpoint is due, and for ever.
        """
        return min(self.checkpoint_bytes, self.journal_file_bytes * self.max_journal_files // 4)
