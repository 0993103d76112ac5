"""The generator of the sync face: methods of `laminar/client/sync/` made from the asynchronous ones.

`python -m tests.sync_face` writes them; `--check` (in `make check`) says whether they are as it would write
them. In a class of the sync face a comment ``# generated from MODULE.CLASS`` begins what is written here, up
to the end of the class; `without NAMES`, there or in the next line, leaves methods out. What the class
defines above the comment is written by hand and left as it is: what would cost a change of threads for each
record. Docs, parameters and defaults are those of the twin.

It is in the spirit of httpcore's ``unasync.py``, which rewrites tokens. Here the twin is called on the
portal's loop, so that both faces run the same code.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "laminar" / "client" / "sync"
MARK = re.compile(
    r"    # generated from (?P<module>[\w.]+)\.(?P<kind>\w+)"
    r"(?:,(?: |\n    # )without (?P<left_out>[\w ]+))?\n"
)
# Of these both faces have a class, which holds the other's.
WRAPPED = frozenset(
    "Channel Client Datagrams Producer Reader Search Sink Stager Subscription Topic Transaction Value".split()
)
# The asynchronous face's words, in docs and types.
WORDS = (("async with ", "with "), ("async for ", "for "), ("await ", ""), ("`await`", "a call"))
TYPES = (("AsyncIterable[bytes]", "Iterable[bytes] | Readable"), ("AsyncIterator[", "Iterator["))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _functions(kind: ast.ClassDef) -> list[Function]:
    return [node for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _replaced(text: str, pairs: Iterable[tuple[str, str]]) -> str:
    for theirs, ours in pairs:
        text = text.replace(theirs, ours)
    return text


def _docs(function: Function) -> list[str]:
    """Return the lines of a function's docstring, as they are in a class."""
    first = function.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return []
    return [f'"""{_replaced(str(first.value.value), WORDS)}"""']


def _call(function: Function) -> str:
    """Return the call of the twin with the function's own parameters."""
    arguments = function.args
    assert arguments.vararg is None, f"{function.name} takes any argument"
    passed = [each.arg for each in [*arguments.posonlyargs, *arguments.args][1:]]
    passed += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    passed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else []
    return f"self._twin.{function.name}({', '.join(passed)})"


def _method(function: Function) -> list[str]:
    """Return the lines of the sync method, not indented."""
    is_property = "property" in map(ast.unparse, function.decorator_list)
    returns = _replaced(ast.unparse(function.returns) if function.returns else "None", TYPES)
    parameters = _replaced(ast.unparse(function.args), TYPES)
    call = f"self._twin.{function.name}" if is_property else _call(function)
    if isinstance(function, ast.AsyncFunctionDef):
        call = f"self._portal.run(lambda: {call})"
    if returns.partition("[")[0] in WRAPPED:
        call = f"{returns.partition('[')[0]}(self._portal, {call})"
    return [
        *(["@property"] if is_property else []),
        f"def {function.name}({parameters}) -> {returns}:",
        *("    " + line for line in _docs(function)),
        f"    {'return ' if returns != 'None' else ''}{call}",
        "",
    ]


_BLOCK = """\
def __enter__(self) -> Self:
    self._portal.run(lambda: self._twin.__aenter__())
    return self

def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if not self._portal.closed:
        self._portal.run(lambda: self._twin.__aexit__(kind, error, trace))
"""
_REPR = """\
def __repr__(self) -> str:
    return repr(self._twin)
"""


def _made(twin: ast.ClassDef, by_hand: set[str], left_out: set[str]) -> Iterator[str]:
    names = {function.name for function in _functions(twin)}
    if "__repr__" in names - by_hand:
        yield _REPR
    if "__aenter__" in names and "__enter__" not in by_hand:
        yield _BLOCK
    for function in _functions(twin):
        if not function.name.startswith("_") and function.name not in by_hand | left_out:
            yield "\n".join(_method(function))


def generated(source: str) -> str:
    """Return the text of a module of the sync face with its generated methods as they should be."""
    parts: list[str] = []
    rest = source
    while (mark := MARK.search(rest)) is not None:
        before, rest = rest[: mark.start()], rest[mark.end() :]
        end = re.search(r"^\S", rest, re.MULTILINE)
        rest = rest[end.start() :] if end is not None else ""
        name = re.findall(r"^class (\w+)", before, re.MULTILINE)[-1]
        own = _class(ast.parse("".join(parts) + before), name)
        path = ROOT / (mark["module"].replace(".", "/") + ".py")
        twin = _class(ast.parse(path.read_text("utf-8")), mark["kind"])
        by_hand = {function.name for function in _functions(own)}
        methods = "\n".join(_made(twin, by_hand, set((mark["left_out"] or "").split())))
        parts += [before, mark[0], "\n", textwrap.indent(methods, "    "), "\n\n"]
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"],
        input="".join(parts) + rest,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return formatted.stdout


def stale() -> dict[Path, str]:
    """Return what each module should be that is not as it would be written."""
    found = {path: generated(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.py"))}
    return {path: text for path, text in found.items() if text != path.read_text("utf-8")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it would")
    check = parser.parse_args().check
    changed = stale()
    for path, text in changed.items():
        print(f"{'not as generated' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, "utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
