"""A cluster as Spark's processes see it: blocking calls over the client's session, one per process.

It decides nothing about batches; it finds partitions and offsets, and fetches ranges. Connections live in
this module, not in readers: Spark unpickles a reader for every task, and keeps the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from laminar.batch import Batch, split
from laminar.client.client import Client
from laminar.client.configuration import Endpoints, resolve
from laminar.client.errors import NotFound, OffsetExpired, Unavailable
from laminar.client.portal import Portal
from laminar.client.session import Session, topic_path
from laminar.http.endings import Answer
from laminar.spark.offsets import EARLIEST, LATEST, Partition, Place, Positions, partition_key
from laminar.spark.options import Options
from laminar.spark.plan import DataLoss, Range, loss_message
from laminar.spark.succession import predecessors

T = TypeVar("T")

# One stretch of a task's records: the rows from the second to before the third of a batch.
Piece = tuple[Batch, int, int]

FETCH_BYTES: Final = 4 << 20
LEAST_FETCH_BYTES: Final = 64 << 10
# Answers without a record, from replicas that have them all, before that counts as a fault.
EMPTY_ANSWERS: Final = 3

_clusters: dict[tuple[int, Endpoints, int], Cluster] = {}
_making = threading.Lock()
_tuned = False


def resolve_endpoints(options: Options) -> Endpoints:
    """Where the cluster is, by the options or else the environment; found in the driver, for everybody."""
    return resolve(options.endpoints or None, options.token)


def cluster(endpoints: Endpoints, *, timeout_ms: int) -> Cluster:
    """This process's connection to the cluster; made at the first call."""
    # By process as well: a thread does not survive a fork.
    key = (os.getpid(), endpoints, timeout_ms)
    with _making:
        found = _clusters.get(key)
        if found is None:
            found = _clusters[key] = Cluster(endpoints, timeout_s=timeout_ms / 1000)
        return found


def tune() -> None:
    """Once per worker process: take what is loaded out of the garbage collector's sight.

    Spark's daemon collects after every task, 3 to 30 ms over imported modules alone.
    """
    global _tuned
    if not _tuned:
        _tuned = True
        gc.collect()
        gc.freeze()


class Bounds(NamedTuple):
    """One partition as its leader, or another replica a moment ago, described it."""

    earliest: int
    end: int
    size_bytes: int

    @property
    def record_bytes(self) -> float:
        """Bytes of a record in the mean, as they are stored; 0 if there is none."""
        return self.size_bytes / (self.end - self.earliest) if self.end > self.earliest else 0.0


class Description(NamedTuple):
    """The partitions of a query, and the version of each topic's route.

    Ends may be a moment old, and a partition nobody can speak for just now is left out.
    """

    bounds: dict[Partition, Bounds]
    routes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Columns:
    """What of the records is wanted: `fields` as in the API (None: all), records with `tag` only if given."""

    fields: tuple[str, ...] | None = None
    tag: str | None = None


EVERYTHING: Final = Columns()


