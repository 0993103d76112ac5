"""The README of the protocol lists its modules."""

from __future__ import annotations

import re
from pathlib import Path

import laminar.http.protocol

README = Path(laminar.http.protocol.__file__).with_name("README.md")


def test_every_module_is_in_the_table() -> None:
    """And none that is gone."""
    cells = re.findall(r"^\| (.*?) \|", README.read_text("utf-8"), re.M)
    modules = {path.stem for path in README.parent.glob("*.py")} - {"__init__"}
    assert modules == set(re.findall(r"`(\w+)`", "\n".join(cells)))
