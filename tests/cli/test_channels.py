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


def test_a_channel_begins_where_it_is_said(topic: str, laminar: Command) -> None:
    """Earliest, latest, at a time, or where a cursor stands."""
    assert 0 == laminar("cursor", "set", topic, "readers", "--offset", "1", "-p", "0").code
    before = {}
    for name, start in (("a", "cursor:readers"), ("b", "latest"), ("c", "2030-01-31T12:00:00Z")):
        assert 0 == laminar("channel", "create", topic, name, "--start", start).code
        before[name] = described(laminar, topic, name)
    ends = {number: each["end"] for number, each in before["b"]["partitions"].items()}
    nexts = {
        name: {n: each["next"] for n, each in found["partitions"].items()} for name, found in before.items()
    }

    assert {"a": {"0": 1, "1": 0}, "b": ends, "c": ends} == nexts
    assert {"start": {"cursor": "readers"}} == before["a"]["settings"]
    for wrong in ("soon", "cursors:a", "2030-01-31", "-1x"):
        for option in ("--start", "--until"):
            refused = laminar("channel", "create", topic, "d", f"{option}={wrong}")
            assert 2 == refused.code and option in refused.err and "-1h" in refused.err, wrong
    both = laminar("channel", "create", topic, "d", "--start", "latest", "--setting", "start=latest")
    assert 2 == both.code and "mutually exclusive" in both.err


def test_a_channel_of_a_range_ends_where_it_is_said(topic: str, laminar: Command) -> None:
    """A replay to the side: what came in the last hour, up to now."""
    made = laminar("channel", "create", topic, "replay", "--start=-1h", "--until", "now")
    assert 0 == made.code, made.err
    found = described(laminar, topic, "replay")
    assert 10 == found["depth"] and {"start", "until"} == found["settings"].keys()
    assert 0 == laminar("channel", "create", topic, "old", "--until=-1h").code
    assert 0 == described(laminar, topic, "old")["depth"]


def test_settings_are_shown_as_they_are_said(topic: str, laminar: Command) -> None:
    said = 'filter={"tags":["a"]}'
    assert 0 == laminar("channel", "create", topic, "c", "--setting", said).code
    assert said in laminar("channel", "describe", topic, "c").text


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
    assert 0 != fixed.code and "cannot be changed" in fixed.err
    assert 2 == laminar("channel", "set", topic, "billing").code
    for command in ("describe", "pause", "delete"):
        refused = laminar("channel", command, topic, "nothing")
        assert 0 != refused.code and "no channel 'nothing'" in refused.err, command
        assert "PUT /v1" not in refused.err and "laminar channel list" in refused.err, command


def test_jobs_are_received_and_said_something_of(topic: str, laminar: Command) -> None:
    assert 0 == laminar("channel", "create", topic, "billing").code
    first = laminar("channel", "receive", topic, "billing", "--max", "2", "--json").text.splitlines()
    one, two = (json.loads(line) for line in first)
    assert [1, 1] == [one["attempt"], two["attempt"]] and {"value", "key", "offset"} <= one.keys()

    why = ("--reason", "there is no paper")
    assert 0 == laminar("channel", "ack", topic, "billing", one["token"]).code
    assert 0 == laminar("channel", "nack", topic, "billing", two["token"], "--delay", "600", *why).code
    late = laminar("channel", "release", topic, "billing", one["token"], two["token"])
    assert 3 == late.code and f"{one['token']} is late" in late.err and "0 done, 2 late" in late.err
    waiting = json.loads(laminar("channel", "aside", topic, "billing", "--json").out)
    assert [(two["offset"], 1)] == [(each["offset"], each["attempts"]) for each in waiting]
    for options in (("--key", two["key"]), ("--reason", "no paper"), ("--key", two["key"], "--tag", "t")):
        listed = json.loads(laminar("channel", "aside", topic, "billing", *options, "--json").out)
        assert [two["key"]] * ("--tag" not in options) == [each["key"] for each in listed], options

    rest = laminar("channel", "receive", topic, "billing", "-n", "8", "--wait", "60", "--ack")
    lines = [line.split("\t") for line in rest.text.splitlines()]
    assert 8 == len(lines) and {"1"} == {attempt for _, attempt, _ in lines}
    assert {str(n) for n in range(10)} == {one["value"], two["value"], *(value for _, _, value in lines)}
    none = laminar("channel", "receive", topic, "billing", "--wait", "0.1")
    assert 1 == none.code and "no job came within 0.1 s" in none.err and "paused" not in none.err
    assert 0 == laminar("channel", "pause", topic, "billing").code
    paused = laminar("channel", "receive", topic, "billing", "--wait", "0.1")
    assert 1 == paused.code and "the channel is paused" in paused.err
    assert 0 == laminar("channel", "resume", topic, "billing").code
    assert 2 == laminar("channel", "ack", topic, "billing").code

    assert 0 == laminar("channel", "seek", topic, "billing", "--at", "earliest").code
    again = laminar("channel", "receive", topic, "billing", "-n", "9", "--wait", "60", "--format", "%v\\n")
    assert 9 == len(again.text.splitlines())


def test_the_dead_are_listed_replayed_and_dropped(topic: str, laminar: Command) -> None:
    assert 0 == laminar("channel", "create", topic, "billing", "--setting", "max_attempts=1").code
    tokens = [
        line.split("\t")[0]
        for line in laminar("channel", "receive", topic, "billing", "--max", "10").text.splitlines()
    ]
    assert 0 == laminar("channel", "nack", topic, "billing", *tokens[:3], "--reason", "no paper").code

    listed = laminar("channel", "dead", topic, "billing", "-o", "names").text.split()
    assert 3 == len(listed) and "no paper" in laminar("channel", "dead", topic, "billing").text
    assert "1 replayed\n" == laminar("channel", "dead", topic, "billing", listed[0], "--replay").text
    gone = laminar("channel", "dead", topic, "billing", listed[0], "--drop")
    assert 3 == gone.code and "1 of 1 are not dead" in gone.err
    assert "2 dropped\n" == laminar("channel", "dead", topic, "billing", "--drop", "--all").text
    for wrong in (["--replay"], ["--all"], ["--replay", "--drop", "--all"], ["0:1:1"]):
        assert 2 == laminar("channel", "dead", topic, "billing", *wrong).code, wrong
