"""`laminar channel receive`, `ack`, `nack` and so on: a consumer's calls by hand, and its failed records."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from laminar.cli.commands.admin.channels import Name, Topic
from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.exit_codes import EXIT_PARTLY
from laminar.cli.lines import PLACES, as_json, compile_format
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, OUTPUT, Cluster, Listing

if TYPE_CHECKING:
    from laminar.client.descriptions import AsideInfo, ChannelInfo
    from laminar.client.records import Settled
    from laminar.client.sync.channel import Job

Token = Annotated[str, Parameter(help="PARTITION:OFFSET:DELIVERY, as `receive` or `dead` prints it.")]
Limit = Annotated[int, Parameter(name=["--limit", "-n"], help="At most this number.")]
Key = Annotated[str | None, Parameter(help="Only records with this key.")]
Tag = Annotated[str | None, Parameter(help="Only records with this tag.")]
Reason = Annotated[str | None, Parameter(help="Only records with this text in their reason.")]


def receive(
    topic: Topic,
    name: Name,
    *,
    max: Annotated[int, Parameter(name=["--max", "-n"], help="End after this number of jobs.")] = 1,
    wait: Annotated[float, Parameter(help="End after this number of seconds without a job.")] = 5.0,
    ack: Annotated[
        bool, Parameter(negative="", help="Acknowledge what was printed: it does not come again.")
    ] = False,
    time: Annotated[
        float | None,
        Parameter(help="Seconds until a job that is not acknowledged comes again. (default: the channel's)"),
    ] = None,
    format: Annotated[
        str | None,
        Parameter(help=PLACES + r"; \n, \t as in C. (default: token, attempt, value)", group=OUTPUT),
    ] = None,
    json: Annotated[bool, Parameter(negative="", help="A JSON object a line.", group=OUTPUT)] = False,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Receive jobs and print them. Without --ack they come again, to any consumer, after their time."""
    if max < 1:
        raise UsageError("--max is at least 1")
    line = compile_format(format) if format is not None else None
    with cluster.connect() as client:
        channel = client.topic(topic).channel(name)
        left = max
        while left and (jobs := channel.receive_batch(min(left, 1000), wait=wait, timeout=time)):
            for job in jobs:
                sys.stdout.buffer.write(
                    job_as_json(job) if json else line(job) if line is not None else job_line(job)
                )
            sys.stdout.buffer.flush()
            if ack:
                warn_late(channel.settle(ack=[job.token for job in jobs]))
            left -= len(jobs)
        if left == max:
            why = why_none(channel.describe())
            raise Failed(f"no job came within {wait:g} s{why}")


def why_none(channel: ChannelInfo) -> str:
    """Return why a channel delivers nothing new, as the end of a sentence; empty if that is unknown."""
    if channel.paused:
        return ": the channel is paused, and `laminar channel resume` ends that"
    if channel.blocked:
        return ": too many of its records are out or aside, see `laminar channel describe`"
    return ""


def job_line(job: Job[bytes]) -> bytes:
    """Return a job as a line: token, attempt, value."""
    return b"%s\t%d\t%s\n" % (job.token.encode(), job.attempt, job.raw)


def job_as_json(job: Job[bytes]) -> bytes:
    """Return a job as a line of JSON: its record, with token and attempt."""
    record = msgspec.json.decode(as_json(job))
    return msgspec.json.encode({"token": job.token, "attempt": job.attempt} | record) + b"\n"


def ack(topic: Topic, name: Name, *tokens: Token, cluster: Cluster = ANY_CLUSTER) -> None:
    """Acknowledge jobs: they are not delivered again."""
    settle(topic, name, cluster, ack=some(tokens))


