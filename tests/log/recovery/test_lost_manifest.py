"""Homes of shards that lost their manifest: set aside, begun anew, and never taken for new ones."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.log import DamagedDocument, RealDisk, Storage, recover_node, shard_store
from laminar.log.format.manifest import Manifest
from laminar.log.tools.verification import verify
from tests.disks.fault_disk import FaultDisk, PowerCut
from tests.log.histories import HOME, SMALL, manifest_entry, open_inline, run
from tests.log.recovery.test_node import _fill, _recover, _shard_of

HOW = ("rotten", "missing", "home gone")


def harm(disk: FaultDisk, how: str, home: str = HOME) -> None:
    if how == "home gone":
        disk.remove_tree(home)
        disk.sync_directory("data/shards")
        return
    for name in disk.list(home):
        if name.startswith("manifest-"):
            if how == "rotten":
                disk.rot(f"{home}/{name}", 20)
            else:
                disk.unlink(f"{home}/{name}")
    disk.sync_directory(home)


def known(disk: FaultDisk, home: str) -> bool:
    manifest = Manifest(disk, home)
    manifest.read()
    assert manifest.set_aside
    return manifest.known


def held_below(disk: FaultDisk, top: str) -> dict[str, bytes]:
    files = disk.files(top) if disk.exists(top) else []
    return {path: bytes(disk.held(path)) for path, _ in files if not path.endswith("/lock")}


@pytest.mark.parametrize("how", HOW)
def test_a_home_without_its_manifest_is_set_aside_and_the_others_go_on(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it held is there still; it comes up empty and says that it does not know what was here."""

    async def main() -> None:
        disk = FaultDisk()
        shards = _recover(disk, 2)
        held = await _fill(disk, shards, 4, b"value")
        disk.kill()
        harm(disk, how)
        home, logs, other = (held_below(disk, top) for top in (HOME, "data/logs", "data/shards/1-1"))
        assert shards == _recover(disk, 2)

        assert logs.keys() <= held_below(disk, "data/logs").keys()
        if home:
            kept = held_below(disk, f"{HOME}/damaged-1")
            names = ("checkpoint-", "journal-", "manifest-")
            assert kept == {
                path.replace(HOME, f"{HOME}/damaged-1"): content
                for path, content in home.items()
                if path.startswith(tuple(f"{HOME}/{name}" for name in names))
            }
            [line] = [each.getMessage() for each in caplog.records if each.levelno == logging.CRITICAL]
            assert HOME in line and f"{HOME}/damaged-1" in line
        assert not known(disk, HOME) and known(disk, "data/shards/1-1")
        storage = open_inline(disk)
        assert ({}, {}, []) == (storage.logs, storage.hard_states, storage.manifest.entries)
        storage = open_inline(disk, home="data/shards/1-1")
        assert {each for each in held if each % 2} == set(storage.logs)
        assert other.keys() & held_below(disk, "data/shards/1-1").keys()
        disk.kill()
        before = len(caplog.records)
        assert shards == _recover(disk, 2)
        assert ["damaged-1"] * bool(home) == [n for n in disk.list(HOME) if n.startswith("damaged-")]
        assert not known(disk, HOME) and before == len(caplog.records), "it is set aside once"

    run(main())


@pytest.mark.parametrize("how", HOW)
def test_a_crash_at_any_step_of_it_leaves_no_home_that_passes_for_a_new_one(how: str) -> None:
    """What its logs and votes were is kept, and that something is missing is never forgotten."""

    async def main() -> None:
        rng = random.Random(6)
        step = 0
        done = False
        while not done:
            step += 1
            disk = FaultDisk()
            await _fill(disk, _recover(disk, 2), 2, b"value")
            disk.kill()
            harm(disk, how)
            disk.crash(rng, keep=0.0)
            home = held_below(disk, HOME)
            logs = held_below(disk, "data/logs")
            disk.cut_after = disk.steps + step
            try:
                _recover(disk, 2)
                done = True
            except PowerCut:
                pass
            disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            _recover(disk, 2, seed=2)
            assert not known(disk, HOME), step
            storage = open_inline(disk)
            assert not storage.logs and not storage.manifest.entries
            assert logs.items() <= held_below(disk, "data/logs").items()
            everything = set(held_below(disk, "data").values())
            assert {content for path, content in home.items() if "/spare" not in path} <= everything, step

    run(main())


@pytest.mark.parametrize("again", [1, 3])
def test_with_another_number_of_shards_what_is_not_known_may_belong_to_any(again: int) -> None:
    """All new homes say so, the entries that are known go on, and what was set aside stays beside them."""

    async def main() -> None:
        disk = FaultDisk()
        await _fill(disk, _recover(disk, 2), 4, b"value")
        disk.kill()
        harm(disk, "rotten")
        rotten = [content for path, content in held_below(disk, HOME).items() if "/manifest-" in path]
        shards = _recover(disk, again)

        homes = [shard_store("data", shards, shard) for shard in range(again)]
        assert not any(known(disk, home) for home in homes)
        entries = [each.log_id for home in homes for each in open_inline(disk, home=home).manifest.entries]
        assert [1, 3] == sorted(entries)
        kept = held_below(disk, "data/shards/1-0-damaged-1")
        assert rotten == [content for path, content in kept.items() if "/manifest-" in path]
        disk.kill()
        assert shards == _recover(disk, again)

    run(main())


