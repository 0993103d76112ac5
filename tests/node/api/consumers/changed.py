"""One node in this loop whose topics change their routes, and what consumers of them ask of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import httpx

import laminar
from laminar.client.errors import Error, from_problem
from laminar.embedded import EmbeddedNode
from laminar.node.catalog.controller import Controller
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import CONTROLLER
from laminar.node.shard.shard import Shard
from membership.catalog import Catalog
from membership.records import RouteChange
from membership.requests import BeginChange, ReclaimPartition

TOPIC = "t"


class ChangedNode:
    """A node with the topic `t`."""

    def __init__(self, node: EmbeddedNode, http: httpx.AsyncClient) -> None:
        self.node = node
        self.http = http
        self.shard = cast("Shard", node._processes[0])
        group = cast("Controller", node._processes[CONTROLLER]).group
        assert group is not None
        self.catalog: Catalog = group.catalog

    # -- what happens to the topic ---------------------------------------------------------

    async def append(self, partition: int, count: int) -> None:
        """Append so many records to a partition."""
        for number in range(count):
            path = f"/v1/topics/{TOPIC}/partitions/{partition}/records"
            answer = await self.http.post(path, content=b"%d" % number)
            assert 201 == answer.status_code, answer.text

    async def change(
        self, *inputs: int, cuts: Sequence[int] = (), order: Literal["strict", "weak"] = "strict"
    ) -> list[int]:
        """Carry a change of the route out; return the numbers of its outputs."""
        change = await self.begin(*inputs, cuts=cuts, order=order)
        await self.done(change)
        return [each.number for each in change.outputs]

    async def begin(
        self, *inputs: int, cuts: Sequence[int] = (), order: Literal["strict", "weak"] = "strict"
    ) -> RouteChange:
        """Begin a change, which the node carries out."""
        await until(lambda: self.catalog.code_version >= 3)
        groups = [os.urandom(16) for _ in range(len(cuts) + 1)]
        topic = self.catalog.state().topics[TOPIC]
        version = 0 if topic.route is None else topic.route.version
        placement = [[self.node.node]] * len(groups)
        begin = BeginChange(TOPIC, version, list(inputs), list(cuts), groups, placement, order, 1, 60_000)
        assert "created" == (await self.catalog.change_route(begin)).outcome
        change = self.catalog.state().topics[TOPIC].change
        assert change is not None
        return change

    async def done(self, change: RouteChange) -> None:
        """Wait until its outputs take records, and the shard knows it."""
        await until(lambda: self.catalog.state().topics[TOPIC].change is None)
        await self.seen()
        for each in change.outputs:
            await until(lambda each=each: self._is_open(each.number))  # type: ignore[misc]  # bound here

    def _is_open(self, number: int) -> bool:
        partition = self.shard.partitions.get((TOPIC, number))
        return partition is not None and partition.leads and partition.state.succession.status == "open"

    async def reclaim(self, number: int) -> None:
        """Let the catalog forget a partition, without a question."""
        group = self.catalog.state().partitions[f"{TOPIC}/{number}"].group
        assert (await self.catalog.change_route(ReclaimPartition(TOPIC, number, group, 1))).ok
        await self.seen()

    async def seen(self) -> None:
        """Wait until the shard knows what the catalog knows."""
        await until(lambda: self.shard.view.version >= self.catalog.state().version)

    def partition(self, number: int) -> Partition:
        """The only replica of a partition."""
        return self.shard.partitions[TOPIC, number]

    # -- what a consumer asks --------------------------------------------------------------

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask below the topic, once; return the document, or raise what the client makes of the problem."""
        answer = await self.http.request(method, f"/v1/topics/{TOPIC}{path}", json=body)
        if answer.is_error:
            raise from_problem(answer.status_code, answer.json(), asked=path)
        return answer.json() if answer.content else None

    async def put(self, body: Mapping[str, Any], name: str = "g") -> Any:
        """Change a cursor."""
        return await self.ask("PUT", f"/cursors/{name}", body)

    async def set(self, partition: int, position: int, name: str = "g", **more: Any) -> Any:
        """Set a cursor in one partition."""
        return await self.put({"positions": {str(partition): position}, **more}, name)

    async def claim(self, partition: int, owner: str, **more: Any) -> Any:
        """Claim a cursor where it is, or at 0, as a member does."""
        position = (await self.positions()).get(partition)
        return await self.set(
            partition,
            position or 0,
            owner=owner,
            **({"expected": {str(partition): position}, "expected_owner": ""} | more),
        )

    async def refused(self, partition: int, owner: str = "m", **more: Any) -> Error:
        """Claim what is not to be had yet; return why."""
        try:
            await self.claim(partition, owner, **more)
        except laminar.Error as error:
            return error
        raise AssertionError(f"{owner} owns partition {partition}")

    async def positions(self, name: str = "g") -> dict[int, int]:
        """By partition."""
        return await self.node.client.topic(TOPIC).cursor(name)

    async def owners(self, name: str = "g") -> dict[int, str]:
        """By partition, of those that are owned."""
        document = await self.ask("GET", f"/cursors/{name}")
        return {int(number): str(owner) for number, owner in document["owners"].items()}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the node does by itself."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def changed_node(directory: Path, partitions: int = 1, **settings: Any) -> AsyncIterator[ChangedNode]:
    """Run the node."""
    async with laminar.embed(directory / "data", journal_file_bytes=4 << 20) as node:
        await node.client.create_topic(TOPIC, partitions=partitions, **settings)
        async with httpx.AsyncClient(base_url=node.url, timeout=60, trust_env=False) as http:
            yield ChangedNode(node, http)
