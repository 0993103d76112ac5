"""Channels under faults: consumers are killed and stopped while nodes fail, and work jobs off.

Writers append records with keys and tags to one topic. It has three channels, each with consumers of its own,
which are processes (`consumer`): one without order; one in order by key; one with a filter by tag whose
records are tried few times. Some records are refused for ever. When the faults are over, all is worked off,
and what the consumers wrote down is checked (`tests.checkers.channels`). Others append delayed records to a
topic of their own (`delayed`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import laminar
from laminar.testing import nodes
from tests.checkers import History
from tests.checkers.channels import KINDS, Found, Heard, Place, Promise, Span, check_channel, load
from tests.cluster.faults.cluster import faulty_cluster
from tests.cluster.faults.delayed import Delayed
from tests.cluster.faults.nemesis import Nemesis
from tests.cluster.faults.profiles import CONVERGE_S, PROFILES, SETTINGS, settle
from tests.cluster.faults.report import percentile, tell, violations_of
from tests.cluster.faults.workload import Workload, now_us, tag_of

TOPIC = "jobs"
PARTITIONS = 3
TAGS = ("mail", "bill", "bulk")
# Each has a key of its own, and of a key one record is worked on at a time.
WRITERS = 48
# How the consumers of each channel work: one by plain HTTP, one with the client library.
CONSUMERS = ("http", "client")
TIMEOUT_MS = 4_000
_COMMON = {"timeout_ms": TIMEOUT_MS, "retry_ms": 100, "retry_max_ms": 1_000}
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "any": {**_COMMON, "max_attempts": 16},
    "key": {**_COMMON, "max_attempts": 4, "order": "key"},
    "bulk": {**_COMMON, "max_attempts": 3, "filter": {"tags": ["bulk"]}},
}
# The numbers of a key that consumers of a channel refuse for ever: remainder, modulus.
POISONED = {"any": (-1, 1), "key": (7, 100), "bulk": (2, 15)}
CHANCES = {"nack": 0.03, "release": 0.03, "extend": 0.03}


class Staff:
    """The consumers of all channels; one that is killed is followed by another."""

    def __init__(self, urls: Sequence[str], folder: Path, rng: random.Random) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.happened: Counter[str] = Counter()
        # When each was killed, by name; and when something was wrong with any.
        self.ends_us: dict[str, int] = {}
        self.troubles: list[Span] = []
        self.folder = folder
        self._urls = list(urls)
        self._rng = rng
        self._living: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0

    def hire(self, channel: str, by: str) -> None:
        """One more."""
        self._count += 1
        name = f"{channel}-{by}-{self._count}"
        plan = {"by": by, "seed": self._rng.randrange(1 << 32), "poisoned": POISONED[channel], **CHANCES}
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [
                sys.executable,
                "-m",
                "tests.cluster.faults.consumer",
                ",".join(self._urls),
                TOPIC,
                channel,
                str(self.folder / f"{name}.jsonl"),
                json.dumps(plan),
            ]
            self._living[name] = nodes.start_process(command, env=os.environ, log=log)

    async def trouble(self) -> None:
        """For ever: one of them is killed or stopped, then a calm."""
        while True:
            await asyncio.sleep(self._rng.uniform(1.0, 5.0))
            name = self._rng.choice(sorted(self._living))
            if self._rng.random() < 0.3:
                began_us = now_us()
                process = self._living[name]
                process.send_signal(signal.SIGSTOP)
                self.happened["stop consumer"] += 1
                try:
                    await asyncio.sleep(TIMEOUT_MS / 1_000 * self._rng.uniform(0.3, 2.0))
                finally:
                    process.send_signal(signal.SIGCONT)
                    self.troubles.append((began_us, now_us()))
                continue
            self.happened["kill consumer"] += 1
            await self._dismiss(name)
            self.troubles.append((self.ends_us[name], self.ends_us[name]))
            channel, by, _ = name.split("-")
            self.hire(channel, by)

    def check_alive(self) -> None:
        """Raise if one of them has ended by itself."""
        for name, process in self._living.items():
            if process.poll() is not None:
                told = (self.folder / f"{name}.log").read_text(errors="replace")[-3_000:]
                raise RuntimeError(f"consumer {name} ended with {process.returncode}: {told}")

    async def close(self) -> None:
        """Kill all. Idempotent."""
        for name in list(self._living):
            await self._dismiss(name)

    async def _dismiss(self, name: str) -> None:
        process = self._living.pop(name)
        process.kill()
        await asyncio.to_thread(process.wait)
        self.ends_us[name] = now_us()

    def heard(self, channel: str) -> Heard:
        """Return what the consumers of a channel wrote down; when all have ended."""
        return load(sorted(self.folder.glob(f"{channel}-*.jsonl")), self.ends_us)


async def run_channels(
    profile: str,
    folder: Path,
    *,
    minutes: float,
    nodes: int,
    shards: int,
    seed: int,
    appends_per_s: float,
    only: Sequence[str] = (),
) -> bool:
    """One run from an empty cluster to its report; whether nothing was wrong."""
    rng = random.Random(seed)
    with faulty_cluster(folder / "cluster", nodes=nodes, shards=shards, settings=SETTINGS) as cluster:
        async with laminar.aio.connect(cluster.urls) as client:
            await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
        for channel, settings in SETTINGS_OF.items():
            await _asked(cluster.urls, "PUT", channel, {"settings": settings})
        history = History(folder / "history.jsonl")
        workload = Workload(
            history,
            cluster.urls,
            [TOPIC],
            partitions=PARTITIONS,
            writers=WRITERS,
            appends_per_s=appends_per_s,
            tags=TAGS,
            seed=seed,
        )
        nemesis = Nemesis(cluster, workload, history, [TOPIC], rng=rng)
        if only:
            nemesis.faults = {fault: nemesis.faults[fault] for fault in only}
        staff = Staff(cluster.urls, folder / "consumers", rng)
        delayed = Delayed(cluster.urls, random.Random(seed))
        wrong, failure = [], ""
        wrong_delayed: list[str] = []
        dead: dict[str, dict[Place, int]] = {}
        worked_off_s = 0.0
        try:
            await workload.start()
            await delayed.start()
            for channel in SETTINGS_OF:
                for by in CONSUMERS:
                    staff.hire(channel, by)
            await workload.more(200)
            trouble = asyncio.create_task(staff.trouble())
            try:
                await PROFILES[profile](nemesis, minutes * 60)
            finally:
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
            workload.check_alive()
            staff.check_alive()
            wrong += await settle(cluster, workload, [TOPIC])
            began = time.monotonic()
            for channel in SETTINGS_OF:
                await _until_worked_off(cluster.urls, channel, staff)
                dead[channel] = await _dead(cluster.urls, channel)
            worked_off_s = time.monotonic() - began
            await delayed.finish()
            wrong_delayed = await delayed.check()
        except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
            failure = traceback.format_exc()
        finally:
            await delayed.close()
            await staff.close()
            await workload.close()
            history.close()
        wrong += violations_of(history, followers=workload.followers if not failure else ())
    sound = tell(folder, history, wrong, nemesis.happened + staff.happened, failure)
    if not failure:
        print(f"all was worked off {worked_off_s:.1f} s after the last record was read", flush=True)
        told = ", ".join(f"{what} {count:,}" for what, count in sorted(delayed.happened.items()))
        print(f"delayed records: {told}; wrong {len(wrong_delayed)}", flush=True)
        for line in wrong_delayed[:20]:
            print(line, flush=True)
        sound = sound and not wrong_delayed
    for channel in SETTINGS_OF if not failure else ():
        heard, found = _check(channel, history, staff, dead[channel])
        for line in [*_told(channel, heard, found), *(f"  {each}" for each in found.sentences[:20])]:
            print(line, flush=True)
        sound = sound and not found.sentences
    return sound


def _check(channel: str, history: History, staff: Staff, dead: Mapping[Place, int]) -> tuple[Heard, Found]:
    settings = SETTINGS_OF[channel]
    appended: dict[Place, tuple[str, str, str]] = {}
    poisoned: set[Place] = set()
    tags = frozenset(settings.get("filter", {}).get("tags", ()))
    remainder, modulus = POISONED[channel]
    for place, value in _appended(history):
        key, number = value.split()
        tag = tag_of(int(number), TAGS) or ""
        appended[place] = (key, value, tag)
        if int(number) % modulus == remainder and (not tags or tag in tags):
            poisoned.add(place)
    promise = Promise(
        appended,
        timeout_ms=TIMEOUT_MS,
        max_attempts=settings["max_attempts"],
        ordered=settings.get("order") == "key",
        tags=tags,
        poisoned=frozenset(poisoned),
    )
    faults = [(each.start_us, each.end_us or now_us()) for each in history.faults]
    heard = staff.heard(channel)
    found = check_channel(promise, heard, dead=dead, ends_us=staff.ends_us, faults=[*faults, *staff.troubles])
    return heard, found


def _appended(history: History) -> list[tuple[Place, str]]:
    """What has a receipt, and what is there at the end, too: its answer may have been lost."""
    found: dict[Place, str] = {}
    for each in history.operations:
        if each.kind == "append" and each.outcome == "ok" and each.offset is not None:
            found[each.partition, each.offset] = each.value
        elif each.kind == "final":
            found |= {(each.partition, offset): value for offset, value in each.values}
    return sorted(found.items())


async def _until_worked_off(urls: Sequence[str], channel: str, staff: Staff) -> None:
    """All leaders say that nothing is to be given out any more, and nothing was lost.

    Raises:
        RuntimeError: it gets no less for long, or a consumer has ended.
    """
    least, deadline = sys.maxsize, time.monotonic() + CONVERGE_S
    while True:
        staff.check_alive()
        shown = await _asked(urls, "GET", channel)
        left = {name: shown[name] for name in ("depth", "out", "aside", "lost", "opening", "unanswered")}
        if not any(left.values()):
            return
        # The depth of some partitions only says nothing of all.
        whole = not shown["opening"] and not shown["unanswered"]
        if whole and shown["depth"] < least:
            least, deadline = shown["depth"], time.monotonic() + CONVERGE_S
        if time.monotonic() >= deadline:
            raise RuntimeError(f"channel {channel} is not worked off after {CONVERGE_S:g} s: {shown}")
        await asyncio.sleep(0.2)


async def _dead(urls: Sequence[str], channel: str) -> dict[Place, int]:
    """The dead, and their attempts."""
    found: dict[Place, int] = {}
    after = ""
    while True:
        page = await _asked(urls, "GET", f"{channel}/dead?limit=100&after={after}")
        found |= {(job["partition"], job["offset"]): job["attempts"] for job in page["jobs"]}
        if "next" not in page:
            return found
        after = page["next"]


async def _asked(urls: Sequence[str], method: str, path: str, body: Any = None) -> Any:
    """Return the answer of a node; ask again while none can."""
    deadline = time.monotonic() + CONVERGE_S
    async with httpx.AsyncClient(timeout=15.0, trust_env=False) as client:
        while True:
            for url in urls:
                address = f"{url}/v1/topics/{TOPIC}/channels/{path}"
                try:
                    answer = await client.request(method, address, json=body)
                except httpx.TransportError as error:
                    told = repr(error)
                else:
                    told = answer.text
                    if answer.is_success:
                        return answer.json()
            if time.monotonic() >= deadline:
                raise RuntimeError(f"{method} {path} after {CONVERGE_S:g} s: {told}")
            await asyncio.sleep(0.2)


def _told(channel: str, heard: Heard, found: Found) -> list[str]:
    acks = sorted(
        word.answered_us - word.asked_us
        for each in heard.holdings
        for word in each.words
        if word.verb == "ack" and word.outcome == "done" and word.answered_us is not None
    )
    held = Counter(word.outcome for each in heard.holdings for word in each.words)
    anomalies = ", ".join(f"{kind} {found.count(kind)}" for kind in KINDS)
    lines = [
        f"channel {channel}: {found.deliveries:,} deliveries of {found.records:,} records, done "
        f"{found.done:,}, dead {found.dead:,}: {anomalies}",
        f"  came again, and not given back: {found.redelivered:,} of {found.in_flight:,} that were in flight "
        f"while something failed; attempts that no consumer heard of: {found.unseen:,}",
        "  words: " + ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(held.items())),
        "  requests: " + ", ".join(f"{what} {count:,}" for what, count in sorted(heard.requests.items())),
    ]
    if acks:
        lines.append(
            f"  acknowledgements p50 {percentile(acks, 50) / 1_000:.1f} ms, p99 "
            f"{percentile(acks, 99) / 1_000:.1f} ms, most {acks[-1] / 1_000:.0f} ms"
        )
    return lines
