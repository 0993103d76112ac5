"""Searches by key indexes find what a loop over all records finds, whatever state the indexes are in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from laminar.batch import build
from laminar.log.key_index import writer as writer_module
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.find import indexing
from laminar.node.find import scan as scan_module
from laminar.node.find.examine import Wanted
from laminar.node.find.index_terms import DEFAULT, digest_of, setting_of, terms_of
from laminar.node.find.indexing import Indexer
from laminar.node.find.pace import Pace
from laminar.node.find.scan import Scanned, Span, scan
from laminar.node.find.where import Where
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Rules
from tests.mutation import Mutant
from tests.node.alone import SMALL, lone_partition
from tests.node.find.test_mutants import noticed, put_in
from tests.node.find.test_scan import (
    ANY,
    FAST,
    WORDS,
    append,
    fill,
    is_wanted,
    questions,
    rot,
    search,
    shown,
)
from tests.node.partition.test_retention import At, keeper, settled_start, until

__all__ = ["put_in"]

SEGMENTS = replace(SMALL, segment_size_bytes=6_000)
"""So that a few batches are a segment."""


def indexer_of(partition: Partition, setting: str | None = DEFAULT) -> Indexer:
    """An indexer that is as fast as it can."""
    return Indexer(
        lambda: [partition], setting_of=lambda topic: setting, pace=Pace(FAST), entries_per_s=1 << 40
    )


async def built(partition: Partition, setting: str | None = DEFAULT) -> Indexer:
    """Builds all that is to be built, once it is in its segments."""
    await until(lambda: partition.log.written_index == partition.log.last_index)
    indexer = indexer_of(partition, setting)
    while await indexer.run_pass():
        pass
    return indexer


def find_files(partition: Partition, names: str = "*.find") -> list[Path]:
    return sorted(Path(partition.log.files.directory).glob(names))


async def spoil(partition: Partition, rng: random.Random) -> None:
    """Leave each index in one of the states in which a crash, a disk or another setting can leave it."""
    files = find_files(partition)
    whole = [path.read_bytes() for path in files]
    for path in files:
        match rng.choice(["whole", "whole", "gone", "short", "damaged", "another's", "zero", "new"]):
            case "gone":
                path.unlink()
            case "short":
                path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
            case "damaged":
                rot(str(path), rng.randrange(path.stat().st_size - 3))
            case "another's":
                path.write_bytes(rng.choice(whole))
            case "zero":
                path.write_bytes(bytes(path.stat().st_size))
            case "new":
                path.rename(path.with_name(f"{path.name}.new"))


@pytest.mark.parametrize("seed", range(3))
async def test_random_steps_by_index_find_what_a_loop_over_all_finds(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both orders; with indexes built, gone, torn, stale, for other settings, and built again."""
    rng = random.Random(seed)
    monkeypatch.setattr(scan_module, "SLICE_BYTES", rng.choice([200, 3_000, 1 << 20]))
    monkeypatch.setattr(scan_module, "SLICE_FRAMES", rng.choice([1, 4, 256]))
    monkeypatch.setattr(scan_module, "SEGMENTS_AT_ONCE", rng.choice([1, 2, 16]))
    monkeypatch.setattr(scan_module, "FIRST_WINDOW", rng.choice([1, 50, 1024]))
    monkeypatch.setattr(writer_module, "PAGE_ENTRIES", rng.choice([1, 3, 340]))
    monkeypatch.setattr(writer_module, "BLOCK_ENTRIES", rng.choice([10, 2_000_000]))
    by_index = 0

    async def counted(*args: object, **named: object) -> Scanned:
        nonlocal by_index
        found = await scan(*args, **named)  # type: ignore[arg-type]
        by_index += found.segments_by_index
        return found

    monkeypatch.setattr("tests.node.find.test_scan.scan", counted)
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill(partition, rng, 40)
        assert len(partition.log.sealed_segments()) > 3
        records = await shown(partition)
        loop = asyncio.get_running_loop()
        for state in ("built", "spoilt", rng.choice(["key", "header:n,header:m", ""]), "built again"):
            if state == "spoilt":
                await spoil(partition, rng)
            else:
                # As after a start: what is there is looked at, and not taken for what it was.
                for segment in partition.log.sealed_segments():
                    segment.indexed = None
                await built(partition, DEFAULT if state.startswith("built") else state)
            for where in rng.sample(list(questions(rng)), 4) + [Where(key=rng.choice(WORDS).encode())]:
                low = rng.randrange(len(records))
                high = rng.randrange(low, len(records)) + 1
                if rng.random() < 0.3:
                    low, high = 0, len(records)
                for newest in (False, True):
                    limits = rng.choice([3, 1000]), 100, rng.choice([500, 1 << 20])
                    wanted = Wanted(where, newest, *limits)
                    found, skipped = await search(
                        partition, wanted, low, high, until_s=lambda: loop.time() + rng.choice([-1, 9])
                    )
                    expected = [each.offset for each in records[low:high] if is_wanted(each, where)]
                    assert expected[:: -1 if newest else 1] == [each.offset for each in found], (state, where)
                    assert not skipped
        assert by_index > 5


