"""`laminar delayed`: records that are published later; list them, cancel them, or change their time."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import UsageError
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing
from laminar.cli.times import due_of, moment

if TYPE_CHECKING:
    from laminar.client.delayed import DelayedState

Topic = Annotated[str, Parameter(help="The topic's name.")]
Id = Annotated[str, Parameter(help="The record's id, as its receipt or `laminar delayed list` has it.")]


def list_delayed(
    topic: Topic,
    *,
    key: Annotated[str | None, Parameter(help="Only records with this key.")] = None,
    since: Annotated[
        str | None, Parameter(name="--from", help="Only what is due at this time or later.")
    ] = None,
    to: Annotated[str | None, Parameter(help="Only what is due before this time.")] = None,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="At most this number.")] = 100,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List the records that are pending, in order of their times."""
    from laminar.cli.output import show

    start, end = moment("--from", since), moment("--to", to)
    with cluster.connect() as client:
        found = list(islice(client.topic(topic).list_delayed(start=start, end=end, key=key), limit))
    rows: list[dict[str, Any]] = [
        {
            "id": each.id,
            "deliver_at": each.deliver_at.isoformat(timespec="milliseconds"),
            "partition": each.partition,
            "key": None if each.key is None else each.key.decode(errors="backslashreplace"),
            "tag": each.tag,
            "bytes": each.value_bytes,
        }
        for each in found
    ]
    show(rows, listing, columns=("id", "deliver_at", "partition", "key", "tag", "bytes"), name="id")


def describe(topic: Topic, id: Id, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Say whether a record is pending, published or cancelled."""
    with cluster.connect() as client:
        say(client.topic(topic).delayed(id))


def cancel(topic: Topic, id: Id, *, cluster: Cluster = ANY_CLUSTER) -> int:
    """Cancel a record. 1 if it is published already."""
    with cluster.connect() as client:
        found = client.topic(topic).cancel_delayed(id)
    say(found)
    return int(found.state != "cancelled")


def move(
    topic: Topic,
    id: Id,
    *,
    at: Annotated[str | None, Parameter(help="The new time: RFC 3339, as 2030-01-31T12:00:00Z.")] = None,
    delay: Annotated[str | None, Parameter(help="Or how long from now, as 30s, 5m, 2h or 7d.")] = None,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Change the time at which a record is published. 1 if it is published or cancelled already."""
    due = due_of("--at", at, delay)
    if due is None:
        raise UsageError("say --at or --delay")
    with cluster.connect() as client:
        found = client.topic(topic).move_delayed(id, deliver_at=due)
    say(found)
    return int(found.state != "pending")


def fire(topic: Topic, id: Id, *, cluster: Cluster = ANY_CLUSTER) -> int:
    """Publish a record now. 1 if it is cancelled."""
    with cluster.connect() as client:
        found = client.topic(topic).move_delayed(id, deliver_at="now")
    say(found)
    return int(found.state == "cancelled")


def say(found: DelayedState) -> None:
    """Print the state of a delayed record."""
    at = "" if found.deliver_at is None else f" {found.deliver_at.isoformat(timespec='milliseconds')}"
    print(f"{found.id} {found.state}{at}")
