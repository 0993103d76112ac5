"""`laminar cursor`: named consumers' positions and how far behind they are."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

Topic = Annotated[str, Parameter(help="The topic's name.")]
Name = Annotated[str, Parameter(help="The cursor's name.")]


def list_cursors(topic: Topic, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List the cursors of a topic."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        ends = {each.partition: each.end_offset for each in client.topic(topic).partitions()}
        rows = [
            cursor_row(topic, name, client.topic(topic).cursor(name), ends)
            for name in client.topic(topic).cursors()
        ]
    show(rows, listing, columns=("cursor", "partitions", "position", "lag"), name="cursor")


def cursor_row(topic: str, name: str, positions: dict[int, int], ends: dict[int, int]) -> dict[str, Any]:
    """A cursor as a row: records passed and records left, summed over the partitions it has been in."""
    behind = {
        partition: max(0, ends.get(partition, 0) - position) for partition, position in positions.items()
    }
    return {
        "topic": topic,
        "cursor": name,
        "partitions": len(positions),
        "position": sum(positions.values()),
        "lag": sum(behind.values()),
        "positions": {str(partition): position for partition, position in sorted(positions.items())},
    }


def set_cursor(
    topic: Topic,
    name: Name,
    *,
    at: Annotated[
        str, Parameter(help="earliest, latest, -1h, or a time (RFC 3339).", allow_leading_hyphen=True)
    ],
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Move a cursor in every partition; makes it if it is not there."""
    with cluster.connect() as client:
        handle = client.topic(topic)
        handle.set_cursor(name, handle.offsets(at))


def delete(
    topic: Topic,
    name: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Delete a cursor, after asking."""
    from laminar.cli.topic import confirm

    with cluster.connect() as client:
        if not yes:
            confirm(f"delete cursor {name} of topic {topic}?")
        client.topic(topic).delete_cursor(name)
