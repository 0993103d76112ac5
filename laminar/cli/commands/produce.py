"""`laminar produce`: append lines as records, in batches, in order, each once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.contexts import creates_topics
from laminar.cli.errors import Failed, UsageError, code_of, complain, line_of
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PARTLY
from laminar.cli.lines import Pointer
from laminar.cli.options import ANY_CLUSTER, Cluster
from laminar.cli.times import due_of

if TYPE_CHECKING:
    from laminar.client.errors import ProduceError
    from laminar.client.sync.client import Client
    from laminar.client.sync.producer import Producer

DEV_PARTITIONS = 4
# After a failure, the command asks for this long at most which partitions have no leader.
LOOK_TIMEOUT_S = 3.0


def produce(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    file: Annotated[Path | None, Parameter(help="Lines to append; standard input if left out, or -.")] = None,
    *,
    key: Annotated[str | None, Parameter(help="The key of every record.")] = None,
    key_from: Annotated[
        str | None, Parameter(help="Where in each line's JSON its key is, as /origin (a JSON pointer).")
    ] = None,
    tag_from: Annotated[str | None, Parameter(help="Where in each line's JSON its tag is.")] = None,
    trace_id: Annotated[
        str | None, Parameter(help="The trace id of every record: 32 hexadecimal digits.")
    ] = None,
    trace_id_from: Annotated[str | None, Parameter(help="Where in each line's JSON its trace id is.")] = None,
    partition: Annotated[
        int | None, Parameter(name=["--partition", "-p"], help="Only into this partition.")
    ] = None,
    delay: Annotated[
        str | None, Parameter(help="Readers get the records after this time, as 30s, 5m, 2h or 7d.")
    ] = None,
    deliver_at: Annotated[
        str | None, Parameter(help="Or at this time: RFC 3339, as 2030-01-31T12:00:00Z.")
    ] = None,
    batch: Annotated[int, Parameter(help="Bytes of a full batch.")] = 256 << 10,
    window: Annotated[int, Parameter(help="Batches of a partition in flight.")] = 4,
    json: Annotated[bool, Parameter(negative="", help="Print what was appended, as JSON.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Append lines; returns when all of them are durable. 3 if only some are."""
    from laminar.client import errors

    if key is not None and key_from is not None:
        raise UsageError("--key and --key-from are mutually exclusive")
    if trace_id is not None and trace_id_from is not None:
        raise UsageError("--trace-id and --trace-id-from are mutually exclusive")
    check_trace_id(trace_id)
    key_at = Pointer(key_from, flag="--key-from") if key_from is not None else None
    tag_at = Pointer(tag_from, flag="--tag-from") if tag_from is not None else None
    trace_at = Pointer(trace_id_from, flag="--trace-id-from") if trace_id_from is not None else None
    due = due_of("--deliver-at", deliver_at, delay)
    sent = keyed = 0
    code = EXIT_DONE
    with input_of(file) as lines, cluster.connect(timeout=60) as client:
        make_if_dev(client, topic, cluster.url)
        size_bytes = file.stat().st_size if file is not None and file.is_file() else None
        try:
            with (
                client.topic(topic).producer(batch_bytes=batch, window=window) as producer,
                progress_of(producer, size_bytes) as advance,
            ):
                try:
                    for number, line in enumerate(lines, start=1):
                        value = line.removesuffix(b"\n")
                        picked = key_at.pick(value, number=number) if key_at is not None else key
                        tag = tag_at.pick(value, number=number) if tag_at is not None else None
                        keyed += picked is not None
                        trace = trace_at.pick(value, number=number) if trace_at is not None else trace_id
                        producer.send(
                            value,
                            key=picked,
                            tag=tag,
                            trace_id=trace,
                            partition=partition,
                            deliver_at=due,
                        )
                        sent = number
                        advance(len(line))
                except Failed as error:
                    # The records sent before a bad line are appended all the same.
                    complain(str(error))
                    code = EXIT_PARTLY if sent else EXIT_FAILED
                except errors.Error as error:
                    # A partition that failed takes no more; `wait` says what has no receipt.
                    if not producer.statistics()["failed"]:
                        complain(f"line {sent + 1}: {line_of(error)}")
                        code = EXIT_PARTLY if sent else code_of(error)
                except KeyboardInterrupt:
                    complain("interrupted: waiting until what was sent is durable")
                    code = EXIT_INTERRUPTED
                producer.wait()
        except errors.ProduceError as error:
            code = _say_undelivered(client, topic, error, sent)
            sent -= len(error.undelivered)
    if key_from is not None and sent and not keyed:
        complain(f"no line has anything at {key_from} (--key-from): all records were appended without a key")
    if code != EXIT_DONE and not json and not sys.stderr.isatty():
        complain(f"{sent:,} records are appended to {topic}")
    if json:
        from laminar.cli.output import show_json

        show_json({"topic": topic, "appended": sent})
    elif sys.stderr.isatty():
        print(f"{sent:,} records appended to {topic}", file=sys.stderr)
    return code


