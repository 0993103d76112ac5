"""Flame graphs of four journeys of a record, as small SVG files: `make profile`.

    python -m benches.common.flames --sampler build/profile/bin/py-spy [--out docs/profile] [--seconds 8]

Three nodes of one shard and a client on this machine. For each journey the shards' processes and the client's
are sampled from outside by py-spy while they work. Threads that wait for work count nothing; one that waits
for its disk counts. Frames below `SMALLEST` of all are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from benches.common.floors import run_loop
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

NODES, PARTITIONS = 3, 12
VALUE = os.urandom(1024)
RECORDS = 64 * 1024
RATE = 200
SMALLEST = 0.004
WIDTH, ROW = 1200, 17
# Below these frames all stacks of a process are alike.
BASES = ("run_process", "run_loop", "Thread._bootstrap_inner")
# Innermost frames of threads that wait for work: py-spy takes some of them for busy.
WAITING = (
    *("SerialThreadExecutor._run", "_worker", "Condition.wait", "ThreadedChildWatcher._do_waitpid"),
    *("EpollSelector.select", "Supervisor._watch"),
)


async def append_one(client: Client) -> None:
    """One append after the other."""
    number = 0
    while True:
        await client.topic("t").append(VALUE, partition=number % PARTITIONS)
        number += 1


async def append_64(client: Client) -> None:
    """64 appends in flight, of one record each."""

    async def one(number: int) -> None:
        while True:
            await client.topic("t").append(VALUE, partition=number % PARTITIONS)

    await asyncio.gather(*(one(number) for number in range(64)))


async def fetch(client: Client) -> None:
    """A whole topic into an Arrow table, again and again."""
    while True:
        await client.topic("full").read().to_arrow()


async def consume(client: Client) -> None:
    """A whole topic record by record, again and again."""
    while True:
        async for _ in client.topic("full").read():
            pass


JOURNEYS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "append-one": append_one,
    "append-64": append_64,
    "fetch": fetch,
    "consume": consume,
}


@dataclass
class Frame:
    """A place in the code: its samples, those of what it calls among them, and what it calls."""

    samples: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)

    def add(self, stack: list[str], samples: int) -> None:
        """Count a stack, the outermost frame first."""
        self.samples += samples
        if stack:
            self.calls.setdefault(stack[0], Frame()).add(stack[1:], samples)

    def depth(self, least: int) -> int:
        """Return how many rows the frames of at least so many samples take."""
        return 1 + max(
            (each.depth(least) for each in self.calls.values() if each.samples >= least), default=0
        )


def main() -> int:
    """Write a file for each journey, print the places that took most, and end 0."""
    parser = argparse.ArgumentParser(prog="python -m benches.common.flames", description=__doc__)
    parser.add_argument("--sampler", type=Path, required=True, help="the program py-spy")
    parser.add_argument("--out", type=Path, default=Path("docs/profile"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each journey")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="flames-", dir=given.out.parent) as folder,
        LocalCluster(Path(folder) / "cluster", nodes=NODES, shards=1) as cluster,
    ):
        run_loop(_all(cluster, given.sampler, given.out, Path(folder), given.seconds))
    return 0


async def _all(cluster: LocalCluster, sampler: Path, out: Path, folder: Path, seconds: float) -> None:
    shards = [
        int(json.loads((member.data / "node.json").read_text())["pids"]["shard 0"])
        for member in cluster.members
    ]
    async with connect(cluster.urls) as client:
        await client.create_topic("t", partitions=PARTITIONS, replicas=NODES)
        full = await client.create_topic("full", partitions=PARTITIONS, replicas=NODES)
        async with full.producer() as producer:
            await producer.send_all((None, VALUE) for _ in range(RECORDS))
        for name, journey in JOURNEYS.items():
            working = asyncio.ensure_future(journey(client))
            await asyncio.sleep(0.5)
            root = Frame()
            samplers = [
                _sample(sampler, pid, folder / f"{name}-{pid}", seconds) for pid in (*shards, os.getpid())
            ]
            await asyncio.gather(*samplers)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            for pid in (*shards, os.getpid()):
                process = "client" if pid == os.getpid() else "shards"
                for stack, samples in _stacks(folder / f"{name}-{pid}"):
                    root.add([process, *stack], samples)
            (out / f"{name}.svg").write_text(svg(root, f"{name}: {journey.__doc__}"))
            print(f"{name}: {root.samples} samples", flush=True)
            for place, samples in _most(root)[:12]:
                print(f"  {samples / root.samples:6.1%} {place}")


async def _sample(sampler: Path, pid: int, file: Path, seconds: float) -> None:
    command = [str(sampler), "record", "-F", "-f", "raw", "-r", str(RATE), "-d"]
    command += [str(max(1, round(seconds))), "-o", str(file), "-p", str(pid)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if await process.wait():
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")


def _stacks(file: Path) -> list[tuple[list[str], int]]:
    """Return the stacks of a file of py-spy, without what all have in common."""
    found = []
    for line in file.read_text().splitlines():
        text, _, samples = line.rpartition(" ")
        stack = [_place(each) for each in text.split(";")]
        for base in BASES:
            places = [number for number, each in enumerate(stack) if each.split(" ")[0] == base]
            if places:
                stack = stack[places[-1] + 1 :]
        if stack and stack[-1].split(" ")[0] in WAITING:
            continue
        if stack and stack[-1].startswith(("Runner.run ", "run ")):
            stack[-1] = "uvloop (its own reads and writes, or waiting)"
        found.append((stack or ["uvloop"], int(samples)))
    return found


def _place(frame: str) -> str:
    """Return ``name (file)`` with the last two parts of the file's path."""
    name, _, file = frame.partition(" (")
    return f"{name} ({'/'.join(file.rstrip(')').split('/')[-2:])})" if file else name


def _most(root: Frame) -> list[tuple[str, int]]:
    """Return the places in which most samples were themselves, not in what they call."""
    own: dict[str, int] = {}

    def walk(name: str, frame: Frame) -> None:
        mine = frame.samples - sum(each.samples for each in frame.calls.values())
        own[name] = own.get(name, 0) + mine
        for called, each in frame.calls.items():
            walk(called, each)

    for process, frame in root.calls.items():
        for called, each in frame.calls.items():
            walk(f"{process}: {called}", each)
    return sorted(own.items(), key=lambda each: -each[1])


def svg(root: Frame, title: str) -> str:
    """Return the graph: a row for each depth, callers above, width by samples; the text is in the title."""
    least = max(1, round(root.samples * SMALLEST))
    height = ROW * (root.depth(least) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="11">',
        f'<text x="4" y="12">{escape(title)}</text>',
    ]

    def draw(frame: Frame, x: float, row: int) -> None:
        for name, each in sorted(frame.calls.items()):
            width = WIDTH * each.samples / root.samples
            if each.samples >= least:
                hue = 20 + sum(name.encode()) % 40
                shown = escape(name[: int(width / 6.7)]) if width > 30 else ""
                parts.append(
                    f'<g><title>{escape(name)} {each.samples / root.samples:.1%}</title><rect x="{x:.1f}" '
                    f'y="{row * ROW}" width="{width:.1f}" height="{ROW - 1}" fill="hsl({hue},80%,70%)"/>'
                    + (f'<text x="{x + 2:.1f}" y="{row * ROW + 12}">{shown}</text>' if shown else "")
                    + "</g>"
                )
                draw(each, x, row + 1)
            x += width

    draw(root, 0.0, 1)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(main())
