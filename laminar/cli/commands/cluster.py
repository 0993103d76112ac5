"""`laminar cluster status`: which nodes there are, and what is wrong or under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

# Most moves of partitions that are named; the others are counted.
MOST_NAMED = 20


def node_row(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's answer as a row."""
    status = "alive" if node.get("alive", True) else (node.get("status") or "dead")
    return {**node, "status": status, "shards": len(node.get("shards") or ())}


def status(*, strict: bool = False, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> int:
    """Show the nodes, what is wrong, and what to do. Exit code 1 if something is critical.

    Parameters
    ----------
    strict
        Exit with 1 also if there are only warnings: before a node is restarted, for example.
    """
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        about, health = client.cluster(), client.health()
    is_failed = health["status"] == "critical" or (strict and health["status"] != "well")
    by_node = {each["node"]: each for each in health["nodes"]}
    rows = [node_row(node) | by_node.get(node["node"], {}) for node in about["nodes"]]
    if listing.format == "json":
        show_json({**about, **health, "nodes": rows})
    else:
        show(rows, listing, columns=("node", "status", "url", "shards", "leads", "replicas"), name="node")
    if listing.format == "table":
        print(f"\n{health['topics']} topics, {health['partitions']} partitions; {_verdict(health)}")
        if about.get("insecure"):
            print(
                "  insecure: other machines reach the HTTP ports, and what protects from them is not all set"
            )
        for problem in health["problems"]:
            _print_problem(problem)
        for code, count in health["left_out"].items():
            print(f"  and {count:,} more: {code}")
    return EXIT_FAILED if is_failed else EXIT_DONE


def _verdict(health: Mapping[str, Any]) -> str:
    return "all well" if health["status"] == "well" else f"{health['status']}:"


def _print_problem(problem: Mapping[str, Any]) -> None:
    print(f"  {problem['severity']}: {problem['text']} (since {problem['since']})")
    for remedy in problem["do"]:
        print(f"    {remedy['text']}" + (f": `{remedy['command']}`" if remedy["command"] else ""))


def mixed_programs(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each node that keeps a code version from being enabled, with a sentence about it."""
    known = {node["node"]: node.get("code_version", 0) for node in about["nodes"]}
    enabled, newest = about.get("code_version", 0), max(known.values(), default=0)
    return [
        (
            name,
            f"node {name} keeps code version {newest} from being enabled: its program knows {version}, "
            f"the cluster has enabled {enabled}",
        )
        for name, version in sorted(known.items())
        if version < newest
    ]


def all_operations(client: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Return every operation under way, sorted by id, over all pages of the answer."""
    from urllib.parse import quote

    rows: list[dict[str, Any]] = []
    after = ""
    while True:
        query = f"limit=1000&prefix={quote(prefix, safe='')}&after={quote(after, safe='')}"
        answer = client.request_json("GET", f"/v1/admin/operations?{query}")
        rows += answer["operations"]
        after = answer.get("next") or ""
        if not after:
            return rows


def changes_of(operations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each change under way; their steps, and most moves, are only counted."""
    found, moves = [], []
    for each in operations:
        progress = f"{each['done']} of {each['total']}"
        blocked = "".join(f"; blocked: {reason}" for reason in each["blocked_by"])
        if each["kind"] == "drain":
            found.append(f"node {each['what']} drains: {progress} partitions are elsewhere{blocked}")
        elif each["kind"] == "replicas":
            found.append(f"{each['why']}: {progress} partitions have them{blocked}")
        elif each["kind"] in ("pin", "move"):
            moves.append(
                f"{each['what']} is not where it should be: {progress} replicas are, {each['why']}{blocked}"
            )
    found += moves[:MOST_NAMED]
    if len(moves) > MOST_NAMED:
        found.append(f"{len(moves) - MOST_NAMED} more partitions are not where they should be")
    steps = sum(each["kind"] in ("join", "leave") for each in operations)
    if steps:
        found.append(f"{steps} replicas join or leave their groups (`laminar operations list`)")
    return found


Partitions = Mapping[str, Sequence[Mapping[str, Any]]]


def node_rows(nodes: Sequence[Mapping[str, Any]], topics: Partitions) -> list[dict[str, Any]]:
    """Return the nodes, with how many partitions each leads and holds."""
    rows = {node["node"]: node_row(node) | {"leads": 0, "replicas": 0} for node in nodes}
    for partition in (each for partitions in topics.values() for each in partitions):
        leader = (partition.get("leader") or {}).get("node")
        if leader in rows:
            rows[leader]["leads"] += 1
        for replica in partition.get("replicas") or ():
            if replica["node"] in rows:
                rows[replica["node"]]["replicas"] += 1
    return list(rows.values())


def waits_for(partition: Mapping[str, Any]) -> str:
    """Return text to put after "has no leader"; "" if no replica is recovering.

    It names the replicas that may have forgotten entries, and those that the partition waits for.
    """
    replicas = partition.get("replicas") or ()
    recovering = [each["node"] for each in replicas if each.get("recovering")]
    absent = [each["node"] for each in replicas if not each.get("reachable")]
    if not recovering:
        return ""
    text = f": {', '.join(recovering)} may have forgotten appends"
    return f"{text}, it waits for {', '.join(absent)}" if absent else text
