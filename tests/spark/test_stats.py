"""Stats: what the job tells of a topic, against plain Python over the same records; and its picture."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import laminar
from laminar.client.errors import NotFound
from laminar.spark.pipelines.buckets import MOST, WIDTHS_MS, grid_of
from laminar.spark.pipelines.session import cluster_options
from laminar.spark.pipelines.stats_values import Stats

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 3_000
PARTITIONS = 10
START_MS = 1_700_000_000_000
STRAYS = (0, 4_000_000_000_000)
SHORT = 7


@dataclass(frozen=True)
class Filled:
    """A topic's records as a client reads them, and what the job told of them."""

    records: Sequence[laminar.Record[bytes]]
    told: Stats


def fill(topic: laminar.Topic[bytes]) -> None:
    """Few keys with many records, many keys with one, some in two partitions; sizes from 0 to 20,000."""
    with topic.producer() as producer:
        for number in range(RECORDS):
            # Key 1 has half of the records, key 2 a sixth, key n one of n * (n + 1).
            key = None if number % 11 == 0 else b"key %d" % (RECORDS // (number + 1))
            if number % 11 == 1:
                key = b"hot $x^2$ \n\xff"
            producer.send(
                bytes(number % 120 if number % 5 else (number % 50) ** 2 * 8),
                key,
                tag=None if number % 3 else f"tag {number % 4}",
                timestamp_ms=START_MS + number * 1_700,
                partition=number % 2 if number % 100 == 1 else None,
            )
        for time_ms in STRAYS:
            producer.send(b"stray", b"stray", timestamp_ms=time_ms)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, client: laminar.Client, url: str) -> Filled:
    from laminar.spark.pipelines.stats import stats

    topic = client.create_topic("stats-filled", partitions=PARTITIONS, replicas=1)
    fill(topic)
    return Filled(list(topic.read()), stats(spark, cluster_options(url), topic.name, top=SHORT))


def bytes_of(record: laminar.Record[bytes]) -> int:
    return len(record.key or b"") + len(record.raw)


def at_share(numbers: Sequence[int], share: float) -> int:
    return sorted(numbers)[math.ceil(share * len(numbers)) - 1]


def test_sizes_are_those_of_the_records(filled: Filled) -> None:
    """Sums and extremes exactly; percentiles within 1.6 %, and exactly where they are below 128."""
    records, told = filled.records, filled.told
    for sizes, found in (
        ([len(each.raw) for each in records], told.values),
        ([len(each.key) for each in records if each.key is not None], told.key_sizes),
    ):
        assert (len(sizes), sum(sizes), min(sizes), max(sizes)) == (
            *(found.count, found.total, found.min, found.max),
        )
        assert pytest.approx(sum(sizes) / len(sizes)) == found.mean
        for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
            exact = at_share(sizes, share)
            assert pytest.approx(exact, rel=0 if exact < 128 else 0.016) == value
        lengths = Counter(size.bit_length() for size in sizes)
        assert {(1 << n) >> 1: count for n, count in lengths.items()} == {
            each.low: each.count for each in found.histogram if each.count
        }
    assert sum(map(bytes_of, records)) == told.bytes


def test_keys_are_counted_from_the_most_frequent_to_the_last(filled: Filled) -> None:
    """The first of them by name, ranks in powers of two; where partitions differ that is told."""
    keyed = [(each.key, each) for each in filled.records if each.key is not None]
    of_key: dict[bytes, list[laminar.Record[bytes]]] = {}
    for key, record in keyed:
        of_key.setdefault(key, []).append(record)
    homes = {key: {record.partition for record in records} for key, records in of_key.items()}
    ranked = sorted(map(len, of_key.values()), reverse=True)
    told = filled.told.keys

    assert (len(of_key), len(filled.records) - len(keyed)) == (told.distinct, told.keyless_records)
    assert sum(len(each) > 1 for each in homes.values()) == told.in_several_partitions > 0
    assert [
        (
            key.decode(errors="backslashreplace"),
            len(of_key[key]),
            sum(map(bytes_of, of_key[key])),
            min(homes[key]) if len(homes[key]) == 1 else None,
            min(record.timestamp for record in of_key[key]),
        )
        for key in sorted(of_key, key=lambda key: (-len(of_key[key]), key))[:SHORT]
    ] == [(each.key, each.records, each.bytes, each.partition, each.first_ms) for each in told.top]
    assert [2**n for n in range(len(told.ranks) - 1)] + [len(of_key)] == [each.rank for each in told.ranks]
    for each in told.ranks:
        exact = each.rank <= SHORT or ranked[each.rank - 1] < 128
        assert pytest.approx(ranked[each.rank - 1], rel=0 if exact else 0.016) == each.records
        assert pytest.approx(sum(ranked[: each.rank]) / len(keyed), rel=0.016) == each.share
    assert math.ceil(len(of_key) / 100) == told.top_percent_keys
    assert pytest.approx(sum(ranked[: told.top_percent_keys]) / len(keyed)) == told.top_percent_share


