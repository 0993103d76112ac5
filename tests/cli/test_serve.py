"""`laminar serve` and `laminar config`: a flag for every setting, and one judge of them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.node.host.settings import SETTINGS
from tests.cli.conftest import Command


def test_every_setting_has_its_flag(laminar: Command) -> None:
    """Name, variable and default of each are on the help page."""
    page = " ".join(laminar("serve", "--help").text.replace("│", " ").split())

    for setting in SETTINGS:
        assert f"{setting.flag} " in page
        assert f"[{setting.variable};" in page


def test_flags_win_over_variables_and_those_over_the_file(
    laminar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `config show --origin` says where each value comes from."""
    file = tmp_path / "node.toml"
    file.write_text('port = 1000\nshards = 1\nnode = "a"\n')
    monkeypatch.setenv("LAMINAR_PORT", "2000")
    monkeypatch.setenv("LAMINAR_SHARDS", "2")

    ran = laminar(
        "config", "show", "--json", "--config", str(file), "--port", "3000", "--join", "a:1", "--join", "b:2"
    )
    rows = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(ran.out)}

    assert [setting.name for setting in SETTINGS] == list(rows)
    assert ("3000", "--port") == rows["port"]
    assert ("2", "LAMINAR_SHARDS") == rows["shards"]
    assert ("a", str(file)) == rows["node"]
    assert (["a:1", "b:2"], "--join") == rows["join"]
    assert ("info", "default") == rows["log_level"]


def test_a_secret_is_not_shown(laminar: Command) -> None:
    """Only that there is one."""
    ran = laminar("config", "show", "--secret", "sixteen letters and more")

    assert 0 == ran.code
    assert "sixteen" not in ran.text + ran.err


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["--port", "99999"], None, "--port: port must be between 0 and 65,000"),
        (["--shards", "many"], None, "--shards: shards"),
        (["--host", "0.0.0.0"], None, "no secret is set"),
        (["--host", "10.0.0.1", "--secret", "s" * 16], None, "--insecure"),
        ([], "LAMINAR_PROT", "did you mean LAMINAR_PORT?"),
        (["--config", "/nowhere.toml"], None, "/nowhere.toml"),
    ],
)
@pytest.mark.parametrize("command", [("serve",), ("config", "show")], ids=" ".join)
def test_what_is_no_setting_is_wrong_use(
    command: tuple[str, ...],
    arguments: list[str],
    variable: str | None,
    said: str,
    laminar: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code 2, one line that names the source; no node is started."""
    if variable is not None:
        monkeypatch.setenv(variable, "7070")

    ran = laminar(*command, *arguments)

    assert (2, b"") == (ran.code, ran.out)
    assert said in ran.err
    assert 1 == len(ran.err.splitlines())


def test_a_flag_that_is_none_is_guessed_at(laminar: Command) -> None:
    """A misspelt flag is code 2, with the flag that was likely meant."""
    ran = laminar("serve", "--dtaa", "x")

    assert 2 == ran.code
    assert "--data" in ran.err


def test_it_serves_from_a_folder_with_modules_of_our_names(tmp_path: Path) -> None:
    """`python -P -m laminar.cli` in a folder with a `router.py` of the user's takes ours."""
    (tmp_path / "router.py").write_text("raise RuntimeError('not ours')\n")

    program = [sys.executable, "-P", "-m", "laminar.cli", "serve", "--port", "99999"]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)

    assert 2 == ran.returncode
    assert "not ours" not in ran.stderr
