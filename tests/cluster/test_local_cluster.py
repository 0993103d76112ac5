"""`LocalCluster`: nodes start, die, come back and end, and nothing outlives the program, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import laminar
from laminar.testing import cluster as testing_cluster
from laminar.testing.cluster import LocalCluster, LoopbackNet, marked_processes
from laminar.testing.history import check_replicas
from laminar.testing.nodes import ServerFailed
from laminar.testing.replicas import committed_digests
from tests.cluster.patience import told

# Starts a cluster, says its mark, and waits to be killed.
OWNER = """
import sys
from pathlib import Path
from laminar.testing.cluster import MARK, LocalCluster
with LocalCluster(Path(sys.argv[1]), nodes=2, shards=1) as cluster:
    print(f"{MARK}={cluster.mark}", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), nodes=3, shards=1) as running:
        yield running


def until_all_are_alive(cluster: LocalCluster, asked: int) -> None:
    """As the node `asked` sees them: on a slow machine one is taken for dead now and then, for a moment."""
    deadline = time.monotonic() + 120
    while True:
        nodes = told(f"{cluster.urls[asked]}/v1/cluster")["nodes"]
        if {"node-1", "node-2", "node-3"} == {node["node"] for node in nodes if node["alive"]}:
            return
        assert time.monotonic() < deadline, nodes
        time.sleep(0.05)


def test_every_node_is_a_process_group_with_its_children(cluster: LocalCluster) -> None:
    """A supervisor that leads the group, a controller and a shard in it, and each node sees all."""
    for node in cluster.members:
        pids = cluster.pids(node.number)
        assert 3 == len(pids)
        assert {pids[0]} == {os.getpgid(pid) for pid in pids}
        until_all_are_alive(cluster, node.number)


def test_a_killed_node_is_gone_at_once_and_comes_back_with_its_data(cluster: LocalCluster) -> None:
    """After `kill` none of its processes lives; `restart` gives the same address and the same log."""
    with laminar.connect(cluster.urls) as client:
        topic = client.create_topic("kept", partitions=2, replicas=3)
        receipts = [topic.append(b"%d" % number) for number in range(10)]
        pids = cluster.pids(1)

        cluster.kill(1)
        gone = not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)
        during = topic.append(b"during")
        cluster.restart(1)
        values = sorted(record.value for record in topic.read())

    assert gone
    assert [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9", b"during"] == values
    assert len({(each.partition, each.offset) for each in (*receipts, during)}) == 11
    assert pids != cluster.pids(1)
    until_all_are_alive(cluster, 1)


def test_replicas_are_asked_one_by_one_and_agree(cluster: LocalCluster) -> None:
    """A digest from each replica of each partition, at the same index, and they are the same."""
    with laminar.connect(cluster.urls) as client:
        topic = client.create_topic("digested", partitions=2, replicas=3)
        for number in range(20):
            topic.append(b"%d" % number, key=b"%d" % number)

    digests = committed_digests(cluster.urls, "digested", timeout=120)

    assert {0: {"node-1", "node-2", "node-3"}, 1: {"node-1", "node-2", "node-3"}} == {
        partition: set(by_node) for partition, by_node in digests.items()
    }
    assert [] == check_replicas(digests)


def test_a_replica_that_does_not_answer_is_named_with_the_reason(cluster: LocalCluster) -> None:
    """Those of the partitions that it has no part in come together all the same, and are counted."""
    until_all_are_alive(cluster, 0)  # else none is placed on one that was taken for dead
    with laminar.connect(cluster.urls) as client:
        client.create_topic("partly", partitions=8, replicas=2)
    partitions = told(f"{cluster.urls[0]}/v1/topics/partly/partitions")["partitions"]
    others = [
        each for each in partitions if "node-2" not in {replica["node"] for replica in each["replicas"]}
    ]
    assert 0 < len(others) < 8

    cluster.kill(1)
    said = rf"those of {len(others)} partitions have: partition \d: node-2 at http\S+: .*refused"
    # All that are alive have come together as soon as each was asked: on a slow machine that takes longer.
    for timeout_s in (0.5, 5.0, 60.0):
        with pytest.raises(ServerFailed) as failed:
            committed_digests(cluster.urls, "partly", timeout=timeout_s)
        if re.search(said, str(failed.value)):
            break
    assert re.search(said, str(failed.value)), failed.value
    cluster.restart(1)

    digests = committed_digests(cluster.urls, "partly", timeout=120)
    assert {each["partition"] for each in partitions} == digests.keys()
    assert [] == check_replicas(digests)


def test_no_process_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    """`kill -9` of the program that made the cluster ends every process of every node."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        mark = owner.stdout.readline().decode().strip()
        before = marked_processes(mark)
        owner.send_signal(signal.SIGKILL)
        owner.wait()

    # The kernel sends the signals while the owner dies; the nodes' own deaths take their moment.
    deadline = time.monotonic() + 120
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 6 == len(before)
    assert [] == left


def test_a_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The failure has the end of the log, and what was started is ended."""
    cluster = LocalCluster(tmp_path, nodes=1, shards=1, settings={"heartbeat_ms": "often"})

    with pytest.raises(ServerFailed, match="heartbeat_ms"):
        cluster.__enter__()

    assert [] == cluster.leftovers()


def test_stop_is_in_order_and_may_be_said_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node ends by itself with code 0; a second stop does nothing."""
    monkeypatch.setattr(testing_cluster, "STOP_TIMEOUT_S", 120.0)  # a slow disk is no reason to be killed
    with LocalCluster(tmp_path, nodes=1, shards=1) as cluster:
        pass
    cluster.stop()

    assert [[0]] == [node.exit_codes for node in cluster.members]
    assert [] == cluster.leftovers()


def test_an_interrupted_stop_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, while one node does not end: its processes are killed."""
    monkeypatch.setattr(testing_cluster, "STOP_TIMEOUT_S", 120.0)  # it comes when the other one has ended
    with LocalCluster(tmp_path, nodes=2, shards=1) as cluster:
        stuck, ends = (node.process.pid for node in cluster.members if node.process is not None)
        os.kill(stuck, signal.SIGSTOP)

        def interrupt() -> None:
            os.waitid(os.P_PID, ends, os.WEXITED | os.WNOWAIT)
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                cluster.stop()
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

        assert [] == cluster.leftovers()
        assert not any(node.running for node in cluster.members)


def test_two_nets_never_meet() -> None:
    """A net is one cluster's until it is given back."""
    first, second = LoopbackNet(), LoopbackNet()
    try:
        assert first.number != second.number
        assert [f"127.77.{first.number}.1", f"127.77.{first.number}.2"] == first.hosts(2)
    finally:
        first.close()
        second.close()
