"""`laminar cluster status`: which nodes there are, and what is wrong or under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

if TYPE_CHECKING:
    from laminar.client.sync.client import Client

READY_TIMEOUT_S = 3.0
# Most moves of partitions that are named; the others are counted.
MOST_NAMED = 20


def node_row(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's answer as a row."""
    status = "alive" if node.get("alive", True) else (node.get("status") or "dead")
    return {**node, "status": status, "shards": len(node.get("shards") or ())}


def status(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> int:
    """Show nodes, and partitions with a problem. Exit code 1 if there is any."""
    from laminar.cli.commands.topic import all_topics
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        about = client.cluster()
        described = {topic["topic"]: topic for topic in all_topics(client)}
        topics = {topic: [dict(each.raw) for each in client.topic(topic).partitions()] for topic in described}
        under_way = all_operations(client)
        alive = [node for node in about["nodes"] if node.get("alive", True)]
        ready = {node["node"]: readyz(client, node["url"]) for node in alive}
    rows = node_rows(about["nodes"], topics)
    troubles = troubles_of(about["nodes"], topics, described=described, ready=ready)
    troubles += [finding for _, finding in mixed_programs(about)] + changes_of(under_way)
    if not about.get("catalog_leader"):
        troubles.insert(0, "the catalog has no leader: no topic can be created, changed or deleted")
    if listing.format == "json":
        show_json({**about, "nodes": rows, "topics": len(topics), "troubles": troubles})
    else:
        show(rows, listing, columns=("node", "status", "url", "shards", "leads", "replicas"), name="node")
    if listing.format == "table":
        count = sum(map(len, topics.values()))
        print(f"\n{len(topics)} topics, {count} partitions; " + ("all well" if not troubles else "not well:"))
        if about.get("insecure"):
            print(
                "  insecure: other machines reach the HTTP ports, and what protects from them is not all set"
            )
        for trouble in troubles:
            print(f"  {trouble}")
    return EXIT_FAILED if troubles else EXIT_DONE


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
    """Return a sentence for each change under way; steps of them, and most moves, are only counted."""
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


def _of_nodes(ready: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    found = []
    for node, said in sorted(ready.items()):
        if said is None:
            found.append(f"node {node} does not answer /readyz")
            continue
        found += [f"node {node} is not ready: {reason}" for reason in said.get("reasons") or ()]
        disk = said.get("disk") or {}
        if disk.get("appends_refused"):
            found.append(
                f"node {node} refuses appends: its disk has {disk['free_bytes']:,} bytes free, "
                f"the minimum is {disk['low_water_bytes']:,}"
            )
        system = [
            each for each in said.get("warnings") or () if each.startswith(("_transactions ", "_audit "))
        ]
        found += [each for each in system if each not in found]
    return found


def waits_for(partition: Mapping[str, Any]) -> str:
    """Return text to put after "has no leader", "" if no replica is recovering.

    It names the replicas that may have forgotten entries, and those that the partition waits for.
    """
    replicas = partition.get("replicas") or ()
    recovering = [each["node"] for each in replicas if each.get("recovering")]
    absent = [each["node"] for each in replicas if not each.get("reachable")]
    if not recovering:
        return ""
    text = f": {', '.join(recovering)} may have forgotten appends"
    return f"{text}, it waits for {', '.join(absent)}" if absent else text


def readyz(client: Client, url: str) -> Mapping[str, Any] | None:
    """Return the node's answer to ``/readyz``; None if it does not answer."""
    from laminar.client.errors import Error

    try:
        found = client.ask_node(url, "/readyz", timeout=READY_TIMEOUT_S).json()
    except Error:
        return None
    return found if isinstance(found, dict) and found else None


def troubles_of(
    nodes: Sequence[Mapping[str, Any]],
    topics: Partitions,
    *,
    described: Mapping[str, Mapping[str, Any]] | None = None,
    ready: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> list[str]:
    """Return a sentence for each problem. `described` are the topics, `ready` the nodes' own states."""
    found = _of_nodes(ready or {})
    for topic, it in sorted((described or {}).items()):
        if it["replicas_placed"] < it["replicas"]:
            found.append(f"{topic} has {it['replicas_placed']} of the {it['replicas']} replicas asked for")
        for partition in topics.get(topic, ()):
            fewest = int(it.get("settings", {}).get("min_replicas", 1))
            in_sync = sum(1 for each in partition.get("replicas") or () if each.get("in_sync"))
            if partition.get("leader") is not None and in_sync < fewest:
                place = f"{topic}/{partition['partition']}"
                found.append(f"{place} takes no appends: {in_sync} in sync, min_replicas is {fewest}")
    found += [f"node {node['node']} does not answer" for node in nodes if not node.get("alive", True)]
    found += [
        f"the data folder of node {node['node']} is an older copy: it takes part in nothing"
        for node in nodes
        if node.get("rolled_back")
    ]
    for topic, partitions in sorted(topics.items()):
        for partition in partitions:
            place = f"{topic}/{partition['partition']}"
            behind = [each["node"] for each in partition.get("replicas") or () if not each.get("in_sync")]
            if partition.get("leader") is None:
                found.append(f"{place} has no leader{waits_for(partition)}")
            elif behind:
                found.append(f"{place} is not in sync on {', '.join(behind)}")
            found += [
                f"{place} on {each['node']} holds records that the cluster has discarded, and takes no part"
                for each in partition.get("replicas") or ()
                if each.get("abandoned")
            ]
            found += [
                f"{place} on {each['node']} has stopped: {each.get('reason') or 'no reason is known'}"
                for each in partition.get("replicas") or ()
                if each.get("state") == "failed"
            ]
            for node in sorted({each["node"] for each in partition.get("damaged") or ()}):
                ranges = [
                    f"{each['first_offset']} to {each['next_offset'] - 1}"
                    for each in partition["damaged"]
                    if each["node"] == node and each["next_offset"] > each["first_offset"]
                ]
                what = f"offsets {', '.join(ranges)}" if ranges else "entries without records"
                found.append(f"{place} is damaged on {node}: {what}")
    return found
