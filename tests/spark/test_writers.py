"""The sink's writers against a real node, without Spark between: which batch is written, and which is not."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import laminar

types = pytest.importorskip("pyspark.sql.types")
pyarrow = pytest.importorskip("pyarrow")

from laminar.client.errors import Fenced, NotFound  # noqa: E402  # after what is skipped without pyspark
from laminar.client.net.session import Session  # noqa: E402  # after what is skipped without pyspark
from laminar.spark.write import writers  # noqa: E402  # only with pyspark
from laminar.spark.write.fingerprints import OtherBatch  # noqa: E402  # after what is skipped without pyspark
from laminar.spark.write.options import parse_sink  # noqa: E402  # after what is skipped without pyspark

Topic = laminar.Topic[bytes]
SCHEMA = types.StructType().add("value", types.BinaryType())


class Context:
    """What a task knows of itself."""

    task = 0
    run = "run 1"

    def partitionId(self) -> int:
        return self.task

    def getLocalProperty(self, name: str) -> str | None:
        return self.run if name == "spark.jobGroup.id" else None


class Query:
    """A query whose checkpoint is a folder; each batch has one task unless it is told otherwise."""

    def __init__(self, topic: Topic, url: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._journals = checkpoint / "offsets"
        self._journals.mkdir(parents=True)
        self._number = 0
        self.context = Context()
        self.sink = f"spark-{topic.name}"
        monkeypatch.setattr(writers, "_context", lambda: self.context)
        monkeypatch.setattr(writers, "_batch_of_task", lambda: (self.sink, self._number))
        # As Spark gives them.
        options = {"topic": topic.name, "laminar.endpoints": url, "checkpointlocation": str(checkpoint)}
        self._writer = writers.StreamWriter(parse_sink(options, streaming=True), SCHEMA)

    def run(self, number: int, *values: bytes, journal: str) -> None:
        """Batch `number` as Spark runs it, of what it has journaled."""
        self.commit(number, [self.task(number, 0, values)], journal=journal)

    def task(self, number: int, task: int, values: Sequence[bytes]) -> writers.StagedMessage:
        """One task of batch `number`."""
        self._number, self.context.task = number, task
        rows = pyarrow.record_batch({"value": pyarrow.array(values, pyarrow.binary())})
        # As it reaches the driver.
        message: writers.StagedMessage = pickle.loads(pickle.dumps(self._writer.write(iter([rows]))))
        return message

    def commit(self, number: int, messages: list[writers.StagedMessage], *, journal: str) -> None:
        """The driver's part."""
        (self._journals / str(number)).write_text(journal)
        self._writer.commit(list(messages), number)


@pytest.fixture
def query(
    topic: Topic, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_connection_is_left: None
) -> Iterator[Query]:
    yield Query(topic, url, tmp_path / "checkpoint", monkeypatch)


def values(topic: Topic) -> list[bytes]:
    return sorted(record.raw for record in topic.read())


