"""The services of a shard for handlers under test: its replicas, its view, and other shards that answer.

No shard and no server: the view, clock, settings and space are real, calls to other shards go to functions
of the test, encoded and decoded as on the way between shards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from laminar.log.disk.disk import RealDisk
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.api.common.forwarding import Exchange, answering
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest
from laminar.node.fair.bulk import Bulk
from laminar.node.host.clock import Clock
from laminar.node.host.disk_space import DiskSpace
from laminar.node.host.periodic import Check
from laminar.node.host.settings import OPEN, Settings
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import Role
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import Address, Peer
from membership.records import (
    CatalogState,
    NodeRecord,
    PartitionRecord,
    ReplicaRecord,
    TopicRecord,
)

T = TypeVar("T")

TOPIC = "t"
GROUP = b"g" * 16


class Services:
    """The services of shard 0 of the node `here`, with these replicas."""

    def __init__(
        self,
        partitions: Iterable[Partition] = (),
        *,
        elsewhere: Iterable[str] = (),
        clock: Clock | None = None,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Set up a view with one topic of one partition, whose replicas are on the nodes `elsewhere`."""
        self.node = "here"
        self.number = 0
        self.settings = Settings(access=OPEN)
        self.secrets = Keyring()
        self.clock = clock or Clock()
        self.rng = random.Random(1)
        self.view = View(node=self.node, unix_name=unix_name)
        self.view.message = message_of(list(elsewhere))
        self.partitions = {(each.topic, each.number): each for each in partitions}
        self.lost: list[ReplicaEntry] = []
        self.failed: dict[int, tuple[ReplicaEntry, str]] = {}
        self.space = DiskSpace(RealDisk(), "/", low_water_bytes=1, low_water_percent=100)
        self.bulk = Bulk()
        self._refresh = refresh

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """See `ShardServices`."""
        raise AssertionError("the catalog is not asked")

    async def refresh_view(self) -> None:
        """See `ShardServices`."""
        if self._refresh is not None:
            await self._refresh()

    async def view_change(self, timeout_s: float) -> bool:
        """See `ShardServices`."""
        return False

    def watched(self, keep: Callable[[Partition], bool]) -> Callable[[], list[Partition]]:
        """See `ShardServices`; here a check looks at all."""
        return lambda: list(self.partitions.values())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See `ShardServices`; the test calls what would run."""
        work.close()
        return asyncio.get_running_loop().create_task(asyncio.sleep(0))

    def every(self, period_s: float, check: Check, *, to_the_end: bool = False) -> None:
        """See `ShardServices`; the test calls what would be called."""

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """See `ShardServices`."""
        return asyncio.get_running_loop().run_in_executor(None, job, *arguments)


class Stopped(Clock):
    """A clock that people would read as `wall_ms` for good."""

    __slots__ = ("_wall_ms",)

    def __init__(self, wall_ms: int) -> None:
        """Show `wall_ms`."""
        self._wall_ms = wall_ms

    def wall_ms(self) -> int:
        """See `Clock`."""
        return self._wall_ms


def unix_name(role: Role) -> str:
    """Name of the socket of a process of this node; nothing listens there."""
    return f"nowhere-{role}"


def message_of(nodes: list[str]) -> ViewMessage:
    """What a controller says of a cluster of these nodes, with one topic on all of them."""
    ports = {"http_port": 1, "shard_http_ports": [1], "peer_ports": [2, 3], "gossip_port": 4, "shards": 1}
    catalog = CatalogState(
        version=1,
        nodes={node: NodeRecord(node=node, store_id=b"s" * 16, host=node, **ports) for node in nodes},  # type: ignore[arg-type]  # the ports are integers
        topics={TOPIC: TopicRecord(TOPIC, 1, len(nodes), {}, 1, 1)} if nodes else {},
        partitions={
            f"{TOPIC}/0": PartitionRecord(
                TOPIC,
                0,
                GROUP,
                "live",
                [ReplicaRecord(number + 1, node, b"s" * 16, made=True) for number, node in enumerate(nodes)],
                1,
            )
        }
        if nodes
        else {},
    )
    return ViewMessage(b"c" * 16, catalog, dict.fromkeys(nodes, "alive"), confirmed=True)


class Others:
    """The other shards, as a transport shows them: each method of theirs is a function of the test."""

    def __init__(self, **methods: Callable[[str, bytes], Awaitable[Any]]) -> None:
        """Take functions that get the asked node's name and the payload; they return the answer or raise."""
        self._methods = methods

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """See `Transport.call`."""

        async def handle(peer: Peer, asked: bytes) -> Any:
            return await self._methods[method](str(getattr(address, "host", "here")), asked)

        return await answering(handle)(Peer("here", 1, b"n" * 16), payload)


def exchange(**methods: Callable[[str, bytes], Awaitable[Any]]) -> Exchange:
    """How this shard asks others, with the answers of the test."""
    return Exchange(Others(**methods))


async def no_topic(topic: str, *, partitions: int, settings: object = None) -> None:
    """Make no topic."""
    raise AssertionError(f"{topic} is not made")
