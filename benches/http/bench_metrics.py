"""What a scrape of `/metrics` costs a node with many partitions, and what an observation costs an append.

    python -m benches.http.bench_metrics

First a histogram, and the text alone: for as many topics of one partition as there are partitions, and 5,000
consumers. Then one node of two shards with 10,000 partitions: the CPU of all its processes for a scrape, its
bytes, and how long another request takes meanwhile. `--quick` is the same with few of all, and measures
nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import msgspec

from benches.common.floors import percentile
from benches.common.usage import cpu_s
from laminar.histogram import Histogram
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.metrics.durations import Durations
from laminar.node.api.metrics.shard_numbers import ConsumerNumbers, ProcessNumbers, TopicNumbers
from laminar.node.api.metrics.text import Text
from laminar.testing.cluster import LocalCluster

PARTITIONS, OF_TOPIC, CONSUMERS, SCRAPES = 10_000, 100, 5_000, 5
PAUSE_S = 5.1
"""An answer is kept for so long at most."""


def node(directory: Path, *, partitions: int, scrapes: int, pause_s: float) -> dict[str, float]:
    """Return CPU (ms) and bytes of a scrape of a real node, and how long `/livez` took meanwhile (ms)."""
    with LocalCluster(directory, nodes=1, shards=2, settings={"max_partitions": 2 * partitions}) as cluster:
        url = cluster.urls[0]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            for number in range(max(1, partitions // OF_TOPIC)):
                answer = http.put(f"/v1/topics/t{number}", json={"partitions": min(partitions, OF_TOPIC)})
                assert answer.status_code in (201, 503), answer.text
            until_led(http, max(1, partitions // OF_TOPIC) * min(partitions, OF_TOPIC))
            pids, costs, sizes, idle = cluster.pids(0), list[float](), list[int](), list[float]()
            waits: list[float] = []
            for _ in range(scrapes):
                time.sleep(pause_s)
                before = cpu_s(pids)
                time.sleep(0.5)
                idle.append(cpu_s(pids) - before)
                with Probe(url, waits):
                    before, began_s = cpu_s(pids), time.monotonic()
                    sizes.append(len(http.get("/metrics").content))
                    took_s = time.monotonic() - began_s
                costs.append(cpu_s(pids) - before - statistics.median(idle) * took_s / 0.5)
    return {
        "cpu_ms": 1000 * statistics.median(costs),
        "bytes": statistics.median(sizes),
        "livez_p99_ms": 1000 * percentile(sorted(waits), 0.99) if waits else 0.0,
    }


def until_led(http: httpx.Client, partitions: int) -> None:
    """Wait until each partition has its leader."""
    deadline = time.monotonic() + 600
    while True:
        text = http.get("/metrics").text
        led = sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("laminar_leaders{")
        )
        if led >= partitions:
            return
        assert time.monotonic() < deadline, f"{led:g} of {partitions} partitions are led"
        time.sleep(1)


class Probe:
    """Asks for `/livez` all the time, from a thread of its own."""

    def __init__(self, url: str, waits: list[float]) -> None:
        self._url = url
        self._waits = waits
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            while not self._end.is_set():
                began_s = time.monotonic()
                http.get("/livez")
                self._waits.append(time.monotonic() - began_s)


def text(*, topics: int, consumers: int, rounds: int) -> dict[str, float]:
    """Return the CPU (ms) to decode a shard's numbers and make the text of them, and its bytes."""
    numbers = ProcessNumbers(
        "shard-0",
        {},
        topics={f"topic-{n}": TopicNumbers(n, n, n, n, n, 1, 0, 0, 0, n, n, 1.5) for n in range(topics)},
        consumers=[
            (f"topic-{n % topics}", f"consumer-{n}", ConsumerNumbers(n, n, 1.5, 0, n))
            for n in range(consumers)
        ],
    )
    encoded = msgspec.msgpack.encode(numbers)
    costs, size = [], 0
    for _ in range(rounds):
        began_s = time.thread_time()
        decoded = msgspec.msgpack.decode(encoded, type=ProcessNumbers)
        made = "".join(Text(openmetrics=False).of_node([decoded], up={"shard-0": True})).encode()
        costs.append(time.thread_time() - began_s)
        size = len(made)
    return {"cpu_ms": 1000 * min(costs), "bytes": size}


def observation(*, calls: int) -> dict[str, float]:
    """Return the CPU (ns) to observe a value in a histogram, and to note a whole request."""
    histogram, durations = Histogram(), Durations()
    head = RequestHead("POST", "/v1/topics/t/partitions/0/records", {})
    found = {}
    for name, call in (
        ("observe_ns", lambda: histogram.observe(0.0042)),
        ("request_ns", lambda: durations.note(head, 201, 0.0042)),
        ("nothing_ns", lambda: None),
    ):
        best = float("inf")
        for _ in range(5):
            began_s = time.thread_time()
            for _ in range(calls):
                call()  # type: ignore[no-untyped-call]  # a lambda
            best = min(best, time.thread_time() - began_s)
        found[name] = 1e9 * best / calls
    nothing = found.pop("nothing_ns")
    return {name: max(0.0, ns - nothing) for name, ns in found.items()}


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser("python -m benches.http.bench_metrics", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--partitions", type=int, default=PARTITIONS)
    parser.add_argument("--text-only", action="store_true", help="no node")
    given = parser.parse_args()
    quick = given.quick
    partitions = 10 if quick else given.partitions
    for name, ns in observation(calls=1_000 if quick else 1_000_000).items():
        print(f"{name.removesuffix('_ns')}: {ns:.0f} ns")
    topics, consumers = (10, 5) if quick else (given.partitions, CONSUMERS)
    found = text(topics=topics, consumers=consumers, rounds=1 if quick else 7)
    what = f"text of {topics} topics, {consumers} consumers"
    print(f"{what}: {found['cpu_ms']:.1f} ms, {found['bytes']:,.0f} bytes")
    if not given.text_only:
        with tempfile.TemporaryDirectory() as folder:
            scrapes, pause_s = (1, 0.0) if quick else (SCRAPES, PAUSE_S)
            real = node(Path(folder), partitions=partitions, scrapes=scrapes, pause_s=pause_s)
        print(
            f"scrape of {partitions} partitions: {real['cpu_ms']:.1f} ms of CPU, {real['bytes']:,.0f} bytes; "
            f"/livez p99 meanwhile {real['livez_p99_ms']:.1f} ms"
        )


if __name__ == "__main__":
    main()
