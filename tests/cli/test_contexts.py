"""Contexts: what is written is what the client reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.cli.contexts import Contexts, creates_topics
from laminar.client.net.endpoints import resolve
from tests.cli.conftest import Command

TEXT = st.text(min_size=1, max_size=20)


@given(
    current=st.none() | TEXT,
    by_name=st.dictionaries(
        TEXT, st.fixed_dictionaries({"urls": st.lists(TEXT), "token": TEXT, "create_topics": st.booleans()})
    ),
)
def test_whatever_is_written_is_read_back(current: str | None, by_name: dict[str, dict[str, object]]) -> None:
    """Names, URLs and tokens of any characters survive the file."""
    text = Contexts(Path("unused"), current, by_name).text()

    read = tomllib.loads(text)

    assert current == read.get("current")
    assert by_name == read.get("contexts", {})


def test_the_first_context_is_the_current_one_and_the_client_goes_there(laminar: Command) -> None:
    """`context add` needs no `context use` for the first; a second changes nothing until it is used."""
    assert 0 == laminar("context", "add", "home", "http://127.0.0.1:7070/", "--token", "s3cret").code
    assert 0 == laminar("context", "add", "away", "http://127.0.0.2:1", "http://127.0.0.3:1").code
    home = resolve(None, None)
    assert 0 == laminar("context", "use", "away").code
    away = resolve(None, None)

    assert (("http://127.0.0.1:7070",), "s3cret") == (home.urls, home.token)
    assert (("http://127.0.0.2:1", "http://127.0.0.3:1"), None) == (away.urls, away.token)


def test_urls_of_a_context_may_have_commas_between(laminar: Command) -> None:
    """As those of --url and LAMINAR_URL, and beside others."""
    assert 0 == laminar("context", "add", "three", "127.0.0.2:1,http://127.0.0.3:1", "127.0.0.4:1").code

    assert ("http://127.0.0.2:1", "http://127.0.0.3:1", "http://127.0.0.4:1") == resolve(None, None).urls


def test_the_list_shows_no_token(laminar: Command) -> None:
    """That there is one is shown, not which."""
    laminar("context", "add", "home", "http://127.0.0.1:7070", "--token", "s3cret")

    ran = laminar("context", "list", "--json")

    assert [
        {
            "context": "home",
            "current": True,
            "urls": ["http://127.0.0.1:7070"],
            "token": "set",
            "ca": None,
            "certificate": None,
        }
    ] == json.loads(ran.out)
    assert "s3cret" not in laminar("context", "list").text
    assert "home\n" == laminar("context", "list", "-o", "names").text


def test_a_context_has_the_files_of_token_and_ca(
    laminar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their whole paths; the environment goes before them, and an option before that."""
    for name in ("billing.token", "ca.pem", "other.pem", "me.pem", "me.key"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    url = "https://127.0.0.1:7070"
    files = ("--token-file", "billing.token", "--ca", "ca.pem", "--certificate", "me.pem")
    added = laminar("context", "add", "live", url, *files, "--certificate-key", "me.key")
    found = resolve(None, None)
    monkeypatch.setenv("LAMINAR_CA", "other.pem")
    monkeypatch.setenv("LAMINAR_TOKEN", "lam_mine")
    other = resolve(None, None)

    assert 0 == added.code
    assert (str(tmp_path / "billing.token"), str(tmp_path / "ca.pem")) == (found.token_file, found.ca)
    assert (str(tmp_path / "me.pem"), str(tmp_path / "me.key")) == (found.certificate, found.key)
    assert ("lam_mine", None, "other.pem") == (other.token, other.token_file, other.ca)
    assert "given.pem" == resolve(None, None, ca="given.pem").ca
    assert str(tmp_path / "ca.pem") in laminar("context", "list", "--json").text
    missing = laminar("context", "add", "live", url, "--ca", "none.pem")
    assert (2, "laminar: none.pem: there is no such file\n") == (missing.code, missing.err)


def test_the_file_is_for_our_eyes_only(laminar: Command) -> None:
    """It may hold tokens."""
    laminar("context", "add", "home", "http://127.0.0.1:7070")

    assert 0o600 == Contexts.load().path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["context", "use", "nowhere"], "there is no context 'nowhere' (there are: none yet)"),
        (["context", "add", "empty"], "give one URL"),
        (["context", "add", "odd", "gopher://x"], "bad_url"),
    ],
)
def test_wrong_use_is_2(arguments: list[str], said: str, laminar: Command) -> None:
    """A context that is not there, none that leads anywhere."""
    ran = laminar(*arguments)

    assert 2 == ran.code
    assert said in ran.err


def test_a_broken_file_is_named(laminar: Command) -> None:
    """The message has the file and where it is broken."""
    contexts = Contexts.load().path
    contexts.write_text("current = ")

    ran = laminar("context", "list")

    assert 2 == ran.code
    assert str(contexts) in ran.err


def test_topics_are_made_only_in_a_context_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a URL is given, whoever gives it: it may be another cluster."""
    contexts = Contexts.load()
    contexts.by_name = {
        "dev": {"urls": ["http://127.0.0.1:7070"], "create_topics": True},
        "live": {"urls": []},
    }
    contexts.current = "dev"
    contexts.save()

    assert creates_topics(None)
    assert not creates_topics("http://127.0.0.1:7070")
    monkeypatch.setenv("LAMINAR_URL", "http://127.0.0.1:7070")
    assert not creates_topics(None)
    monkeypatch.delenv("LAMINAR_URL")
    contexts.current = "live"
    contexts.save()
    assert not creates_topics(None)
