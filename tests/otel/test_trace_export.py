"""`laminar trace export`: the trace of a real node, as spans that a real receiver takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

import laminar as library
from laminar.batch import BATCH_TYPE, build
from laminar.client.sync.client import Client
from tests.cli.conftest import (  # fixtures
    Command,
    _no_settings_of_the_person,
    laminar,
    node_url,
    on_node,
)
from tests.otel.receiver import Answer, Span, Taken, receiving

__all__ = ["_no_settings_of_the_person", "laminar", "node_url", "on_node"]

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID, PARENT_ID = PARENT[3:35], PARENT[36:52]
PRODUCER, CONSUMER, CLIENT, INTERNAL = 4, 5, 3, 1
_cursors = count()


@pytest.fixture(scope="module")
def client(node_url: str) -> Iterator[Client]:
    with library.connect(node_url) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Taken]:
    with receiving() as taken:
        yield taken


def cursor() -> str:
    """A cursor that no test has used."""
    return f"c{next(_cursors)}"


def append(url: str, topic: str, value: str, *, traceparent: str | None = None, **envelope: Any) -> None:
    headers = {"content-type": "application/vnd.laminar.records+json"}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    answer = httpx.post(
        f"{url}/v1/topics/{topic}/partitions/0/records",
        json=[{"value": value, **envelope}],
        headers=headers,
        trust_env=False,
        timeout=60,
    )
    assert answer.is_success, answer.text


def written(url: str) -> None:
    """Wait until all events that were made are in `_trace`."""
    until = time.monotonic() + 120
    while True:
        found: dict[str, float] = {}
        for line in httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text.splitlines():
            name, _, value = line.partition(" ")
            name = name.partition("{")[0]
            if name.startswith("laminar_trace_"):
                found[name] = found.get(name, 0) + float(value)
        if found["laminar_trace_events_total"] == found["laminar_trace_written_total"]:
            return
        assert time.monotonic() < until, found
        time.sleep(0.05)


def by_name(taken: Taken, topic: str) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for each in taken.spans:
        if each["messaging.destination.name"] == topic:
            found.setdefault(each.name.removesuffix(f" {topic}"), []).append(each)
    return found


def test_the_life_of_a_record_is_a_tree_of_spans(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    """Below the span that appended it: what was sent, each delivery, the work on it, and how that ended."""
    topic = client.create_topic("life", settings={"trace": "all"})
    channel = topic.channel("picking", exist_ok=True)
    append(on_node, "life", "a", key="k1", traceparent=PARENT)
    (job,) = channel.receive_batch(1)
    job.nack(delay=0, reason="no box")
    (job,) = channel.receive_batch(1, wait=20)
    job.ack()
    written(on_node)
    at = cursor()

    ran = laminar("trace", "export", "--otlp", receiver.url, "--cursor", at)

    assert (0, "") == (ran.code, ran.err), ran
    found = by_name(receiver, "life")
    assert {"send": 1, "receive": 2, "process": 2, "nack": 1, "ack": 1} == {
        name: len(spans) for name, spans in found.items()
    }
    (send,), (nack,), (ack,) = found["send"], found["nack"], found["ack"]
    assert {TRACE_ID} == {each.trace_id for spans in found.values() for each in spans}
    assert (PARENT_ID, PRODUCER, "send") == (send.parent_id, send.kind, send["messaging.operation.type"])
    assert {(send.span_id, CLIENT)} == {(each.parent_id, each.kind) for each in found["receive"]}
    receive = {each["laminar.attempt"]: each for each in found["receive"]}
    process = {each["laminar.attempt"]: each for each in found["process"]}
    assert {1, 2} == receive.keys() == process.keys()
    for attempt, end in ((1, nack), (2, ack)):
        assert receive[attempt].span_id == process[attempt].parent_id == end.parent_id
        assert CONSUMER == process[attempt].kind
        assert (receive[attempt].begin_ns, end.begin_ns) == (
            process[attempt].begin_ns,
            process[attempt].end_ns,
        )
        assert end.begin_ns == end.end_ns
    assert ("no box", "no box", None, None) == (nack.error, process[1].error, ack.error, process[2].error)
    assert 7 == len({each.span_id for spans in found.values() for each in spans})
    assert ("laminar", "laminar", "life/0/0", "k1", "picking", "anonymous") == (
        send.service,
        send["messaging.system"],
        send["messaging.message.id"],
        send["laminar.message.key"],
        ack["messaging.destination.subscription.name"],
        ack["user.name"],
    )
    assert abs(send.begin_ns / 1e9 - time.time()) < 600

    sent = len(receiver.spans)
    again = laminar("trace", "export", "--otlp", receiver.url, "--cursor", at)
    assert (0, sent) == (again.code, len(receiver.spans)), "what was sent is not sent again"
    other = laminar("trace", "export", "--otlp", receiver.url + "/v1/traces", "--cursor", cursor())
    assert 0 == other.code
    assert set(receiver.spans[:sent]) == set(receiver.spans[sent:]), "by another cursor it is all the same"


def test_work_that_began_before_the_cursor_has_its_length(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    topic = client.create_topic("longer", settings={"trace": "all"})
    channel = topic.channel("c", exist_ok=True)
    topic.append(b"a")
    (job,) = channel.receive_batch(1)
    written(on_node)
    at = cursor()
    assert 0 == laminar("trace", "export", "--otlp", receiver.url, "--cursor", at).code
    (begun,) = by_name(receiver, "longer")["receive"]
    assert "process" not in by_name(receiver, "longer")

    job.ack()
    written(on_node)
    assert 0 == laminar("trace", "export", "--otlp", receiver.url, "--cursor", at).code

    (process,) = by_name(receiver, "longer")["process"]
    assert (begun.span_id, begun.trace_id, begun.begin_ns) == (
        process.parent_id,
        process.trace_id,
        process.begin_ns,
    )
    assert 1 == len(by_name(receiver, "longer")["receive"])


def test_delayed_records_and_those_of_transactions(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    """With a trace id a delayed record is in one trace; without one, that of its publication has a link."""
    topic = client.create_topic("later", settings={"trace": "all"})
    append(on_node, "later", "a", delay_ms=300, traceparent=PARENT)
    append(on_node, "later", "b", delay_ms=300)
    gone = topic.append(b"c", delay=600)
    assert gone.scheduled is not None
    topic.cancel_delayed(gone.scheduled)
    with client.transaction("later-sink", 1) as transaction:
        transaction.append(topic, b"t", partition=0)
    reader = topic.read(follow=True)
    assert 3 == len(list(zip(range(3), reader, strict=False)))
    written(on_node)

    assert 0 == laminar("trace", "export", "--otlp", receiver.url, "--cursor", cursor()).code

    found = by_name(receiver, "later")
    assert {"schedule": 3, "publish": 2, "cancel": 1, "send": 1} == {
        name: len(spans) for name, spans in found.items()
    }
    scheduled = {each.span_id: each for each in found["schedule"]}
    (with_trace,) = (each for each in found["publish"] if each.trace_id == TRACE_ID)
    (without,) = (each for each in found["publish"] if each.trace_id != TRACE_ID)
    before = scheduled[with_trace.parent_id]
    assert (TRACE_ID, PARENT_ID) == (before.trace_id, before.parent_id)
    (link,) = without.links
    assert ("", True) == (without.parent_id, scheduled[link].trace_id != without.trace_id)
    (cancel,) = found["cancel"]
    assert scheduled[cancel.parent_id].trace_id == cancel.trace_id
    assert {INTERNAL} == {each.kind for each in (with_trace, without, cancel)}
    assert "send" == found["send"][0]["messaging.operation.type"]


def many(client: Client, url: str, name: str, number: int) -> None:
    """A topic of so many traced records, whose events are in `_trace`."""
    client.create_topic(name, settings={"trace": "all"})
    answer = httpx.post(
        f"{url}/v1/topics/{name}/partitions/0/records",
        content=bytes(build([b"v"] * number)),
        headers={"Content-Type": BATCH_TYPE},
        trust_env=False,
        timeout=60,
    )
    assert answer.is_success, answer.text
    written(url)


def test_an_export_that_is_killed_goes_on_where_the_receiver_had_all(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    many(client, on_node, "killed", 2_000)
    at = cursor()
    is_third, goes_on = threading.Event(), threading.Event()

    def hold_third(number: int) -> Answer:
        if number == 2:
            is_third.set()
            goes_on.wait(60)
        return Answer()

    receiver.answer = hold_third
    command = [sys.executable, "-m", "laminar.cli", "trace", "export", "--otlp", receiver.url, "--cursor", at]
    with subprocess.Popen(command, env={**os.environ, "LAMINAR_URL": on_node}) as process:
        assert is_third.wait(120)
        process.kill()
    goes_on.set()
    taken_before = len(by_name(receiver, "killed")["send"])
    assert 0 < taken_before < 2_000

    assert 0 == laminar("trace", "export", "--otlp", receiver.url, "--cursor", at).code

    sent = by_name(receiver, "killed")["send"]
    assert 2_000 == len({each.span_id for each in sent}) == len(set(sent))
    assert len(sent) < 4_000, "it began anew"


def test_a_receiver_that_is_away_is_waited_for_and_nothing_is_lost(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    many(client, on_node, "away", 10)
    at = cursor()
    export = ("trace", "export", "--cursor", at, "--otlp")

    nobody = laminar(*export, "http://127.0.0.1:9", "--patience", "0.1")
    assert 4 == nobody.code
    assert "receiver_unavailable" in nobody.err and "http://127.0.0.1:9/v1/traces" in nobody.err

    receiver.answer = lambda number: Answer(500 if number < 2 else 200)
    back = laminar(*export, receiver.url)
    assert 0 == back.code and "trying again" in back.err, back
    assert 1 == back.err.count("trying again")
    assert 10 == len(by_name(receiver, "away")["send"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(404, b"no such page", "text/plain"), "takes no spans: 404"),
        (Answer(401, b"", "text/plain"), "takes no spans: 401"),
        (
            Answer(200, b"<html>welcome</html>", "text/html"),
            "is no receiver of OTLP: it answers 200 with text/html",
        ),
        (Answer(200, b"[1]", "application/json"), "is no receiver of OTLP"),
        (Answer(302, headers=(("Location", "/login"),)), "takes no spans: 302"),
    ],
)
def test_what_is_no_receiver_is_found_before_the_cursor_moves(
    client: Client, on_node: str, laminar: Command, receiver: Taken, answer: Answer, said: str
) -> None:
    """An answer below 400 is no success: behind a redirect is a page for people."""
    many(client, on_node, f"wrong-{next(_cursors)}", 1)
    receiver.answer = lambda number: answer
    at = cursor()

    ran = laminar("trace", "export", "--otlp", receiver.url, "--cursor", at)

    assert 1 == ran.code
    assert "receiver_refused" in ran.err and said in ran.err and "4318" in ran.err
    assert {} == client.topic("_trace").cursor(at)


def test_spans_that_the_receiver_rejects_are_counted_and_not_sent_again(
    client: Client, on_node: str, laminar: Command, receiver: Taken
) -> None:
    many(client, on_node, "rejected", 1)
    body = ExportTraceServiceResponse()
    body.partial_success.rejected_spans = 2
    body.partial_success.error_message = "too old"
    receiver.answer = lambda number: Answer(body=body.SerializeToString() if number == 0 else b"")

    ran = laminar("trace", "export", "--otlp", receiver.url, "--cursor", cursor())

    assert 0 == ran.code
    assert 1 == ran.err.count("rejected 2 spans: too old")


def test_one_export_uses_a_cursor(client: Client, on_node: str, laminar: Command, receiver: Taken) -> None:
    """Another that moves it meanwhile is noticed: neither skips what the other has not sent."""
    many(client, on_node, "two", 1)
    at = cursor()

    def move(number: int) -> Answer:
        client.topic("_trace").set_cursor(at, dict.fromkeys(range(8), 0))
        return Answer()

    receiver.answer = move
    ran = laminar("trace", "export", "--otlp", receiver.url, "--cursor", at)

    assert 1 == ran.code
    assert "precondition" in ran.err


def test_it_follows_until_it_is_interrupted(client: Client, on_node: str, receiver: Taken) -> None:
    client.create_topic("followed", settings={"trace": "all"}).append(b"a")
    written(on_node)
    command = [sys.executable, "-m", "laminar.cli", "trace", "export", "--otlp", receiver.url]
    is_there = threading.Event()

    def note(number: int) -> Answer:
        is_there.set()
        return Answer()

    receiver.answer = note
    with subprocess.Popen(
        [*command, "--cursor", cursor(), "--follow"], env={**os.environ, "LAMINAR_URL": on_node}
    ) as process:
        assert is_there.wait(120)
        client.topic("followed").append(b"b")
        until = time.monotonic() + 60
        while len(by_name(receiver, "followed").get("send", ())) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(2)
        assert 0 == process.wait(60)


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host", "http://", "http://[", "http://h:0"])
def test_a_url_of_nothing_is_refused(laminar: Command, url: str) -> None:
    ran = laminar("trace", "export", "--otlp", url)

    assert 2 == ran.code
    assert "bad_url" in ran.err and url in ran.err


def test_without_the_extra_it_says_what_to_install(laminar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    ran = laminar("trace", "export", "--otlp", "http://localhost:4318")

    assert 2 == ran.code
    assert "pip install 'laminar-mq[otel]'" in ran.err
