"""What a shard measures of its partitions: gains of their counters per second, faded."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.http.api.records import Records
from laminar.node.host.clock import Clock
from laminar.node.placement.load import Load
from laminar.node.shard.load_meter import FADE_S, LoadMeter
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
        first = meter.report()
        assert first.total == Load(stored_bytes=partition.log.size_bytes) and first.disk_is_low
        before = partition.log.size_bytes
        for _ in range(50):
            await partition.appends.append_records(Records([b"x" * 100]))
        read = await partition.reader.frames(0, max_bytes=1 << 20)
        written = partition.log.size_bytes - before
        assert written > 5000 and partition.leads
        clock.now_ms += 10_000
        (only,) = meter.report().partitions
        assert (only.partition, only.leads) == ("t/0", True)
        # Of the two questions' 20 s, the first 10 have faded a little.
        seconds = 10 * 2.718281828 ** (-10 / FADE_S) + 10
        load = only.load
        assert load.appended_bytes_per_s == load.written_bytes_per_s == pytest.approx(written / seconds)
        assert load.read_bytes_per_s == pytest.approx(sum(map(len, read)) / seconds)
        assert load.requests_per_s == pytest.approx(51 / seconds)
        assert load.stored_bytes == partition.log.size_bytes

        clock.now_ms += int(5 * FADE_S * 1000)
        faded = meter.report().total
        assert 0 < faded.written_bytes_per_s < load.written_bytes_per_s / 100


async def test_another_partition_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    clock = Stepped()
    async with lone_partition(tmp_path / "one") as one, lone_partition(tmp_path / "two") as two:
        held = {("t", 0): one}
        meter = LoadMeter("a", held, clock=clock, disk_is_low=lambda: False)
        meter.report()
        for _ in range(20):
            await two.appends.append_records(Records([b"x" * 100]))
        held["t", 0] = two
        clock.now_ms += 10_000
        assert meter.report().total == Load(stored_bytes=two.log.size_bytes)
