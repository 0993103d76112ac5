"""A group of consumers under faults: members are killed, stopped and sent away while nodes fail.

Members are processes that print what they were given and what they committed (`tests.client.members`);
writers are those of every run. Checked at the end: every record was given to somebody; twice only what lay
behind the last commit of one that was killed, stopped or sent away; each key's records in order, by the time
at which each was given for the first time. Told besides: how many came twice, and for how long nobody owned
or read the partitions of a dead member.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import laminar
from tests.checkers import Fault, History
from tests.client.members import MemberProcess, ended
from tests.cluster.faults.cluster import faulty_cluster
from tests.cluster.faults.nemesis import Nemesis
from tests.cluster.faults.profiles import CONVERGE_S, PARTITIONS, PROFILES, SETTINGS, TOPICS, settle
from tests.cluster.faults.report import percentile, tell, violations_of
from tests.cluster.faults.workload import Workload

TOPIC = "synced"
GROUP = "billing"
MEMBERS = 3
SESSION_S = 4.0
COMMIT_EVERY = 5


class Crowd:
    """The members, and who is among the living; a dead one is followed by another."""

    def __init__(self, urls: Sequence[str], rng: random.Random, *, topic: str = TOPIC) -> None:
        self.topic = topic
        self.all: list[MemberProcess] = []
        self.happened: Counter[str] = Counter()
        # When each was killed, and which partitions it was reading then.
        self.killed: list[tuple[float, MemberProcess]] = []
        # Those that were killed or sent away, and when.
        self._gone_s: dict[int, float] = {}
        self._urls = list(urls)
        self._rng = rng
        self._living: list[MemberProcess] = []

    def join(self) -> None:
        """One more."""
        member = MemberProcess(self._urls, self.topic, GROUP, session_s=SESSION_S, every=COMMIT_EVERY)
        self.all.append(member)
        self._living.append(member)

    async def trouble(self) -> None:
        """For ever: something happens to one of them, then a calm."""
        while True:
            await asyncio.sleep(self._rng.uniform(4.0, 10.0))
            what = self._rng.choice(("kill member", "stop member", "member leaves"))
            member = self._rng.choice(self._living)
            self.happened[what] += 1
            if what == "stop member":
                member.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(SESSION_S * self._rng.uniform(0.5, 2.5))
                member.process.send_signal(signal.SIGCONT)
                continue
            self._living.remove(member)
            self._gone_s[id(member)] = time.monotonic()
            if what == "kill member":
                self.killed.append((self._gone_s[id(member)], member))
                await asyncio.to_thread(member.kill)
            else:
                member.process.send_signal(signal.SIGINT)
            await asyncio.sleep(SESSION_S * self._rng.uniform(0.0, 2.0))
            self.join()

    def ended_by_themselves(self) -> list[str]:
        """What those that should be there ended with."""
        codes = [member.process.poll() for member in self._living]
        return [f"a member ended by itself with {code}" for code in codes if code is not None]

    # -- what they were given ------------------------------------------------------------------

    def given(self) -> Counter[tuple[int, int]]:
        """How often each (partition, offset)."""
        return Counter(place for member in self.all for place in member.read)

    def wrong(self, ends: dict[int, int]) -> list[str]:
        """A sentence for each thing that must not be."""
        counts = self.given()
        wanted = {(partition, offset) for partition, end in ends.items() for offset in range(end)}
        found = [f"lost: {place} was given to nobody" for place in sorted(wanted - counts.keys())]
        may = set[tuple[int, int]]().union(*(member.uncommitted for member in self.all))
        twice = {place for place, count in counts.items() if count > 1}
        found += [f"doubled: {place} was committed and given again" for place in sorted(twice - may)]
        return found + self._out_of_order() + self.ended_by_themselves()

    def _out_of_order(self) -> list[str]:
        first: dict[tuple[str, int], float] = {}
        for member in self.all:
            for at_s, words in member.lines:
                if words[0] == "read":
                    value = (words[3], int(words[4]))
                    first[value] = min(at_s, first.get(value, at_s))
        keys: dict[str, list[tuple[float, int]]] = {}
        for (key, number), at_s in first.items():
            keys.setdefault(key, []).append((at_s, number))
        found = []
        for key, given in keys.items():
            numbers = [number for _, number in sorted(given)]
            if numbers != sorted(numbers):
                found.append(f"reordered: key {key} was given as {numbers[:20]}")
        return found

    def handed_over_s(self, killed: Sequence[tuple[float, MemberProcess]]) -> tuple[list[float], list[float]]:
        """Of each partition that a killed member owned: until another owned it, and got a record of it."""
        owned, read = [], []
        for killed_s, victim in killed:
            others = [each for each in self.all if self._gone_s.get(id(each), killed_s + 1) > killed_s]
            for partition in _owned_at(victim, killed_s):
                if any(partition in _owned_at(member, killed_s) for member in others):
                    continue  # it had lost it before, and did not live to see that
                taken = [
                    at_s
                    for member in others
                    for at_s, had in member.owns()
                    if at_s >= killed_s and partition in had
                ]
                given = [
                    at_s
                    for member in others
                    for at_s, words in member.lines
                    if at_s >= killed_s and words[0] == "read" and int(words[1]) == partition
                ]
                owned += [min(taken) - killed_s] if taken else []
                read += [min(given) - killed_s] if given else []
        return sorted(owned), sorted(read)


def _owned_at(member: MemberProcess, at_s: float) -> set[int]:
    """What a member owned at a moment, as it said last."""
    return next((had for since_s, had in reversed(member.owns()) if since_s <= at_s), set())


async def run_groups(
    profile: str, folder: Path, *, minutes: float, nodes: int, shards: int, seed: int, appends_per_s: float
) -> bool:
    """One run from an empty cluster to its report; whether nothing was wrong."""
    rng = random.Random(seed)
    with faulty_cluster(folder / "cluster", nodes=nodes, shards=shards, settings=SETTINGS) as cluster:
        async with laminar.aio.connect(cluster.urls) as client:
            for topic, flush in TOPICS.items():
                await client.create_topic(topic, partitions=PARTITIONS, replicas=3, settings={"flush": flush})
        history = History(folder / "history.jsonl")
        workload = Workload(
            history,
            cluster.urls,
            list(TOPICS),
            partitions=PARTITIONS,
            appends_per_s=appends_per_s,
            seed=seed,
        )
        nemesis = Nemesis(cluster, workload, history, list(TOPICS), rng=rng)
        crowd = Crowd(cluster.urls, rng)
        wrong, sentences, failure = [], [], ""
        with ended(crowd.all):
            try:
                await workload.start()
                for _ in range(MEMBERS):
                    crowd.join()
                await workload.more(200)
                trouble = asyncio.create_task(crowd.trouble())
                await PROFILES[profile](nemesis, minutes * 60)
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
                for member in crowd.all:
                    if member.process.poll() is None:
                        member.process.send_signal(signal.SIGCONT)
                crowd.join()
                workload.check_alive()
                wrong += await settle(cluster, workload)
                ends = await read_to_the_end(cluster.urls, crowd)
                sentences = crowd.wrong(ends)
            except Exception:  # noqa: BLE001 - whatever it is: the history up to here is told and kept
                failure = traceback.format_exc()
            finally:
                await workload.close()
                history.close()
        wrong += violations_of(history, followers=workload.followers if not failure else ())
    sound = tell(folder, history, wrong, nemesis.happened + crowd.happened, failure)
    for line in [*_told(crowd, sentences, history.faults), *(f"  {sentence}" for sentence in sentences[:20])]:
        print(line, flush=True)
    return sound and not sentences


async def read_to_the_end(urls: Sequence[str], crowd: Crowd) -> dict[int, int]:
    """Return where the partitions end, when the members were given all of it, or nothing more for long."""
    async with laminar.aio.connect(urls) as client:
        ends = await client.topic(crowd.topic).offsets("latest")
    most, deadline = 0, time.monotonic() + CONVERGE_S
    while time.monotonic() < deadline:
        given = len(crowd.given())
        if given >= sum(ends.values()):
            break
        if given > most:
            # A member commits after a few records, and a long run leaves hundreds of thousands to be read.
            most, deadline = given, time.monotonic() + CONVERGE_S
        await asyncio.sleep(1.0)
    return ends


def _told(crowd: Crowd, sentences: Sequence[str], faults: Sequence[Fault]) -> list[str]:
    counts = crowd.given()
    found = Counter(sentence.partition(":")[0] for sentence in sentences)
    lines = [
        f"group: {len(crowd.all)} members were given {counts.total():,} records: lost {found['lost']}, "
        f"committed and doubled {found['doubled']}, reordered {found['reordered']}; "
        f"{counts.total() - len(counts)} came again that were not committed",
    ]
    quiet = [kill for kill in crowd.killed if not any(map(_About(kill[0]), faults))]
    for when, killed in (("", crowd.killed), (", nothing else failing", quiet)):
        for what, took in zip(("other owner", "record"), crowd.handed_over_s(killed), strict=True):
            if took:
                lines.append(
                    f"from kill -9 of a member to the next {what} of its partitions (session {SESSION_S:g} s)"
                    f"{when}: {len(took)} over {len(killed)} kills, p50 {percentile(took, 50):.1f} s,"
                    f" p99 {percentile(took, 99):.1f} s, most {took[-1]:.1f} s"
                )
    return lines


class _About:
    """Whether a fault was there in the session behind a kill, or a second before or behind that.

    Then the group's roster may have got another leader, who waits for one more session before it takes
    anybody for dead; or nobody could be asked.
    """

    def __init__(self, killed_s: float) -> None:
        self._from_us = (killed_s - 1) * 1e6
        self._to_us = (killed_s + SESSION_S + 1) * 1e6

    def __call__(self, fault: Fault) -> bool:
        end_us = fault.end_us or fault.start_us
        return fault.what != "clock step" and fault.start_us < self._to_us and end_us > self._from_us
