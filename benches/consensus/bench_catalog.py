"""`make bench-catalog`: what one topic more costs a catalog that has many, and what it costs at rest.

Times of the rules are CPU seconds of one process, so a busy machine changes them little.

* The catalog alone: the commands that make a topic of one partition and one replica, as every node applies
  them, and what changed, as its shards get it, at 1, 1,000, 10,000 and 100,000 topics; the replay of that log
  at a start; the whole state encoded and decoded, as a starting shard gets it; its memory.
* The placement's pass over all those partitions, in slices, its longest slice, and a pass after one change.
* `--nodes N`: real processes, one shard each. Topics are made over HTTP, `--partitions` in all: time and CPU
  of each hundred, CPU at rest, memory of controllers and shards, and the time until a node that is restarted
  serves again.
* `--restarted`: one real node gets the log of the catalog alone, whose topics are on a node that is gone: the
  time until it serves, its memory, the time of one more topic over HTTP, and CPU at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benches.common.usage import cpu_s
from laminar.batch import Kind, build_control, stamp
from laminar.log.disk.disk import RealDisk
from laminar.log.recovery.node import controller_store, logs_directory
from laminar.log.storage import Storage
from laminar.node.placement.planner import Planner
from laminar.node.placement.preferred_leaders import choosing
from laminar.node.placement.slices import SLICE
from laminar.node.placement.wanted import Wanted
from laminar.testing.cluster import LocalCluster
from membership.catalog import CODE_VERSION, Catalog
from membership.catalog_delta import CatalogDelta, changed_by, delta_between
from membership.records import CatalogState, NodeRecord
from membership.tables import encoded

NODE = NodeRecord(
    "a", b"s" * 16, "127.0.0.1", 7070, [7071], [7170, 7171], 7170, shards=1, code_version=CODE_VERSION
)
JSON = {"Content-Type": "application/json"}
SAMPLE = 100
_SYNC_EVERY = 1_000
MAKERS = 4


class _Group:
    """A proposer whose group has one member: what it proposes is committed."""

    catalog: Catalog

    def __init__(self) -> None:
        self.log: list[bytes] = []

    async def propose(self, command: bytes) -> int:
        self.log.append(command)
        self.catalog.apply(len(self.log), command)
        return len(self.log)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _marks(topics: int) -> list[int]:
    return [*(mark for mark in (1_000, 10_000, 100_000) if mark < topics), topics]


async def _catalog_alone(group: _Group, topics: int) -> Catalog:
    group.catalog = catalog = Catalog(group)
    await catalog.enable(CODE_VERSION)
    await catalog.register_node(NODE)
    before_mib = _rss_mib()
    held = copy = catalog.state()
    made_s = copied_s = 0.0
    print("a topic more, by how many there are: CPU to apply its two commands; to tell a shard of it")
    for number in range(1, topics + 1):
        if number % SAMPLE == 1 or topics < SAMPLE:
            made_s = copied_s = 0.0
        name, group_id = f"topic-{number:06d}", os.urandom(16)
        began = time.process_time()
        await catalog.create_topic(
            name,
            partitions=1,
            replicas=1,
            settings={},
            groups=[group_id],
            placement=[["a"]],
            created_ms=number,
        )
        await catalog.mark_made([group_id], node="a", store_id=NODE.store_id)
        made_s += time.process_time() - began
        began = time.process_time()
        update = msgspec.msgpack.encode(delta_between(held, catalog.state()))
        held = catalog.state()
        copy = changed_by(copy, msgspec.msgpack.decode(update, type=CatalogDelta))
        copied_s += time.process_time() - began
        if number in (SAMPLE, *_marks(topics)):
            of = min(SAMPLE, topics)
            figures = f"{made_s / of * 1e6:.0f} us, {copied_s / of * 1e6:.0f} us"
            print(f"  {number:>7,}: {figures}; {len(update)} bytes")
    began = time.process_time()
    gc.collect()
    collected_s = time.process_time() - began
    both = (_rss_mib() - before_mib - sum(map(len, group.log)) / (1 << 20)) * 1024 / topics
    print(f"memory: {both:.2f} KiB for each topic, of the catalog and a shard's copy together")
    print(f"a full collection of garbage, over both: {collected_s:.2f} s")
    began = time.process_time()
    again = Catalog(group)
    for index, command in enumerate(group.log, 1):
        again.apply(index, command)
    log_mib = sum(map(len, group.log)) / (1 << 20)
    print(
        f"replay at a start: {len(group.log):,} commands, {log_mib:.0f} MiB: "
        f"{time.process_time() - began:.2f} s"
    )
    began = time.process_time()
    whole = encoded(catalog.state())
    print(
        f"whole state: {len(whole) / (1 << 20):.1f} MiB, encoded in {time.process_time() - began:.2f} s",
        end="",
    )
    began = time.process_time()
    msgspec.msgpack.decode(whole, type=CatalogState)
    print(f", decoded in {time.process_time() - began:.2f} s")
    return catalog


def _pass(planner: Planner, state: CatalogState) -> tuple[float, float]:
    """Return the CPU seconds of a pass, and of its longest slice."""
    slices = []
    began = time.process_time()
    planner.follow(state, gone=(), present=state.nodes, settled=state.nodes)
    slices.append(time.process_time() - began)
    more = True
    while more:
        began = time.process_time()
        more = planner.look(SLICE)
        slices.append(time.process_time() - began)
    began = time.process_time()
    planner.steps()
    slices.append(time.process_time() - began)
    return sum(slices), max(slices)


def _slices(work: Iterator[None]) -> tuple[float, float]:
    slices = []
    began = time.process_time()
    for _ in work:
        slices.append(time.process_time() - began)
        began = time.process_time()
    return sum(slices), max(slices, default=0.0)


def _placement(catalog: Catalog) -> None:
    state = catalog.state()
    planner = Planner(Wanted(state))
    gc.collect()
    gc.freeze()
    print("placement: CPU of a pass, and of its longest slice, between two turns of the loop")
    print("  all partitions: {:.2f} s, {:.1f} ms".format(*_in_ms(_pass(planner, state))))
    key = next(iter(state.partitions))
    changed = {key: msgspec.structs.replace(state.partitions[key], preferred_leader="a")}
    after = msgspec.structs.replace(state, partitions=state.partitions | changed)
    print("  after a change: {:.4f} s, {:.1f} ms".format(*_in_ms(_pass(planner, after))))
    print("  spread of leaders: {:.2f} s, {:.1f} ms".format(*_in_ms(_slices(choosing(state)))))


def _in_ms(seconds: tuple[float, float]) -> tuple[float, float]:
    return seconds[0], seconds[1] * 1e3


# -- real nodes ------------------------------------------------------------------------------


def _make_topics(cluster: LocalCluster, numbers: range, *, partitions: int) -> None:
    def make(share: int) -> None:
        host, port = cluster.members[0].host, cluster.members[0].port
        connection = http.client.HTTPConnection(host, port, timeout=60)
        for number in numbers[share::MAKERS]:
            body = json.dumps({"partitions": partitions})
            while True:
                connection.request("PUT", f"/v1/topics/t{number:06d}", body, JSON)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status < 300:
                    break
                if json.loads(text).get("code") != "being_created":
                    raise RuntimeError(f"t{number:06d}: {answer.status} {text[:300]!r}")
                time.sleep(0.2)
        connection.close()

    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(make, range(MAKERS)))


def _json(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _rss_of(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _cpu_of(pids: dict[str, list[int]]) -> dict[str, float]:
    return {role: cpu_s(of) for role, of in pids.items()}


def _since(before: dict[str, float], pids: dict[str, list[int]], count: float, unit: str) -> str:
    return ", ".join(
        f"{role} {(spent - before[role]) / count * 1e3:.1f} {unit}" for role, spent in _cpu_of(pids).items()
    )


def _real(directory: Path, *, nodes: int, partitions: int, each: int, rest_s: float) -> None:
    topics = partitions // each
    settings = {"max_partitions": partitions + 100}
    with LocalCluster(directory, nodes=nodes, shards=1, settings=settings) as cluster:
        every = [cluster.pids(number) for number in range(nodes)]
        roles = {"supervisors": 0, "controllers": 1, "shards": 2}
        pids = {role: [of[place] for of in every] for role, place in roles.items()}
        empty = {role: sum(map(_rss_of, of)) / nodes for role, of in pids.items()}
        print(
            f"{nodes} nodes of one shard, {topics:,} topics of {each} partitions, {min(3, nodes)} replicas:"
        )
        done = 0
        for mark in (mark for mark in (10, SAMPLE, 1_000, 10_000, 100_000, topics) if mark <= topics):
            for upto in dict.fromkeys((max(done, mark - SAMPLE), mark)):
                began, used = time.monotonic(), _cpu_of(pids)
                _make_topics(cluster, range(done, upto), partitions=each)
                count, done = upto - done, upto
                if count:
                    wall_ms = (time.monotonic() - began) / count * 1e3
                    print(f"  up to {upto:>7,}: {wall_ms:.1f} ms each; CPU {_since(used, pids, count, 'ms')}")
        time.sleep(rest_s)
        used = _cpu_of(pids)
        time.sleep(rest_s)
        print(f"  at rest, in each second: CPU {_since(used, pids, rest_s, 'ms')}")
        for role, of in pids.items():
            full = sum(map(_rss_of, of)) / nodes
            grown = (full - empty[role]) * 1024 / partitions
            print(f"  memory of {role}: {full:.0f} MiB each, {grown:.1f} KiB for each partition")
        cluster.kill(nodes - 1)
        began = time.monotonic()
        cluster.restart(nodes - 1, timeout=1800)
        serves_s, spent_s = time.monotonic() - began, cpu_s(cluster.pids(nodes - 1))
        print(f"  a node restarted serves after {serves_s:.1f} s, {spent_s:.1f} s of CPU")


async def _append(data: str, commands: list[bytes]) -> None:
    """Append commands to the catalog's log of a node that is stopped and the only voter."""
    storage = Storage.open(RealDisk(), controller_store(data), logs_directory(data))
    try:
        (entry,) = storage.manifest.entries
        log = storage.logs[storage.resolve(entry.log_id)]
        for command in commands:
            frame = build_control(Kind.COMMAND, command)
            stamp(
                frame,
                index=log.last_index + 1,
                term=log.last_term,
                prev_term=log.last_term,
                base_offset=log.next_offset,
                append_time_ms=log.last_append_time_ms,
                committed_index=log.last_index,  # the only voter
                opens_segment=log.segment_full,
            )
            log.append([frame])
            if log.last_index % _SYNC_EVERY == 0:
                await storage.sync()
        await storage.sync()
    finally:
        await storage.close()