def test_a_batch_that_is_run_again_is_written_once(
    topic: Topic, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the query is not deterministic: the journal says that it is the same batch."""
    query.run(0, b"a", b"b", journal="0 to 2")
    query.run(0, b"a", b"b", b"random", journal="0 to 2")
    query.run(1, b"c", journal="2 to 3")

    assert [b"a", b"b", b"c"] == values(topic)
    assert "batch 0 of sink" in caplog.text
    assert "its 3 records are not written again" in caplog.text


def test_no_batch_of_a_checkpoint_that_was_put_back_is_taken_for_an_older_one(
    topic: Topic, query: Query
) -> None:
    """By one batch, with as many records; or by more. Nothing of it is written, and the query ends."""
    for number, value in enumerate((b"a", b"b", b"c")):
        query.run(number, value, journal=f"{number} to {number + 1}")

    with pytest.raises(OtherBatch, match=r"committed another batch 2, with 1 records"):
        query.run(2, b"d", journal="2 to 4")
    with pytest.raises(OtherBatch, match=r"batch 1 is below the last that sink .* has committed, 2"):
        query.run(1, b"d", journal="1 to 4")
    assert [b"a", b"b", b"c"] == values(topic)
    query.run(3, b"d", journal="3 to 4")
    assert [b"a", b"b", b"c", b"d"] == values(topic)


def test_a_query_whose_sink_was_deleted_ends_and_writes_nothing_twice(
    topic: Topic, query: Query, client: laminar.Client
) -> None:
    """It would not know what it has committed; the error says why."""
    query.run(0, b"a", journal="0 to 1")
    client.sink(f"spark-{topic.name}").delete()

    for number in (0, 1):
        with pytest.raises(NotFound, match="was deleted"):
            query.run(number, b"b", journal=f"{number} to {number + 1}")
    assert [b"a"] == values(topic)


LARGE = [b"%06d" % number + b"." * 2_000 for number in range(100)]


def test_small_tasks_ask_the_cluster_nothing_and_large_ones_stand_between_them(
    client: laminar.Client, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a run's second batch on. The rows are published in the order of the tasks, however these end."""
    topic = client.create_topic("small-and-large", partitions=1, replicas=1)
    query = Query(topic, url, tmp_path / "checkpoint", monkeypatch)
    query.run(0, b"first", journal="0 to 1")
    with monkeypatch.context() as patched:
        patched.setattr(Session, "call", None)
        small = [query.task(1, task, [b"task %d" % task]) for task in (4, 0, 1, 3)]
    assert all(each.held is not None and each.epoch is None for each in small)
    large = query.task(1, 2, LARGE)
    assert large.staged is not None and len(LARGE) == large.staged.records
    query.commit(1, [large, *small], journal="1 to 106")

    assert [b"first", b"task 0", b"task 1", *LARGE, b"task 3", b"task 4"] == [
        record.raw for record in topic.read()
    ]


def test_another_driver_between_two_batches_ends_the_query_and_nothing_of_its_batch_is_written(
    topic: Topic, query: Query, client: laminar.Client
) -> None:
    """The epoch after its own is taken. A new run of the query goes on."""
    query.run(0, b"a", journal="0 to 1")
    client.sink(query.sink).begin()
    with pytest.raises(Fenced, match="another driver uses this query's checkpoint"):
        query.run(1, b"b", journal="1 to 2")
    assert [b"a"] == values(topic)

    query.context.run = "run 2"
    query.run(1, b"b", journal="1 to 2")
    query.run(2, b"c", journal="2 to 3")
    assert [b"a", b"b", b"c"] == values(topic)


def test_a_driver_that_died_after_it_staged_held_rows_leaves_nothing_of_them(
    topic: Topic, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It staged and began the epoch, and did not commit: the next run commits the batch once."""
    query.run(0, b"a", journal="0 to 1")

    class Died(Exception):
        pass

    async def die(*_: object, **__: object) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr("laminar.client.transact.sinks.Sink.commit", die)
        with pytest.raises(Died):
            query.run(1, b"b", journal="1 to 2")
    assert [b"a"] == values(topic)
    query.context.run = "run 2"
    query.run(1, b"b", journal="1 to 2")
    assert [b"a", b"b"] == values(topic)


def test_a_batch_without_rows_and_one_that_was_committed_before_do_not_stop_the_next(
    topic: Topic, query: Query
) -> None:
    """The driver knows the epoch only of the batch just before; else it asks."""
    query.run(0, b"a", journal="0 to 1")
    query.run(1, journal="1 to 1")
    query.run(2, b"b", journal="1 to 2")
    query.context.run = "run 2"
    query.run(2, b"b", journal="1 to 2")
    query.run(3, b"c", journal="2 to 3")

    assert [b"a", b"b", b"c"] == values(topic)


@pytest.mark.parametrize("committed", [False, True])
def test_a_write_that_spark_aborts_is_over_and_what_it_committed_stays(
    topic: Topic, url: str, client: laminar.Client, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Its sink is begun again: otherwise its stages would be kept for its driver for a day."""
    monkeypatch.setattr(writers, "_context", Context)
    options = {"topic": topic.name, "laminar.endpoints": url}
    writer = writers.BatchWriter(parse_sink(options, streaming=False), SCHEMA)
    rows = pyarrow.record_batch({"value": pyarrow.array([b"a"], pyarrow.binary())})
    message = writer.write(iter([rows]))
    if committed:
        writer.commit([message])
    writer.abort([message])

    assert message.epoch is not None
    assert client.sink(message.sink).describe().epoch == message.epoch + 1
    assert values(topic) == ([b"a"] if committed else [])
