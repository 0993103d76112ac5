"""The driver's side of a stream against a real node, without Spark between: what is asked how often."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import laminar
from laminar.spark import cluster as clusters
from laminar.spark.offsets import decode
from laminar.spark.options import parse
from laminar.spark.plan import Range
from laminar.testing.cluster import get_json

types = pytest.importorskip("pyspark.sql.types")
pytest.importorskip("pyarrow")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows  # noqa: E402  # only with pyspark

from laminar.spark.stream_reader import StreamReader  # noqa: E402  # only with pyspark
from laminar.spark.watch import Watch  # noqa: E402  # behind what is skipped without pyspark

Topic = laminar.Topic[bytes]
ALL = ReadAllAvailable()


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


def cursor_positions(url: str, topic: Topic) -> dict[str, int]:
    """Where the cursor `job` stands."""
    found: dict[str, int] = get_json(f"{url}/v1/topics/{topic.name}/cursors/job")["positions"]
    return found


def read_values(reader: StreamReader, start: dict[str, int], end: dict[str, int]) -> list[int]:
    return [
        int(value)
        for partition in reader.partitions(start, end)
        for batch in reader.read(partition)
        for value in batch.column(0).to_pylist()
    ]


def test_the_first_offset_is_the_same_however_often_it_is_asked_for(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Twice in batch 0, and by another process after a restart; what it becomes has no records before it."""
    fill(topic, 10)
    one, other = reader(), reader()
    first = json.dumps(one.initialOffset())
    pinned = one.latestOffset(json.loads(first), ALL)
    fill(topic, 10)

    assert first == json.dumps(one.initialOffset()) == json.dumps(other.initialOffset())
    assert {f"{topic.name}:0": 10, f"{topic.name}:1": 0, f"{topic.name}:2": 0, "v": 1} == pinned
    assert [] == other.partitions(json.loads(first), pinned)


