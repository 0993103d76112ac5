"""`laminar bench produce`, `consume` and `latency`: options, the run, and the printed result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from laminar.cli.errors import UsageError, complain
from laminar.cli.options import ANY_CLUSTER, OUTPUT, Cluster

if TYPE_CHECKING:
    from laminar.client.topic import Topic

MOST_RATE = 10_000_000
MOST_SECONDS = 7 * 86_400
MOST_IN_FLIGHT = 10_000
DEFAULT_PARTITIONS = 12
CALL_TIMEOUT_S = 60.0

Name = Annotated[str, Parameter(help="The topic's name; it is made, unless --existing is given.")]
Size = Annotated[int, Parameter(help="Bytes of each record's value.")]
Rate = Annotated[float | None, Parameter(help="Records a second; without it as fast as it goes.")]
Seconds = Annotated[float, Parameter(help="How long records are sent.")]
Json = Annotated[bool, Parameter(negative="", help="Print the report as JSON.", group=OUTPUT)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Written:
    """The topic that a load writes: a new one, or an existing one if that is permitted."""

    partitions: Annotated[
        int | None, Parameter(help=f"Partitions of the topic that is made. [default: {DEFAULT_PARTITIONS}]")
    ] = None
    replicas: Annotated[
        int | None, Parameter(help="Its replicas; by default the nodes' default_replicas.")
    ] = None
    setting: Annotated[
        tuple[str, ...], Parameter(help="A setting of it, as NAME=VALUE; may be repeated.", negative="")
    ] = ()
    existing: Annotated[
        bool, Parameter(negative="", help="Append to a topic that exists, beside what it has.")
    ] = False
    delete: Annotated[
        bool, Parameter(negative="", help="Delete the topic in the end, which was made for this.")
    ] = False

    def begin(self, cluster: Cluster, topic: str, size: int, *, at_least: int) -> dict[str, Any]:
        """Make the topic, or find it; return the beginning of the report. Raises `UsageError`."""
        from laminar.cli.commands.bench import setup
        from laminar.cli.commands.topic import settings_of

        settings = settings_of(self.setting)
        if self.existing and (self.delete or settings or self.partitions or self.replicas):
            raise UsageError("--existing goes without --delete, --partitions, --replicas and --setting")
        with cluster.connect() as client:
            setup.check_size(client, size, at_least=at_least)
            if not self.existing:
                setup.make(
                    client,
                    topic,
                    partitions=DEFAULT_PARTITIONS if self.partitions is None else self.partitions,
                    replicas=self.replicas,
                    settings=settings,
                )
            return setup.described(client, topic)

    @contextmanager
    def used(self, cluster: Cluster, topic: str) -> Iterator[None]:
        """Delete the topic after the block if that is wanted; otherwise name the topic that was created."""
        try:
            yield
        finally:
            if self.delete:
                with cluster.connect() as client:
                    client.delete_topic(topic)
            elif not self.existing:
                complain(f"topic {topic} stays, with its records: `laminar topic delete {topic}`")


A_NEW_TOPIC = Written()


def produce(
    topic: Name,
    *,
    size: Size = 1024,
    rate: Annotated[float | None, Parameter(help="Records a second; without it as fast as it goes.")] = None,
    seconds: Seconds = 10.0,
    batch: Annotated[int, Parameter(help="Bytes of a full batch.")] = 512 << 10,
    written: Written = A_NEW_TOPIC,
    json: Json = False,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Send records in batches, as a producer does. 3 if some failed, or the rate was not reached."""
    from laminar.cli.commands.bench import loads
    from laminar.cli.commands.bench.report import Report
    from laminar.cli.commands.bench.tally import Tally

    _check(rate=rate, seconds=seconds)
    if not 1024 <= batch <= 16 << 20:
        raise UsageError(f"--batch is 1,024 to {16 << 20:,} bytes, not {batch:,}")
    about = written.begin(cluster, topic, size, at_least=1)
    load = loads.Load(size=size, seconds=seconds, rate=rate, batch_bytes=batch)
    tally = Tally()
    with written.used(cluster, topic):
        is_whole = _run(cluster, topic, lambda opened: loads.produce(opened, load, tally))
    asked = {"kind": "produce", "size": size, "rate": rate, "seconds": seconds, "batch_bytes": batch}
    return Report(about, asked, tally, is_whole=is_whole).show(json=json)


def latency(
    topic: Name,
    *,
    size: Size = 1024,
    rate: Annotated[float, Parameter(help="Records a second.")] = 100.0,
    seconds: Seconds = 10.0,
    in_flight: Annotated[int, Parameter(help="Appends without an answer at a time; others wait.")] = 256,
    written: Written = A_NEW_TOPIC,
    json: Json = False,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Append records one by one, and read them. 3 if some failed, or the rate was not reached."""
    from laminar.cli.commands.bench import loads
    from laminar.cli.commands.bench.report import Report
    from laminar.cli.commands.bench.tally import Tally

    _check(rate=rate, seconds=seconds)
    if not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise UsageError(f"--in-flight is 1 to {MOST_IN_FLIGHT:,}, not {in_flight:,}")
    about = written.begin(cluster, topic, size, at_least=loads.HEAD_BYTES)
    load = loads.Load(size=size, seconds=seconds, rate=rate, in_flight=in_flight)
    tally, read = Tally(), Tally()
    with written.used(cluster, topic):
        is_whole = _run(cluster, topic, lambda opened: loads.latency(opened, load, tally, read))
    asked = {"kind": "latency", "size": size, "rate": rate, "seconds": seconds, "in_flight": in_flight}
    return Report(about, asked, tally, read=read, is_whole=is_whole).show(json=json)


def consume(
    topic: Annotated[str, Parameter(help="The topic's name.")],
    *,
    rate: Annotated[float | None, Parameter(help="Records a second; without it as fast as it goes.")] = None,
    seconds: Annotated[
        float | None, Parameter(help="End after this time. [default: all that is there]")
    ] = None,
    json: Json = False,
    cluster: Cluster = ANY_CLUSTER,
) -> int:
    """Read all records of a topic, from the earliest to the end. 3 if the reading failed."""
    from laminar.cli.commands.bench import loads, setup
    from laminar.cli.commands.bench.report import Report
    from laminar.cli.commands.bench.tally import Tally

    _check(rate=rate, seconds=seconds)
    with cluster.connect() as client:
        about = setup.described(client, topic)
    tally = Tally()
    is_whole = _run(cluster, topic, lambda opened: loads.consume(opened, tally, rate=rate, seconds=seconds))
    asked = {"kind": "consume", "rate": rate, "seconds": seconds}
    return Report(about, asked, tally, is_whole=is_whole).show(json=json)


def _check(*, rate: float | None, seconds: float | None) -> None:
    if rate is not None and not 0.1 <= rate <= MOST_RATE:
        raise UsageError(f"--rate is 0.1 to {MOST_RATE:,} records a second, not {rate:g}")
    if seconds is not None and not 0.1 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds is 0.1 to {MOST_SECONDS:,}, not {seconds:g}")


def _run(cluster: Cluster, topic: str, load: Callable[[Topic[bytes]], Awaitable[None]]) -> bool:
    """Run a load on a loop of its own; return whether it was not interrupted."""
    import asyncio

    import uvloop

    from laminar.client.client import connect

    timeout = CALL_TIMEOUT_S if cluster.timeout is None else cluster.timeout

    async def run() -> None:
        async with connect(cluster.url, **cluster.proof, timeout=timeout) as client:
            await load(client.topic(topic))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        return False
    return True
