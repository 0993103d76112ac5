"""`laminar consume`: print records, from a place or a cursor, to the end or for ever.

The cursor is committed after the last record that was written and flushed: at the end, or when Ctrl-C ends a
reader that follows. It is not committed if the program that reads our output has ended, because it is unknown
how much that program has read.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from cyclopts import Parameter

from laminar.cli.commands.produce import make_if_dev
from laminar.cli.errors import UsageError
from laminar.cli.lines import DEFAULT_FORMAT, PLACES, Show, as_json, compile_format
from laminar.cli.options import ANY_CLUSTER, OUTPUT, Cluster

if TYPE_CHECKING:
    from laminar.client.consume.fetchers import OnDamage
    from laminar.client.descriptions import PartitionInfo
    from laminar.client.records import Record
    from laminar.client.sync.reader import Reader
    from laminar.client.sync.topic import Topic


def consume(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Wait for more.")] = False,
    since: Annotated[
        str | None,
        Parameter(
            help="Begin 10m, 2h or 1d ago, or at a time (RFC 3339), or earliest, latest.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    last: Annotated[int | None, Parameter(help="Begin with this number of last records.")] = None,
    limit: Annotated[
        int | None, Parameter(name=["--limit", "-n"], help="End after this number of records.")
    ] = None,
    key: Annotated[str | None, Parameter(help="Only records with this key.")] = None,
    tag: Annotated[str | None, Parameter(help="Only records with this tag.")] = None,
    header: Annotated[
        list[str] | None,
        Parameter(negative="", help="NAME=VALUE: only records with this header; may be repeated."),
    ] = None,
    partition: Annotated[
        int | None, Parameter(name=["--partition", "-p"], help="Only records of this partition.")
    ] = None,
    cursor: Annotated[str | None, Parameter(help="Continue at this cursor, and move it at the end.")] = None,
    on_expired: Annotated[
        Literal["error", "earliest"],
        Parameter(help="What to do if records were trimmed before they were read."),
    ] = "error",
    on_damage: Annotated[
        Literal["error", "skip"], Parameter(help="What to do if no replica can read records.")
    ] = "error",
    leader: Annotated[bool, Parameter(negative="", help="Read from leaders only.")] = False,
    format: Annotated[str, Parameter(help=PLACES + r"; \n, \t as in C.", group=OUTPUT)] = DEFAULT_FORMAT,
    json: Annotated[bool, Parameter(negative="", help="A JSON object a line.", group=OUTPUT)] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Print records: those of a partition in order, partitions interleaved. With --last, by time."""
    check(since=since, last=last, limit=limit, cursor=cursor, follow=follow)
    show = as_json if json else compile_format(format)
    wanted = None if key is None else key.encode()
    chosen: Chosen = {"tag": tag, "headers": _fields_of(header)}
    start: Any = start_of(since)
    with cluster.connect(timeout=60) as client:
        make_if_dev(client, topic, cluster.url)
        handle = client.topic(topic)
        partitions = None if partition is None else [partition]
        if wanted is not None and partition is None:
            partitions = [handle.partition_of(wanted)]
        printed = 0
        if last is not None:
            tail, start = newest(handle, last, partitions, wanted, chosen, on_damage)
            for record in tail:
                sys.stdout.buffer.write(show(record))
            sys.stdout.buffer.flush()
            printed = len(tail)
            if not follow:
                return
        left = None if limit is None else limit - printed
        if left is not None and left <= 0:
            return
        reader = handle.read(
            start,
            follow=follow,
            cursor=cursor,
            partitions=partitions,
            from_leader=leader,
            on_expired=on_expired,
            on_damage=on_damage,
            **chosen,
        )
        copy(reader, show, key=wanted, limit=left, commits=cursor is not None)


class Chosen(TypedDict):
    """The conditions by which the client's reader chooses records."""

    tag: str | None
    headers: dict[str, str]


def _fields_of(given: list[str] | None) -> dict[str, str]:
    """Return the headers that ``NAME=VALUE`` texts name."""
    fields: dict[str, str] = {}
    for text in given or ():
        name, is_there, value = text.partition("=")
        if not is_there or not name:
            raise UsageError(f"--header is NAME=VALUE, not {text!r}")
        if fields.setdefault(name, value) != value:
            raise UsageError(f"--header {name} has two values: no record has both")
    return fields


