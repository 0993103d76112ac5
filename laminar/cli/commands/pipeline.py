"""`laminar pipeline`: jobs of `laminar.spark.pipelines`, in a Spark session of their own."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from laminar.cli.errors import Failed, UsageError, complain
from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import ANY_CLUSTER, AS_TABLE, Cluster, Listing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK = Group("Spark", sort_key=8)

Topic = Annotated[str, Parameter(help="The topic's name.")]
Folder = Annotated[str, Parameter(help="A folder as Spark names it: a path, hdfs://, s3a://.")]


@Parameter(name="*", group=SPARK)
@dataclass(frozen=True, kw_only=True)
class Spark:
    """The options that say on which Spark master a job runs, and with which settings of Spark."""

    master: Annotated[
        str | None,
        Parameter(help="Spark's master: spark://..., yarn, local[4]. Else Spark's own, else here."),
    ] = None
    conf: Annotated[
        tuple[str, ...], Parameter(name="--conf", negative="", help="A setting of Spark, as name=value.")
    ] = ()

    @contextmanager
    def session(self, name: str) -> Iterator[SparkSession]:
        """Within the block, open a Spark session for the job `name`."""
        if importlib.util.find_spec("pyspark") is None:
            raise Failed("pyspark is not installed (pip install 'laminar-mq[spark]')")
        from laminar.spark.pipelines.session import session

        conf = {}
        for each in self.conf:
            key, sign, value = each.partition("=")
            if not sign or not key:
                raise UsageError(f"--conf is name=value, not {each!r}")
            conf[key] = value
        with session(f"laminar pipeline {name}", master=self.master, conf=conf) as spark:
            yield spark


HERE = Spark()


def options_of(cluster: Cluster) -> dict[str, str]:
    """Return the options of Spark's source and sink for a cluster."""
    from laminar.spark.pipelines.session import cluster_options

    return cluster_options(
        cluster.url,
        cluster.token,
        token_file=cluster.token_file,
        ca=cluster.ca,
        certificate=cluster.certificate,
        key=cluster.key,
    )


