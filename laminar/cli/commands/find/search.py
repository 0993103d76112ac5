"""`laminar search`: print the records that match, and say how much of the topic was searched."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from laminar.cli.errors import UsageError
from laminar.cli.lines import PLACES, Show, as_json, compile_format
from laminar.cli.options import ANY_CLUSTER, OUTPUT, Cluster
from laminar.cli.output import ProgressLine
from laminar.cli.times import moment

if TYPE_CHECKING:
    from laminar.client.search import FoundRecord, Place
    from laminar.client.sync.search import Search

FORMAT = r"%p %o %T %k %v\n"


def search(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    *,
    key: Annotated[str | None, Parameter(help="Only records with this key.")] = None,
    trace_id: Annotated[str | None, Parameter(help="Only records with this trace id.")] = None,
    tag: Annotated[str | None, Parameter(help="Only records with this tag.")] = None,
    header: Annotated[
        list[str] | None,
        Parameter(negative="", help="NAME=VALUE: only records with this header; may be repeated."),
    ] = None,
    contains: Annotated[str | None, Parameter(help="Only records with this text in their value.")] = None,
    json: Annotated[
        str | None,
        Parameter(help="PATH=VALUE: only records whose value is JSON with VALUE at PATH, as a.id=7."),
    ] = None,
    partition: Annotated[
        list[int] | None, Parameter(name=["--partition", "-p"], negative="", help="Only this partition.")
    ] = None,
    since: Annotated[
        str | None, Parameter(name="--from", help="Only what was appended at this time or later.")
    ] = None,
    to: Annotated[str | None, Parameter(help="Only what was appended before this time.")] = None,
    newest: Annotated[bool, Parameter(negative="", help="Begin with the newest records.")] = False,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Search what is appended from now on.")
    ] = False,
    limit: Annotated[
        int | None, Parameter(name=["--limit", "-n"], help="End after this number of records.")
    ] = None,
    format: Annotated[str, Parameter(help=PLACES + r"; \n, \t as in C.", group=OUTPUT)] = FORMAT,
    lines: Annotated[
        bool, Parameter(name="--as-json", negative="", help="A JSON object a line.", group=OUTPUT)
    ] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Print the records that match all conditions. 1 if a part of the topic was not searched."""
    show = as_json if lines else compile_format(format)
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is 1 or more, not {limit}")
    start, end = moment("--from", since), moment("--to", to)
    if follow and (newest or end is not None):
        raise UsageError("--follow goes without --newest and --to")
    wanted: dict[str, Any] = {
        "key": key,
        "tag": tag,
        "headers": dict(_pair("--header", each) for each in header or ()) or None,
        "contains": contains,
        "json": None if json is None else _equals(json),
        "partitions": partition,
        "limit": limit,
    }
    with cluster.connect(timeout=60) as client:
        handle = client.topic(topic)
        if follow:
            first: Place = "latest" if start is None else start
            return _print(topic, handle.tail(start=first, **wanted), show)
        return _print(
            topic,
            handle.search(
                trace_id=trace_id,
                start="earliest" if start is None else start,
                end="latest" if end is None else end,
                newest=newest,
                **wanted,
            ),
            show,
        )


def _print(topic: str, found: Search, show: Show) -> int:
    """Print the matches, and on standard error how much was searched; return the exit code."""
    progress, cut = ProgressLine(), 0
    try:
        while True:
            for record in found.next_page():
                sys.stdout.buffer.write(show(_Line(topic, record)))
                cut += record.truncated
            sys.stdout.buffer.flush()
            if found.is_done:
                break
            if sys.stderr.isatty():
                progress.show(said(found))
    except KeyboardInterrupt:
        pass  # what was looked at until then is said
    progress.end()
    print(said(found), file=sys.stderr)
    for each in found.not_searched:
        print(f"{each.partition}: offsets {each.start} to {each.end - 1} are {each.why}", file=sys.stderr)
    if cut:
        print(f"of {cut} values only the beginning is shown", file=sys.stderr)
    return int(bool(found.not_searched))


def said(found: Search) -> str:
    """Return a line that says how much a search has covered."""
    looked = f"searched {found.searched_records:,} records ({found.searched_bytes:,} bytes)"
    if not found.left_partitions:
        return f"{looked}: that is all"
    return f"{looked}; {found.left_records:,} are left, in {found.left_partitions} partitions"


def _pair(option: str, text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not is_there or not name:
        raise UsageError(f"{option} is NAME=VALUE, not {text!r}")
    return name, value


def _equals(text: str) -> tuple[str, Any]:
    """Return the path and the value of ``PATH=VALUE``; a value that is no JSON is text."""
    path, value = _pair("--json", text)
    try:
        return path, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return path, value


class _Line:
    """A record that was found, in the form that `lines` prints."""

    def __init__(self, topic: str, record: FoundRecord) -> None:
        self.topic = topic
        self.partition, self.offset = record.partition, record.offset
        self.key, self.tag = record.key, record.tag
        self.raw = record.value
        self.large_bytes = record.size if record.truncated and not record.value else None
        self.trace_id = record.trace_id
        self.timestamp = int(record.timestamp.timestamp() * 1000)
        self.headers: Mapping[str, bytes] = record.headers
