"""A change of a route, seen through nodes of which some have old views."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import laminar
from laminar.client import route_changes
from laminar.client.errors import TimedOut
from laminar.client.net.session import Session
from laminar.client.route_changes import cancel_route, route_from, until_done


def routes(version: int, *, changing: int | None = None) -> dict[str, Any]:
    change = None if changing is None else {"version": changing, "inputs": []}
    ranges = [{"partition": version, "from": 0, "to": 65_536}]
    return {"routes": [{"version": version, "ranges": ranges}], "changes": [], "change": change}


class Nodes:
    """A session whose nodes say in turn how the route is; the last one goes on."""

    def __init__(self, *views: dict[str, Any]) -> None:
        self.views = list(views)
        self.changes: list[dict[str, Any]] = [{"state": "done"}]

    async def get_json(self, target: str, **more: Any) -> dict[str, Any]:
        if "wait_ms" in target:
            return self.changes.pop(0) if len(self.changes) > 1 else self.changes[0]
        return self.views.pop(0) if len(self.views) > 1 else self.views[0]


def nodes(*views: dict[str, Any]) -> Session:
    return cast("Session", Nodes(*views))


@pytest.mark.parametrize("partitions", [[], [0]])
async def test_one_partition_is_not_merged(tmp_path: Path, partitions: list[int]) -> None:
    """It would be moved, as a change of one partition is."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        topic = await node.client.create_topic("t")
        with pytest.raises(laminar.ConfigError, match="two partitions or more"):
            await topic.merge(partitions)
        assert (await topic.route()).version == 0


async def test_a_change_that_is_done_is_not_taken_from_a_node_that_sees_it_under_way() -> None:
    """A caller of `merge` would be given the partitions that have just ended."""
    asked = nodes(routes(1), routes(1, changing=2), routes(2))
    route = await until_done(asked, "t", 2, wait=60.0)
    assert (2, {2: range(65_536)}) == (route.version, dict(route.ranges))


async def test_until_it_is_done_its_progress_is_shown() -> None:
    seen: list[str] = []
    asked = Nodes(routes(2))
    asked.changes = [{"state": "preparing"}, {"state": "closing"}, {"state": "done"}]
    session = cast("Session", asked)
    route = await until_done(session, "t", 2, wait=60.0, progress=lambda each: seen.append(each["state"]))
    assert (2, ["preparing", "closing"]) == (route.version, seen)


async def test_one_that_has_begun_is_seen_under_way() -> None:
    route = await route_from(nodes(routes(1), routes(1, changing=2)), "t", 2, begun=True)
    assert (1, 2) == (route.version, route.changing)


async def test_where_no_node_knows_it_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_changes, "PATIENCE_S", 0.3)
    monkeypatch.setattr(route_changes, "VIEW_WAIT_S", 0.1)
    with pytest.raises(TimedOut, match="knows route 2"):
        await route_from(nodes(routes(1)), "t", 2)
    assert 1 == (await route_from(nodes(routes(1)), "t", 2, begun=True)).version


async def test_a_node_that_knows_no_changes_has_none_to_cancel() -> None:
    older = routes(0)
    del older["changes"], older["change"]
    assert await cancel_route(nodes(older), "t") is None
