"""`laminar topic export` and `import`: a topic's backup in a folder, and a topic made from one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.cli.output import ProgressLine, show_json
from laminar.client.backup.export import Exported, export_topic
from laminar.client.backup.manifest import Form, Manifest
from laminar.client.backup.restore import Imported, exists, import_topic, plan_import
from laminar.client.client import connect
from laminar.client.net.session import Session

TIMEOUT_S = 60.0
SHOWN_EACH_S = 1.0


def export(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    to: Annotated[Path, Parameter(help="A new or empty folder, or that of an earlier backup of the topic.")],
    *,
    form: Annotated[
        Form,
        Parameter(
            name="--format",
            help="batch: as stored, to be imported. For other programs: jsonl, csv, parquet (extra arrow).",
        ),
    ] = "batch",
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Back up a topic, or add new records to its backup. 1 if it was replaced or lost records meanwhile."""
    shown = _Shown()

    def progress(done: Exported) -> None:
        shown.at_times(f"{done.records:,} records, {done.bytes:,} bytes")

    manifest, done = _run(
        cluster, lambda session: export_topic(session, topic, to, form=form, progress=progress), shown
    )
    said = _of_backup(manifest, to) | {"new_records": done.records, "new_bytes": done.bytes}
    if listing.format == "json":
        show_json(said)
    else:
        print(
            f"{to}: {manifest.records:,} records of {topic} in {manifest.bytes:,} bytes; "
            f"new are {done.records:,} records in {done.bytes:,} bytes"
        )
    _say_what_is_left_out(manifest)


def import_(
    source: Annotated[Path, Parameter(help="The folder of a backup.")],
    *,
    as_: Annotated[
        str | None, Parameter(name="--as", help="The new topic's name; by default that of the backup's.")
    ] = None,
    replicas: Annotated[
        int | None, Parameter(help="Copies of each partition; by default as many as the topic had.")
    ] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Only read the whole backup, and show what it would become.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Make a topic from a backup; it opens once it holds all records. Run again, it continues."""
    manifest, topic, import_id = plan_import(source, as_)
    shown = _Shown()

    def progress(done: Imported) -> None:
        shown.at_times(f"{done.records:,} of {manifest.records:,} records sent, {done.compared:,} compared")

    async def carry_out(session: Session) -> tuple[Imported, dict[str, Any] | None]:
        if dry_run:
            return Imported(), await exists(session, topic)
        done = await import_topic(
            session, source, manifest, topic, import_id, replicas=replicas, progress=progress
        )
        return done, None

    done, there = _run(cluster, carry_out, shown)
    said = _of_backup(manifest, source) | {
        "as": topic,
        "dry_run": dry_run,
        "sent_records": done.records,
        "compared_records": done.compared,
    }
    if listing.format == "json":
        show_json(said)
    else:
        what = f"{manifest.records:,} records in {len(manifest.partitions)} partitions"
        names = ", ".join(sorted(manifest.cursors)) or "none"
        verb = "would become" if dry_run else "is now"
        print(f"{source} {verb} topic {topic}: {what}; cursors: {names}")
    if there is not None and there["settings"].get("importing") != import_id:
        complain(f"topic {topic} exists: --as gives another name")
    _say_what_is_left_out(manifest)


def _of_backup(manifest: Manifest, path: Path) -> dict[str, Any]:
    return {
        "topic": manifest.topic,
        "folder": str(path),
        "records": manifest.records,
        "bytes": manifest.bytes,
        "partitions": {
            str(each.partition): {"start_offset": each.start_offset, "end_offset": each.end_offset}
            for each in manifest.partitions
        },
        "cursors": sorted(manifest.cursors),
        "channels": manifest.channels,
        "delayed": manifest.delayed,
    }


def _say_what_is_left_out(manifest: Manifest) -> None:
    if manifest.channels:
        complain(f"channels are in no backup: {', '.join(manifest.channels)}")
    if manifest.delayed:
        complain(f"{manifest.delayed:,} delayed records were pending, and are in no backup")


def _run(cluster: Cluster, work: Callable[[Session], Coroutine[Any, Any, Any]], shown: _Shown) -> Any:
    """Run `work` with a session of the cluster, and return its result."""

    async def run() -> Any:
        client = connect(
            cluster.url,
            token=cluster.token,
            token_file=cluster.token_file,
            ca=cluster.ca,
            certificate=cluster.certificate,
            key=cluster.key,
            timeout=TIMEOUT_S if cluster.timeout is None else cluster.timeout,
        )
        async with client:
            return await work(client.session)

    try:
        return asyncio.run(run())
    finally:
        shown.end()


class _Shown:
    """The progress of a run, printed on standard error once a second if that is a terminal."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._next_s = time.monotonic() + SHOWN_EACH_S

    def at_times(self, text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SHOWN_EACH_S
            self._line.show(text)

    def end(self) -> None:
        self._line.end()
