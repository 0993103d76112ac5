"""Nodes that come back at another address, as pods of Kubernetes do: the cluster goes on, nothing is lost.

Two nodes are known by names (`advertise_host`), which lead to them while they run; the third is known by its
address alone. A program does what Kubernetes does: SIGTERM, the same folder at another address, and the next
node when `/readyz?replicas=current` of this one is 200.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.names import Names
from tests.cluster.patience import asked, told
from tests.cluster.steady_writer import Report

TOPIC = "moving"
SETTINGS: dict[str, str | int] = {"pin": "off", "settle_ms": 500}


class NamedCluster(LocalCluster):
    """Nodes that others know by a name, but for the last one; `move` gives one another address."""

    names: Names

    def is_named(self, number: int) -> bool:
        """Whether the node has a host name."""
        return number < self.nodes - 1

    def host(self, number: int) -> str:
        """What others know the node's host as."""
        node = self.members[number]
        return f"{node.name}.pods.test" if self.is_named(number) else node.host

    def environment(self) -> dict[str, str]:
        """As always, and with the names."""
        return super().environment() | dict(self.names.environment)

    def command(self, number: int) -> list[str]:
        """As always, with its name, and the names of the nodes that it joins."""
        given = [*super().command(number), "--advertise-host", self.host(number)]
        node = self.members[number]
        if node.joins:
            asked = ",".join(f"{self.host(other)}:{node.port}" for other in node.joins)
            given[given.index("--join") + 1] = asked
        return given

    def spawn(self, number: int) -> None:
        """As always; its name leads to it from now on."""
        if self.is_named(number):
            self.names.set(self.host(number), self.members[number].host)
        super().spawn(number)

    def end(self, number: int) -> None:
        """Stop a node by SIGTERM, as it takes to go."""
        process = self.members[number].process
        assert process is not None
        process.terminate()
        assert 0 == process.wait(120)
        self.kill(number)

    def kill(self, number: int) -> None:
        """As always; its name leads nowhere."""
        super().kill(number)
        if self.is_named(number):
            self.names.forget(self.host(number))

    def move(self, number: int) -> None:
        """Let the next start of a node be at an address that no node has had; it never founds a cluster."""
        node = self.members[number]
        node.joins = tuple(other for other in range(self.nodes) if other != number)
        net, _, last = node.host.rpartition(".")
        node.host = f"{net}.{int(last) + 100}"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamedCluster]:
    """Three nodes, of which two are known by their names."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    folder = tmp_path_factory.mktemp("named")
    cluster = NamedCluster(folder, nodes=3, shards=1, settings=SETTINGS)
    cluster.names = Names(folder)
    with cluster:
        yield cluster


def until_current(cluster: LocalCluster, number: int) -> None:
    """Wait for what the readiness probe of Kubernetes waits for."""
    deadline = time.monotonic() + 120
    url = cluster.members[number].url
    while get_json(f"{url}/readyz?replicas=current") is None:
        assert time.monotonic() < deadline, cluster.members[number].log_tail()
        time.sleep(0.02)


def test_a_rolling_update_in_which_each_node_gets_another_address_loses_no_write(named: NamedCluster) -> None:
    """Every acknowledged record is there once, in order; and appends go on until the end."""
    topic = {"partitions": 3, "replicas": 3}
    with httpx.Client(trust_env=False, timeout=60) as http:
        assert asked(http, "PUT", f"{named.urls[0]}/v1/topics/{TOPIC}", json=topic).is_success
    urls = [f"http://{named.host(node.number)}:{node.port}" for node in named.members]
    command = [sys.executable, "-P", "-m", "tests.cluster.steady_writer", TOPIC, *urls]
    writer = subprocess.Popen(
        command, env=named.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None and writer.stdout is not None

    def more() -> None:
        """Wait until each key has receipts that it did not have."""
        assert writer.stdout is not None
        goal = None
        for line in writer.stdout:
            goal = int(line) + 30 if goal is None else goal
            if int(line) >= goal:
                return
        raise AssertionError(f"the writer ended with {writer.wait()}")

    try:
        more()
        for number in range(named.nodes):
            named.end(number)
            named.move(number)
            named.spawn(number)
            until_current(named, number)
        more()
        writer.stdin.close()
        *_, last = writer.stdout
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()

    report = msgspec.json.decode(last, type=Report)
    print(f"{report.acknowledged:,} appends; longest gap by key: {report.longest_gap_ms} ms")
    assert [] == report.violations


@pytest.mark.long  # beside it: names as seeds (test_gossip), a node that moves alone (test_kubernetes)
def test_nodes_that_all_were_stopped_find_each_other_at_other_addresses(named: NamedCluster) -> None:
    """No address is left that anyone knew, and no record is missing."""
    before, records = {node.host for node in named.members}, ends(named)
    for number in range(named.nodes):
        named.kill(number)
    for number in range(named.nodes):
        named.move(number)
        named.spawn(number)
    named.wait_ready()

    for number in range(named.nodes):
        until_current(named, number)
    nodes = {each["node"]: each["peer"].rpartition(":")[0] for each in of_all(named)}
    assert {node.name: named.host(node.number) for node in named.members} == nodes
    assert not before & {node.host for node in named.members}
    assert records == ends(named)


def of_all(cluster: LocalCluster) -> list[dict[str, Any]]:
    """The nodes as the first one tells them."""
    nodes = told(f"{cluster.urls[0]}/v1/cluster")["nodes"]
    assert isinstance(nodes, list)
    return nodes


def ends(cluster: LocalCluster) -> list[int]:
    """The end of each partition, as its leader tells it, when each has one that answers."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        listed = get_json(f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
        partitions = listed["partitions"] if listed else []
        if partitions and all(each["end_offset"] is not None for each in partitions):
            return [each["end_offset"] for each in partitions]
        time.sleep(0.05)
    raise AssertionError(f"not every partition has a leader: {listed}")
