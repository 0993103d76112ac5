"""A real node with `--steer`: it serves steered, comes back after `kill -9`, and says why where it can't be.

Each test is in a network of its own, with a loopback that nobody else uses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpf import kernel
from ebpf.interfaces import interfaces_of, network_namespace
from ebpf.layout import CONTROLLER_ROW, Rule
from ebpf.shared import FOLDER
from ebpf.status import InterfaceStatus, status
from tests.ebpf.conftest import Network

PATIENCE_S = 90.0
PASSES = bytes.fromhex("b7000000020000009500000000000000")  # r0 = XDP_PASS; exit


class Node:
    """A node's process, and what it said."""

    def __init__(self, folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self._said = folder.with_suffix(f".{time.monotonic_ns()}.log")
        with open(self._said, "wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", "laminar.cli", "serve", "--data", str(folder)]
                + ["--pin", "on", "--access", "open", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def messages(self) -> list[str]:
        """Every message it has logged, in order."""
        # The last line may be half written.
        lines = self._said.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line)["message"] if line.startswith("{") else line for line in lines]

    def wait_ready(self) -> dict[str, Any]:
        """What `node.json` says when the node serves."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if any("is ready: http" in message for message in self.messages()):
                found: dict[str, Any] = json.loads((self.folder / "node.json").read_text())
                return found
            time.sleep(0.05)
        raise AssertionError("\n".join(self.messages()))

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


Start = Callable[..., Node]


@pytest.fixture
def start(new_network: Callable[[], Network], tmp_path: Path) -> Iterator[Start]:
    """Starts nodes in a network of this test's own; the test runs in it, too."""
    nodes: list[Node] = []
    with new_network().inside():

        def start(name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Node:
            nodes.append(Node(tmp_path / name, *arguments, prefix=prefix))
            return nodes[-1]

        yield start
        for node in nodes:
            if node.process.poll() is None:
                node.stop()
        assert [] == list(FOLDER.glob(f"{network_namespace()}-*"))


def seen() -> InterfaceStatus:
    return next(each for each in status() if each.interface.loopback)


def ask(host: str) -> None:
    """Some requests, each by a connection of its own."""
    for _ in range(20):
        with urllib.request.urlopen(f"http://{host}:7070/livez", timeout=PATIENCE_S) as answer:
            assert 200 == answer.status


def tcp_packets(found: InterfaceStatus, pid: int) -> int:
    """Packets to the shared port of the node with that pid."""
    (node,) = (node for node in found.nodes if node.pid == pid)
    return sum(sum(both) for (_, rule), both in node.counts.items() if rule is Rule.SHARED_TCP)


def test_two_nodes_are_steered_and_the_last_one_detaches(start: Start) -> None:
    """They share the program; each has its own counters; afterwards there is none."""
    first = start("a", "--shards", "1", "--steer", "require")
    first.wait_ready()
    second = start("b", "--shards", "2", "--host", "127.0.0.2", "--steer", "require")
    second.wait_ready()
    program = seen().interface.xdp_program

    ask("127.0.0.1")
    ask("127.0.0.2")

    for node in (first, second):
        assert "packets on lo are steered to the shards' CPUs (generic)" in node.messages()
        assert tcp_packets(seen(), node.process.pid) >= 20
    assert 0 == first.stop()
    assert program == seen().interface.xdp_program
    assert [second.process.pid] == [node.pid for node in seen().nodes]
    assert 0 == second.stop()
    assert 0 == seen().interface.xdp_program


def test_a_killed_node_comes_back_to_one_program_and_fresh_counters(start: Start) -> None:
    """Its own stale program is known by the lock that nobody holds."""
    killed = start("a", "--shards", "2", "--steer", "require")
    killed.wait_ready()
    ask("127.0.0.1")
    stale = seen().interface.xdp_program
    killed.process.kill()
    killed.process.wait()

    again = start("a", "--shards", "1", "--steer", "require")
    again.wait_ready()

    found = seen()
    assert found.interface.xdp_program not in (0, stale)
    assert [again.process.pid] == [node.pid for node in found.nodes]
    before = tcp_packets(found, again.process.pid)
    ask("127.0.0.1")
    assert tcp_packets(seen(), again.process.pid) >= before + 20
    # One shard now: the map was filled for it, and nothing of the second's port is left.
    assert {7070, 7071} == {
        place.port for node in seen().nodes for place, _ in node.targets if place.protocol == 6
    }
    assert 0 == again.stop()


def test_the_controller_is_where_its_gossip_goes(start: Start) -> None:
    """If a CPU is to spare, it is pinned there."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU, and it is the shard's")
    node = start("a", "--shards", "1", "--steer", "require")
    pids = node.wait_ready()["pids"]

    (mine,) = seen().nodes
    (cpus,) = (target.cpus for _, target in mine.targets if target.rule is Rule.GOSSIP_UDP)
    assert {cpus[CONTROLLER_ROW]} == os.sched_getaffinity(pids["controller"])
    assert {cpus[0]} == os.sched_getaffinity(pids["shard 0"])
    assert cpus[0] != cpus[CONTROLLER_ROW]
    assert 0 == node.stop()


def test_a_foreign_program_is_left_alone(start: Start) -> None:
    """`require` doesn't start, and names it in one line."""
    (loopback,) = interfaces_of("127.0.0.1")
    foreign = kernel.load_program(PASSES, name="theirs")
    link = kernel.attach(foreign, loopback.index, flags=kernel.XDP_SKB_MODE)

    node = start("a", "--steer", "require")

    assert 1 == node.process.wait(PATIENCE_S)
    said = [message for message in node.messages() if "steer" in message]
    number = seen().interface.xdp_program
    reason = f"lo has another XDP program (id {number}, theirs): it is not replaced"
    assert [f"steer=require, but {reason}"] == said
    assert kernel.program_of(link) == number
    os.close(link)
    os.close(foreign)


def test_auto_leaves_the_loopback_alone(start: Start) -> None:
    """It says so in one line, and serves."""
    node = start("a", "--shards", "1", "--steer", "auto")
    node.wait_ready()

    said = [message for message in node.messages() if "steered" in message]
    assert 1 == len(said)
    assert said[0].startswith("packets are not steered: 127.0.0.1 is on the loopback")
    assert 0 == seen().interface.xdp_program
    ask("127.0.0.1")
    assert 0 == node.stop()


def test_without_privilege_a_node_says_what_it_lacks(start: Start, tmp_path: Path) -> None:
    """`require` without CAP_NET_ADMIN does not start; the reason is one line."""
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv (Debian: apt-get install util-linux)")
    node = start(
        "a", "--steer", "require", prefix=("setpriv", "--bounding-set=-net_admin", "--inh-caps=-all")
    )

    assert 1 == node.process.wait(PATIENCE_S)
    said = [message for message in node.messages() if "steer" in message]
    assert ["steer=require, but no privilege: CAP_NET_ADMIN (run as root)"] == said
