"""`laminar log`: inspect and verify a folder of logs, and rebuild its indexes, without a server.

`laminar.log` reads and judges; this module makes tables, progress and exit codes of its results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import Failed, complain
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import AS_TABLE, Listing

if TYPE_CHECKING:
    from laminar.log.tools.verification import Verified

Place = Annotated[
    Path, Parameter(help="A node's data folder, a folder of logs, one log's folder, or one segment.")
]
_LOG_COLUMNS = (
    *("log", "segments", "size_bytes", "first_index", "last_index", "start_offset", "end_offset"),
    *("first_term", "last_term", "first_time", "last_time"),
)
_SEGMENT_COLUMNS = (
    *("segment", "size_bytes", "index_bytes", "key_index_bytes", "first_index", "last_index"),
    *("first_offset", "next_offset", "first_term", "last_term", "first_time", "last_time"),
)
_MOVING = "it is in use: what is shown may be of different moments"


def inspect(path: Place, *, listing: Listing = AS_TABLE) -> None:
    """Show logs and segments with their ranges, and what journal and checkpoint say."""
    from laminar.cli.output import show, show_json
    from laminar.log.tools.inspection import inspect as look

    with _as_failures():
        found = look(str(path))
    if listing.format == "json":
        show_json(found)
        return
    if found["live"]:
        complain(f"{path}: {_MOVING}")
    if found["kind"] in ("log", "segment"):
        rows = [_with_times(segment) for log in found["logs"] for segment in log["segments"]]
        show(rows, listing, columns=_SEGMENT_COLUMNS, name="segment")
        return
    rows = [_with_times(log) | {"segments": len(log["segments"])} for log in found["logs"]]
    show(rows, listing, columns=_LOG_COLUMNS, name="log")
    if listing.format == "table":
        for store in found["stores"]:
            print(f"\n{_sentence(store)}")


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    times = {
        name: None
        if row[name] is None
        else datetime.fromtimestamp(row[name] / 1000, UTC).isoformat(" ", "seconds")
        for name in ("first_time", "last_time")
    }
    return row | times


def _sentence(store: dict[str, Any]) -> str:
    checkpoint = store["checkpoint"]
    journal = (
        f"{store['store']}: a journal of {store['journal_files']} files, {store['journal_bytes']:,} bytes"
    )
    if checkpoint is None:
        return f"{journal}; no checkpoint"
    text = (
        f"{journal}; generation {checkpoint['generation']}, checkpoint of {checkpoint['logs']} logs at LSN "
        f"{checkpoint['lsn']}, in file {checkpoint['journal_file']} at {checkpoint['journal_position']:,}"
    )
    if store["records_behind_checkpoint"]:
        text += f"; {store['records_behind_checkpoint']:,} records after it, which the next start takes in"
    if checkpoint["recovering"]:
        text += f"; recovering: {', '.join(checkpoint['recovering'])}"
    return text


def verify(
    path: Place,
    *,
    json: Annotated[bool, Parameter(negative="", help="One JSON document instead of lines.")] = False,
) -> int:
    """Read every byte. Exit code 1 if any is not what it should be, or no record could be verified."""
    import msgspec

    from laminar.cli.output import show_json
    from laminar.log.tools.verification import total_bytes
    from laminar.log.tools.verification import verify as read_all

    with _as_failures(), _progress("verifying", lambda: total_bytes(str(path))) as advance:
        verified = read_all(str(path), progress=advance)
    if json:
        show_json(msgspec.to_builtins(verified) | {"damaged": verified.damaged, "verdict": verified.verdict})
    else:
        for finding in verified.findings:
            offsets = ""
            if finding.first_offset is not None and finding.next_offset is not None:
                offsets = f" (offsets {finding.first_offset} to {finding.next_offset - 1})"
            print(
                f"{finding.severity}: {os.path.relpath(finding.file, verified.path)} at {finding.position}, "
                f"{finding.size} bytes: {finding.what}{offsets}"
            )
        for text in verified.unverified:
            print(f"not verified: {text}")
        if verified.live:
            complain(f"{path}: it is in use; what comes after its checkpoint is left out")
        print(f"{verified.bytes:,} bytes in {verified.files} files: {verdict_of(verified)}")
    return EXIT_DONE if verified.verdict in ("whole", "in part") else EXIT_FAILED


def verdict_of(verified: Verified) -> str:
    """Return the result in words; a log of which a part was not read is never called whole."""
    if verified.verdict == "nothing":
        return "no record was verified"
    if verified.verdict == "in part":
        return f"whole as far as it was verified; {len(verified.unverified)} parts were not"
    return verified.verdict


def reindex(path: Place, *, listing: Listing = AS_TABLE) -> int:
    """Rebuild the index files of a stopped node. Exit code 1 if frames cannot be read."""
    import msgspec

    from laminar.cli.output import show
    from laminar.log.tools.reindexing import reindex as make_anew
    from laminar.log.tools.verification import total_bytes

    with _as_failures(), _progress("reindexing", lambda: total_bytes(str(path))) as advance:
        done = make_anew(str(path), progress=advance)
    rows = [msgspec.to_builtins(each) for each in done]
    show(rows, listing, columns=("file", "rows", "unknown", "changed"), name="file")
    return EXIT_FAILED if any(each.unknown for each in done) else EXIT_DONE


@contextmanager
def _as_failures() -> Iterator[None]:
    """Raise errors of the disk or the folder as `Failed`, in one line."""
    from laminar.log.disk.errors import StorageError

    try:
        yield
    except StorageError as error:
        raise Failed(str(error)) from error


@contextmanager
def _progress(what: str, total: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total())
        yield lambda size: bar.advance(task, size)
