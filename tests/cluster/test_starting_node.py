"""A node that starts: who asks it is refused until it can answer; and it always answers after a while."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.node.shard.http_ports import LEADERS_S
from laminar.testing.cluster import PORT, LocalCluster, Node
from router import owner_shard, partition_hash
from tests.cluster.conftest import until_all_vote
from tests.cluster.load import leaders
from tests.cluster.patience import until

ROOT = Path(__file__).parents[2]
TOPIC = "starting"
SHARDS = 2
PATIENCE_S = 60.0
TRIES = 5


class HeldCluster(LocalCluster):
    """A cluster whose nodes' shards recover their logs when the test lets them, if `held` has the node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: dict[int, Path] = {}

    def command(self, number: int) -> list[str]:
        command = super().command(number)
        if number not in self.held:
            return command
        flags = command[command.index("laminar.node") + 1 :]
        return [sys.executable, "-m", "tests.cluster.held_start", str(self.held[number]), *flags]

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(ROOT)}

    @contextlib.contextmanager
    def recovering(self, number: int) -> Iterator[None]:
        """Start a node; within the block all its shards are about to recover their logs."""
        path = self.members[number].folder / "held"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.settimeout(PATIENCE_S)
            listener.bind(str(path))
            listener.listen()
            self.held[number] = path
            self.spawn(number)
            for _ in range(self.shards):
                stack.enter_context(listener.accept()[0])
            yield
        path.unlink()
        del self.held[number]


def answer(url: str) -> tuple[int, Any]:
    """Status and document of an answer; waits, as long as the node refuses."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as found:
                return found.status, found.read()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionRefusedError), f"{url}: {error}"
            assert time.monotonic() < deadline, f"{url} refuses for {PATIENCE_S:g} s"
            time.sleep(0.02)


async def test_a_node_that_recovers_its_logs_refuses_and_its_clients_ask_the_others(real_disk: Path) -> None:
    """Else the kernel took the requests, and they waited for the whole recovery, or were given up."""
    with HeldCluster(real_disk / "cluster", nodes=3, shards=SHARDS) as cluster:
        until_all_vote(cluster)
        async with laminar.aio.connect(cluster.urls, timeout=60) as client:
            topic = await client.create_topic(TOPIC, partitions=1, replicas=3)
            await topic.append(b"before")
            led = (await asyncio.to_thread(leaders, cluster.urls[0], TOPIC))[0]
            number = next(each.number for each in cluster.members if each.name == led)
            member = cluster.members[number]
            cluster.kill(number)
            with cluster.recovering(number):
                for port in range(PORT, PORT + 1 + SHARDS):
                    with pytest.raises(ConnectionRefusedError):
                        socket.create_connection((member.host, port), timeout=PATIENCE_S).close()

                await topic.append(b"meanwhile")
                others = [each.url for each in cluster.members if each is not member]
                async with laminar.aio.connect([member.url, *others]) as newcomer:
                    await newcomer.topic(TOPIC).append(b"also meanwhile")
            cluster.wait_ready([number])
            for port in range(PORT, PORT + 1 + SHARDS):
                socket.create_connection((member.host, port), timeout=PATIENCE_S).close()
            async with laminar.aio.connect([member.url]) as again:
                read = [record.value async for record in again.topic(TOPIC).read()]
    assert [b"before", b"meanwhile", b"also meanwhile"] == read


async def test_a_node_that_is_back_knows_the_leaders_when_it_listens(real_disk: Path) -> None:
    """The first request is redirected. Else it waited until an election or a heartbeat told the leader.

    So it does, too, after an election, and if leaders stand still until the node has to listen: then it is
    tried once more, and once if neither can be seen, as the node itself may have stood still.
    """
    with LocalCluster(real_disk / "cluster", nodes=3, shards=SHARDS) as cluster:
        until_all_vote(cluster)
        async with laminar.aio.connect(cluster.urls, timeout=60) as client:
            await client.create_topic(TOPIC, partitions=8, replicas=3)
        unexplained = 0
        for _ in range(TRIES):
            led = await asyncio.to_thread(leaders, cluster.urls[0], TOPIC)
            member = next(each for each in cluster.members if each.name != led[0])
            others = [partition for partition, leader in led.items() if leader != member.name]
            cluster.kill(member.number)
            with watched(each for each in cluster.members if each is not member) as silent_s:
                cluster.spawn(member.number)
                found = {partition: first_answer(member, partition) for partition in others}
            if set(found.values()) == {307}:
                break
            await asyncio.to_thread(cluster.wait_ready)
            led_now = await asyncio.to_thread(leaders, cluster.urls[0], TOPIC)
            moved = any(led[partition] != led_now[partition] for partition in others)
            unexplained += not moved and max(silent_s) < LEADERS_S / 2
            assert unexplained <= 1, found
        assert set(found.values()) == {307}, found


@contextlib.contextmanager
def watched(nodes: Iterable[Node]) -> Iterator[list[float]]:
    """Ask every shard of some nodes whether it lives, all the time; yield how long each answer took."""
    places = [(node.host, node.port + 1 + shard) for node in nodes for shard in range(SHARDS)]
    took_s = [0.0]
    done = threading.Event()

    def watch(host: str, port: int) -> None:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=PATIENCE_S)) as connection:
            while not done.wait(0.02):
                begun_s = time.monotonic()
                connection.request("GET", "/livez")
                connection.getresponse().read()
                took_s.append(time.monotonic() - begun_s)

    threads = [threading.Thread(target=watch, args=place) for place in places]
    for thread in threads:
        thread.start()
    try:
        yield took_s
    finally:
        done.set()
        for thread in threads:
            thread.join()


def first_answer(member: Node, partition: int) -> int:
    """The status of the first append to a partition, at the shard of a node that has its replica."""
    port = member.port + 1 + owner_shard(partition_hash(TOPIC, partition), SHARDS)
    return first_status(member.host, port, f"/v1/topics/{TOPIC}/partitions/{partition}/records")


def first_status(host: str, port: int, path: str) -> int:
    """The status of an append as soon as it is not refused, without following a redirect."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, b"x", {"Laminar-Redirect": "1"})
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, f"{host} refuses for {PATIENCE_S:g} s"
                time.sleep(0.002)
                continue
            return connection.getresponse().status


