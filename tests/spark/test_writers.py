"""The sink's writers against a real node, without Spark between: which batch is written, and which is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import laminar

types = pytest.importorskip("pyspark.sql.types")
pyarrow = pytest.importorskip("pyarrow")

from laminar.client.errors import NotFound  # noqa: E402  # after what is skipped without pyspark
from laminar.spark.write import writers  # noqa: E402  # only with pyspark
from laminar.spark.write.fingerprints import OtherBatch  # noqa: E402  # after what is skipped without pyspark
from laminar.spark.write.options import parse_sink  # noqa: E402  # after what is skipped without pyspark

Topic = laminar.Topic[bytes]
SCHEMA = types.StructType().add("value", types.BinaryType())


class Context:
    """What a task knows of itself."""

    def partitionId(self) -> int:
        return 0


class Query:
    """A query of one task a batch, whose checkpoint is a folder."""

    def __init__(self, topic: Topic, url: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._journals = checkpoint / "offsets"
        self._journals.mkdir(parents=True)
        self._number = 0
        monkeypatch.setattr(writers, "_context", Context)
        monkeypatch.setattr(writers, "_batch_of_task", lambda: (f"spark-{topic.name}", self._number))
        # As Spark gives them.
        options = {"topic": topic.name, "laminar.endpoints": url, "checkpointlocation": str(checkpoint)}
        self._writer = writers.StreamWriter(parse_sink(options, streaming=True), SCHEMA)

    def run(self, number: int, *values: bytes, journal: str) -> None:
        """Batch `number` as Spark runs it, of what it has journaled."""
        self._number = number
        (self._journals / str(number)).write_text(journal)
        rows = pyarrow.record_batch({"value": pyarrow.array(values, pyarrow.binary())})
        self._writer.commit([self._writer.write(iter([rows]))], number)


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

    assert isinstance(message, writers.StagedMessage)
    assert client.sink(message.sink).describe().epoch == message.epoch + 1
    assert values(topic) == ([b"a"] if committed else [])
