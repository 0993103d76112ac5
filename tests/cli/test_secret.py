"""`laminar secret`: the steps by which a file of secrets changes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from laminar.node.secret.keyring import SHORTEST, secrets_of
from tests.cli.conftest import Command as Laminar

OLD = "the old secret, of any length"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{OLD}\n")
    path.chmod(0o640)
    return path


def test_the_steps_of_a_change(laminar: Laminar, tmp_path: Path, file: Path) -> None:
    """In order; the file keeps its permissions, and nothing else is left behind."""
    drawn = laminar("secret", "draw").out.decode()
    new = tmp_path / "new"
    new.write_text(drawn)
    (secret,) = secrets_of(drawn)
    assert len(secret) >= 43 > SHORTEST and secret != laminar("secret", "draw").out.decode().strip()

    for _ in range(2):  # also when the step is taken again
        assert 0 == laminar("secret", "add", str(file), str(new)).code
        assert [OLD, secret] == file.read_text().split("\n")[:-1]
    assert 0 == laminar("secret", "use", str(file)).code
    assert [secret, OLD] == file.read_text().split("\n")[:-1]
    for _ in range(2):
        assert 0 == laminar("secret", "drop", str(file)).code
        assert [secret] == file.read_text().split("\n")[:-1]

    assert 0o640 == stat.S_IMODE(file.stat().st_mode)
    assert {"new", "secret"} == {each.name for each in tmp_path.iterdir()}


def test_what_is_no_step_changes_nothing(laminar: Laminar, tmp_path: Path, file: Path) -> None:
    """Each says what is wrong, and shows no secret."""
    new = tmp_path / "new"
    new.write_text("short")
    said = [
        laminar("secret", "use", str(file)),
        laminar("secret", "add", str(file), str(new)),
        laminar("secret", "add", str(file), str(file)),
        laminar("secret", "drop", str(tmp_path / "none")),
    ]
    assert OLD == file.read_text().strip() and all(answer.code != 0 for answer in said)
    assert "the step before" in said[0].err and "at least 16 characters" in said[1].err
    assert "uses already" in said[2].err and "can't be read" in said[3].err
    assert not any(OLD in answer.err + answer.out.decode() for answer in said)


def test_a_link_to_the_file_stays_a_link(laminar: Laminar, tmp_path: Path, file: Path) -> None:
    """As where a tool puts secrets into place by links."""
    link = tmp_path / "link"
    link.symlink_to(file)
    new = tmp_path / "new"
    new.write_text("the new secret, of any length")
    assert 0 == laminar("secret", "add", str(link), str(new)).code
    assert link.is_symlink() and 2 == len(file.read_text().splitlines())
