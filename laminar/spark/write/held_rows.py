"""Rows of small tasks travel to the driver in the tasks' messages, and the driver stages them at the commit.

A task that has little to write would otherwise wait for the sink's state and for its stages, as each other
task of its batch does. So a task with up to `HELD_BYTES` of rows makes frames of them, and asks the cluster
nothing. The driver joins the frames of a partition, so that a batch of many small tasks has few stages.

What a message may hold is bounded for all tasks together: only the first `HELD_TASKS` of a batch hold rows.

Order. The driver stages held rows of consecutive tasks under numbers of the first of them, so they stand
between the stages of the tasks before and after. All frames of a topic are placed by one route: those of
another one are cut again, task by task, before they are joined. So the rows of a key are in one partition, in
Spark's order. What a partition refuses because it has ended is cut again by the next route, with higher
numbers: no other stage has rows of these keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from laminar.batch import merge
from laminar.client.errors import Error
from laminar.client.records import Staged, StagedPart
from laminar.client.transact.stage_sender import post_stage
from laminar.spark.read.cluster import Cluster
from laminar.spark.write.rows import STAGE_BYTES, STAGE_RECORDS, Partitioner, Stage, StageBuffer
from laminar.spark.write.task_stager import (
    ATTEMPT_BITS,
    COUNT_BITS,
    WIDTH,
    cut_anew,
    first_stage,
    partitioner_of,
)
from laminar.wire.key_route import Route

if TYPE_CHECKING:
    import pyarrow

# The most bytes of a task's rows, of the frames made of them, and the most tasks that hold rows.
HELD_BYTES: Final = 64 << 10
MOST_FRAME_BYTES: Final = 2 * HELD_BYTES
HELD_TASKS: Final = 256


class HeldRows(NamedTuple):
    """The rows of one task: its number, its frames, and the version of each topic's route that placed them.

    `named` says that rows name partitions: they belong there, whatever the route.
    """

    task: int
    stages: tuple[Stage, ...]
    routes: dict[str, int]
    named: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(len(stage[2]) for stage in self.stages)


class Placed(NamedTuple):
    """A stage to be sent, and the version of the route that placed its rows."""

    stage: Stage
    version: int


def take_small(
    rows: Iterator[pyarrow.RecordBatch], *, most_bytes: int = HELD_BYTES
) -> tuple[list[pyarrow.RecordBatch], bool]:
    """Return the first rows, and whether these are all; they are not if they have more than `most_bytes`."""
    taken: list[pyarrow.RecordBatch] = []
    size = 0
    for batch in rows:
        taken.append(batch)
        size += batch.nbytes
        if size > most_bytes:
            return taken, False
    return taken, True


def hold(
    cluster: Cluster,
    batches: Iterable[pyarrow.RecordBatch],
    positions: Mapping[str, int],
    *,
    topic: str | None,
    task: int,
) -> HeldRows:
    """Return the rows of a task as frames, to be sent to the driver in the task's message.

    `positions` has the position of each column by name; with `topic` None each row names its topic.

    Raises:
        ValueError: for rows that cannot be written.
    """
    routes: dict[str, int] = {}
    first = cluster.session.rng.getrandbits(ATTEMPT_BITS)

    def chosen(name: str) -> Partitioner:
        found = partitioner_of(cluster, name, first=first)
        routes[name] = found.route.version
        return found

    rows = StageBuffer(positions, topic=topic, partitioner_of=chosen)
    stages = [stage for batch in batches for stage in rows.put(batch)]
    return HeldRows(task, (*stages, *rows.finish()), routes, "partition" in positions)


class HeldStager:
    """Stages held rows for batch `number` of the sink `name` under `epoch`. On the client's loop."""

    def __init__(self, cluster: Cluster, name: str, *, number: int, epoch: int) -> None:
        self._cluster = cluster
        self._name = name
        self._number = number
        self._epoch = epoch
        self._at_once = asyncio.Semaphore(WIDTH)

    async def stage(self, tasks: Sequence[HeldRows], others: Iterable[int]) -> list[Staged]:
        """Stage the rows of `tasks` and return what was staged; `others` are the tasks that staged their own.

        Raises:
            Error: for what the cluster refused.
        """
        versions: dict[str, int] = {}
        for held in tasks:
            for topic, version in held.routes.items():
                versions[topic] = max(version, versions.get(topic, 0))
        routes = {topic: await self._route(topic, version) for topic, version in versions.items()}
        runs = runs_of(tasks, others)
        return list(await asyncio.gather(*(self._stage_run(run, dict(routes)) for run in runs)))

    async def _route(self, topic: str, version: int) -> Route:
        """Return the topic's route of this version, or a later one."""
        known = (await self._cluster.session.topic_map(topic)).route
        if known.version >= version:
            return known
        return (await self._cluster.lineage(topic, version=version)).route

    async def _stage_run(self, run: Sequence[HeldRows], routes: dict[str, Route]) -> Staged:
        attempt = self._cluster.session.rng.getrandbits(ATTEMPT_BITS)
        number = first_stage(run[0].task, attempt)
        last = number + (1 << COUNT_BITS) - 1
        placed = joined(placed_by(run, routes, spread=attempt))
        staged: dict[tuple[str, int], list[int]] = {}
        records = 0
        while placed:
            if number + len(placed) - 1 > last:
                raise ValueError(f"a task writes at most {1 << COUNT_BITS} stages per batch: use more tasks")
            answers = await asyncio.gather(
                *(self._post(each, number + at, named=run[0].named) for at, each in enumerate(placed))
            )
            refused: list[Stage] = []
            for at, (each, newer) in enumerate(zip(placed, answers, strict=True)):
                topic, partition, _, count = each.stage
                if newer is None:
                    staged.setdefault((topic, partition), []).append(number + at)
                    records += count
                else:
                    refused.append(each.stage)
                    if routes[topic].version < newer:
                        routes[topic] = await self._route(topic, newer)
            number += len(placed)
            placed = [
                Placed(part, routes[stage[0]].version)
                for stage in refused
                for part in cut_anew(stage, routes[stage[0]], spread=attempt)
            ]
        parts = tuple(StagedPart(*where, tuple(numbers)) for where, numbers in sorted(staged.items()))
        return Staged(self._name, self._number, self._epoch, parts, records)

    async def _post(self, placed: Placed, number: int, *, named: bool) -> int | None:
        """Stage one frame; return None, or the version of a newer route that it must be cut by.

        Raises:
            Error: it was refused for another reason, or its rows name the partition.
        """
        topic, partition, frame, _ = placed.stage
        async with self._at_once:
            try:
                await post_stage(
                    self._cluster.session,
                    topic,
                    partition,
                    frame,
                    sink=self._name,
                    number=self._number,
                    epoch=self._epoch,
                    stage=number,
                    route=placed.version,
                )
            except Error as error:
                newer = error.limit if isinstance(error.limit, int) else 0
                if error.code not in ("sealed", "stale_route") or named or newer <= placed.version:
                    raise
                return newer
        return None


