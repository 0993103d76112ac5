"""Splits by load: a partition with a high append rate over minutes is split, if its topic asks for that.

The topic's setting `split_bytes_per_s` is the limit: a partition is split in two if more was appended to it
in each of `MINUTES` minutes in a row, as its leader counts. The leader chooses the cut (the place at which
the partition's range of keys is divided) by a sample of its newest records. It does not split a partition if
a cut would not help, because most of the load is of one key, whose records stay together. The catalog allows
one change of a topic at a time, and no more partitions than `max_partitions`. Partitions are never merged by
load.
"""

from __future__ import annotations

import logging

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.catalog.messages.requests import BeginRouteRequest
from laminar.node.partition.partition import Partition
from laminar.node.routes.cut_points import cuts_of, heaviest_part, sample, weights_of
from laminar.node.routes.lineage import lineages_of, order_setting_of
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.transport.transport import TransportError
from membership.records import TopicRecord
from membership.route_rules import route_of

_log = logging.getLogger("laminar.routes")

MINUTE_S = 60.0
MINUTES = 10
# A split is done only if each part would get at most this share of the bytes that were appended lately.
MOST_IN_ONE_PART = 0.9
WAIT_MS = 60_000


class Splitting:
    """Begins splits of the partitions that one shard leads. The shard calls `check` every `MINUTE_S`."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        # By partition: the bytes appended up to the last check, and the minutes in a row above the limit.
        self._seen: dict[Partition, tuple[int, int]] = {}
        self.begun = 0

    async def check(self) -> None:
        """Compare the bytes appended since the last check with the limits, and begin at most one split."""
        seen: dict[Partition, tuple[int, int]] = {}
        due: list[tuple[TopicRecord, Partition]] = []
        topics = self._shard.view.topics()
        for partition in self._shard.partitions.values():
            topic = topics.get(partition.topic)
            limit = 0 if topic is None else int(topic.settings.get("split_bytes_per_s", 0))
            if topic is None or not limit or not partition.leads:
                continue
            written = partition.appends.appended_bytes
            before, minutes = self._seen.get(partition, (written, 0))
            minutes = minutes + 1 if written - before > limit * MINUTE_S else 0
            seen[partition] = written, minutes
            if minutes >= MINUTES:
                due.append((topic, partition))
        self._seen = seen
        for topic, partition in due:
            seen[partition] = partition.appends.appended_bytes, 0
            if topic.change is None and await self._split(topic, partition):
                return

    async def _split(self, topic: TopicRecord, partition: Partition) -> bool:
        """Ask the catalog to split a partition; return whether the split has begun."""
        held = lineages_of(topic)[partition.number]
        if held.status != "open" or held.range.size < 2:
            return False
        first, size = held.range.first, held.range.size
        name = f"{topic.name}/{partition.number}"
        try:
            frames = await sample(
                lambda offset, most: partition.reader.frames(offset, max_bytes=most),
                start=partition.start_offset,
                end=partition.end_offset,
            )
        except (Problem, StorageError) as error:
            _log.debug("%s: %s", name, error)
            return False
        weights = await self._shard.off_loop(weights_of, frames)
        cuts = cuts_of(weights, first=first, size=size, into=2)
        share = heaviest_part(weights, first=first, size=size, cuts=cuts)
        if share > MOST_IN_ONE_PART:
            _log.warning(
                "%s gets more than split_bytes_per_s and is not split: one part would get %.0f %%",
                name,
                share * 100,
            )
            return False
        request = BeginRouteRequest(
            topic=topic.name,
            after=route_of(topic).version,
            inputs=[partition.number],
            cuts=cuts,
            order=order_setting_of(topic),
            wait_ms=WAIT_MS,
        )
        try:
            answer = await self._shard.ask_catalog(request)
        except TransportError as error:
            _log.debug("%s: %s", name, error)
            return False
        begun = not answer.error and answer.result is not None and answer.result.ok
        if begun:
            self.begun += 1
            _log.warning(
                "%s gets more than split_bytes_per_s: it is split at logical partition %d", name, cuts[0]
            )
        else:
            why = answer.error or (answer.result.outcome if answer.result is not None else "")
            _log.warning(
                "%s gets more than split_bytes_per_s and is not split: %s %s", name, why, answer.detail
            )
        return begun
