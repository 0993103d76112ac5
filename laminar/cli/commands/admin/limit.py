"""`laminar limit`: how much each principal may use.

A limit is written ``NAME=NUMBER``, or ``NAME=none`` for no limit. The principal ``*`` is each one that has no
limits of its own.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from laminar.cli.errors import UsageError
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

NAMES = (
    "requests_per_s",
    "bytes_in_per_s",
    "bytes_out_per_s",
    "connections",
    "topics",
    "partitions",
    "channels",
    "cursors",
    "sinks",
    "uploads",
    "producers",
)
"""The names of limits, as in `laminar.http.api.documents.access`; a test compares the two."""

Principal = Annotated[
    str, Parameter(help="Its name, as in `laminar token list`; '*': each one without limits of its own.")
]


def list_limits(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List the limits of principals; those of * hold for each one that is not listed."""
    with cluster.connect() as client:
        rows = client.request_json("GET", "/v1/admin/limits")["principals"]
    _show(rows, listing)


def show(principal: Principal, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Show the limits of a principal."""
    with cluster.connect() as client:
        _show([client.request_json("GET", path_of(principal))], listing)


def set_limits(
    principal: Principal,
    *limits: Annotated[str, Parameter(help="NAME=NUMBER, or NAME=none for no limit; others stay.")],
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Set limits of a principal; what is not named stays as it is."""
    if not limits:
        raise UsageError(f"say which: NAME=NUMBER, of {', '.join(NAMES)}")
    changes = dict(map(limit_of, limits))
    with cluster.connect() as client:
        known = client.request_json("GET", path_of(principal))
        wanted = {name: limit for name, limit in (known["limits"] | changes).items() if limit is not None}
        match = {"If-Match": f'"{known["version"]}"'}
        _show([client.request_json("PUT", path_of(principal), wanted, headers=match)], listing)


def remove(principal: Principal, *, cluster: Cluster = ANY_CLUSTER) -> None:
    """Remove the limits of a principal: then those of * hold for it."""
    with cluster.connect() as client:
        client.request_json("PUT", path_of(principal), {}, headers={"If-Match": "*"})


def limit_of(text: str) -> tuple[str, int | None]:
    """Return the limit that ``NAME=NUMBER`` or ``NAME=none`` sets. Raises `UsageError`."""
    name, _, number = text.partition("=")
    if name not in NAMES:
        raise UsageError(f"{text!r}: there is no limit {name!r}, there are {', '.join(NAMES)}")
    if number == "none":
        return name, None
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise UsageError(f"{text!r}: say {name}=NUMBER, a whole number above 0, or {name}=none")
    return name, int(number)


def limits_text(limits: dict[str, int]) -> str:
    """Return limits in the form that `limit_of` reads, separated by commas."""
    return ", ".join(f"{name}={limit}" for name, limit in limits.items())


def path_of(principal: str) -> str:
    """Return the URL path of a principal's limits."""
    return f"/v1/admin/limits/{quote(principal, safe='*')}"


def _show(rows: list[dict[str, Any]], listing: Listing) -> None:
    from laminar.cli.output import show as show_rows

    if listing.format != "json":
        rows = [row | {"limits": limits_text(row["limits"])} for row in rows]
    show_rows(rows, listing, columns=("principal", "limits"), name="principal")
