"""`laminar search`, on a real node: what it prints, and what it says of how far it looked."""

from __future__ import annotations

import json
import time
from itertools import count

import pytest

from tests.cli.conftest import Command

_numbers = count()


@pytest.fixture
def topic(on_node: str, laminar: Command) -> str:
    name = f"searched-{next(_numbers)}"
    assert 0 == laminar("topic", "create", name, "--partitions", "2").code
    lines = "".join(f'{{"n": {n}, "w": "word{n % 3}"}}\n' for n in range(20)).encode()
    assert 0 == laminar("produce", name, "--key-from", "/w", stdin=lines).code
    return name


def test_records_are_found_and_the_rest_is_said(topic: str, laminar: Command) -> None:
    found = laminar("search", topic, "--json", "n=7", "--format", r"%k %v\n")
    assert (0, 'word1 {"n": 7, "w": "word1"}\n') == (found.code, found.text)
    assert "searched 20 records" in found.err and "that is all" in found.err

    by_key = laminar("search", topic, "--key", "word2", "--as-json")
    rows = [json.loads(line) for line in by_key.text.splitlines()]
    assert [row["key"] for row in rows] == ["word2"] * 6 and rows[0]["topic"] == topic

    newest = laminar("search", topic, "--contains", "word", "--newest", "--limit", "1", "--format", r"%o\n")
    assert newest.code == 0 and int(newest.text) > 5
    assert "are left" in newest.err
    assert laminar("search", topic, "--from", "2999-01-01T00:00:00Z").text == ""
    assert laminar("search", topic, "--header", "a=b", "--tag", "t").text == ""


def test_the_history_of_a_record_is_shown(topic: str, laminar: Command) -> None:
    found = laminar("search", topic, "--limit", "1", "--format", r"%p %o")
    partition, offset = found.text.split()
    assert 0 == laminar("channel", "create", topic, "c").code
    told = laminar("record", "history", topic, partition, offset, "--json")
    assert told.code == 0 and [each["event"] for each in json.loads(told.out)] == ["appended"]
    assert "now in channel c: waiting" in told.err
    assert 0 != laminar("record", "history", topic, partition, "99999").code


@pytest.mark.parametrize(
    "arguments",
    [
        ("--limit", "0"),
        ("--json", "n"),
        ("--header", "=v"),
        ("--from", "yesterday"),
        ("--format", "%z"),
        ("--follow", "--newest"),
    ],
)
def test_a_mistake_in_the_command_is_named(topic: str, laminar: Command, arguments: tuple[str, ...]) -> None:
    ended = laminar("search", topic, *arguments)
    assert 2 == ended.code and "--" in ended.err


def test_the_trace_of_a_record_is_shown(on_node: str, laminar: Command) -> None:
    """It is asked for until the events are written, half a second later."""
    assert 0 == laminar("topic", "create", "traced", "--setting", "trace=all").code
    assert 0 == laminar("produce", "traced", "--key", "k", "--trace-id", "cd" * 16, stdin=b"a\nb\n").code
    until = time.monotonic() + 60
    while not (found := laminar("trace", "show", "--record", "traced/0/1", "-o", "json")).text.strip("[]\n"):
        assert (0, True) == (found.code, time.monotonic() < until)
    (row,) = json.loads(found.text)
    assert ("appended", "traced/0/1", "anonymous") == (row["event"], row["record"], row["principal"])

    table = laminar("trace", "show", "--trace-id", "cd" * 16)
    assert (0, 2) == (table.code, table.text.count("appended"))
    assert 1 == laminar("trace", "show", "--trace-id", "cd" * 16, "--limit", "1").code
    assert 2 == laminar("trace", "show").code
    assert 2 == laminar("trace", "show", "--key", "k", "--record", "traced/0/1").code
