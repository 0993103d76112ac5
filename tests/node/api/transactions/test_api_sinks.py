"""Transactions over partitions, as any HTTP client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pyarrow
import pyarrow.ipc
import pytest

from laminar.http.api.documents.transactions import MAX_PARTS, MAX_STAGES
from laminar.node.api.common.json_body import MAX_COMMIT_BYTES
from tests.node.api.asking import ARROW, Partition, fresh_metrics, problem, until


def stage(
    http: httpx.Client, sink: str, number: int, topic: str, partition: int, *values: str, **query: Any
) -> httpx.Response:
    """Records as NDJSON; `stage` is 0 unless it is said."""
    given: dict[str, Any] = {"topic": topic, "partition": partition, "stage": 0} | query
    return http.post(
        f"/v1/sinks/{sink}/batches/{number}/stages",
        params=given,
        content="\n".join(values),
        headers={"content-type": "application/x-ndjson"},
    )


def commit(
    http: httpx.Client, sink: str, number: int, epoch: int, *parts: tuple[str, int, list[int]]
) -> httpx.Response:
    body = [{"topic": topic, "partition": partition, "stages": stages} for topic, partition, stages in parts]
    return http.put(f"/v1/sinks/{sink}/batches/{number}", json={"epoch": epoch, "parts": body})


def begin(http: httpx.Client, sink: str) -> int:
    answer = http.post(f"/v1/sinks/{sink}")
    assert 200 == answer.status_code, answer.text
    epoch = answer.json()["epoch"]
    assert isinstance(epoch, int)
    return epoch


def test_a_batch_is_seen_whole_in_all_its_partitions_once_it_is_committed(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """And not at all before; to commit it again changes nothing; a newer epoch refuses the older driver."""
    topic = new_topic(2)
    epoch = begin(http, "s1")
    for partition in (0, 1):
        assert 201 == stage(http, "s1", 0, topic, partition, "1", "2", epoch=epoch).status_code
    assert 201 == stage(http, "s1", 0, topic, 1, "3", epoch=epoch, stage=1).status_code
    assert ["[]", "[]"] == [str(Partition(http, topic, each).values()) for each in (0, 1)]

    answer = commit(http, "s1", 0, epoch, (topic, 0, [0]), (topic, 1, [0, 1]))
    assert (200, "applied") == (answer.status_code, answer.json().get("result")), answer.text
    assert ["1", "2"] == Partition(http, topic, 0).values()
    assert ["1", "2", "3"] == Partition(http, topic, 1).values()

    again = commit(http, "s1", 0, epoch, (topic, 0, [0]), (topic, 1, [0, 1]))
    assert (200, "already") == (again.status_code, again.json().get("result")), again.text
    described = http.get("/v1/sinks/s1").json()
    assert (epoch, 0, False) == (described["epoch"], described["committed"], described["publishing"])

    newer = begin(http, "s1")
    assert epoch < newer
    assert 201 == stage(http, "s1", 1, topic, 0, "4", epoch=epoch).status_code
    fenced = commit(http, "s1", 1, epoch, (topic, 0, [0]))
    assert (409, "fenced", newer) == (fenced.status_code, fenced.json()["code"], fenced.json()["limit"])
    assert 201 == stage(http, "s1", 1, topic, 0, "5", epoch=newer).status_code
    assert "applied" == commit(http, "s1", 1, newer, (topic, 0, [0])).json()["result"]
    assert ["1", "2", "5"] == Partition(http, topic, 0).values()
    assert ["1", "2", "3"] == Partition(http, topic, 1).values()


def test_a_batch_of_another_fingerprint_is_not_taken_for_the_one_that_is_committed(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """A driver that went back to an older state would lose what it read anew; without one nobody compares."""
    topic = new_topic()
    epoch = begin(http, "s-fingerprint")
    stage(http, "s-fingerprint", 0, topic, 0, "1", epoch=epoch)
    path = "/v1/sinks/s-fingerprint/batches/0"
    body = {"epoch": epoch, "parts": [{"topic": topic, "partition": 0, "stages": [0]}], "fingerprint": "a"}

    assert "applied" == http.put(path, json=body).json()["result"]
    assert "already" == http.put(path, json=body).json()["result"]
    epoch = begin(http, "s-fingerprint")
    assert "a" == http.get("/v1/sinks/s-fingerprint").json()["fingerprint"]
    other = {"epoch": epoch, "parts": [], "fingerprint": "b"}
    problem(http.put(path, json=other), 409, "other_batch", field="fingerprint", value="b", limit="a")
    assert "already" == commit(http, "s-fingerprint", 0, epoch).json()["result"]
    problem(http.put(path, json={**other, "fingerprint": "x" * 201}), 422, "invalid")


def test_metrics_tell_what_is_staged_until_it_is_published(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """By topic, in batches and bytes; there is a series while something is staged."""
    topic = new_topic(1)
    epoch = begin(http, "s-metrics")
    stage(http, "s-metrics", 0, topic, 0, "1", "2", epoch=epoch)

    def gauges() -> list[str]:
        where = f'{{topic="{topic}"}}'
        lines = [line.split() for line in fresh_metrics(http).splitlines()]
        return [
            line[1]
            for name in ("batches", "bytes")
            for line in lines
            if line[0] == f"laminar_staged_{name}{where}"
        ]

    until(lambda: 2 == len(gauges()))
    batches, size_bytes = map(float, gauges())
    assert 1 == batches
    assert size_bytes > len(b"12")
    commit(http, "s-metrics", 0, epoch, (topic, 0, [0]))
    until(lambda: [] == gauges())


def test_what_was_not_staged_is_not_committed(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """Nothing of the batch is seen, the number stays free, and the error names what is missing."""
    topic = new_topic(2)
    epoch = begin(http, "s2")
    stage(http, "s2", 7, topic, 0, "1", epoch=epoch)

    missing = commit(http, "s2", 7, epoch, (topic, 0, [0]), (topic, 1, [0]))
    assert (409, "no_stage", "not_applied") == (
        missing.status_code,
        missing.json()["code"],
        missing.json()["outcome"],
    )
    assert [] == Partition(http, topic, 0).values()

    stage(http, "s2", 7, topic, 1, "2", epoch=epoch)
    assert "applied" == commit(http, "s2", 7, epoch, (topic, 0, [0]), (topic, 1, [0])).json()["result"]
    assert [["1"], ["2"]] == [Partition(http, topic, each).values() for each in (0, 1)]


@pytest.mark.parametrize(
    "sink, number, query, status, field",
    [
        ("s3", "0", {}, 422, "topic"),
        ("s3", "0", {"topic": "none", "partition": 0, "stage": 0, "epoch": 1}, 404, "topic"),
        ("s3", "x", {"topic": "t", "partition": 0, "stage": 0, "epoch": 1}, 422, "number"),
        ("s 3", "0", {"topic": "t", "partition": 0, "stage": 0, "epoch": 1}, 422, "sink"),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused_by_name(
    http: httpx.Client, sink: str, number: str, query: dict[str, Any], status: int, field: str
) -> None:
    answer = http.post(f"/v1/sinks/{sink}/batches/{number}/stages", params=query, content=b"x")
    assert (status, field) == (answer.status_code, answer.json()["field"]), answer.text


def test_a_sink_that_nobody_began_is_not_there(http: httpx.Client) -> None:
    begin(http, "s4")
    answer = http.get("/v1/sinks/other")
    assert (404, "no_such_sink") == (answer.status_code, answer.json()["code"])


def test_an_older_batch_is_already_committed_and_a_later_one_waits_for_nothing(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Numbers rise, and need not be dense; records of twenty batches lie in the order of their numbers."""
    topic = new_topic(1)
    epoch = begin(http, "s5")
    for number in range(0, 40, 2):
        stage(http, "s5", number, topic, 0, str(number), epoch=epoch)
        assert "applied" == commit(http, "s5", number, epoch, (topic, 0, [0])).json()["result"]
    assert "already" == commit(http, "s5", 5, epoch, (topic, 0, [0])).json()["result"]
    assert [str(number) for number in range(0, 40, 2)] == Partition(http, topic, 0).values()


