"""The image of a node: its steps work in a folder that has what they copy, and nothing else.

There is no container here: what the build stage copies is built without the network, and imported.
`make image` builds it whole, and starts a node in it; `make build/deploy/ready` fetches the linter.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
LINTER = ROOT / "build" / "deploy" / "bin" / "hadolint"
STEPS = [
    step.split(maxsplit=1)
    for step in re.sub(r"\\\n", " ", TEXT).splitlines()
    if step and not step.startswith("#")
]


def test_it_has_two_stages_of_one_base_and_runs_as_a_user_of_its_own() -> None:
    """The second has nothing of the first but the environment; nothing in it asks how the node is."""
    kinds = [kind for kind, _ in STEPS]
    said = dict(STEPS[kinds.index("FROM", kinds.index("FROM") + 1) :])

    assert ["${BASE} AS build", "${BASE}"] == [rest for kind, rest in STEPS if kind == "FROM"]
    assert "ARG" == kinds[0] and "HEALTHCHECK" not in kinds
    assert ("10001:10001", '["laminar"]', '["serve"]') == (said["USER"], said["ENTRYPOINT"], said["CMD"])
    assert "--from=build /opt/laminar /opt/laminar" == said["COPY"]


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    """And it would find something."""
    if not LINTER.exists():
        assert os.environ.get("REQUIRE") != "deploy", "REQUIRE=deploy, and hadolint is not there"
        pytest.skip("hadolint is not installed: `make build/deploy/ready`")

    def lint(text: str) -> list[str]:
        (tmp_path / "Dockerfile").write_text(text)
        words = [str(LINTER), "--no-color", str(tmp_path / "Dockerfile")]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()

    assert [] == lint(TEXT)
    assert "DL3002" in "".join(lint(TEXT.replace("USER 10001:10001", "USER root")))


def test_no_more_is_sent_to_the_build_than_is_copied() -> None:
    """A checkout has gigabytes beside it, and maybe a node's data."""
    copied = {
        name for kind, rest in STEPS if kind == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]

    assert ("*", "**/__pycache__") == (rules[0], rules[-1])
    assert copied == {rule.removeprefix("!") for rule in rules[1:-1]}


def test_what_the_first_stage_copies_is_enough_for_a_node(tmp_path: Path) -> None:
    """The wheel is built of these files alone, and has all that a node imports."""
    source = tmp_path / "src"
    source.mkdir()
    for words in (rest.split() for kind, rest in STEPS if kind == "COPY" and "--from" not in rest):
        for name in words[:-1]:
            target = source / words[-1] / name if words[-1].endswith("/") else source / words[-1]
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, target)
    [install] = [rest for kind, rest in STEPS if kind == "RUN" and "pip install" in rest]
    assert ".[tls]" in shlex.split(install) and "constraints.txt" in install

    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "whole", "zip")

    program = "import laminar.node.start, laminar, sys; print(laminar.__file__)"
    libraries = ":".join([str(tmp_path / "whole"), *(path for path in sys.path if "site-packages" in path)])
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": libraries},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.startswith(str(tmp_path / "whole"))
