"""Every log of a node under the shards of its next start, fewer or more (36 in docs/pitfalls.md)."""

from __future__ import annotations

import random

import pytest

from laminar.log import DamagedDocument, ReplicaEntry, ShardLayout, recover_node, shard_store
from laminar.log.commit.journal import journal_name, journal_numbers
from laminar.log.format.journal_codec import BLOCK_SIZE
from laminar.log.format.manifest import Manifest
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import SMALL, contents, frame_for, manifest_entry, open_inline, run, settle


def _shard_of(entry: ReplicaEntry, shards: int) -> int:
    return entry.partition_hash % shards


async def _fill(disk: FaultDisk, shards: ShardLayout, logs: int, value: bytes) -> dict[int, list[bytes]]:
    """Write to every log of a node through its shards; returns what is acknowledged, by log."""
    held: dict[int, list[bytes]] = {}
    for shard in range(shards.shards):
        storage = open_inline(disk, home=shard_store("data", shards, shard))
        mine = [manifest_entry(log_id) for log_id in range(1, logs + 1) if log_id % shards.shards == shard]
        await storage.write_manifest(mine)
        for entry in mine:
            log = storage.logs.get(entry.log_id) or storage.create_log(f"log-{entry.log_id}", entry.log_id)
            log.append([frame_for(log, [value])])
            storage.record_hard_state(entry.replica_id, term=log.last_index, vote=1)
        await storage.sync()
        held |= {log_id: contents(log) for log_id, log in storage.logs.items()}
        await settle(storage)
    return held


def _check_node(disk: FaultDisk, shards: ShardLayout, held: dict[int, list[bytes]]) -> None:
    found: dict[int, list[bytes]] = {}
    for shard in range(shards.shards):
        storage = open_inline(disk, home=shard_store("data", shards, shard))
        for entry in storage.manifest.entries:
            assert shard == _shard_of(entry, shards.shards)
            assert len(held[entry.log_id]) == storage.hard_states[entry.replica_id].term
            assert not storage.logs[entry.log_id].recovering
        found |= {log_id: contents(log) for log_id, log in storage.logs.items()}
        assert not storage.lost_hard_states
    assert held == found


def _recover(disk: FaultDisk, shards: int, seed: int = 1) -> ShardLayout:
    return recover_node(
        disk, "data", shards=shards, shard_of=_shard_of, settings=SMALL, rng=random.Random(seed)
    )


def test_pitfall_36_restart_with_fewer_and_with_more_shards() -> None:
    """2, 4, 1 and again 2 shards: everything acknowledged is there, with its votes, under its new owner."""

    async def main() -> None:
        disk = FaultDisk()
        rng = random.Random(36)
        for count in (2, 4, 1, 1, 2):
            shards = _recover(disk, count)
            held = await _fill(disk, shards, 5, b"with %d" % count)
            disk.crash(rng, keep=0.0)
        shards = _recover(disk, 3)
        disk.kill()
        _check_node(disk, shards, held)
        assert {f"{shards.number}-{shard}" for shard in range(3)} == set(disk.list("data/shards"))

    run(main())


@pytest.mark.parametrize("starts", [1, 2])
def test_what_a_start_recovers_is_opened_again_so_it_makes_no_journal_for_records(starts: int) -> None:
    """Else each start would fill files with zeros, of 4 MiB by default, and read them, for nothing."""

    async def main() -> None:
        disk = FaultDisk()
        for _ in range(starts):
            shards = _recover(disk, 2)
            sizes = [_newest_journal(disk, shard_store("data", shards, shard)) for shard in range(2)]
            held = await _fill(disk, shards, 2, b"value")
            used = [_newest_journal(disk, shard_store("data", shards, shard)) for shard in range(2)]
            disk.kill()
        shards = _recover(disk, 2)
        _check_node(disk, shards, held)
        assert [BLOCK_SIZE] * 2 == sizes
        assert min(used) >= SMALL.first_journal_file_bytes > BLOCK_SIZE

    run(main())


def _newest_journal(disk: FaultDisk, store: str) -> int:
    file = disk.open(f"{store}/{journal_name(journal_numbers(disk, store)[-1])}")
    try:
        return file.size()
    finally:
        file.close()


def test_pitfall_36_a_crash_at_any_step_of_the_change_leaves_old_or_new_homes() -> None:
    """Power goes at a step of a start with more shards, and the next start asks for yet another number."""

    async def main() -> None:
        rng = random.Random(36)
        step = 0
        done = False
        while not done:
            step += 3
            disk = FaultDisk()
            held = await _fill(disk, _recover(disk, 2), 3, b"value")
            disk.kill()
            disk.cut_after = disk.steps + step
            try:
                _recover(disk, 3)
                done = True
            except PowerCut:
                pass
            disk.crash(rng, keep=rng.choice([0.0, 0.5]))
            shards = _recover(disk, rng.choice([2, 3, 1]), seed=2)
            disk.kill()
            _check_node(disk, shards, held)

    run(main())


