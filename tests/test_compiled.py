"""The list of modules that may be compiled, and what says whether they are."""

from __future__ import annotations

import ast
import shutil
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import hatch_build
from laminar import compiled
from tests import pure_only

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", compiled.MODULES)
def test_a_module_that_is_compiled_has_nothing_that_would_become_another_thing(name: str) -> None:
    """A `msgspec.Struct` would lose `array_like`; a `raise` after a wait would raise another task's error."""
    hatch_build.check(name, ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text())


def test_a_class_with_arguments_is_refused_with_its_place() -> None:
    """By the build itself, so that no wheel of it comes to be."""
    source = "import msgspec\n\nclass Entry(msgspec.Struct, array_like=True):\n    index: int\n"
    with pytest.raises(ValueError, match=r"raft\.entries, line 3: class Entry has arguments"):
        hatch_build.check("raft.entries", source)


WAITING = """
import asyncio

async def load(self):
    try:
        return self.rows()
    {handler}
        {body}
"""


@pytest.mark.parametrize(
    ("handler", "body"),
    [
        ("except KeyError:", "await self.read()"),
        ("except KeyError:", "async for x in self: self.close()"),
        ("except KeyError:", "yield 1"),
        ("finally:", "await self.close()"),
        ("finally:", "async with asyncio.timeout(1): self.close()"),
        ("finally:", "self.close(await self.x)"),
    ],
)
def test_to_wait_while_an_error_is_handled_is_refused(handler: str, body: str) -> None:
    """Compiled, all coroutines share the error that is handled: `raise` after it raises another task's."""
    with pytest.raises(ValueError, match=r"raft\.reads, line 5: it waits in `except` or `finally`"):
        hatch_build.check("raft.reads", WAITING.format(handler=handler, body=body))
    hatch_build.check("raft.reads", WAITING.format(handler=handler, body="self.close(lambda: 1)"))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("async def f(x):\n    async with x:\n        pass", "line 2: the end of its `async with` waits"),
        (
            "def f(x):\n    try:\n        yield 1\n    finally:\n        x()",
            "line 2: its `finally` may never come",
        ),
        ("def f(x):\n    with x:\n        yield 1", "line 2: its `with` may never end"),
        ("class A:\n    MOST = 1", "line 1: A.MOST is not a ClassVar"),
    ],
)
def test_an_end_that_may_not_come_is_refused(source: str, why: str) -> None:
    """A compiled generator that is left is freed as it stands: what it holds would stay held."""
    with pytest.raises(ValueError, match=why):
        hatch_build.check("raft.reads", source)
    hatch_build.check(
        "raft.reads",
        source.replace("async with x", "async with asyncio.timeout(1)")
        .replace("yield 1", "x()")
        .replace("MOST", "MOST: ClassVar"),
    )


@pytest.mark.parametrize("value", ["(0.5, 1.0)", "(*(0.5, 1.0), 2.0)"])
def test_a_final_tuple_of_floats_is_refused(value: str) -> None:
    """A compiled use of it raises `NameError`, as mypyc takes it for not set; with a type it does not."""
    with pytest.raises(ValueError, match=r"line 1: BOUNDS is a Final tuple of floats"):
        hatch_build.check("laminar.histogram", f"BOUNDS: Final = {value}")
    hatch_build.check("laminar.histogram", f"BOUNDS: Final[Sequence[float]] = {value}")
    hatch_build.check("laminar.histogram", "BOUNDS: Final = (1, 2)")


def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it does anything."""
    monkeypatch.setenv("CC", "no-such-compiler")

    with pytest.raises(ValueError, match="there is no C compiler: 'no-such-compiler' is not found"):
        hatch_build.compile_modules(ROOT, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_what_is_compiled_is_what_runs() -> None:
    """A module is loaded from an extension exactly if it is said to be compiled."""
    for name in compiled.MODULES:
        file = import_module(name).__file__
        assert file is not None
        assert (name in compiled.compiled_modules()) is not file.endswith(".py"), file


def test_nobody_refers_weakly_to_a_class_that_is_compiled() -> None:
    """Its objects take no weak reference: a dictionary of them by `Partition` would fail with each append."""
    weak: set[str] = set()
    for package in hatch_build.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("Weak"):
                    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                    weak.add(ast.unparse(first))
    assert "Partition" in weak, "the rule reads nothing any more"
    for name in compiled.MODULES:
        source = ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text()
        classes = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
        assert not weak & classes, f"{name}: {weak & classes}"


def test_each_module_is_named_once() -> None:
    """A module in the list twice would be compiled twice."""
    assert len(set(compiled.MODULES)) == len(compiled.MODULES)


def test_what_is_compiled_is_told_by_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, some, all; an extension of another Python does not count."""
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "laminar" / "compiled.py"))
    suffix = EXTENSION_SUFFIXES[0]
    (tmp_path / "raft").mkdir()

    def told() -> str:
        compiled.compiled_modules.cache_clear()
        return compiled.described()

    try:
        assert "pure" == told()
        (tmp_path / "raft" / "core.cpython-39-sparc-linux-gnu.so").touch()
        assert "pure" == told()
        (tmp_path / "raft" / f"core{suffix}").touch()
        assert "compiled: raft.core" == told()
        for name in compiled.MODULES:
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name + suffix).touch()
        assert "compiled" == told()
    finally:
        compiled.compiled_modules.cache_clear()


def test_the_sources_are_mirrored_and_what_is_the_same_keeps_its_time(tmp_path: Path) -> None:
    """Else everything would be compiled again; and a module that is gone would stay."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    for name in ("kept.py", "changed.py", "gone.py"):
        (source / name).write_text("1")
    hatch_build._mirror(source, copy)
    before = (copy / "kept.py").stat().st_mtime_ns
    (source / "changed.py").write_text("2")
    (source / "gone.py").unlink()
    shutil.copy(source / "kept.py", source / "kept2.py")
    shutil.move(source / "kept2.py", source / "kept.py")  # newer, and the same

    hatch_build._mirror(source, copy)

    assert before == (copy / "kept.py").stat().st_mtime_ns
    assert {"kept.py": "1", "changed.py": "2"} == {path.name: path.read_text() for path in copy.iterdir()}


def test_on_the_pure_build_nothing_is_a_reason_to_skip() -> None:
    """Else a test that fails there would pass unseen."""
    if compiled.compiled_modules():
        pytest.skip("this is the compiled build")
    error = TypeError("laminar.x.Log object expected; got tests.x.Stub")
    assert "" == pure_only.reason(error)
