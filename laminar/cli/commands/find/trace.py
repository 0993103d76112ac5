"""`laminar trace show`: the events of records, and the client of each."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import UsageError
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

_COLUMNS = ("at", "event", "record", "channel", "attempt", "principal", "address", "node", "due", "reason")


def trace(
    *,
    record: Annotated[
        str | None, Parameter(help="A record, TOPIC/PARTITION/OFFSET; or a delayed one, TOPIC/ID.")
    ] = None,
    trace_id: Annotated[str | None, Parameter(help="Records with this trace id.")] = None,
    key: Annotated[str | None, Parameter(help="Records with this key, of all topics.")] = None,
    limit: Annotated[int, Parameter(help="Print at most this many events.")] = 1000,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Print the events of a record, or of those with a trace id or a key. 1 if there may be more."""
    from laminar.cli.output import show

    if sum(each is not None for each in (record, trace_id, key)) != 1:
        raise UsageError("give one of --record, --trace-id and --key")
    with cluster.connect(timeout=60) as client:
        found = client.trace(record=record, trace_id=trace_id, key=key, limit=limit)
    rows: list[dict[str, Any]] = [
        {
            "at": each.at.isoformat(timespec="milliseconds"),
            "event": each.event,
            "record": f"{each.topic}/{each.partition}/{'-' if each.offset is None else each.offset}",
            "channel": each.channel,
            "attempt": each.attempt,
            "principal": each.principal or None,
            "address": each.address or None,
            "node": each.node,
            "due": None if each.due is None else each.due.isoformat(timespec="milliseconds"),
            "reason": each.reason or None,
            "delivery": each.delivery,
            "entry": each.entry,
            "key": None if each.key is None else each.key.decode(errors="replace"),
            "trace_id": each.trace_id,
            "parent_id": each.parent_id,
            "member": each.member or None,
            "delayed": each.delayed,
        }
        for each in found.events
    ]
    show(rows, listing, columns=_COLUMNS, name="event")
    if not rows and found.is_complete:
        print(
            "no events; a topic is traced when its setting `trace` is all, sampled or a share",
            file=sys.stderr,
        )
    if not found.is_complete:
        print(
            "there may be more events: raise --limit; or a part of the trace could not be read",
            file=sys.stderr,
        )
    return int(not found.is_complete)
