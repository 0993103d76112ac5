"""What `make test` begins first, and what it never does at the same time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xdist.remote import Producer

from tests import scheduling

ROOT = Path(__file__).parents[1]


class Worker:
    """Takes what it is given and does nothing of it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def run(files: list[str], *, workers: int) -> list[tuple[str, set[str]]]:
    """Each unit in the order of its begin, with the units that were under way by then."""
    tests = sorted((f"tests/{file}::test_{number}" for file in files for number in range(4)), key=_turn)
    option = SimpleNamespace(loadscopereorder=True, maxprocesses=None)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["popen"] * workers)
    scheduler = scheduling.scheduler(config, Producer("test", enabled=False))
    nodes: list[Any] = [Worker(f"gw{number}") for number in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    begun: list[tuple[str, set[str]]] = []
    done = dict.fromkeys(range(workers), 0)
    while any(done[number] < len(node.given) for number, node in enumerate(nodes)):
        now = {
            number: scheduler._split_scope(tests[node.given[done[number]]])
            for number, node in enumerate(nodes)
            if done[number] < len(node.given)
        }
        for number, unit in now.items():
            if unit not in [name for name, _ in begun]:
                begun.append((unit, set(now.values())))
            scheduler.mark_test_complete(nodes[number], nodes[number].given[done[number]])
            done[number] += 1
    assert len(tests) == sum(done.values())
    return begun


def _turn(test: str) -> int:
    return scheduling.turn(scheduling.place(test))


def test_what_takes_long_begins_first_and_few_clusters_run_at_a_time() -> None:
    """Spark's modules are one unit, but for one; and no third cluster begins before one of two has ended."""
    clusters = [f"cluster/test_{name}.py" for name in "abcdef"]
    small = [f"wire/test_{name}.py" for name in "abcdefgh"]

    spark = ["spark/test_b.py", "spark/test_executors.py", "spark/test_a.py"]

    begun = run([*small, *clusters, *spark], workers=4)

    units = [unit for unit, _ in begun]
    assert ["tests/spark/test_executors.py", "spark/"] == sorted(units[:2], reverse=True)
    assert 2 + len(clusters) + len(small) == len(units)
    for _, beside in begun:
        assert 2 >= sum(unit.startswith("tests/cluster/") for unit in beside), beside
    assert {f"tests/{clusters[0]}", f"tests/{clusters[1]}"} <= set(units[:4])


def test_what_is_named_as_long_is_there() -> None:
    """A folder that was renamed would silently come last."""
    for start in scheduling.LONGEST:
        path = ROOT / "tests" / start
        assert path.is_dir() or list(path.parent.glob(f"{path.name}*.py")), start


def test_the_pages_are_one_unit_that_begins_first_and_each_run_under_faults_is_one() -> None:
    """The second stage: the pages name their ports, so they have one worker; the runs wait, so two may."""
    begun = run(["cluster/test_real_faults.py", "docs/test_protocol.py", "docs/test_pages.py"], workers=2)

    runs = {f"tests/cluster/test_real_faults.py::test_{number}" for number in range(4)}
    assert "docs/" == begun[0][0]
    assert runs == {unit for unit, _ in begun[1:]}
