"""`laminar.embed`: a whole node in the caller's loop, on a folder that any node could have."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

import laminar
from laminar.embedded import NodeFailed
from laminar.node.host.settings import SettingsError
from laminar.node.runtime.data_folder import IdentityError
from laminar.testing.cluster import LocalCluster

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
SIZES = {"journal_file_bytes": 4 << 20}


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_node_runs_in_any_loop_and_comes_back_with_its_data(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """X1, X2: no process is forked, and no signal handler set."""

    async def main(expected: list[bytes]) -> None:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        before = children()
        async with laminar.embed(tmp_path / "data", **SIZES) as node:
            topic = await node.client.create_topic("t", partitions=3, exist_ok=True)
            async with topic.read() as records:
                assert expected == sorted([record.value async for record in records])
            for each in range(3):
                await topic.append(b"%d" % (len(expected) + each))
            assert "ready" == (await node.client.request_json("GET", "/readyz"))["status"]
            assert node.url == json.loads((tmp_path / "data" / "node.json").read_bytes())["url"]
            # One of an earlier test may end meanwhile.
            assert set() == children() - before
            assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
        assert not (tmp_path / "data" / "node.json").exists()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main([]))
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main([b"0", b"1", b"2"]))


async def test_served_later_and_embedded_again(tmp_path: Path) -> None:
    """One format: `laminar serve` with two shards takes the folder over, and gives it back."""
    data = tmp_path / "node-1" / "data"
    async with laminar.embed(data, node="node-1", **SIZES) as node:
        topic = await node.client.create_topic("t", partitions=4)
        for each in range(8):
            await topic.append(b"embedded %d" % each)

    def serve() -> list[bytes]:
        cluster = LocalCluster(tmp_path, nodes=1, shards=2)
        with cluster, laminar.connect(cluster.urls) as client:
            topic = client.topic("t")
            found = [record.value for record in topic.read()]
            for each in range(4):
                topic.append(b"served %d" % each)
            return found

    embedded = [b"embedded %d" % each for each in range(8)]
    assert embedded == sorted(await asyncio.to_thread(serve))
    async with laminar.embed(data, **SIZES) as node, node.client.topic("t").read() as records:
        found = sorted([record.value async for record in records])
    assert embedded + [b"served %d" % each for each in range(4)] == found


async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """The block need not end for an append to be durable."""
    code = (
        "import asyncio, sys, laminar\n"
        "async def main():\n"
        "    async with laminar.embed(sys.argv[1]) as node:\n"
        "        topic = await node.client.create_topic('t', partitions=1)\n"
        "        for each in range(50):\n"
        "            await topic.append(b'%d' % each)\n"
        "        print('acknowledged', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, tmp_path / "data", stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert b"acknowledged\n" == await other.stdout.readline()
    with pytest.raises(IdentityError, match="in use"):
        async with laminar.embed(tmp_path / "data"):
            pass
    other.kill()
    await other.wait()

    async with laminar.embed(tmp_path / "data") as node, node.client.topic("t").read() as records:
        assert [b"%d" % each for each in range(50)] == [record.value async for record in records]


async def test_several_nodes_live_in_one_loop(tmp_path: Path) -> None:
    """Nothing of them is the module's: each has its own folder, sockets and topics."""
    async with laminar.embed(tmp_path / "a", **SIZES) as a, laminar.embed(tmp_path / "b", **SIZES) as b:
        await a.client.create_topic("only-a", partitions=1)

        assert (["only-a"], []) == (await a.client.topics(), await b.client.topics())
        assert a.url != b.url


async def test_no_topic_is_born_silently_with_fewer_replicas_than_asked(tmp_path: Path) -> None:
    """Refused at once, with what there is; what is allowed says how many it has."""
    async with laminar.embed(tmp_path / "data", default_replicas=3, **SIZES) as node:
        client = node.client
        with pytest.raises(laminar.Unavailable) as refused:
            await client.create_topic("t")
        assert ("too_few_nodes", 3, 1) == (refused.value.code, refused.value.value, refused.value.limit)
        assert [] == await client.topics()

        about = await (await client.create_topic("t", allow_fewer_replicas=True)).describe()
        assert (3, 1) == (about.replicas, about.raw["replicas_placed"])


async def test_transactions_ask_for_all_their_replicas_on_fewer_nodes(tmp_path: Path) -> None:
    """So that they grow when nodes join; until then it is said."""
    async with laminar.embed(tmp_path / "data", default_replicas=3, **SIZES) as node:
        await node.client.request_json("POST", "/v1/producers", {"name": "copier"})

        about = await node.client.topic("_transactions").describe()
        told = await node.client.request_json("GET", "/readyz")
        assert (3, 1) == (about.replicas, about.raw["replicas_placed"])
        assert any("asked for: _transactions (1 of 3)" in warning for warning in told["warnings"])


async def test_transactions_that_rest_on_fewer_nodes_than_topics_do_are_said(tmp_path: Path) -> None:
    """A cluster that began with one node has `_transactions` there for good, also when others have joined."""
    async with laminar.embed(tmp_path / "data", **SIZES) as node:
        await node.client.request_json("POST", "/v1/producers", {"name": "copier"})
        told = await node.client.request_json("GET", "/readyz")
        assert not any("_transactions" in warning for warning in told["warnings"])

    async with laminar.embed(tmp_path / "data", default_replicas=3, **SIZES) as node:
        told = await node.client.request_json("GET", "/readyz")
        assert any("_transactions has 1 of 3 replicas" in warning for warning in told["warnings"])


async def test_a_setting_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    """By its name, before a folder is made."""
    for settings, said in (({"shards": 2}, "shards"), ({"prot": 1}, "prot"), ({"port": 99_999}, "port")):
        with pytest.raises(SettingsError, match=said):
            async with laminar.embed(tmp_path / "data", **settings):
                pass

    assert not (tmp_path / "data").exists()


async def test_a_node_that_cannot_start_says_why_and_lets_go_of_its_folder(tmp_path: Path) -> None:
    """A folder whose part of the catalog is gone: as `laminar serve`, it does not guess."""
    async with laminar.embed(tmp_path / "data", **SIZES):
        pass
    for file in (tmp_path / "data" / "controller").glob("manifest-*"):
        file.unlink()

    for _ in range(2):
        with pytest.raises(NodeFailed, match="catalog is gone"):
            async with laminar.embed(tmp_path / "data", **SIZES):
                pass


async def test_a_folder_of_another_cluster_does_not_join_in_silence(tmp_path: Path) -> None:
    """`--join`, once forgotten and given later, leads to no second cluster that acknowledges data."""
    async with laminar.embed(tmp_path / "b", **SIZES):
        pass
    async with laminar.embed(tmp_path / "a", **SIZES) as a:
        with pytest.raises(NodeFailed, match="not of the cluster at"):
            async with laminar.embed(tmp_path / "b", join=(a.url,), **SIZES):
                pass
