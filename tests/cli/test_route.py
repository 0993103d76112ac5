"""`laminar topic route|split|merge|move|cancel`, on a real node: what they print, and how they end."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest

import laminar as library
from tests.cli.conftest import Command

_numbers = itertools.count()


@pytest.fixture
def topic(on_node: str, laminar: Command) -> str:
    """A topic of one partition with records of ten keys."""
    name = f"routes-{next(_numbers)}"
    assert 0 == laminar("topic", "create", name).code
    with library.connect(on_node) as client, client.topic(name).producer() as producer:
        for number in range(100):
            producer.send(b"%d" % number, key=f"k{number % 10}")
    return name


def route(laminar: Command, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(laminar("topic", "route", topic, "--json").out)
    return found


def held(laminar: Command, topic: str) -> list[tuple[int, int, int]]:
    (one,) = route(laminar, topic)["routes"]
    return [(each["partition"], each["from"], each["to"]) for each in one["ranges"]]


def test_a_partition_is_split_moved_and_merged(topic: str, laminar: Command) -> None:
    """Each command waits until the route is the topic's, and says what it is."""
    split = laminar("topic", "split", topic, "0", "--at", "1000", "--at", "5000")
    assert (0, "route 1; 1: 0 to 1000, 2: 1000 to 5000, 3: 5000 to 65536") == (
        split.code,
        split.text.strip().partition(": ")[2],
    ), split.err
    assert 0 == laminar("topic", "move", topic, "2").code
    merged = laminar("topic", "merge", topic, "1", "4", "3")
    assert (0, [(5, 0, 65_536)]) == (merged.code, held(laminar, topic)), merged.err

    table = laminar("topic", "route", topic).text
    assert f"{topic}: route 3" in table
    status = {row.split()[0]: row.split()[1] for row in table.splitlines()[2:]}
    assert {"0": "sealed", "1": "sealed", "2": "sealed", "3": "sealed", "4": "sealed", "5": "open"} == status
    partitions = {each["partition"]: each for each in route(laminar, topic)["partition_list"]}
    assert ([], [1, 2, 3]) == (partitions[0]["inputs"], partitions[0]["outputs"])
    assert ([1, 4, 3], []) == (partitions[5]["inputs"], partitions[5]["outputs"])
    assert 100 == partitions[0]["end_offset"]


def test_a_former_change_is_shown(topic: str, laminar: Command) -> None:
    assert 0 == laminar("topic", "split", topic, "0", "--at", "1000").code
    assert 0 == laminar("topic", "move", topic, "2").code
    shown = laminar("topic", "route", topic, "--version", "1")

    head, _, *rows = shown.text.splitlines()
    assert "route 1 is done: 0 to 1, 2" == head
    wanted = [
        ["0", "input", "0", "65,536"],
        ["1", "output", "0", "1,000"],
        ["2", "output", "1,000", "65,536"],
    ]
    assert wanted == [row.split()[:4] for row in rows]
    assert 1 == json.loads(laminar("topic", "route", topic, "--version", "1", "--json").out)["version"]
    for wrong in ("3", "0"):
        refused = laminar("topic", "route", topic, "--version", wrong)
        assert (1, True) == (refused.code, f"route {wrong} of topic {topic}" in refused.err), refused.err


def test_what_channels_have_to_do_yet_keeps_a_partition(topic: str, laminar: Command) -> None:
    """What is said to do about it is of channels, not of cursors."""
    assert 0 == laminar("channel", "create", topic, "billing").code
    assert 0 == laminar("topic", "split", topic, "0", "--at", "1000").code

    refused = laminar("topic", "reclaim", topic, "0")
    assert 1 == refused.code and "billing at 0" in refused.err
    assert "laminar channel delete" in refused.err and "cursor" not in refused.err
    assert 0 == laminar("channel", "delete", topic, "billing", "--yes").code
    assert 0 == laminar("topic", "reclaim", topic, "0").code


def test_a_partition_is_cut_where_its_records_are_divided(topic: str, on_node: str, laminar: Command) -> None:
    assert 0 == laminar("topic", "split", topic, "0").code
    (_, first, cut), (_, again, end) = held(laminar, topic)
    assert (0, cut, 65_536) == (first, again, end)
    with library.connect(on_node) as client:
        parts = [client.topic(topic).partition_of(f"k{number}") for number in range(10)]
    assert {4, 5, 6} >= {parts.count(1)}, "ten keys of the same weight are divided evenly"


def test_a_key_is_where_it_was_cut(topic: str, laminar: Command) -> None:
    assert 0 == laminar("topic", "split", topic, "0", "--key", "k3").code
    assert library_logical("k3") == held(laminar, topic)[1][1]


def library_logical(key: str) -> int:
    from laminar.wire.key_route import logical_of_key

    return logical_of_key(key)


def test_a_change_that_waits_is_shown_and_cancelled(topic: str, on_node: str, laminar: Command) -> None:
    """Nothing was ended, so the partition goes on."""
    part = f"{on_node}/v1/topics/{topic}/partitions/0/uploads/u/parts/0"
    assert httpx.put(part, content=b"part", timeout=60).is_success
    begun = laminar("topic", "split", topic, "0", "--detach")
    assert (0, f"{topic}: the change to route 1 is under way\n") == (begun.code, begun.text)
    shown = laminar("topic", "route", topic).text
    assert "route 1 is preparing: 0 to 1, 2" in shown

    assert 0 == laminar("topic", "cancel", topic).code
    assert [(0, 0, 65_536)] == held(laminar, topic)
    assert "no change of topic" in laminar("topic", "cancel", topic).err

    late = laminar("topic", "split", topic, "0", "--wait", "4")
    assert 1 == late.code
    assert "is preparing: 0 to " in late.err and "; waits for partition 0: 1 " in late.err
    assert (
        "the change to route 1" in late.err and "was cancelled" in late.err and "partition 0: 1 " in late.err
    )
    dropped = laminar("topic", "split", topic, "0", "--wait", "0.5", "--abandon")
    assert 0 == dropped.code, dropped.err


def test_what_cannot_be_is_said(topic: str, laminar: Command) -> None:
    assert 2 == laminar("topic", "merge", topic, "0").code
    assert 2 == laminar("topic", "split", topic, "0", "--into", "2", "--key", "k").code
    none = laminar("topic", "split", topic, "0", "--into", "0")
    assert (1, True) == (none.code, "field=into, value=0" in none.err)
    wrong = laminar("topic", "split", topic, "7")
    assert (1, True) == (wrong.code, "field=inputs, value=7" in wrong.err)
    forced = laminar("topic", "move", topic, "0", "--force")
    assert (1, True) == (forced.code, "field=force" in forced.err)
