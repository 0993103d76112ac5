"""`laminar system unit`: a unit that systemd takes as it is."""

from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.cli.conftest import Command


def read(text: str) -> ConfigParser:
    parsed = ConfigParser(interpolation=None, strict=True)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]  # names of systemd have capital letters
    parsed.read_string(text)
    return parsed


def test_the_unit_notifies_and_may_write_its_data_folder_alone(laminar: Command) -> None:
    ran = laminar("system", "unit", "--user", "log", "--config", "/etc/l.toml")
    service = read(ran.text)["Service"]

    assert (0, "") == (ran.code, ran.err)
    assert ("notify", "strict", "log") == (service["Type"], service["ProtectSystem"], service["User"])
    assert ("laminar", False) == (service["StateDirectory"], "ReadWritePaths" in service)
    program, *words = service["ExecStart"].split()
    assert Path(program).is_file()
    assert ["serve", "--config", "/etc/l.toml", "--data", "/var/lib/laminar"] == words


def test_a_folder_elsewhere_has_to_be_there(laminar: Command) -> None:
    service = read(laminar("system", "unit", "--data", "/data/l").text)["Service"]

    assert ("/data/l", False) == (service["ReadWritePaths"], "StateDirectory" in service)
    at_home = "/".join(("", "home", "l"))
    assert "read-only" == read(laminar("system", "unit", "--data", at_home).text)["Service"]["ProtectHome"]


@pytest.mark.parametrize("path", ["relative", "/with blank", "/with%i", '/"quoted"'])
def test_a_path_that_a_unit_would_read_otherwise_is_refused(laminar: Command, path: str) -> None:
    ran = laminar("system", "unit", "--data", path)

    assert (2, b"") == (ran.code, ran.out)
    assert "--data" in ran.err


def test_systemd_finds_nothing_wrong_with_it(laminar: Command, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "laminar.service"
    unit.write_bytes(laminar("system", "unit", "--data", str(tmp_path)).out)

    ran = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, check=False)

    assert (0, "") == (ran.returncode, ran.stdout + ran.stderr)
