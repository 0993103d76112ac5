"""The code's layout: who may import whom, no circles, no crowded folders, what is pure, who opens files.

The rules are tables in `tests/architecture.py`; each check of `tests/layout_checks.py` is also run on a small
tree with one planted fault, because a check that cannot fail is worth nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import architecture as tables
from tests import layout_checks as layout

ROOT = Path(__file__).parents[1]
CHECKS = [
    layout.check_directions,
    layout.check_circles,
    layout.check_sizes,
    layout.check_numbers,
    layout.check_generic_names,
    layout.check_purity,
    layout.check_disk_door,
]
Check = Callable[[Path], list[layout.Violation]]

# Nothing a user imports may load these: not the generic names, not what only a server or a notebook needs.
NOT_LOADED = (
    *tables.GENERIC,
    "uvloop",
    "pysyncobj",
    "swimprotocol",
    "pyarrow",
    "pyspark",
    "cyclopts",
    "rich",
)
IMPORT_LIMIT_MS = 100


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_module_breaks_a_rule(check: Check) -> None:
    """No module breaks the rule that the check's first line states."""
    found = "\n".join(sorted({str(violation) for violation in check(ROOT)}))

    assert "" == found, f"{check.__doc__}\n{found}"


def test_the_walk_sees_the_code() -> None:
    """The checks above judge real modules: the walk finds the packages, and the door where the table says."""
    known = layout.modules(ROOT)

    assert {name.split(".")[0] for name in known} == set(tables.PACKAGES)
    assert tables.MAY_OPEN.keys() <= known.keys()
    assert "laminar.batch" in known


def test_every_exception_is_still_needed() -> None:
    """What is tolerated goes from the table with the import, or the crowd, that it was for."""
    assert [] == layout.not_needed(ROOT)


def test_every_row_is_of_something_that_is_there() -> None:
    """A folder or module that is gone leaves no rule behind, neither its own nor in those of others."""
    there = {layout.row_of(name) for name in layout.modules(ROOT)}
    named = {entry.removesuffix(".*") for row in tables.MAY_IMPORT.values() for entry in row}

    assert set() == (tables.MAY_IMPORT.keys() | named) - there


# (check, the file that breaks its rule, its source, what the check says)
PLANTED = [
    (layout.check_directions, "raft/core.py", "import laminar.log", "raft may not import laminar.log"),
    (layout.check_directions, "router/a.py", "def f():\n    from raft import core", "may not import raft"),
    (layout.check_directions, "laminar/log/disk/a.py", "from laminar import node", "import laminar.node"),
    (layout.check_directions, "laminar/log/disk/a.py", "from ...http import e", "import laminar.http"),
    (layout.check_directions, "laminar/client/net/a.py", "import_module('laminar.cli')", "laminar.cli"),
    (layout.check_directions, "laminar/log/disk/a.py", "import laminar.log.commit.a", "log.commit.a"),
    (layout.check_directions, "laminar/client/policy/a.py", "import laminar.client.net", "client.net"),
    (layout.check_directions, "laminar/surprise.py", "", "belongs to no row"),
    (layout.check_directions, "laminar/log/surprise.py", "", "belongs to no row"),
    (
        layout.check_circles,
        "laminar/log/disk/b.py",
        "if TYPE_CHECKING:\n    from laminar.log.disk.disk import File",
        "is in a circle of modules: ['laminar.log.disk.b', 'laminar.log.disk.disk']",
    ),
    (
        layout.check_circles,
        "laminar/batch/header.py",
        "import laminar.batch.arrow.a",
        "is in a circle of folders: ['laminar.batch', 'laminar.batch.arrow']",
    ),
    (layout.check_sizes, "laminar/wire/m16.py", "", "holds 16 modules"),
    (layout.check_numbers, "laminar/node/a.py", "Route.even(record.partitions)", "for route 0"),
    (layout.check_numbers, "laminar/client/a.py", "key_route.Route.even(len(places))", "for route 0"),
    (layout.check_numbers, "laminar/node/a.py", "[n for n in range(record.partitions)]", "counts partitions"),
    (layout.check_numbers, "laminar/cli/a.py", "range(topic.describe().partitions)", "counts partitions"),
    (layout.check_numbers, "laminar/client/a.py", "range(0, len(known.places))", "counts partitions"),
    (layout.check_numbers, "laminar/client/a.py", "frozenset(range(self._partitions))", "counts partitions"),
    (layout.check_generic_names, "laminar/batch/a.py", "import router", "to router through laminar.batch.a"),
    (layout.check_purity, "raft/core.py", "from time import monotonic", "may not import time"),
    (layout.check_purity, "raft/core.py", "import random\nrandom.random()", "no random.random"),
    (layout.check_purity, "router/a.py", "from random import choice", "takes its randomness"),
    (layout.check_purity, "laminar/batch/header.py", "datetime.datetime.now()", "may not read a clock"),
    (layout.check_purity, "laminar/client/policy/a.py", "import asyncio", "may not import asyncio"),
    (layout.check_disk_door, "laminar/log/segment/a.py", "open('x')", "calls open"),
    (layout.check_disk_door, "laminar/node/a.py", "import os as o\no.rename('a', 'b')", "calls os.rename"),
    (layout.check_disk_door, "laminar/log/a.py", "from os import fsync as s\ns(3)", "calls os.fsync"),
    (layout.check_disk_door, "membership/a.py", "Path('x').read_bytes()", "calls a path's .read_bytes"),
    (layout.check_disk_door, "laminar/log/a.py", "import mmap\nmmap.mmap(3, 10)", "calls mmap.mmap"),
    (layout.check_disk_door, "laminar/node/a.py", "import tempfile", "touches files by tempfile"),
]

