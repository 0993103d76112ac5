"""Statistics of topics: records and bytes summed over all partitions. Each node sums those that it leads.

Sums are computed only on request, and at most once in `KEEP_S`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from laminar.http.api.documents.topics import TopicSums
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.node_call import NodeCall, of_siblings
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import Kept, in_slices
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer

KEEP_S: Final = 5.0

# The sums of one topic: partitions led, records, bytes, records ever appended; bytes appended and fetched, as
# counted by the partitions' present leaders.
Row = tuple[int, int, int, int, int, int]
NO_SUMS: Final[Row] = (0, 0, 0, 0, 0, 0)


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The sums of a shard or node, by topic. `is_whole` says that all shards of the node are included."""

    by_topic: dict[str, Row]
    is_whole: bool = True
    with_cursors: list[str] | None = None
    """The topics that have a cursor in a partition led here; None: an older program, which does not tell."""


class ClusterSums(msgspec.Struct, frozen=True):
    """The sums of the cluster, by topic, and the nodes of which shards are missing in them."""

    by_topic: dict[str, Row]
    silent: list[str]
    with_cursors: frozenset[str]
    """The topics that have a cursor, without those that only nodes in `silent_on_cursors` know."""
    silent_on_cursors: list[str]
    """The nodes in `silent`, and those of an older program."""

    def of(self, topic: str) -> Row:
        """Return the row of a topic's sums over all its partitions; zeros for an unknown topic."""
        return self.by_topic.get(topic, NO_SUMS)


class TopicSumsRoute:
    """Collects the sums of all topics from the nodes, and answers other nodes and shards with this one's."""

    def __init__(self, services: HostServices, exchange: Exchange) -> None:
        self._services = services
        self._shard = Kept(self._add_up, clock=services.clock, keep_s=KEEP_S)
        self._cluster = Kept(
            self._gather, clock=services.clock, version=lambda: services.view.version, keep_s=KEEP_S
        )
        self._nodes = NodeCall[Sums](services, exchange, method="node_sums", own=self._of_node, kind=Sums)

    async def of_cluster(self) -> ClusterSums:
        """Return the sums of all topics, which may be twice `KEEP_S` old."""
        return await self._cluster.get()

    async def on_shard_sums(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with the sums of this shard."""
        return msgspec.msgpack.encode(await self._shard.get())

    async def on_node_sums(self, peer: Peer, payload: bytes) -> Sums:
        """Answer another node with the sums of this one."""
        return await self._of_node()

    async def _add_up(self) -> Sums:
        rows: dict[str, Row] = {}
        with_cursors: dict[str, None] = {}

        def add(partition: Partition) -> None:
            if partition.leads:
                if partition.cursor_commands.names():
                    with_cursors[partition.topic] = None
                row = (
                    1,
                    partition.end_offset - partition.start_offset,
                    partition.log.size_bytes,
                    partition.end_offset,
                    partition.appends.appended_bytes,
                    partition.reader.fetched_bytes,
                )
                rows[partition.topic] = _added(rows.get(partition.topic, NO_SUMS), row)

        await in_slices(list(self._services.partitions.values()), add, clock=self._services.clock)
        return Sums(rows, with_cursors=list(with_cursors))

    async def _of_node(self) -> Sums:
        answers = await of_siblings(self._services, "shard_sums")
        known = [
            await self._shard.get(),
            *(msgspec.msgpack.decode(answer, type=Sums) for answer in answers.values() if answer is not None),
        ]
        rows = await _merged(known, self._services.clock)
        return Sums(rows, len(known) == 1 + len(answers), list(_with_cursors(known)))

    async def _gather(self) -> ClusterSums:
        names = sorted(self._services.view.nodes()) or [self._services.node]
        answers = await self._nodes.of_all(names)
        known = [sums for sums in answers.values() if sums is not None]
        silent = [name for name, sums in answers.items() if sums is None or not sums.is_whole]
        older = [name for name, sums in answers.items() if sums is not None and sums.with_cursors is None]
        rows = await _merged(known, self._services.clock)
        return ClusterSums(rows, silent, _with_cursors(known), sorted({*silent, *older}))


def _added(first: Row, second: Row) -> Row:
    a, b = first, second
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5])


def _with_cursors(many: list[Sums]) -> frozenset[str]:
    return frozenset(topic for sums in many for topic in sums.with_cursors or ())


async def _merged(many: list[Sums], clock: Clock) -> dict[str, Row]:
    rows: dict[str, Row] = {}

    def add(item: tuple[str, Row]) -> None:
        topic, row = item
        rows[topic] = _added(rows[topic], row) if topic in rows else row

    for sums in many:
        await in_slices(sums.by_topic.items(), add, clock=clock)
    return rows


def document(row: Row, *, partitions: int) -> TopicSums:
    """Return the JSON document of a topic's sums; `partitions` is its number of partitions."""
    led, records, size, appended, appended_bytes, fetched_bytes = row
    return TopicSums(
        records=records,
        bytes=size,
        appended_records=appended,
        appended_bytes=appended_bytes,
        fetched_bytes=fetched_bytes,
        complete=led >= partitions,
    )
