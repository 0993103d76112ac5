"""A task of the sink: it stages its rows for a batch and reports to the driver what it staged.

A stage is invisible until the driver commits it. A commit publishes the stages of a partition in the order of
their numbers. The highest bits of a stage's number are the number of the task, so that rows keep Spark's
order and no two tasks use one number. Then follows a number drawn at random for the attempt, because Spark
may run a task more than once. Spark reports to the driver the attempts that count; the stages of others are
dropped. Where two attempts of a task draw the same number, the cluster takes a stage with equal bytes as a
repetition, and refuses one with other bytes: then the later attempt fails, and Spark starts a new one.

A stage that a partition refuses because it has ended is cut again by the next route, when all stages under
way are answered, with new and so higher numbers: rows of one key stay in order. Where the rows name
partitions the task fails.

Stages are sent by the client's `post_stage`, but their rows are gathered here: a task has Arrow columns, and
the client's own buffer takes records one by one (docs/decisions/0021).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from laminar.batch import Batch, build
from laminar.client.descriptions import SinkInfo
from laminar.client.errors import Error, NotFound
from laminar.client.records import Staged, StagedPart
from laminar.client.transact.sinks import Sink
from laminar.client.transact.stage_sender import post_stage
from laminar.spark.read.cluster import Cluster
from laminar.spark.write.rows import Partitioner, Stage, StageBuffer
from laminar.wire.key_route import Route

if TYPE_CHECKING:
    import pyarrow

# The 53 bits of a stage's number, the highest first: one that is set if the task's number has more than
# `SMALL_TASK_BITS` bits; 34 for the task and the attempt (13 and 21, or 24 and 10 if that bit is set); 18
# that count the attempt's stages.
SMALL_TASK_BITS: Final = 13
TASK_BITS: Final = 24
ATTEMPT_BITS: Final = 21
COUNT_BITS: Final = 18
# Requests of a task that are under way at a time, each with a stage of up to about 1 MiB.
WIDTH: Final = 12


async def sink_info(cluster: Cluster, name: str) -> SinkInfo:
    """Return the sink's state.

    For a sink that was never begun, or was forgotten, `epoch` is the number below the one that its next
    beginning gets, and `committed` is None.
    """
    try:
        return await Sink(cluster.session, name).describe()
    except NotFound as error:
        return SinkInfo(name, int(error.limit or 0), None, publishing=False)


def first_stage(task: int, attempt: int) -> int:
    """Return the first stage number of an attempt at a task.

    An attempt has the `1 << COUNT_BITS` numbers from there on. The numbers of two tasks are disjoint and in
    the order of the tasks. `attempt` is a random number of `ATTEMPT_BITS` bits; with a large task number only
    the highest of these bits are used.

    Raises:
        ValueError: for too many tasks.
    """
    if task >> TASK_BITS:
        raise ValueError(f"task {task}: a batch has at most {1 << TASK_BITS} tasks")
    if task >> SMALL_TASK_BITS == 0:
        return (task << ATTEMPT_BITS | attempt) << COUNT_BITS
    bits = ATTEMPT_BITS + SMALL_TASK_BITS - TASK_BITS
    large = 1 << SMALL_TASK_BITS + ATTEMPT_BITS
    return (large | task << bits | attempt >> ATTEMPT_BITS - bits) << COUNT_BITS


def partitioner_of(cluster: Cluster, topic: str, *, first: int) -> Partitioner:
    """Return a partitioner by the topic's route, as it is known here.

    `first` chooses the partition of the first rows without a key (see `Partitioner`).

    Raises:
        ValueError: there is no such topic.
    """
    try:
        known = cluster.run(cluster.session.topic_map(topic))
    except NotFound:
        raise ValueError(f"there is no topic {topic!r} to write to: create it first") from None
    return Partitioner(known.route, first=first)


class TaskStager:
    """One attempt at a `task`: it stages rows for batch `number` of the sink `name` under `epoch`."""

    def __init__(self, cluster: Cluster, name: str, *, number: int, epoch: int, task: int) -> None:
        self._cluster = cluster
        self._name = name
        self._number = number
        self._epoch = epoch
        self._attempt = cluster.session.rng.getrandbits(ATTEMPT_BITS)
        self._next_stage = first_stage(task, self._attempt)
        self._last_stage = self._next_stage + (1 << COUNT_BITS) - 1
        self._under_way: deque[tuple[int, Stage, Future[None]]] = deque()
        self._staged: dict[tuple[str, int], list[int]] = {}
        # By topic the route by which its rows are placed, and the partitions that newer routes lack.
        self._routes: dict[str, Route] = {}
        self._ended: dict[str, set[int]] = {}
        self._named = False  # rows name partitions
        self._records = 0
        # Rows received, staged or not.
        self.rows = 0

    def stage(
        self, batches: Iterable[pyarrow.RecordBatch], positions: dict[str, int], *, topic: str | None
    ) -> Staged | None:
        """Stage all rows and return what was staged; None if the batch is committed already.

        `positions` has the position of each column by name; with `topic` None each row names its topic. All
        of `batches` is read in either case, because Spark waits for that.

        Raises:
            ValueError: for rows that cannot be written.
            Error: for what the cluster refused.
        """
        self._named = "partition" in positions
        rows = StageBuffer(positions, topic=topic, partitioner_of=self._partitioner)
        try:
            for batch in batches:
                self.rows += batch.num_rows
                for stage in rows.put(batch):
                    self._send(stage)
            for stage in rows.finish():
                self._send(stage)
            while self._under_way:
                self._await_first()
        except Error as error:
            if error.code != "already_committed":
                raise
            self.rows += sum(batch.num_rows for batch in batches)
            return None
        finally:
            for _, _, future in self._under_way:
                future.cancel()
        parts = tuple(
            StagedPart(name, partition, tuple(stages))
            for (name, partition), stages in sorted(self._staged.items())
        )
        return Staged(self._name, self._number, self._epoch, parts, self._records)

    def _partitioner(self, topic: str) -> Partitioner:
        found = partitioner_of(self._cluster, topic, first=self._attempt)
        self._routes[topic] = found.route
        return found

    def _send(self, stage: Stage) -> None:
        while len(self._under_way) >= WIDTH:
            self._await_first()
        topic, partition, _, _ = stage
        if partition in self._ended.get(topic, ()):
            for each in cut_anew(stage, self._routes[topic], spread=self._attempt):
                self._post(each)
        else:
            self._post(stage)

    def _await_first(self) -> None:
        """Wait for the stage that was sent first; if it was refused, for all, and cut again what was."""
        refused = self._await(*self._under_way.popleft())
        if refused is None:
            return
        again, errors = [refused[0]], [refused[1]]
        while self._under_way:
            refused = self._await(*self._under_way.popleft())
            if refused is not None:
                again.append(refused[0])
                errors.append(refused[1])
        for (topic, partition, *_), error in zip(again, errors, strict=True):
            if partition in self._routes[topic]:
                self._go_over(topic, error)
        for stage in again:
            for each in cut_anew(stage, self._routes[stage[0]], spread=self._attempt):
                self._post(each)

    def _await(self, number: int, stage: Stage, future: Future[None]) -> tuple[Stage, Error] | None:
        """Wait for a stage; return it, with the reason, if its partition has ended.

        Raises:
            Error: it was refused for another reason, or its rows may have named the partition.
        """
        topic, partition, _, records = stage
        try:
            future.result()
        except Error as error:
            if error.code not in ("sealed", "stale_route") or self._named or not isinstance(error.limit, int):
                raise
            return stage, error
        self._staged.setdefault((topic, partition), []).append(number)
        self._records += records
        return None

    def _go_over(self, topic: str, error: Error) -> None:
        """Place the topic's rows by the route that `error` names; raise `error` if that is not newer."""
        before = self._routes[topic]
        if before.version >= error.limit:
            raise error
        route = self._cluster.run(self._cluster.lineage(topic, version=error.limit)).route
        self._ended.setdefault(topic, set()).update(each for each in before.numbers if each not in route)
        self._routes[topic] = route

    def _post(self, stage: Stage) -> None:
        topic, partition, frame, _ = stage
        number = self._next_stage
        if number > self._last_stage:
            raise ValueError(f"a task writes at most {1 << COUNT_BITS} stages per batch: use more tasks")
        self._next_stage += 1
        staging = post_stage(
            self._cluster.session,
            topic,
            partition,
            frame,
            sink=self._name,
            number=self._number,
            epoch=self._epoch,
            stage=number,
            route=self._routes[topic].version,
        )
        self._under_way.append((number, stage, self._cluster.submit(staging)))


def cut_anew(stage: Stage, route: Route, *, spread: int) -> list[Stage]:
    """Return the rows of a stage as stages for the partitions of another route, in order.

    Rows without a key go to the partition at index `spread` of the route, modulo the number of partitions.
    """
    topic, _, frame, _ = stage
    batch = Batch(memoryview(frame))
    keys = batch.keys or [None] * len(batch)
    sticky = route.numbers[spread % len(route)]
    rows: dict[int, list[int]] = {}
    for position, key in enumerate(keys):
        rows.setdefault(sticky if key is None else route.partition_of_key(key), []).append(position)

    def chosen(column: Sequence[Any] | None, positions: list[int]) -> list[Any] | None:
        return None if column is None else [column[position] for position in positions]

    return [
        (
            topic,
            partition,
            build(
                [batch.values[position] for position in positions],
                keys=chosen(batch.keys, positions),
                timestamps=chosen(batch.given_timestamps, positions),
                tags=chosen(batch.tags, positions),
                headers=chosen(batch.headers, positions),
                trace_ids=chosen(batch.trace_ids, positions),
            ),
            len(positions),
        )
        for partition, positions in rows.items()
    ]
