"""Rules of durability switched off: the recorder and the model must notice each."""

from __future__ import annotations

from tests.mutation import Mutant


def _mutant(where: str, old: str, new: str) -> Mutant:
    return Mutant(where, f"laminar.log.{where}", old, new)


MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "frames are not synced": (
        _mutant("commit.journal:Journal.write", "self._file.pwritev_synced(", "self._file.pwritev("),
    ),
    "directories are not synced": (_mutant("disk.disk:RealDisk.sync_directory", "os.fsync(fd)", "pass"),),
    "recovery does not write again what it read": (
        _mutant("recovery.store:recover_store", "_write_again(disk, store, scan.unsure)", "pass"),
        _mutant(
            "segment.segment_file:SegmentFile.write",
            "size = self._data.pwritev(frames, position)",
            "size = sum(map(len, frames))\n"
            '    if bytes(self._data.open().pread(size, position)) != b"".join(frames):\n'
            "        self._data.pwritev(frames, position)",
        ),
        _mutant(
            "commit.segment_writer:SegmentWriter.adopt",
            "if last.file.data().size() != last.size:",
            "if False:",
        ),
    ),
}


def apply(name: str) -> None:
    """Switch a rule off in this process. Raises `LookupError` when the code it changes is not there."""
    for mutant in MUTANTS[name]:
        mutant.apply()
