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
    # Above so many bytes of journal that no checkpoint covers, `Storage.refusal` names the journal.
    max_journal_bytes: int = 512 * MIB
    # One journal frame; what is above goes into the next.
    max_frame_bytes: int = 32 * MIB
    # Frames kept in memory for readers and followers, over all logs.
    recent_bytes: int = 16 * MIB
    # Synced, but not yet in a segment: above it the next journal frame waits.
    max_unwritten_bytes: int = 32 * MIB
    # Writeback of a segment is begun every so many bytes, so that a checkpoint's sync finds little to do.
    writeback_bytes: int = 8 * MIB
    # Quiet for so long after a sync: an empty frame is written, so that a journal at rest never ends in one
    # that matters.
    idle_marker_ms: int = 4
    # A read larger than this is verified in a reader thread, not on the loop.
    inline_read_bytes: int = 1 * MIB
    reader_threads: int = 4
