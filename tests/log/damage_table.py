"""The table of damage: each kind of file of a folder, damaged in each way, and what becomes of the records.

One file (or both copies of a document) is damaged at a time, in a folder that was closed in order and in one
whose process was killed. Then it is opened twice. Three outcomes are right: *healed* (every acknowledged
record is there), *refused* (an error that names a file), *said* (the log is marked, or a read gets an error
that names the offsets). A record that is missing without a word, or whose bytes were in a segment after the
damage and are nowhere after the starts, is a defect.

    python -m tests.log.damage_table     every case, as a table (make log-damage)
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar.log import DamagedRange, Log, Storage, StorageError, recover_node
from laminar.log.key_index.writer import KeyIndexWriter
from laminar.log.segment.quarantine import Sealed
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import HOME, LOGS, SMALL, contents, frame_for, manifest_entry, open_inline, settle

BLOCK = 4096
_TRASH = "data/trash"
# As a node names it (`laminar.node.partition.snapshot`), which passes over one that does not hold.
DERIVED = "derived"
FIRSTS = (1, 5, 9)
ENTRIES = 14
_KINDS = (
    (re.compile(r".*/checkpoint-.*"), "checkpoint"),
    (re.compile(r".*/manifest-.*"), "manifest"),
    (re.compile(r"data/layout-.*"), "layout"),
    (re.compile(r".*/derived-.*"), "derived"),
    (re.compile(r".*/health-.*"), "notes"),
    (re.compile(r".*/journal-\d+"), "journal"),
    (re.compile(r".*/spare.*"), "spare"),
    (re.compile(r".*/end-mark"), "end mark"),
    (re.compile(r".*\.index"), "index"),
    (re.compile(r".*\.find"), "key index"),
    (re.compile(r".*/0*1\.log"), "first segment"),
    (re.compile(r".*/0*5\.log"), "middle segment"),
    (re.compile(r".*/0*9\.log"), "last segment"),
)
_COPIES = ("checkpoint", "manifest", "layout", "notes", "derived")


@dataclass(frozen=True)
class Folder:
    """A folder before the damage, and every acknowledged frame by log."""

    disk: FaultDisk
    frames: dict[int, list[bytes]]


@dataclass(frozen=True)
class Case:
    """`paths` are damaged by `how`."""

    folder: str
    kind: str
    how: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.folder}, {self.kind}, {self.how}"


def kind_of(path: str) -> str | None:
    return next((kind for pattern, kind in _KINDS if pattern.fullmatch(path)), None)


async def _make(*, clean: bool) -> Folder:
    """Two logs: one of three segments, one of a single one. Not clean: what came last is in the journal, and
    in the segments, but in no checkpoint.
    """
    disk = FaultDisk()
    _recover(disk)
    storage = open_inline(disk)
    logs = [storage.create_log("long", 1), storage.create_log("short", 2)]
    await storage.sync()
    await storage.write_manifest([manifest_entry(1), manifest_entry(2)])
    for index in range(1, ENTRIES + 1):
        for log in logs:
            opens = index == 1 or (log.log_id == 1 and index in FIRSTS)
            log.append([frame_for(log, [b"%d-%d " % (log.log_id, index) * 90] * 2, term=1, opens=opens)])
        await storage.sync()
        if index == ENTRIES - 2:
            storage.record_hard_state(101, term=3, vote=1)
            sealed = Sealed(last_index=4, last_term=1, size=0, digest=b"", verified_ms=1)
            storage._damage.verified(logs[0], 1, sealed)
            await storage._damage.record(logs[0])
            await storage.write_log_document(logs[0], DERIVED, b"a shortcut that nobody needs" * 400)
            await storage.checkpoint()
    await storage.sync()
    for segment in logs[0].sealed_segments():
        writer = KeyIndexWriter(disk.open(segment.file.key_index_path, create=True), segment.covered, ["key"])
        for index in range(segment.first_index, segment.last_index + 1):
            writer.add("key", [b"%08d" % index], logs[0].index_entry(index).base_offset)
        writer.finish()
    frames = {log.log_id: contents(log) for log in logs}
    if clean:
        await storage.close()
    else:
        await settle(storage)
    disk.kill()
    return Folder(disk, frames)


def _recover(disk: FaultDisk) -> None:
    """What comes before the homes are opened, as in a node."""
    recover_node(
        disk, "data", shards=1, shard_of=lambda entry, shards: 0, settings=SMALL, rng=random.Random(1)
    )


def files_of(disk: FaultDisk) -> Iterator[str]:
    """Every file below home and logs, and the layout."""
    yield from (f"data/{name}" for name in disk.list("data") if name.startswith("layout-"))
    for top in (HOME, LOGS, _TRASH):
        for name in disk.list(top):
            if top == HOME and not name.startswith("damaged-"):
                if name != "lock":
                    yield f"{top}/{name}"
            else:
                yield from (f"{top}/{name}/{each}" for each in disk.list(f"{top}/{name}"))


def _flip(place: Callable[[int], int]) -> Callable[[FaultDisk, str], None]:
    def harm(disk: FaultDisk, path: str) -> None:
        file = disk.open(path)
        at = place(file.size())
        file.pwritev([bytes([file.pread(1, at)[0] ^ 4])], at)
        file.sync()

    return harm


def _zero(place: Callable[[int], int]) -> Callable[[FaultDisk, str], None]:
    def harm(disk: FaultDisk, path: str) -> None:
        file = disk.open(path)
        size = file.size()
        at = place(size) // BLOCK * BLOCK
        file.pwritev([bytes(min(BLOCK, size - at))], at)
        file.sync()

    return harm


def _cut(keep: Callable[[int], int]) -> Callable[[FaultDisk, str], None]:
    def harm(disk: FaultDisk, path: str) -> None:
        file = disk.open(path)
        file.truncate(keep(file.size()))
        file.sync()

    return harm


def _delete(disk: FaultDisk, path: str) -> None:
    disk.unlink(path)
    disk.sync_directory(path.rpartition("/")[0])


HOW: dict[str, Callable[[FaultDisk, str], None]] = {
    "a bit of the first byte": _flip(lambda size: 0),
    "a bit in the middle": _flip(lambda size: size // 2),
    "a bit of the last byte": _flip(lambda size: size - 1),
    "the first 4 KiB zeroed": _zero(lambda size: 0),
    "4 KiB in the middle zeroed": _zero(lambda size: size // 2),
    "the last 4 KiB zeroed": _zero(lambda size: size - 1),
    "a byte short": _cut(lambda size: size - 1),
    "half": _cut(lambda size: size // 2),
    "0 bytes": _cut(lambda size: 0),
    "deleted": _delete,
}


def folders() -> dict[str, Folder]:
    return {
        "clean": asyncio.run(_make(clean=True)),
        "killed": asyncio.run(_make(clean=False)),
    }


def cases(made: dict[str, Folder]) -> Iterator[Case]:
    """Each file alone, and both copies of each document."""
    for name, folder in made.items():
        copies: dict[str, list[str]] = {}
        for path in files_of(folder.disk):
            kind = kind_of(path)
            assert kind is not None, f"{path} is of no kind that is known here"
            for how in HOW:
                yield Case(name, kind, how, (path,))
            if kind in _COPIES:
                copies.setdefault(kind, []).append(path)
        for kind, paths in copies.items():
            for how in HOW:
                yield Case(name, f"{kind}, both copies", how, tuple(paths))


def outcome(made: dict[str, Folder], case: Case) -> str:
    """What becomes of a case: healed, refused or said. Raises `AssertionError` for a defect."""
    folder = made[case.folder]
    disk = folder.disk.copy()
    for path in case.paths:
        HOW[case.how](disk, path)
    every = [frame for frames in folder.frames.values() for frame in frames]
    before = _bytes_of(disk, LOGS)
    held = [frame for frame in every if frame in before]
    worst = "healed"
    for _ in range(2):
        found = asyncio.run(_look(disk, folder))
        worst = max(worst, found, key=("healed", "refused", "said").index)
        disk.kill()
    after = _bytes_of(disk, "")
    lost = sum(frame not in after for frame in held)
    assert not lost, f"{lost} batches were in a segment, and the starts have removed them"
    return worst


def _bytes_of(disk: FaultDisk, top: str) -> bytes:
    return b"".join(bytes(disk.held(path)) for path in files_of(disk) if path.startswith(top))


async def _look(disk: FaultDisk, folder: Folder) -> str:
    try:
        _recover(disk)
        storage = open_inline(disk)
    except StorageError as error:
        assert HOME in str(error) or LOGS in str(error), f"a refusal that names nothing: {error}"
        return "refused"
    found = "healed"
    for log_id, frames in folder.frames.items():
        if await _told(storage, log_id, frames):
            found = "said"
    return found


async def _told(storage: Storage, log_id: int, frames: list[bytes]) -> bool:
    """Whether records are missing, and it is said; raises `AssertionError` where it is not said."""
    log = storage.logs.get(log_id)
    if log is None:
        named = {entry.log_id for entry in storage.manifest.entries}
        known = storage.manifest.known
        assert log_id in named or not known, f"log {log_id} is gone, and no manifest names it"
        return True
    missing = 0
    for index, frame in enumerate(frames, 1):
        if index > log.last_index:
            assert log.recovering, f"log {log_id} ends at {log.last_index} without a mark"
            missing += 1
            continue
        try:
            [read] = await log.read(index, index, max_bytes=1)
        except DamagedRange as damage:
            assert damage.first_index <= index <= damage.last_index
            missing += 1
        else:
            assert frame == bytes(read), f"log {log_id}, entry {index}: other bytes"
    await _offsets_told(log)
    return bool(missing) or log.recovering


async def _offsets_told(log: Log) -> None:
    """Nobody is given what begins after the offset that he asks for."""
    for offset in range(log.start.offset, log.next_offset):
        try:
            index = await log.find_offset(offset)
        except DamagedRange as damage:
            assert damage.first_offset <= offset < damage.next_offset
        else:
            assert index is not None
            row = log.index_entry(index)
            assert row.base_offset <= offset < row.next_offset, f"asked for {offset}, got {row}"


def main() -> int:
    logging.disable(logging.CRITICAL)
    made = folders()
    table: dict[tuple[str, str, str], Counter[str]] = {}
    defects = 0
    for case in cases(made):
        try:
            found = outcome(made, case)
        except Exception as error:  # noqa: BLE001  # whatever it is, the table goes on and ends 1
            found = "DEFECT"
            defects += 1
            print(f"{case} {case.paths}: {type(error).__name__}: {error}")
        table.setdefault((case.folder, case.kind, case.how), Counter())[found] += 1
    for (folder, kind, how), outcomes in table.items():
        print(f"{folder:7} {kind:28} {how:28} {', '.join(sorted(outcomes))}")
    print(f"log-damage: cases={sum(map(Counter.total, table.values()))} defects={defects}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
