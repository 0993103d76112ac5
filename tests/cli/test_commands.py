"""The commands on a real node: what they print, where, and how they end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import laminar as library
from tests.cli.conftest import Command, started
from tests.client.conftest import FakeCluster

pytestmark = pytest.mark.usefixtures("on_node")

FLIGHTS = b"".join(
    b'{"origin":"%s","number":%d}\n' % (origin, number)
    for number, origin in enumerate([b"SFO", b"SEA", b"SFO", b"DEN"] * 5)
)


@pytest.fixture
def topic(request: pytest.FixtureRequest, laminar: Command) -> str:
    """A topic of four partitions, named after the test."""
    name = re.sub(r"[^a-z0-9_]+", "-", request.node.name)
    assert 0 == laminar("topic", "create", name, "--partitions", "4", "--replicas", "1").code
    return name


def test_create_list_describe_delete(topic: str, laminar: Command) -> None:
    """A topic is made, listed in three forms, described, and deleted for good."""
    again = laminar("topic", "create", topic, "--partitions", "4", "--replicas", "1", "--if-not-exists")
    otherwise = laminar("topic", "create", topic, "--partitions", "5", "--replicas", "1", "--if-not-exists")
    there = laminar("topic", "create", topic, "--partitions", "4", "--replicas", "1")

    assert 0 == again.code
    assert (1, "already_exists") == (otherwise.code, otherwise.err.split()[1].rstrip(":"))
    assert (1, "exists") == (there.code, there.err.split()[1].rstrip(":"))
    assert f"{topic}\n" == laminar("topic", "list", topic, "-o", "names").text
    assert [topic] == [row["topic"] for row in json.loads(laminar("topic", "list", topic, "--json").out)]
    assert ["TOPIC", topic] == [line.split()[0] for line in laminar("topic", "list", topic).text.splitlines()]
    described = json.loads(laminar("topic", "describe", topic, "-o", "json").out)
    assert [0, 1, 2, 3] == [each["partition"] for each in described["partition_list"]]
    assert f"{topic}: 4 partitions, 1 replicas\n" in laminar("topic", "describe", topic).text
    assert "0\n1\n2\n3\n" == laminar("topic", "describe", topic, "-o", "names").text
    assert 0 == laminar("topic", "delete", topic, "--yes").code
    deadline = time.monotonic() + 60
    while laminar("topic", "list", topic, "-o", "names").out:  # another shard's view may lag
        assert time.monotonic() < deadline, "the topic is listed for ever"
    gone = laminar("topic", "describe", topic)
    while gone.code == 0 and time.monotonic() < deadline:
        gone = laminar("topic", "describe", topic)
    assert (1, b"") == (gone.code, gone.out)
    assert "no_such_topic" in gone.err


def test_delete_asks_and_where_nobody_can_be_asked_it_refuses(topic: str, laminar: Command) -> None:
    """Without --yes and without a terminal nothing is deleted."""
    ran = laminar("topic", "delete", topic, stdin=b"y\n")

    assert 2 == ran.code
    assert "--yes" in ran.err
    assert 0 == laminar("topic", "describe", topic).code


def test_trim_says_what_goes_and_gives_it_up(topic: str, laminar: Command) -> None:
    """A dry run does nothing; without --yes and without a terminal nothing is given up; then it is."""
    for line in (b"a\n", b"b\n", b"c\n"):
        assert 0 == laminar("produce", topic, "--partition", "0", stdin=line).code

    words = ("topic", "trim", topic, "--partition", "0", "--before", "2", "--json")
    dry = json.loads(laminar(*words, "--dry-run").out)
    asked = laminar(*words)
    assert (2, 0, 2) == (dry[0]["deleted"], dry[0]["from_offset"], dry[0]["start_offset"])
    assert 2 == asked.code
    assert "--yes" in asked.err
    assert 3 == len(laminar("consume", topic).out.splitlines())

    assert 0 == laminar(*words, "--yes").code
    assert b"c\n" == laminar("consume", topic).out


def test_lines_come_back_as_they_went_in(topic: str, laminar: Command) -> None:
    """A record a line, bytes as they are, an empty line and a last one without its end included."""
    lines = b"hi\n\n \xff\x00 \nlast"

    produced = laminar("produce", topic, stdin=lines)
    consumed = laminar("consume", topic, "--format", r"%v|")

    assert (0, b"", "") == (produced.code, produced.out, produced.err)
    assert sorted(lines.split(b"\n")) == sorted(consumed.out.split(b"|")[:-1])


def test_a_file_is_produced_by_key_and_each_key_keeps_its_order(
    topic: str, laminar: Command, tmp_path: Path
) -> None:
    """--key-from picks each record's key; a key's records lie in one partition, in order."""
    file = tmp_path / "flights.jsonl"
    file.write_bytes(FLIGHTS)

    produced = laminar("produce", topic, str(file), "--key-from", "/origin", "--json")
    consumed = laminar("consume", topic, "--format", r"%k %p %v\n").text.splitlines()

    assert {"topic": topic, "appended": 20} == json.loads(produced.out)
    assert 20 == len(consumed)
    assert 3 == len({tuple(line.split(" ")[:2]) for line in consumed})
    for key in ("SFO", "SEA", "DEN"):
        numbers = [json.loads(line.split(" ", 2)[2])["number"] for line in consumed if line.startswith(key)]
        assert sorted(numbers) == numbers


def test_trace_ids_are_produced_and_shown(topic: str, laminar: Command) -> None:
    """One for all records, or that in each line; a line with another one ends it, and is named."""
    traces = [f"{number:032x}" for number in range(2)]
    lines = b"".join(b'{"trace": "%s"}\n' % trace.encode() for trace in traces) + b"{}\n"
    assert 0 == laminar("produce", topic, "--trace-id-from", "/trace", stdin=lines).code
    assert 0 == laminar("produce", topic, "--trace-id", "ab" * 16, stdin=b"{}\n").code
    wrong = laminar("produce", topic, "--trace-id-from", "/trace", stdin=b'{"trace": "7"}\n')
    shown = [json.loads(line) for line in laminar("consume", topic, "--json").out.splitlines()]
    printed = laminar("consume", topic, "--format", r"%i\n").text.splitlines()

    assert sorted([*traces, "ab" * 16, ""]) == sorted(printed)
    assert {*traces, "ab" * 16, None} == {record.get("trace_id") for record in shown}
    assert 0 != wrong.code and "line 1" in wrong.err and "32 hexadecimal digits" in wrong.err


def test_only_one_tag_and_one_header(topic: str, laminar: Command) -> None:
    """--tag and --header filter, with --last, --limit and a cursor, which passes what is left out."""
    laminar("produce", topic, "--tag-from", "/origin", stdin=FLIGHTS)

    one = laminar("consume", topic, "--tag", "SFO", "--json").text.splitlines()
    last = laminar("consume", topic, "--tag", "SFO", "--last", "2").text.splitlines()
    few = laminar("consume", topic, "--tag", "SFO", "--cursor", "c", "--limit", "3").text.splitlines()
    rest = laminar("consume", topic, "--tag", "SFO", "--cursor", "c").text.splitlines()
    passed = laminar("consume", topic, "--cursor", "c")
    none = laminar("consume", topic, "--header", "source=web", "--cursor", "d")
    all_passed = laminar("consume", topic, "--cursor", "d")

    assert ["SFO"] * 10 == [json.loads(line)["tag"] for line in one]
    assert [16, 18] == [json.loads(line)["number"] for line in last]
    assert (3, 10) == (len(few), len({*few, *rest}))
    assert [(0, "")] * 3 == [(ran.code, ran.text) for ran in (passed, none, all_passed)]


def test_only_one_key_the_last_of_it_and_so_many(topic: str, laminar: Command) -> None:
    """--key filters, --last begins near the end, --limit ends early."""
    laminar("produce", topic, "--key-from", "/origin", stdin=FLIGHTS)

    one = laminar("consume", topic, "--key", "SFO", "--json").text.splitlines()
    last = laminar("consume", topic, "--key", "SFO", "--last", "2").text.splitlines()
    newest = laminar("consume", topic, "--last", "3", "--json").text.splitlines()
    few = laminar("consume", topic, "--limit", "4").text.splitlines()
    none = laminar("consume", topic, "--key", "ORD")

    assert ["SFO"] * 10 == [json.loads(line)["key"] for line in one]
    assert [16, 18] == [json.loads(line)["number"] for line in last]
    assert 3 == len(newest)
    assert sorted(json.loads(line)["timestamp"] for line in newest) == [
        json.loads(line)["timestamp"] for line in newest
    ]
    assert 4 == len(few)
    assert (0, b"") == (none.code, none.out)


@pytest.mark.parametrize(
    ("since", "count"), [("earliest", 20), ("1h", 20), ("latest", 0), ("2001-01-01", 20)]
)
def test_since_is_a_place_a_distance_or_a_time(since: str, count: int, topic: str, laminar: Command) -> None:
    """10m, 2h and 1d count back from now."""
    laminar("produce", topic, stdin=FLIGHTS)

    assert count == len(laminar("consume", topic, "--since", since).text.splitlines())


def test_a_cursor_goes_on_where_it_was(topic: str, laminar: Command) -> None:
    """What was printed is not printed again; set and delete move it back."""
    laminar("produce", topic, stdin=FLIGHTS)

    first = laminar("consume", topic, "--cursor", "billing", "--limit", "7").text.splitlines()
    listed = json.loads(laminar("cursor", "list", topic, "--json").out)
    rest = laminar("consume", topic, "--cursor", "billing").text.splitlines()
    nothing = laminar("consume", topic, "--cursor", "billing").out

    assert 7 == len(first)
    assert [(7, 13)] == [(row["position"], row["lag"]) for row in listed]
    assert sorted(FLIGHTS.decode().splitlines()) == sorted(first + rest)
    assert b"" == nothing
    assert 0 == laminar("cursor", "set", topic, "billing", "--at", "earliest").code
    assert 20 == len(laminar("consume", topic, "--cursor", "billing").text.splitlines())
    assert "billing\n" == laminar("cursor", "list", topic, "-o", "names").text
    assert 0 == laminar("cursor", "delete", topic, "billing", "--yes").code
    assert b"" == laminar("cursor", "list", topic, "-o", "names").out


def test_sinks_are_listed_and_deleted(topic: str, laminar: Command) -> None:
    """Not without being asked: its batches would be new again."""
    with library.connect() as client, client.transaction(topic, 0) as batch:
        batch.append(topic, b"a")

    (listed,) = json.loads(laminar("sink", "list", topic, "--json").out)
    assert (topic, 1, 0) == (listed["sink"], listed["epoch"], listed["committed"])
    assert 2 == laminar("sink", "delete", topic).code
    assert f"{topic}\n" == laminar("sink", "list", topic, "-o", "names").text
    assert 0 == laminar("sink", "delete", topic, "--yes").code
    assert b"" == laminar("sink", "list", topic, "-o", "names").out
    again = laminar("sink", "delete", topic, "--yes")
    assert (1, True) == (again.code, "no_such_sink" in again.err)
    assert b"a\n" == laminar("consume", topic).out


def test_a_deletion_of_a_sink_that_was_broken_off_is_gone_on_with(
    laminar: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions did not answer. It was asked for once: nobody is asked again."""
    nodes = FakeCluster(1)
    nodes.start()
    try:
        monkeypatch.setenv("LAMINAR_URL", nodes.urls[0])
        known = {"sink": "s", "epoch": 2, "committed": None, "publishing": False, "deleting": True}
        nodes.sink_answers.extend([(200, known), (200, {})])
        ran = laminar("sink", "delete", "s")
    finally:
        nodes.stop()
    assert (0, "") == (ran.code, ran.err)
    assert ("DELETE", "/v1/sinks/s") == nodes.requests[-1][1:]