def test_a_partition_whose_records_were_all_published_begins_at_the_first_of_them(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Not behind them, where a plain append would be the first: a reader from there skips nothing."""
    topic = new_topic(1)
    epoch = begin(http, "s6")
    stage(http, "s6", 0, topic, 0, "1", "2", epoch=epoch)
    assert "applied" == commit(http, "s6", 0, epoch, (topic, 0, [0])).json()["result"]

    for at in ("earliest", "2000-01-01T00:00:00Z"):
        told = http.get(f"/v1/topics/{topic}/partitions/0/offsets", params={"at": at}).json()
        assert (0, 2) == (told["offset"], told["end_offset"]), told
        assert told["timestamp"] is not None


def test_published_records_are_read_as_any_others(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """By offset, time, tag, one at a time, as lines and as an Arrow stream; trimmed as a whole."""
    topic = new_topic(1)
    partition = Partition(http, topic)
    epoch = begin(http, "s9")
    for number in range(2):
        for place in range(2):
            answer = stage(
                http,
                "s9",
                number,
                topic,
                0,
                f"1{number}{place}0",
                f"1{number}{place}1",
                epoch=epoch,
                stage=place,
            )
            assert 201 == answer.status_code, answer.text
        assert 200 == commit(http, "s9", number, epoch, (topic, 0, [0, 1])).status_code
    wanted = [f"1{number}{place}{end}" for number in range(2) for place in range(2) for end in range(2)]

    assert wanted == partition.values()
    for offset, value in enumerate(wanted):
        one = http.get(f"{partition.path}/records/{offset}")
        assert (200, value) == (one.status_code, one.text)
        assert [value] == [each["value"] for each in partition.records(offset=offset, limit=1)]
        assert wanted[offset:] == [
            each["value"] for each in partition.records(offset=offset, max_bytes=1 << 20)
        ]
    earliest = http.get(f"{partition.path}/offsets", params={"at": "earliest"}).json()
    assert 0 == earliest["offset"] and earliest["timestamp"] is not None
    assert wanted == [each["value"] for each in partition.records(since=earliest["timestamp"])]
    second = partition.records(offset=4, limit=1)[0]["timestamp"]
    assert 4 == http.get(f"{partition.path}/offsets", params={"at": second}).json()["offset"]
    lines = partition.fetch("application/x-ndjson", offset=3).text.splitlines()
    assert wanted[3:] == [json.loads(line)["value"] for line in lines]
    table = pyarrow.ipc.open_stream(partition.fetch(ARROW, offset=1).content).read_all()
    assert (list(range(1, 8)), [value.encode() for value in wanted[1:]]) == (
        table["offset"].to_pylist(),
        table["value"].to_pylist(),
    )
    assert 8 == http.get(f"{partition.path}/offsets").json()["end_offset"]

    trimmed = http.delete(f"{partition.path}/records", params={"before": 6}).json()
    assert (4, 4, True) == (trimmed["deleted"], trimmed["start_offset"], trimmed["rounded_down"])
    assert wanted[4:] == [each["value"] for each in partition.records(offset=4)]
    assert "already" == commit(http, "s9", 1, epoch, (topic, 0, [0, 1])).json()["result"]


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("PUT", "", {"partitions": 1}),
        ("PATCH", "", {"settings": {"flush": "interval"}}),
        ("DELETE", "", None),
        ("POST", "/records", {"a": 1}),
        ("POST", "/partitions/0/records", {"a": 1}),
        ("DELETE", "/partitions/0/records?before=0", None),
    ],
)
def test_nobody_touches_the_topic_of_the_coordinators(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """Neither before there is a sink nor after: what it knows is what was committed."""
    begin(http, "s7")
    answer = http.request(method, f"/v1/topics/_transactions{path}", json=body, headers={"if-match": "*"})
    assert (422, "topic", "_transactions") == (
        answer.status_code,
        answer.json()["field"],
        answer.json()["value"],
    ), answer.text
    assert 422 == stage(http, "s7", 0, "_transactions", 0, "1", epoch=1).status_code
    assert 422 == commit(http, "s7", 0, 1, ("_transactions", 0, [0])).status_code


@pytest.mark.parametrize(
    "epoch, partition, stage_number", [(-1, 0, 0), (1 << 70, 0, 0), (1, 0, 1 << 70), (1, 0, -1)]
)
def test_numbers_that_cannot_be_are_refused(
    http: httpx.Client, new_topic: Callable[..., str], epoch: int, partition: int, stage_number: int
) -> None:
    topic = new_topic(1)
    begin(http, "s8")
    answer = commit(http, "s8", 0, epoch, (topic, partition, [stage_number]))
    assert answer.status_code in (400, 422), answer.text


def test_the_number_of_a_batch_is_one_that_json_can_say(http: httpx.Client) -> None:
    """A larger one would be committed, and then read as another by clients with 53 bits."""
    epoch = begin(http, "s-large")
    for answer in (
        commit(http, "s-large", 2**53, epoch),
        stage(http, "s-large", 2**53, "any", 0, "1", epoch=epoch),
        http.post(f"/v1/sinks/s-large/batches/{2**53}/prepared", json={}),
    ):
        problem(answer, 422, "invalid", field="number", value=str(2**53), limit=2**53 - 1)
    assert "applied" == commit(http, "s-large", 2**53 - 1, epoch).json()["result"]


@pytest.mark.parametrize("path", ["/v1/sinks/s-twice", "/v1/producers"])
def test_a_beginning_with_a_key_is_one_however_often_it_is_sent(http: httpx.Client, path: str) -> None:
    """An answer that was lost costs no epoch; without a key each is one of its own."""

    def begun(key: str | None) -> int:
        headers = {"Idempotency-Key": key} if key else {}
        content = b'{"name": "twice"}' if path == "/v1/producers" else b""
        answer = http.post(path, headers=headers, content=content)
        assert answer.status_code in (200, 201), answer.text
        epoch = answer.json()["epoch"]
        assert isinstance(epoch, int)
        return epoch

    first = begun("a")
    assert [0, 0, 1, 1, 2, 3] == [begun(key) - first for key in ("a", "a", "b", "b", None, None)]
    refused = http.post(path, headers={"Idempotency-Key": "a b"}, content=b'{"name": "t"}')
    assert (422, "idempotency-key") == (refused.status_code, refused.json()["field"])


def test_a_sink_that_writes_once_is_begun_and_committed_as_any_other(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """Its epochs are higher than any that a kept one comes to; begun without, it is kept."""
    topic = new_topic(1)
    epochs = []
    for query in ("?once=true", "?once=true", "?once=false"):
        answer = http.post(f"/v1/sinks/s-once{query}")
        assert 200 == answer.status_code, answer.text
        epochs.append(answer.json()["epoch"])
    assert 1 << 31 < epochs[0] and [0, 1, 2] == [epoch - epochs[0] for epoch in epochs]
    assert epochs[2] == http.get("/v1/sinks/s-once").json()["epoch"]

    assert 201 == stage(http, "s-once", 0, topic, 0, "1", epoch=epochs[2]).status_code
    fenced = commit(http, "s-once", 0, epochs[0], (topic, 0, [0]))
    assert (409, "fenced", "not_applied") == (
        fenced.status_code,
        fenced.json()["code"],
        fenced.json()["outcome"],
    )
    assert "applied" == commit(http, "s-once", 0, epochs[2], (topic, 0, [0])).json()["result"]
    assert ["1"] == Partition(http, topic, 0).values()

    never = commit(http, "s-never", 0, epochs[0], (topic, 0, [0]))
    assert (404, "no_such_sink", "unknown", epochs[0]) == (
        never.status_code,
        never.json()["code"],
        never.json()["outcome"],
        never.json()["value"],
    )


@pytest.mark.parametrize(
    "query, field",
    [("once=yes", "once"), ("once=", "once"), ("once=1", "once"), ("once=true&epoch=1", "epoch")],
)
def test_a_sink_does_not_begin_by_what_makes_no_sense(http: httpx.Client, query: str, field: str) -> None:
    answer = http.post(f"/v1/sinks/s-wrong?{query}")
    assert (422, field) == (answer.status_code, answer.json()["field"]), answer.text
    assert 404 == http.get("/v1/sinks/s-wrong").status_code


def test_sinks_are_listed_by_name_page_by_page(http: httpx.Client) -> None:
    """All that begin with a prefix, and nothing that is no sink, as the names of producers."""
    names = [f"s-listed-{number}" for number in range(5)]
    for name in names:
        begin(http, name)
    http.post("/v1/producers", json={"name": "s-listed-producer"})
    answer = http.get("/v1/sinks", params={"prefix": "s-listed-", "limit": 3})
    assert names[:3] == [each["sink"] for each in answer.json()["sinks"]]
    assert names[2] == answer.json()["next"]
    rest = http.get(answer.links["next"]["url"]).json()
    assert names[3:] == [each["sink"] for each in rest["sinks"]] and "next" not in rest
    assert http.get(f"/v1/sinks/{names[0]}").json() == answer.json()["sinks"][0]
    problem(http.get("/v1/sinks?limit=1001"), 422, "invalid", field="limit", value=1001)


def test_a_sink_that_is_deleted_is_gone_with_what_it_staged(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """What it committed stays; its driver is refused; begun anew it counts from the beginning."""
    topic = new_topic(2)
    epoch = begin(http, "s-deleted")
    for partition in (0, 1):
        stage(http, "s-deleted", 0, topic, partition, "1", epoch=epoch)
    assert 200 == commit(http, "s-deleted", 0, epoch, (topic, 0, [0]), (topic, 1, [0])).status_code
    stage(http, "s-deleted", 1, topic, 0, "2", epoch=epoch)

    key = {"Idempotency-Key": "deletion"}
    assert [204, 204] == [http.delete("/v1/sinks/s-deleted", headers=key).status_code for _ in range(2)]
    problem(http.delete("/v1/sinks/s-deleted"), 404, "no_such_sink")
    problem(http.get("/v1/sinks/s-deleted"), 404, "no_such_sink")
    problem(commit(http, "s-deleted", 1, epoch, (topic, 0, [0])), 409, "fenced")
    assert ["1"] == Partition(http, topic, 0).values()

    newer = begin(http, "s-deleted")
    assert epoch < newer and http.get("/v1/sinks/s-deleted").json()["committed"] is None
    problem(commit(http, "s-deleted", 0, newer, (topic, 0, [0])), 409, "no_stage")
    stage(http, "s-deleted", 0, topic, 0, "3", epoch=newer)
    assert "applied" == commit(http, "s-deleted", 0, newer, (topic, 0, [0])).json()["result"]
    assert ["1", "3"] == Partition(http, topic, 0).values()


def test_stages_may_be_prepared_before_a_commit_that_could_not_name_them_all(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """It says how many; another number of them, or none that are prepared, commits nothing."""
    topic = new_topic(2)
    epoch = begin(http, "s-prepares")
    for number in range(3):
        stage(http, "s-prepares", 0, topic, 0, str(number), epoch=epoch, stage=number)
    stage(http, "s-prepares", 0, topic, 1, "3", epoch=epoch)
    body = {"epoch": epoch, "topic": topic, "partition": 0, "stages": [0, 2]}

    def put(count: int) -> httpx.Response:
        parts = [
            {"topic": topic, "partition": 0, "prepared": count},
            {"topic": topic, "partition": 1, "stages": [0]},
        ]
        return http.put("/v1/sinks/s-prepares/batches/0", json={"epoch": epoch, "parts": parts})

    problem(put(2), 409, "no_stage", field="prepared", value=2, limit=0)
    for _ in range(2):
        answer = http.post("/v1/sinks/s-prepares/batches/0/prepared", json=body)
        assert (200, 2) == (answer.status_code, answer.json()["prepared"])
    problem(put(3), 409, "no_stage", field="prepared", value=3, limit=2)
    problem(
        http.post("/v1/sinks/s-prepares/batches/0/prepared", json=body | {"stages": [0]}), 409, "in_progress"
    )
    problem(http.post("/v1/sinks/s-prepares/batches/0/prepared", json=body | {"stages": []}), 422, "invalid")
    assert [] == Partition(http, topic, 0).values()
    assert "applied" == put(2).json()["result"]
    assert "already" == put(2).json()["result"]
    assert ["0", "2"] == Partition(http, topic, 0).values()
    assert ["3"] == Partition(http, topic, 1).values()
    problem(put(0), 422, "invalid", field="parts.0.stages", value=0)


def test_nothing_is_prepared_under_an_epoch_that_nothing_is_committed_under(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """No newer epoch than one that never began would ever let it go, and it holds the log's start."""
    topic = new_topic(1)
    old = begin(http, "s-prepares-late")
    epoch = begin(http, "s-prepares-late")
    for sink, staged, code, status in (
        ("s-prepares-late", old, "fenced", 409),
        ("s-prepares-late", epoch + 1, "invalid", 422),
        ("s-prepares-never", 1, "invalid", 422),
        ("s-prepares-never", 2**31 + 7, "no_such_sink", 404),
    ):
        stage(http, sink, 0, topic, 0, "1", epoch=staged)
        body = {"epoch": staged, "topic": topic, "partition": 0, "stages": [0]}
        problem(http.post(f"/v1/sinks/{sink}/batches/0/prepared", json=body), status, code, field="epoch")


def test_what_a_partition_takes_of_a_batch_fits_into_one_request() -> None:
    """And so do all partitions that a batch may have, whatever the topics are called."""
    stages = {"epoch": 2**32 - 1, "topic": "t" * 200, "partition": 16_383, "stages": [2**53 - 1] * MAX_STAGES}
    part = {"topic": "t" * 200, "partition": 16_383, "prepared": MAX_STAGES}

    assert len(msgspec.json.encode(stages)) <= MAX_COMMIT_BYTES
    assert len(msgspec.json.encode({"epoch": 2**32 - 1, "parts": [part] * MAX_PARTS})) <= MAX_COMMIT_BYTES
