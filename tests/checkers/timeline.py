"""A history as a picture: one HTML file, faults as bands, operations as bars, violations to click on.

It needs no server and fetches nothing. A long history is cut down to what lies about its first violation.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from tests.checkers import Fault, History, Operation, Violation

# More bars than this make a browser slow.
MOST_OPERATIONS = 20_000
_PLACE = "/*DATA*/"


def write_timeline(
    path: str | os.PathLike[str], history: History, violations: Sequence[Violation] = ()
) -> None:
    """Write the page of a history."""
    page = files("tests.checkers").joinpath("timeline.html").read_text("utf-8")
    told = msgspec.json.encode(_data(history, violations)).decode()
    # The end of a script element may not occur in it.
    Path(path).write_text(page.replace(_PLACE, told.replace("</", "<\\/")), "utf-8")


def _data(history: History, violations: Sequence[Violation]) -> dict[str, Any]:
    everything = history.operations
    started_us = [each.start_us for each in everything] + [each.start_us for each in history.faults]
    zero_us = min(started_us, default=0)
    found = [_Found(each) for each in violations]
    _find_entry(found, everything)
    shown = everything
    if len(shown) > MOST_OPERATIONS:
        last_us = max(each.start_us for each in shown)
        middle_us = min((each.at_us for each in found if each.at_us is not None), default=last_us)
        shown = sorted(shown, key=lambda each: abs(each.start_us - middle_us))[:MOST_OPERATIONS]
    wrong = {id(operation) for each in found for operation in each.about}
    return {
        "of": len(everything),
        "from": min((each.start_us for each in shown), default=zero_us) - zero_us,
        "to": max((each.end_us or each.start_us for each in shown), default=zero_us + 1) - zero_us,
        "operations": [_bar(each, zero_us, wrong=id(each) in wrong) for each in shown],
        "faults": [_band(each, zero_us) for each in history.faults],
        "violations": [
            {
                "text": _seconds(str(each.violation), zero_us),
                "place": each.place,
                "at": each.at_us - zero_us if each.at_us is not None else None,
            }
            for each in found
        ],
    }


class _Found:
    """A violation: its partition as operations name it, and the operations it is about."""

    def __init__(self, violation: Violation) -> None:
        self.violation = violation
        self.place = violation.message.partition(":")[0]
        self.about: list[Operation] = []

    @property
    def at_us(self) -> int | None:
        """When it shows first; the reading of everything, after the run, comes last."""
        if self.violation.at_us is not None:
            return self.violation.at_us
        first = min(self.about, key=lambda each: (each.kind == "final", each.start_us), default=None)
        return first.start_us if first is not None else None


def _find_entry(found: Sequence[_Found], operations: Iterable[Operation]) -> None:
    """Fill in `about`, in one pass over a long history."""
    by_offset: dict[tuple[str, int | None], list[_Found]] = {}
    by_start: dict[tuple[str, int | None], list[_Found]] = {}
    for each in found:
        by_offset.setdefault((each.place, each.violation.offset), []).append(each)
        by_start.setdefault((each.place, each.violation.at_us), []).append(each)
    for operation in operations:
        place = _place(operation)
        told = [by_start.get((place, operation.start_us), ())]
        told += [by_offset.get((place, offset), ()) for offset in _offsets(operation)]
        for each in itertools.chain.from_iterable(told):
            each.about.append(operation)


def _seconds(text: str, zero_us: int) -> str:
    """Instants as the page's axis has them, not as the recorder's clock had them."""
    return re.sub(r"\b(\d+) us\b", lambda told: f"{(int(told[1]) - zero_us) / 1e6:.6f} s", text)


def _place(operation: Operation) -> str:
    return f"{operation.topic}/{operation.partition}"


def _offsets(operation: Operation) -> list[int]:
    own = [operation.offset] if operation.kind == "append" and operation.offset is not None else []
    return own + [offset for offset, _ in operation.values]


def _bar(operation: Operation, zero_us: int, *, wrong: bool) -> dict[str, Any]:
    place = _place(operation)
    offsets = _offsets(operation)
    match operation.kind:
        case "append":
            label = f"{operation.value} at {operation.offset}"
        case "read":
            label = f"end {operation.end_offset}"
        case _:
            label = f"{offsets[0]} to {offsets[-1]}" if offsets else "nothing"
    tip = f"{operation.kind} {place}: {label}"
    if operation.node:
        tip += f"\nfrom {operation.node}"
    if operation.outcome != "ok":
        tip += f"\n{operation.outcome}: {operation.error}"
    if operation.values:
        tip += "\n" + ", ".join(f"{offset} {value!r}" for offset, value in operation.values[:12])
    return {
        "kind": operation.kind,
        "process": operation.process,
        "start": operation.start_us - zero_us,
        "end": operation.end_us - zero_us if operation.end_us is not None else None,
        "outcome": operation.outcome,
        "place": place,
        "label": label,
        "tip": tip,
        "wrong": wrong,
    }


def _band(fault: Fault, zero_us: int) -> dict[str, Any]:
    return {
        "what": fault.what,
        "nodes": fault.nodes,
        "note": fault.note,
        "start": fault.start_us - zero_us,
        "end": fault.end_us - zero_us if fault.end_us is not None else None,
    }
