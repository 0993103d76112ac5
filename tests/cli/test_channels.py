"""`laminar channel`, on a real node: what it prints, and how it ends."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

import laminar as library
from tests.cli.conftest import Command

_numbers = itertools.count()


@pytest.fixture
def topic(on_node: str, laminar: Command) -> str:
    """A topic of two partitions with ten records."""
    name = f"channels-{next(_numbers)}"
    assert 0 == laminar("topic", "create", name, "--partitions", "2").code
    with library.connect(on_node) as client, client.topic(name).producer() as producer:
        for number in range(10):
            producer.send(b"%d" % number, key=f"k{number}")
    return name


def described(laminar: Command, topic: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(laminar("channel", "describe", topic, name, "--json").out)
    return found


def test_a_channel_is_created_shown_changed_and_deleted(topic: str, laminar: Command) -> None:
    order = ("--setting", "order=key")
    assert 0 == laminar("channel", "create", topic, "billing", *order).code
    assert "billing\n" == laminar("channel", "list", topic, "-o", "names").text
    table = laminar("channel", "list", topic).text.splitlines()
    assert ["billing", "10", "0", "0", "0", "0"] == table[-1].split()[:6]
    page = laminar("channel", "describe", topic, "billing").text
    assert f"billing of {topic}: 10 to be given out, 0 dead, order=key" in page
    assert "0\n1\n" == laminar("channel", "describe", topic, "billing", "-o", "names").text

    assert 0 == laminar("channel", "set", topic, "billing", "--setting", "timeout_ms=60000").code
    assert {"order": "key", "timeout_ms": 60_000} == described(laminar, topic, "billing")["settings"]
    assert 0 == laminar("channel", "set", topic, "billing", "--setting", "timeout_ms=null").code
    assert {"order": "key"} == described(laminar, topic, "billing")["settings"]

    assert 2 == laminar("channel", "delete", topic, "billing").code, "it asks"
    assert 0 == laminar("channel", "delete", topic, "billing", "--yes").code
    assert "" == laminar("channel", "list", topic, "-o", "names").text


def test_a_channel_is_paused_and_resumed(topic: str, laminar: Command) -> None:
    assert 0 == laminar("channel", "create", topic, "billing").code

    assert 0 == laminar("channel", "pause", topic, "billing").code
    paused = described(laminar, topic, "billing")
    assert {"paused": True} == paused["settings"]
    assert [paused["version"]] * 2 == [each["version"] for each in paused["partitions"].values()]
    assert 0 == laminar("channel", "resume", topic, "billing").code
    assert {} == described(laminar, topic, "billing")["settings"]


def test_what_is_there_already_or_wrong_is_said(topic: str, laminar: Command) -> None:
    assert 0 == laminar("channel", "create", topic, "billing").code

    again = laminar("channel", "create", topic, "billing")
    assert 0 != again.code and "exists" in again.err
    assert 0 == laminar("channel", "create", topic, "billing", "--if-not-exists").code
    other = laminar("channel", "create", topic, "billing", "--setting", "order=key", "--if-not-exists")
    assert 0 != other.code and "order is default, not key" in other.err
    wrong = laminar("channel", "set", topic, "billing", "--setting", "timeout_ms=1")
    assert 0 != wrong.code and "settings.timeout_ms" in wrong.err and "1000" in wrong.err
    fixed = laminar("channel", "set", topic, "billing", "--setting", "order=key")
    assert 0 != fixed.code and "never changes" in fixed.err
    assert 2 == laminar("channel", "set", topic, "billing").code
    for command in ("describe", "pause", "delete"):
        refused = laminar("channel", command, topic, "nothing")
        assert 0 != refused.code and "no channel 'nothing'" in refused.err, command
