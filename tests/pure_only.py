"""Which failures on the compiled build say only that a test needs the pure one.

Tests replace methods of objects, hand over stand-ins, and change source text. A compiled class takes none of
these. Such a test is skipped there, with this reason: it runs on the pure build, from the same sources. Only
what the test itself does counts, so a type that the product gets wrong still fails.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import pytest

from laminar.compiled import compiled_modules
from tests.mutation import NeedsPureBuild

_STAND_IN = re.compile(r" object expected; got (tests\.|types\.SimpleNamespace|unittest\.mock)")
_REPLACED = re.compile(
    r"object attribute '\w+' is read-only|cannot set '\w+' attribute of immutable type"
    r"|interpreted classes cannot inherit from compiled"
)


def reason(error: BaseException) -> str:
    """Return why the test that raised this needs the pure build; empty where it does not."""
    if not compiled_modules():
        return ""
    if isinstance(error, NeedsPureBuild):
        return f"needs the pure build: {error}"
    if isinstance(error, TypeError) and _STAND_IN.search(str(error)):
        return f"needs the pure build: {error}"
    if isinstance(error, (AttributeError, TypeError)) and _REPLACED.search(str(error)):
        return f"needs the pure build: {error}" if _raised_by_tests(error.__traceback__) else ""
    return ""


def guard_monkeypatch() -> None:
    """Let `monkeypatch` refuse compiled classes and modules: compiled callers would not see the change."""
    compiled = frozenset(compiled_modules())
    replace = pytest.MonkeyPatch.setattr

    def setattr_of_pure(patch: pytest.MonkeyPatch, target: Any, *arguments: Any, **named: Any) -> None:
        name = target.__module__ if isinstance(target, type) else getattr(target, "__name__", target)
        if name in compiled or (isinstance(target, str) and target.rpartition(".")[0] in compiled):
            raise NeedsPureBuild(f"{name} is compiled, and cannot be changed")
        replace(patch, target, *arguments, **named)

    if compiled:
        pytest.MonkeyPatch.setattr = setattr_of_pure  # type: ignore[method-assign, assignment]


def _raised_by_tests(traceback: TracebackType | None) -> bool:
    """Return whether the last frame is not the product's: a test's, or that of pytest's `monkeypatch`."""
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name.startswith(("tests.", "_pytest."))
