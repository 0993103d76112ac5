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
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from laminar.batch import Batch, split
from laminar.client.client import Client
from laminar.client.configuration import Endpoints, resolve
from laminar.client.errors import Error, NotFound, OffsetExpired, Unavailable
from laminar.client.portal import Portal
from laminar.client.session import Session, topic_path
from laminar.http.endings import Answer
from laminar.spark.offsets import EARLIEST, LATEST, Partition, Place, Positions, partition_key
from laminar.spark.options import Options
from laminar.spark.plan import DataLoss, Range, loss_message

T = TypeVar("T")

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

    async def bounds(self, options: Options) -> dict[Partition, tuple[int, int]]:
        """(earliest, committed end) of every partition read; one request a topic.

        The end may be a moment old, and a partition nobody can speak for just now is left out.
        """
        found: dict[Partition, tuple[int, int]] = {}
        for topic, rows in await self._rows(options):
            for row in rows:
                if row.get("end_offset") is not None:
                    bounds = (int(row.get("start_offset") or 0), int(row["end_offset"]))
                    found[(topic, int(row["partition"]))] = bounds
        return {p: found[p] for p in options.assigned if p in found} if options.assigned else found

    async def partitions(self, options: Options) -> list[Partition]:
        """Every partition that `options` name. NotFound if one is not there."""
        found: list[Partition] = []
        for topic, rows in await self._rows(options):
            found += [(topic, number) for number in range(len(rows))]
        missing = sorted(set(options.assigned) - set(found))
        if missing:
            raise NotFound(f"there is no partition {partition_key(missing[0])}", code="no_such_partition")
        return list(options.assigned) if options.assigned else found

    async def _rows(self, options: Options) -> list[tuple[str, list[dict[str, Any]]]]:
        """Each topic with the descriptions of its partitions."""
        topics = await self.topics(options)
        paths = [f"{topic_path(topic)}/partitions" for topic in topics]
        answers = await asyncio.gather(*map(self.session.get_json, paths))
        return [(topic, answer["partitions"]) for topic, answer in zip(topics, answers, strict=True)]

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

    def read(self, wanted: Range, *, fail_on_data_loss: bool = True) -> Iterator[tuple[Batch, int, int]]:
        """The records of `wanted`, all of them, as (batch, first row, row behind the last).

        The next fetch is under way while the caller works on what it got. Raises DataLoss if some are
        gone (without `fail_on_data_loss` they are left out), or the client's `Error`.
        """
        offset = wanted.start
        empty = 0
        pending = self._fetch(wanted, offset)
        try:
            while True:
                try:
                    answer = pending.result()
                except OffsetExpired as gone:
                    offset = self._behind_loss(wanted, offset, gone, fail_on_data_loss=fail_on_data_loss)
                    if offset >= wanted.end:
                        return
                    pending = self._fetch(wanted, offset)
                    continue
                batches, offset_then = self._batches(answer, wanted, offset)
                empty = 0 if batches else empty + 1
                if empty == EMPTY_ANSWERS:
                    raise Unavailable(
                        f"{wanted.topic}/{wanted.partition}: no records at {offset}, though it ends at"
                        f" {answer.headers.get('laminar-end-offset')}",
                        code="no_records",
                        value=offset,
                    )
                begin, offset = offset, offset_then
                if offset < wanted.end:
                    pending = self._fetch(wanted, offset)
                for batch in batches:
                    first = max(begin, batch.base_offset) - batch.base_offset
                    yield batch, first, min(wanted.end, batch.next_offset) - batch.base_offset
                if offset >= wanted.end:
                    return
        finally:
            pending.cancel()

    def _fetch(self, wanted: Range, offset: int) -> Future[Answer]:
        return self.submit(
            self.session.fetch(
                wanted.topic,
                wanted.partition,
                offset=offset,
                max_bytes=self._fetch_bytes(wanted, offset),
                # A replica that has not all of the range must not answer with a part as if it were all.
                at_least=wanted.end,
            )
        )

    def _fetch_bytes(self, wanted: Range, offset: int) -> int:
        """How much to ask for: what is wanted, by what records weighed so far, and a quarter more."""
        known = self._record_bytes.get((wanted.topic, wanted.partition))
        if known is None:
            return FETCH_BYTES
        return int(min(FETCH_BYTES, max(LEAST_FETCH_BYTES, (wanted.end - offset) * known * 1.25)))

    def _batches(self, answer: Answer, wanted: Range, offset: int) -> tuple[list[Batch], int]:
        """The answer's batches that hold records of `wanted` from `offset` on; and the offset behind them."""
        batches = []
        for frame in split(answer.body):
            batch = Batch(frame)
            if batch.next_offset <= offset or batch.base_offset >= wanted.end:
                continue
            if batch.base_offset > offset:
                node = answer.headers.get("laminar-node", "a node")
                raise DataLoss(
                    f"{wanted.topic}/{wanted.partition}: {node} answered {batch.base_offset} for {offset}"
                )
            batches.append(batch)
            offset = batch.next_offset
        if batches:
            records = sum(map(len, batches))
            self._record_bytes[(wanted.topic, wanted.partition)] = len(answer.body) / records
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


