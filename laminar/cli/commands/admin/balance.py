"""`laminar balance`: one round of the balance by load, or what it would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

COLUMNS = (
    "node",
    "weight",
    "score",
    "measure",
    "appended_MiB_per_s",
    "written_MiB_per_s",
    "read_MiB_per_s",
    "requests_per_s",
    "stored_MiB",
)

_MOVES = {"swap_leaders": "swap the leaders of", "pin": "move a replica of", "unpin": "unpin"}


def balance(
    *,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Change nothing; say what would be done, and why.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Move one leader or replica to a node with less load, if that helps; say why, or why not."""
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        found = client.request_json("GET" if dry_run else "POST", "/v1/admin/balance")
    if listing.format == "json":
        show_json(found)
        return
    show([_row(node) for node in found["nodes"]], listing, columns=COLUMNS, name="node")
    if listing.format == "table":
        if found["move"] != "none":
            what = f"{_MOVES[found['move']]} {', '.join(found['partitions'])}"
            print(f"{'decided' if found['done'] else 'it would'}: {what}")
        print(found["because"])


def _row(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a node: rates and sizes in MiB, requests as a number; empty without a report."""
    load = node["load"] or {}
    row: dict[str, Any] = {name: node[name] for name in ("node", "weight", "score", "measure")}
    if row["score"] is not None:
        row["score"] = f"{row['score']:.2f}"
    for name in ("appended_bytes_per_s", "written_bytes_per_s", "read_bytes_per_s", "stored_bytes"):
        row[name.replace("bytes", "MiB")] = round(load[name] / (1 << 20), 1) if load else None
    row["requests_per_s"] = round(load["requests_per_s"]) if load else None
    return row
