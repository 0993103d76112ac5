"""`laminar dev`: what its table shows, the context it makes, and that Ctrl-C ends all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.cli.commands.dev import Rates, Revival, own_context, table_rows, welcome
from laminar.cli.contexts import Contexts
from laminar.cli.errors import Failed
from laminar.client.net.endpoints import process_mark, resolve
from laminar.testing.cluster import processes_of_group
from tests.cli.conftest import Command, started
from tests.nets import port_block

NODES = [
    {"node": "node-1", "alive": True, "shards": [1, 2]},
    {"node": "node-2", "alive": False, "status": "dead"},
]


def partition(number: int, leader: str | None, end: int) -> dict[str, Any]:
    return {
        "partition": number,
        "leader": {"node": leader} if leader else None,
        "start_offset": 10,
        "end_offset": end,
        "replicas": [{"node": "node-1", "in_sync": True}, {"node": "node-2", "in_sync": True}],
    }


def test_a_row_has_what_a_node_leads() -> None:
    """Records are those of the partitions a node leads; a partition without a leader is nobody's."""
    topics = {"a": [partition(0, "node-1", 110), partition(1, None, 50)], "b": [partition(0, "node-1", 15)]}

    first, second = table_rows(NODES, topics, {"node-1": 12.4})

    assert ("alive", 2, 3, 105, 12) == tuple(
        first[name] for name in ("status", "leads", "replicas", "records", "records_per_s")
    )
    assert ("dead", 0, 3, 0, 0) == tuple(
        second[name] for name in ("status", "leads", "replicas", "records", "records_per_s")
    )


def test_a_rate_is_what_was_added_since_the_last_look() -> None:
    """None at the first look; a topic made since counts whole; one that is gone is forgotten."""
    rates = Rates()

    first = rates.look({"a": [partition(0, "node-1", 100)]}, now_s=5.0)
    second = rates.look({"a": [partition(0, "node-1", 150)], "b": [partition(0, "node-2", 30)]}, now_s=7.0)
    third = rates.look({"b": [partition(0, "node-1", 30)]}, now_s=8.0)

    assert {} == first
    assert {"node-1": 25.0, "node-2": 15.0} == second
    assert {"node-1": 0.0} == third


class Nodes:
    """Stands for a cluster: nodes 0 and 1, of which 1 has ended."""

    def __init__(self) -> None:
        self.members = [SimpleNamespace(number=number, name=f"node-{number + 1}") for number in range(2)]
        self.members[0].running, self.members[1].running = True, False
        self.members[1].log_tail = lambda: "its last words"
        self.spawned: list[int] = []

    def spawn(self, number: int) -> None:
        self.spawned.append(number)


def test_a_node_that_ends_is_started_again_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    """Said once; the others are left alone."""
    nodes: Any = Nodes()
    revival = Revival(nodes)

    revival.look(now_s=10.0)
    revival.look(now_s=12.9)
    assert [] == nodes.spawned
    revival.look(now_s=13.0)

    assert [1] == nodes.spawned
    assert ["laminar: node-2 ended; it is started again in 3 s"] == capsys.readouterr().err.splitlines()


def test_a_node_that_ends_again_and_again_ends_dev() -> None:
    """With the end of its log."""
    revival: Any = Revival(Nodes())  # type: ignore[arg-type]

    with pytest.raises(Failed, match="its last words"):
        for second in range(100):
            revival.look(now_s=float(second))

    assert [1] * 5 == revival.cluster.spawned


def test_there_are_three_lines_to_copy() -> None:
    """One produces, one consumes, one is curl."""
    copied = [line.strip() for line in welcome("http://127.0.0.1:7070").splitlines() if line.startswith("  ")]

    assert ["echo", "laminar", "curl"] == [line.split()[0] for line in copied]


