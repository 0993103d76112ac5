"""The file of the secrets: what is in it, and how it is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laminar.node.access.cluster_secret import keyring_of, with_secret
from laminar.node.host.settings import OPEN, Settings, SettingsError
from laminar.node.host.settings_sources import load
from laminar.node.secret.keyring import Keyring, SecretFileError, secrets_of

OLD, NEW = "the old secret, of any length", "the new secret, of any length"


def write(path: Path, *secrets: str) -> None:
    """Replace the file, as an editor or a tool does."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{secret}\n" for secret in secrets))
    new.rename(path)


def held(keyring: Keyring) -> list[str]:
    """The secrets of a keyring, the used one first."""
    return [keys.secret.decode() for keys in keyring.current]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("short", "must have at least 16 characters"),
        (f"{OLD}\nshort", "secret 2 must have at least 16 characters"),
        (f"{OLD}\n{NEW}\n{OLD} again", "has 3 secrets, at most 2"),
    ],
)
def test_what_is_no_list_of_secrets(text: str, said: str) -> None:
    """It is said without showing any."""
    with pytest.raises(SecretFileError, match=said) as caught:
        secrets_of(text)
    assert OLD not in str(caught.value)


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps of a change, and an operator's slips between them."""
    caplog.set_level("INFO")
    path = tmp_path / "secret"
    write(path, OLD)
    keyring = Keyring.of_file(str(path))
    assert [OLD] == held(keyring) and not keyring.refresh()

    write(path, OLD, NEW)
    assert keyring.refresh() and [OLD, NEW] == held(keyring)
    write(path, "slip")
    assert not keyring.refresh() and not keyring.refresh() and [OLD, NEW] == held(keyring)
    path.unlink()
    assert not keyring.refresh() and [OLD, NEW] == held(keyring)
    write(path, NEW, OLD)
    assert keyring.refresh() and [NEW, OLD] == held(keyring)
    write(path, NEW)
    assert keyring.refresh() and [NEW] == held(keyring)
    assert {"accepted": 1, "loaded": 4, "load_failures": 3} == keyring.statistics()

    assert 1 == caplog.text.count("must have at least 16 characters")
    assert not keyring.refresh(again=True), "nothing has changed"
    write(path, OLD)
    assert keyring.refresh() and "none of the secrets of before" in caplog.text
    assert OLD not in caplog.text and NEW not in caplog.text


def test_where_a_nodes_secrets_come_from(tmp_path: Path) -> None:
    """A file is followed, also the drawn one; a text of the environment can't change."""
    file = tmp_path / "of-the-cluster"
    write(file, OLD, NEW)
    settings = load(environ={"LAMINAR_SECRET_FILE": str(file)}).settings
    assert OLD == settings.secret
    keyring = keyring_of(settings, str(tmp_path))
    assert [OLD, NEW] == held(keyring) and keyring.changes

    keyring = keyring_of(Settings(secret=OLD), str(tmp_path))
    assert [OLD] == held(keyring) and not keyring.changes and not keyring.refresh(again=True)
    assert not keyring_of(Settings(access=OPEN), str(tmp_path))

    drawn = with_secret(Settings(), str(tmp_path), joins=False)
    keyring = keyring_of(drawn, str(tmp_path))
    assert [drawn.secret] == held(keyring) and keyring.changes
    write(tmp_path / "secret", drawn.secret, NEW)
    assert keyring.refresh() and [drawn.secret, NEW] == held(keyring)
    assert drawn.secret == with_secret(Settings(), str(tmp_path), joins=True).secret
    # Another secret in the environment counts more than the one that was drawn.
    assert [OLD] == held(keyring_of(Settings(secret=OLD), str(tmp_path)))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """At the start, with its name."""
    path = tmp_path / "secret"
    for content in (b"\xff" * 20, b"x" * 5000):
        path.write_bytes(content)
        with pytest.raises(SettingsError, match=f"secret_file {path} "):
            load(environ={"LAMINAR_SECRET_FILE": os.fspath(path)})