def test_a_node_without_a_majority_can_be_asked(real_disk: Path) -> None:
    """Neither catalog nor partition has a leader, and it listens all the same."""
    with LocalCluster(real_disk / "cluster", nodes=3, shards=SHARDS) as cluster:
        until_all_vote(cluster)
        with laminar.connect(cluster.urls, timeout=60) as client:
            client.create_topic(TOPIC, partitions=4, replicas=3)
        for number in range(3):
            cluster.kill(number)
        cluster.spawn(0)

        url = cluster.urls[0]
        assert 200 == answer(f"{url}/livez")[0]
        assert 200 == answer(f"{url}/metrics")[0]
        status, about = answer(f"{url}/v1/cluster")
        assert (200, "") == (status, json.loads(about)["catalog_leader"])


def test_a_node_that_waits_to_join_can_be_asked_and_does_not_stop_others_from_joining(
    real_disk: Path,
) -> None:
    """It has no cluster to tell of, so who asks it for one asks the next of its addresses."""

    class Joining(LocalCluster):
        def start(self, *, timeout: float = PATIENCE_S) -> None:
            self.spawn(0)
            self.wait_ready([0])

        def command(self, number: int) -> list[str]:
            hosts = [member.host for member in self.members]
            joins = ("", f"{hosts[1]}:9999", f"{hosts[1]}:{PORT},{hosts[0]}:{PORT}")[number]
            return [*super().command(number), *(("--join", joins) if joins else ())]

    with Joining(real_disk / "cluster", nodes=3, shards=SHARDS) as cluster:
        cluster.spawn(1)
        url = cluster.urls[1]
        assert 200 == answer(f"{url}/livez")[0]
        assert 200 == answer(f"{url}/metrics")[0]
        status, said = answer(f"{url}/readyz")
        assert 503 == status
        assert "this shard has no view of its cluster yet" in said["reasons"]
        assert 503 == answer(f"{url}/v1/topics/{TOPIC}/partitions")[0]

        cluster.spawn(2)
        until(lambda: 200 == answer(f"{cluster.urls[2]}/readyz")[0], "the third node is ready")
        joining = cluster.members[1].process
        assert joining is not None
        joining.terminate()
        assert 0 == joining.wait(PATIENCE_S)