def test_its_context_is_current_only_where_there_is_none_and_goes_with_it() -> None:
    """What other terminals type leads where it did."""
    with own_context(["http://127.0.0.1:7070"]) as (name, is_current):
        assert (("dev", True), "dev") == ((name, is_current), Contexts.load().current)
        assert Contexts.load().by_name["dev"]["create_topics"]
    assert (None, {}) == (Contexts.load().current, Contexts.load().by_name)

    contexts = Contexts.load()
    contexts.by_name, contexts.current = {"live": {"urls": ["http://127.0.0.9:1"]}}, "live"
    contexts.save()
    with own_context(["http://127.0.0.1:7070"]) as (name, is_current):
        assert (("dev", False), "live") == ((name, is_current), Contexts.load().current)
        assert "laminar context use dev" in welcome("http://127.0.0.1:7070", context=name)
    assert ("live", ["live"]) == (Contexts.load().current, list(Contexts.load().by_name))


def test_a_context_of_ones_own_called_dev_is_left_alone() -> None:
    """It may hold a token; the cluster's gets another name."""
    mine = {"urls": ["http://127.0.0.9:1"], "token": "mine"}
    contexts = Contexts.load()
    contexts.by_name, contexts.current = {"dev": mine}, "dev"
    contexts.save()

    with own_context(["http://127.0.0.1:7070"]) as (name, _):
        assert ("dev-2", mine) == (name, Contexts.load().by_name["dev"])

    assert ("dev", {"dev": mine}) == (Contexts.load().current, Contexts.load().by_name)


def test_the_context_of_a_dev_that_was_killed_is_nobodys() -> None:
    """Neither the command line nor a program follows it, and the next `dev` takes the name again."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    mark = process_mark(done.pid)
    done.wait()
    contexts = Contexts.load()
    contexts.by_name["dev"] = {"urls": ["http://127.0.0.9:1"], "create_topics": True, "process": mark}
    contexts.current = "dev"
    contexts.save()

    assert "default" == resolve(None, None).origin
    assert None is Contexts.load().current
    with own_context(["http://127.0.0.1:7070"]) as (name, _):
        assert "dev" == name
        assert ("http://127.0.0.1:7070",) == resolve(None, None).urls


@pytest.mark.parametrize("count", ["0", "10"])
def test_how_many_nodes_has_its_limits(count: str, laminar: Command) -> None:
    """One at least, nine at most."""
    ran = laminar("dev", "--nodes", count)

    assert 2 == ran.code
    assert "--nodes is between 1 and 9" in ran.err


@pytest.mark.parametrize(("number", "count"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_cluster_in_the_foreground(
    number: signal.Signals, count: int, laminar: Command, tmp_path: Path
) -> None:
    """Ready says what to do next; the first use makes a topic; Ctrl-C ends all, code 0, nothing left.

    SIGTERM is an interrupt, too (`dev` has one handler for both): one node is enough to see it.
    """
    # Each module says on stderr that it was imported, and when.
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "laminar.cli",
        "dev",
        "--nodes",
        str(count),
        "--shards",
        "1",
    ]
    command += ["--data", str(tmp_path / "data")]
    with port_block() as port, started([*command, "--port", str(port)], stderr=subprocess.STDOUT) as dev:
        assert dev.stdout is not None
        said = [dev.stdout.readline()]
        while said[-1] and b"Ctrl-C" not in said[-1]:
            said.append(dev.stdout.readline())
        assert said[-1], f"it has ended: {said}"

        produced = laminar("produce", "hello", stdin=b"hi\n")
        consumed = laminar("consume", "hello")
        unused = laminar("consume", "unused")
        nodes = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and _mentions(entry, str(tmp_path / "data"))
        ]
        dev.send_signal(number)
        said_later = dev.stdout.read()

        assert 0 == dev.wait(60)
    # An interrupt in the middle of an import can end Python by SIGINT, though it was caught.
    assert b"laminar" not in said_later
    assert (0, b"hi\n", 0) == (produced.code, consumed.out, unused.code)
    # Besides `dev` itself, nodes of a supervisor, a controller and a shard.
    assert 1 + 3 * count == len(nodes)
    assert [] == [pid for pid in nodes if Path(f"/proc/{pid}").exists() and processes_of_group(pid)]
    assert None is Contexts.load().current
    assert (tmp_path / "data" / "node-1" / "log").exists()


def _mentions(process: Path, text: str) -> bool:
    try:
        return text.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False
