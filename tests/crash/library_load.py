"""A run of the library under the recorder: `python -m tests.crash.library_load run|recover ...`.

`run` makes logs, appends in bursts with rests, and with `--mixed` also trims, deletes, makes anew and changes
policies. `recover` opens a folder that a crash left, notes what it shows a reader, and appends a little. Both
end in order, so that no call is cut off before it is recorded, and save what they did for the checker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path

from laminar.log import StorageSettings
from laminar.log.disk.disk import Disk, RealDisk
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.library.folder import LogFolder
from laminar.log.library.local_log import LocalLog
from tests.crash import mutants
from tests.crash.acts import Act, Diary, value

KIB = 1024
# Small, so that a run of seconds rolls every kind of file many times.
SETTINGS = StorageSettings(
    segment_size_bytes=24 * KIB,
    first_journal_file_bytes=32 * KIB,
    journal_file_bytes=128 * KIB,
    checkpoint_bytes=96 * KIB,
    max_frame_bytes=64 * KIB,
    gather_bytes=8 * KIB,
    recent_bytes=256 * KIB,
    idle_marker_ms=2,
)
INTERVAL = FlushPolicy(interval_ms=20)


class Rebooted(RealDisk):
    """The disk after the machine lost power: whatever was written and not synced may be gone.

    Each one is of another boot, as power may be lost again.
    """

    def __init__(self) -> None:
        self._boot_id = os.urandom(16)

    def boot_id(self) -> bytes:
        return self._boot_id


def disk_after(crash: str) -> Disk:
    return Rebooted() if crash == "power" else RealDisk()


class Writer:
    """One log's only writer, so that it knows each record's offset before it is appended."""

    def __init__(
        self, folder: LogFolder, name: str, diary: Diary, rng: random.Random, *, mixed: bool
    ) -> None:
        self._folder = folder
        self._name = name
        self._diary = diary
        self._rng = rng
        self._mixed = mixed
        self._life = 0
        self._log: LocalLog

    async def run(self, until: int) -> None:
        await self._create(INTERVAL if self._mixed and self._rng.random() < 0.5 else COMMIT)
        while self._diary.now() < until:
            for _ in range(self._rng.choice((1, 3, 8))):
                await self._burst(self._rng.choice((1, 2, 6)))
            await asyncio.sleep(self._rng.choice((0, 0.002, 0.01, 0.04)))
            if self._mixed:
                await self._disturb()

    async def _disturb(self) -> None:
        what = self._rng.random()
        if what < 0.12:
            await self._trim()
        elif what < 0.16:
            await self._policy(COMMIT if self._log.flush.is_interval else INTERVAL)
        elif what < 0.18:
            await self._delete()
            await self._create(COMMIT)

    async def _create(self, flush: FlushPolicy) -> None:
        self._life += 1
        began = self._diary.now()
        self._note("create", began, None)
        self._log = await self._folder.log(self._name)
        self._note("create", began, self._diary.now())
        if flush.is_interval:
            await self._policy(flush)

    async def _policy(self, flush: FlushPolicy) -> None:
        began = self._diary.now()
        if flush.is_interval:
            self._note("policy", began, None, interval=True)
        await self._folder.log(self._name, flush=flush)
        self._note("policy", began, self._diary.now(), interval=flush.is_interval)

    async def _delete(self) -> None:
        began = self._diary.now()
        self._note("delete", began, None)
        await self._folder.delete(self._name)
        self._note("delete", began, self._diary.now())

    async def _trim(self) -> None:
        if self._log.end_offset > self._log.start_offset:
            offset = self._rng.randint(self._log.start_offset, self._log.end_offset)
            began = self._diary.now()
            self._note("trim", began, None, offset=offset)
            start = await self._log.trim_before(offset)
            self._note("trim", began, self._diary.now(), offset=offset, stop=start)

    async def _burst(self, appends: int) -> None:
        counts = [self._rng.choice((1, 1, 4, 12)) for _ in range(appends)]
        offset, waiting = self._log.end_offset, []
        for count in counts:
            waiting.append(self._append(offset, offset + count))
            offset += count
        await asyncio.gather(*waiting)
        if self._log.flush.is_interval:
            began = self._diary.now()
            synced = self._log.end_offset - self._log.unsynced_records
            self._note("synced", began, began, stop=synced)

    async def _append(self, offset: int, stop: int) -> None:
        values = [value(self._name, self._life, each) for each in range(offset, stop)]
        began = self._diary.now()
        self._note("append", began, None, offset=offset, stop=stop)
        receipt = await self._log.append(values)
        self._note("append", began, self._diary.now(), offset=offset, stop=stop)
        assert (receipt.offset, receipt.next_offset) == (offset, stop), receipt

    def _note(self, doing: str, began: int, ended: int | None, **fields: int | bool) -> None:
        note(self._diary, doing, self._name, self._life, began, ended, **fields)

    async def go_on(self, life: int) -> None:
        """After a crash: say what is there, and append a little behind it."""
        self._life = life
        began = self._diary.now()
        self._log = await self._folder.log(self._name, create=False)
        self._note("told", began, self._diary.now(), stop=self._log.end_offset)
        for _ in range(2):
            await self._burst(2)


def note(
    diary: Diary, doing: str, name: str, life: int, began: int, ended: int | None, **fields: int | bool
) -> None:
    diary.acts.append(Act(doing=doing, log=name, life=life, began=began, ended=ended, **fields))  # type: ignore[arg-type]


async def run(folder: Path, diary: Diary, *, seed: int, seconds: float, mixed: bool) -> None:
    rng = random.Random(seed)
    until = diary.now() + int(seconds * 1e9)
    opened = await LogFolder.open(folder, settings=SETTINGS)
    writers = [Writer(opened, name, diary, random.Random(rng.random()), mixed=mixed) for name in "abcdefgh"]
    await asyncio.gather(*(writer.run(until) for writer in writers))
    await opened.close()


async def recover(folder: Path, diary: Diary, *, crash: str, lives: dict[str, int]) -> None:
    opened = await LogFolder.open(folder, settings=SETTINGS, disk=disk_after(crash))
    for name, life in lives.items():
        if name in opened.names:
            await Writer(opened, name, diary, random.Random(name), mixed=False).go_on(life)
        else:
            began = diary.now()
            note(diary, "delete", name, life, began, began)
    await opened.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "recover"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("acts", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--mutant")
    parser.add_argument("--crash", choices=("kill", "power"), default="kill")
    parser.add_argument("--lives", default="")
    given = parser.parse_args()
    if given.mutant:
        mutants.apply(given.mutant)
    diary = Diary()
    if given.what == "run":
        asyncio.run(run(given.folder, diary, seed=given.seed, seconds=given.seconds, mixed=given.mixed))
    else:
        lives = {
            name: int(life)
            for name, _, life in (each.partition(":") for each in given.lives.split(",") if each)
        }
        asyncio.run(recover(given.folder, diary, crash=given.crash, lives=lives))
    diary.save(given.acts)


if __name__ == "__main__":
    main()
