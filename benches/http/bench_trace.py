"""What the trace costs: the CPU of a node for each record, of a topic with trace=all beside one with off.

    python -m benches.http.bench_trace

One node of one shard (of two, a topic that the other leads costs more, whatever its trace), two topics, by
turns: each round sends as many records to both, by way of a channel: appended, given out, acknowledged,
`--batch` of them in one request. They are paced, so that no event is dropped; if some are, that is printed,
and the ratio is too low. `--quick` measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benches.common.usage import cpu_s
from laminar.testing.cluster import LocalCluster

MODES = ("off", "all")
RATE = 1_500
"""Records a second. Each has three events, and a shard writes 8,192 a second at most."""
ENVELOPES = "application/vnd.laminar.records+json"


def send(http: httpx.Client, topic: str, *, records: int, batch: int) -> None:
    """Have records appended, given out and acknowledged, a batch in each request, at the rate."""
    body = [{"value": "x" * 100, "key": f"key-{n % 50}"} for n in range(batch)]
    channel = f"/v1/topics/{topic}/channels/c"
    began_s = time.monotonic()
    for done in range(0, records, batch):
        answer = http.post(
            f"/v1/topics/{topic}/partitions/0/records", json=body, headers={"content-type": ENVELOPES}
        )
        answer.raise_for_status()
        left = batch
        while left:
            jobs = http.post(f"{channel}/receive", json={"max": left, "wait_ms": 5000}).json()["jobs"]
            tokens = [job["token"] for job in jobs]
            http.post(f"{channel}/acks", json={"ack": tokens}).raise_for_status()
            left -= len(jobs)
        time.sleep(max(0.0, began_s + (done + batch) / RATE - time.monotonic()))


def dropped(http: httpx.Client) -> int:
    """Return how many events the node has dropped."""
    lines = http.get("/metrics").text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith("laminar_trace_dropped_total")
    )


def run(directory: Path, *, rounds: int, records: int, batch: int) -> dict[str, float]:
    """Return CPU in microseconds for each record of a topic by its setting, and their ratio."""
    costs: dict[str, list[float]] = {mode: [] for mode in MODES}
    settings: dict[str, str | int] = {"default_replicas": 1}
    with (
        LocalCluster(directory, nodes=1, shards=1, settings=settings) as cluster,
        httpx.Client(base_url=cluster.urls[0], timeout=60, trust_env=False) as http,
    ):
        for mode in MODES:
            http.put(f"/v1/topics/{mode}", json={"settings": {"trace": mode}}).raise_for_status()
            http.put(f"/v1/topics/{mode}/channels/c", json={}).raise_for_status()
            send(http, mode, records=batch, batch=batch)
        time.sleep(1.5)
        pids = cluster.pids(0)
        for _ in range(rounds):
            for mode in MODES:
                before = cpu_s(pids)
                send(http, mode, records=records, batch=batch)
                time.sleep(0.7)  # until the last events are written
                costs[mode].append(1e6 * (cpu_s(pids) - before) / records)
        lost = dropped(http)
    off, all_ = (statistics.median(costs[mode]) for mode in MODES)
    return {"off_us": off, "all_us": all_, "ratio": all_ / off if off else 0.0, "dropped": lost}


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--batch", type=int, nargs="*", default=[1, 100])
    given = arguments.parse_args()
    for batch in given.batch:
        rounds, records = (1, batch) if given.quick else (5, max(1_000, 30 * batch))
        with tempfile.TemporaryDirectory() as directory:
            found = run(Path(directory), rounds=rounds, records=records, batch=batch)
        print(
            f"trace, {batch} in a request: off {found['off_us']:.1f} µs, all {found['all_us']:.1f} µs of CPU "
            f"for each record, ratio {found['ratio']:.2f}, {found['dropped']:.0f} events dropped",
            flush=True,
        )


if __name__ == "__main__":
    main()
