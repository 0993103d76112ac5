"""`laminar node`: nodes with their weight and zone, drained and removed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from laminar.cli.commands.topic import confirm
from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.exit_codes import EXIT_PARTLY
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

if TYPE_CHECKING:
    from laminar.client.sync.client import Client

Name = Annotated[str, Parameter(help="The node's name.")]

POLL_S = 0.5
# A drain that is blocked and has moved nothing for so long is reported, and not waited for any more.
BLOCKED_S = 10.0


def path_of(node: str) -> str:
    """Return the URL path of a node."""
    return f"/v1/admin/nodes/{quote(node, safe='')}"


def list_nodes(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List nodes with their leaders, replicas and bytes."""
    from laminar.cli.commands.cluster import node_row
    from laminar.cli.output import show

    with cluster.connect() as client:
        described = {node["node"]: node for node in client.request_json("GET", "/v1/admin/nodes")["nodes"]}
        rows = [node_row(node) | described.get(node["node"], {}) for node in client.cluster()["nodes"]]
    for row in rows:
        row["status"] = _status(row)
    columns = ("node", "status", "url", "zone", "shards", "weight", "leads", "replicas")
    show(rows, listing, columns=columns, name="node")


def _status(row: dict[str, Any]) -> str:
    if row.get("safe_to_stop"):
        return "drained"
    return "draining" if row.get("draining") and row["alive"] else str(row["status"])


def describe(node: Name, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Show a node: what it announces, what an operator set, and what its drain waits for."""
    from laminar.cli.output import plain, show_json

    with cluster.connect() as client:
        found = client.request_json("GET", path_of(node))
    if listing.format == "json":
        show_json(found)
    elif listing.format == "names":
        print(found["node"])
    else:
        for name, value in found.items():
            print(f"{name.replace('_', ' ')}: {plain(value)}")


def drain(
    node: Name,
    *,
    wait: Annotated[bool, Parameter(help="Wait until the node is empty.", negative="--no-wait")] = True,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Empty a node: its leaders and replicas go to other nodes, then it is safe to stop.

    Exit code 3 if the drain has begun and something blocks it; it goes on when the cause is removed.
    """
    from laminar.cli.output import show_json

    with cluster.connect() as client:
        found = client.request_json("POST", path_of(node) + "/drain")
        if wait:
            found = _until_drained(client, node)
    if listing.format == "json":
        show_json(found)
    elif found["safe_to_stop"]:
        print(f"node {node} is drained: safe to stop")
    else:
        print(f"node {node} drains: {'; '.join(found['drain_waits_for'])}")
        for reason in found["drain_blocked_by"]:
            complain(f"blocked: {reason}")


def _until_drained(client: Client, node: str) -> dict[str, Any]:
    """Return the node's description once it is drained; show what it waits for.

    Raises:
        Failed: something blocks the drain.
    """
    from laminar.cli.output import ProgressLine

    line = ProgressLine()
    left: tuple[int, ...] = ()
    most = 0
    since_s = time.monotonic()
    while True:
        found: dict[str, Any] = client.request_json("GET", path_of(node))
        now = (found["replicas"], found["leads"] or 0, int(bool(found["catalog_voter"])))
        most = max(most, found["replicas"])
        if now != left:
            left, since_s = now, time.monotonic()
        if found["safe_to_stop"]:
            line.end()
            return found
        if not found["draining"]:
            line.end()
            raise Failed(f"node {node} does not drain any more: the drain was taken back")
        waits = "; ".join(found["drain_waits_for"])
        line.show(f"draining {node}: {most - found['replicas']} of {most} replicas moved; {waits}")
        if found["drain_blocked_by"] and time.monotonic() - since_s > BLOCKED_S:
            line.end()
            why = "; ".join(found["drain_blocked_by"])
            raise Failed(
                f"node {node} drains, and is blocked: {why}. It goes on when that is gone; "
                f"`laminar node undrain {node}` takes the drain back",
                code=EXIT_PARTLY,
            )
        time.sleep(POLL_S)


def undrain(node: Name, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Let a node hold replicas and lead again."""
    from laminar.cli.output import show_json

    with cluster.connect() as client:
        found = client.request_json("POST", path_of(node) + "/undrain")
    if listing.format == "json":
        show_json(found)


def remove(
    node: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Remove a node that is drained and stopped, after asking. Its data folder never comes back."""
    from laminar.cli.output import show_json

    with cluster.connect() as client:
        if not yes:
            confirm(f"remove node {node} for good? Its name may be used again, its data folder not.")
        found = client.request_json("DELETE", path_of(node))
    if listing.format == "json":
        show_json(found)


def weight(
    node: Name,
    value: Annotated[
        str, Parameter(help="Share of replicas relative to other nodes, or `announced`: as the node says.")
    ],
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Set a node's weight, in place of the one that it announces. Replicas move accordingly."""
    try:
        wanted = None if value == "announced" else float(value)
    except ValueError:
        raise UsageError(f"a weight is a number or `announced`, not {value!r}") from None
    _patch(node, {"weight": wanted}, listing=listing, cluster=cluster)


def zone(
    node: Name,
    value: Annotated[
        str, Parameter(help="Failure domain (rack, room, region), or `announced`: as the node says.")
    ],
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Set a node's zone, in place of the one that it announces. Replicas are spread over zones."""
    _patch(node, {"zone": None if value == "announced" else value}, listing=listing, cluster=cluster)


def _patch(node: str, change: dict[str, Any], *, listing: Listing, cluster: Cluster) -> None:
    from laminar.cli.output import show_json

    with cluster.connect() as client:
        version = client.request_json("GET", path_of(node))["version"]
        headers = {"If-Match": f'"{version}"'}
        found = client.request_json("PATCH", path_of(node), change, headers=headers)
    if listing.format == "json":
        show_json(found)