def test_a_cursor_is_set_by_offset_or_time_in_one_partition_or_all(topic: str, laminar: Command) -> None:
    """And shows when it was moved, how far it is behind, and how many records it lost to retention."""
    laminar("produce", topic, stdin=FLIGHTS)

    def cursor() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(laminar("cursor", "list", topic, "--json").out)[0]
        return found

    partitions = int(json.loads(laminar("topic", "describe", topic, "--json").out)["partitions"])
    assert 0 == laminar("cursor", "set", topic, "billing", "--at", "2001-01-01T00:00:00Z").code
    first = cursor()
    assert (0, 20, 0, False) == tuple(first[name] for name in ("position", "lag", "owners", "overtaken"))
    assert first["changed"].endswith("Z")
    assert 0 == laminar("cursor", "set", topic, "billing", "--at", "latest").code
    assert (20, 0) == (cursor()["position"], cursor()["lag"])
    last = str(partitions - 1)
    assert 0 == laminar("cursor", "set", topic, "billing", "--offset", "0", "-p", last).code
    assert 0 == cursor()["positions"][last]
    for wrong in (["--at", "latest", "--offset", "1"], [], ["--at", "latest", "-p", str(partitions)]):
        assert 2 == laminar("cursor", "set", topic, "billing", *wrong).code, wrong


