"""`laminar topic`: create, alter, list, describe, trim, delete."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

Name = Annotated[str, Parameter(help="The topic's name.")]


def create(
    topic: Name,
    *,
    partitions: Annotated[int | None, Parameter(help="How many; the server's default is 1.")] = None,
    replicas: Annotated[
        int | None, Parameter(help="Copies of each, on a node each; by default the nodes' default_replicas.")
    ] = None,
    setting: Annotated[
        tuple[str, ...], Parameter(help="A setting, as NAME=VALUE; may be repeated.", negative="")
    ] = (),
    if_not_exists: Annotated[
        bool, Parameter(negative="", help="Do nothing if the topic exists with the same configuration.")
    ] = False,
    allow_fewer_replicas: Annotated[
        bool, Parameter(negative="", help="Create it also where fewer nodes are alive than replicas wanted.")
    ] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Create a topic; return when every replica is made."""
    with cluster.connect() as client:
        made = client.create_topic(
            topic,
            partitions=partitions,
            replicas=replicas,
            settings=settings_of(setting),
            allow_fewer_replicas=allow_fewer_replicas,
            exist_ok=if_not_exists,
        )
        about = made.describe().raw if allow_fewer_replicas else {}
    if about.get("replicas_placed") != about.get("replicas"):
        complain(fewer_replicas(about))


def alter(
    topic: Name,
    *,
    replicas: Annotated[int | None, Parameter(help="Copies of each partition from now on.")] = None,
    setting: Annotated[
        tuple[str, ...],
        Parameter(help="A setting, as NAME=VALUE (NAME=null removes it); may be repeated.", negative=""),
    ] = (),
    allow_fewer_replicas: Annotated[
        bool, Parameter(negative="", help="Also more replicas than there are nodes to hold them.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Change a topic's number of replicas or its settings; partitions grow or shrink afterwards."""
    from urllib.parse import quote

    from laminar.cli.output import show_json

    if replicas is None and not setting:
        raise UsageError("say --replicas or --setting, or both")
    path = f"/v1/topics/{quote(topic, safe='')}"
    change: dict[str, Any] = {"settings": settings_of(setting)}
    if replicas is not None:
        change |= {"replicas": replicas, "allow_fewer_replicas": allow_fewer_replicas}
    with cluster.connect() as client:
        version = client.request_json("GET", path)["version"]
        about = client.request_json("PATCH", path, change, headers={"If-Match": f'"{version}"'})
    if about["replicas_placed"] != about["replicas"]:
        complain(fewer_replicas(about) + "; `laminar operations list` shows how far it is")
    if listing.format == "json":
        show_json(about)


def fewer_replicas(about: Mapping[str, Any]) -> str:
    """Return a note on a topic that has fewer replicas than it was created with."""
    return f"{about['topic']} has {about['replicas_placed']} of {about['replicas']} replicas"


def settings_of(given: tuple[str, ...]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` words as a mapping; a value that is JSON is decoded, any other is text."""
    import msgspec

    found: dict[str, Any] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UsageError(f"--setting is NAME=VALUE, not {word!r}")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def list_topics(
    prefix: Annotated[str, Parameter(help="Only topics that begin so.")] = "",
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List topics by name."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        rows = list(all_topics(client, prefix))
    show(rows, listing, columns=("topic", "partitions", "replicas_placed", "state", "created"), name="topic")


def all_topics(client: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Return every topic's description, sorted by name, over all pages of the answer."""
    from urllib.parse import quote

    rows: list[dict[str, Any]] = []
    after = ""
    while True:
        target = f"/v1/topics?limit=1000&prefix={quote(prefix, safe='')}&after={quote(after, safe='')}"
        answer = client.request_json("GET", target)
        rows += answer["topics"]
        after = answer.get("next") or ""
        if not after:
            return rows


def describe(topic: Name, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Show a topic's figures and each partition. `-o names` gives the partitions' numbers."""
    from laminar.cli.output import show, show_json

    with cluster.connect() as client:
        handle = client.topic(topic)
        about = dict(handle.describe().raw)
        partitions = [dict(each.raw) for each in handle.partitions()]
    if listing.format == "json":
        show_json(about | {"partition_list": partitions})
        return
    if listing.format == "table":
        asked, placed = about.get("replicas"), about.get("replicas_placed")
        copies = f"{asked} replicas" if placed in (None, asked) else f"{placed} of {asked} replicas"
        settings = "".join(f", {name}={value}" for name, value in (about.get("settings") or {}).items())
        print(f"{topic}: {len(partitions)} partitions, {copies}{settings}")
    rows = [partition_row(each) for each in partitions]
    columns = ("partition", "leader", "replicas", "in_sync", "start_offset", "end_offset", "bytes", "term")
    show(rows, listing, columns=columns, name="partition")


def partition_row(partition: dict[str, Any]) -> dict[str, Any]:
    """Return a partition's answer as a row of words."""
    replicas = partition.get("replicas") or []
    in_sync = sum(1 for each in replicas if each.get("in_sync"))
    return partition | {
        "leader": (partition.get("leader") or {}).get("node"),
        "replicas": [each["node"] for each in replicas],
        "in_sync": f"{in_sync}/{len(replicas)}",
    }


def trim(
    topic: Name,
    *,
    before: Annotated[
        str,
        Parameter(help="An offset, `latest`, a time, or a distance such as -10m.", allow_leading_hyphen=True),
    ],
    partition: Annotated[
        int | None, Parameter(help="Only this one; an offset belongs to one partition.")
    ] = None,
    dry_run: Annotated[bool, Parameter(negative="", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Remove a topic's oldest records, after asking. Whole batches go, so a few before it may stay."""
    from dataclasses import asdict

    from laminar.cli.output import show

    with cluster.connect() as client:
        handle = client.topic(topic)
        if before.isascii() and before.isdigit():
            known = [each.partition for each in handle.partitions()]
            if partition is None and len(known) > 1:
                raise UsageError(f"{topic} has several partitions: --partition is required")
            offsets = {known[0] if partition is None else partition: int(before)}
        else:
            found = handle.offsets(before)
            if partition is not None and partition not in found:
                raise UsageError(f"{topic} has no partition {partition}")
            offsets = found if partition is None else {partition: found[partition]}
        if not dry_run and not yes:
            planned = [
                handle.delete_before(offset, partition=number, dry_run=True)
                for number, offset in offsets.items()
            ]
            confirm(f"delete {sum(each.deleted for each in planned):,} records of topic {topic}?")
        rows = [
            asdict(handle.delete_before(offset, partition=number, dry_run=dry_run))
            for number, offset in offsets.items()
        ]
    columns = ("partition", "deleted", "from_offset", "start_offset", "held_back_by")
    show(rows, listing, columns=columns, name="partition")


def delete(
    topic: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Delete a topic with all its records, after asking."""
    with cluster.connect() as client:
        if not yes:
            records = sum(each.end_offset - each.start_offset for each in client.topic(topic).partitions())
            confirm(f"delete topic {topic} and all its records (there are {records:,})?")
        client.delete_topic(topic)


def confirm(question: str) -> None:
    """Ask on the terminal, and raise Failed unless the answer is yes; UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Not a terminal, so --yes is required")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        complain("nothing was done")
        raise Failed("not confirmed")
