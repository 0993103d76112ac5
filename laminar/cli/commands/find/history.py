"""`laminar record history`: the events of a record, and its state in each channel."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

_COLUMNS = ("at", "event", "of", "attempt", "delivery", "due", "reason")


def history(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    partition: Annotated[int, Parameter(help="Number of the partition.")],
    offset: Annotated[int, Parameter(help="Offset of the record.")],
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Print what happened to a record, and its state in each channel. Exit code 1 if some may be missing."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        found = client.topic(topic).history(partition, offset)
    rows: list[dict[str, Any]] = [
        {
            "at": each.at.isoformat(timespec="milliseconds"),
            "event": each.event,
            "of": each.channel or each.cursor,
            "attempt": each.attempt,
            "delivery": each.delivery,
            "due": None if each.due is None else each.due.isoformat(timespec="milliseconds"),
            "reason": each.reason or None,
            "entry": each.entry,
        }
        for each in found.events
    ]
    show(rows, listing, columns=_COLUMNS, name="event")
    for channel, place in sorted(found.now.items()):
        print(f"now in channel {channel}: {place}", file=sys.stderr)
    if not found.is_complete:
        print("retention took entries, or some cannot be read: this may not be all", file=sys.stderr)
    return int(not found.is_complete)