def archive(
    topic: Topic,
    to: Folder,
    *,
    batch_records: Annotated[int, Parameter(help="Records of one micro-batch.")] = 5_000_000,
    listing: Listing = AS_TABLE,
    spark: Spark = HERE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Write a topic to Parquet by day, each record once; run again, it continues where it was."""
    from laminar.spark.pipelines import archive as job

    with spark.session("archive") as running:
        written = job.archive(
            running, options_of(cluster), topic, to, batch_records=batch_records, progress=_ProgressLine()
        )
        held = [asdict(each) for each in job.check(running, to)]
    complain(f"{written} records written")
    _show(held, listing, name="partition")
    return _code(all(not each["missing"] and not each["doubled"] for each in held), "the archive is damaged")


def replay(
    to: Annotated[str, Parameter(help="The topic that is written.")],
    *,
    checkpoint: Annotated[
        str,
        Parameter(help="A folder of this job's own, as Spark names it: with it the same command goes on."),
    ],
    archive: Annotated[str | None, Parameter(help="A folder that `laminar pipeline archive` wrote.")] = None,
    topic: Annotated[str | None, Parameter(help="Or the topic that is read.")] = None,
    since: Annotated[
        str | None,
        Parameter(help="Only records from this time on: -1h, or RFC 3339.", allow_leading_hyphen=True),
    ] = None,
    until: Annotated[
        str | None, Parameter(help="Only records before this time.", allow_leading_hyphen=True)
    ] = None,
    keep_partitions: Annotated[
        bool, Parameter(negative="", help="Into the partitions of the same numbers, whatever the keys.")
    ] = False,
    slice_records: Annotated[
        int, Parameter(help="Records of a partition that are committed at once.")
    ] = 1_000_000,
    listing: Listing = AS_TABLE,
    spark: Spark = HERE,
    cluster: Cluster = ANY_CLUSTER,
) -> None:
    """Write an archive, or a time range of a topic, into another topic: once, each key in order."""
    from laminar.spark.pipelines import replay as job

    if (archive is None) is (topic is None):
        raise UsageError("one of --archive and --topic says what is replayed")
    with spark.session("replay") as running:
        done = job.replay(
            running,
            options_of(cluster),
            to,
            checkpoint=checkpoint,
            archive=archive,
            topic=topic,
            since_ms=_time_ms("since", since),
            until_ms=_time_ms("until", until),
            keep_partitions=keep_partitions,
            slice_records=slice_records,
            progress=_ProgressLine(),
        )
    _show([asdict(done)], listing, name="sink")


def audit(
    topic: Topic,
    claims: Annotated[
        str, Parameter(help="What producers say they wrote: Parquet or JSON lines, column id.")
    ],
    *,
    id: Annotated[
        str, Parameter(help="Where a record carries its id: key, value, header:NAME or json:$.path.")
    ] = "value",
    listing: Listing = AS_TABLE,
    spark: Spark = HERE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Compare what producers say they wrote with what a topic holds: lost, doubled, reordered."""
    from laminar.spark.pipelines import audit as job

    with spark.session("audit") as running:
        report = job.audit(running, options_of(cluster), topic, job.read_claims(running, claims), id=id)
    complain(f"{report.claims} claims, {report.records} records")
    _show([asdict(each) for each in report.findings], listing, name="kind")
    return _code(report.sound, "the topic does not hold what was claimed")


def compare(
    topic: Topic,
    other: Annotated[str | None, Parameter(help="The other topic; else the one of the same name.")] = None,
    *,
    other_url: Annotated[
        str | None, Parameter(help="Nodes of the other cluster, with commas, where it is another.")
    ] = None,
    other_token: Annotated[str | None, Parameter(help="A token of the other cluster.")] = None,
    other_token_file: Annotated[
        Path | None, Parameter(help="A file with a token of the other cluster.")
    ] = None,
    other_ca: Annotated[
        Path | None, Parameter(help="A PEM file with the other cluster's CA. [default: as --ca]")
    ] = None,
    replicas: Annotated[
        bool, Parameter(negative="", help="Compare the replicas of each partition instead.")
    ] = False,
    by: Annotated[
        Literal["place", "key"],
        Parameter(help="Pair records by partition and offset, or by key in their order."),
    ] = "place",
    columns: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="What is compared: key, value, headers, tag, timestamp. [default: all]"),
    ] = (),
    listing: Listing = AS_TABLE,
    spark: Spark = HERE,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Compare two topics, or the replicas of one: what only one of them has."""
    from laminar.spark.pipelines import compare as job
    from laminar.spark.pipelines.session import RECORD

    if replicas and (other is not None or other_url or by != "place"):
        raise UsageError("--replicas compares the replicas of one topic by place: there is no other")
    if not replicas and other is None and not other_url:
        raise UsageError("another topic, --other-url or --replicas says what it is compared with")
    compared = columns or RECORD
    here = options_of(cluster)
    other_cluster = replace(
        cluster, url=other_url, token=other_token, token_file=other_token_file, ca=other_ca or cluster.ca
    )
    there = options_of(other_cluster) if other_url else here
    with spark.session("compare") as running:
        if replicas:
            found = job.compare_replicas(running, here, topic, columns=compared)
        else:
            one, two = job.Side(cluster=here, topic=topic), job.Side(cluster=there, topic=other or topic)
            found = [job.compare(running, one, two, by=by, columns=compared)]
    for number, each in enumerate(found, start=1):
        against = f"replica {number}" if replicas else "the other"
        complain(f"{each.records} records, {each.others} in {against}")
    rows = [
        {"replica": number, **asdict(each)} if replicas else asdict(each)
        for number, compared_with in enumerate(found, start=1)
        for each in compared_with.differences
    ]
    _show(rows, listing, name="kind")
    return _code(all(each.equal for each in found), "they are not equal")


def _time_ms(option: str, given: str | None) -> int | None:
    """Return a time as `laminar consume` takes it, in epoch milliseconds."""
    if given is None:
        return None
    from laminar.client.consume.reader import start_parameter
    from laminar.client.errors import ConfigError

    try:
        return int(start_parameter(given, now_ms=time.time_ns() // 1_000_000))
    except (ConfigError, ValueError):
        raise UsageError(f"--{option} is a time as -1h or 2026-01-31T12:00:00Z, not {given!r}") from None


class _ProgressLine:
    """Progress on standard error, where that is a terminal."""

    def __call__(self, *numbers: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{' of '.join(f'{number:,}' for number in numbers)}", end="", file=sys.stderr, flush=True
            )


def _show(rows: list[Mapping[str, Any]] | list[dict[str, Any]], listing: Listing, *, name: str) -> None:
    from laminar.cli.output import show

    show(rows, listing, columns=tuple(rows[0]) if rows else (name,), name=name)


def _code(sound: bool, said: str) -> int:
    if sound:
        return EXIT_DONE
    complain(said)
    return EXIT_FAILED
