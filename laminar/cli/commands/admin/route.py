"""`laminar topic route|split|merge|move|cancel`: which partition holds which keys, and changes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

if TYPE_CHECKING:
    from laminar.client.descriptions import RouteInfo
    from laminar.client.sync.client import Client

LOGICAL_PARTITIONS = 65_536

Name = Annotated[str, Parameter(help="The topic's name.")]
Number = Annotated[int, Parameter(help="The partition's number.")]
Wait = Annotated[
    float,
    Parameter(help="Seconds that the change may wait for uploads and stages before it is cancelled."),
]
Abandon = Annotated[
    bool, Parameter(negative="", help="Drop uploads and unprepared stages then, in place of the change.")
]
Force = Annotated[
    bool,
    Parameter(negative="", help="Also where a partition has no leader; only if the topic's order is weak."),
]
Avoid = Annotated[
    tuple[str, ...], Parameter(help="A node that gets no new partition; may be repeated.", negative="")
]
Detach = Annotated[bool, Parameter(negative="", help="Return once the change has begun.")]


def route(
    topic: Name,
    *,
    version: Annotated[
        int | None, Parameter(help="Only the change that made this version of the route, or makes it.")
    ] = None,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Show which partition holds which keys, which partitions have ended, and the change under way."""
    from laminar.cli.output import show, show_json

    if version is not None:
        _show_change(topic, version, listing, cluster)
        return
    with cluster.connect() as client:
        found = client.topic(topic).route()
        partitions = [each.raw for each in client.topic(topic).partitions()]
        change = _described(client, topic, found.changing) if found.changing is not None else None
    if listing.format == "json":
        show_json(dict(found.raw) | {"change": change, "partition_list": partitions})
        return
    if listing.format == "table":
        print(f"{topic}: route {found.version}")
        if change is not None:
            print(_under_way(change))
    rows = [
        {
            "partition": each["partition"],
            "status": each["status"],
            "from": each["from"],
            "to": each["to"],
            "share": f"{(each['to'] - each['from']) / LOGICAL_PARTITIONS:.1%}",
            "inputs": each["inputs"],
            "outputs": each["outputs"],
            "records": (each["end_offset"] or 0) - (each["start_offset"] or 0),
        }
        for each in sorted(partitions, key=lambda each: (each["from"], each["partition"]))
    ]
    columns = ("partition", "status", "from", "to", "share", "inputs", "outputs", "records")
    show(rows, listing, columns=columns, name="partition")


