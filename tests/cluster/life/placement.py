"""Where the partitions of a cluster are and where they should be, from what its HTTP API says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import Any

from laminar.node.placement.wanted import wanted_nodes
from membership.records import CatalogState, NodeRecord, PartitionRecord, TopicRecord
from tests.cluster.life.growing import Api


async def describe(api: Api) -> dict[str, list[dict[str, Any]]]:
    """Return the described partitions of all topics, internal ones too, by topic."""
    listed = await api.told("/v1/topics?limit=1000")
    found = {}
    for topic in listed["topics"]:
        # A topic that is being deleted may be listed.
        told = await api.get(f"/v1/topics/{topic['topic']}/partitions")
        found[topic["topic"]] = told["partitions"] if told is not None else []
    return found


async def misplaced(api: Api, *, gone: Collection[str] = ()) -> str:
    """Return how placement differs from the wanted set of the nodes without `gone`; "" if it does not.

    Replicas that are not made, not in sync or about to leave are differences too.
    """
    state = await _catalog(api)
    if state is None:
        return "no node tells the catalog"
    differences = []
    for topic, partitions in (await describe(api)).items():
        if len(partitions) != state.topics[topic].partitions:
            differences.append(f"{topic} has {len(partitions)} partitions")
        for told in partitions:
            record = _partition(topic, told["partition"])
            wanted = set(wanted_nodes(state, record, unfit=gone))
            held = {each["node"] for each in told["replicas"]}
            whole = all(each["state"] == "made" and each["in_sync"] for each in told["replicas"])
            if held != wanted or told["leaving"]:
                leaving = [each["node"] for each in told["leaving"]]
                differences.append(
                    f"{topic}/{record.number} is on {sorted(held)}, wanted on {sorted(wanted)}, "
                    f"leaving {leaving}"
                )
            elif not whole:
                differences.append(f"{topic}/{record.number} has replicas that are not in sync")
    return f"{len(differences)} partitions, as {differences[0]}" if differences else ""


async def fewest_replicas(api: Api) -> dict[str, int]:
    """Return by topic how many replicas its partition with the fewest has."""
    return {
        topic: min((len(each["replicas"]) for each in partitions), default=0)
        for topic, partitions in (await describe(api)).items()
    }


async def uneven(api: Api, nodes: Collection[str]) -> str:
    """Return how the leaders are spread, if not within 10 % of even (rounded to whole ones); else ""."""
    leads, missing = await leaders(api)
    even = sum(leads.values()) / len(nodes)
    low, high = math.floor(even * 0.9), math.ceil(even * 1.1)
    counts = {node: leads[node] for node in sorted(nodes)}
    strangers = sorted(leads.keys() - set(nodes))
    if missing or strangers or not all(low <= count <= high for count in counts.values()):
        return (
            f"leaders {counts}, wanted {low} to {high} each; {missing} without a leader; {strangers} lead too"
        )
    return ""


async def leaders(api: Api) -> tuple[Counter[str], int]:
    """Return how many partitions each node leads, and how many have no leader."""
    leads: Counter[str] = Counter()
    missing = 0
    for partitions in (await describe(api)).values():
        for told in partitions:
            if told["leader"] is None:
                missing += 1
            else:
                leads[told["leader"]["node"]] += 1
    return leads, missing


async def _catalog(api: Api) -> CatalogState | None:
    """Return as much of the catalog as the wanted set depends on."""
    nodes, topics = await api.get("/v1/admin/nodes"), await api.get("/v1/topics?limit=1000")
    if nodes is None or topics is None:
        return None
    return CatalogState(
        nodes={each["node"]: _node(each) for each in nodes["nodes"]},
        topics={
            each["topic"]: TopicRecord(
                each["topic"], each["partitions"], each["replicas"], {}, created_ms=0, version=0
            )
            for each in topics["topics"]
        },
    )


def _node(told: dict[str, Any]) -> NodeRecord:
    return NodeRecord(
        told["node"],
        b"",
        "",
        http_port=0,
        shard_http_ports=[],
        peer_ports=[],
        gossip_port=0,
        shards=1,
        weight=told["weight"],
        zone=told.get("zone", ""),
        draining=told.get("draining", False),
    )


def _partition(topic: str, number: int) -> PartitionRecord:
    return PartitionRecord(topic, number, group=b"", state="live", replicas=[], created_ms=0)
