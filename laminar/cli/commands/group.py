"""`laminar group`: the replicas of one partition, where an operator must decide for them."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import UsageError, complain
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing


def recover(
    partition: Annotated[str | None, Parameter(help="TOPIC/PARTITION.")] = None,
    *,
    every: Annotated[bool, Parameter(name="--all", negative="", help="All partitions that wait.")] = False,
    accept_loss: Annotated[
        bool,
        Parameter(
            negative="",
            help="Accept the loss of records that only absent replicas have. Without it, show them.",
        ),
    ] = False,
    empty: Annotated[
        bool, Parameter(negative="", help="Where no copy is left, go on without any record.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Let partitions continue without replicas that never come back, with what is left.

    Two cases. After a power loss of a majority a partition with `flush=interval` waits for every replica,
    because an absent one may hold records that the others lost. And a partition that has lost a majority of
    its disks waits for them for ever. Only you can say that the absent replicas are gone for good: they never
    take part again.
    Exit code 1 while any of these partitions has neither a leader nor your acceptance of the loss.
    """
    from laminar.cli.commands.topic import all_topics
    from laminar.cli.output import show
    from laminar.client.errors import Error

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
            ]
        said = [name for name, is_said in (("accept_loss", accept_loss), ("empty", empty)) if is_said]
        word = "?" + "&".join(f"{name}=true" for name in said) if said else ""
        rows: list[dict[str, Any]] = []
        refused: list[str] = []
        for name, which in wanted:
            place = f"{name}/{which}"
            try:
                found = client.request_json("POST", f"/v1/topics/{name}/partitions/{which}/recover{word}")
            except Error as error:
                if not every:
                    raise
                refused.append(f"{place}: {error}")
            else:
                rows.append({"group": place} | found)
    columns = (
        "group",
        "answering",
        "absent",
        "recovering",
        "abandoned",
        "goes_on_from",
        "kept_offset",
        "accepted",
    )
    show(rows, listing, columns=columns, name="group")
    for line in refused:
        complain(line)
    if every and not wanted:
        complain("every partition has a leader: nothing to do")
    if not accept_loss and rows:
        complain("nothing was done: after `kept_offset`, what only absent replicas hold would be lost")
    undone = [
        row
        for row in rows
        if not row["accepted"] or not (row["abandoned"] or row["accepted"] == row["recovering"])
    ]
    return EXIT_FAILED if undone or refused else EXIT_DONE
