"""A process's connection to a cluster: blocking calls over the client's session, for Spark's threads.

It finds partitions and offsets and fetches ranges; it decides nothing about batches. Connections are kept in
this module, not in readers: Spark unpickles a reader for every task, and keeps the process. Why
`Cluster.read` is not the client's `Fetchers` is in docs/decisions/0021.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from laminar.batch import Batch, split
from laminar.batch.large_record import checksum_of, size_of
from laminar.checksum import crc32c
from laminar.client.client import Client
from laminar.client.consume.large_values import Value
from laminar.client.errors import NotFound, OffsetExpired, Unavailable
from laminar.client.net.endpoints import Endpoints, resolve
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.lineage import Lineage
from laminar.client.policy.retry import Backoff
from laminar.client.produce.named_producer import lineage_of
from laminar.client.sync.portal import Portal
from laminar.http.protocol.answer import Answer
from laminar.spark.read.loss import DataLoss, partition_loss, retention_loss
from laminar.spark.read.offsets import EARLIEST, LATEST, Ids, OffsetSpec, Partition, Positions, partition_key
from laminar.spark.read.options import Options
from laminar.spark.read.plan import Range

T = TypeVar("T")

# A batch, and the rows of it that a task reads: the first, and the one after the last.
Piece = tuple[Batch, int, int]

FETCH_BYTES: Final = 4 << 20
LEAST_FETCH_BYTES: Final = 64 << 10
# This number of answers without records in a row is an error: a replica answers only when it has the whole
# range.
EMPTY_ANSWERS: Final = 3
# The largest value that is read: Spark and Arrow hold a value whole, and below 2 GiB.
MOST_LARGE_BYTES: Final = 1 << 30
# Error codes for a partition that was deleted, whether or not another has its name now.
DELETED_CODES: Final = ("no_such_topic", "no_such_partition", "partition_recreated")

_clusters: dict[tuple[int, Endpoints, int], Cluster] = {}
_making = threading.Lock()
_tuned = False


class Access(Protocol):
    """The options of a source or a sink that say which cluster, and who asks."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of nodes to begin with."""
        ...

    @property
    def token(self) -> str | None:
        """The token."""
        ...

    @property
    def token_file(self) -> str | None:
        """The path of a file with the token."""
        ...

    @property
    def ca(self) -> str | None:
        """The path of a PEM file, or its text."""
        ...

    @property
    def certificate(self) -> str | None:
        """The path of a PEM file, on each machine."""
        ...

    @property
    def key(self) -> str | None:
        """The path of a PEM file, on each machine; None if the certificate's file has the key."""
        ...


def resolve_endpoints(options: Access) -> Endpoints:
    """Return the cluster's addresses, token and CA, from the options or else from the environment.

    It is called in the driver, and the result is pickled to the tasks: their environment and files may
    differ.
    """
    found = resolve(
        options.endpoints or None,
        options.token,
        token_file=options.token_file,
        ca=options.ca,
        certificate=options.certificate,
        key=options.key,
    )
    return found.with_contents()


def cluster(endpoints: Endpoints, *, timeout_ms: int) -> Cluster:
    """Return this process's connection to the cluster, made at the first call."""
    # The process id is part of the key: the connection's thread does not survive a fork.
    key = (os.getpid(), endpoints, timeout_ms)
    with _making:
        found = _clusters.get(key)
        if found is None:
            found = _clusters[key] = Cluster(endpoints, timeout_s=timeout_ms / 1000)
        return found


def tune() -> None:
    """Exclude all objects made so far from garbage collection. Acts once per worker process.

    Spark's worker runs the garbage collector after every task. Without this it scans all imported modules,
    which takes 3 to 30 ms.
    """
    global _tuned
    if not _tuned:
        _tuned = True
        gc.collect()
        gc.freeze()


class Bounds(NamedTuple):
    """The first offset, the end offset and the stored size of one partition.

    They come from the partition's leader, or are what another replica knew a moment ago.
    """

    earliest: int
    end: int
    size_bytes: int

    @property
    def record_bytes(self) -> float:
        """Mean size of a stored record; 0 if there is none."""
        return self.size_bytes / (self.end - self.earliest) if self.end > self.earliest else 0.0