async def searched(partition: Partition, where: Where, *, newest: bool = False) -> Scanned:
    """One step over everything."""
    span = Span(0, partition.replica.group, 0, partition.end_offset)
    wanted = msgspec.structs.replace(ANY, where=where, newest=newest)
    return await scan(partition, span, wanted, Pace(FAST), until_s=1e9)


async def fill_plain(partition: Partition, batches: int) -> None:
    """Batches of a record of 1 kB, each with a key of its own."""
    for n in range(batches):
        await append(partition, build([b"v" * 1000], keys=[b"k%d" % n], headers=[{"n": b"h%d" % n}]))


@pytest.mark.parametrize("newest", [False, True])
async def test_a_key_is_found_without_reading_the_rest(
    tmp_path: Path, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sealed segments only the batch with the key is read; by headers, if the topic says so."""
    monkeypatch.setattr(scan_module, "FIRST_WINDOW", 1)
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 60)
        sealed = len(partition.log.sealed_segments())
        scanned = await searched(partition, Where(key=b"k3"), newest=newest)
        await built(partition, "key,header:n")
        for where in (Where(key=b"k3"), Where(headers={"n": b"h3"}), Where(key=b"k3", contains=b"v")):
            found = await searched(partition, where, newest=newest)
            assert [each.offset for each in found.found] == [3] == [each.offset for each in scanned.found]
            assert scanned.segments_by_index == 0
            assert sealed - 1 <= found.segments_by_index <= sealed
        missing = await searched(partition, Where(key=b"none"), newest=newest)
        assert not missing.found and sealed - 1 <= missing.segments_by_index <= sealed
        by_trace_id = await searched(partition, Where(trace_id=b"t" * 16), newest=newest)
        assert by_trace_id.segments_by_index == 0


@pytest.mark.parametrize("newest", [False, True])
async def test_equal_hashes_are_no_match(
    tmp_path: Path, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every record is a candidate then, and is compared by its own bytes."""
    monkeypatch.setattr(scan_module, "FIRST_WINDOW", 1)
    monkeypatch.setattr("laminar.node.find.index_terms.digest_of", lambda value: b"\x80" * 8)
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 60)
        await built(partition)
        for n in (0, 31, 59):
            found = await searched(partition, Where(key=b"k%d" % n), newest=newest)
            assert [each.offset for each in found.found] == [n] and found.segments_by_index
        assert not (await searched(partition, Where(key=b"other"), newest=newest)).found


async def test_nothing_is_indexed_before_it_is_committed(tmp_path: Path) -> None:
    """A sealed segment of a replica that knows of no commit has no index; once it knows, it has."""
    three = ConfigurationRecord(voters=((1, "here"), (2, "b"), (3, "c")))
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 30)
        last = partition.log.sealed_segments()[-1].last_index
        size = sum(each.size for each in partition.log.sealed_segments())
    async with lone_partition(tmp_path, settings=SEGMENTS, voters=three) as partition:
        assert partition.context.committed_index < last == partition.log.sealed_segments()[-1].last_index
        indexer = await built(partition)
        assert find_files(partition) == []
        assert indexer.statistics() == {
            "unindexed_bytes": size,
            "indexed_segments": 0,
            "indexed_bytes": 0,
            "errors": 0,
        }
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        indexer = await built(partition)
        assert len(find_files(partition)) == len(partition.log.sealed_segments())
        assert indexer.statistics()["unindexed_bytes"] == 0
        found = await searched(partition, Where(key=b"k11"))
        assert [each.offset for each in found.found] == [11]


