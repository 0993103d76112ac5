"""`laminar bench`, on a real node: what is counted, from when, what is refused, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from itertools import count
from typing import Any

import pytest

import laminar as laminar_client
from laminar.aio import connect
from laminar.cli.commands.bench import loads, pace, report
from laminar.cli.commands.bench.tally import MOST_CODES, Latencies, Tally
from tests.cli.conftest import Command, Ran

_numbers = count()


@pytest.fixture
def name() -> str:
    """A topic that does not exist."""
    return f"bench-{next(_numbers)}"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a moment is no reason to leave a record out, or to call it late."""
    monkeypatch.setattr(pace, "GRACE_S", 60.0)
    monkeypatch.setattr(report, "LATE_S", 60.0)


def _report(ran: Ran) -> Any:
    return json.loads(ran.out)


class _Watched(Tally):
    """A tally that tells when so many records have their receipt, and when the topic is missed."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted
        self.reached = asyncio.Event()
        self.missed = asyncio.Event()

    def failed(self, code: str, count: int = 1) -> None:
        super().failed(code, count)
        if code == "no_such_topic":
            self.missed.set()

    def succeeded(self, now_s: float, count: int, size_bytes: int) -> None:
        super().succeeded(now_s, count, size_bytes)
        if self.done >= self._wanted:
            self.reached.set()


def test_percentiles_are_exact_to_a_hundredth_and_cost_the_same_memory() -> None:
    latencies = Latencies()
    for milliseconds in range(1, 10_001):
        latencies.observe(milliseconds / 1000)
    found = latencies.stated()
    for name, wanted in (("p50", 5000), ("p90", 9000), ("p99", 9900), ("p99_9", 9990)):
        assert wanted <= found[name] <= wanted * 1.01
    assert found["max"] == 10_000 and latencies.count == 10_000
    assert Latencies().stated() == dict.fromkeys(found, 0.0)

    tally = Tally()
    for number in range(2 * MOST_CODES):
        tally.failed(f"code-{number}")
    assert len(tally.errors) == MOST_CODES + 1 and tally.errors.total() == 2 * MOST_CODES


def test_the_longest_gap_is_from_begin_to_end() -> None:
    tally = Tally()
    tally.begin()
    time.sleep(0.05)
    tally.failed("unavailable")
    tally.end()
    assert tally.stated()["longest_gap_s"] >= 0.05  # there was no success at all

    tally = Tally()
    tally.begin()
    now_s = tally._began_s
    tally.succeeded(now_s + 1, 1, 10)
    tally.succeeded(now_s + 4, 2, 20)
    tally.succeeded(now_s + 5, 1, 10)
    tally.end()
    found = tally.stated()
    assert (found["records"], found["longest_gap_s"], found["records_per_s"]) == (4, 3.0, 0.8)


@pytest.mark.usefixtures("patient")
def test_a_stall_counts_for_each_record_that_was_due_in_it(node_url: str, name: str) -> None:
    """A load that waits for each answer would have one long latency, and report a fine p90."""

    async def stalled() -> tuple[Tally, Tally]:
        tally, read = _Watched(1), Tally()
        async with connect(node_url) as client:
            topic = await client.create_topic(name, partitions=2)
            load = loads.Load(size=64, seconds=1.0, rate=200, in_flight=64)
            running = asyncio.create_task(loads.latency(topic, load, tally, read))
            await tally.reached.wait()
            time.sleep(0.4)  # noqa: ASYNC251 - nothing is sent or answered meanwhile
            await running
        return tally, read

    tally, read = asyncio.run(stalled())
    assert (tally.due, tally.sent, tally.done, read.done) == (200, 200, 200, 200)
    assert not tally.errors and not read.errors
    # Some 80 of 200 were due in the stall, evenly: the median of those waited for half of it.
    assert tally.latencies.stated()["p90"] > 150
    assert read.latencies.stated()["p90"] > 150
    assert tally.own_delays.stated()["p90"] > 150
    assert tally.longest_gap_s >= 0.39


class _Open(pace.Pace):
    """A schedule that goes on until it is said that it is over."""

    is_over = False

    @property
    def ends_s(self) -> float:
        return self.began_s if self.is_over else super().ends_s


def test_a_topic_that_goes_away_is_counted_by_code(
    node_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = _Open(500, 600.0)
    monkeypatch.setattr(loads, "Pace", lambda rate, seconds: schedule)

    async def deleted() -> Tally:
        tally = _Watched(50)
        async with connect(node_url) as client:
            topic = await client.create_topic(name, partitions=2)
            load = loads.Load(size=64, seconds=600.0, rate=500)
            running = asyncio.create_task(loads.produce(topic, load, tally))
            await tally.reached.wait()
            await topic.delete()
            await tally.missed.wait()
            schedule.is_over = True
            await running
        return tally

    tally = asyncio.run(deleted())
    assert tally.done >= 50
    assert tally.done + tally.errors.total() == tally.sent


@pytest.mark.usefixtures("patient")
def test_produce_makes_a_topic_and_says_what_it_did(on_node: str, laminar: Command, name: str) -> None:
    rate = ("--rate", "400", "--seconds", "0.5", "--size", "100", "--partitions", "2")
    ran = laminar("bench", "produce", name, *rate, "--setting", "flush=interval", "--json")
    found = _report(ran)

    assert (ran.code, ran.err) == (
        0,
        f"laminar: topic {name} stays, with its records: `laminar topic delete {name}`\n",
    )
    assert (found["due"], found["records"], found["not_sent"], found["errors"]) == (200, 200, 0, {})
    assert found["rate_reached"] is True and found["interrupted"] is False
    assert (found["partitions"], found["replicas"], found["flush"]) == (2, 1, "interval")
    load = {"kind": "produce", "size": 100, "rate": 400.0, "seconds": 0.5, "batch_bytes": 512 << 10}
    assert found["load"] == load
    assert found["nodes"][0]["shards"] == 2 and found["client"]["cpus"] > 0
    times = [found["latency_ms"][each] for each in ("p50", "p90", "p99", "p99_9", "max")]
    assert 0 < times[0] and times == sorted(times)

    again = laminar("bench", "produce", name, *rate)
    assert again.code == 2 and "--existing" in again.err and again.out == b""
    there = laminar("bench", "produce", name, "--existing", "--rate", "100", "--seconds", "0.2")
    assert there.code == 0 and "records/s" in there.text and "2 partitions, 1 replicas" in there.text

    read = laminar("bench", "consume", name, "--json")
    assert (read.code, _report(read)["records"]) == (0, 200 + 20 + 2 * loads.WARM_UP_RECORDS)
    slowly = laminar("bench", "consume", name, "--rate", "100", "--seconds", "0.2", "--json")
    assert slowly.code == 0 and 0 < _report(slowly)["records"] <= 620


def test_an_interrupt_ends_it_with_the_figures_until_then(on_node: str, name: str) -> None:
    command = [sys.executable, "-m", "laminar.cli", "bench", "produce", name, "--rate", "200"]
    with subprocess.Popen(
        [*command, "--seconds", "600", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        try:
            with laminar_client.connect(on_node) as client:
                while not _is_there(client, name):
                    time.sleep(0.05)
                topic = client.topic(name)
                # So often that some of them have their receipts: only a few batches are under way at a time.
                seen: set[int] = set()
                while len(seen) < 20 or max(seen) < loads.WARM_UP_RECORDS + 50:
                    seen.add(sum(topic.offsets().values()))
                    time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 130 and b"interrupted" in err
    found = json.loads(out)
    assert found["interrupted"] is True and found["rate_reached"] is None
    with laminar_client.connect(on_node) as client:
        appended = sum(client.topic(name).offsets().values()) - loads.WARM_UP_RECORDS
    assert 0 < found["records"] <= appended and found["errors"] == {}


def _is_there(client: laminar_client.Client, name: str) -> bool:
    return name in client.topics()


def test_a_rate_that_is_not_reached_is_said(on_node: str, laminar: Command, name: str) -> None:
    ran = laminar("bench", "produce", name, "--rate", "5000000", "--seconds", "0.2", "--delete", "--json")
    found = _report(ran)
    assert ran.code == 3 and "was not reached" in ran.err and f"{found['not_sent']:,} of 1,000,000" in ran.err
    assert found["rate_reached"] is False and found["not_sent"] > 0
    assert found["records"] + found["not_sent"] == found["due"] == 1_000_000
    assert found["latency_ms"]["p50"] > 50  # they waited, and the wait counts
    deadline = time.monotonic() + 60
    while name in laminar("topic", "list", "-o", "names").text.split():  # another shard's view may lag
        assert time.monotonic() < deadline, "the topic is listed for ever"

    one = laminar("bench", "latency", name, "--rate", "20000", "--seconds", "0.3", "--in-flight", "1")
    assert one.code == 3 and "was not reached" in one.err and "until read, ms" in one.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("produce", "t", "--rate", "0"), "--rate is 0.1 to 10,000,000"),
        (("produce", "t", "--seconds", "nan"), "--seconds is 0.1"),
        (("produce", "t", "--size", "0"), "--size is 1 to"),
        (("produce", "t", "--batch", "10"), "--batch is 1,024 to"),
        (("produce", "t", "--rate", "10k"), "--rate"),
        (("produce", "t", "--existing", "--delete"), "--existing goes without"),
        (("latency", "t", "--size", "15"), "--size is 16 to"),
        (("latency", "t", "--in-flight", "0"), "--in-flight is 1 to"),
        (("consume", "t", "--rate", "-1"), "--rate is 0.1"),
    ],
)
def test_a_mistake_in_the_command_is_named(
    on_node: str, laminar: Command, arguments: tuple[str, ...], said: str
) -> None:
    ran = laminar("bench", *arguments)
    assert (ran.code, ran.out) == (2, b"") and said in ran.err


def test_a_topic_that_is_missing_or_empty_is_said(on_node: str, laminar: Command, name: str) -> None:
    for command in (("produce", name, "--existing"), ("consume", name)):
        ran = laminar("bench", *command)
        assert ran.code == 1 and "no_such_topic" in ran.err
    assert laminar("topic", "create", name).code == 0
    empty = laminar("bench", "consume", name)
    assert empty.code == 1 and "there was no record" in empty.err