def test_without_news_the_offset_is_the_very_same_text(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Whatever the journal holds, also what another release added: any other text would be an empty batch."""
    fill(topic, 3)
    one = reader(pollTimeoutMs="10")
    start = {**one.latestOffset(one.initialOffset(), ALL), "hint": "kept"}

    assert json.dumps(start) == json.dumps(one.latestOffset(start, ALL))


def test_news_end_the_wait(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """A record that comes while the driver waits is in the next batch at once, long before the timeout."""
    one = reader(pollTimeoutMs="20000")
    start = one.latestOffset(one.initialOffset(), ALL)
    appending = threading.Timer(0.3, fill, (topic, 1))
    appending.start()
    begin = time.monotonic()

    found = one.latestOffset(start, ALL)

    appending.join()
    assert 1 == found[f"{topic.name}:0"]
    assert time.monotonic() - begin < 5


def test_an_idle_query_asks_rarely(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """Spark asks a hundred times a second; the cluster hears of a long poll a partition, and no more."""
    one = reader(pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    one.latestOffset(start, ALL)
    (here,) = clusters._clusters.values()
    loads = here.session.balancer.loads
    asked_before = sum(load.requests for load in loads.values())

    for _ in range(100):
        assert start == one.latestOffset(start, ALL)
        one.reportLatestOffset()

    assert sum(load.requests for load in loads.values()) - asked_before <= 6


def test_a_batch_waits_for_its_least_size(topic: Topic, reader: Callable[..., StreamReader]) -> None:
    """minOffsetsPerTrigger holds a batch back, maxTriggerDelay lets it go; the first is not held."""
    one = reader(
        minOffsetsPerTrigger="10", maxTriggerDelay="1s", pollTimeoutMs="10", startingOffsets="earliest"
    )
    start = one.latestOffset(one.initialOffset(), ALL)
    fill(topic, 1)
    first = one.latestOffset(start, ALL)
    fill(topic, 5)
    held = one.latestOffset(first, ALL)
    fill(topic, 5)
    # Polls of the server and the clock, not sleeps, move this on.
    full = one.latestOffset(held, ALL)
    while full == held:
        full = one.latestOffset(held, ALL)

    assert first != start
    assert held == first
    assert 11 == full[f"{topic.name}:0"]


def test_ranges_are_complete_whatever_the_batches_in_the_log(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """Cut anywhere, joined again, it is all of the log, in order."""
    for count in (1, 7, 100, 1, 30):
        fill(topic, count)
    one = reader(startingOffsets="earliest")
    start = one.latestOffset(one.initialOffset(), ALL)
    found = []
    while (end := one.latestOffset(start, ReadMaxRows(9))) != start:
        found += read_values(one, start, end)
        start = end

    assert [int(record.value) for record in topic.read()] == found
    assert 139 == len(found)


def test_a_fetch_says_how_far_the_log_goes(
    topic: Topic, reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each carries the range's end: a replica that is behind it may not answer with what it has."""
    fill(topic, 50)
    one = reader(startingOffsets="earliest")
    start = one.latestOffset(one.initialOffset(), ALL)
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
    start = one.latestOffset(one.initialOffset(), ALL)
    end = one.latestOffset(start, ALL)

    assert 5 == end[f"{topic.name}:0"]
    assert end is one.latestOffset(end, ALL)


def test_a_cursor_shows_how_far_a_query_has_come(
    topic: Topic, reader: Callable[..., StreamReader], url: str
) -> None:
    """What Spark goes on from is committed, so it is written; at the latest when all is read."""
    fill(topic, 10)
    one = reader(startingOffsets="earliest", cursor="job", pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    written = []
    while (end := one.latestOffset(start, ReadMaxRows(4))) != start:
        written.append(cursor_positions(url, topic))
        start = end

    assert {"0": 0, "1": 0, "2": 0} == written[0]
    assert {"0": 10, "1": 0, "2": 0} == cursor_positions(url, topic)


def test_a_cursor_that_belongs_to_others_is_a_warning(
    topic: Topic, reader: Callable[..., StreamReader], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The query goes on: its checkpoint is what counts."""
    fill(topic, 10)
    body = json.dumps({"positions": {"0": 3}, "owner": "them"}).encode()
    request = urllib.request.Request(f"{url}/v1/topics/{topic.name}/cursors/job", data=body, method="PUT")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=10).close()
    one = reader(startingOffsets="earliest", cursor="job")
    start = one.latestOffset(one.initialOffset(), ALL)

    assert 10 == one.latestOffset(start, ALL)[f"{topic.name}:0"]
    assert "cursor job was not moved" in caplog.text


def test_what_is_made_later_joins_without_a_restart(
    client: laminar.Client, reader: Callable[..., StreamReader], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that fits the pattern, whenever it is made, from its first record on."""
    monkeypatch.setattr(Watch, "LOOK_S", 0.05)
    client.create_topic("later-a", partitions=1, replicas=1).append(b"0")
    one = reader(subscribe=None, subscribePattern="later-.*", pollTimeoutMs="20")
    start = one.latestOffset(one.initialOffset(), ALL)
    client.create_topic("later-b", partitions=2, replicas=1).append(b"7", partition=1)
    end = start
    deadline = time.monotonic() + 30
    while end == start and time.monotonic() < deadline:
        end = one.latestOffset(start, ALL)

    assert {"later-a:0": 1, "v": 1} == start
    assert {"later-a:0": 1, "later-b:0": 0, "later-b:1": 1, "v": 1} == end
    assert [7] == read_values(one, start, end)


def test_a_successor_comes_after_the_last_record_of_what_it_replaced(
    topic: Topic, reader: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route changes under a running query: a key's records stay in order, from partition to partition."""
    fill(topic, 10)
    one = reader(startingOffsets="earliest", pollTimeoutMs="10")
    start = one.latestOffset(one.initialOffset(), ALL)
    (here,) = clusters._clusters.values()
    really = here.session.get_json
    old, new = {"from": 0, "to": 65536, "partition": 0}, {"from": 0, "to": 65536, "partition": 1}

    async def as_of_route_1(target: str, **how: Any) -> Any:
        """As if partition 1 had taken over from partition 0."""
        if target.endswith("/routes"):
            return {"routes": [{"version": 0, "ranges": [old]}, {"version": 1, "ranges": [new]}]}
        return {**(await really(target, **how)), "route": 1}

    monkeypatch.setattr(here.session, "get_json", as_of_route_1)
    fill(topic, 5, partition=1)
    batches = []
    while (end := one.latestOffset(start, ReadMaxRows(6))) != start:
        ranges = [Range(*each.value[0]) for each in one.partitions(start, end)]
        batches.append([(each.partition, len(each)) for each in ranges])
        start = end

    assert [[(0, 6)], [(0, 4)], [(1, 5)]] == batches


def test_a_log_that_ends_before_what_was_read_is_a_loss(
    topic: Topic, reader: Callable[..., StreamReader]
) -> None:
    """The topic was made anew: a query must not wait in silence until the offsets come again."""
    fill(topic, 5)
    one = reader(startingOffsets="earliest", pollTimeoutMs="10")
    end = one.latestOffset(one.latestOffset(one.initialOffset(), ALL), ALL)
    one.stop()
    behind = {**end, f"{topic.name}:0": 9}

    with pytest.raises(ValueError, match=r"0 ends at 5, was read to 9.*failOnDataLoss"):
        one.latestOffset(behind, ALL)
    assert {(topic.name, 0): 9} == {p: n for p, n in decode(behind).items() if n}
