"""`laminar cursor`: cursors, their positions and their lag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError, line_of
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

if TYPE_CHECKING:
    import laminar
    from laminar.client.descriptions import CursorInfo

Topic = Annotated[str, Parameter(help="The topic's name.")]
Name = Annotated[str, Parameter(help="The cursor's name.")]


def list_cursors(topic: Topic, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List the cursors of a topic."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        rows = [cursor_row(topic, each) for each in client.topic(topic).describe_cursors()]
    columns = ("cursor", "partitions", "position", "lag", "overtaken_by", "owners", "changed")
    show(rows, listing, columns=columns, name="cursor")


def cursor_row(topic: str, cursor: CursorInfo) -> dict[str, Any]:
    """Return a cursor as a row: records read, left to read, and trimmed unread, over its partitions."""
    return {
        "topic": topic,
        "cursor": cursor.cursor,
        "partitions": len(cursor.positions),
        "position": sum(cursor.positions.values()),
        "lag": cursor.total_lag,
        "overtaken": cursor.overtaken,
        "overtaken_by": sum(cursor.overtaken_by.values()),
        "owners": len(set(cursor.owners.values())),
        "changed": cursor.changed,
        "positions": {str(partition): position for partition, position in sorted(cursor.positions.items())},
        "owned_by": {str(partition): owner for partition, owner in sorted(cursor.owners.items())},
    }


def set_cursor(
    topic: Topic,
    name: Name,
    *,
    at: Annotated[
        str | None, Parameter(help="earliest, latest, -1h, or a time (RFC 3339).", allow_leading_hyphen=True)
    ] = None,
    offset: Annotated[int | None, Parameter(help="The next offset to read, in one partition.")] = None,
    partition: Annotated[
        int | None, Parameter(name=["--partition", "-p"], help="Only in this one. (default: all)")
    ] = None,
    force: Annotated[
        bool, Parameter(negative="", help="Also where members of a group own it: it is taken from them.")
    ] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Move a cursor; create it if it does not exist."""
    from laminar.client.errors import Fenced

    if (at is None) == (offset is None):
        raise UsageError("one of --at and --offset says where the cursor goes")
    with cluster.connect() as client:
        handle = client.topic(topic)
        places = (
            handle.offsets(at)
            if at is not None
            else dict.fromkeys((each.partition for each in handle.partitions()), offset)
        )
        if partition is not None and partition not in places:
            raise UsageError(f"{topic} has {len(places)} partitions, and none is {partition}")
        if offset is not None and partition is None and len(places) > 1:
            raise UsageError(f"{topic} has {len(places)} partitions: --partition says which gets --offset")
        wanted = {each: int(to) for each, to in places.items() if to is not None}
        positions = wanted if partition is None else {partition: wanted[partition]}
        try:
            if handle.route().version:
                rewind(handle, name, positions, force=force)
            else:
                handle.set_cursor(name, positions, force=force)
        except Fenced as error:
            raise Failed(
                f"{line_of(error)}; --force takes it from its owner, which may be long gone"
            ) from None


def rewind(handle: laminar.Topic[bytes], name: str, positions: dict[int, int], *, force: bool) -> None:
    """Set a cursor in a topic whose route has changed: no member may own a partition meanwhile."""
    from laminar.client.errors import Fenced, NotFound

    try:
        owners = handle.describe_cursor(name).owners
    except NotFound:
        owners = {}
    members = {owner for owner in owners.values() if not owner.startswith("~")}
    if members and not force:
        raise Fenced(f"cursor {name!r} is owned by {', '.join(sorted(members))}", code="fenced")
    handle.rewind_cursor(name, positions)


def delete(
    topic: Topic,
    name: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Delete a cursor, after asking."""
    from laminar.cli.commands.topic import confirm

    with cluster.connect() as client:
        handle = client.topic(topic)
        handle.describe_cursor(name)  # raises no_such_cursor
        if not yes:
            confirm(f"delete cursor {name} of topic {topic}?")
        handle.delete_cursor(name)
