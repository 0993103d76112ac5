"""Each rule of durability switched off, one at a time: some test must notice.

A mutant is a few replacements of source text, each inside a function that is named; text that is not there
any more is an error, never a mutant that does nothing. It is run in a process of its own, which imports the
changed modules in place of the real ones and then runs the tests that must fail.

    python -m tests.log.mutants            all, as a table (make log-mutants)
    python -m tests.log.mutants NAME ...   some
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.mutation import need_pure_build

ROOT = Path(__file__).parents[2]
JOURNAL = "tests/log/commit/test_journal.py"
JOURNAL_END = "tests/log/commit/test_end_mark.py"
INTERVALS = "tests/log/commit/test_interval_flush.py"
INTERVAL_CRASHES = "tests/log/recovery/test_interval_crashes.py"
RESTARTS = "tests/log/recovery/test_restarts.py"
NODE_RECOVERY = "tests/log/recovery/test_node.py"
LOST_MANIFEST = "tests/log/recovery/test_lost_manifest.py"
HOLES = "tests/log/segment/test_holes.py"
CRASHES = "tests/log/recovery/test_crashes.py"
STORAGE = "tests/log/test_storage.py"
FULL_DISK = "tests/log/commit/test_full_disk.py"
SCRUBBER = "tests/log/integrity/test_scrubber.py"
MACHINE = "tests/log/test_machine.py::test_ten_thousand_steps_of_a_storage_agree_with_lists"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Change:
    """In `module`, inside `function` (dotted, as `Class.method`), `old` becomes `new`."""

    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A rule switched off, and the tests of which one must fail. `section` is of docs and design: 2, 3."""

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def _one(name: str, module: str, function: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, (Change(f"laminar.log.{module}", function, old, new),), tests)