def test_a_home_that_may_hold_logs_or_votes_is_no_new_one() -> None:
    """A checkpoint that names one, a journal that does, or a checkpoint that cannot be read; and not a home
    whose first start ended before its manifest was written.
    """

    def write_log(disk: FaultDisk, checkpoint: bool) -> None:
        async def main() -> None:
            storage = open_inline(disk)
            storage.create_log("t-0", 1)
            storage.record_hard_state(1, term=1, vote=0)
            await storage.sync()
            if checkpoint:
                await storage.checkpoint()

        run(main())

    def rot_checkpoint(disk: FaultDisk) -> None:
        open_inline(disk)
        disk.kill()
        for name in disk.list(HOME):
            if name.startswith("checkpoint-"):
                disk.rot(f"{HOME}/{name}", 20)

    cases: list[tuple[Callable[[FaultDisk], object], bool]] = [
        (open_inline, True),
        (lambda disk: write_log(disk, False), False),
        (lambda disk: write_log(disk, True), False),
        (rot_checkpoint, False),
    ]
    for prepare, is_new in cases:
        disk = FaultDisk()
        _recover(disk, 1)
        prepare(disk)
        disk.kill()
        harm(disk, "missing")
        _recover(disk, 1)
        assert is_new == known(disk, HOME)


def test_the_controllers_manifest_and_one_without_a_catalog_are_refused() -> None:
    """Group 0's log carries votes, and nobody says which replica it was; a program has nobody to ask."""

    async def main() -> None:
        disk = FaultDisk()
        shards = _recover(disk, 1)
        for home in ("data/controller", shard_store("data", shards, 0)):
            storage = open_inline(disk, home=home)
            await storage.write_manifest([])
            await storage.close()
        disk.kill()
        harm(disk, "rotten")
        before = held_below(disk, "data")
        with pytest.raises(DamagedDocument, match=r"no whole copy of manifest in data/shards/1-0"):
            open_inline(disk)
        assert before == held_below(disk, "data")
        harm(disk, "rotten", "data/controller")
        before = held_below(disk, "data")
        with pytest.raises(DamagedDocument, match=r"no whole copy of manifest in data/controller"):
            recover_node(disk, "data", shards=1, shard_of=_shard_of, settings=SMALL, rng=random.Random(1))
        assert {path: each for path, each in before.items() if "layout-" not in path} == {
            path: each for path, each in held_below(disk, "data").items() if "layout-" not in path
        }

    run(main())


def test_a_first_start_that_is_cut_off_at_any_step_leaves_no_home_that_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was never made is not missing: else what the catalog places here before it is asked what was here
    would count as lost, and a partition of one replica would never have a leader.
    """
    step, done = 0, False
    while not done:
        step += 1
        disk = FaultDisk()
        disk.cut_after = step
        try:
            _recover(disk, 2)
            done = True
        except PowerCut:
            pass
        disk.crash(random.Random(step), keep=0.5)
        caplog.clear()
        for count in (2, 3):
            shards = _recover(disk, count)
            assert [True] * count == [
                known(disk, shard_store("data", shards, shard)) for shard in range(count)
            ]
            assert (shards.number, True) == (count - 1, shards.made)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING], step
    assert step > 50


async def test_verify_says_that_a_home_lost_its_manifest(tmp_path: Path) -> None:
    """Both bad copies are damage; a home that was begun anew has a note, and its journal is read."""
    disk, data = RealDisk(), str(tmp_path)
    named: dict[str, Any] = {"shard_of": _shard_of, "settings": SMALL, "rng": random.Random(1)}
    recover_node(disk, data, shards=1, **named)
    storage = Storage.open(disk, f"{data}/shards/1-0", f"{data}/logs", settings=SMALL)
    await storage.write_manifest([manifest_entry(1)])
    await storage.close()
    for path in (tmp_path / "shards/1-0").glob("manifest-*"):
        path.write_bytes(path.read_bytes()[:-1])
    found = verify(data).findings
    assert 2 == sum("copy of the manifest" in each.what and each.severity == "damage" for each in found)

    recover_node(disk, data, shards=1, **named)

    found = [each for each in verify(data).findings if "damaged-1" not in each.file]
    [(file, severity)] = [(each.file, each.severity) for each in found if "manifest was lost" in each.what]
    assert (f"{data}/shards/1-0", "note") == (file, severity)
    assert not [each for each in found if each.severity == "damage"]
