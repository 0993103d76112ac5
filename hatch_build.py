"""The compiled build: with LAMINAR_COMPILE=1 a wheel has extension modules of `laminar.compiled.MODULES`.

Without it the wheel is the sources alone, for every machine. mypyc and a C compiler are needed only here. The
work is done in build/mypyc, on a copy of the sources, so that no extension comes to lie in the checkout; what
did not change since the last time is not compiled again.
"""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("laminar", "raft", "membership", "router", "ebpf")
# mypyc reads the types of every library that is imported, so a build that is isolated needs them all.
NEEDED = ("mypy>=2,<3", "setuptools>=80,<90")


class CompiledBuild(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook of hatchling (`[tool.hatch.build.targets.wheel.hooks.custom]`)."""

    def dependencies(self) -> list[str]:
        """Return what a build needs that is not asked for in any case."""
        return [*NEEDED, *self.metadata.core.dependencies] if _is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the extensions to the wheel, which is then for this Python and machine alone."""
        if not _is_wanted() or version == "editable":
            return
        built = Path(self.root, "build", "mypyc")
        for found in compile_modules(Path(self.root), built):
            build_data["force_include"][str(built / found)] = found.as_posix()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _find_compiler() -> None:
    """Say what is missing, before mypyc has worked for half a minute. Raises `ValueError`."""
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(command) is None:
        raise ValueError(f"LAMINAR_COMPILE is 1, but there is no C compiler: {command!r} is not found")


def _is_wanted() -> bool:
    wanted = os.environ.get("LAMINAR_COMPILE", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"LAMINAR_COMPILE is {wanted!r}, not 0 or 1")
    return wanted == "1"


def compile_modules(root: Path, work: Path) -> list[Path]:
    """Compile the modules in a copy of the sources of `root`; return the extensions, relative to `work`.

    Raises:
        ValueError: A module has what mypyc would compile into something else, or there is no C compiler.
    """
    _find_compiler()
    modules = runpy.run_path(str(root / "laminar" / "compiled.py"))["MODULES"]
    work.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        _mirror(root / package, work / package)
    shutil.copy2(root / "pyproject.toml", work)
    for name in modules:
        check(name, work.joinpath(*name.split(".")).with_suffix(".py").read_text())
    with chdir(work):
        for old in [path for package in (".", *PACKAGES) for path in Path(package).rglob("*.so")]:
            if "build" not in old.parts:
                old.unlink()
        sys.path.insert(0, str(work))
        try:
            _build([f"{name.replace('.', '/')}.py" for name in modules])
        finally:
            sys.path.remove(str(work))
        return sorted(path for path in Path().rglob("*.so") if "build" not in path.parts)


def check(name: str, source: str) -> None:
    """Refuse what mypyc takes without a word and makes something else of.

    - Arguments of a class, which it drops: a `msgspec.Struct` would lose `frozen`, `tag` and `array_like`,
      and be written as a map where others expect an array.
    - To wait while an error is handled, in `except` or `finally`. Compiled coroutines share one place for the
      error that is handled: after the wait, `raise` would raise that of another task.
    - `async with`, whose end is such a wait, but for `asyncio.timeout`, whose end does not wait.
    - `yield` in `try` with `finally`, or in `with`: what is left undone is not done when the generator goes.
    - A value of a class that is not a `ClassVar`: each object would have one of its own, and the class none.
    - A `Final` without a type whose value is a tuple of floats: each use would say that it was not set.

    Raises:
        ValueError: with the module, the line and what is there.
    """
    for node in ast.walk(ast.parse(source)):
        what = ""
        if isinstance(node, ast.ClassDef) and node.keywords:
            what = f"class {node.name} has arguments, which mypyc drops"
        elif isinstance(node, ast.ClassDef) and (value := _value_of(node)):
            what = f"{node.name}.{value} is not a ClassVar, and the class would not have it"
        elif isinstance(node, ast.Try):
            handled = [*node.finalbody, *(each for handler in node.handlers for each in handler.body)]
            if _has(handled, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom):
                what = "it waits in `except` or `finally`, where mypyc mixes up the errors of tasks"
            elif node.finalbody and _has(node.body, ast.Yield, ast.YieldFrom):
                what = "its `finally` may never come, as it yields before"
        elif isinstance(node, ast.With) and _has(node.body, ast.Yield, ast.YieldFrom):
            what = "its `with` may never end, as it yields before"
        elif (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.annotation) == "Final"
            and _is_floats(node.value)
        ):
            what = f"{ast.unparse(node.target)} is a Final tuple of floats, which mypyc takes for not set"
        elif isinstance(node, ast.AsyncWith) and not all(_is_timeout(each) for each in node.items):
            what = "the end of its `async with` waits, where mypyc mixes up the errors of tasks"
        if what:
            raise ValueError(f"{name}, line {getattr(node, 'lineno', 0)}: {what}")


def _value_of(node: ast.ClassDef) -> str:
    """Return what a plain class gives a value to without saying that it is the class's; empty if nothing."""
    if node.decorator_list or any(
        ast.unparse(base) in ("Enum", "IntEnum", "enum.Enum", "NamedTuple") for base in node.bases
    ):
        return ""
    for each in node.body:
        if isinstance(each, ast.Assign) and (name := ast.unparse(each.targets[0])) != "__slots__":
            return name
        if isinstance(each, ast.AnnAssign) and each.value and "ClassVar" not in ast.unparse(each.annotation):
            return ast.unparse(each.target)
    return ""


def _is_floats(value: ast.expr | None) -> bool:
    """Return whether an expression is a tuple that begins with a float."""
    while isinstance(value, (ast.Tuple, ast.Starred)):
        value = value.value if isinstance(value, ast.Starred) else next(iter(value.elts), None)
        if isinstance(value, ast.Constant):
            return isinstance(value.value, float)
    return False


def _has(body: Sequence[ast.AST], *kinds: type[ast.AST]) -> bool:
    """Return whether one of the nodes, or what is in them but for functions, is of one of these kinds."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return any(
        isinstance(node, kinds)
        or (not isinstance(node, functions) and _has(list(ast.iter_child_nodes(node)), *kinds))
        for node in body
    )


def _is_timeout(item: ast.withitem) -> bool:
    called = item.context_expr
    return isinstance(called, ast.Call) and ast.unparse(called.func) in (
        "asyncio.timeout",
        "asyncio.timeout_at",
    )


def _mirror(source: Path, copy: Path) -> None:
    """Make `copy` what `source` is; files that are the same keep their times, and so what is made of them."""
    wanted = {
        path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path in list(copy.rglob("*")):
        if path.is_file() and path.relative_to(copy) not in wanted:
            path.unlink()
    for path in wanted:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        if not (copy / path).exists() or (copy / path).read_bytes() != (source / path).read_bytes():
            shutil.copy2(source / path, copy / path)


def _build(files: list[str]) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    extensions = mypycify(files, opt_level="2", debug_level="0", multi_file=True, group_name="laminar")
    command = build_ext(Distribution({"name": "laminar", "ext_modules": extensions}))
    command.inplace = True
    command.ensure_finalized()
    command.run()
