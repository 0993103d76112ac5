"""CPU seconds of each test module: of the process that runs it, and of all that it starts.

A plugin of pytest (`tests/conftest.py` loads it). A run with `--durations`, as `make test` is,
ends with a line for each folder, and one for each module that takes more than its share. On few cores this,
and not the clock, is what a test costs its neighbours. Knows Linux's /proc.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
BUDGET_S = 10.0
"""What a module may take in `make test`, about (docs/decisions/0038)."""
COLLECTING = "(starting and collecting)"

used_key = pytest.StashKey[dict[str, float]]()
mark_key = pytest.StashKey[float]()


def family_s(root: int | None = None) -> float:
    """Return the CPU seconds of a process (this one) and its descendants, with those it has waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        children[int(fields[1])].append(int(entry))
        # Of `man proc_pid_stat`: utime, stime, cutime, cstime.
        ticks[int(entry)] = sum(map(int, fields[11:15]))
    total = 0
    left = [os.getpid() if root is None else root]
    while left:
        pid = left.pop()
        total += ticks.get(pid, 0)
        left += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def module_of(item: pytest.Item) -> str:
    """Return the path of a test's module below tests/."""
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else item.path.name


def lines(used: dict[str, float], *, budget_s: float = BUDGET_S) -> Iterator[str]:
    """Yield the report: the whole, each folder, and the modules above `budget_s`, each with its seconds."""
    folders: dict[str, float] = defaultdict(float)
    for module, seconds in used.items():
        folder, _, rest = module.partition("/")
        if folder == "node" and "/" in rest:  # as large as all others
            folder += "/" + rest.partition("/")[0]
        folders[f"{folder}/" if rest else folder] += seconds
    yield f"{sum(used.values()):7.1f} s of CPU"
    yield from (f"{seconds:7.1f}   {folder}" for folder, seconds in _largest(folders) if seconds >= 1)
    over = [(module, seconds) for module, seconds in _largest(used) if seconds > budget_s]
    yield f"modules of more than {budget_s:.0f} s:" if over else f"no module took more than {budget_s:.0f} s"
    yield from (f"{seconds:7.1f}   {module}" for module, seconds in over)


def _largest(used: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(used.items(), key=lambda each: -each[1])


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing."""
    config.stash[used_key] = {}
    config.stash[mark_key] = 0.0


def _charge(config: pytest.Config, to: str) -> None:
    """Charge what was used since the last call."""
    now = family_s()
    # A process whose parent died without waiting for it is no descendant any more, and its time is gone.
    _add(config, {to: max(0.0, now - config.stash[mark_key])})
    config.stash[mark_key] = now


def _add(config: pytest.Config, used: dict[str, float]) -> None:
    total = config.stash[used_key]
    for module, seconds in used.items():
        total[module] = total.get(module, 0.0) + seconds


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Charge what came before the tests."""
    _charge(session.config, COLLECTING)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Charge a module when its last test is through, with its fixtures."""
    result = yield
    if nextitem is None or module_of(nextitem) != module_of(item):
        _charge(item.config, module_of(item))
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on what a worker measured."""
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["cpu"] = session.config.stash[used_key]  # type: ignore[attr-defined]  # xdist's


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add what a worker measured."""
    _add(node.config, getattr(node, "workeroutput", {}).get("cpu", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the report where durations are asked for."""
    if config.getoption("durations") is not None:
        terminalreporter.section("CPU time")
        for line in lines(config.stash[used_key]):
            terminalreporter.write_line(line)