async def test_a_build_that_is_cut_off_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ends; the next start removes what it left, and builds it."""
    monkeypatch.setattr(scan_module, "SLICE_FRAMES", 1)
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 30)
        await until(lambda: partition.log.written_index == partition.log.last_index)
        indexer = indexer_of(partition)
        for slices in (0, 1, 3):
            seen = 0
            original = Indexer._add

            async def add(
                self: Indexer, *args: object, original: Callable[..., object] = original, limit: int = slices
            ) -> object:
                nonlocal seen
                seen += 1
                if seen > limit:
                    raise asyncio.CancelledError
                return await original(self, *args)  # type: ignore[misc]

            with monkeypatch.context() as patch:
                patch.setattr(Indexer, "_add", add)
                # As in a process that ends: nothing of it is tidied up.
                patch.setattr(indexing, "_discard", lambda disk, path: None)
                with pytest.raises(asyncio.CancelledError):
                    await indexer.run_pass()
            assert [each.suffixes for each in find_files(partition, "*.find*")] == [[".find", ".new"]]
            found = await searched(partition, Where(key=b"k3"))
            assert [each.offset for each in found.found] == [3] and not found.segments_by_index
        find_files(partition, "*.find*")[0].with_name(f"{99999:020d}.find").write_bytes(b"of none")
        await built(partition)
        sealed = partition.log.sealed_segments()
        assert [each.name for each in find_files(partition, "*.find*")] == [
            f"{each.first_index:020d}.find" for each in sealed
        ]


async def test_an_index_goes_with_its_segment(tmp_path: Path) -> None:
    """By retention; and with the setting that asked for it."""
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 60)
        await built(partition)
        before = find_files(partition)
        keeper(At(), Rules(retention_bytes=20_000)).check(partition)
        await settled_start(partition)
        kept = {f"{each.first_index:020d}.find" for each in partition.log.sealed_segments()}
        await until(lambda: {each.name for each in find_files(partition)} <= kept)
        assert 0 < len(find_files(partition)) < len(before)
        await built(partition)
        assert len(find_files(partition)) == len(partition.log.sealed_segments())
        await built(partition, None)
        assert len(find_files(partition)) == len(partition.log.sealed_segments())
        await built(partition, "")
        assert find_files(partition) == []


async def test_a_damaged_segment_is_scanned_and_tried_again_later(tmp_path: Path) -> None:
    """No index leaves out what could not be read: the search says what is damaged."""
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 30)
        row = partition.log.index_entry(4)
        path = partition.log.segment_of(4).file.path
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await until(lambda: partition.end_offset == 30)
        rot(path, row.position + row.size - 100)
        indexer = indexer_of(partition)
        while await indexer.run_pass():
            pass
        assert await indexer.run_pass() == 0
        assert indexer.statistics()["errors"] == 1
        assert len(find_files(partition)) == len(partition.log.sealed_segments()) - 1
        answer = await searched(partition, Where(key=b"k20"))
        assert (answer.ended, answer.damaged) == ("damaged", (row.base_offset, row.base_offset + 1))


@pytest.mark.parametrize("newest", [False, True])
async def test_damage_that_comes_after_the_index_is_named(tmp_path: Path, newest: bool) -> None:
    """If the batch may have what is asked; else it isn't read, as it is known not to have it."""
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await fill_plain(partition, 30)
        await built(partition)
        row = partition.log.index_entry(4)
        path = partition.log.segment_of(4).file.path
    async with lone_partition(tmp_path, settings=SEGMENTS) as partition:
        await until(lambda: partition.end_offset == 30)
        rot(path, row.position + row.size - 100)
        at = row.base_offset
        answer = await searched(partition, Where(key=b"k%d" % at), newest=newest)
        assert (answer.ended, answer.damaged) == ("damaged", (at, at + 1))
        assert (answer.high if newest else answer.low) == (at + 1 if newest else at)
        other = await searched(partition, Where(key=b"k%d" % (at + 1)), newest=newest)
        assert [each.offset for each in other.found] == [at + 1] and not other.ended


def test_a_setting_names_terms_once_and_those_that_are_known() -> None:
    """An older program leaves out what a newer one may add."""
    assert terms_of("key,trace_id,key") == ("key", "trace_id")
    assert terms_of("value,header:n") == ("header:n",)
    assert terms_of("") == ()
    assert setting_of({}) == DEFAULT and setting_of({"index": ""}) == ""
    # The low half of MurmurHash3 x64 128: an index outlives the program that wrote it.
    assert digest_of(b"hello").hex() == "029bbd41b3a7d8cb"


BY_INDEX, LOOKUP = "laminar.node.find.by_index", "laminar.log.key_index.lookup"
MUTANTS = (
    Mutant(
        "an index of another segment is taken for this one's",
        f"{BY_INDEX}:open_index",
        "if index.covered == covered else None",
        "",
    ),
    Mutant(
        "the last of a page are all that there are",
        f"{BY_INDEX}:ByIndex.following",
        "not is_more or len(batches) < len(found)",
        "True",
    ),
    Mutant(
        "the first of a page are all that there are",
        f"{BY_INDEX}:ByIndex.preceding",
        "not is_more or wanted <= len(found)",
        "True",
    ),
    Mutant(
        "a batch that begins before the range is left out",
        f"{BY_INDEX}:ByIndex.preceding",
        "sum(each > low for each in found) + 1",
        "sum(each > low for each in found)",
    ),
    Mutant(
        "a search may begin inside a batch",
        f"{BY_INDEX}:ByIndex.following",
        "or low not in (segment.first_offset, border)",
        "",
    ),
    Mutant(
        "what was not read of an index's batches counts as looked at",
        "laminar.node.find.scan:_Scan._oldest_by_index",
        "is_whole = stretch.is_whole and len(read) == len(stretch.batches)",
        "is_whole = stretch.is_whole",
    ),
    Mutant(
        "a step in which an index finds nothing is the end",
        "laminar.node.find.scan:_Scan._oldest_by_index",
        "return Examined(result.low, result.low)",
        "return Examined(end, end)",
    ),
    Mutant(
        "only the first page of a hash is looked at",
        f"{LOOKUP}:KeyIndex._lower_bound",
        "low = guess + 1",
        "return block.pages, 0",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_wrong_search_by_index_is_noticed(
    mutant: Mutant, put_in: Callable[[Mutant], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison with a loop over all records."""
    put_in(mutant)
    assert await noticed(
        lambda seed: test_random_steps_by_index_find_what_a_loop_over_all_finds(
            tmp_path / str(seed), seed, monkeypatch
        )
    )
