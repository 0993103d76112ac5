"""A topic whose partitions split, merge and move, over real logs, with a view that the test holds back.

The catalog follows the rules of the catalog, the partitions are real ones with one voter each, and the
handlers are those of a shard; nothing drives a change but the test. So every state between two steps can be
held for as long as a test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.log import RealDisk, Storage
from laminar.log.format.flush_policy import FlushPolicy
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.append import AppendRoutes
from laminar.node.api.records.topic_append import TopicAppends
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.succession import Input, OpenRecord, SealRecord
from laminar.node.partition.state.succession import Output as SealedOutput
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.secret.keyring import Keyring
from laminar.node.shard.catalog_link import ViewWaits
from laminar.node.transport.transport import Transport
from membership.records import CatalogState, NodeRecord, RouteChange, Seal
from membership.requests import CloseChange, ReportSeal
from tests.membership.routes import begin, do, made, topic, under_way, with_topic
from tests.node.alone import SMALL, add_partition, values
from tests.node.services import Services, exchange, unix_name

NODE = "a"


class Watched(Services):
    """The services of a shard of node `a`, whose next view comes when the test shows it."""

    def __init__(self) -> None:
        """Begin without partitions and without a view."""
        super().__init__()
        self.node = NODE
        self.view = View(node=NODE, unix_name=unix_name)
        self._waits = ViewWaits()
        self.waited_for = asyncio.Event()

    def show(self, state: CatalogState) -> None:
        """Give the shard this state of the catalog as its view."""
        record = NodeRecord(
            node=NODE,
            store_id=b"s" * 16,
            host=NODE,
            http_port=1,
            shard_http_ports=[1],
            peer_ports=[2, 3],
            gossip_port=4,
            shards=1,
        )
        nodes = state.nodes.changed({NODE: record})
        state = msgspec.structs.replace(state, nodes=nodes)
        self.view.message = ViewMessage(b"c" * 16, state, {NODE: "alive"}, confirmed=True)
        self.waited_for.clear()
        self._waits.announce()

    async def view_change(self, timeout_s: float) -> bool:
        """See `ShardServices`."""
        self.waited_for.set()
        return await self._waits.next(timeout_s)


class Routed:
    """The topic `t`: the state of its catalog, its partitions by number, and the routes that append."""

    def __init__(
        self,
        make: Callable[[int, ConfigurationRecord], Awaitable[Partition]],
        storage: Storage,
        partitions: int,
    ) -> None:
        """Begin with the catalog's state; `opened` gives it the partitions."""
        self.state = with_topic(partitions)
        self.services = Watched()
        self._make = make
        self._storage = storage
        others = exchange(leader=_nobody)
        leaders = LeaderCall(self.services, Locator(self.services, others))
        self.topics = TopicLookup(self.services.view)
        self.appends = AppendRoutes(self.services, others, leaders, self.topics, limits=Limits())
        self.to_topic = TopicAppends(self.services, others, leaders, self.topics, parse=self.appends.parse)
        self.services.show(self.state)

    def __getitem__(self, number: int) -> Partition:
        """Return the partition with this number."""
        return self.services.partitions["t", number]

    async def add(self, number: int, *, successor_of: int = 0) -> None:
        """Make a partition, which leads at once."""
        voters = ConfigurationRecord(voters=((number + 1, NODE),), successor_of=successor_of)
        self.services.partitions["t", number] = await self._make(number, voters)

    # -- the steps of a change -----------------------------------------------------------------

    async def begin(self, *inputs: int, cuts: tuple[int, ...] = (), **more: Any) -> RouteChange:
        """Begin a change, make its outputs, and close it; the shard's view stays as it is."""
        done = topic(self.state).changes or []
        self.state, result = do(
            self.state, begin(*inputs, after=len(done), cuts=cuts, seed=100 * (len(done) + 1), **more)
        )
        assert result.ok, result
        change = under_way(self.state)
        self.state, _ = do(made(self.state), CloseChange("t", change.id))
        for each in change.outputs:
            await self.add(each.number, successor_of=change.id)
        return change

    async def seal(self, change: RouteChange, number: int) -> Receipt:
        """Seal an input of the change."""
        outputs = [SealedOutput(each.number, each.first, each.size, each.group) for each in change.outputs]
        return await self[number].propose_seal(SealRecord(change.id, change.version, outputs, change.order))

    async def sync_seldom(self) -> None:
        """Have the logs answer before they are synced, as those of an `interval` topic."""
        for partition in self.services.partitions.values():
            await self._storage.set_policy(
                partition.log, FlushPolicy(interval_ms=3_600_000, interval_records=0)
            )

    async def report(self, change: RouteChange, number: int, *, time_ms: int | None = None) -> None:
        """Report the seal of an input to the catalog; with the last one the change is done there."""
        seal = self[number].state.committed_seal
        assert seal is not None
        reported = Seal(seal.index, seal.end, seal.time_ms if time_ms is None else time_ms)
        group = self.state.partitions[f"t/{number}"].group
        self.state, result = do(self.state, ReportSeal("t", change.id, number, group, reported))
        assert result.ok, result

    async def open(self, change: RouteChange) -> None:
        """Open the outputs of a change that is done."""
        inputs = [Input(each.number, bytes([each.number + 1]) * 16, 1, 1) for each in change.inputs]
        for each in change.outputs:
            record = OpenRecord(change.id, change.version, each.first, each.size, inputs)
            await self[each.number].propose_open(record)

    def show(self) -> None:
        """Give the shard the catalog as it is now."""
        self.services.show(self.state)

    async def change(
        self, *inputs: int, cuts: tuple[int, ...] = (), time_ms: int | None = None, **more: Any
    ) -> RouteChange:
        """Carry a whole change out, and show it."""
        change = await self.begin(*inputs, cuts=cuts, **more)
        for number in inputs:
            await self.seal(change, number)
            await self.report(change, number, time_ms=time_ms)
        await self.open(change)
        self.show()
        return change

    # -- requests ------------------------------------------------------------------------------

    async def append(self, number: int, body: bytes | bytearray, query: str = "", **headers: str) -> Response:
        """Append to a partition by number."""
        answer = self.appends.partition(
            _post(f"/v1/topics/t/partitions/{number}/records{query}", body, headers), "t", str(number)
        )
        return answer if isinstance(answer, Response) else await answer

    async def append_to_topic(self, body: bytes | bytearray, query: str = "", **headers: str) -> Response:
        """Append to the topic."""
        return await self.to_topic.topic(_post(f"/v1/topics/t/records{query}", body, headers), "t")

    async def values(self) -> dict[int, list[bytes]]:
        """Return by partition all that is committed, without empty partitions."""
        found = {number: await values(each) for (_, number), each in self.services.partitions.items()}
        return {number: there for number, there in found.items() if there}