def check(
    *, since: str | None, last: int | None, limit: int | None, cursor: str | None, follow: bool
) -> None:
    """Refuse options that exclude each other."""
    if sum(each is not None for each in (since, last, cursor)) > 1:
        raise UsageError("only one of --since, --last and --cursor can say where to begin")
    for flag, value in (("--last", last), ("--limit", limit)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} is 1 or more, not {value}")


def start_of(since: str | None) -> str:
    """Return the start in the form that the client takes; ``10m`` is short for ``-10m``.

    Raises:
        ConfigError: for a text that names no start.
    """
    from laminar.client.consume.reader import start_parameter

    if since is None:
        return "earliest"
    start = f"-{since}" if since[:1].isdigit() and since[-1:] in "smhdw" else since
    start_parameter(start, now_ms=0)
    return start


def copy(reader: Reader[bytes], show: Show, *, key: bytes | None, limit: int | None, commits: bool) -> None:
    """Write records until the end, `limit` of them, or Ctrl-C; then commit the cursor, if `commits`."""
    positions: dict[int, int] = {}
    try:
        _copy(reader, show, key, limit, positions)
    except KeyboardInterrupt:
        if not reader_follows(reader):
            raise
    for partition, first, past in reader.skipped:
        print(f"{partition}: offsets {first} to {past - 1} were left out", file=sys.stderr)
    if commits:
        reader.commit_at(positions)


def reader_follows(reader: Reader[Any]) -> bool:
    """Return whether this reader goes on with new records, so that only the caller can end it."""
    return not reader.ends


def _copy(
    reader: Reader[bytes], show: Show, key: bytes | None, limit: int | None, positions: dict[int, int]
) -> None:
    out = sys.stdout.buffer
    left = limit
    for batch in reader.batches():
        with _not_interrupted():
            position = batch.start_offset
            for record in batch.records():
                if key is None or record.key == key:
                    out.write(show(record))
                    left = None if left is None else left - 1
                position = record.offset + 1
                if left == 0:
                    break
            else:
                position = batch.next_offset  # also past what the filter left out
            out.flush()
            positions[batch.partition] = position
        if left == 0:
            return


@contextmanager
def _not_interrupted() -> Iterator[None]:
    """Delay a first Ctrl-C to the end of the block, so that written records are committed."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt


def newest(
    topic: Topic[bytes],
    count: int,
    partitions: list[int] | None,
    key: bytes | None,
    chosen: Chosen,
    on_damage: OnDamage,
) -> tuple[list[Record[bytes]], dict[int, int]]:
    """Return the last `count` records by time, and by partition the offset at which to continue."""
    known = [each for each in topic.partitions() if partitions is None or each.partition in partitions]
    # Records of a key, or with a tag or headers, may be anywhere in a partition, so the whole partition is
    # read. Without these, the last `count` records of the topic are among the last `count` of each partition.
    anywhere = key is not None or chosen["tag"] is not None or bool(chosen["headers"])
    starts = {each.partition: each.start_offset if anywhere else _back(each, count) for each in known}
    kept: dict[int, deque[Record[bytes]]] = {each.partition: deque(maxlen=count) for each in known}
    goes_on = {each.partition: each.end_offset for each in known}
    for record in _between(topic, starts, goes_on, chosen, on_damage):
        if key is None or record.key == key:
            kept[record.partition].append(record)
    found = sorted(
        (record for records in kept.values() for record in records),
        key=lambda record: (record.timestamp, record.partition, record.offset),
    )
    return found[-count:], goes_on


def _back(partition: PartitionInfo, count: int) -> int:
    return max(partition.start_offset, partition.end_offset - count)


def _between(
    topic: Topic[bytes],
    starts: dict[int, int],
    goes_on: dict[int, int],
    chosen: Chosen,
    on_damage: OnDamage,
) -> Iterator[Record[bytes]]:
    """Yield the records from `starts` to the end; put the positions where reading ended into `goes_on`."""
    if not starts:
        return
    reader = topic.read(dict(starts), partitions=list(starts), on_damage=on_damage, **chosen)
    for batch in reader.batches():
        goes_on[batch.partition] = batch.next_offset
        yield from batch.records()
    goes_on |= reader.ends
