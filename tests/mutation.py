"""Deliberate bugs: one function of the product replaced by itself with a line changed, in this process only.

A mutant names the function and the exact text it changes, so a change of the product that makes it void is
noticed at once and not counted as caught.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from laminar.compiled import compiled_modules


class NeedsPureBuild(Exception):
    """What was asked for changes Python code, and there is compiled code in its place."""


def need_pure_build() -> None:
    """Refuse to go on where modules are compiled. Raises `NeedsPureBuild`."""
    if compiled := compiled_modules():
        raise NeedsPureBuild(
            f"a mutant changes source text, which compiled code does not follow: {len(compiled)} modules are"
            f" compiled here, {compiled[0]} first; run it in a checkout without extension modules"
        )


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` must stand in the source of `where` (`module:Class.method` or `module:function`) as it is."""

    name: str
    where: str
    old: str
    new: str

    def _function(self) -> tuple[FunctionType, str]:
        """What is changed, and its changed source.

        Raises `LookupError` when the text is not there, `NeedsPureBuild` where modules are compiled.
        """
        need_pure_build()
        module_name, _, path = self.where.partition(":")
        owner: Any = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        function = _plain(inspect.getattr_static(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        if self.old not in source:
            raise LookupError(f"mutant {self.name!r}: {self.where} has no {self.old!r} any more")
        return function, source.replace(self.old, self.new)

    def _changed(self) -> tuple[FunctionType, CodeType]:
        function, source = self._function()
        scope: dict[str, Any] = {}
        code = compile(f"from __future__ import annotations\n{source}", f"<mutant {self.name}>", "exec")
        exec(code, function.__globals__, scope)
        return function, _plain(scope[function.__name__]).__code__

    def check(self) -> None:
        """Whether the bug can be put in, without doing so. Raises `LookupError`, `SyntaxError`."""
        self._changed()

    def apply(self) -> None:
        """Put the bug in, also for those who have imported the function by its name. Raises `LookupError`."""
        function, code = self._changed()
        function.__code__ = code


def _plain(found: Any) -> FunctionType:
    """The function behind a method of any kind."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    assert isinstance(found, FunctionType), found
    return found
