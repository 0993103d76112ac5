"""Commands that the catalog's leader refuses by what it knows beside the catalog: programs, gossip, votes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import laminar
from laminar.embedded import EmbeddedNode
from laminar.node.catalog import controller, service
from laminar.node.catalog.controller import Controller
from laminar.node.catalog.messages.requests import NodeRequest
from laminar.node.runtime.boot import CONTROLLER
from membership.catalog import CODE_VERSION
from membership.records import NodeRecord

SIZES = {"journal_file_bytes": 4 << 20}


def controller_of(node: EmbeddedNode) -> Controller:
    found = node._processes[CONTROLLER]
    assert isinstance(found, Controller)
    return found


async def with_ghost(node: EmbeddedNode) -> None:
    """Register a node that never runs, and drain it."""
    ghost = NodeRecord("ghost", b"g" * 16, "127.0.0.1", 1, [2], [3, 4], 5, 1, code_version=CODE_VERSION)
    await controller_of(node).service.ask(NodeRequest(ghost))
    async with asyncio.timeout(60):
        while True:
            try:
                await node.client.request_json("POST", "/v1/admin/nodes/ghost/drain")
                return
            except laminar.Unavailable as error:
                assert error.code == "not_enabled"


async def test_a_node_that_is_drained_and_stopped_is_removed(tmp_path: Path) -> None:
    async with laminar.embed(tmp_path / "data", **SIZES) as node:
        await with_ghost(node)

        answer = await node.client.request_json("DELETE", "/v1/admin/nodes/ghost")

        assert {"node": "ghost", "state": "removed"} == answer
        with pytest.raises(laminar.NotFound):
            await node.client.request_json("GET", "/v1/admin/nodes/ghost")


async def test_a_node_that_votes_in_the_catalog_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the group would count on a vote that never comes."""
    async with laminar.embed(tmp_path / "data", **SIZES) as node:
        await with_ghost(node)
        monkeypatch.setattr(service.CatalogService, "_voters", lambda self: ["ghost"])

        found = await node.client.request_json("GET", "/v1/admin/nodes/ghost")
        with pytest.raises(laminar.Error, match="still votes in the catalog") as refused:
            await node.client.request_json("DELETE", "/v1/admin/nodes/ghost")

        assert "node_in_use" == refused.value.code
        assert (["it votes in the catalog"], False) == (found["drain_waits_for"], found["safe_to_stop"])


async def test_a_node_that_runs_is_not_removed_although_it_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would register again, or serve what nothing knows of."""
    async with laminar.embed(tmp_path / "data", **SIZES) as node:
        await with_ghost(node)
        statuses = {node.node: "alive", "ghost": "suspect"}
        monkeypatch.setattr(controller_of(node).directory, "statuses", lambda: statuses)

        with pytest.raises(laminar.Error, match="stop it first"):
            await node.client.request_json("DELETE", "/v1/admin/nodes/ghost")


async def test_a_command_that_a_node_does_not_know_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program from before these commands; the commands from before go on."""
    monkeypatch.setattr(controller, "CODE_VERSION", 0)
    async with laminar.embed(tmp_path / "data", node="elder", **SIZES) as node:
        await node.client.create_topic("t")
        for method, path, body in (
            ("POST", "/v1/admin/nodes/elder/drain", None),
            ("PUT", "/v1/admin/topics/t/partitions/0/pin", {"nodes": ["elder"], "reason": "r"}),
        ):
            with pytest.raises(laminar.Unavailable, match="too old: elder") as refused:
                await node.client.request_json(method, path, body)
            assert ("not_enabled", 503) == (refused.value.code, refused.value.status)

        headers = {"If-Match": "*"}
        settings = {"settings": {"retention_ms": 10**9}}
        about = await node.client.request_json("PATCH", "/v1/topics/t", settings, headers=headers)
        assert {"retention_ms": 10**9} == about["settings"]
