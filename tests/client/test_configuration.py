"""Where connect leads: argument, environment, the command line's context, localhost."""

from __future__ import annotations

from pathlib import Path

import pytest

import laminar
from laminar.client.configuration import DEFAULT_URL, context_file, resolve
from laminar.client.reader import start_parameter
from laminar.http.endings import Target


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
    for wrong in ("", "-h", "1h", "-1y", "yesterday", "-1.5h"):
        with pytest.raises(laminar.ConfigError, match="no place to start"):
            start_parameter(wrong, now_ms=0)


def test_host_and_port_are_short_for_a_url() -> None:
    """As `--join` takes them."""
    found = resolve("localhost:7070,[::1]:80,unix:@name", None, environment={})

    assert ("http://localhost:7070", "http://[::1]:80", "unix:@name") == found.urls
