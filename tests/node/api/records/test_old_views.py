"""A node whose view is older than a partition waits for the newer view, and does not refuse what is right."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import laminar
from laminar.client.errors import NotFound
from laminar.node.api.app import Api
from laminar.node.shard.shard import Shard
from tests.node.catalog.test_route_requests import until_enabled


@pytest.mark.parametrize("what", ["append", "fetch", "stage"])
async def test_a_partition_that_the_view_lacks_is_looked_for_in_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A client may have learned of it from another node. A number that was used before never comes again."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        topic = await node.client.create_topic("t", partitions=1)
        await until_enabled(node)
        shard = next(each for each in node._processes.values() if isinstance(each, Shard))
        old = shard.view.message
        await topic.split(0, 9_000)
        if what == "stage":
            await node.client.request_json("POST", "/v1/sinks/s")
        # As at a node that holds no replica of it.
        api = cast("Api", shard._application)
        monkeypatch.setattr(
            api,
            "_known",
            lambda matched: api._topics.knows(matched.params["topic"], matched.params.get("partition")),
        )
        newest, asked = shard.view.message, 0

        async def refresh() -> None:
            nonlocal asked
            asked += 1
            shard.view.message = newest

        monkeypatch.setattr(shard, "refresh_view", refresh)

        async def ask(number: int) -> int:
            shard.view.message = old
            path = f"/v1/topics/t/partitions/{number}"
            if what == "fetch":
                answer = await node.client.session.call("GET", f"{path}/records")
            elif what == "append":
                answer = await node.client.session.call("POST", f"{path}/records", body=b"x")
            else:
                answer = await node.client.session.call(
                    "POST",
                    f"/v1/sinks/s/batches/1/stages?topic=t&partition={number}&stage={number}&epoch=1",
                    body=b"x",
                )
            return answer.status

        assert await ask(2) in (200, 201) and 1 == asked
        with pytest.raises(NotFound, match="has partitions 0 to 2"):
            await ask(99)
        assert 2 == asked
