"""`laminar group`: the replicas of one partition, where a person must decide for them."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli import EXIT_DONE, EXIT_FAILED
from laminar.cli.faults import UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing


def recover(
    partition: Annotated[str | None, Parameter(help="TOPIC/PARTITION.")] = None,
    *,
    every: Annotated[bool, Parameter(name="--all", negative="", help="All that wait.")] = False,
    accept_loss: Annotated[
        bool, Parameter(negative="", help="Give up what only absent replicas hold. Without it: say what.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Let partitions go on that wait for replicas that never come back, with what is left.

    After a power loss of a majority a partition with `flush=interval` waits for every replica, as an absent
    one may hold what the others forgot. If it is gone for good, only you can say so.
    """
    from laminar.cli.output import show
    from laminar.cli.topic import all_topics

    if every == (partition is not None):
        raise UsageError("say TOPIC/PARTITION or --all, and not both")
    with cluster.connect() as client:
        if partition is not None:
            topic, slash, number = partition.rpartition("/")
            if not slash or not number.isascii() or not number.isdigit():
                raise UsageError(f"{partition} is no TOPIC/PARTITION such as flights/3")
            wanted = [(topic, int(number))]
        else:
            wanted = [
                (topic["topic"], each.raw["partition"])
                for topic in all_topics(client)
                for each in client.topic(topic["topic"]).partitions()
                if each.raw.get("leader") is None
                and any(replica.get("marked") for replica in each.raw.get("replicas") or ())
            ]
        word = "?accept_loss=true" if accept_loss else ""
        rows: list[dict[str, Any]] = [
            {"group": f"{topic}/{number}"}
            | client.request_json("POST", f"/v1/topics/{topic}/partitions/{number}/recover{word}")
            for topic, number in wanted
        ]
    columns = ("group", "marked", "absent", "goes_on_from", "kept_offset", "accepted")
    show(rows, listing, columns=columns, name="group")
    if not accept_loss and rows:
        complain("nothing was done: behind `kept_offset`, what only absent replicas hold would be lost")
    return EXIT_FAILED if any(row["accepted"] != row["marked"] for row in rows) else EXIT_DONE