async def _nobody(node: str, payload: bytes) -> str:
    """Answer that no leader is known."""
    return ""


def _post(target: str, body: bytes | bytearray, headers: dict[str, str]) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection: Any = SimpleNamespace(context=None)
    return Request(RequestHead("POST", target, named), bytearray(body), connection)


async def problem_of(asking: Awaitable[Any]) -> Problem:
    """Return the problem with which a request is refused."""
    try:
        answer = await asyncio.wait_for(asking, 60)
    except Problem as problem:
        return problem
    raise AssertionError(f"answered {answer!r}")


@asynccontextmanager
async def opened(directory: Path, partitions: int = 1) -> AsyncIterator[Routed]:
    """Open a topic of this many partitions, with route 0."""
    storage = Storage.open(RealDisk(), str(directory / "home"), str(directory / "logs"), settings=SMALL)
    transport = Transport(cluster_id=lambda: b"c" * 16, node=NODE, role=1, nonce=b"n" * 16, secrets=Keyring())
    failures: list[object] = []
    driver = Driver(
        storage=storage,
        transport=transport,
        clock=Clock(),
        address_of=lambda node, replica: None,
        on_fatal=failures.append,
        on_stopped=lambda name, error: failures.append(error),
    )

    async def make(number: int, voters: ConfigurationRecord) -> Partition:
        return await add_partition(driver, storage, number, voters=voters)

    routed = Routed(make, storage, partitions)
    for number in range(partitions):
        await routed.add(number)
    try:
        yield routed
    finally:
        await driver.close()
        await transport.close()
        await storage.close()
        assert not failures, failures