def placed_by(run: Sequence[HeldRows], routes: Mapping[str, Route], *, spread: int) -> Iterator[Placed]:
    """Yield the frames of a run, those of rows that name no partition all cut by the same routes."""
    for held in run:
        for stage in held.stages:
            route, version = routes[stage[0]], held.routes[stage[0]]
            if held.named or version == route.version:
                yield Placed(stage, version)
            else:
                for part in cut_anew(stage, route, spread=spread):
                    yield Placed(part, route.version)


def runs_of(tasks: Sequence[HeldRows], others: Iterable[int]) -> list[list[HeldRows]]:
    """Return the tasks in their order, in runs between which no task of `others` stands."""
    between = sorted(others)
    runs: list[list[HeldRows]] = []
    last = -1
    for held in sorted(tasks, key=lambda each: each.task):
        if not runs or any(last < other < held.task for other in between):
            runs.append([])
        runs[-1].append(held)
        last = held.task
    return runs


def joined(stages: Iterable[Placed]) -> list[Placed]:
    """Return stages with the frames of each partition joined, in order, to the size of a stage."""
    gathered: dict[tuple[str, int, int], list[list[Stage]]] = {}
    for stage, version in stages:
        topic, partition, frame, records = stage
        some = gathered.setdefault((topic, partition, version), [[]])
        size = sum(len(each[2]) for each in some[-1]) + len(frame)
        if some[-1] and (size > STAGE_BYTES or sum(each[3] for each in some[-1]) + records > STAGE_RECORDS):
            some.append([])
        some[-1].append(stage)
    return [
        Placed(_one(topic, partition, part), version)
        for (topic, partition, version), parts in gathered.items()
        for part in parts
    ]


def _one(topic: str, partition: int, parts: Sequence[Stage]) -> Stage:
    frame = parts[0][2] if len(parts) == 1 else merge(part[2] for part in parts)
    return topic, partition, frame, sum(part[3] for part in parts)
