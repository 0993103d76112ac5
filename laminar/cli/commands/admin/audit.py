"""`laminar audit`: what admins did and who was refused, from the topic `_audit`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from laminar.cli.errors import UsageError, complain
from laminar.cli.options import ANY_CLUSTER, OUTPUT, Cluster
from laminar.http.api.names import AUDIT_TOPIC

if TYPE_CHECKING:
    from laminar.wire.audit import AuditRecord


def audit(
    *,
    since: Annotated[
        str | None,
        Parameter(
            help="Begin 10m, 2h or 1d ago, or at a time (RFC 3339). [default: the earliest kept]",
            allow_leading_hyphen=True,
        ),
    ] = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Wait for more.")] = False,
    principal: Annotated[str | None, Parameter(help="Only what this principal did.")] = None,
    refused: Annotated[bool, Parameter(negative="", help="Only what was refused.")] = False,
    limit: Annotated[
        int | None, Parameter(name=["--limit", "-n"], help="End after this number of records.")
    ] = None,
    json: Annotated[bool, Parameter(negative="", help="A JSON object a line.", group=OUTPUT)] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Show what admins did and who was refused."""
    from laminar.cli.commands.consume import start_of
    from laminar.client.errors import NotFound
    from laminar.wire.audit import AuditRecord

    if limit is not None and limit < 1:
        raise UsageError(f"--limit is 1 or more, not {limit}")
    start, unknown, printed = start_of(since), 0, 0
    with cluster.connect(timeout=60) as client:
        try:
            for record in client.topic(AUDIT_TOPIC).read(start, follow=follow):
                try:
                    found = msgspec.json.decode(record.value, type=AuditRecord)
                except msgspec.MsgspecError:
                    unknown += 1
                    continue
                if (principal is not None and found.principal != principal) or (
                    refused and found.kind != "refused"
                ):
                    continue
                print(bytes(record.value).decode() if json else line_of(found), flush=follow)
                printed += 1
                if printed == limit:
                    break
        except NotFound as error:
            if error.code != "no_such_topic":
                raise
            complain(
                f"there is no audit: topic {AUDIT_TOPIC} does not exist. Nodes with access=tokens create it "
                "with the first record; nodes with access=open, such as those of `laminar dev`, keep no audit"
            )
    if unknown:
        print(f"{unknown} records of {AUDIT_TOPIC} are not audit records, and were left out", file=sys.stderr)


def line_of(record: AuditRecord) -> str:
    """Return a record as a line."""
    head = f"{record.time} {record.node}/{record.shard} "
    if record.kind == "missed":
        return f"{head}{record.count} records are missing here: they could not be written in time"
    again = f", {record.count} times since {record.first}" if record.count > 1 else ""
    asked = f" {record.method} {record.path}: {record.status or 'no answer'}" if record.method else ""
    code = f" {record.code}" if record.code else ""
    return f"{head}{record.kind} {record.principal} from {record.address}{asked}{code}{again}"
