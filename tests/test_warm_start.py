"""Forked nodes (`tests/warm_start.py`) are what executed ones are, and end with the tests."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from laminar.testing import nodes
from laminar.testing.cluster import LocalCluster, processes_of_group
from tests import guards
from tests.warm_start import NODE, ForkedProcess, Servers, execute

PROBE = "tests.warm_probe"
ROOT = Path(__file__).parents[1]
LIMIT_S = 60

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    own = Servers({PROBE: NODE})
    yield own
    own.close()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def started(
    start: Start,
    log: Path,
    way: str,
    *,
    env: Mapping[str, str] | None = None,
    lifeline: int | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, "-P", "-m", PROBE, way, "ü and more"]
    with open(log, "w+b") as opened:
        return start(command, env=env or environment(), log=opened, lifeline=lifeline)


def said(start: Start, log: Path, way: str = "", **how: Any) -> tuple[int, dict[str, Any], str]:
    """A run's exit code, what it wrote of itself, and what came after that."""
    code = started(start, log, way, **how).wait(LIMIT_S)
    first, _, rest = log.read_text().partition("\n")
    return code, json.loads(first), rest


@contextlib.contextmanager
def staying(start: Start, log: Path, **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A run that waits for its end."""
    process = started(start, log, "stay", **how)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    """A pipe's ends. The test may close the second."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_forked_process_is_what_an_executed_one_is(
    servers: Servers, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    """Alone and tied: arguments, variables, path, descriptors, group, signals, limits, flags, streams."""
    # Alone with the path that this run has, tied with this folder before all others.
    own_path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    for tied in (None, lifeline[0]):
        for folder in (ROOT, tmp_path):  # of the first server, and of the second
            env = environment(GIVEN=str(folder), LAMINAR_TEST_GIVEN="ü" * 100)
            if tied is None:
                env = {name: value for name, value in env.items() if name != "PYTHONPATH"} | own_path
            with contextlib.chdir(folder):
                executed, forked = (
                    said(start, tmp_path / "log", env=env, lifeline=tied)[1]["state"]
                    for start in (execute, servers.start_process)
                )

            assert executed == forked
            assert (tied is not None) == forked["leads"]


def test_it_is_in_the_network_that_its_command_names(servers: Servers, tmp_path: Path) -> None:
    """`ip netns exec` before it: all else is as without."""
    ip = shutil.which("ip")
    name = f"laminar-warm-{os.getpid()}"
    if ip is None or subprocess.run([ip, "netns", "add", name], capture_output=True).returncode != 0:
        pytest.skip("no network namespaces: not root, or no command ip")
    inside = (ip, "netns", "exec", name)
    try:
        executed, forked, outside = (
            said(start, tmp_path / "log", prefix=prefix)[1]["state"]
            for start, prefix in ((execute, inside), (servers.start_process, inside), (execute, ()))
        )
        process = started(servers.start_process, tmp_path / "log", "", prefix=inside)
        assert 0 == process.wait(LIMIT_S)
    finally:
        subprocess.run([ip, "netns", "del", name], check=True)

    assert isinstance(process, ForkedProcess)
    assert executed == forked
    assert outside.pop("network") != forked.pop("network")
    assert outside == forked


def test_it_has_loaded_what_an_executed_one_has_loaded(servers: Servers, tmp_path: Path) -> None:
    """An import that a node does later, and could fail in, is not done for it."""
    executed, forked = (
        set(said(start, tmp_path / "log")[1]["modules"]) for start in (execute, servers.start_process)
    )

    assert {"runpy"} == executed - forked
    assert {PROBE} == {name for name in forked - executed if not name.startswith("laminar.testing")}


def test_chance_is_drawn_anew_and_the_order_of_sets_differs(servers: Servers, tmp_path: Path) -> None:
    """So that nodes of a cluster differ in both, as executed ones do."""
    told = [said(servers.start_process, tmp_path / "log")[1] for _ in range(4)]

    assert 4 == len({each["random"] for each in told})
    assert 2 == len({each["order"] for each in told})


@pytest.mark.parametrize(
    ("way", "code", "end"),
    [
        ("", 0, "last words\n"),
        ("three", 3, "last words\n"),
        ("leave", 1, "a reason\nlast words\n"),
        ("raise", 1, "ZeroDivisionError\nlast words\n"),
    ],
)
def test_it_ends_as_an_executed_one_does(
    servers: Servers, tmp_path: Path, way: str, code: int, end: str
) -> None:
    for start in (execute, servers.start_process):
        got, _, rest = said(start, tmp_path / "log", way)

        assert code == got
        assert rest.endswith(end)


def test_its_end_is_seen_by_poll_and_wait_and_its_pid_is_kept_until_then(
    servers: Servers, tmp_path: Path
) -> None:
    """As with a child of one's own: until it is asked for, no other process has its pid."""
    with staying(servers.start_process, tmp_path / "log") as process:
        stat = Path(f"/proc/{process.pid}/stat")
        assert isinstance(process, ForkedProcess)
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        ended = os.pidfd_open(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        select.select([ended], [], [], LIMIT_S)
        os.close(ended)
        state = stat.read_text().rpartition(")")[2].split()[0]
        code = process.wait(LIMIT_S)

    assert "Z" == state
    assert -signal.SIGTERM == code == process.poll() == process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_it_is_found_by_its_run_and_by_its_command(servers: Servers, tmp_path: Path) -> None:
    """So that one that outlives its run is told from the server, which ends by itself."""
    env = environment(**{guards.RUN_VARIABLE: "a run of its own"})
    with staying(servers.start_process, tmp_path / "log", env=env) as process:
        (found,) = [each for each in guards.processes_of("a run of its own") if each.pid == process.pid]

    assert found.command.endswith("tests.warm_probe stay ü and more")


def test_its_group_ends_with_the_pipe_that_ties_it(
    servers: Servers, tmp_path: Path, lifeline: tuple[int, int]
) -> None:
    with staying(servers.start_process, tmp_path / "log", lifeline=lifeline[0]) as process:
        group = processes_of_group(process.pid)
        os.close(lifeline[1])
        code = process.wait(LIMIT_S)

    assert [process.pid] == group
    assert -signal.SIGKILL == code


# Starts one that stays, says its pid, and waits to be killed.
OWNER = f"""
import os, sys
from tests.warm_start import Servers
servers = Servers({{"{PROBE}": "{NODE}"}})
with open(os.devnull, "w+b") as log:
    process = servers.start_process([sys.executable, "-m", "{PROBE}", "stay"], env=dict(os.environ), log=log)
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        ended = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
        died, _, _ = select.select([ended], [], [], LIMIT_S)
        os.close(ended)

    assert died


@pytest.mark.parametrize("variable", ["PYTHONDEVMODE", "LD_SHOW_AUXV", "MALLOC_ARENA_MAX"])
def test_what_an_interpreter_reads_at_its_start_is_executed(
    servers: Servers, tmp_path: Path, variable: str
) -> None:
    with staying(servers.start_process, tmp_path / "log", env=environment(**{variable: "1"})) as process:
        assert not isinstance(process, ForkedProcess)


def test_what_this_process_hands_on_is_what_it_was_when_the_server_started(
    servers: Servers, tmp_path: Path
) -> None:
    """Else it is executed. The number of open files may change: it is given."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, files[1]))
    try:
        _, forked, _ = said(servers.start_process, tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
    mask = os.umask(0o77)
    try:
        with staying(servers.start_process, tmp_path / "log") as process:
            changed = process
    finally:
        os.umask(mask)

    assert [200, files[1]] == forked["state"]["files at most"]
    assert not isinstance(changed, ForkedProcess)


def test_nodes_of_tests_are_forked_and_others_are_executed(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """`laminar.testing` as it is in this run; a cluster of both kinds is a cluster."""
    own = nodes.start_process.__self__  # type: ignore[attr-defined]  # a method of this run's servers
    assert isinstance(own, Servers)
    with LocalCluster(tmp_path, nodes=2, shards=1) as cluster:
        first = isinstance(cluster.members[0].process, ForkedProcess)
        cluster.kill(0)
        own.executes = True
        cluster.restart(0)
        second = isinstance(cluster.members[0].process, ForkedProcess)
        cluster.wait_ready()  # both serve, and each sees the other
        marked = cluster.leftovers()
        pids = [pid for number in range(2) for pid in cluster.pids(number)]

    assert first
    assert not second
    assert 6 == len(pids) and set(pids) <= set(marked)
    assert [] == cluster.leftovers()
