"""`laminar operations`: the changes of placement that are under way."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing


def list_operations(
    prefix: Annotated[str, Parameter(help="Only those whose ids begin so, such as `drain:`.")] = "",
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List the changes under way: the progress and cause of each, and what blocks it."""
    from laminar.cli.commands.cluster import all_operations
    from laminar.cli.output import show

    with cluster.connect() as client:
        rows = all_operations(client, prefix)
    for row in rows:
        row["progress"] = f"{row['done']}/{row['total']}"
    show(rows, listing, columns=("id", "what", "progress", "why", "blocked_by"), name="id")


def cancel(
    operation: Annotated[str, Parameter(help="Its id, as `laminar operations list` shows it.")],
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Cancel a drain or a pin: the replicas that it has moved go back to the nodes that the rank chooses."""
    from laminar.cli.output import show_json

    with cluster.connect() as client:
        found = client.request_json("DELETE", f"/v1/admin/operations/{quote(operation, safe='')}")
    if listing.format == "json":
        show_json(found)
