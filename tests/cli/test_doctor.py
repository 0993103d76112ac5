"""`laminar doctor`: what it says of this machine, of a cluster, and of one that does not answer."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.cli.commands.admin.doctor import Answers, Examined
from laminar.cli.commands.doctor import bundle_file, doctor, machine
from laminar.cli.commands.doctor.lines import Line, fine, wrong
from laminar.cli.errors import UsageError
from laminar.node.api.bundle import allowed
from laminar.node.host.settings import SETTINGS, Settings
from tests.cli.conftest import Command


@pytest.mark.usefixtures("any_disk_will_do")
def test_each_check_of_a_healthy_node_is_a_line(on_node: str, laminar: Command, tmp_path: Path) -> None:
    ran = laminar("doctor", "--data", str(tmp_path), "--json")
    lines = [Line(**each) for each in json.loads(ran.out)]
    bad = [line for line in lines if line.status == "warning" and line.check != "leaders"]
    assert bad == [] and ran.code in (0, 1)
    checks = {line.check for line in lines}
    assert {"versions", "settings", "names", "open files", "free space"} <= checks
    assert checks >= doctor.CHECKED.keys() - {"clocks"}  # of one node there is nothing to compare
    assert any("syncs of its journals" in line.finding for line in lines)
    assert list(tmp_path.iterdir()) == []

    text = laminar("doctor", "--data", str(tmp_path)).text
    assert "ok       ports             the cluster   all are reached from here" in text


def test_without_a_node_this_machine_is_examined_all_the_same(laminar: Command, tmp_path: Path) -> None:
    nowhere = ("--url", "http://127.0.0.1:9", "--timeout", "0.5", "--data", str(tmp_path))
    ran = laminar("doctor", *nowhere)
    assert ran.code == 4 and "timed_out" in ran.err
    assert "warning  cluster" in ran.text and "to do: start its nodes" in ran.text
    assert "sync time         this machine" in ran.text
    assert "cluster\n" in laminar("doctor", *nowhere, "-o", "names").text

    file = tmp_path / "file"
    none = laminar("doctor", *nowhere, "--bundle", str(file))
    assert none.code == 1 and "no node gave its bundle" in none.err and not file.exists()
    file.write_text("mine")
    kept = laminar("doctor", *nowhere, "--bundle", str(file))
    assert kept.code == 2 and "exists" in kept.err and kept.out == b"" and file.read_text() == "mine"


def test_wrong_settings_are_named_without_their_value(
    laminar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINAR_SECRET", "too short")
    nowhere = ("--url", "http://127.0.0.1:9", "--timeout", "0.5", "--data", str(tmp_path))
    ran = laminar("doctor", *nowhere)
    assert "LAMINAR_SECRET: secret cannot be used" in ran.text and "too short" not in ran.text + ran.err

    monkeypatch.setenv("LAMINAR_SECRET", "a secret that is long enough")
    file = tmp_path / "laminar.toml"
    file.write_text('zone = "room-2"\ntls_key = ""\n')
    found, settings = machine.of_settings(file)
    assert settings.zone == "room-2"
    assert {line.finding for line in found} == {
        "secret = set, from LAMINAR_SECRET",
        f"tls_key = not set, from {file}",
        f"zone = room-2, from {file}",
    }


def test_settings_that_may_hold_a_secret_are_not_shown() -> None:
    names = {row.name for row in SETTINGS}
    assert allowed.SETTINGS_SHOWN <= names
    assert not allowed.SETTINGS_SHOWN & {"secret", "secret_file", "tls_key", "join", "origins", "data"}
    shown = allowed.settings_of(Settings(secret="a secret", origins=("https://user:password@site",)))
    assert shown.keys() == names
    assert shown["secret"]["value"] == shown["origins"]["value"] == "set"
    assert shown["tls_ca"]["value"] == "not set"


def test_samples_with_names_that_clients_gave_are_left_out() -> None:
    lines = [
        'laminar_partitions{process="shard-0",state="open"} 3',
        "laminar_up 1",
        'laminar_consumer_lag_records{topic="t",consumer="c"} 1',
        'laminar_principal_refused_total{principal="p"} 1',
        'laminar_x{topic="a\\",consumer=\\"b"} 1',
        'another{topic="t"} 1',
        "laminar_up 1 # planted",
    ]
    assert list(allowed.samples_of(lines)) == [*lines[:2], lines[4]]


@pytest.mark.usefixtures("any_disk_will_do")
def test_names_that_have_no_address_are_said() -> None:
    lines = list(machine.of_names(["http://nowhere.invalid:7070", "http://localhost:7070"]))
    assert ("warning", "nowhere.invalid has no address") == (lines[0].status, lines[0].finding)
    assert lines[1].status == "ok" and lines[1].finding.startswith("localhost is ")


def test_a_low_limit_of_open_files_is_said() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512)); "
        "from laminar.cli.commands.doctor.machine import of_limits; "
        "print(*(f'{each.status} {each.finding}' for each in of_limits()), sep='\\n')"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.startswith("warning a process may open 512 files\nok ")
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 512


def test_a_disk_that_is_full_slow_or_none_is_said(tmp_path: Path) -> None:
    free, sync = machine.of_disk(tmp_path / "not" / "there", Settings())
    assert (free.check, sync.check) == ("free space", "sync time") and "99 % at most" in sync.finding
    full, _ = machine.of_disk(tmp_path, Settings(low_water_bytes=1 << 50, low_water_percent=100.0))
    assert full.status == "warning" and "low_water_bytes" in full.do
    assert list(tmp_path.iterdir()) == []
    _, closed = machine.of_disk(Path("/proc"), Settings())
    assert closed.status == "warning" and "cannot be written" in closed.finding


def test_clocks_are_compared_as_exactly_as_they_are_known() -> None:
    near = {"a": Answers(ahead_s=1.0, ahead_within_s=0.6), "b": Answers(ahead_s=1.2, ahead_within_s=0.6)}
    (line,) = doctor._fine("clocks", Examined({}, near, 0, []))
    assert line == fine("clocks", "they differ by 0.20 s at most (allowed: 0.6 s)", where="the cluster")
    times = {0.001: 50.0, 0.01: 98.0, float("inf"): 100.0}
    assert doctor._said(times) == (
        "of 100 syncs of its journals half took at most 1 ms, 99 % longer than the histogram shows"
    )
    assert "no sync" in doctor._said(dict.fromkeys(times, 0.0))


def test_a_file_of_bundles_has_no_word_of_a_node_and_no_way_out(tmp_path: Path) -> None:
    file = tmp_path / "file"
    lines = [wrong("nodes", "a quoted word", "do"), wrong("clocks", "it is late", "do", where="n1")]
    bundle_file.write(file, lines, {"n1": {"node": "n1"}, "../../n2": {}, "/etc/n3": {}})
    listed = subprocess.run(["tar", "-tzf", file], check=True, capture_output=True, text=True).stdout
    assert [f"laminar-bundle/{name}" for name in ("README.txt", "doctor.json", "nodes/n1.json")] == (
        listed.splitlines()
    )
    content = subprocess.run(["tar", "-xzOf", file], check=True, capture_output=True, text=True).stdout
    assert "it is late" in content and "quoted" not in content
    with pytest.raises(UsageError, match="exists"):
        bundle_file.write(file, lines, {})
