"""`laminar sink`: sinks (which commit batches over partitions), and the last batch of each."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

Name = Annotated[str, Parameter(help="The sink's name.")]


def list_sinks(
    prefix: Annotated[str, Parameter(help="Only those whose names begin so.")] = "",
    *,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List sinks."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        rows = [each._asdict() for each in client.sinks(prefix)]
    columns = ("sink", "epoch", "committed", "publishing", "once", "deleting", "changed")
    show(rows, listing, columns=columns, name="sink")


def delete(
    name: Name,
    *,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Delete a sink, after asking. Committed records stay; a batch sent again under its name is new."""
    from laminar.cli.commands.topic import confirm
    from laminar.client.errors import NotFound

    with cluster.connect() as client:
        sink = client.sink(name)
        try:
            known = sink.describe()
        except NotFound:
            pass  # `delete` says so
        else:
            # A deletion that has begun is continued without asking again.
            if not yes and not known.deleting:
                confirm(f"delete sink {name}, last changed {known.changed}? What it committed stays.")
        sink.delete()