@pytest.mark.parametrize("how", ["rotten", "missing"])
def test_a_map_that_is_gone_is_told_by_the_homes(how: str) -> None:
    """Their number and count stand in their names: everything is there, also when another number of shards is
    wanted now.
    """

    async def main() -> None:
        for wanted in (3, 2):
            disk = FaultDisk()
            await _fill(disk, _recover(disk, 2), 5, b"first")
            disk.kill()
            held = await _fill(disk, _recover(disk, 3), 5, b"second")
            disk.kill()
            _harm_layout(disk, how)

            shards = _recover(disk, wanted)

            assert wanted == shards.shards
            _check_node(disk, shards, held)
            disk.kill()
            assert shards == _recover(disk, wanted)

    run(main())


def test_homes_that_are_all_gone_are_given_up_on_a_persons_word_only() -> None:
    """No disk loses all of them and keeps the logs: perhaps it is not mounted, and nothing is lost."""

    async def main() -> None:
        disk = FaultDisk()
        await _fill(disk, _recover(disk, 2), 3, b"value")
        disk.kill()
        for shard in range(2):
            disk.remove_tree(f"data/shards/1-{shard}")
        disk.sync_directory("data/shards")
        before = disk.files("data")
        with pytest.raises(DamagedDocument, match=r"a disk may not be mounted.* an empty folder 1-0"):
            _recover(disk, 2)
        assert before == disk.files("data")
        disk.make_directory("data/shards/1-0")

        shards = _recover(disk, 2)

        for shard in range(2):
            manifest = Manifest(disk, shard_store("data", shards, shard))
            manifest.read()
            assert not manifest.known

    run(main())


@pytest.mark.parametrize("how", ["rotten", "missing"])
@pytest.mark.parametrize("homes", ["of two numbers", "with a gap", "none"])
def test_homes_that_do_not_tell_the_layout_are_named_and_not_touched(how: str, homes: str) -> None:
    """A change of the number of shards was under way, or more is missing: nobody guesses."""

    async def main() -> None:
        disk = FaultDisk()
        await _fill(disk, _recover(disk, 3), 5, b"value")
        disk.kill()
        _harm_layout(disk, how)
        if homes == "of two numbers":
            disk.make_directory("data/shards/2-3")
        elif homes == "with a gap":
            disk.remove_tree("data/shards/1-1")
        else:
            for shard in range(3):
                disk.remove_tree(f"data/shards/1-{shard}")
        before = [each for each in disk.files("data") if not each[0].endswith("/lock")]
        said = r"no .*layout in data.* store directories in data/shards \("
        if (how, homes) == ("missing", "none"):
            said = r"data/shards has none of the 3 store directories 1-0 .* data/logs holds log-1-.* and more"
        with pytest.raises(DamagedDocument, match=said):
            _recover(disk, 3)

        assert before == [each for each in disk.files("data") if not each[0].endswith("/lock")]

    run(main())


def test_an_older_map_that_was_put_back_takes_no_home_with_it() -> None:
    """Its homes are gone, and those that are there hold the replicas: the start is refused, and says what to
    do. With the layout removed they tell it.
    """

    async def main() -> None:
        disk = FaultDisk()
        await _fill(disk, _recover(disk, 2), 5, b"first")
        disk.kill()
        older = {name: disk.held(f"data/{name}") for name in disk.list("data") if name.startswith("layout-")}
        held = await _fill(disk, _recover(disk, 3), 5, b"second")
        disk.kill()
        _harm_layout(disk, "missing")
        for name, content in older.items():
            file = disk.open(f"data/{name}", create=True)
            file.pwritev([content], 0)
            file.sync()
            file.close()
        disk.sync_directory("data")
        before = disk.files("data")

        with pytest.raises(DamagedDocument, match=r"number 1, .*\(2-0, 2-1, 2-2\)"):
            _recover(disk, 3)

        assert before == disk.files("data")
        _harm_layout(disk, "missing")
        shards = _recover(disk, 3)
        disk.kill()
        _check_node(disk, shards, held)

    run(main())


def test_homes_of_an_unfinished_change_that_hold_nothing_stop_no_start() -> None:
    """A first start may end before it has made its homes, and the next one while it changes their number."""

    async def main() -> None:
        begun = 0
        for steps in range(40, 200, 10):
            disk = FaultDisk()
            _recover(disk, 2)
            disk.cut_after = disk.steps + steps
            try:
                _recover(disk, 3)
                break
            except PowerCut:
                pass
            disk.crash(random.Random(1), keep=1.0)
            begun += "2-0" in disk.list("data/shards")
            for home in ("1-0", "1-1"):
                disk.remove_tree(f"data/shards/{home}")  # Laminar did not make them here, formerly
            assert 3 == _recover(disk, 3).shards
        assert begun > 2
        disk.cut_after = None

        assert 3 == _recover(disk, 3).shards

    run(main())


def _harm_layout(disk: FaultDisk, how: str) -> None:
    for name in disk.list("data"):
        if name.startswith("layout-"):
            if how == "rotten":
                disk.rot(f"data/{name}", 20)
            else:
                disk.unlink(f"data/{name}")
    disk.sync_directory("data")
