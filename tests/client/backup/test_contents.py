"""What an import sends of a backup: the same each time, no more in a batch than a server takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Batch, build
from laminar.batch.columns import Codec
from laminar.batch.header import stamp
from laminar.client.backup.contents import parts_of, plain_bytes
from laminar.client.backup.files import digest_of
from laminar.client.backup.folder import Folder
from laminar.client.backup.manifest import BatchFile, PartitionBackup

PRODUCER = b"p" * 16


def backup_of(folder: Path, *frames: bytearray) -> PartitionBackup:
    """A backup of one partition with these batches, in one file."""
    at = 0
    for index, frame in enumerate(frames, 1):
        count = Batch(frame).header.count
        stamp(
            frame, index=index, term=1, prev_term=1, base_offset=at, append_time_ms=7, committed_index=index
        )
        at += count
    name = f"0/{0:020}.batches"
    (folder / "0").mkdir(parents=True)
    (folder / name).write_bytes(b"".join(frames))
    size, digest = digest_of(Folder(folder), name)
    return PartitionBackup(0, "", 0, at, None, [BatchFile(name, size, digest, 0, at)], [])


def rows(batch: Batch) -> list[tuple[Any, ...]]:
    return [
        (each.key, each.value, each.tag, dict(each.headers), each.timestamp, each.trace_id) for each in batch
    ]


@given(
    sizes=st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=9), min_size=1, max_size=4),
    most_bytes=st.integers(200, 3_000),
    most_records=st.integers(1, 9),
)
def test_large_batches_are_divided_and_no_record_is_lost(
    sizes: list[list[int]], most_bytes: int, most_records: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("backup")
    frames = [
        build(
            [b"v" * size for size in each],
            keys=[b"%d" % size if size % 2 else None for size in each],
            tags=["t" if size % 3 else None for size in each],
            headers=[{"h": b"x"} if size % 5 else None for size in each],
            codec=Codec.ZSTD,
        )
        for each in sizes
    ]
    wanted = [row for frame in frames for row in [*rows(Batch(frame))]]
    partition = backup_of(folder, *frames)

    def sent() -> list[Any]:
        return list(
            parts_of(
                Folder(folder),
                partition,
                producer_id=PRODUCER,
                most_bytes=most_bytes,
                most_records=most_records,
            )
        )

    found = sent()

    batches = [Batch(part.frame) for part in found]
    times = [row[:4] + row[5:] for row in wanted]
    assert times == [row[:4] + row[5:] for batch in batches for row in rows(batch)]
    assert all(time == 7 for batch in batches for time in batch.timestamps)
    assert list(range(len(found))) == [batch.header.sequence for batch in batches]
    assert [part.next for part in found[:-1]] == [part.first for part in found[1:]]
    assert (0, partition.end_offset) == (found[0].first, found[-1].next)
    for part, batch in zip(found, batches, strict=True):
        assert part.next - part.first == len(batch) <= most_records
        assert len(batch) == 1 or plain_bytes(batch) <= most_bytes
    assert found == sent()
