"""`laminar token` and `laminar whoami`: tokens, and the grants of each.

A grant is written ``ROLE:PREFIX``: the role on all names that begin with PREFIX. ``ROLE`` alone is the role
on every name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from laminar.cli.commands.admin.limit import limits_text
from laminar.cli.errors import UsageError, complain
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

ROLES = ("read", "write", "admin", "metrics")
COLUMNS = ("id", "name", "grants", "created", "expires", "certificate", "limits", "usage")

Id = Annotated[str, Parameter(help="The token's id, as `laminar token list` shows it.")]


def create(
    name: Annotated[str, Parameter(help="Whose token it is; several tokens may have one name.")],
    *,
    grant: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="ROLE:PREFIX, such as write:orders, for topics whose names begin so; ROLE alone: for all. "
            "Roles are read, write, admin, metrics. Any number of times.",
        ),
    ],
    expires: Annotated[
        str | None, Parameter(help="A span of time, such as 90d, or a time. [default: never]")
    ] = None,
    to: Annotated[
        Path | None,
        Parameter(help="Write the token to this file, which is its owner's alone. [default: print it]"),
    ] = None,
    certificate: Annotated[
        str | None,
        Parameter(help="Accept a client certificate with this subject; then no token is made."),
    ] = None,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Create a token. It is shown only now: the cluster keeps no copy."""
    from laminar.cli.times import later

    if not grant:
        raise UsageError("say what it permits: --grant ROLE:PREFIX")
    if certificate is not None and to is not None:
        raise UsageError("with --certificate no token is made, so there is nothing to write --to a file")
    wanted: dict[str, Any] = {"name": name, "grants": [grant_of(each) for each in grant]}
    expiry = later("--expires", expires)
    if expiry is not None:
        wanted["expires"] = expiry.isoformat()
    if certificate is not None:
        wanted["certificate"] = certificate
    # Opened first: a token that could be written nowhere would be lost.
    target = None if to is None else os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    made: dict[str, Any] | None = None
    try:
        with cluster.connect() as client:
            made = client.request_json("POST", "/v1/admin/tokens", wanted)
        if target is not None and made is not None:
            os.write(target, f"{made['token']}\n".encode())
    finally:
        if target is not None and to is not None:
            os.close(target)
            if made is None:
                to.unlink()
    expiring = f", until {made['expires']}" if made.get("expires") else ""
    complain(f"{made['id']} of {made['name']}: {grants_text(made['grants'])}{expiring}")
    if to is None and made["token"]:
        print(made["token"])


def list_tokens(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """List tokens: the principal of each and what it may do. Secrets are not shown."""
    with cluster.connect() as client:
        tokens = client.request_json("GET", "/v1/admin/tokens")["tokens"]
    _show(tokens, listing, name="id")


def show(token: Id, *, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Show a token: its principal and what it may do."""
    with cluster.connect() as client:
        _show([client.request_json("GET", path_of(token))], listing, name="id")


def revoke(
    *tokens: Id,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Revoke tokens, after asking: requests with them are refused from then on."""
    from laminar.cli.commands.topic import confirm

    if not tokens:
        raise UsageError("name at least one token by its id, as `laminar token list` shows it")
    with cluster.connect() as client:
        for token in tokens:
            if not yes:
                known = client.request_json("GET", path_of(token))
                confirm(f"revoke token {token} of {known['name']} ({grants_text(known['grants'])})?")
            client.request_json("DELETE", path_of(token))


def whoami(*, listing: Listing = AS_TABLE, cluster: Cluster = ANY_CLUSTER) -> None:
    """Show your principal, its grants and its limits."""
    with cluster.connect() as client:
        _show([client.request_json("GET", "/v1/whoami")], listing, name="principal")


def grant_of(text: str) -> dict[str, str]:
    """Return the grant that ``ROLE:PREFIX`` or ``ROLE`` names. Raises `UsageError`."""
    role, _, prefix = text.partition(":")
    if role not in ROLES:
        raise UsageError(f"--grant {text!r} is not ROLE or ROLE:PREFIX; roles are {', '.join(ROLES)}")
    return {"role": role, "prefix": prefix}


def grants_text(grants: Iterable[Mapping[str, str]]) -> str:
    """Return grants in the form that `grant_of` reads, separated by commas."""
    return ", ".join(f"{each['role']}:{each['prefix']}".removesuffix(":") for each in grants)


def path_of(token: str) -> str:
    """Return the URL path of a token. Raises `UsageError` for what is no id, such as the whole token."""
    if len(token) != 16 or not set(token) <= set("0123456789abcdef"):
        shown = f" {token!r}" if len(token) < 30 else ""  # a token itself is not printed again
        raise UsageError(f"the id of a token is 16 hexadecimal digits, not{shown or ' this'}")
    return f"/v1/admin/tokens/{token}"


def _show(rows: list[dict[str, Any]], listing: Listing, *, name: str) -> None:
    from laminar.cli.output import show as show_rows

    columns = tuple(column for column in (name, *COLUMNS) if any(row.get(column) for row in rows))
    if listing.format != "json":
        rows = [row | {"grants": grants_text(row["grants"])} for row in rows]
        for row in rows:
            row.update((each, limits_text(row[each])) for each in ("limits", "usage") if row.get(each))
    show_rows(rows, listing, columns=tuple(dict.fromkeys(columns)) or (name,), name=name)