class Watch:
    """What a query's driver knows of the partitions' ends, and how it waits for news without asking often.

    While nothing happens, each partition has one long poll at its leader, for seconds; a trigger waits on
    those that are there already. So an idle query costs a request a partition every few seconds, however
    often Spark asks.
    """

    POLL_MS: Final = 8_000
    # After a poll that failed: not at once again.
    PAUSE_S: Final = 0.25
    # A long poll is a connection; with more partitions than this, a trigger just waits and looks.
    MOST_POLLS: Final = 128
    # New partitions and topics are looked for so often, while nothing else makes us look.
    LOOK_S: Final = 5.0

    def __init__(self, cluster: Cluster, options: Options) -> None:
        self._cluster = cluster
        self._options = options
        self._polls: dict[Partition, asyncio.Task[None]] = {}
        self._looked_at_s = float("-inf")
        self.earliest: Positions = {}
        self.ends: Positions = {}

    def look(self) -> Positions:
        """Ask for all ends; the answer as it is. `ends` never go back: what is committed stays so."""
        bounds = self._cluster.run(self._bounds())
        for partition, (earliest, end) in bounds.items():
            self.earliest[partition] = max(earliest, self.earliest.get(partition, 0))
            self.ends[partition] = max(end, self.ends.get(partition, 0))
        return {partition: end for partition, (_, end) in bounds.items()}

    async def _bounds(self) -> Mapping[Partition, tuple[int, int]]:
        bounds = await self._cluster.bounds(self._options)
        self._looked_at_s = asyncio.get_running_loop().time()
        return bounds

    def wait_for_news(self, timeout_ms: int) -> bool:
        """Wait up to `timeout_ms`; whether it is worth to `look` again."""
        return self._cluster.run(self._wait_for_news(timeout_ms / 1000))

    async def _wait_for_news(self, timeout_s: float) -> bool:
        if len(self.ends) > self.MOST_POLLS:
            await asyncio.sleep(timeout_s)
            return True
        for partition, end in self.ends.items():
            if partition not in self._polls:
                self._polls[partition] = asyncio.create_task(self._poll(partition, end))
        if not self._polls:
            await asyncio.sleep(timeout_s)
            return self._is_time_to_look()
        await asyncio.wait(self._polls.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done = [partition for partition, poll in self._polls.items() if poll.done()]
        for partition in done:
            self._polls.pop(partition).result()
        return bool(done) or self._is_time_to_look()

    def _is_time_to_look(self) -> bool:
        return asyncio.get_running_loop().time() - self._looked_at_s >= self.LOOK_S

    async def _poll(self, partition: Partition, end: int) -> None:
        try:
            await self._cluster.wait_past(partition, end, wait_ms=self.POLL_MS)
        except Error:
            # Whatever is wrong, the next look meets it as well, with retries and a deadline, and says so.
            await asyncio.sleep(self.PAUSE_S)

    def close(self) -> None:
        """End the polls."""
        self._cluster.run(self._close())

    async def _close(self) -> None:
        polls, self._polls = list(self._polls.values()), {}
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
