"""The settings of a storage: sizes, times and limits, each with the reason for its value."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Settings of a storage; sizes in bytes, times in ms."""

    # From this size on `Log.segment_full` is true, and the leader lets the next entry open a segment.
    segment_size_bytes: int = 256 * MIB
    # A journal file is filled with zeros before use: a sync of blocks that were written before takes two
    # thirds of the time. The first file of a generation is small, so that a start is quick and an idle shard
    # takes little room.
    first_journal_file_bytes: int = 4 * MIB
    journal_file_bytes: int = 64 * MIB
    # Bytes of journal between two checkpoints; a start reads about as many.
    checkpoint_bytes: int = 64 * MIB
    # From this number of journal files not covered by a checkpoint on, appends should be refused:
    # `Storage.refusal` is then "journal".
    max_journal_files: int = 8
    # The largest journal frame: what does not fit goes into the next.
    max_frame_bytes: int = 32 * MIB
    # Frames kept in memory for readers and followers, over all logs.
    recent_bytes: int = 16 * MIB
    # Synced frames are gathered up to this many bytes, or until the journal is idle, before the segment
    # writer gets them: one system call for many small batches of a segment.
    gather_bytes: int = 1 * MIB
    # Bytes synced but not yet in a segment: above it the next journal frame waits.
    max_unwritten_bytes: int = 32 * MIB
    # Bytes of a segment after which writeback begins, so that a checkpoint's sync finds little to do.
    writeback_bytes: int = 8 * MIB
    # Idle time after a sync until the end mark is written: without the mark nothing would reveal the loss of
    # the last frame.
    idle_marker_ms: int = 4
    # Pause before another attempt at a checkpoint or a journal file, usually for lack of disk space.
    retry_ms: int = 1000
    # Bytes of journal of `interval` logs that may be acknowledged and not synced; above it a sync follows
    # at once. At most a quarter of `max_unwritten_bytes`, as they stay in memory until then.
    unsynced_bytes: int = 4 * MIB
    # A read larger than this is verified in a reader thread, not on the loop.
    inline_read_bytes: int = 1 * MIB
    reader_threads: int = 4
    # Every sealed segment is read again within this many days, at this rate at most.
    scrub_days: int = 7
    scrub_bytes_per_s: int = 8 * MIB
    # Bytes of cold reads in flight, and so of the memory that they take.
    reader_bytes: int = 32 * MIB
    # During commits cold reads are throttled to this rate, in small ranges: a disk busy with a large read
    # delays a sync by milliseconds. Without commits they run as fast as the disk.
    cold_bytes_per_s: int = 64 * MIB
    cold_piece_bytes: int = 256 * KIB
    # Index rows kept in memory: 16 MiB stand for 1.2 GB of data in batches of 4 KiB, 70 GB in batches of
    # 256 KiB.
    row_bytes: int = 16 * MIB
    # Segment files open at once; those that wait for a sync are open beyond it.
    open_files: int = 512
    # Bytes of frames read ahead of small sequential reads.
    ahead_bytes: int = 8 * MIB

    @property
    def checkpoint_due_bytes(self) -> int:
        """Number of bytes of journal after which a checkpoint is due.

        That is `checkpoint_bytes`, or less if journal files are so small that `max_journal_files` of them
        have fewer bytes: otherwise appends would be refused before a checkpoint is due, and so none would
        ever be made.
        """
        return min(self.checkpoint_bytes, self.journal_file_bytes * self.max_journal_files // 4)