def _restarted(directory: Path, commands: list[bytes], *, topics: int, rest_s: float) -> None:
    with LocalCluster(directory, nodes=1, shards=1, settings={"max_partitions": topics + 1_000}) as cluster:
        roles = ("supervisor", "controller", "shard")
        for done, say in (
            (0, "with its own topics alone"),
            (topics, f"with {topics:,} topics of another node"),
        ):
            cluster.kill(0)
            if done:
                asyncio.run(_append(str(cluster.members[0].data), commands))
            began = time.monotonic()
            cluster.restart(0, timeout=1800)
            ready_s = time.monotonic() - began
            known = len(_json(cluster.urls[0], "/v1/topics?limit=1000")["topics"])
            assert known == min(done, 1000), f"the node knows {known} topics"
            _make_topics(cluster, range(done, done + 1), partitions=1)
            serves_s = time.monotonic() - began
            pids = cluster.pids(0)
            print(
                f"a node restarted {say}: ready after {ready_s:.1f} s, and makes a topic by {serves_s:.1f} s"
            )
            print(
                "  CPU until then: "
                + ", ".join(f"{r} {cpu_s([p]):.1f} s" for r, p in zip(roles, pids, strict=True))
            )
            began = time.monotonic()
            _make_topics(cluster, range(done + 1, done + 1 + SAMPLE), partitions=1)
            print(f"  a topic more: {(time.monotonic() - began) / SAMPLE * 1e3:.1f} ms, {MAKERS} at a time")
            time.sleep(rest_s)
            used = cpu_s(pids)
            time.sleep(rest_s)
            print(f"  at rest, in each second: CPU {(cpu_s(pids) - used) / rest_s * 1e3:.1f} ms")
            print(
                "  memory: "
                + ", ".join(f"{r} {_rss_of(p):.0f} MiB" for r, p in zip(roles, pids, strict=True))
            )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benches.consensus.bench_catalog", description=__doc__)
    parser.add_argument("--topics", type=int, default=100_000, help="topics of the catalog alone")
    parser.add_argument("--restarted", action="store_true", help="also a real node that has these topics")
    parser.add_argument("--nodes", type=int, default=0, help="also real nodes; 0: none")
    parser.add_argument("--partitions", type=int, default=10_000, help="partitions that the real nodes get")
    parser.add_argument("--each", type=int, default=1, help="partitions of each of their topics")
    parser.add_argument(
        "--rest", type=float, default=20.0, help="seconds at rest, before and while CPU is measured"
    )
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    gc.disable()  # as in a node's processes (laminar/node/host/loop_health.py)
    group = _Group()
    if options.topics:
        _placement(asyncio.run(_catalog_alone(group, options.topics)))
    if options.restarted:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            _restarted(Path(directory), group.log, topics=options.topics, rest_s=options.rest)
    if options.nodes:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            _real(
                Path(directory),
                nodes=options.nodes,
                partitions=options.partitions,
                each=options.each,
                rest_s=options.rest,
            )


if __name__ == "__main__":
    main()