class Description(NamedTuple):
    """The partitions of a query with their ids, and the version of each topic's route.

    `bounds` may be a moment old, and lacks each partition of which no replica answers. `left_out` has the ids
    of the partitions that were described but that the query does not read: those of topics given as `beside`,
    and those that the option `assign` does not name. `missing` has the topics that the query names and that
    do not exist.
    """

    ids: Ids
    bounds: dict[Partition, Bounds]
    routes: dict[str, int]
    left_out: Ids
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Projection:
    """The selection of a fetch: `fields` of the records (None: all), and their `tag` (None: any).

    Both are parameters of the HTTP API. A node leaves out batches that cannot hold the tag.
    """

    fields: tuple[str, ...] | None = None
    tag: str | None = None


EVERYTHING: Final = Projection()


class Cluster:
    """Blocking calls to one cluster, each with all the client's retries until `timeout_s` is over."""

    def __init__(self, endpoints: Endpoints, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._portal = Portal()
        self._client = Client(endpoints, timeout=timeout_s)
        self._portal.run(lambda: self._client.__aenter__())
        # Mean stored size of a record in each partition, by the last fetch. With it a small range asks for
        # few bytes only.
        self._record_bytes: dict[Partition, float] = {}

    @property
    def session(self) -> Session:
        """The client's session, which runs on the client's thread."""
        return self._client.session

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's thread and return its result."""
        return self._portal.run(lambda: work)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the client's thread and return its future."""
        return asyncio.run_coroutine_threadsafe(work, self._portal.loop)

    def close(self) -> None:
        """Close connections and end the thread. For tests: a Spark worker keeps them as long as it lives."""
        self._portal.run(lambda: self._client.close())
        self._portal.close()

    # -- partitions and their offsets ----------------------------------------------------------

    async def describe(
        self, options: Options, *, beside: Iterable[str] = (), confirmed: bool = False
    ) -> Description:
        """Describe the partitions that the query reads, and those of the topics in `beside` as well.

        It costs one request per topic. With `confirmed` the catalog itself is asked, else a node's view of
        it, which may lag.
        """
        wanted = await self._topics(options, beside)
        described = await self._described(sorted({*wanted, *beside}), confirmed=confirmed)
        missing = wanted - described.keys() - set(beside) if options.pattern is None else ()
        found = Description({}, {}, {}, {}, tuple(sorted(missing)))
        for topic, answer in described.items():
            if topic in wanted:
                found.routes[topic] = int(answer.get("route") or 0)
            for row in answer["partitions"]:
                partition = (topic, int(row["partition"]))
                if topic not in wanted or (options.assigned and partition not in options.assigned):
                    found.left_out[partition] = row["id"]
                    continue
                found.ids[partition] = row["id"]
                if row.get("end_offset") is not None:
                    sizes = [int(row.get(name) or 0) for name in ("start_offset", "end_offset", "bytes")]
                    found.bounds[partition] = Bounds(*sizes)
        return found

    async def ids(self, options: Options, *, confirmed: bool = False) -> Ids:
        """Return every partition that `options` name, with its id.

        Raises:
            NotFound: when one does not exist.
        """
        described = await self.describe(options, confirmed=confirmed)
        if described.missing:
            raise NotFound(f"there is no topic {described.missing[0]!r}", code="no_such_topic")
        missing = sorted(set(options.assigned) - described.ids.keys())
        if missing:
            raise NotFound(f"there is no partition {partition_key(missing[0])}", code="no_such_partition")
        return described.ids

    async def _topics(self, options: Options, beside: Iterable[str]) -> set[str]:
        """Return the topics that `options` name.

        For a pattern, these are the matches among the topics that exist or are in `beside`.
        """
        if options.pattern is None:
            return {topic for topic, _ in options.assigned} or set(options.topics)
        pattern = re.compile(options.pattern)
        listed = {*await self._client.topics(), *beside}
        return {name for name in listed if pattern.fullmatch(name)}

    async def _described(self, topics: Sequence[str], *, confirmed: bool) -> dict[str, dict[str, Any]]:
        """Return the answer of ``/partitions`` by topic, without the topics that do not exist."""
        read = "?read=leader" if confirmed else ""
        paths = [f"{topic_path(topic)}/partitions{read}" for topic in topics]
        answers = await asyncio.gather(*map(self.session.get_json, paths), return_exceptions=True)
        found = {}
        for topic, answer in zip(topics, answers, strict=True):
            if isinstance(answer, NotFound):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found[topic] = answer
        return found

    async def lineage(self, topic: str, *, version: int) -> Lineage:
        """Return the changes of a topic's route up to this version, or a later one.

        Wait until the node that is asked knows it: it may lag behind the one that named the version.

        Raises:
            Unavailable: if none knows it in time.
        """
        deadline_s = time.monotonic() + self.session.timeout_s
        backoff = Backoff(rng=self.session.rng)
        while True:
            found = await lineage_of(self.session, topic)
            if found.route.version >= version:
                return found
            if time.monotonic() > deadline_s:
                what = f"no node knows route {version} of {topic}"
                raise Unavailable(what, code="timed_out", retriable=True)
            await asyncio.sleep(backoff.next_ms() / 1000)

    async def offset_at(self, partition: Partition, at: str, id_: str = "") -> int:
        """Return the offset at ``earliest``, ``latest`` or an epoch time in ms, confirmed by a majority.

        Raises:
            NotFound: with `id_`, when the partition with that id was deleted.
        """
        # Only the leader may answer. A query compares ends with what it has read, so the end of a replica
        # that lags would count as a loss.
        return await self.session.offset_at(*partition, at, id_=id_, leader_only=True)

    async def positions(
        self, ids: Mapping[Partition, str], spec: OffsetSpec, *, starts: bool = False, strict: bool = False
    ) -> Positions:
        """Return the offset that `spec` means in each of these partitions.

        Raises:
            ValueError: when `spec` leaves a partition out or names one that is not read; with `starts`, when
                an offset is after a partition's end; with `strict`, when it is a time after all records.
        """
        if spec.values and set(spec.values) != set(ids):
            odd = sorted(set(spec.values) ^ set(ids))
            raise ValueError(f"give an offset for exactly the partitions that are read; wrong: {odd[0]}")
        found = await asyncio.gather(
            *(self._position(spec, each, id_, starts, strict) for each, id_ in ids.items())
        )
        return dict(zip(ids, found, strict=True))

    async def _position(
        self, spec: OffsetSpec, partition: Partition, id_: str, starts: bool, strict: bool
    ) -> int:
        if spec.kind in ("earliest", "latest"):
            return await self.offset_at(partition, spec.kind, id_)
        if spec.kind == "offsets":
            given = spec.values[partition]
            if given in (EARLIEST, LATEST):
                return await self.offset_at(partition, "earliest" if given == EARLIEST else "latest", id_)
            if starts and given > (end := await self.offset_at(partition, "latest", id_)):
                raise ValueError(
                    f"option startingOffsets: {partition_key(partition)} ends at {end}, before {given}"
                )
            return given
        time_ms = spec.values[partition] if spec.kind == "timestamps" else spec.time_ms
        offset = await self.offset_at(partition, str(time_ms), id_)
        if strict and offset >= await self.offset_at(partition, "latest", id_):
            raise ValueError(
                f"{partition_key(partition)} has no record at or after {time_ms}; with the option"
                " startingOffsetsByTimestampStrategy=latest the query starts at its end"
            )
        return offset

    async def wait_past(self, partition: Partition, offset: int, *, id_: str, wait_ms: int) -> bool:
        """Wait for a record at `offset`, but no longer than `wait_ms`, which is below 10 s.

        Return at once, and true, if the partition has ended there.

        Raises:
            NotFound: when the partition with this id was deleted.
        """
        topic, number = partition
        target = (
            f"{topic_path(topic)}/partitions/{number}/records?offset={offset}&id={id_}"
            f"&max_bytes=1&wait_ms={wait_ms}"
        )
        known = await self.session.topic_map(topic)
        # The leader has new records first. HEAD, because the records themselves are not needed.
        answer = await self.session.call("HEAD", target, first=known.leader(number), timeout_s=30)
        return "laminar-sealed" in answer.headers

    # -- records -------------------------------------------------------------------------------

    def read(
        self,
        wanted: Range,
        *,
        fail_on_data_loss: bool = True,
        columns: Projection = EVERYTHING,
        replica: int | None = None,
    ) -> Iterator[Piece]:
        """Yield all records of `wanted`, as (batch, first row, row after the last).

        With a tag, batches that cannot hold it are left out; the others are whole, so the caller filters
        their rows. With `replica` only the replica of that number is asked: see
        `laminar.client.policy.routing.readers`. One fetch, and never more, is under way while the caller
        works on the answer before it. That bounds memory.

        Raises:
            DataLoss: when records are gone and `fail_on_data_loss`; without that they are left out.
            Error: when the cluster does not answer in time.
        """
        offset = wanted.start
        empty = 0
        pending = self._fetch(wanted, offset, columns, replica)
        try:
            while True:
                try:
                    answer = pending.result()
                except OffsetExpired as gone:
                    offset = self._after_loss(wanted, offset, gone, fail_on_data_loss=fail_on_data_loss)
                    if offset >= wanted.end:
                        return
                    pending = self._fetch(wanted, offset, columns, replica)
                    continue
                except NotFound as gone:
                    if gone.code not in DELETED_CODES:
                        raise
                    what = f"{wanted.topic}/{wanted.partition}, {offset} to {wanted.end - 1}: {gone.message}"
                    partition_loss([what], fail=fail_on_data_loss)
                    return
                batches, offset_then = self._batches(answer, wanted, offset, columns)
                empty = 0 if offset_then > offset else empty + 1
                if empty == EMPTY_ANSWERS:
                    raise Unavailable(
                        f"{wanted.topic}/{wanted.partition}: no records at {offset}, although it ends at"
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

    def large_value(self, wanted: Range, stub: Batch) -> bytes:
        """Return the value of the record that `stub` stands for, its length and checksum verified.

        Raises:
            ValueError: for a value over `MOST_LARGE_BYTES`, and for a wrong length or checksum.
            Error: when the cluster does not answer in time.
        """
        named = f"{wanted.topic}/{wanted.partition}: the value at {stub.base_offset}"
        size = size_of(stub)
        if size > MOST_LARGE_BYTES:
            raise ValueError(f"{named} has {size} bytes; the source reads values of up to {MOST_LARGE_BYTES}")
        value = self.run(self._large_value(wanted, stub.base_offset))
        if (len(value), crc32c(value)) != (size, checksum_of(stub)):
            raise ValueError(f"{named} is not what was appended: {len(value)} bytes of {size}")
        return value

    async def _large_value(self, wanted: Range, offset: int) -> bytes:
        value = Value(
            self.session, wanted.topic, wanted.partition, offset, timeout_s=self.timeout_s, id_=wanted.id
        )
        async with value:
            return await value.read()

    def _fetch(self, wanted: Range, offset: int, columns: Projection, replica: int | None) -> Future[Answer]:
        narrowed: dict[str, str | int] = {"to": wanted.end}
        if wanted.id:
            narrowed["id"] = wanted.id
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
                # A replica that lacks the end of the range must not answer: its part would look complete.
                at_least=wanted.end,
                only=replica,
                narrowed=narrowed,
            )
        )

    def _fetch_bytes(self, wanted: Range, offset: int) -> int:
        """Return the number of bytes to ask for: the records left, at their mean size, and a quarter more."""
        known = self._record_bytes.get((wanted.topic, wanted.partition))
        if known is None:
            return FETCH_BYTES
        return int(min(FETCH_BYTES, max(LEAST_FETCH_BYTES, (wanted.end - offset) * known * 1.25)))

    def _batches(
        self, answer: Answer, wanted: Range, offset: int, columns: Projection
    ) -> tuple[list[Batch], int]:
        """Return the answer's batches with records of `wanted` from `offset` on, and where to continue.

        That is the offset after the last batch, at most the end of `wanted`. With a tag it is the offset up
        to which the node searched, where the last records may not match.

        Raises:
            DataLoss: when the answer, without a tag, begins after `offset` or has a gap.
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
        return self.run(self.offset_at((wanted.topic, wanted.partition), "earliest", wanted.id))

    def _after_loss(self, wanted: Range, offset: int, gone: OffsetExpired, *, fail_on_data_loss: bool) -> int:
        """Return where to continue after retention trimmed the record at `offset`; at most the range's end.

        Raises:
            DataLoss: with `fail_on_data_loss`; without it a warning is logged.
            OffsetExpired: `gone`, when the leader still has the record.
        """
        earliest = self._earliest(wanted)
        if earliest <= offset:
            raise gone
        first_left = min(earliest, wanted.end)
        lost = f"{wanted.topic}/{wanted.partition}: {offset} to {first_left - 1}"
        retention_loss([lost], fail=fail_on_data_loss)
        return first_left