def test_a_line_without_json_ends_it_in_part(topic: str, laminar: Command) -> None:
    """What stands before the bad line is durable; code 3 says that it is not all, and the line is named."""
    ran = laminar("produce", topic, "--key-from", "/origin", stdin=b'{"origin":"SFO"}\n{oops\n')

    assert 3 == ran.code
    assert "line 2 is not JSON" in ran.err
    assert b'{"origin":"SFO"}\n' == laminar("consume", topic).out


def test_following_waits_for_what_comes(topic: str, on_node: str, laminar: Command) -> None:
    """`-f` prints a record as soon as it is there, and --limit ends it."""
    command = [sys.executable, "-m", "laminar.cli", "consume", topic, "-f", "--limit", "2"]
    with started(command) as follower:
        assert follower.stdout is not None
        laminar("produce", topic, stdin=b"one\n")
        first = follower.stdout.readline()
        laminar("produce", topic, stdin=b"two\n")
        second = follower.stdout.readline()

        assert [b"one\n", b"two\n"] == [first, second]
        assert 0 == follower.wait(60)


def test_who_has_seen_enough_ends_it_quietly(topic: str, laminar: Command) -> None:
    """A closed pipe (`| head -1`) is code 0 and no word on standard error."""
    laminar("produce", topic, stdin=FLIGHTS * 2_000)
    command = [sys.executable, "-m", "laminar.cli", "consume", topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as consumer:
        assert consumer.stdout is not None and consumer.stderr is not None
        first = consumer.stdout.readline()
        consumer.stdout.close()

        assert first.startswith(b'{"origin"')
        assert (0, b"") == (consumer.wait(60), consumer.stderr.read())


def test_no_color_and_no_escape_in_a_pipe(topic: str, laminar: Command) -> None:
    """What goes into a pipe is text alone, however wide, each row whole on its line."""
    described = laminar("topic", "describe", topic)

    assert b"\x1b" not in described.out
    assert 6 == len(described.text.splitlines())


def test_the_cluster_and_its_nodes(topic: str, on_node: str, laminar: Command) -> None:
    """`cluster status` is code 0 when all is well, and names nodes with what they lead."""
    status = laminar("cluster", "status")
    about = json.loads(laminar("cluster", "status", "--json").out)
    nodes = json.loads(laminar("node", "list", "--json").out)

    assert (0, True) == (status.code, "all well" in status.text)
    assert ("well", []) == (about["status"], about["problems"])
    assert [on_node] == [node["url"] for node in nodes]
    assert 2 == nodes[0]["shards"]
    assert f"{nodes[0]['node']}\n" == laminar("node", "list", "-o", "names").text


def test_nobody_there_is_4(laminar: Command) -> None:
    """A cluster that does not answer is told from one that says no."""
    ran = laminar("topic", "list", "--url", "http://127.77.255.1:9", "--timeout", "0.3")

    assert (4, b"") == (ran.code, ran.out)
    assert 1 == len(ran.err.splitlines())
    assert "http://127.77.255.1:9" in ran.err


def test_waiting_for_a_cluster_is_said(laminar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a moment, on standard error, with the address; then the wait goes on."""
    monkeypatch.setattr("laminar.cli.options.PATIENCE_S", 0.2)

    ran = laminar("topic", "list", "--url", "http://127.77.255.1:9", "--timeout", "0.4")

    first, last = ran.err.splitlines()
    assert 4 == ran.code
    assert "http://127.77.255.1:9" in first
    assert "trying for 0.4 s more" in first
    assert "timed_out" in last


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["consume", "t", "--last", "0"], "--last"),
        (["consume", "t", "--last", "3", "--since", "1h"], "only one of"),
        (["consume", "t", "--format", "%q"], "%q"),
        (["consume", "t", "--header", "source"], "NAME=VALUE"),
        (["produce", "t", "--key", "a", "--key-from", "/b"], "--key-from"),
        (["produce", "t", "--key-from", "b"], "JSON pointer"),
        (["produce", "t", "--trace-id", "a1"], "32 hexadecimal digits"),
        (["produce", "t", "--trace-id", "a" * 32, "--trace-id-from", "/b"], "--trace-id-from"),
        (["topic", "create", "t", "--setting", "flush"], "NAME=VALUE"),
        (["topic", "list", "--url", "nonsense"], "nonsense"),
        (["consume", "t", "--since", "yesterday"], "yesterday"),
    ],
)
def test_wrong_use_is_2(arguments: list[str], said: str, laminar: Command) -> None:
    """What can't be meant is refused before anything is sent."""
    ran = laminar(*arguments)

    assert (2, b"") == (ran.code, ran.out)
    assert said in ran.err


def test_a_file_that_is_not_there_is_1(laminar: Command) -> None:
    """The file is named."""
    ran = laminar("produce", "t", "/nowhere/flights.jsonl")

    assert 1 == ran.code
    assert "/nowhere/flights.jsonl" in ran.err


def test_a_follower_commits_when_it_is_interrupted(topic: str, laminar: Command) -> None:
    """Ctrl-C is how following ends: code 0, and the cursor is at what was printed."""
    laminar("produce", topic, stdin=b"one\ntwo\n")
    command = [sys.executable, "-m", "laminar.cli", "consume", topic, "-f", "--cursor", "billing"]
    with started(command) as follower:
        assert follower.stdout is not None
        printed = sorted([follower.stdout.readline(), follower.stdout.readline()])
        follower.send_signal(signal.SIGINT)

        assert [b"one\n", b"two\n"] == printed
        assert 0 == follower.wait(60)
    assert b"" == laminar("consume", topic, "--cursor", "billing").out


def test_what_is_refused_in_the_middle_leaves_the_rest_said_and_the_exit_code_is_3(
    topic: str, laminar: Command
) -> None:
    """The line, and how many records are appended: nobody repeats the whole as if nothing had been done."""
    ran = laminar("produce", topic, "-p", "0", stdin=b"ok1\n" + b"x" * 9_000_000 + b"\nok2\n")
    first = laminar("produce", topic, "-p", "0", stdin=b"x" * 9_000_000)

    assert 3 == ran.code
    assert "line 2: too_large" in ran.err
    assert f"1 records are appended to {topic}" in ran.err
    assert (1, True) == (first.code, "line 1: too_large" in first.err)
    assert b"ok1\n" == laminar("consume", topic).out


def test_a_key_that_no_line_has_is_said(topic: str, laminar: Command) -> None:
    """A misspelt pointer would else cost the order of every key, without a word."""
    misspelt = laminar("produce", topic, "--key-from", "/orgin", stdin=FLIGHTS)
    right = laminar("produce", topic, "--key-from", "/origin", stdin=FLIGHTS)

    assert (0, 0) == (misspelt.code, right.code)
    assert "no line has anything at /orgin (--key-from)" in misspelt.err
    assert "" == right.err


def test_produce_that_is_interrupted_says_what_is_stored(topic: str, laminar: Command) -> None:
    """Ctrl-C while records are typed: what was sent is durable when it ends, and counted."""
    command = [sys.executable, "-m", "laminar.cli", "produce", topic]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as producer:
        assert producer.stdin is not None and producer.stderr is not None
        producer.stdin.write(b"one\ntwo\n")
        producer.stdin.flush()
        until_appended(laminar, topic, 2)
        producer.send_signal(signal.SIGINT)
        said = producer.stderr.read().decode()

        assert 130 == producer.wait(60)
    assert f"2 records are appended to {topic}" in said


def until_appended(laminar: Command, topic: str, count: int) -> None:
    """Wait until the topic has so many records: the producer sends what lingers by itself."""
    deadline = time.monotonic() + 120
    while len(laminar("consume", topic).text.splitlines()) < count:
        assert time.monotonic() < deadline, f"{count} records never come"


def test_a_distance_in_the_past_may_begin_with_a_hyphen(topic: str, laminar: Command) -> None:
    """As its help writes it, without an equals sign."""
    laminar("produce", topic, stdin=b"one\n")

    assert (0, b"one\n") == ((ran := laminar("consume", topic, "--since", "-10m")).code, ran.out)
    assert 0 == laminar("topic", "trim", topic, "--before", "-7d", "--yes").code


def test_what_differs_from_the_topic_that_exists_is_named(topic: str, laminar: Command) -> None:
    """Not what is the same."""
    figures = ["--partitions", "4", "--replicas", "1"]
    ran = laminar("topic", "create", topic, *figures, "--setting", "retention_ms=5", "--if-not-exists")

    assert 1 == ran.code
    assert "settings.retention_ms is not set, not 5" in ran.err
    assert "partitions is" not in ran.err


def test_more_replicas_than_nodes_are_refused_unless_that_is_allowed(topic: str, laminar: Command) -> None:
    """At once, with a way out; allowed, it says how many there are."""
    refused = laminar("topic", "create", f"{topic}-more", "--replicas", "3")
    allowed = laminar("topic", "create", f"{topic}-more", "--replicas", "3", "--allow-fewer-replicas")
    status = laminar("cluster", "status", "--strict")

    assert 4 == refused.code
    assert "too_few_nodes" in refused.err and "--allow-fewer-replicas" in refused.err
    assert (0, f"laminar: {topic}-more has 1 of 3 replicas\n") == (allowed.code, allowed.err)
    assert (1, 0) == (status.code, laminar("cluster", "status").code), "it is a warning"
    assert f"{topic}-more has 1 of the 3 replicas asked for" in status.text
    assert 0 == laminar("topic", "delete", f"{topic}-more", "--yes").code


def test_a_cursor_that_is_not_there_is_not_deleted(topic: str, laminar: Command) -> None:
    """As a topic that is not there."""
    ran = laminar("cursor", "delete", topic, "nobody", "--yes")

    assert (1, True) == (ran.code, "no_such_cursor" in ran.err)


def test_who_owns_a_cursor_may_be_gone_and_the_way_out_is_named(
    topic: str, laminar: Command, on_node: str
) -> None:
    """`--force` is what the message says, and it works."""
    body = json.dumps({"positions": {"0": 0}, "owner": "dead"}).encode()
    path = f"{on_node}/v1/topics/{topic}/cursors/g"
    with urllib.request.urlopen(urllib.request.Request(path, data=body, method="PUT")) as answer:
        assert 200 == answer.status
    laminar("produce", topic, "-p", "0", stdin=b"x\n")

    refused = laminar("cursor", "set", topic, "g", "--at", "latest")

    assert (1, True) == (refused.code, "--force takes it from its owner" in refused.err)
    assert 0 == laminar("cursor", "set", topic, "g", "--at", "latest", "--force").code


def test_lag_counts_partitions_that_were_never_committed(topic: str, laminar: Command) -> None:
    """What nobody has read yet is unread."""
    for partition in ("0", "1"):
        laminar("produce", topic, "-p", partition, stdin=b"x\n" * 10)
    laminar("consume", topic, "--cursor", "c", "-p", "0", "--limit", "1")

    (listed,) = json.loads(laminar("cursor", "list", topic, "--json").out)

    assert 19 == listed["lag"]
