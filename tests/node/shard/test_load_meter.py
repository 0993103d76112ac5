"""What a shard measures of its partitions: gains of their counters per second, faded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.http.api.records import Records
from laminar.node.host.clock import Clock
from laminar.node.placement.load import HOTTEST, Load, PartitionLoad, hottest
from laminar.node.shard.load_meter import AT_ONCE, FADE_S, LoadMeter
from tests.node.alone import lone_partition


class Stepped(Clock):
    """A clock that a test moves."""

    now_ms = 0

    def monotonic_ms(self) -> int:
        return self.now_ms


async def test_a_rate_is_right_from_the_second_question_on_and_fades(tmp_path: Path) -> None:
    clock = Stepped()
    async with lone_partition(tmp_path) as partition:
        meter = LoadMeter("a", {("t", 0): partition}, clock=clock, disk_is_low=lambda: True)
        clock.now_ms += 10_000
        first = await meter.report()
        assert first.total == Load(stored_bytes=partition.log.size_bytes) and first.disk_is_low
        before = partition.log.size_bytes
        for _ in range(50):
            await partition.appends.append_records(Records([b"x" * 100]))
        read = await partition.reader.frames(0, max_bytes=1 << 20)
        written = partition.log.size_bytes - before
        assert written > 5000 and partition.leads
        clock.now_ms += 10_000
        (only,) = (await meter.report()).partitions
        assert (only.partition, only.leads) == ("t/0", True)
        # Of the two questions' 20 s, the first 10 have faded a little.
        seconds = 10 * 2.718281828 ** (-10 / FADE_S) + 10
        load = only.load
        assert load.appended_bytes_per_s == load.written_bytes_per_s == pytest.approx(written / seconds)
        assert load.read_bytes_per_s == pytest.approx(sum(map(len, read)) / seconds)
        assert load.requests_per_s == pytest.approx(51 / seconds)
        assert load.stored_bytes == partition.log.size_bytes

        clock.now_ms += int(5 * FADE_S * 1000)
        faded = (await meter.report()).total
        assert 0 < faded.written_bytes_per_s < load.written_bytes_per_s / 100


async def test_another_partition_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    clock = Stepped()
    async with lone_partition(tmp_path / "one") as one, lone_partition(tmp_path / "two") as two:
        held = {("t", 0): one}
        meter = LoadMeter("a", held, clock=clock, disk_is_low=lambda: False)
        await meter.report()
        for _ in range(20):
            await two.appends.append_records(Records([b"x" * 100]))
        held["t", 0] = two
        clock.now_ms += 10_000
        assert (await meter.report()).total == Load(stored_bytes=two.log.size_bytes)


async def test_a_shard_names_its_hottest_partitions_and_counts_all(tmp_path: Path) -> None:
    """Those with most bytes written come first, whether they are led or not; the rest is in the total."""
    clock = Stepped()
    parts: dict[tuple[str, int], Any] = {
        ("t", number): SimpleNamespace(
            log=SimpleNamespace(size_bytes=1000),
            reader=SimpleNamespace(fetched_bytes=0, fetches=0),
            appends=SimpleNamespace(appended_batches=0),
            leads=number % 2 == 0,
        )
        for number in range(AT_ONCE + 100)
    }
    meter = LoadMeter("a", parts, clock=clock, disk_is_low=lambda: False)
    await meter.report()
    for number in range(100):
        parts["t", number].log.size_bytes += 10_000_000 - number
        parts["t", 200 + number].reader.fetched_bytes += 10 * (number == 0)
    clock.now_ms += 10_000
    report = await meter.report()
    assert len(report.partitions) == HOTTEST
    same = hottest(
        [PartitionLoad(f"t/{n}", n % 2 == 0, m.load(10.0)) for (_, n), m in meter._meters.items()],
        report.total,
    )
    assert {each.partition for each in report.partitions} == {each.partition for each in same}
    assert report.total.stored_bytes == sum(each.log.size_bytes for each in parts.values())
    assert report.total.written_bytes_per_s == pytest.approx(sum(10_000_000 - n for n in range(100)) / 10)
    assert report.total.appended_bytes_per_s == pytest.approx(
        sum(10_000_000 - n for n in range(0, 100, 2)) / 10
    )
    assert report.total.read_bytes_per_s == pytest.approx(1.0)
    clock.now_ms += int(40 * FADE_S * 1000)
    assert (await meter.report()).total == Load(stored_bytes=report.total.stored_bytes)
