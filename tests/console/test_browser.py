"""The console in Chromium: one node and one browser for all scenes of `browser.py`.

Skipped without Chromium or without `build/browser` (`make build/browser/ready`), unless `REQUIRE=browser`.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.testing.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("browser.py")
BROWSER = ROOT / "build" / "browser"
AXE = BROWSER / "axe.min.js"


def scenes() -> list[str]:
    """The names of the scenes: read, as this interpreter has no Playwright to import the script with."""
    tree = ast.parse(SCRIPT.read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and [each.arg for each in node.args.args] == ["browser", "shots"]
    ]


def browser_or_skip() -> str:
    """Return the path of Chromium; skip the test, or fail it, where that or Playwright is not there."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    absent = "no Chromium" if program is None else "no build/browser (make build/browser/ready)"
    if program is not None and AXE.exists():
        return program
    if os.environ.get("REQUIRE") == "browser":
        pytest.fail(absent)
    pytest.skip(absent)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What was wrong in each scene that ran."""
    program = browser_or_skip()
    shots = Path(os.environ.get("CONSOLE_SHOTS") or tmp_path_factory.mktemp("shots"))
    settings = {"access": "tokens"}
    with LocalCluster(tmp_path_factory.mktemp("node"), nodes=1, shards=1, settings=settings) as cluster:
        assert cluster.admin_token is not None
        command: list[str | Path] = [
            BROWSER / "bin" / "python",
            SCRIPT,
            cluster.urls[0],
            cluster.admin_token,
            program,
            AXE,
            shots,
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
            try:
                yield told(script, cluster)
            finally:
                script.kill()


def told(script: subprocess.Popen[str], cluster: LocalCluster) -> dict[str, list[str]]:
    """Do what the script asks for, and return what it said of each scene."""
    assert script.stdin is not None and script.stdout is not None
    found = {}
    for line in script.stdout:
        if line.startswith("?"):
            if line.strip() == "?stop":
                cluster.kill(0)
            else:
                cluster.restart(0)
            script.stdin.write("done\n")
            script.stdin.flush()
        else:
            said = json.loads(line)
            found[said["scene"]] = said["wrong"]
    return found


@pytest.mark.parametrize("scene", scenes())
def test_scene(wrong: dict[str, list[str]], scene: str) -> None:
    """Nothing of it failed, broke the policy, asked another host, or was out of reach for some."""
    assert [] == wrong.get(scene, ["it did not run"])