def test_partitions_and_times_add_up(filled: Filled) -> None:
    """Each record in its partition and its step of time; strays are outside of the steps, and told."""
    records, told = filled.records, filled.told
    rates = told.rates
    assert rates is not None
    by_partition = Counter(each.partition for each in records)
    since, width = rates.since_ms, rates.width_ms
    wanted = Counter(
        (each.partition, (each.timestamp - since) // width)
        for each in records
        if each.timestamp not in STRAYS
    )
    weights: Counter[int] = Counter()
    for each in records:
        weights[each.partition] += bytes_of(each)

    assert (len(records), *STRAYS) == (told.records, told.first_ms, told.last_ms)
    assert list(range(PARTITIONS)) == [each.partition for each in told.partitions]
    assert [by_partition[n] for n in range(PARTITIONS)] == [each.records for each in told.partitions]
    assert [weights[n] for n in range(PARTITIONS)] == [each.bytes for each in told.partitions]
    assert told.largest_over_mean == pytest.approx(max(by_partition.values()) * PARTITIONS / len(records))
    assert (1, 1) == (rates.before, rates.after)
    assert wanted == {
        (series.partition, bucket): count
        for series in rates.partitions
        for bucket, count in enumerate(series.records)
        if count
    }
    assert pytest.approx(RECORDS * 1000 / (rates.buckets * width)) == rates.mean_per_s
    assert pytest.approx(max(rates.total("records")) * 1000 / width) == rates.peak_per_s


def test_tags_are_counted(filled: Filled) -> None:
    """And the records without one."""
    tags = Counter(each.tag for each in filled.records)
    without = tags.pop(None)

    assert (len(tags), without) == (filled.told.tags.distinct, filled.told.tags.untagged_records)
    assert sorted(tags.items(), key=lambda each: (-each[1], each[0] or "")) == [
        (each.tag, each.records) for each in filled.told.tags.top
    ]


def test_a_topic_of_one_record_and_one_of_none(
    spark: SparkSession, url: str, topic: laminar.Topic[bytes]
) -> None:
    """Where there is nothing to divide there is None; a topic that is not there is an error."""
    from laminar.spark.pipelines.stats import stats
    from laminar.spark.pipelines.stats_picture import figure_of, findings

    cluster = cluster_options(url)
    none = stats(spark, cluster, topic.name)
    topic.append_stream([b"in", b"parts"], part_bytes=4)
    one = stats(spark, cluster, topic.name)

    assert (0, 0, None, None) == (none.records, none.values.count, none.rates, none.largest_over_mean)
    assert [0, 0, 0] == [each.records for each in none.partitions]
    # A value that is stored apart does not pass through Spark, so its size is not known.
    assert (1, 0, 1, 0, 3.0) == (
        *(one.records, one.values.count, one.values.absent, one.bytes, one.largest_over_mean),
    )
    assert (0, 1, None, []) == (
        *(one.keys.distinct, one.keys.keyless_records, one.keys.top_percent_share, one.keys.ranks),
    )
    assert one.rates is not None
    assert (None, None, [1]) == (one.rates.mean_per_s, one.rates.peak_per_s, one.rates.total("records"))
    assert "there are no records" == findings(none)
    for each in (none, one):
        figure_of(each).canvas.draw()
    with pytest.raises(NotFound):
        stats(spark, cluster, f"{topic.name}-not-there")


def test_the_picture_shows_the_values(filled: Filled, tmp_path: Path) -> None:
    """Areas are the rates of the partitions, bars their shares; keys stand there by name."""
    pytest.importorskip("matplotlib")
    from laminar.spark.pipelines.stats_picture import COLORS, OTHERS, colors_of, draw, figure_of

    told = filled.told
    assert told.rates is not None
    figure: Any = figure_of(told)
    rates, weights, sizes, partitions, keys, ranks, shares = figure.axes
    largest = sorted(told.partitions, key=lambda each: (-each.records, each.partition))

    named = len(COLORS) - 1
    legend = [each.get_text() for each in rates.get_legend().get_texts()]
    areas = [f"partition {each.partition}" for each in largest[:named]]
    assert {*areas, f"{PARTITIONS - named} others"} == set(legend)
    # In records per minute or second, whatever the axis says: its top edge is all partitions together.
    tops = [max(y for _, y in each.get_paths()[0].vertices) for each in rates.collections]
    totals = told.rates.total("records")
    scale = tops[-1] / max(totals)
    first = next(each for each in told.rates.partitions if each.partition == largest[0].partition)
    assert tops[0] == pytest.approx(max(first.records) * scale)
    assert round(scale * told.rates.width_ms / 1000) in (1, 60, 3_600)
    assert len(weights.collections) == 1
    heights = [bar.get_height() for bar in sizes.patches]
    assert [each.count / told.values.count * 100 for each in told.values.histogram] == pytest.approx(heights)
    assert [each.share * 100 for each in told.partitions] == pytest.approx(
        [bar.get_height() for bar in partitions.patches]
    )
    assert len({bar.get_facecolor() for bar in partitions.patches}) == named + 1
    assert [each.share * 100 for each in told.keys.top] == pytest.approx(
        [bar.get_width() for bar in keys.patches]
    )
    # What would be a formula, a line's end or a broken byte is text in a picture.
    assert [r"hot $x^2$ \n\xff"] == [text for text in map(_text, keys.get_yticklabels()) if "hot" in text]
    assert {each.rank: each.records for each in told.keys.ranks}.items() <= dict(
        zip(*ranks.lines[0].get_data(), strict=True)
    ).items()
    assert 100 == pytest.approx(shares.lines[0].get_ydata()[-1])
    assert OTHERS in colors_of(told).values()

    draw(told, tmp_path / "new" / "stats.png")

    png = (tmp_path / "new" / "stats.png").read_bytes()
    assert b"\x89PNG\r\n\x1a\n" == png[:8] and len(png) > 50_000


def _text(label: Any) -> str:
    return str(label.get_text())


def test_it_is_told_in_words_and_as_json(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has all of it; the tables have the totals and the hottest key."""
    from laminar.cli.commands.pipeline_stats import _show
    from laminar.cli.output import show_json

    show_json(filled.told)
    assert filled.told == msgspec.json.decode(capsys.readouterr().out, type=Stats)
    _show(filled.told)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["records", f"{RECORDS + 2:,}"] for line in lines)
    assert any(line.startswith("far off") and "1 records before" in line for line in lines)
    assert any(line.startswith(r"hot $x^2$ \n\xff") for line in lines)


def test_classes_rise_with_their_numbers_and_are_narrow(spark: SparkSession) -> None:
    """Also next to powers of two, where a logarithm could err."""
    from laminar.spark.pipelines.size_histogram import class_of

    numbers = sorted({max(0, (1 << n) + d) for n in range(45) for d in (-1, 0, 1)} | {*range(1_000)})
    rows = spark.createDataFrame([(n,) for n in numbers], "n bigint")
    found = {row[0]: row[1] for row in rows.select("n", class_of(rows.n)).collect()}

    assert list(range(128)) == [found[n] for n in range(128)]
    classes = [found[n] for n in numbers]
    assert sorted(classes) == classes
    for low in range(128, 1_000):
        assert (found[low] == found[low - 1]) == (low % (1 << (low.bit_length() - 7)) != 0)
    for n in range(7, 45):
        assert found[(1 << n) - 1] + 1 == found[1 << n] == 64 * (n - 6) + 64


@pytest.mark.parametrize("lasted_ms", [0, 1, 11_999, 12_000, 86_400_000, 10**12, 10**15, 10**17])
@pytest.mark.parametrize("first_ms", [-5, 0, START_MS])
def test_steps_of_time_hold_the_range_and_are_few(first_ms: int, lasted_ms: int) -> None:
    """No more than a picture can show, and as fine as they can be."""
    from laminar.spark.pipelines.stats_picture import time_ticks

    grid = grid_of(first_ms, first_ms + lasted_ms)
    end_ms = grid.since_ms + grid.count * grid.width_ms

    assert grid.since_ms <= first_ms and first_ms + lasted_ms < end_ms
    assert 1 <= grid.count <= MOST
    finer = [width for width in WIDTHS_MS if width < grid.width_ms]
    assert not finer or lasted_ms // finer[-1] + 2 > MOST
    places, labels = time_ticks(grid.since_ms, end_ms)
    assert len(places) == len(labels) <= 12
    assert all(grid.since_ms <= place <= end_ms for place in places)


@pytest.mark.parametrize(
    ("plot", "installed", "said"),
    [
        ("out.png", False, "pip install 'laminar-mq[demo]'"),
        ("out.txt", True, ".png, .svg or .pdf"),
        (".png", True, ".png, .svg or .pdf"),
    ],
)
def test_what_can_not_be_drawn_is_said_before_spark_begins(
    plot: str,
    installed: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is missing, and how to get it."""
    from laminar.cli import run

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if installed or name != "matplotlib" else None
    )

    assert run(["pipeline", "stats", "flights", "--plot", plot]) in (1, 2)
    assert said in capsys.readouterr().err
