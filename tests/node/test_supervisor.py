"""The supervisor with real processes: children are started, watched, replaced, and end with it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.node.host.machine import CpuClaims, misplaced_packages, plan_pinning
from laminar.node.host.restart_policy import LONGEST_PAUSE_MS, RestartPolicy
from router import shard_of_source_port
from tests.nets import ClusterNet

PROGRAM = Path(__file__).with_name("supervised.py")
# How long tests wait for what should come at once.
PATIENCE_S = 120.0


class Node:
    """A running supervisor."""

    def __init__(self, data: Path, *arguments: str, python: tuple[str, ...] = ()) -> None:
        self.data = data
        command = [sys.executable, *python, str(PROGRAM), str(data), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self._log = self.process.stderr
        self.lines: list[dict[str, Any]] = []
        self._rest = b""

    def wait_for_line(self, words: str, *, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """The next line of the log that has these words."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                fields: dict[str, Any] = json.loads(line)
                self.lines.append(fields)
                if words in fields["message"]:
                    return fields
            if select.select([self._log], [], [], 0.1)[0]:
                chunk = os.read(self._log.fileno(), 65536)
                if not chunk:
                    break
                self._rest += chunk
        raise AssertionError(f"no line with {words!r} in {self.lines}")

    def ready(self) -> dict[str, Any]:
        """Wait until the node is ready; what node.json says."""
        self.wait_for_line("is ready: http")
        return self.node_file()

    def node_file(self) -> dict[str, Any]:
        """The node's note of where it is."""
        found: dict[str, Any] = json.loads((self.data / "node.json").read_text())
        return found

    def end(self) -> None:
        """Kill it, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start nodes; all are gone when the test ends."""
    nodes: list[Node] = []

    def start_one(*arguments: str, data: Path | None = None, python: tuple[str, ...] = ()) -> Node:
        nodes.append(Node(data or tmp_path / "data", *(arguments or ("0", "2")), python=python))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.end()


