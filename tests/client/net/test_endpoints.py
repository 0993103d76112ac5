"""Where connect leads: argument, environment, the command line's context, localhost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.client.consume.reader import start_parameter
from laminar.client.net.endpoints import DEFAULT_URL, Endpoints, context_file, resolve
from laminar.client.net.session import Session
from laminar.http.protocol.answer import Target


def test_the_argument_wins(tmp_path: Path) -> None:
    environment = {"LAMINAR_URL": "http://e:1", "LAMINAR_CONFIG": str(tmp_path / "none")}

    assert ("http://a:1", "http://b:2") == resolve(
        "http://a:1/, http://b:2", None, environment=environment
    ).urls
    assert ("http://e:1",) == resolve(None, None, environment=environment).urls
    del environment["LAMINAR_URL"]
    assert (DEFAULT_URL,) == resolve(None, None, environment=environment).urls


def test_the_current_context_is_read(tmp_path: Path) -> None:
    """Its URLs and token; the environment's token goes before it."""
    file = tmp_path / "config.toml"
    file.write_text('current = "dev"\n[contexts.dev]\nurls = ["http://c:7"]\ntoken = "hush"\n')
    found = resolve(None, None, environment={"LAMINAR_CONFIG": str(file)})
    other = resolve(None, None, environment={"LAMINAR_CONFIG": str(file), "LAMINAR_TOKEN": "mine"})

    assert (("http://c:7",), "hush", str(file)) == (found.urls, found.token, found.origin)
    assert "mine" == other.token
    assert "hush" not in repr(found)


def test_a_certificate_is_found_as_a_ca_is(tmp_path: Path) -> None:
    """Argument, environment, context; and with its own key, never with that of another place."""
    file = tmp_path / "config.toml"
    file.write_text(
        'current = "x"\n[contexts.x]\nurls = ["https://c:7"]\ncertificate = "c.pem"\nkey = "c.key"\n'
    )
    context = {"LAMINAR_CONFIG": str(file)}
    own = {"LAMINAR_CERTIFICATE": "e.pem", "LAMINAR_KEY": "e.key", "LAMINAR_URL": "https://e:1"}

    def shown(found: Endpoints) -> tuple[str | None, str | None]:
        return found.certificate, found.key

    assert ("c.pem", "c.key") == shown(resolve(None, None, environment=context))
    assert ("a.pem", None) == shown(resolve(None, None, certificate="a.pem", environment=context))
    assert ("e.pem", "e.key") == shown(resolve(None, None, environment=context | own))
    assert ("e.pem", "e.key") == shown(resolve("https://a:1", None, environment=own))
    assert ("a.pem", None) == shown(resolve("https://a:1", None, certificate="a.pem", environment=own))
    assert (None, None) == shown(resolve("https://a:1", None, environment=context))
    with pytest.raises(laminar.ConfigError, match="without the certificate"):
        resolve("https://a:1", None, key="a.key", environment={})


def test_a_token_goes_to_the_hosts_that_are_named_with_it() -> None:
    """Who may say where to connect, as an option of Spark's does, is not always who may have the token."""
    environment = {"LAMINAR_URL": "http://a:1,http://b:1", "LAMINAR_TOKEN": "hush"}

    assert resolve(None, None, environment=environment).token == "hush"
    assert resolve("http://b:7", None, environment=environment).token == "hush"
    assert resolve("http://stranger:1", None, environment=environment).token is None
    assert resolve("http://a:1,http://stranger:1", None, environment=environment).token is None
    assert resolve("http://stranger:1", "mine", environment=environment).token == "mine"
    assert resolve("http://a:1", None, environment={"LAMINAR_TOKEN": "hush"}).token is None


def test_a_token_is_not_sent_to_where_an_answer_leads() -> None:
    """Other ports of a host that was named are its shards; other hosts are strangers, and https stays so."""
    named = Endpoints(("https://a:1", "http://b:1", "unix:@c"), "hush")

    heard = ("https://a:1", "https://a:7", "http://b:2", "https://b:2", "unix:@c")
    assert all(map(named.may_hear_token, heard))
    strangers = ("http://a:1", "https://d:1", "http://127.0.0.1:1", "unix:@d", "unix:/c")
    assert not any(map(named.may_hear_token, strangers))


async def test_a_request_to_another_host_has_no_token() -> None:
    """Whoever sent us there: a redirect, or a list of replicas."""
    session = Session(Endpoints(("http://a:1",), "hush"), timeout_s=1, rng=random.Random(1))
    heads = {url: session.head(url, "GET", "/", {}) for url in ("http://a:1", "http://a:2", "http://b:1")}
    await session.close()

    assert {"http://a:1", "http://a:2"} == {url for url, head in heads.items() if b"Bearer hush" in head}


@pytest.mark.parametrize("text", ['current = "gone"\n', "not toml", 'current = "a"\n[contexts]\na = 1\n'])
def test_a_broken_context_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(laminar.ConfigError, match=r"config\.toml"):
        resolve(None, None, environment={"LAMINAR_CONFIG": str(file)})


def test_the_file_lies_where_xdg_says() -> None:
    assert Path("/x/laminar/config.toml") == context_file({"XDG_CONFIG_HOME": "/x"})
    assert Path.home() / ".config/laminar/config.toml" == context_file({})


@pytest.mark.parametrize("url", ["localhost:x", "ftp://a", "", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(laminar.ConfigError):
        laminar.connect(url)


def test_no_token_in_a_repr() -> None:
    assert "secret" not in repr(laminar.connect("http://a:1", token="secret"))


def test_targets() -> None:
    """Every spelling of where a node listens."""
    assert Target("h", 7070, None, False) == Target.of("http://h:7070")
    assert Target("h", 443, None, True) == Target.of("https://h")
    assert "\0node" == Target.of("unix:@node").path
    assert "/run/l.sock" == Target.of("unix:/run/l.sock").path
    assert "/run/l.sock" == Target.of("http+unix://%2Frun%2Fl.sock").path
    assert "\0node" == Target.of("http+unix://%40node").path
    assert "[::1]:80" == Target.of("http://[::1]").authority


def test_places_to_start() -> None:
    """Names, spans back from now, times; anything else is refused before anything is sent."""
    assert "earliest" == start_parameter("earliest", now_ms=0)
    assert "6400000" == start_parameter("-1h", now_ms=10_000_000)
    assert "9999500" == start_parameter("-500ms", now_ms=10_000_000)
    assert "1700000000000" == start_parameter("2023-11-14T22:13:20+00:00", now_ms=0)
    wrong: Any  # an offset without its partition is a likely mistake
    for wrong in ("", "-h", "1h", "-1y", "yesterday", "-1.5h", 5, None):
        with pytest.raises(laminar.ConfigError, match="neither a place nor a time"):
            start_parameter(wrong, now_ms=0)


def test_host_and_port_are_short_for_a_url() -> None:
    """As `--join` takes them."""
    found = resolve("localhost:7070,[::1]:80,unix:@name", None, environment={})

    assert ("http://localhost:7070", "http://[::1]:80", "unix:@name") == found.urls
