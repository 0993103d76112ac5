"""The wheel is whole: built, installed elsewhere, and run there.

Nothing is fetched: the build uses the hatchling that is here, and the new environment, which holds only the
wheel, finds the libraries in this one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("laminar", "raft", "membership", "router", "ebpf")

# What Spark looks for at the top level; in the repository it lies here.
AUTOLOAD = "laminar/spark/autoload/"

PROGRAM = """
import importlib, importlib.resources, json, sys
found = {}
for name in sys.argv[2:]:
    package, _, rest = name.partition("/")
    found[name] = len(importlib.resources.files(package).joinpath(rest).read_bytes())
where = [importlib.import_module(name).__file__ for name in sys.argv[1].split(",")]
print(json.dumps({"where": where, "sizes": found}))
"""


@dataclass(frozen=True)
class Installed:
    """The wheel, and the environment outside the checkout where it is installed."""

    wheel: Path
    home: Path

    def run(self, program: str, *arguments: str) -> str:
        """What `program` of the environment prints, run in a folder that holds nothing."""
        empty = self.home / "empty"
        empty.mkdir(exist_ok=True)
        command = [str(self.home / "bin" / program), *arguments]
        answer = subprocess.run(command, cwd=empty, env={"PATH": "/nowhere"}, capture_output=True, text=True)
        assert 0 == answer.returncode, answer.stderr
        return answer.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("wheel")
    assert not base.is_relative_to(ROOT), "the temporary folder lies in the checkout, which proves nothing"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = base.glob("laminar_mq-*.whl")

    home = base / "venv"
    venv.create(home, symlinks=True)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    python = str(home / "bin" / "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    # Libraries come from here, behind the wheel. Lines in a .pth of a folder so added are not followed, so an
    # editable install of the checkout stays out of sight.
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, home)


def source_files() -> set[str]:
    """Every file of the packages that a user needs, as the wheel should name it."""
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                names.add(path.relative_to(ROOT).as_posix().removeprefix(AUTOLOAD))
    return names


def test_the_wheel_holds_every_file_of_the_packages(installed: Installed) -> None:
    """Also what is not Python: py.typed, C sources, web assets. And nothing beside them."""
    with zipfile.ZipFile(installed.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert source_files() == held


def test_the_command_runs_outside_the_checkout(installed: Installed) -> None:
    """`laminar --version` prints the distribution's version. Unless asked, nothing is compiled."""
    version, build = installed.run("laminar", "--version").split()
    assert installed.wheel.name == f"laminar_mq-{version}-py3-none-any.whl"
    assert build == "(pure)"


def test_packages_and_assets_load_from_the_wheel(installed: Installed) -> None:
    """Modules come from the new environment, and what is not Python through importlib.resources."""
    assets = sorted(name for name in source_files() if not name.endswith(".py"))
    told = json.loads(installed.run("python", "-c", PROGRAM, ",".join(PACKAGES), *assets))

    assert "laminar/py.typed" in assets
    assert all(Path(where).is_relative_to(installed.home) for where in told["where"]), told["where"]
    assert {name: (ROOT / name).stat().st_size for name in assets} == told["sizes"]
