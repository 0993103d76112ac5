"""The driver's side of a stream against a real node, without Spark between: what is asked how often."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import laminar
from laminar.spark.read import cluster as clusters
from laminar.spark.read import progress_cursor
from laminar.spark.read.offsets import decode
from laminar.spark.read.options import parse
from laminar.spark.read.plan import Range
from laminar.testing.cluster import get_json

types = pytest.importorskip("pyspark.sql.types")
pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows  # noqa: E402  # only with pyspark

from laminar.spark.read.end_offsets import EndOffsetTracker  # noqa: E402  # after what is skipped without pyspark
from laminar.spark.read.stream_reader import StreamReader  # noqa: E402  # only with pyspark

Topic = laminar.Topic[bytes]
ALL = ReadAllAvailable()
PATIENCE_S = 60
"""Only a hang reaches it."""


@pytest.fixture
def reader(topic: Topic, url: str, no_connection_is_left: None) -> Iterator[Callable[..., StreamReader]]:
    """``reader(option=value, ...)``: a stream's reader of the test's topic."""
    made: list[StreamReader] = []

    def make(**options: str | None) -> StreamReader:
        named = {"laminar.endpoints": url, "subscribe": topic.name, **options}
        given = {name: value for name, value in named.items() if value is not None}
        schema = types.StructType().add("value", types.BinaryType())
        made.append(StreamReader(parse(given, streaming=True), schema))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def fill(topic: Topic, count: int, *, partition: int = 0) -> None:
    with topic.producer() as producer:
        for number in range(count):
            producer.send(b"%d" % number, partition=partition)


def cursor_positions(client: laminar.Client, topic: Topic) -> dict[str, int]:
    """Where the cursor `job` stands."""
    found: dict[str, int] = client.request_json("GET", f"/v1/topics/{topic.name}/cursors/job")["positions"]
    return found


def await_views(client: laminar.Client, topic: str) -> None:
    """Wait until each shard of the node has the topic's partitions as the catalog has them.

    A shard learns of a change a moment after the client that made it, and any shard may answer the source.
    """
    path = f"/v1/topics/{topic}/partitions"
    nodes = client.request_json("GET", "/v1/nodes")["nodes"]
    shards = [shard["url"] for node in nodes for shard in node["shards"]]

    def known(document: Any) -> Any:
        return document and (document["route"], [each["id"] for each in document["partitions"]])

    try:
        now = known(client.request_json("GET", f"{path}?read=leader"))
    except laminar.NotFound:
        now = None
    deadline = time.monotonic() + PATIENCE_S
    while any(known(get_json(f"{url}{path}")) != now for url in shards):
        assert time.monotonic() < deadline, f"a shard does not learn what became of {topic}"
        time.sleep(0.01)


def read_values(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    return [
        int(value)
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for value in batch.column(0).to_pylist()
    ]


def test_the_first_offset_is_the_same_however_often_it_is_asked_for(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Twice in batch 0, and by another process after a restart: the first end says where it had been."""
    fill(topic, 10)
    one, other = reader(), reader()
    first = json.dumps(one.initialOffset())
    pinned = one.latestOffset(json.loads(first), ALL)
    fill(topic, 10)

    assert first == json.dumps(one.initialOffset()) == json.dumps(other.initialOffset())
    at = {(topic.name, 0): 10, (topic.name, 1): 0, (topic.name, 2): 0}
    assert (at, at) == (decode(pinned).positions, decode(pinned).since)
    assert [] == other.partitions(json.loads(first), pinned)