def ask(port: int, order: bytes = b"", *, host: str = "127.0.0.1") -> tuple[str, int, str]:
    """(role, pid, what the order was answered) of whoever accepts on a port; waits until somebody does."""
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        stream = connection.makefile("rb")
        role, _, pid = stream.readline().decode().strip().rpartition(" ")
        connection.sendall(order) if order else connection.shutdown(socket.SHUT_WR)
        return role, int(pid), stream.readline().decode().strip()


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_gone(pids: list[int], *, timeout: float = PATIENCE_S) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + timeout
    while not all(map(gone, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_each_child_serves_its_own_sockets_and_node_json_says_where(start: Callable[..., Node]) -> None:
    """The controller has the first peer port; a shard has its own HTTP port, a peer port, the shared one."""
    node = start("0", "2").ready()

    assert ("shard 0", node["pids"]["shard 0"], "") == ask(node["shard_http_ports"][0])
    assert ("shard 1", node["pids"]["shard 1"], "") == ask(node["shard_http_ports"][1])
    assert [ask(port)[0] for port in node["peer_ports"]] == ["controller", "shard 0", "shard 1"]
    assert ask(node["http_port"])[0] in ("shard 0", "shard 1")


def test_the_shared_port_refuses_until_all_shards_answer_and_each_own_port_until_its_shard_does(
    start: Callable[..., Node], cluster_net: Callable[[], ClusterNet]
) -> None:
    """Else the kernel accepted what nobody answers yet. The order of the sockets is that of the shards."""
    host = cluster_net().host(1)
    node = start("7070", "2", "late", host)
    node.wait_for_line("shard 0 is ready")

    assert "shard 0" == ask(7071, host=host)[0]
    for port in (7070, 7072):
        with pytest.raises(ConnectionRefusedError):
            ask(port, host=host)

    socket.create_connection((host, 7172)).close()  # what shard 1 waits for
    node.ready()
    assert "shard 1" == ask(7072, host=host)[0]
    for _ in range(40):
        with socket.create_connection((host, 7070), timeout=PATIENCE_S) as connection:
            said = connection.makefile("rb").readline().decode()
            assert f"shard {shard_of_source_port(connection.getsockname()[1], 2)} " in said


def test_the_shared_port_does_not_wait_for_a_shard_that_died(
    start: Callable[..., Node], cluster_net: Callable[[], ClusterNet]
) -> None:
    """What the others have is served although it keeps dying."""
    host = cluster_net().host(1)
    node = start("7070", "2", "half", host)
    node.wait_for_line("shard 0 is ready")
    # At the second death the first has been dealt with. They may have come before shard 0 was ready.
    while 2 > sum("shard 1 (pid" in line["message"] for line in node.lines):
        node.wait_for_line("shard 1 (pid")

    answered = 0
    while answered < 10:
        with socket.create_connection((host, 7070), timeout=PATIENCE_S) as connection:
            if shard_of_source_port(connection.getsockname()[1], 2) == 0:
                assert "shard 0" in connection.makefile("rb").readline().decode()
                answered += 1


def test_a_shard_that_is_given_up_is_connected_to_no_more(
    start: Callable[..., Node], cluster_net: Callable[[], ClusterNet]
) -> None:
    """Its own port and that for peers refuse; all that reach the shared port are served by the others."""
    host = cluster_net().host(1)
    node = start("7070", "2", "half", host)
    node.wait_for_line("not started again after")

    for port in (7072, 7172):
        with pytest.raises(ConnectionRefusedError):
            ask(port, host=host)
    for _ in range(40):
        assert "shard 0" == ask(7070, host=host)[0]


def test_children_have_one_thread(start: Callable[..., Node]) -> None:
    """Nothing that the zygote imports may start one."""
    node = start("0", "1").ready()

    assert ask(node["shard_http_ports"][0], b"t")[2] == "1"


def test_a_killed_child_is_replaced_and_waiting_connections_reach_its_successor(
    start: Callable[..., Node],
) -> None:
    """The supervisor keeps the listening socket, so a connect in between is neither refused nor lost."""
    node = start("0", "2")
    before = node.ready()
    port, pid = before["shard_http_ports"][0], before["pids"]["shard 0"]

    os.kill(pid, signal.SIGSTOP)  # it accepts nothing more
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as waiting:
        os.kill(pid, signal.SIGKILL)
        role, successor = waiting.makefile("rb").readline().decode().strip().rsplit(" ", 1)

    assert role == "shard 0"
    assert pid != int(successor)
    assert "killed by SIGKILL; starts again in 0 ms" in node.wait_for_line("shard 0 (pid")["message"]
    node.wait_for_line("shard 0 is ready")
    assert before["pids"]["shard 1"] == ask(before["shard_http_ports"][1])[1]


def test_a_replaced_child_is_named_in_node_json(start: Callable[..., Node]) -> None:
    """Tools that read the file must not signal a stranger's pid."""
    node = start("0", "1")
    before = node.ready()

    os.kill(before["pids"]["controller"], signal.SIGKILL)
    ready = node.wait_for_line("controller is ready")
    _, pid, _ = ask(before["peer_ports"][0])

    assert str(pid) in ready["message"]
    assert pid == node.node_file()["pids"]["controller"]


def test_a_child_that_keeps_dying_is_restarted_after_growing_pauses(start: Callable[..., Node]) -> None:
    """The first restart is at once; when it is given up is `RestartPolicy`'s, tested below."""
    node = start("0", "1", "broken")

    pauses = [node.wait_for_line("starts again in")["message"].rsplit(" ", 2)[1] for _ in range(3)]
    assert pauses == ["0", "100", "400"]


def test_a_node_without_a_shard_ends(start: Callable[..., Node]) -> None:
    """Its controller alone could answer no client, and nobody would start the node again."""
    node = start("0", "2", "broken")

    node.wait_for_line("no shard of this node is left")
    assert 2 == sum("not started again after" in line["message"] for line in node.lines)
    assert node.process.wait(timeout=PATIENCE_S) == 1


def test_the_board_tells_children_what_happens_to_their_siblings(start: Callable[..., Node]) -> None:
    """Any child can answer for the whole node."""
    node = start("0", "2")
    before = node.ready()

    assert ask(before["peer_ports"][0], b"b")[2] == "controller=READY/0 shard 0=READY/0 shard 1=READY/0"

    os.kill(before["pids"]["shard 1"], signal.SIGKILL)
    node.wait_for_line("shard 1 is ready")
    assert ask(before["peer_ports"][0], b"b")[2] == "controller=READY/0 shard 0=READY/0 shard 1=READY/1"


def test_an_exit_with_a_code_is_a_death_like_any_other(start: Callable[..., Node]) -> None:
    """A shard whose journal failed ends by itself; it must come back."""
    node = start("0", "1")
    before = node.ready()

    ask(before["shard_http_ports"][0], b"d")

    assert "exit code 3" in node.wait_for_line("starts again")["message"]
    node.wait_for_line("shard 0 is ready")


def test_a_child_whose_successor_could_do_no_better_ends_the_node(start: Callable[..., Node]) -> None:
    """One line says why, nothing is started again, and the exit code is 1."""
    node = start("0", "1", "unrecoverable")

    said = node.wait_for_line("another has my name")
    assert "stack" not in said
    node.wait_for_line("can't go on, so this node ends")
    assert node.process.wait(timeout=PATIENCE_S) == 1


def test_children_die_with_a_killed_supervisor_and_the_folder_is_free(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    """kill -9 of the supervisor leaves no process and no lock: the node starts again at once."""
    node = start("0", "2")
    before = node.ready()

    node.process.kill()
    node.process.wait()

    assert wait_gone(list(before["pids"].values()))
    again = start("0", "2").ready()
    assert before["store_id"] == again["store_id"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_children_in_order_and_exits_0(
    start: Callable[..., Node], number: signal.Signals
) -> None:
    """Exit code 0, no process left, no node.json of a node that isn't there."""
    node = start("0", "2")
    before = node.ready()

    node.process.send_signal(number)

    assert node.process.wait(timeout=PATIENCE_S) == 0
    assert wait_gone(list(before["pids"].values()))
    assert not (node.data / "node.json").exists()


def test_children_that_do_not_end_are_killed_at_the_limit(start: Callable[..., Node]) -> None:
    """drain_ms and a little more, then SIGKILL and exit code 1."""
    node = start("0", "1", "deaf")
    before = node.ready()

    node.process.send_signal(signal.SIGTERM)

    assert node.process.wait(timeout=PATIENCE_S) == 1
    assert wait_gone(list(before["pids"].values()))


def test_a_second_signal_ends_everything_at_once(start: Callable[..., Node]) -> None:
    """A person who presses Ctrl-C twice doesn't want to wait for the drain."""
    node = start("0", "1", "stubborn")
    before = node.ready()

    node.process.send_signal(signal.SIGTERM)
    node.wait_for_line("stopping")
    node.process.send_signal(signal.SIGTERM)

    assert node.process.wait(timeout=PATIENCE_S) == 1
    assert wait_gone(list(before["pids"].values()))


def test_ports_that_the_system_chose_are_the_same_after_a_restart(
    start: Callable[..., Node], cluster_net: Callable[[], ClusterNet]
) -> None:
    """--port 0 is kept in the data folder. At 127.0.0.1 any connection could take one in between."""
    host = cluster_net().host(1)
    node = start("0", "2", "", host)
    before = node.ready()
    node.process.send_signal(signal.SIGTERM)
    node.process.wait(timeout=PATIENCE_S)

    after = start("0", "2", "", host).ready()

    for name in (
        "node",
        "store_id",
        "cluster_id",
        "http_port",
        "shard_http_ports",
        "peer_ports",
        "gossip_port",
    ):
        assert before[name] == after[name]


def test_a_second_node_on_the_same_folder_is_refused(start: Callable[..., Node]) -> None:
    """The folder is locked while a node runs on it."""
    start("0", "1").ready()

    second = start("0", "1")

    assert "in use by another Laminar process" in second.wait_for_line("in use")["message"]
    assert second.process.wait(timeout=PATIENCE_S) == 1


def test_a_start_that_meets_a_document_without_a_whole_copy_says_so_in_one_line(
    start: Callable[..., Node],
) -> None:
    """What to do is in it, and no stack of ours."""
    node = start("0", "1", "nodocument")
    line = node.wait_for_line("no whole copy of layout")
    assert "move its data folder away" in line["message"]
    assert "stack" not in line


def test_a_failed_recovery_ends_the_start(start: Callable[..., Node]) -> None:
    """Nobody serves from a folder that could not be brought into order."""
    node = start("0", "1", "norecovery")

    assert "a journal that can't be read" in node.wait_for_line("recovery ends")["stack"]
    node.wait_for_line("failed (exit code 70)")
    assert node.process.wait(timeout=PATIENCE_S) == 1


def test_asserts_may_not_be_switched_off(start: Callable[..., Node]) -> None:
    """Our own mistakes are caught by asserts, in production too."""
    node = start("0", "1", python=("-O",))

    assert "-O" in node.wait_for_line("python -O")["message"]
    assert node.process.wait(timeout=PATIENCE_S) == 2


def test_a_thread_before_the_fork_is_a_bug_that_shows(start: Callable[..., Node]) -> None:
    """A fork copies one thread, and the locks of all: so there may be no other."""
    node = start("0", "1", "threaded")

    assert node.process.wait(timeout=PATIENCE_S) == 1
    assert node.process.stderr is not None
    assert b"2 threads before a fork" in node.process.stderr.read()


def test_sighup_and_sigusr1_are_passed_on(start: Callable[..., Node]) -> None:
    """SIGUSR1 makes every child print its stacks, and nobody dies of either."""
    node = start("0", "1")
    before = node.ready()

    node.process.send_signal(signal.SIGHUP)
    node.process.send_signal(signal.SIGUSR1)
    text = b""
    while text.count(b"supervised.py") < 2:
        assert node.process.stderr is not None
        assert select.select([node.process.stderr], [], [], PATIENCE_S)[0], text
        text += os.read(node.process.stderr.fileno(), 65536)

    assert before["pids"]["shard 0"] == ask(before["shard_http_ports"][0])[1]


def test_the_first_restart_is_at_once_and_the_sixth_death_in_a_minute_is_the_last() -> None:
    """Five restarts with growing pauses; after a quiet minute everything begins anew."""
    policy = RestartPolicy()

    assert [policy.died(now_ms=1000 * n) for n in range(6)] == [0, 100, 400, 1600, LONGEST_PAUSE_MS, None]
    assert policy.died(now_ms=5000 + 60_000) == 0


def test_the_generic_packages_lie_beside_laminar() -> None:
    """Started from this checkout there is nothing to complain about, except what is not there yet."""
    assert [line for line in misplaced_packages() if "missing" not in line] == []


def test_shards_are_pinned_only_where_no_other_node_is() -> None:
    """`auto` needs a CPU for each shard, and a claim on each of them."""
    cpus = sorted(os.sched_getaffinity(0))
    name = f"laminar-test-{os.getpid()}"  # other nodes of this machine hold claims of their own
    first, second = CpuClaims(name), CpuClaims(name)
    try:
        assert plan_pinning("off", 1, first) is None
        assert plan_pinning("auto", len(cpus) + 1, first) is None
        assert cpus == plan_pinning("auto", len(cpus), first)
        assert plan_pinning("auto", 1, second) is None
        assert cpus[:1] == plan_pinning("on", 1, second)
    finally:
        first.release()
        second.release()