def nack(
    topic: Topic,
    name: Name,
    *tokens: Token,
    delay: Annotated[
        float | None, Parameter(help="Seconds until the next attempt. (default: as the channel is set)")
    ] = None,
    reason: Annotated[str, Parameter(help="For those who look at the dead.")] = "",
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Report that jobs failed: they are delivered again, or are dead after the channel's last attempt."""
    settle(topic, name, cluster, nack=some(tokens), delay=delay, reason=reason)


def release(topic: Topic, name: Name, *tokens: Token, cluster: Cluster = ANY_CLUSTER) -> None:
    """Return jobs unprocessed: they are delivered again at once, and the attempt does not count."""
    settle(topic, name, cluster, release=some(tokens))


def settle(topic: str, name: str, cluster: Cluster, **said: Any) -> None:
    """Send the outcome of jobs (done, failed, returned); exit code 3 if some tokens had expired."""
    with cluster.connect() as client:
        settled = client.topic(topic).channel(name).settle(**said)
    warn_late(settled)
    if settled.late:
        raise Failed(f"{settled.done} done, {len(settled.late)} late", code=EXIT_PARTLY)


def warn_late(settled: Settled) -> None:
    """Warn of the jobs whose delivery had expired."""
    for token in settled.late:
        complain(f"{token} is late: no consumer has the job by this token now, if one ever had")


def some(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens. Raises `UsageError` if there are none."""
    if not tokens:
        raise UsageError("name at least one token, as `laminar channel receive` prints them")
    return tokens


def seek(
    topic: Topic,
    name: Name,
    *,
    at: Annotated[
        str, Parameter(help="earliest, latest, -1h, or a time (RFC 3339).", allow_leading_hyphen=True)
    ],
    drop: Annotated[
        bool, Parameter(negative="", help="What is out or waits before it ends, except the dead.")
    ] = False,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Move a channel: records from there on are delivered again, acknowledged or not."""
    from laminar.cli.output import show

    with cluster.connect() as client:
        offsets = client.topic(topic).channel(name).seek(at, drop=drop)
    rows = [{"partition": partition, "offset": offset} for partition, offset in sorted(offsets.items())]
    show(rows, listing, columns=("partition", "offset"), name="partition")


def aside(
    topic: Topic,
    name: Name,
    *,
    key: Key = None,
    tag: Tag = None,
    reason: Reason = None,
    limit: Limit = 100,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List the records that wait to be tried again."""
    with cluster.connect() as client:
        channel = client.topic(topic).channel(name)
        show_aside(channel.aside(key=key, tag=tag, reason=reason, limit=limit), listing)


def dead(
    topic: Topic,
    name: Name,
    *tokens: Token,
    replay: Annotated[bool, Parameter(negative="", help="Give them out again.")] = False,
    drop: Annotated[bool, Parameter(negative="", help="End them: they are listed no more.")] = False,
    all: Annotated[bool, Parameter(negative="", help="All dead records, in place of tokens.")] = False,
    key: Key = None,
    tag: Tag = None,
    reason: Reason = None,
    limit: Limit = 100,
    listing: Listing = AS_TABLE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """List the dead records; or replay or drop those that the tokens name, or all with --all."""
    if replay and drop:
        raise UsageError("say --replay or --drop")
    if (replay or drop) == (not tokens and not all) or (tokens and all):
        raise UsageError("say --replay or --drop with tokens, or with --all; none of them lists")
    if (replay or drop) and (key, tag, reason) != (None, None, None):
        raise UsageError("--key, --tag and --reason are for the list: replay or drop its tokens")
    with cluster.connect() as client:
        channel = client.topic(topic).channel(name)
        if not (replay or drop):
            show_aside(channel.dead(key=key, tag=tag, reason=reason, limit=limit), listing)
            return
        count = (channel.replay if replay else channel.drop)("all" if all else tokens)
    print(f"{count:,} {'replayed' if replay else 'dropped'}")
    if tokens and count < len(tokens):
        raise Failed(
            f"{len(tokens) - count} of {len(tokens)} are not dead, or not any more", code=EXIT_PARTLY
        )


def show_aside(found: list[AsideInfo], listing: Listing) -> None:
    """Print records that wait for another attempt or are dead, by partition and offset."""
    from laminar.cli.output import show

    columns = ("token", "attempts", "time", "waits_for_key", "key", "tag", "reason")
    rows = [
        {field: getattr(each, field) for field in ("partition", "offset", *columns, "unreadable")}
        | {"key": None if each.key is None else each.key.decode(errors="backslashreplace")}
        for each in found
    ]
    show(rows, listing, columns=columns, name="token")
