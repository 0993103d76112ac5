"""`laminar topic export` and `import`: a topic's backup at a place, and a topic made from one."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.cli.output import ProgressLine, show_json
from laminar.client.backup.export import Exported, export_topic
from laminar.client.backup.manifest import Form, Manifest
from laminar.client.backup.place import Place
from laminar.client.backup.places import place_at
from laminar.client.backup.restore import Imported, exists, import_topic, plan_import
from laminar.client.client import connect
from laminar.client.net.session import Session

TIMEOUT_S = 60.0
SHOWN_EACH_S = 1.0


def export(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    to: Annotated[
        str,
        Parameter(
            help="A new or empty folder, or that of an earlier backup of the topic; or s3://BUCKET/PREFIX."
        ),
    ],
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
    place = place_at(to, field="to")
    shown = _Shown()

    def progress(done: Exported) -> None:
        shown.at_times(f"{done.records:,} records, {done.bytes:,} bytes")

    manifest, done = _run(
        cluster,
        place,
        lambda session: export_topic(session, topic, place, form=form, progress=progress),
        shown,
    )
    said = _of_backup(manifest, place) | {"new_records": done.records, "new_bytes": done.bytes}
    if listing.format == "json":
        show_json(said)
    else:
        print(
            f"{place}: {manifest.records:,} records of {topic} in {manifest.bytes:,} bytes; "
            f"new are {done.records:,} records in {done.bytes:,} bytes"
        )
    _say_what_is_left_out(manifest)


def import_(
    source: Annotated[str, Parameter(help="The folder of a backup, or s3://BUCKET/PREFIX.")],
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
    place = place_at(source, field="from")
    manifest, topic, import_id = plan_import(place, as_)
    shown = _Shown()

    def progress(done: Imported) -> None:
        shown.at_times(f"{done.records:,} of {manifest.records:,} records sent, {done.compared:,} compared")

    async def carry_out(session: Session) -> tuple[Imported, dict[str, Any] | None]:
        if dry_run:
            return Imported(), await exists(session, topic)
        done = await import_topic(
            session, place, manifest, topic, import_id, replicas=replicas, progress=progress
        )
        return done, None

    done, there = _run(cluster, place, carry_out, shown)
    said = _of_backup(manifest, place) | {
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
        print(f"{place} {verb} topic {topic}: {what}; cursors: {names}")
    if there is not None and there["settings"].get("importing") != import_id:
        complain(f"topic {topic} exists: --as gives another name")
    _say_what_is_left_out(manifest)


def _of_backup(manifest: Manifest, place: Place) -> dict[str, Any]:
    return {
        "topic": manifest.topic,
        "folder": str(place),
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


def _run(
    cluster: Cluster, place: Place, work: Callable[[Session], Coroutine[Any, Any, Any]], shown: _Shown
) -> Any:
    """Run `work` with a session of the cluster, and return its result.

    Ctrl-C ends it when the request or write that is under way in a thread has ended; a second one, at once.
    """
    # A shell lets a command in the background ignore Ctrl-C.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    async def run() -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            complain("ending; Ctrl-C again ends at once, and loses nothing")
            place.stop()
            if task is not None:
                task.cancel()

        if is_interruptible:
            loop.add_signal_handler(signal.SIGINT, interrupt)
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
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
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
