"""The metrics of a node: any shard answers for all processes, by asking the others at scrape time.

Each process gives its statistics as JSON; `exposition` makes the text of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.health import Watch
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.runtime.boot import role_name, role_number
from laminar.node.transport.transport import Peer, TransportError

ASK_TIMEOUT_S = 2.0


class MetricsRoute:
    """The handler of GET /metrics, and the `stats` method by which siblings are asked."""

    def __init__(
        self,
        services: HostServices,
        watch: Watch,
        topics: TopicLookup,
        datagrams: Callable[[], dict[str, int]],
        audit: Callable[[], dict[str, int]],
        refused: Callable[[], Mapping[str, int]],
    ) -> None:
        self._services = services
        self._topics = topics
        self._datagrams = datagrams
        self._audit = audit
        self._refused = refused
        self._watch = watch

    def own(self) -> dict[str, Any]:
        """Return this shard's statistics."""
        services = self._services
        found = services.statistics()
        return {
            "role": role_name(services.number),
            **found,
            "datagrams": self._datagrams(),
            "audit": self._audit(),
            "principals": {"refused": dict(self._refused())},
            "channel_counts": services.deliveries.counts.rows(),
            "node": found["node"] | self._watch.statistics(),
            "partitions": [
                {
                    "topic": partition.topic,
                    "partition": partition.number,
                    "leading": partition.leads,
                    "route": self._topics.version(partition.topic),
                    "state": partition.state.succession.status,
                    "log_failed": partition.log.failure is not None,
                    "appended_batches": partition.appends.appended_batches,
                    "start_offset": partition.start_offset,
                    "end_offset": partition.end_offset,
                    "bytes": partition.log.size_bytes,
                    "fetched_bytes": partition.reader.fetched_bytes,
                    "staged_batches": len(partition.state.stages),
                    "staged_bytes": partition.state.stages.size_bytes,
                    "channels": (
                        {
                            channel.name: (
                                channel.depth(partition.end_offset),
                                len(channel.out),
                                len(channel.aside) - channel.dead,
                                channel.dead,
                                channel.lost,
                                0 if kept is None else kept.bytes_of(channel.id),
                            )
                            for channel in partition.state.channels.by_id.values()
                        }
                        if partition.leads
                        else {}
                    ),
                    "cursors": (
                        {
                            name: (
                                max(0, partition.end_offset - cursor.position),
                                max(0, partition.start_offset - cursor.position),
                            )
                            for name in partition.cursor_commands.names()
                            if (cursor := partition.cursor_commands.get(name)) is not None
                        }
                    ),
                }
                for partition in services.partitions.values()
                for kept in (partition.context.kept_log,)
            ],
        }

    async def on_stats(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a sibling with this shard's statistics."""
        return msgspec.json.encode(self.own())

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        services = self._services
        siblings = services.siblings
        answers = await asyncio.gather(
            *(services.ask_sibling(role, "stats", timeout_s=ASK_TIMEOUT_S) for role in siblings),
            return_exceptions=True,
        )
        processes = [self.own()]
        up = {role_name(services.number): True}
        for role, answer in sorted(
            zip(siblings, answers, strict=True), key=lambda pair: role_number(pair[0])
        ):
            if isinstance(answer, TransportError):
                up[role_name(role)] = False
                continue
            if isinstance(answer, BaseException):
                raise answer
            up[role_name(role)] = True
            processes.append(msgspec.json.decode(answer))
        from laminar.node.api.cluster import exposition  # its library would slow each start of a node

        return Response(
            200, [("Content-Type", exposition.CONTENT_TYPE)], exposition.text_of(processes, up=up)
        )
