"""`python -m laminar.node`: which settings a program gives a node, and what it says of wrong ones."""

from __future__ import annotations

import pytest

from laminar.node.__main__ import main, settings_of
from laminar.node.start import EXIT_USAGE


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag has a value; a list is one text with commas."""
    monkeypatch.setenv("LAMINAR_SHARDS", "3")
    monkeypatch.setenv("LAMINAR_PORT", "7270")

    settings = settings_of(
        ["--port", "7071", "--join", "127.0.0.1:7070,127.0.0.1:7270", "--insecure", "True"]
    )

    assert (3, 7071, True) == (settings.shards, settings.port, settings.insecure)
    assert ("127.0.0.1:7070", "127.0.0.1:7270") == settings.join


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sharts", "3"], "command line: unknown setting --sharts; did you mean --shards?"),
        (["--shards"], "--shards: has no value"),
        (["--shards", "many"], "--shards: shards must be a whole number (it is 'many')"),
    ],
)
def test_a_wrong_setting_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no node runs."""
    assert EXIT_USAGE == main(arguments)
    assert f"laminar: {said}\n" == capsys.readouterr().err