def test_the_first_batch_has_records(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """From the start on to its limit; a restart within it begins at the same place, whatever was trimmed."""
    fill(topic, 10)
    one, other = reader(startingOffsets="earliest"), reader(startingOffsets="earliest")
    first = one.initialOffset()
    end = one.latestOffset(first, ReadMaxRows(4))

    assert [0, 1, 2, 3] == read_values(one, first, end) == read_values(other, first, end)
    assert list(range(4, 10)) == read_values(one, end, one.latestOffset(end, ALL))


def test_a_start_past_the_end_is_refused(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """By whatever trigger, and with the option, the partition and its end; the end itself is a start."""
    fill(topic, 10)
    given = {"0": 11, "1": -2, "2": 0}
    one = reader(startingOffsets=json.dumps({topic.name: given}))
    with pytest.raises(ValueError, match=f"option startingOffsets: {topic.name}:0 ends at 10, before 11"):
        one.latestOffset(one.initialOffset(), ALL)
    one.prepareForTriggerAvailableNow()
    with pytest.raises(ValueError, match=f"option startingOffsets: {topic.name}:0 ends at 10, before 11"):
        one.latestOffset(one.initialOffset(), ALL)

    at_the_end = reader(startingOffsets=json.dumps({topic.name: {**given, "0": 10}}))
    assert 10 == at_the_end.latestOffset(at_the_end.initialOffset(), ALL)[f"{topic.name}:0"]


def test_without_news_the_offset_is_the_very_same_text(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Whatever the journal holds, also what another release added: any other text would be an empty batch."""
    fill(topic, 3)
    one = reader(pollTimeoutMs="10")
    start = {**one.latestOffset(one.initialOffset(), ALL), "hint": "kept"}

    assert json.dumps(start) == json.dumps(one.latestOffset(start, ALL))


def test_news_end_the_wait(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """A record that comes while the driver waits is in the next batch, and not when the timeout is over.

    That is longer than this test may take.
    """
    one = reader(pollTimeoutMs="3600000")
    start = one.latestOffset(one.initialOffset(), ALL)
    appending = threading.Timer(0.3, fill, (topic, 1))
    appending.start()

    found = one.latestOffset(start, ALL)
    while found == start:  # a poll was over before the record came
        found = one.latestOffset(start, ALL)

    appending.join()
    assert 1 == found[f"{topic.name}:0"]


def test_an_idle_query_asks_rarely(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """Spark asks a hundred times a second; the cluster hears of a long poll a partition, and no more."""
    one = reader(pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    one.latestOffset(start, ALL)
    (here,) = clusters._clusters.values()
    loads = here.session.balancer.loads
    asked_before = sum(load.requests for load in loads.values())
    begin_s = time.monotonic()

    for _ in range(100):
        assert start == one.latestOffset(start, ALL)
        one.reportLatestOffset()

    # Polls end, and partitions are looked up again, every few seconds, of which a slow machine has more.
    rounds = 1 + (time.monotonic() - begin_s) // EndOffsetTracker.REFRESH_S
    assert sum(load.requests for load in loads.values()) - asked_before <= 6 * rounds


def test_a_batch_waits_for_its_least_size(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """minOffsetsPerTrigger holds a batch back, maxTriggerDelay lets it go; the first is not held."""
    given = {"minOffsetsPerTrigger": "10", "pollTimeoutMs": "10", "startingOffsets": "earliest"}
    patient, other = (reader(maxTriggerDelay=delay, **given) for delay in ("1h", "100ms"))

    def batch_from(one: StreamReader, start: dict[str, Any]) -> dict[str, Any]:
        # Polls of the server and the clock, not sleeps, move this on.
        deadline = time.monotonic() + PATIENCE_S
        end = start
        while end == start and time.monotonic() < deadline:
            end = one.latestOffset(start, ALL)
        return end

    fill(topic, 1)
    first = patient.latestOffset(patient.initialOffset(), ALL)
    fill(topic, 5)
    held = patient.latestOffset(first, ALL)
    fill(topic, 5)
    full = batch_from(patient, held)
    begun = other.latestOffset(other.initialOffset(), ALL)
    fill(topic, 5)
    late = batch_from(other, begun)

    assert 1 == first[f"{topic.name}:0"]
    assert held == first
    assert 11 == full[f"{topic.name}:0"] == begun[f"{topic.name}:0"]
    assert 16 == late[f"{topic.name}:0"]


def test_ranges_are_complete_whatever_the_batches_in_the_log(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Cut anywhere, joined again, it is all of the log, in order."""
    for count in (1, 7, 100, 1, 30):
        fill(topic, count)
    one = reader(startingOffsets="earliest")
    start = one.initialOffset()
    found = []
    while (end := one.latestOffset(start, ReadMaxRows(9))) != start:
        found += read_values(one, start, end)
        start = end

    assert [int(record.value) for record in topic.read()] == found
    assert 139 == len(found)


def test_a_fetch_says_how_far_the_log_goes(
    topic: Topic, reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each carries the range's end: a replica that lags may not answer with what it has."""
    fill(topic, 50)
    one = reader(startingOffsets="earliest")
    start = one.initialOffset()
    end = one.latestOffset(start, ALL)
    (here,) = clusters._clusters.values()
    fetch = here.session.fetch
    said: list[int] = []

    def noting(*where: Any, **how: Any) -> Any:
        said.append(how["at_least"])
        return fetch(*where, **how)

    monkeypatch.setattr(here.session, "fetch", noting)

    assert list(range(50)) == read_values(one, start, end)
    assert {50} == set(said)


def test_available_now_stops_at_what_was_there(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """The target is what a majority confirmed at the begin; later records wait for the next run."""
    fill(topic, 5)
    one = reader(startingOffsets="earliest")
    one.prepareForTriggerAvailableNow()
    fill(topic, 5)
    end = one.latestOffset(one.initialOffset(), ALL)

    assert 5 == end[f"{topic.name}:0"]
    assert end is one.latestOffset(end, ALL)


def test_a_cursor_shows_how_far_a_query_has_come(
    topic: Topic,
    client: laminar.Client,
    reader: Callable[..., StreamReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Spark goes on from is committed, so it is written; at the latest when all is read."""
    # A write that takes longer is left to the next batch.
    monkeypatch.setattr(progress_cursor, "TIMEOUT_S", PATIENCE_S)
    fill(topic, 10)
    one = reader(cursor="job", pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    fill(topic, 10)
    written = []
    while (end := one.latestOffset(start, ReadMaxRows(4))) != start:
        written.append(cursor_positions(client, topic))
        start = end

    assert {"0": 10, "1": 0, "2": 0} == written[0]
    assert {"0": 20, "1": 0, "2": 0} == cursor_positions(client, topic)


def test_a_cursor_that_belongs_to_others_is_a_warning(
    topic: Topic,
    client: laminar.Client,
    reader: Callable[..., StreamReader],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The query goes on: its checkpoint is what counts."""
    fill(topic, 10)
    owned = {"positions": {"0": 3}, "owner": "them"}
    client.request_json("PUT", f"/v1/topics/{topic.name}/cursors/job", owned)
    one = reader(startingOffsets="earliest", cursor="job")
    start = one.latestOffset(one.initialOffset(), ALL)

    assert 10 == one.latestOffset(start, ALL)[f"{topic.name}:0"]
    assert "cursor job was not moved" in caplog.text


def test_what_is_made_later_joins_without_a_restart(
    client: laminar.Client, reader: Callable[..., StreamReader], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that fits the pattern, whenever it is made, from its first record on."""
    monkeypatch.setattr(EndOffsetTracker, "REFRESH_S", 0.05)
    client.create_topic("later-a", partitions=1, replicas=1).append(b"0")
    one = reader(subscribe=None, subscribePattern="later-.*", pollTimeoutMs="20")
    start = one.latestOffset(one.initialOffset(), ALL)
    client.create_topic("later-b", partitions=2, replicas=1).append(b"7", partition=1)
    end = start
    deadline = time.monotonic() + 120
    while end == start and time.monotonic() < deadline:
        end = one.latestOffset(start, ALL)

    assert {("later-a", 0): 1} == decode(start).positions
    assert {("later-a", 0): 1, ("later-b", 0): 0, ("later-b", 1): 1} == decode(end).positions
    assert [7] == read_values(one, start, end)


def fill_keys(topic: Topic, count: int) -> None:
    with topic.producer() as producer:
        for number in range(count):
            producer.send(b"%d" % number, b"key %d" % (number % 17))


def test_a_successor_comes_after_the_last_record_of_what_it_replaced(
    topic: Topic, client: laminar.Client, reader: Callable[..., StreamReader]
) -> None:
    """The route changes under a running query: a key's records stay in order, from partition to partition."""
    one = reader(pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    fill_keys(topic, 60)
    topic.split(0, at=9_000, wait=30)
    fill_keys(topic, 60)
    topic.merge([3, 4], wait=30)
    topic.move(1, wait=30)
    fill_keys(topic, 60)
    await_views(client, topic.name)
    ends = {number: ended for number, ended in topic.offsets().items() if number in (0, 1, 3, 4)}
    before = {3: [0], 4: [0], 5: [0, 3, 4], 6: [1]}
    read: Counter[int] = Counter()
    values: list[int] = []
    while (end := one.latestOffset(start, ReadMaxRows(7))) != start:
        ranges = [Range(*each.value[0]) for each in one.partitions(start, end)]
        for each in ranges:
            for number in before.get(each.partition, []):
                assert read[number] == ends[number], f"{each.partition} before the end of {number}"
        read.update({each.partition: len(each) for each in ranges})
        values += read_values(one, start, end)
        start = end

    assert sorted([*range(60)] * 3) == sorted(values)
    assert {5, 6} <= set(read)


def test_a_log_that_ends_before_what_was_read_is_a_loss(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """An operator accepted a loss: a query must not wait in silence until the offsets come again."""
    fill(topic, 5)
    one = reader(startingOffsets="earliest", pollTimeoutMs="10")
    end = one.latestOffset(one.latestOffset(one.initialOffset(), ALL), ALL)
    one.stop()
    beyond = {**end, f"{topic.name}:0": 9}

    with pytest.raises(ValueError, match=r"0 was read to 9 and ends at 5.*failOnDataLoss"):
        one.latestOffset(beyond, ALL)


def created_again(topic: Topic, client: laminar.Client, count: int) -> None:
    """The topic, deleted and made again, with so many records."""
    topic.delete()
    fill(client.create_topic(topic.name, partitions=3, replicas=1), count)
    await_views(client, topic.name)


def all_values(reader: StreamReader, start: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What the query's batches have from `start` until there is no more; and where that is."""
    found = []
    while (end := reader.latestOffset(start, ALL)) != start:
        found += read_values(reader, start, end)
        start = end
    return start, found


@pytest.mark.parametrize("count", [4, 15], ids=["fewer", "more"])
@pytest.mark.parametrize("trigger", ["default", "available now"])
def test_a_topic_created_again_is_a_loss(
    topic: Topic, client: laminar.Client, reader: Callable[..., StreamReader], count: int, trigger: str
) -> None:
    """After a restart, however many records the new one has: offsets of the old one mean nothing there."""
    fill(topic, 10)
    one = reader(startingOffsets="earliest", pollTimeoutMs="10")
    start, _ = all_values(one, one.initialOffset())
    created_again(topic, client, count)
    again = reader(startingOffsets="earliest", pollTimeoutMs="10")
    if trigger == "available now":
        again.prepareForTriggerAvailableNow()

    with pytest.raises(
        ValueError,
        match=rf"{topic.name}/0 was read to 10, .*again: the new one has {count} records.*failOn",
    ):
        again.latestOffset(start, ALL)


@pytest.mark.parametrize("trigger", ["default", "available now"])
def test_a_topic_created_again_is_read_from_its_start_if_losses_may_be(
    topic: Topic,
    client: laminar.Client,
    reader: Callable[..., StreamReader],
    trigger: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All its records, and a warning with counts; also by a query that was running when it happened."""
    fill(topic, 10)
    one = reader(startingOffsets="earliest", pollTimeoutMs="10", failOnDataLoss="false")
    start, _ = all_values(one, one.initialOffset())
    created_again(topic, client, 4)
    if trigger == "available now":
        one.prepareForTriggerAvailableNow()
        end, found = all_values(one, start)
    else:
        deadline = time.monotonic() + PATIENCE_S
        end = start
        while end == start and time.monotonic() < deadline:
            end = one.latestOffset(start, ALL)
        found = read_values(one, start, end)
        fill(client.topic(topic.name), 2)
        end, more = all_values(reader(pollTimeoutMs="10", failOnDataLoss="false"), end)
        assert [0, 1] == more

    assert [0, 1, 2, 3] == found
    assert f"{topic.name}/0 was read to 10, was deleted and created again" in caplog.text
    assert "the new one has 4 records" in caplog.text


def test_a_range_of_a_topic_created_again_is_not_read_from_the_new_one(
    topic: Topic, client: laminar.Client, reader: Callable[..., StreamReader]
) -> None:
    """Whatever the driver knew when it planned the tasks: they name the partition by its id."""
    fill(topic, 10)
    one, other = reader(startingOffsets="earliest"), reader(failOnDataLoss="false")
    first = one.initialOffset()
    end = one.latestOffset(first, ALL)
    [planned] = one.partitions(first, end)
    created_again(topic, client, 20)

    with pytest.raises(ValueError, match=rf"{topic.name}/0, 0 to 9: .*created again.*failOnDataLoss"):
        list(one.read(planned))
    assert [] == list(other.read(planned))
    with pytest.raises(ValueError, match=rf"{topic.name}/0, 0 to 9: deleted"):
        reader(startingOffsets="earliest").partitions(first, end)


def test_a_partition_that_is_gone_is_a_loss(
    client: laminar.Client, reader: Callable[..., StreamReader], caplog: pytest.LogCaptureFixture
) -> None:
    """A topic of a pattern that is deleted, whatever it held; or the query goes on with the others."""
    pattern: dict[str, str | None] = {"subscribe": None, "subscribePattern": "gone-.*", "pollTimeoutMs": "10"}
    topics = [client.create_topic(name, partitions=1, replicas=1) for name in ("gone-a", "gone-b")]
    for each in topics:
        fill(each, 3)
    one = reader(startingOffsets="earliest", **pattern)
    start, _ = all_values(one, one.initialOffset())
    fill(topics[0], 5)
    topics[0].delete()
    fill(topics[1], 1)
    await_views(client, "gone-a")

    with pytest.raises(ValueError, match=r"gone-a/0 was read to 3 and is deleted.*failOnDataLoss"):
        reader(**pattern).latestOffset(start, ALL)
    end, found = all_values(reader(failOnDataLoss="false", **pattern), start)
    assert [0] == found
    assert {("gone-b", 0): 4} == decode(end).positions
    assert "gone-a/0 was read to 3 and is deleted" in caplog.text


def test_a_deleted_topic_of_a_list_ends_the_query_or_is_left(
    topic: Topic,
    client: laminar.Client,
    reader: Callable[..., StreamReader],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a list with a name that never was is an error at the query's start, as a typing error would be."""
    fill(topic, 3)
    fill(client.create_topic("listed", partitions=1, replicas=1), 3)
    listed = {"subscribe": f"listed,{topic.name}", "pollTimeoutMs": "10"}
    one = reader(startingOffsets="earliest", **listed)
    start, _ = all_values(one, one.initialOffset())
    client.topic("listed").delete()
    fill(topic, 2)
    await_views(client, "listed")

    with pytest.raises(ValueError, match="listed/0 was read to 3 and is deleted"):
        reader(**listed).latestOffset(start, ALL)
    end, found = all_values(reader(failOnDataLoss="false", **listed), start)
    now = reader(failOnDataLoss="false", **listed)
    now.prepareForTriggerAvailableNow()
    assert ([0, 1], []) == (found, all_values(now, end)[1])
    assert "there is no topic 'listed'" in caplog.text
    with pytest.raises(laminar.NotFound, match="listed"):
        reader(**listed).latestOffset(end, ALL)
    with pytest.raises(laminar.NotFound, match="listed"):
        other = reader(failOnDataLoss="false", **listed)
        other.latestOffset(other.initialOffset(), ALL)


def test_a_topic_that_is_not_subscribed_any_more_was_read_to_its_end_or_is_a_loss(
    topic: Topic,
    client: laminar.Client,
    reader: Callable[..., StreamReader],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same checkpoint with other options: what was read whole is left without a word."""
    fill(client.create_topic("before", partitions=1, replicas=1), 3)
    one = reader(subscribe="before", startingOffsets="earliest", pollTimeoutMs="10")
    start, _ = all_values(one, one.initialOffset())
    fill(topic, 2)

    end, found = all_values(reader(pollTimeoutMs="10"), start)
    assert ([0, 1], {topic.name}) == (found, {name for name, _ in decode(end).positions})
    fill(client.topic("before"), 5)
    with pytest.raises(ValueError, match=r"before/0 was read to 3 and ends at 8, and the options no longer"):
        reader().latestOffset(start, ALL)
    assert [] == [record for record in caplog.records if record.name.startswith("laminar.spark")]
    assert [0, 1] == all_values(reader(failOnDataLoss="false", pollTimeoutMs="10"), start)[1]
    assert "before/0 was read to 3 and ends at 8" in caplog.text
