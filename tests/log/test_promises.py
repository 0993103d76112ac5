"""What a commit log promises (docs/laminarmq.md), where no other test says it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.log import StorageSettings, open_log
from laminar.log.format.index_entry import pack_row, row_is_whole, unpack_row
from laminar.log.tools.inspection import inspect
from laminar.log.tools.verification import verify

SMALL = StorageSettings(first_journal_file_bytes=1 << 16, journal_file_bytes=1 << 16)


async def test_what_is_stored_is_never_changed(tmp_path: Path) -> None:
    """P1, P2, P3: bytes of a segment stay as they are; new ones go behind the last, in the last segment."""
    stored: dict[Path, bytes] = {}
    for turn in range(6):
        async with open_log(tmp_path, segment_size_bytes=3_000, settings=SMALL) as log:
            for each in range(10):
                await log.append([b"%d" % each * 20] * 2)
            await log.trim_before(turn * 5)
        now = {file: file.read_bytes() for file in sorted((tmp_path / "logs").rglob("*.log"))}
        kept = [file for file in stored if file in now]
        last = max(stored, default=None)
        for file in kept:
            assert now[file].startswith(stored[file])
            assert file == last or now[file] == stored[file]
        assert all(file in kept or last is None or file > last for file in now)
        stored = now

    assert len(stored) > 3


async def test_ten_thousand_records_come_back_in_their_order(tmp_path: Path) -> None:
    """B2, B3: over many large writes, a clean close, and more appends behind it."""
    records = [b"%07d" % each + b"." * 1_113 for each in range(10_000)]
    for half in (records[:5_000], records[5_000:]):
        async with open_log(tmp_path) as log:
            await asyncio.gather(*(log.append(half[at : at + 100]) for at in range(0, 5_000, 100)))

    async with open_log(tmp_path) as log:
        assert records == [record.value async for record in log.read()]


def test_places_beyond_32_bits_are_kept_whole() -> None:
    """B12: index, offset and position are 64 bits wide; what is not is refused before anything is written."""
    row = pack_row(3, (1 << 53) - 1, 1 << 40, 1_700_000_000_000, 0, (1 << 32) - 1, (1 << 31) - 1, 0)

    found = unpack_row(row, 0, 1 << 45)
    assert row_is_whole(row, 0)
    assert (1 << 45, (1 << 53) - 1, 1 << 40) == (found.index, found.base_offset, found.position)
    assert ((1 << 32) - 1, (1 << 31) - 1) == (found.count, found.size)


STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4), st.integers(0, 600)),
    st.tuples(st.just("give up"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0)),
)


@settings(max_examples=25)
@given(st.lists(STEP, max_size=40))
def test_the_invariants_of_segments_hold_after_any_history(steps: list[tuple[str, int, int]]) -> None:
    """P9: the log begins in its first segment, each segment where the one before ends, each frame behind the
    one before, each row with its frame; and the log has what was appended.
    """
    with TemporaryDirectory() as folder:
        asyncio.run(live(folder, steps))
        verified = verify(folder)
        (log,) = inspect(folder)["logs"]

    assert [] == verified.findings
    segments = log["segments"]
    for one, behind in pairwise(segments):
        assert one["last_index"] + 1 == behind["first_index"]
        assert one["next_offset"] == behind["first_offset"]
    if segments:
        assert segments[0]["first_offset"] <= log["start_offset"] <= segments[0]["next_offset"]
        assert log["end_offset"] == segments[-1]["next_offset"]


async def live(folder: str, steps: list[tuple[str, int, int]]) -> None:
    """The steps, beside a list of values; the list and the log are compared at each opening."""
    values: list[bytes] = []
    rest = list(steps)
    while True:
        async with open_log(folder, segment_size_bytes=2_000, settings=SMALL) as log:
            assert log.end_offset == len(values)
            assert values[log.start_offset :] == [record.value async for record in log.read()]
            while rest and rest[0][0] != "reopen":
                step, count, size = rest.pop(0)
                if step == "append":
                    batch = [b"%d" % (len(values) + each) * (size // 4 + 1) for each in range(count)]
                    assert len(values) == (await log.append(batch)).offset
                    values += batch
                else:
                    wanted = len(values) * count // 100
                    assert await log.trim_before(wanted) <= max(wanted, log.start_offset)
        if not rest:
            return
        rest.pop(0)
