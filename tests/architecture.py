"""The rules of the house, as tables, and the walk over the source that finds who breaks them.

It reads source and imports nothing, so it also judges trees that were made up for its own test. Every
import counts, at the top of a module or inside a function, for types only or by `import_module("...")`:
what a module names it knows. Apart from `test_architecture.py`, so that it can be run on such a tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PACKAGES = ("laminar", "raft", "membership", "router", "ebpf")

# Generic names: in a user's program another `router.py` may stand before ours, so it may need none of these.
GENERIC = ("raft", "membership", "router", "ebpf")

# Modules that are one thing in several files. `laminar.batch` is the door to the others.
LAYER_OF = {
    "laminar.batch.arrow.pyarrow_out": "laminar.batch",
    "laminar.batch.arrow.pyarrow_in": "laminar.batch",
    "laminar.batch.arrow.ipc_writer": "laminar.batch",
    "laminar.batch.arrow.ipc_reader": "laminar.batch",
    "laminar.batch.validation": "laminar.batch",
    "laminar.batch.columns": "laminar.batch",
    "laminar.batch.arrow.flatbuffers": "laminar.batch",
    "laminar.batch.header": "laminar.batch",
    "laminar.batch.projection": "laminar.batch",
    "laminar.batch.large_record": "laminar.batch",
    "laminar.batch.single_value": "laminar.batch",
    "laminar.batch.batch": "laminar.batch",
    "laminar.aio": "laminar",
}

BELOW_THE_CLIENT = ("laminar.batch", "laminar.wire", "laminar.http")

# Layer: what it may import beside itself. `laminar` is what `import laminar` shows, not all that is inside.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "raft": (),
    "router": (),
    "membership": ("router",),
    "ebpf": ("router",),
    "laminar.batch": (),
    "laminar.wire": ("laminar.batch",),
    "laminar.log": ("laminar.batch",),
    "laminar.http": ("laminar.batch",),
    "laminar.client": BELOW_THE_CLIENT,
    "laminar": ("laminar.client", "laminar.batch", "laminar.testing", "laminar.log", "laminar.embedded"),
    "laminar.embedded": ("laminar.client", "laminar.node", "laminar.log"),
    "laminar.spark": ("laminar.client", *BELOW_THE_CLIENT),
    "laminar.testing": ("laminar", "laminar.client", *BELOW_THE_CLIENT),
    "laminar.node": (*GENERIC, "laminar.log", *BELOW_THE_CLIENT),
    "laminar.cli": (
        *("laminar", "laminar.client", "laminar.spark", "laminar.testing", "laminar.node", "laminar.log"),
        *("router", "ebpf", *BELOW_THE_CLIENT),
    ),
}

# A whole node in a user's program, imported when `laminar.embed` asks for it, never before. It looks
# first whether the four generic names are ours, so the walk from what a user imports ends there.
ASKED_FOR = ("laminar.embedded",)

# What a user's own program imports.
USERS = ("laminar", "laminar.client", "laminar.log", "laminar.spark", "laminar.testing", *BELOW_THE_CLIENT)

PURE = (
    "raft.*",
    "raft",
    "router.*",
    "router",
    "membership.swim",
    "membership.records",
    "membership.catalog_rules",
    "laminar.batch",
    "laminar.batch.builder",
    "laminar.batch.validation",
    "laminar.batch.arrow.ipc_writer",
    "laminar.batch.arrow.ipc_reader",
    "laminar.batch.columns",
    "laminar.wire.datagram",
    "laminar.batch.arrow.flatbuffers",
    "laminar.batch.header",
    "laminar.batch.large_record",
    "laminar.batch.single_value",
    "laminar.batch.batch",
    "laminar.wire.key_route",
    "laminar.client.policy.*",
    "laminar.log.format.journal_codec",
    "laminar.log.recovery.replay",
    "laminar.log.format.index_entry",
)
IMPURE = frozenset(
    "asyncio socket time os threading subprocess selectors select signal ssl multiprocessing concurrent"
    " uvloop aiofiles tempfile shutil pathlib mmap fcntl ctypes secrets uuid logging io http urllib".split()
)

# Packages that hold data: bytes reach a disk through the disk interface alone, so a test can take its place.
HOLDS_DATA = ("laminar.log", "laminar.node", "membership", "raft", "router")
# The door, and the modules that read what is not data, each with the reason.
MAY_OPEN = {
    "laminar.log.disk.disk": "the door",
    "laminar.node.host.sealed_files": "sealed segments, read only, for a replica that verifies every batch",
    "laminar.node.host.settings": "a person's TOML file and the cgroup's limits: not data",
    "laminar.node.host.log_setup": "standard error, opened once more so that a full pipe can't stop the loop",
}
FILE_CALLS = frozenset(
    "open io.open io.FileIO codecs.open aiofiles.open mmap.mmap fcntl.flock"
    " os.open os.rename os.replace os.unlink os.remove os.mkdir os.makedirs os.rmdir os.removedirs"
    " os.truncate os.ftruncate os.fsync os.fdatasync os.sync os.pread os.preadv os.pwrite os.pwritev"
    " os.listdir os.scandir os.walk os.link os.symlink os.posix_fallocate".split()
)
FILE_MODULES = ("shutil", "tempfile", "sqlite3", "shelve", "dbm")
FILE_METHODS = ("read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkdir")


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


def modules(root: Path) -> dict[str, Module]:
    """Every module of the house below `root`, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            name = ".".join(parts)
            found[name] = Module(name, path, ast.parse(path.read_text("utf-8"), str(path)))
    return found


