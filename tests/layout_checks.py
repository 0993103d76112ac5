"""The walk over the source that finds who breaks the rules of `architecture.py`.

It reads source and imports nothing, so it also judges trees that were made up for its own test. Every
import counts, at the top of a module or inside a function, for types only or by `import_module("...")`:
what a module names it knows. Apart from `test_architecture.py`, so that it can be run on such a tree.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path

from tests.architecture import (
    ASKED_FOR,
    BELOW_THE_CLIENT,
    COUNTS,
    CROWDED,
    FILE_CALLS,
    FILE_METHODS,
    FILE_MODULES,
    FOR_ALL,
    GENERIC,
    HOLDS_DATA,
    IMPURE,
    JOINING,
    MAY_COUNT_PARTITIONS,
    MAY_IMPORT,
    MAY_OPEN,
    MAY_TAKE_ROUTE_0,
    MOST_MODULES,
    PACKAGES,
    PURE,
    TOLERATED,
    USERS,
)


@dataclass(frozen=True, order=True)
class Violation:
    """One place that breaks one rule; its text is what a person reads in the failing test."""

    place: str
    rule: str

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}"


@dataclass(frozen=True)
class Module:
    """One source file of the house, parsed."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def imports_and_calls(self) -> list[ast.Import | ast.ImportFrom | ast.Call]:
        """What may name another module, wherever it stands."""
        wanted = ast.Import, ast.ImportFrom, ast.Call
        return [node for node in ast.walk(self.tree) if isinstance(node, wanted)]


def modules(root: Path) -> dict[str, Module]:
    """Every module of the house below `root`, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            name = ".".join(parts)
            found[name] = _parsed(name, path, path.read_text("utf-8"))
    return found


@cache  # each check looks at all modules again
def _parsed(name: str, path: Path, text: str) -> Module:
    return Module(name, path, ast.parse(text, str(path)))


def imports(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from a import b` is `a.b` where that is a module, else `a`."""
    for node in module.imports_and_calls:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                if level:
                    parts = module.name.split(".")
                    base = parts[: len(parts) - level + module.is_package]
                    source = ".".join([*base, source] if source else base)
                assert source is not None, f"{module.name}:{node.lineno}: an import without a module"
                for alias in names:
                    if alias.name == "__version__":
                        continue  # a fact about the distribution; who names it depends on nothing
                    inner = f"{source}.{alias.name}"
                    yield node.lineno, inner if inner in known or inner in MAY_IMPORT else source
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted(function).rsplit(".", 1)[-1] in ("import_module", "__import__"):
                    yield node.lineno, name


