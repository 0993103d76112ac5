"""The result of a check: a line that says ok, or what is wrong and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OK: Final = "ok"
WARNING: Final = "warning"
HERE: Final = "this machine"


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `do` is empty where nothing is wrong."""

    status: Literal["ok", "warning"]
    check: str
    where: str
    finding: str
    do: str = ""


def fine(check: str, finding: str, *, where: str = HERE) -> Line:
    """Return the line of a check that found no fault; `finding` says what it found, `where` on which node."""
    return Line("ok", check, where, finding)


def wrong(check: str, finding: str, do: str, *, where: str = HERE) -> Line:
    """Return the line of a check that found a fault: what it found, what to `do`, and `where`."""
    return Line("warning", check, where, finding, do)