SOUND = {
    "laminar/__init__.py": "",
    "laminar/log/__init__.py": "",
    "laminar/log/disk/__init__.py": "",
    "laminar/log/disk/disk.py": "import os\nimport laminar.log.disk.b\nos.open('x', 0)\nopen('y')",
    "laminar/log/disk/b.py": "",
    "laminar/log/segment/a.py": "import os\nfrom laminar.log.disk.disk import File\nos.path.join('a')",
    "laminar/node/shard/shard.py": "import mmap\nimport membership\nimport router\nmmap.mmap(-1, 4096)",
    "laminar/batch/__init__.py": "",
    "laminar/batch/header.py": "",
    "laminar/batch/arrow/a.py": "from laminar.batch.header import Header",
    "laminar/log/segment/b.py": "def f(record, n):\n    return [each for each in record.numbers], range(n)",
    "laminar/client/net/api.py": "from laminar.batch import Batch",
    **{f"laminar/wire/m{number}.py": "" for number in range(1, 16)},
    "raft/core.py": "import random\ndef f(rng: random.Random) -> float:\n    return rng.random()",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_tree_passes(check: Check, tmp_path: Path) -> None:
    """What the code does every day breaks no rule."""
    assert [] == check(plant(tmp_path, SOUND))


@pytest.mark.parametrize(("check", "name", "source", "said"), PLANTED)
def test_a_planted_fault_is_named(check: Check, name: str, source: str, said: str, tmp_path: Path) -> None:
    """Each check finds the fault planted in an otherwise sound tree, and says what is wrong."""
    found = [str(violation) for violation in check(plant(tmp_path, SOUND | {name: source}))]

    assert any(said in line for line in found), found


IMPORT_PROGRAM = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
begin = time.perf_counter()
__import__(sys.argv[2])
print(json.dumps({"ms": (time.perf_counter() - begin) * 1000, "modules": sorted(sys.modules)}))
"""


def fresh_import(module: str) -> tuple[float, set[str]]:
    """(milliseconds, modules then loaded) of importing `module` in a new interpreter."""
    answer = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_PROGRAM, str(ROOT), module],
        cwd="/",
        check=True,
        capture_output=True,
        text=True,
    )
    told = json.loads(answer.stdout)
    return float(told["ms"]), set(told["modules"])


@pytest.mark.parametrize(
    "module", ["laminar", "laminar.aio", "laminar.client", "laminar.testing", "laminar.spark"]
)
def test_what_a_user_imports_loads_nothing_heavy(module: str) -> None:
    """In a fresh interpreter: no generic name, no library of server, Arrow, Spark or command line."""
    _, loaded = fresh_import(module)

    assert module in loaded
    assert set() == {name for name in loaded if name.split(".")[0] in NOT_LOADED}


def test_import_laminar_takes_under_100_ms() -> None:
    """Best of nine, as a neighbour only makes it slower; thrice that where there is more work than CPUs."""
    limit_ms = IMPORT_LIMIT_MS * (3 if os.getloadavg()[0] > (os.cpu_count() or 1) else 1)

    assert min(fresh_import("laminar")[0] for _ in range(9)) < limit_ms


def tracked_texts() -> list[tuple[str, str]]:
    """(path, text) of every tracked file that is text, the example data aside."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    texts = []
    for name in filter(None, listed.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and not name.startswith("examples/data/"):
            content = path.read_bytes()
            if b"\0" not in content:
                texts.append((name, content.decode("utf-8")))
    return texts


def test_no_file_names_a_path_of_one_machine() -> None:
    """What is written for one person's machine works on no other."""
    homes = re.compile(r"(?<![\w.}~/])/(?:" + "|".join(("work", "home", "root", "Users")) + r")/\w")
    named = [(name, match[0]) for name, text in tracked_texts() for match in homes.finditer(text)]

    assert [] == named


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the installing machine's to say (a mirror, a cache), not the project's."""
    registry = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted", "--index" + "-url")))
    named = [name for name, text in tracked_texts() if registry.search(text)]

    assert [] == named
