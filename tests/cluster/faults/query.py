"""A Spark query under faults: it copies a topic into another, is killed, and goes on from its checkpoint.

The driver is a process of its own (`tests.spark.copying`), with one task at a time and a small heap. Most are
killed some time after the first batch that they committed, some at any moment of their start.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from laminar.client.policy.lineage import Lineage
from laminar.spark.read.offsets import decode
from tests.spark.copying import Driver, Query, kill

MASTER = "local[1,2]"
# A batch may wait as long as the client's requests do, several times over.
BATCH_LIMIT_S = 300.0
LONGEST_LIFE_S = 60.0
LONGEST_START_S = 12.0


class KilledQuery:
    """The query, of which one driver runs at a time. `sentences` says what must not be."""

    def __init__(self, urls: Sequence[str], folder: Path, rng: random.Random, *, source: str, target: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.happened: Counter[str] = Counter()
        self.sentences: list[str] = []
        self.source, self.target = source, target
        self.copied = 0
        # Of the changes of the source's route: over how many drivers went that were killed, and all of them.
        self.changes_before_drain = self.changes = 0
        self._rng = rng
        self._query = Query(
            list(urls),
            folder / "checkpoint",
            folder / "driver.log",
            source=source,
            target=target,
            batch_records=3000,
        )

    async def go_on(self) -> None:
        """For ever: a driver is started, and killed after a while; also when this is cancelled."""
        while True:
            driver = self._query.start(master=MASTER)
            try:
                if self._rng.random() < 0.2:
                    await asyncio.sleep(self._rng.uniform(0.0, LONGEST_START_S))
                else:
                    await self._until_batch(driver)
                    await asyncio.sleep(self._rng.uniform(0.0, LONGEST_LIFE_S))
            finally:
                if driver.poll() is None:
                    kill(driver)
                    self.happened["killed"] += 1
                else:
                    self.happened["ended"] += 1
                    self.sentences.append(f"ended by itself with {driver.returncode}: {self._last_words()}")

    async def drain(self, lineage: Lineage) -> None:
        """Have a last driver copy what is missing, as long as it gets on; nothing is appended any more."""
        self.changes_before_drain = self._changes_gone_over(lineage)
        driver = self._query.start(master=MASTER, until_done=True)
        try:
            batches, deadline = self._query.batches(), time.monotonic() + BATCH_LIMIT_S
            while driver.poll() is None:
                if (count := self._query.batches()) > batches:
                    batches, deadline = count, time.monotonic() + BATCH_LIMIT_S
                if time.monotonic() >= deadline:
                    raise RuntimeError(
                        f"the query copied nothing for {BATCH_LIMIT_S:g} s: {self._last_words()}"
                    )
                await asyncio.sleep(1.0)
        finally:
            if driver.poll() is None:
                kill(driver)
        if driver.returncode != 0:
            raise RuntimeError(f"the query does not drain, {driver.returncode}: {self._last_words()}")
        self.changes = self._changes_gone_over(lineage)

    def compare(
        self, source: Sequence[tuple[str, int]], target: Sequence[tuple[str, int]], lineage: Lineage
    ) -> None:
        """Note what differs between the topics, each in the order of one reader."""
        self.copied = len(target)
        self.sentences += differences(source, target)
        if self.changes != len(lineage.changes):
            self.sentences.append(f"went over {self.changes} changes of {len(lineage.changes)}")

    def told(self) -> str:
        """The line of the summary."""
        found = Counter(sentence.partition(":")[0] for sentence in self.sentences)
        return (
            f"Spark query: copied {self.copied:,} records in {self._query.batches():,} micro-batches, killed "
            f"{self.happened['killed']} times, ended by itself {self.happened['ended']} times; went over "
            f"{self.changes} changes of the route, over {self.changes_before_drain} of them before the last "
            f"driver; lost {found['lost']}, doubled {found['doubled']}, reordered {found['reordered']} (keys)"
        )

    async def _until_batch(self, driver: Driver) -> None:
        count = self._query.batches()
        deadline = time.monotonic() + BATCH_LIMIT_S
        while self._query.batches() == count and driver.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the query commits no batch for {BATCH_LIMIT_S:g} s: {self._last_words()}"
                )
            await asyncio.sleep(0.1)

    def _changes_gone_over(self, lineage: Lineage) -> int:
        """How many changes have all their outputs in the query's last offset: it began to read them."""
        offsets = sorted(
            (path for path in (self._query.checkpoint / "offsets").glob("*") if path.name.isdecimal()),
            key=lambda path: int(path.name),
        )
        if not offsets:
            return 0
        # A version, the query's settings, and an offset for each of its sources.
        positions = decode(json.loads(offsets[-1].read_text().splitlines()[2])).positions
        begun = {number for _, number in positions}
        # The query forgets those that it read to their ends and that are reclaimed.
        begun |= {each.partition for change in lineage.changes for each in change.inputs if each.reclaimed}
        return sum(begun.issuperset(change.outputs) for change in lineage.changes)

    def _last_words(self) -> str:
        return self._query.log.read_text(errors="replace")[-3_000:]


def differences(source: Sequence[tuple[str, int]], target: Sequence[tuple[str, int]]) -> list[str]:
    """Return a sentence for each key whose numbers differ: the target is to have the source's, in order."""
    wanted, found = _by_key(source), _by_key(target)
    told = []
    for key in sorted(wanted.keys() | found.keys()):
        there, copied = wanted.get(key, []), found.get(key, [])
        missing, more = Counter(there) - Counter(copied), Counter(copied) - Counter(there)
        if missing:
            told.append(f"lost: key {key}: {sorted(missing)[:20]}")
        if more:
            told.append(f"doubled: key {key}: {sorted(more)[:20]}")
        if not missing and not more and there != copied:
            place = next(place for place, each in enumerate(there) if copied[place] != each)
            told.append(f"reordered: key {key}: {copied[place : place + 20]} from {place} on")
    return told


def _by_key(read: Sequence[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for key, number in read:
        found.setdefault(key, []).append(number)
    return found
