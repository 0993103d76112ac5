"""`Raises` sections: an entry names an exception that exists, and says when it is raised (decision 0020)."""

from __future__ import annotations

import ast
import builtins
import functools
import re

import pytest

from tests.docstring_sample import PRODUCT, ROOT, product

SECTION = re.compile(r"^Raises:\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", re.M)
ENTRY = re.compile(r"^[ ]{4}(?! )(.*)$", re.M)
# In capitals: a tuple of exceptions.
FORM = re.compile(r"([A-Za-z_.]+): \S")
LIBRARIES = {"CancelledError", "InvalidStateError", "MsgspecError", "DecodeError", "ValidationError"}


@functools.cache
def exceptions() -> set[str]:
    """Return the names of all exceptions that a docstring may name."""
    found = {name for name, value in vars(builtins).items() if isinstance(value, type)} | LIBRARIES
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            found |= {
                node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
            }
    return found


@functools.cache
def docstrings() -> list[tuple[str, str]]:
    """Return every docstring of the product, with its place."""
    return list(product())


def wrong(text: str, known: set[str]) -> list[str]:
    """Return the entries of a docstring's `Raises` section that are not as they should be."""
    section = SECTION.search(text)
    entries = ENTRY.findall(section[1]) if section else []
    return [
        entry
        for entry in entries
        if not (form := FORM.match(entry)) or not (form[1].isupper() or form[1].rpartition(".")[2] in known)
    ]


def test_the_check_finds_what_is_wrong() -> None:
    lines = ("ValueError: it is none.", "    In two lines.", "Gone: it is not here.", "Bare")
    text = "Do it.\n\nRaises:\n" + "".join(f"    {line}\n" for line in lines)
    assert wrong(text, exceptions()) == ["Gone: it is not here.", "Bare"]


@pytest.mark.parametrize("package", PRODUCT)
def test_raises_sections_name_exceptions_that_exist(package: str) -> None:
    known = exceptions()
    found = [
        f"{place}: {entry}"
        for place, text in docstrings()
        if place.startswith(f"{package}/")
        for entry in wrong(text, known)
    ]
    assert not found, "\n".join(found)
