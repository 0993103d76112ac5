"""The console in Chromium: one node and one browser for all scenes of `browser.py`.

Skipped without Chromium or without `build/browser` (`make build/browser/ready`), unless `REQUIRE=browser`.
"""

from __future__ import annotations

import ast
import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from laminar.testing.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("browser.py")
BROWSER = ROOT / "build" / "browser"
AXE = BROWSER / "axe.min.js"
VERY_MANY = 10_000
MAKERS = 8


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
    settings = {"access": "tokens"}
    with LocalCluster(tmp_path_factory.mktemp("node"), nodes=1, shards=1, settings=settings) as cluster:
        shots = os.environ.get("CONSOLE_SHOTS") or tmp_path_factory.mktemp("shots")
        found = told(cluster, program, Path(shots))
        yield {name: said["wrong"] for name, said in found.items()}


def told(cluster: LocalCluster, program: str, shots: Path, *more: str) -> dict[str, Any]:
    """Run the script, do what it asks for, and return what it said of each scene."""
    command: list[str | Path] = [
        BROWSER / "bin" / "python",
        SCRIPT,
        cluster.urls[0],
        cluster.admin_token,
        program,
        AXE,
        shots,
        *more,
    ]
    found = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdin is not None and script.stdout is not None
        try:
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
                    found[said["scene"]] = said
        finally:
            script.kill()
    return found


@pytest.mark.parametrize("scene", scenes())
def test_scene(wrong: dict[str, list[str]], scene: str) -> None:
    """Nothing of it failed, broke the policy, asked another host, or was out of reach for some."""
    assert [] == wrong.get(scene, ["it did not run"])


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_each_page_with_10_000_topics(tmp_path: Path) -> None:
    """Each page is as small and as fast as with a hundred, and says how many there are. Five minutes."""
    program = browser_or_skip()
    settings: dict[str, str | int] = {"access": "tokens", "max_partitions": VERY_MANY + 100}
    with LocalCluster(tmp_path / "node", nodes=1, shards=1, settings=settings) as cluster:
        make_topics(cluster)
        shots = tmp_path / "shots"
        shots.mkdir()
        found = told(cluster, program, shots, str(VERY_MANY), *map(str, cluster.pids(0)))["very_many"]

    for place, took in (found["took"] or {}).items():
        print(f"{place}: {took}")
    assert [] == found["wrong"]


def make_topics(cluster: LocalCluster) -> None:
    """Make the topics, of which every other one lacks a replica; the last has a cursor and a channel."""
    node = cluster.members[0]

    def ask(connection: http.client.HTTPConnection, path: str, document: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {cluster.admin_token}", "Content-Type": "application/json"}
        while True:
            connection.request("PUT", path, json.dumps(document), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 503:  # else it is being created
                assert answer.status in (200, 201), text
                return

    def make(share: int) -> None:
        connection = http.client.HTTPConnection(node.host, node.port, timeout=60)
        for number in range(share, VERY_MANY, MAKERS):
            wanted = {"replicas": 2, "allow_fewer_replicas": True} if number % 2 == 0 else {"replicas": 1}
            ask(connection, f"/v1/topics/t{number:05}", wanted)
        connection.close()

    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(make, range(MAKERS)))
    connection = http.client.HTTPConnection(node.host, node.port, timeout=60)
    last = f"/v1/topics/t{VERY_MANY - 1:05}"
    ask(connection, f"{last}/cursors/the-only-consumer", {"begin": "earliest"})
    ask(connection, f"{last}/channels/the-only-channel", {})
    connection.close()