def check_trace_id(text: str | None) -> None:
    """Refuse a malformed trace id before anything is sent. Raises `UsageError`."""
    from laminar.client.errors import ConfigError
    from laminar.client.trace_id import trace_id_bytes

    try:
        trace_id_bytes(text)
    except ConfigError as error:
        raise UsageError(f"--trace-id {text!r}: {error.message}") from None


def _say_undelivered(client: Client, topic: str, error: ProduceError, sent: int) -> int:
    """Print how many records have no receipt, and why the first has none; return the exit code."""
    failed = error.undelivered
    cause = failed[0].error if failed else error
    complain(f"{len(failed):,} of {sent:,} records have no receipt; {line_of(cause)}")
    _say_leaderless(client, topic)
    # The outcome of these is unknown: some may be appended.
    in_part = len(failed) != sent or any(each.error.outcome == "unknown" for each in failed)
    return EXIT_PARTLY if in_part else code_of(cause)


def _say_leaderless(client: Client, topic: str) -> None:
    """Name the partitions that have no leader now, if there are any and a node answers."""
    from laminar.client.errors import Error

    try:
        answer = client.request_json(
            "GET", f"/v1/topics/{topic}/partitions?wait_ms=500", timeout=LOOK_TIMEOUT_S
        )
    except Error:
        return
    places = [f"{topic}/{each['partition']}" for each in answer["partitions"] if each["leader"] is None]
    if places:
        complain(f"without a leader: {', '.join(places)}; `laminar cluster status` says more")


@contextmanager
def input_of(file: Path | None) -> Iterator[IO[bytes]]:
    """Open the file, or standard input."""
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
        return
    with open(file, "rb") as opened:
        yield opened


def make_if_dev(client: Client, topic: str, url: str | None) -> None:
    """Create a missing topic, in the context of `laminar dev` only."""
    from laminar.client.errors import AlreadyExists, NotFound

    if not creates_topics(url):
        return
    try:
        client.topic(topic).describe()
    except NotFound:
        try:
            client.create_topic(topic, partitions=DEV_PARTITIONS, exist_ok=True)
        except AlreadyExists:
            return  # another program created it meanwhile, with another number of partitions or replicas


@contextmanager
def progress_of(producer: Producer[bytes], size_bytes: int | None) -> Iterator[Any]:
    """Show a progress bar on standard error, if that is a terminal: bytes that have a receipt, of all."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=size_bytes)
        taken = 0

        def advance(count: int) -> None:
            nonlocal taken
            before, taken = taken, taken + count
            if before >> 16 != taken >> 16:  # a look at the outbox for every 64 KiB is enough
                bar.update(task, completed=max(0, taken - producer.statistics()["buffered_bytes"]))

        yield advance
        bar.update(task, completed=taken)