def row_of(name: str) -> str | None:
    """The key of MAY_IMPORT that a module of ours belongs to: its folder, or itself in a joining package.

    None for a module of others, and for one that no row covers.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        row = ".".join(parts[:length])
        if row in MAY_IMPORT:
            return None if row in JOINING and length < len(parts) else row
    return None


def covers(entries: Iterable[str], row: str) -> bool:
    """Whether one of `entries` is `row`, or `x.*` with x being `row` or a package above it."""
    return any(
        row == entry or (entry.endswith(".*") and f"{row}.".startswith(entry[:-1])) for entry in entries
    )


def tolerated(name: str, target: str) -> tuple[str, str] | None:
    """The entry of TOLERATED that lets `name` import `target`; None where none does."""
    for source, into in TOLERATED:
        if fnmatch(name, f"laminar.{source}") and fnmatch(target, f"laminar.{into}"):
            return source, into
    return None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f".{node.attr}"
    return ""


def check_directions(root: Path) -> list[Violation]:
    """Imports run one way: a folder imports itself and what its row of MAY_IMPORT names."""
    known = modules(root)
    wrong: list[Violation] = []
    for name, module in known.items():
        row = row_of(name)
        if row is None:
            wrong.append(Violation(name, "belongs to no row of MAY_IMPORT in tests/architecture.py"))
            continue
        for line, target in imports(module, known):
            if target.split(".")[0] not in PACKAGES:
                continue
            other = row_of(target)
            for_all = FOR_ALL if row.startswith("laminar") else ()
            allowed = other == row or (other is not None and covers((*MAY_IMPORT[row], *for_all), other))
            if not allowed and tolerated(name, target) is None:
                wrong.append(Violation(f"{name}:{line}", f"{row} may not import {target}"))
    return wrong


def graph(root: Path) -> dict[str, set[str]]:
    """Each module of ours, and those of ours that it imports; without what is tolerated."""
    known = modules(root)
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, module in known.items():
        for _, target in imports(module, known):
            there = target if target in known else target.rpartition(".")[0]
            if there in known and there != name and tolerated(name, there) is None:
                found[name].add(there)
    return found


def circles(found: dict[str, set[str]]) -> list[list[str]]:
    """Sets of names of which each leads to every other (Tarjan's algorithm), the largest first."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    result = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        path.append(name)
        for other in sorted(found.get(name, ())):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            place = path.index(name)
            circle = path[place:]
            del path[place:]
            if len(circle) > 1:
                result.append(sorted(circle))

    for name in sorted(found):
        if name not in numbers:
            visit(name)
    return sorted(result, key=len, reverse=True)


def check_circles(root: Path) -> list[Violation]:
    """No import comes back to where it began, by way of modules or of folders; imports for types count."""
    between_modules = graph(root)
    between_rows: dict[str, set[str]] = defaultdict(set)
    for name, targets in between_modules.items():
        row = row_of(name)
        for target in targets:
            other = row_of(target)
            if row is not None and other is not None and row != other:
                between_rows[row].add(other)
    wrong = []
    for kind, found in (("modules", between_modules), ("folders", between_rows)):
        wrong += [Violation(each[0], f"is in a circle of {kind}: {each}") for each in circles(found)]
    return wrong


def sizes(root: Path) -> dict[str, int]:
    """How many modules each folder holds, its `__init__` aside."""
    found: dict[str, int] = defaultdict(int)
    for module in modules(root).values():
        if not module.is_package:
            found[module.path.parent.relative_to(root).as_posix()] += 1
    return dict(found)


def check_numbers(root: Path) -> list[Violation]:
    """Numbers of partitions are listed by the topic's record or route: nothing counts them from 0."""
    wrong = []
    for name, module in modules(root).items():
        for node in module.imports_and_calls:
            if not isinstance(node, ast.Call):
                continue
            called = dotted(node.func)
            if called.endswith("Route.even") and name not in MAY_TAKE_ROUTE_0:
                wrong.append(Violation(f"{name}:{node.lineno}", "takes the topic's route for route 0"))
            counts = {
                dotted(inner).rsplit(".", 1)[-1].lstrip("_")
                for argument in node.args
                for inner in ast.walk(argument)
                if isinstance(inner, ast.Name | ast.Attribute)
            }
            if called == "range" and counts & COUNTS and name not in MAY_COUNT_PARTITIONS:
                wrong.append(
                    Violation(f"{name}:{node.lineno}", "counts partitions, and takes that for numbers")
                )
    return wrong


def check_sizes(root: Path) -> list[Violation]:
    """No folder holds more modules than a reader takes in at a glance."""
    return [
        Violation(folder, f"holds {count} modules; the most is {MOST_MODULES}")
        for folder, count in sizes(root).items()
        if count > MOST_MODULES and folder not in CROWDED
    ]


def not_needed(root: Path) -> list[str]:
    """Entries of TOLERATED, CROWDED and MAY_IMPORT that nothing in the tree needs any more.

    What several rows share by `BELOW_THE_CLIENT` need not be used by each of them.
    """
    known = modules(root)
    used = {tolerated(name, target) for name, module in known.items() for _, target in imports(module, known)}
    found = [f"{source} -> {target}" for source, target in TOLERATED if (source, target) not in used]
    counts = sizes(root)
    found += [folder for folder in CROWDED if counts.get(folder, 0) <= MOST_MODULES]
    imported: dict[str, set[str]] = defaultdict(set)
    for name, module in known.items():
        rows = {row_of(target) for _, target in imports(module, known)}
        imported[row_of(name) or ""] |= {row for row in rows if row is not None}
    return found + [
        f"{row} may import {entry}"
        for row, entries in MAY_IMPORT.items()
        for entry in entries
        if entry not in BELOW_THE_CLIENT
        and not any(covers((entry,), other) for other in imported[row] - {row})
    ]


def check_generic_names(root: Path) -> list[Violation]:
    """From what a user's program imports, no path of imports leads to one of the four generic names.

    But for a door that is opened on purpose (`ASKED_FOR`).
    """
    known = modules(root)
    wrong = []
    targets = {name: {target for _, target in imports(module, known)} for name, module in known.items()}
    for start in (name for name in known if covers(USERS, row_of(name) or "")):
        came_from = {start: ""}
        queue = [start]
        while queue:
            here = queue.pop()
            for target in sorted(targets[here]):
                if target.split(".")[0] in GENERIC:
                    wrong.append(Violation(start, f"leads to {target} through {here}"))
                elif target in known and target not in came_from and target not in ASKED_FOR:
                    came_from[target] = here
                    queue.append(target)
    return wrong


def check_purity(root: Path) -> list[Violation]:
    """A pure module has no clock, no chance, no I/O: they come in by argument."""
    known = modules(root)
    wrong = []
    for name, module in known.items():
        if not any(fnmatch(name, pattern) for pattern in PURE):
            continue
        for line, target in imports(module, known):
            if target.split(".")[0] in IMPURE:
                wrong.append(Violation(f"{name}:{line}", f"is pure, and may not import {target}"))
        for node in ast.walk(module.tree):
            match node:
                case ast.ImportFrom(module="random", names=names) if any(n.name != "Random" for n in names):
                    wrong.append(Violation(f"{name}:{node.lineno}", "takes its randomness as random.Random"))
                case ast.Attribute(value=ast.Name(id="random"), attr=attr) if attr != "Random":
                    wrong.append(Violation(f"{name}:{node.lineno}", f"is pure: no random.{attr}"))
                case ast.Attribute(attr="now" | "utcnow" | "today"):
                    wrong.append(Violation(f"{name}:{node.lineno}", "is pure, and may not read a clock"))
                case ast.Call(func=ast.Name(id="open" | "print" | "input" as function)):
                    wrong.append(Violation(f"{name}:{node.lineno}", f"is pure, and may not call {function}"))
    return wrong


def check_disk_door(root: Path) -> list[Violation]:
    """In packages that hold data only the disk interface touches files."""
    known = modules(root)
    wrong = []
    for name, module in known.items():
        if name in MAY_OPEN or not any(f"{name}.".startswith(f"{package}.") for package in HOLDS_DATA):
            continue
        short = aliases(module)
        for line, target in imports(module, known):
            if target.split(".")[0] in FILE_MODULES:
                wrong.append(Violation(f"{name}:{line}", f"touches files by {target}: go through the disk"))
        for node in module.imports_and_calls:
            if isinstance(node, ast.Call) and (call := file_call(node, short)):
                wrong.append(Violation(f"{name}:{node.lineno}", f"calls {call}: go through the disk"))
    return wrong


def aliases(module: Module) -> dict[str, str]:
    """Local name to full name, for `import os as o` and `from os import rename as r`."""
    short: dict[str, str] = {}
    for node in module.imports_and_calls:
        match node:
            case ast.Import(names=names):
                short |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(source), names=names, level=0):
                short |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in names}
    return short


def file_call(call: ast.Call, short: dict[str, str]) -> str | None:
    """The full name of what `call` calls, if that touches a file."""
    name = dotted(call.func)
    first, _, rest = name.partition(".")
    full = ".".join(filter(None, (short.get(first, first), rest)))
    if full == "mmap.mmap" and call.args and ast.unparse(call.args[0]) == "-1":
        return None  # memory shared between processes, no file
    if full in FILE_CALLS:
        return full
    if isinstance(call.func, ast.Attribute) and call.func.attr in FILE_METHODS:
        return f"a path's .{call.func.attr}"
    return None
