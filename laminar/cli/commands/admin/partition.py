"""`laminar partition` and `laminar leader`: where a partition is, and which node leads it."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError
from laminar.cli.exit_codes import EXIT_PARTLY
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

Place = Annotated[str, Parameter(help="TOPIC/PARTITION.")]

POLL_S = 0.2
LEADER_WAIT_S = 30.0


def place_of(text: str) -> tuple[str, int]:
    """Return the topic and the partition's number in a text TOPIC/PARTITION.

    Raises:
        UsageError: the text does not have that form.
    """
    topic, slash, number = text.rpartition("/")
    if not slash or not topic or not number.isascii() or not number.isdigit():
        raise UsageError(f"{text} is no TOPIC/PARTITION such as flights/3")
    return topic, int(number)


def path_of(partition: str) -> str:
    """Return the URL path of a partition's placement."""
    topic, number = place_of(partition)
    return f"/v1/admin/topics/{quote(topic, safe='')}/partitions/{number}"


def move(
    partition: Place,
    *,
    to: Annotated[str, Parameter(help="The nodes, with commas: as many as the topic has replicas.")],
    reason: Annotated[str, Parameter(help="Why, for those who come later.")],
    allow_other_number: Annotated[
        bool, Parameter(negative="", help="Also to more or fewer nodes than the topic has replicas.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Pin a partition to nodes: its replicas move there one by one, and stay until it is unpinned."""
    nodes = [name for name in to.split(",") if name]
    body = {"nodes": nodes, "reason": reason, "allow_other_number": allow_other_number}
    with cluster.connect() as client:
        found = client.request_json("PUT", path_of(partition) + "/pin", body)
    _show(found, listing)


def unpin(partition: Place, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Unpin a partition: its replicas move to the nodes that its rank chooses."""
    with cluster.connect() as client:
        found = client.request_json("DELETE", path_of(partition) + "/pin")
    _show(found, listing)


def _show(found: dict[str, Any], listing: Listing) -> None:
    from laminar.cli.output import show_json

    place = f"{found['topic']}/{found['partition']}"
    if listing.format == "json":
        show_json(found)
    elif listing.format == "names":
        print(place)
    else:
        held = ", ".join(each["node"] for each in found["replicas"])
        print(f"{place}: on {held}; wanted on {', '.join(found['wanted'])}")


def transfer(
    partition: Place,
    *,
    to: Annotated[str, Parameter(help="A node that has a replica.")],
    wait: Annotated[bool, Parameter(help="Wait until the node leads.", negative="--no-wait")] = True,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Choose the node that leads a partition; return when it does. Exit code 3 if that takes too long."""
    from laminar.cli.output import show_json

    topic, number = place_of(partition)
    with cluster.connect() as client:
        found = client.request_json("POST", path_of(partition) + "/leader", {"node": to})
        deadline_s = time.monotonic() + LEADER_WAIT_S
        leader = None
        while wait:
            target = f"/v1/topics/{quote(topic, safe='')}/partitions/{number}"
            leader = (client.request_json("GET", target).get("leader") or {}).get("node")
            if leader == to:
                break
            chosen = client.request_json("GET", path_of(partition))["preferred_leader"]
            if chosen != to:
                raise Failed(
                    f"{chosen} is chosen to lead {partition} again: {to} would lead more than its share, "
                    f"and leads nothing that could be exchanged",
                    code=EXIT_PARTLY,
                )
            if time.monotonic() >= deadline_s:
                raise Failed(
                    f"{to} is chosen to lead {partition}, and {leader or 'no node'} still does",
                    code=EXIT_PARTLY,
                )
            time.sleep(POLL_S)
    if listing.format == "json":
        show_json(found | {"leader": leader})