def imports(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; `from a import b` is `a.b` where that is a module, else `a`."""
    for node in ast.walk(module.tree):
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
                    yield node.lineno, inner if inner in known or layer_of(inner) == inner else source
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted(function).rsplit(".", 1)[-1] in ("import_module", "__import__"):
                    yield node.lineno, name


def layer_of(name: str) -> str | None:
    """The layer a module of ours belongs to; None for a module of others, or one that no table names."""
    if name in LAYER_OF:
        return LAYER_OF[name]
    parts = name.split(".")
    if parts[0] != "laminar":
        return parts[0] if parts[0] in MAY_IMPORT else None
    layer = ".".join(parts[:2])
    return layer if layer in MAY_IMPORT else None


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else f".{node.attr}"
    return ""


def check_directions(root: Path) -> list[Violation]:
    """Imports run one way: a layer imports itself and what its row of MAY_IMPORT allows."""
    known = modules(root)
    wrong: list[Violation] = []
    for name, module in known.items():
        layer = layer_of(name)
        if layer is None:
            wrong.append(Violation(name, "belongs to no layer: give it one in tests/architecture.py"))
            continue
        for line, target in imports(module, known):
            if target.split(".")[0] not in PACKAGES:
                continue
            other = layer_of(target)
            if other != layer and other not in MAY_IMPORT[layer]:
                wrong.append(Violation(f"{name}:{line}", f"{layer} may not import {target}"))
    return wrong


def check_generic_names(root: Path) -> list[Violation]:
    """From what a user's program imports, no path of imports leads to one of the four generic names.

    But for a door that is opened on purpose (`ASKED_FOR`).
    """
    known = modules(root)
    wrong = []
    for start in (name for name in known if layer_of(name) in USERS):
        came_from = {start: ""}
        queue = [start]
        while queue:
            here = queue.pop()
            for _, target in imports(known[here], known):
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
        if layer_of(name) not in HOLDS_DATA or name in MAY_OPEN:
            continue
        short = aliases(module)
        for line, target in imports(module, known):
            if target.split(".")[0] in FILE_MODULES:
                wrong.append(Violation(f"{name}:{line}", f"touches files by {target}: go through the disk"))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and (call := file_call(node, short)):
                wrong.append(Violation(f"{name}:{node.lineno}", f"calls {call}: go through the disk"))
    return wrong


def aliases(module: Module) -> dict[str, str]:
    """Local name to full name, for `import os as o` and `from os import rename as r`."""
    short: dict[str, str] = {}
    for node in ast.walk(module.tree):
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