MUTANTS = (
    _one(
        "rows of other frames are looked for before the bytes that were read",
        "format.index_entry",
        "is_frame_at",
        "start < 0 or ",
        "",
        "tests/log/segment/test_index.py::test_a_read_ends_before_whole_rows_of_other_entries",
    ),
    _one(
        "the scrubber reads what is not in its segment yet",
        "integrity.scrubber",
        "Scrubber._verify",
        "min(segment.last_index, log.written_index)",
        "segment.last_index",
        SCRUBBER,
    ),
    _one(
        "a failed log's entries count as written",
        "partition_log.log",
        "Log.written_index",
        "if self.files.failure is not None:",
        "if False:",
        SCRUBBER,
    ),
    _one(
        "the segment that is written to is never scrubbed",
        "integrity.scrubber",
        "Scrubber._due",
        "if segments:",
        "if False:",
        SCRUBBER,
    ),
    _one(
        "the entries of a hole hold no offsets",
        "segment.index_rebuild",
        "missing_rows",
        "records = min(next_offset - offset, _MOST_RECORDS)",
        "records = 0",
        HOLES,
    ),
    _one(
        "an offset is answered with what begins after it",
        "partition_log.entries",
        "LogEntries._offset_nowait",
        "if first_offset > offset:",
        "if False:",
        HOLES,
    ),
    _one(
        "a log ends before the first segment that is gone",
        "segment.loading",
        "load_segments",
        "if first > before.index + 1:",
        "if first > before.index + 1:\n            break\n        if False:",
        HOLES,
    ),
    _one(
        "a segment of which nothing can be told is removed",
        "recovery.salvage",
        "preserve_damaged_tail",
        "if file.data_size():",
        "if False:",
        HOLES,
    ),
    _one(
        "what an index says is cut off the end of a segment is not believed",
        "segment.loading",
        "_rebuilt_segment",
        "hinted_size=_ANY_SIZE if sealed else size",
        "hinted_size=size",
        f"{HOLES}::test_what_the_index_knows_of_what_is_cut_off_costs_no_mark",
    ),
    _one(
        "a replica learns of a hole only when somebody reads there",
        "recovery.rebuild",
        "Rebuild._load_notes",
        "if log.quarantine.add(hole):",
        "if False:",
        HOLES,
    ),
    _one(
        "any number of segments may be open and wait for a sync",
        "commit.segment_writer",
        "SegmentWriter._add_dirty",
        "len(self._waiting) > files.resources.files.unsynced_limit",
        "False",
        "tests/log/disk/test_open_files.py",
    ),
    _one(
        "a sync covers a write that was under way when it began",
        "disk.open_files",
        "Handle.sync",
        "writes = self._ended",
        "writes = self._begun",
        "tests/log/commit/test_write_under_way.py",
    ),
    _one(
        "journal files used again without the hard states in the checkpoint",
        "commit.segment_writer",
        "SegmentWriter._capture",
        "hard_states=dict(self.hard_states)",
        "hard_states={}",
        f"{JOURNAL}::test_pitfall_32_votes_of_idle_groups_survive_a_hundred_journal_files",
    ),
    _one(
        "a truncation is not in the journal",
        "recovery.replay",
        "Replay._apply_to_log",
        "log.truncate(index)",
        "pass",
        f"{CRASHES}::test_pitfall_30_conflict_truncation_with_a_crash_at_every_step",
    ),
    _one(
        "recovery ends without syncing what it wrote",
        "recovery.rebuild",
        "Rebuild.run",
        "writer.checkpoint()",
        "writer.sync = lambda snapshot: None; writer.checkpoint(); del writer.sync",
        f"{RESTARTS}::test_pitfall_33_what_a_restarted_replica_told_survives_power_loss",
    ),
    _one(
        "no prev_term: an entry follows any with the index before it",
        "partition_log.log",
        "Log.append",
        "or prev_term != last_term",
        "",
        f"{RESTARTS}::test_pitfall_31_an_entry_of_a_later_term_behind_another_predecessor_is_refused",
    ),
    _one(
        "an entry counts with the frame before its own",
        "partition_log.log",
        "Log._take_counted",
        "waiting[0][0] <= counted",
        "waiting[0][0] <= counted + 1",
        "tests/log/partition_log/test_log.py::test_durability_is_counted_per_entry",
    ),
    _one(
        "acknowledged before the sync",
        "commit.group_commit",
        "GroupCommit._write_frame",
        "place = self._journal.write(",
        "self.call_on_loop(partial(self._done, cuts, True, False))\n"
        "                place = self._journal.write(",
        CRASHES,
    ),
    _one(
        "a frame is not synced at all",
        "commit.journal",
        "Journal.write",
        "self._file.pwritev_synced(",
        "self._file.pwritev(",
        CRASHES,
    ),
    _one(
        "no idle marker",
        "commit.group_commit",
        "GroupCommit._write_idle_marker",
        "self._hand(_PendingGroup([], 0, self._cut_number, marks_end=True))",
        "pass",
        f"{JOURNAL}::test_pitfall_29_rot_in_the_last_acknowledged_batch_is_damage",
    ),
    _one(
        "a vote's frame without its twin",
        "commit.journal",
        "Journal.write",
        "length = sum(map(len, parts))",
        "length, hard_states = sum(map(len, parts)), []",
        f"{JOURNAL}::test_pitfall_29_rot_in_one_copy_of_a_vote_changes_nothing",
    ),
    _one(
        "a whole twin behind a torn frame is ignored",
        "recovery.journal_scan",
        "classify_frames",
        "each.head.flags & FrameFlag.HARD_STATE",
        "False",
        f"{JOURNAL}::test_pitfall_28_a_vote_in_a_whole_twin_behind_a_torn_frame_counts",
    ),
    _one(
        "recovery touches segments before the journal is synced",
        "recovery.store",
        "recover_store",
        "_write_again(disk, store, scan.unsure)",
        "pass",
        f"{RESTARTS}::test_pitfall_33_recovery_itself_may_be_cut_off_behind_any_step",
    ),
    _one(
        "what was read of the journal is only synced, not written again",
        "recovery.store",
        "_write_again",
        "file.pwritev([frame.stored], frame.position)",
        "pass",
        f"{RESTARTS}::test_pitfall_33_recovery_itself_may_be_cut_off_behind_any_step",
    ),
    Mutant(
        "bytes of a segment that look right are not written again",
        (
            Change(
                "laminar.log.segment.segment_file",
                "SegmentFile.write",
                "size = self._data.pwritev(frames, position)",
                "size = sum(map(len, frames))\n"
                '        if bytes(self._data.open().pread(size, position)) != b"".join(frames):\n'
                "            self._data.pwritev(frames, position)",
            ),
            Change(
                "laminar.log.commit.segment_writer",
                "SegmentWriter.adopt",
                "if last.file.data().size() != last.size:",
                "if False:",
            ),
        ),
        (f"{RESTARTS}::test_pitfall_33_bytes_that_look_right_are_written_again",),
    ),
    Mutant(
        "a checkpoint is overwritten in place",
        (
            Change(
                "laminar.log.disk.document",
                "Document.write",
                "number = files[0][0] + 1 if files else 1",
                "number = files[0][0] if files else 1",
            ),
            Change(
                "laminar.log.disk.document",
                "Document.write",
                "{self.name}.{copy}.new",
                "{self.name}-{number}.{copy}",
            ),
            Change("laminar.log.disk.document", "Document._write_file", "self.disk.unlink(path)", "pass"),
            Change("laminar.log.disk.document", "Document._write_file", "exclusive=True", "exclusive=False"),
            Change(
                "laminar.log.disk.document", "Document.write", "for _, name in files:", "for _, name in ():"
            ),
        ),
        ("tests/log/disk/test_document.py::test_rot_in_one_copy_and_a_crash_at_any_step_of_the_next_write",),
    ),
    _one(
        "a document that could not be written is there",
        "disk.document",
        "Document.write",
        "self._remove([*final, *fresh])",
        "pass",
        "tests/log/disk/test_document.py",
    ),
    _one(
        "a document's copies are in no synced directory when the old ones go",
        "disk.document",
        "Document.write",
        "self.disk.sync_directory(self.directory)",
        "pass",
        "tests/log/disk/test_document.py",
    ),
    _one(
        "log_start without its term",
        "partition_log.log",
        "Log.set_start",
        "START.pack(start.index, start.term,",
        "START.pack(start.index, 0,",
        MACHINE,
    ),
    _one(
        "going on in place after a torn tail",
        "recovery.journal_scan",
        "classify_frames",
        "if expected > written_lsn:",
        "if False:",
        f"{JOURNAL}::test_pitfall_28_a_torn_frame_hides_a_later_whole_one",
    ),
    _one(
        "a frame vouches for frames whose sync has not returned",
        "commit.journal",
        "Journal._encode",
        "durable_lsn=self.durable_lsn",
        "durable_lsn=self.lsn - 1",
        f"{JOURNAL}::test_pitfall_28_a_vote_in_a_whole_twin_behind_a_torn_frame_counts",
        CRASHES,
    ),
    _one(
        "the directory of a new journal file is not synced",
        "commit.journal",
        "Journal._roll",
        "self._disk.sync_directory(self._store)",
        "pass",
        MACHINE,
    ),
    _one(
        "after a failed sync of new directories each is made and synced again",
        "commit.segment_writer",
        "SegmentWriter._make_directories",
        'error.operation.startswith("sync")',
        "False",
        "tests/log/commit/test_new_directories.py",
    ),
    _one(
        "the directories of segments are not synced",
        "commit.segment_writer",
        "SegmentWriter.sync",
        "for directory, owner in snapshot.directories.items():",
        "for directory, owner in ():",
        CRASHES,
    ),
    Mutant(
        "the generation does not seed the CRC",
        (
            Change(
                "laminar.log.format.journal_codec",
                "encode_frame",
                "crc32c(packed, seed)",
                "crc32c(packed, 0)",
            ),
            Change(
                "laminar.log.format.journal_codec",
                "decode_frame",
                "_CRC_POSITION], seed)",
                "_CRC_POSITION], 0)",
            ),
        ),
        (f"{JOURNAL}::test_pitfall_28_a_clients_body_never_passes_for_a_frame",),
    ),
    _one(
        "a truncation reaches its segment before its record is synced",
        "partition_log.log",
        "Log.truncate",
        "self.quarantine.truncate(index)",
        "self.quarantine.truncate(index)\n"
        "        if kept is not None and kept.file.exists:\n"
        "            kept.file.data().truncate(kept.size)",
        CRASHES,
    ),
    _one(
        "a mark is recorded without the term in which the replica comes back",
        "format.journal_codec",
        "encode_mark",
        "if least_term:",
        "if False:",
        STORAGE,
    ),
    _one(
        "a checkpoint while segments wait for room",
        "commit.segment_writer",
        "SegmentWriter.prepare_checkpoint",
        "if self._batches:",
        "if False:",
        FULL_DISK,
    ),
    _one(
        "a segment that finds no room stops its log",
        "commit.segment_writer",
        "SegmentWriter._waits_for_room",
        "return self.waits and",
        "return False and",
        FULL_DISK,
    ),
    _one(
        "what is given up on a full disk waits for its turn",
        "commit.segment_writer",
        "SegmentWriter._make_room",
        "for action in new or",
        "for action in [] or [] and",
        FULL_DISK,
    ),
    _one(
        "what was given up before its turn is written in its turn",
        "commit.segment_writer",
        "SegmentWriter._write",
        "segment in self._removed or files.log_id in self._gone",
        "False",
        FULL_DISK,
    ),
    _one(
        "on a full disk all waits for ever",
        "commit.segment_writer",
        "SegmentWriter.apply",
        "self._batch_bytes > self._settings.max_unwritten_bytes // 2",
        "False",
        FULL_DISK,
    ),
    _one(
        "rows that found no room are written again",
        "segment.segment_file",
        "SegmentFile.write",
        "self._rows += rows",
        "self._rows += rows\n        if len(self._rows) >= _ROWS_AT_ONCE:\n            self._write_rows()",
        FULL_DISK,
    ),
    _one(
        "a checkpoint before the segments it names are synced",
        "commit.checkpoints",
        "Checkpointer._sync",
        "self._writer.sync(snapshot)",
        "pass",
        CRASHES,
    ),
    _one(
        "journal files go before the checkpoint is written",
        "commit.segment_writer",
        "SegmentWriter.write_checkpoint",
        "self._document.write(",
        "self.journal.delete_before(snapshot.place.file_number)\n        self._document.write(",
        MACHINE,
    ),
    _one(
        "a synced write is taken to cover the frames before it",
        "commit.journal",
        "Journal.write",
        "if sync and not self.unsynced_bytes:",
        "if sync:",
        f"{JOURNAL_END}::test_what_must_be_durable_is_so_with_all_frames_before_it",
    ),
    _one(
        "frames that are not synced stay so when the next journal file begins",
        "commit.journal",
        "Journal._roll",
        "if self.unsynced_bytes:",
        "if False:",
        f"{JOURNAL_END}::test_what_is_not_synced_is_so_before_the_next_journal_file_begins",
    ),
    _one(
        "batches reach their segment before their frame is synced",
        "commit.group_commit",
        "GroupCommit._gather",
        "while unsynced and unsynced[0].place.lsn <= durable_lsn:",
        "while unsynced:",
        f"{INTERVALS}::test_a_batch_reaches_its_segment_when_its_frame_is_synced",
    ),
    _one(
        "entries are acknowledged before it is recorded that they may not be synced",
        "partition_log.log",
        "Log.append",
        "if interval and not self._noted_unsynced:",
        "if False:",
        f"{INTERVAL_CRASHES}::test_a_power_loss_at_any_step_keeps_what_was_synced_and_says_so",
    ),
    _one(
        "frames that a kill cannot have torn pass for torn",
        "recovery.journal_scan",
        "classify_frames",
        "if scan.memory_kept:",
        "if False:",
        f"{JOURNAL_END}::test_rot_in_what_an_interval_log_acknowledged_is_damage",
    ),
    _one(
        "a loss of power is taken for a kill",
        "recovery.store",
        "recover_store",
        "checkpoint.boot_id == disk.boot_id()",
        "True",
        f"{JOURNAL_END}::test_a_torn_frame_of_an_interval_log_is_no_damage",
    ),
    _one(
        "the end mark is not asked",
        "recovery.journal_scan",
        "classify_frames",
        "if end is not None and not torn and expected <= written_lsn:",
        "if False:",
        f"{JOURNAL_END}::test_rot_of_a_flash_page_at_the_journals_end_is_never_silent",
    ),
    _one(
        "a journal file may be shorter than it was",
        "recovery.journal_scan",
        "read_journal",
        "if size < least:",
        "if False:",
        f"{JOURNAL_END}::test_a_journal_that_is_shorter_than_it_was_is_damage",
    ),
    _one(
        "a sync that failed under acknowledged entries is not told to the next start",
        "commit.journal",
        "Journal._sync",
        "self._note_failure()",
        "pass",
        f"{INTERVALS}::test_a_sync_that_fails_under_acknowledged_entries_is_told_to_the_next_start",
    ),
    _one(
        "the layout of shards is written before the homes it names",
        "recovery.node",
        "recover_node",
        "node.deal(recovered, wanted, shard_of)",
        "document.write(msgspec.msgpack.encode(wanted)); node.deal(recovered, wanted, shard_of)",
        f"{NODE_RECOVERY}::test_pitfall_36_a_crash_at_any_step_of_the_change_leaves_old_or_new_homes",
    ),
    _one(
        "a layout that is missing passes for that of a first start",
        "recovery.node",
        "_read_layout",
        "if not found and not document.exists():",
        "if not document.exists():",
        NODE_RECOVERY,
    ),
    _one(
        "homes of two numbers pass for those of a layout",
        "recovery.node",
        "_read_layout",
        "len(numbers) != 1",
        "len(numbers) == 0",
        NODE_RECOVERY,
    ),
    _one(
        "an older layout that was put back counts",
        "recovery.node",
        "recover_node",
        "_check_stores(disk, data_directory, current)",
        "pass",
        NODE_RECOVERY,
    ),
    _one(
        "a change of the manifest takes back another that is under way",
        "storage",
        "Storage.change_manifest",
        "def write() -> None:\n            self.manifest.change(change(self.manifest.by_key), known=known)",
        "changes = change(self.manifest.by_key)\n\n"
        "        def write() -> None:\n            self.manifest.change(changes, known=known)",
        "tests/log/test_storage.py",
    ),
    _one(
        "homes that are all gone are given up without a word",
        "recovery.node",
        "_refuse_without_stores",
        "missing == current.shards and held",
        "False",
        NODE_RECOVERY,
    ),
    _one(
        "a home that lost its manifest knows what it held",
        "recovery.store",
        "_read_manifest",
        "known=False",
        "known=True",
        LOST_MANIFEST,
    ),
    _one(
        "a home whose setting aside was cut off is taken as it is",
        "recovery.store",
        "_read_manifest",
        "elif manifest.set_aside:",
        "else:",
        LOST_MANIFEST,
    ),
    _one(
        "a used home without a manifest passes for a new one",
        "recovery.store",
        "_read_manifest",
        "_holds_something(disk, store)",
        "False",
        LOST_MANIFEST,
    ),
    _one(
        "what is left of a home without a manifest is not kept",
        "recovery.salvage",
        "preserve_store",
        '("checkpoint-", "journal-", "manifest-")',
        '("checkpoint-", "journal-")',
        LOST_MANIFEST,
    ),
    _one(
        "a home that is missing passes for one that was never made",
        "recovery.node",
        "recover_node",
        "if current.made:",
        "if False:",
        LOST_MANIFEST,
    ),
    _one(
        "a home that a first start has not made yet passes for one that is missing",
        "recovery.node",
        "recover_node",
        "if current.made:",
        "if found is not None:",
        LOST_MANIFEST,
    ),
    _one(
        "all homes count as made before they are",
        "recovery.node",
        "recover_node",
        "ShardLayout(1, shards, made=False)",
        "ShardLayout(1, shards)",
        LOST_MANIFEST,
    ),
    _one(
        "with another number of shards nobody lacks what one home forgot",
        "recovery.node",
        "_Node.deal",
        "known = all(store.manifest.known for store in old)",
        "known = True",
        LOST_MANIFEST,
    ),
    _one(
        "what was set aside goes with its home",
        "recovery.node",
        "_Node.remove_stores",
        'if each.startswith("damaged-")',
        "if False",
        LOST_MANIFEST,
    ),
    _one(
        "a deletion that is cancelled ends half done",
        "library.folder",
        "LogFolder.delete",
        "await asyncio.shield(deleting)",
        "await deleting",
        "tests/log/library/test_library.py::test_a_deletion_that_is_cancelled_takes_no_log_that_is_asked_for_after_it",
    ),
    _one(
        "homes that hold no replicas make a layout an older one",
        "recovery.node",
        "_holds_replicas",
        "return bool(manifest.entries)",
        "return True",
        NODE_RECOVERY,
    ),
)


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def changed_source(changes: Sequence[Change], source: str) -> str:
    """The source of a module with all changes; LookupError where one finds no function or not its text."""
    for change in changes:
        lines = source.splitlines(keepends=True)
        node: ast.AST = ast.parse(source)
        for part in change.function.split("."):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            inner = [
                each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == part
            ]
            if not inner:
                raise LookupError(f"{change.module} has no {change.function}")
            node = inner[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        first, last = node.lineno - 1, node.end_lineno
        body = "".join(lines[first:last])
        if change.old not in body:
            raise LookupError(f"{change.module}.{change.function} does not hold {change.old!r}")
        source = "".join([*lines[:first], body.replace(change.old, change.new, 1), *lines[last:]])
    return source


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the changed modules from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(change.module == name for change in self._mutant.changes):
            return importlib.util.spec_from_loader(name, self, origin=str(source_path(name)))
        return None

    def exec_module(self, module: ModuleType) -> None:
        path = source_path(module.__name__)
        changes = [change for change in self._mutant.changes if change.module == module.__name__]
        module.__file__ = str(path)
        exec(compile(changed_source(changes, path.read_text("utf-8")), str(path), "exec"), module.__dict__)


def source_path(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def run_tests(name: str) -> int:
    """In a process of its own: pytest's exit code for the mutant's tests (1: some failed)."""
    import pytest

    mutant = next(each for each in MUTANTS if each.name == name)
    loaded = [change.module for change in mutant.changes if change.module in sys.modules]
    assert not loaded, f"imported before it could be changed: {loaded}"
    loader = _Loader(mutant)
    sys.meta_path.insert(0, loader)
    # With plain asserts: pytest would import our modules itself, to rewrite theirs.
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line", "--assert=plain"]
    options.append("--hypothesis-profile=mutants")
    code = int(pytest.main([*options, *mutant.tests]))
    for change in mutant.changes:
        assert sys.modules[change.module].__loader__ is loader, f"{change.module} was not changed"
    return code


@dataclass(frozen=True)
class Outcome:
    """Whether a test noticed, which one, and how long that took."""

    mutant: Mutant
    caught: bool
    by: str
    seconds: float


def check(mutant: Mutant) -> Outcome:
    """Run a mutant's tests in a process; a mutant that can't be run raises."""
    need_pure_build()
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.log.mutants", "--run", mutant.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode not in (0, 1) or "\nERROR tests/" in done.stdout:
        raise RuntimeError(
            f"{mutant.name}: tests could not be run\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    by = failed[0].split("::", 1)[1].split(" ")[0] if failed else ""
    return Outcome(mutant, bool(failed), by, time.monotonic() - began)


def main(names: Sequence[str]) -> int:
    """Print the table; 1 when a mutant survived."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with ThreadPoolExecutor(2) as pool:
        outcomes = []
        for outcome in pool.map(check, chosen):
            outcomes.append(outcome)
            verdict = f"caught by {outcome.by}" if outcome.caught else "SURVIVED"
            print(f"{outcome.seconds:5.1f} s  {outcome.mutant.name}: {verdict}", flush=True)
    survived = [outcome for outcome in outcomes if not outcome.caught]
    caught = len(outcomes) - len(survived)
    print(f"log-mutants: mutants={len(outcomes)} caught={caught} survived={len(survived)}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(run_tests(sys.argv[2]) if sys.argv[1:2] == ["--run"] else main(sys.argv[1:]))
