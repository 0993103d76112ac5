"""Every library that an install may bring is named in NOTICE, with the licence it states itself.

NOTICE is read, not generated: a person looked at each line. This test says when a line is missing, stale or
wrong, and keeps licences out that would bind a user of Laminar.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"^  (?P<name>[A-Za-z0-9._-]+)  +(?P<licence>\S.*)$")


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(re.split(r"[=@ ;]", line)[0]) for line in lines if line and not line.startswith("#")}


def noticed() -> dict[str, str]:
    # Before them stands what is contained in the distribution: see tests/console/test_files.py.
    _, _, installed = (ROOT / "NOTICE").read_text().partition("Needed by every install:")
    found = (LINE.match(line) for line in installed.splitlines())
    return {normal(line["name"]): line["licence"].strip() for line in found if line}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def stated(distribution: metadata.Distribution) -> str:
    """What the metadata states: an expression, else a text that is short, else the classifiers."""
    head = distribution.metadata.json
    if expression := head.get("license_expression"):
        return str(expression)
    text = str(head.get("license", ""))
    if 0 < len(text) <= 40 and "\n" not in text:
        return text
    classes = [value.rsplit("::", 1)[-1].strip() for value in head.get("classifier", [])]
    return "; ".join(value for value in classes if "License" in value)


def test_notice_names_exactly_the_pinned_libraries() -> None:
    """A new dependency needs a line in NOTICE; a line whose library is gone goes too."""
    assert noticed().keys() == pinned()


@pytest.mark.parametrize("name", sorted(pinned()))
def test_notice_states_the_licence_the_library_states(name: str) -> None:
    """For what is installed here, NOTICE and the library's metadata say the same."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is pinned for another platform or Python")

    assert stated(distribution) == noticed()[name]


def test_no_library_binds_those_who_use_laminar() -> None:
    """No GPL or AGPL; the one LGPL library (crc32c) is loaded as it came and may be exchanged by anybody."""
    strong = re.compile(r"(?<!L)(?<!Lesser )\bA?GPL|General Public License")
    bound = {name for name, licence in noticed().items() if strong.search(licence) and name != "crc32c"}

    assert set() == bound
    assert noticed()["crc32c"].startswith("LGPL")
