"""`laminar delayed` and `laminar produce --delay`, on a real node: what they print, and how they end."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from tests.cli.conftest import Command

_numbers = count()


@pytest.fixture
def topic(on_node: str, laminar: Command) -> str:
    name = f"delayed-{next(_numbers)}"
    assert 0 == laminar("topic", "create", name, "--partitions", "1").code
    return name


def listed(laminar: Command, topic: str, *more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(laminar("delayed", "list", topic, "--json", *more).out)
    return found


def test_lines_are_delayed_listed_cancelled_moved_and_published(topic: str, laminar: Command) -> None:
    assert 0 == laminar("produce", topic, "--delay", "2h", "--key", "k", stdin=b"a\nb\nc\n").code
    first, second, third = (each["id"] for each in listed(laminar, topic))

    assert f"{first} cancelled\n" == laminar("delayed", "cancel", topic, first).text
    moved = laminar("delayed", "move", topic, second, "--at", "2099-01-31T12:00:00Z")
    assert (0, f"{second} pending 2099-01-31T12:00:00.000+00:00\n") == (moved.code, moved.text)
    assert 0 == laminar("delayed", "fire", topic, third).code
    assert "c\n" == laminar("consume", topic, "--limit", "1", "--format", r"%v\n").text

    late = laminar("delayed", "cancel", topic, third)
    assert (1, f"{third} published\n") == (late.code, late.text)
    assert f"{first} cancelled\n" == laminar("delayed", "describe", topic, first).text
    (left,) = listed(laminar, topic, "--from", "2098-01-01T00:00:00Z", "--key", "k")
    assert (left["id"], left["bytes"]) == (second, 1)
    assert [] == listed(laminar, topic, "--to", "2098-01-01T00:00:00Z")


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "T", "--delay", "soon"),
        ("produce", "T", "--delay", "5s", "--deliver-at", "2099-01-31T12:00:00Z"),
        ("produce", "T", "--deliver-at", "2099-01-31T12:00:00"),
        ("delayed", "move", "T", "0.5.0"),
        ("delayed", "list", "T", "--from", "tomorrow"),
    ],
)
def test_a_wrong_time_is_a_mistake_in_the_command(
    topic: str, laminar: Command, arguments: tuple[str, ...]
) -> None:
    ended = laminar(*(topic if each == "T" else each for each in arguments), stdin=b"a\n")
    assert 2 == ended.code and "--" in ended.err


def test_an_id_that_was_never_given_is_not_found(topic: str, laminar: Command) -> None:
    ended = laminar("delayed", "cancel", topic, "0.5.99")
    assert 5 == ended.code or 1 == ended.code
    assert "no_such_delayed_record" in ended.err or "has given no delayed record" in ended.err
