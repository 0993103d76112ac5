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
        self.units: set[str] = set()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def run(files: list[str], *, workers: int, seen: list[Worker] | None = None) -> list[tuple[str, set[str]]]:
    """Each unit in the order of its begin, with the units that were under way by then."""
    tests = sorted((f"tests/{file}::test_{number}" for file in files for number in range(4)), key=_turn)
    option = SimpleNamespace(loadscopereorder=True, maxprocesses=None)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["popen"] * workers)
    scheduler = scheduling.scheduler(config, Producer("test", enabled=False))
    nodes: list[Any] = [Worker(f"gw{number}") for number in range(workers)]
    if seen is not None:
        seen += nodes
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
            nodes[number].units.add(unit)
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

    begun = run([*small, *clusters, *spark], workers=3)

    units = [unit for unit, _ in begun]
    assert ["tests/spark/test_executors.py", "spark/"] == sorted(units[:2], reverse=True)
    assert 2 + len(clusters) + len(small) == len(units)
    for _, beside in begun:
        assert 2 >= sum(unit.startswith("tests/cluster/") for unit in beside), beside
    assert {f"tests/{clusters[0]}", f"tests/{clusters[1]}"} <= set(units[:5])


def test_clusters_run_two_at_a_time_until_the_last_one() -> None:
    """Who has one takes the next one, so none of them is left for the end."""
    clusters = [f"cluster/test_{name}.py" for name in "abcdef"]
    small = [f"wire/test_{name}.py" for name in "abcdefgh"]

    begun = run([*small, *clusters], workers=3)

    beside_of = {unit: beside for unit, beside in begun if unit.startswith("tests/cluster/")}
    beside = [sum(each.startswith("tests/cluster/") for each in units) for units in beside_of.values()]
    assert [2] * len(clusters) == beside
    assert "tests/wire/test_h.py" == begun[-1][0]


def test_what_computes_is_run_in_the_background_and_by_all_at_the_end() -> None:
    """The worker of low priority runs nothing that has a clock, and ends when nothing is left to compute."""
    computed = [f"sim/test_{name}.py" for name in "abcdef"]
    others = [f"wire/test_{name}.py" for name in "abcdefgh"]

    workers: list[Worker] = []
    begun = run([*computed, *others], workers=4, seen=workers)

    in_background = {scheduling.place(unit) for unit in workers[0].units}
    assert in_background and in_background <= set(computed)
    assert set(computed) - in_background, "the others helped when they had nothing else"
    assert f"tests/{others[-1]}" not in [unit for unit, _ in begun[-2:]]
    assert workers[0].shutting_down


def test_few_workers_have_none_in_the_background() -> None:
    """Else one of two would wait at the end."""
    begun = run(["sim/test_a.py", "wire/test_a.py", "wire/test_b.py"], workers=2)

    assert {"tests/wire/test_a.py", "tests/wire/test_b.py"} == {unit for unit, _ in begun[:2]}


def test_none_is_in_the_background_where_nothing_only_computes() -> None:
    """Else the first unit, which has a clock, would run at a low priority."""
    workers: list[Worker] = []
    run([f"cluster/test_{name}.py" for name in "abcdefgh"], workers=4, seen=workers)

    assert all(len(worker.units) == 2 for worker in workers), [worker.units for worker in workers]


def test_what_is_named_is_there() -> None:
    """A folder that was renamed would silently come last, or beside too many."""
    named = (scheduling.LONGEST, scheduling.COMPUTED, scheduling.CROWDED, scheduling.SINGLE, scheduling.APART)
    for start in (start for starts in named for start in starts):
        path = ROOT / "tests" / start
        assert path.is_dir() or list(path.parent.glob(f"{path.name}*.py")), start


def test_the_pages_are_one_unit_that_begins_first_and_each_run_under_faults_is_one() -> None:
    """The pages name their ports, so they have one worker; the runs wait most of the time, so two may."""
    begun = run(["cluster/test_real_faults.py", "docs/test_protocol.py", "docs/test_pages.py"], workers=3)

    runs = {f"tests/cluster/test_real_faults.py::test_{number}" for number in range(4)}
    assert "docs/" == begun[0][0]
    assert runs == {unit for unit, _ in begun[1:]}
    for _, beside in begun:
        assert 2 >= len(runs & beside), beside