class Cluster:
    """Blocking calls to one cluster, each with all the client's retries until `timeout_s` is over."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._portal = Portal()
        self._client = Client(endpoints, timeout=timeout_s)
        self._portal.run(lambda: self._client.__aenter__())
        # Bytes of a record in each partition, as last seen: a small range asks for no more than it needs.
        self._record_bytes: dict[Partition, float] = {}

    @property
    def session(self) -> Session:
        return self._client.session

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(lambda: work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the client's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._portal.loop)

    def close(self) -> None:
        """End connections and thread: for tests; a Spark worker keeps them as long as it lives."""
        self._portal.run(lambda: self._client.close())
        self._portal.close()

    # -- partitions and their offsets ----------------------------------------------------------

    async def topics(self, options: Options) -> list[str]:
        """The topics that `options` name, sorted; NotFound later for one that is not there."""
        if options.pattern is not None:
            pattern = re.compile(options.pattern)
            return [name for name in await self._client.topics() if pattern.fullmatch(name)]
        return sorted({topic for topic, _ in options.assigned}) if options.assigned else list(options.topics)

    async def describe(self, options: Options) -> Description:
        """What is known of every partition read; one request a topic."""
        found: dict[Partition, Bounds] = {}
        routes: dict[str, int] = {}
        for topic, answer in await self._described(options):
            routes[topic] = int(answer.get("route") or 0)
            for row in answer["partitions"]:
                if row.get("end_offset") is not None:
                    sizes = [int(row.get(name) or 0) for name in ("start_offset", "end_offset", "bytes")]
                    found[(topic, int(row["partition"]))] = Bounds(*sizes)
        if options.assigned:
            found = {partition: found[partition] for partition in options.assigned if partition in found}
        return Description(found, routes)

    async def partitions(self, options: Options) -> list[Partition]:
        """Every partition that `options` name. NotFound if one is not there."""
        found: list[Partition] = []
        for topic, answer in await self._described(options):
            found += [(topic, int(row["partition"])) for row in answer["partitions"]]
        missing = sorted(set(options.assigned) - set(found))
        if missing:
            raise NotFound(f"there is no partition {partition_key(missing[0])}", code="no_such_partition")
        return list(options.assigned) if options.assigned else found

    async def _described(self, options: Options) -> list[tuple[str, dict[str, Any]]]:
        """Each topic, and what its ``/partitions`` answers."""
        topics = await self.topics(options)
        paths = [f"{topic_path(topic)}/partitions" for topic in topics]
        answers = await asyncio.gather(*map(self.session.get_json, paths))
        return list(zip(topics, answers, strict=True))

    async def replaced(self, topic: str) -> dict[Partition, dict[Partition, int]]:
        """See `laminar.spark.succession.Replaced`; of one topic."""
        answer = await self.session.get_json(f"{topic_path(topic)}/routes")
        found: dict[Partition, dict[Partition, int]] = {}
        for number, before in predecessors(answer["routes"]).items():
            # Sealed before the route was published, so these ends are final.
            ends = {(topic, each): await self.offset_at((topic, each), "latest") for each in sorted(before)}
            found[(topic, number)] = ends
        return found

    async def offset_at(self, partition: Partition, at: str) -> int:
        """The offset at ``earliest``, ``latest`` or an epoch time in ms, confirmed by a majority."""
        return await self.session.offset_at(*partition, at)

    async def positions(self, options: Options, place: Place, *, beyond_is_error: bool = False) -> Positions:
        """`place` as an offset in each partition.

        ValueError if `place` leaves a partition out or names one that is not read; and, with
        `beyond_is_error`, if it is a time after all records.
        """
        partitions = await self.partitions(options)
        if place.values and set(place.values) != set(partitions):
            odd = sorted(set(place.values) ^ set(partitions))
            raise ValueError(f"an offset is needed for each partition that is read, no other: {odd[0]}")
        found = await asyncio.gather(*(self._position(place, each, beyond_is_error) for each in partitions))
        return dict(zip(partitions, found, strict=True))

    async def _position(self, place: Place, partition: Partition, beyond_is_error: bool) -> int:
        if place.kind in ("earliest", "latest"):
            return await self.offset_at(partition, place.kind)
        if place.kind == "offsets":
            given = place.values[partition]
            if given in (EARLIEST, LATEST):
                return await self.offset_at(partition, "earliest" if given == EARLIEST else "latest")
            return given
        time_ms = place.values[partition] if place.kind == "timestamps" else place.time_ms
        offset = await self.offset_at(partition, str(time_ms))
        if beyond_is_error and offset >= await self.offset_at(partition, "latest"):
            raise ValueError(
                f"{partition_key(partition)} has no record at or after {time_ms}; with the option"
                " startingOffsetsByTimestampStrategy=latest the query starts at its end"
            )
        return offset

    async def wait_past(self, partition: Partition, offset: int, *, wait_ms: int) -> None:
        """Return when there is a record at `offset`, or `wait_ms` (below 10 s) later."""
        topic, number = partition
        target = (
            f"{topic_path(topic)}/partitions/{number}/records?offset={offset}&max_bytes=1&wait_ms={wait_ms}"
        )
        places = await self.session.topic_map(topic)
        # The leader hears first; HEAD, as only the news is wanted.
        await self.session.call("HEAD", target, first=places.leader(number), timeout_s=30)

    # -- records -------------------------------------------------------------------------------

    def read(
        self,
        wanted: Range,
        *,
        fail_on_data_loss: bool = True,
        columns: Columns = EVERYTHING,
        replica: int | None = None,
    ) -> Iterator[Piece]:
        """The records of `wanted`, all of them, as (batch, first row, row behind the last).

        With a tag batches that cannot hold it are left out; the others are whole. With `replica` that one
        alone is asked, see `laminar.client.decisions_routing.readers`. The next fetch is under way
        while the caller works on what it got. Raises DataLoss if some are gone (without `fail_on_data_loss`
        they are left out), or the client's `Error`.
        """
        offset = wanted.start
        empty = 0
        pending = self._fetch(wanted, offset, columns, replica)
        try:
            while True:
                try:
                    answer = pending.result()
                except OffsetExpired as gone:
                    offset = self._behind_loss(wanted, offset, gone, fail_on_data_loss=fail_on_data_loss)
                    if offset >= wanted.end:
                        return
                    pending = self._fetch(wanted, offset, columns, replica)
                    continue
                batches, offset_then = self._batches(answer, wanted, offset, columns)
                empty = 0 if offset_then > offset else empty + 1
                if empty == EMPTY_ANSWERS:
                    raise Unavailable(
                        f"{wanted.topic}/{wanted.partition}: no records at {offset}, though it ends at"
                        f" {answer.headers.get('laminar-end-offset')}",
                        code="no_records",
                        value=offset,
                    )
                begin, offset = offset, offset_then
                if offset < wanted.end:
                    pending = self._fetch(wanted, offset, columns, replica)
                for batch in batches:
                    first = max(begin, batch.base_offset) - batch.base_offset
                    yield batch, first, min(wanted.end, batch.next_offset) - batch.base_offset
                if offset >= wanted.end:
                    return
        finally:
            pending.cancel()

    def _fetch(self, wanted: Range, offset: int, columns: Columns, replica: int | None) -> Future[Answer]:
        narrowed: dict[str, str | int] = {"to": wanted.end}
        if columns.tag is not None:
            narrowed["tag"] = columns.tag
        if columns.fields is not None:
            narrowed["fields"] = ",".join(columns.fields)
        return self.submit(
            self.session.fetch(
                wanted.topic,
                wanted.partition,
                offset=offset,
                max_bytes=self._fetch_bytes(wanted, offset),
                # A replica that has not all of the range must not answer with a part as if it were all.
                at_least=wanted.end,
                only=replica,
                narrowed=narrowed,
            )
        )

    def _fetch_bytes(self, wanted: Range, offset: int) -> int:
        """How much to ask for: what is wanted, by what records weighed so far, and a quarter more."""
        known = self._record_bytes.get((wanted.topic, wanted.partition))
        if known is None:
            return FETCH_BYTES
        return int(min(FETCH_BYTES, max(LEAST_FETCH_BYTES, (wanted.end - offset) * known * 1.25)))

    def _batches(
        self, answer: Answer, wanted: Range, offset: int, columns: Columns
    ) -> tuple[list[Batch], int]:
        """The answer's batches that hold records of `wanted` from `offset` on; and the offset behind them.

        Behind what was looked at, with a tag: there may be nothing in between.
        """
        batches = []
        for frame in split(answer.body):
            batch = Batch(frame)
            if batch.next_offset <= offset or batch.base_offset >= wanted.end:
                continue
            if batch.base_offset > offset and columns.tag is None:
                node = answer.headers.get("laminar-node", "a node")
                raise DataLoss(
                    f"{wanted.topic}/{wanted.partition}: {node} answered {batch.base_offset} for {offset}"
                )
            batches.append(batch)
            offset = batch.next_offset
        if batches and columns == EVERYTHING:
            records = sum(map(len, batches))
            self._record_bytes[(wanted.topic, wanted.partition)] = len(answer.body) / records
        if columns.tag is not None:
            offset = max(offset, int(answer.headers.get("laminar-next-offset", 0)))
        return batches, min(offset, wanted.end)

    def _earliest(self, wanted: Range) -> int:
        return self.run(self.offset_at((wanted.topic, wanted.partition), "earliest"))

    def _behind_loss(
        self, wanted: Range, offset: int, gone: OffsetExpired, *, fail_on_data_loss: bool
    ) -> int:
        """Where to go on when retention has overtaken the reading."""
        earliest = self._earliest(wanted)
        if fail_on_data_loss or earliest <= offset:
            lost = f"{wanted.topic}/{wanted.partition}: {offset} to {min(earliest, wanted.end) - 1}"
            raise DataLoss(loss_message(lost)) from gone
        return min(earliest, wanted.end)