def split(
    topic: Name,
    partition: Number,
    *,
    at: Annotated[
        tuple[int, ...],
        Parameter(help="A logical partition with which a part begins; may be repeated.", negative=""),
    ] = (),
    key: Annotated[str | None, Parameter(help="A key with whose logical partition a part begins.")] = None,
    into: Annotated[
        int | None, Parameter(help="How many parts that divide the newest records evenly. [default: 2]")
    ] = None,
    avoid: Avoid = (),
    wait: Wait = 60.0,
    abandon: Abandon = False,
    force: Force = False,
    detach: Detach = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Split a partition: new partitions take the records of its keys from now on, in order."""
    if sum((bool(at), key is not None, into is not None)) > 1:
        raise UsageError("say one of --at, --key and --into")
    with cluster.connect() as client:
        begun = client.topic(topic).split(
            partition,
            key if key is not None else list(at) or None,
            into=2 if into is None else into,
            avoid=avoid,
            wait=wait,
            abandon=abandon,
            force=force,
            detach=True,
        )
        _finish(client, topic, begun, wait=None if detach else wait, listing=listing)


def merge(
    topic: Name,
    *partitions: Annotated[int, Parameter(help="Partitions that are neighbours by key range.")],
    avoid: Avoid = (),
    wait: Wait = 60.0,
    abandon: Abandon = False,
    force: Force = False,
    detach: Detach = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Merge partitions: one new partition takes the records of their keys from now on, in order."""
    if len(partitions) < 2:
        raise UsageError("name two partitions or more")
    with cluster.connect() as client:
        begun = client.topic(topic).merge(
            partitions, avoid=avoid, wait=wait, abandon=abandon, force=force, detach=True
        )
        _finish(client, topic, begun, wait=None if detach else wait, listing=listing)


def move(
    topic: Name,
    partition: Number,
    *,
    avoid: Avoid = (),
    wait: Wait = 60.0,
    abandon: Abandon = False,
    force: Force = False,
    detach: Detach = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Replace a partition by a new one on other nodes, for records from now on; older records stay there."""
    with cluster.connect() as client:
        begun = client.topic(topic).move(
            partition, avoid=avoid, wait=wait, abandon=abandon, force=force, detach=True
        )
        _finish(client, topic, begun, wait=None if detach else wait, listing=listing)


def cancel(topic: Name, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Cancel the change of a topic's route that is under way."""
    with cluster.connect() as client:
        version = client.topic(topic).cancel_change()
    if version is None:
        complain(f"no change of topic {topic} is under way")


def reclaim(topic: Name, partition: Number, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Delete a partition that has ended, once consumers have acknowledged all of it."""
    from laminar.client.errors import NotDrained

    with cluster.connect() as client:
        try:
            gone = client.topic(topic).reclaim(partition)
        except NotDrained as error:
            behind = ", ".join(f"{name} at {position}" for name, position in dict(error.limit).items())
            # The server says of what these are.
            hint = (
                "dead records count: `laminar channel dead` replays or drops them, `laminar channel delete` "
                "removes what is not used"
                if "channels" in error.message
                else "`laminar cursor delete` removes what is not used"
            )
            raise Failed(f"{error.message}: {behind}; {hint}") from None
    print(f"partition {partition} of {topic} is reclaimed: {gone.deleted} records")


def _finish(client: Client, topic: str, route: RouteInfo, *, wait: float | None, listing: Listing) -> None:
    """Wait until the change under way is done, unless `wait` is None; show the route."""
    from laminar.cli.output import ProgressLine, show_json

    if wait is not None and route.changing is not None:
        line = ProgressLine()
        try:
            route = client.topic(topic).wait_for_route(
                route.changing, wait=wait, progress=lambda change: line.show(_under_way(change))
            )
        finally:
            line.end()
    if listing.format == "json":
        show_json(route.raw)
    elif wait is None and route.changing is not None:
        print(f"{topic}: the change to route {route.changing} is under way")
    else:
        shares = ", ".join(f"{number}: {held.start} to {held.stop}" for number, held in route.ranges.items())
        print(f"{topic}: route {route.version}; {shares}")


def _show_change(topic: str, version: int, listing: Listing, cluster: Cluster) -> None:
    """Show the partitions that a change ended, and those that it made."""
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        change = _described(client, topic, version)
        if change is None:
            newest = client.topic(topic).route().version
            raise Failed(f"no known change made route {version} of topic {topic}, which has route {newest}")
    if listing.format == "json":
        show_json(change)
        return
    if listing.format == "table":
        print(_under_way(change))
    ended = [each | {"is": "reclaimed" if each["reclaimed"] else "input"} for each in change["inputs"]]
    made = [each | {"is": "output", "end": None, "sealed": None} for each in change["outputs"]]
    columns = ("partition", "is", "from", "to", "end", "sealed")
    show(ended + made, listing, columns=columns, name="partition")


def _described(client: Client, topic: str, version: int) -> dict[str, Any] | None:
    """Return the change that makes, or made, a route; None if there is none."""
    from laminar.client.errors import NotFound

    try:
        found: dict[str, Any] = client.request_json(
            "GET", f"/v1/topics/{quote(topic, safe='')}/routes/{version}"
        )
    except NotFound as error:
        if error.code != "no_such_route":
            raise
        return None
    return found


def _under_way(change: Mapping[str, Any]) -> str:
    inputs = ", ".join(str(each["partition"]) for each in change["inputs"])
    outputs = ", ".join(str(each["partition"]) for each in change["outputs"])
    waits = "; ".join(change.get("waits_for") or ())
    text = f"route {change['version']} is {change['state']}: {inputs} to {outputs}"
    return f"{text}; waits for {waits}" if waits else text
