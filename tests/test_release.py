"""What `make release-check` has built: the files of a release, and a list of what an install of them brings.

Only that target runs this; twine has looked at the files before.
"""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar import __version__

ROOT = Path(__file__).parents[1]
FILES = ROOT / "build" / "release" / "dist"

pytestmark = pytest.mark.skipif(
    os.environ.get("REQUIRE") != "release", reason="`make release-check` builds the files, and runs this"
)


def normal(name: str) -> str:
    """A distribution's name, as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bill() -> Any:
    """The bill of materials (CycloneDX)."""
    return msgspec.json.decode((FILES / f"laminar_mq-{__version__}.cdx.json").read_bytes())


def components() -> dict[str, Any]:
    """What an install brings, by name."""
    return {normal(each["name"]): each for each in bill()["components"]}


def test_a_release_is_a_wheel_a_source_distribution_and_a_bill() -> None:
    """Both have the code and the licence; a wheel for every machine, as nothing of it is compiled."""
    names = [f"laminar_mq-{__version__}{end}" for end in ("-py3-none-any.whl", ".cdx.json", ".tar.gz")]
    assert names == sorted(file.name for file in FILES.iterdir())
    with zipfile.ZipFile(FILES / names[0]) as wheel, tarfile.open(FILES / names[2]) as source:
        modules = {name for name in wheel.namelist() if name.endswith(".py") and name.startswith("laminar/")}
        top = f"laminar_mq-{__version__}/"
        sources = {member.name.removeprefix(top) for member in source.getmembers()}
    assert len(modules) > 300
    assert modules <= sources
    assert {"LICENSE", "NOTICE", "CHANGELOG.md", "pyproject.toml"} <= sources


def test_the_bill_names_what_an_install_brings_with_pinned_versions() -> None:
    """It is of the wheel: no tool of ours, no library that constraints.txt lacks, and a licence for each."""
    text = (ROOT / "constraints.txt").read_text()
    pinned = {
        normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }
    brought = components().keys() - {"laminar-mq"}

    assert {"uvloop", "httptools", "msgspec", "cryptography", "cffi"} <= brought
    assert not {"pytest", "ruff", "hypothesis", "twine", "cyclonedx-bom"} & brought
    assert {name: pinned.get(name) for name in brought} == {
        name: components()[name]["version"] for name in brought
    }
    assert [] == [name for name in brought if not components()[name].get("licenses")]


def test_the_bill_is_of_this_release() -> None:
    """Name and version of the main component; the same bytes whenever it is made."""
    main = bill()["metadata"]["component"]
    assert ("laminar-mq", __version__) == (normal(main["name"]), main["version"])
    assert "timestamp" not in bill()["metadata"] and "serialNumber" not in bill()
