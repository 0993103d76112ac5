"""Scenario files are played, and their output compared; `--rewrite` takes what came out for right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.raft.scenario import files, play


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
def test_a_scenario_plays_as_written(file: Path, request: pytest.FixtureRequest) -> None:
    """What a group does in each of these stories is known to the last message."""
    expected = file.read_text()
    actual = play(expected)

    if request.config.getoption("rewrite") and actual != expected:
        file.write_text(actual)
        pytest.skip("rewritten: read the diff")
    assert expected == actual


def test_a_scenario_can_fail() -> None:
    """Another output than the file's is not the file."""
    text = "# One replica.\n\ncluster 1\ncampaign 1\n----\n1: follower\n"

    assert text != play(text)
    assert play(text) == play(play(text))
