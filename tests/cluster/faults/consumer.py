"""`python -m tests.cluster.faults.consumer URLS TOPIC CHANNEL FILE PLAN`: one consumer of a channel.

It works records off for ever, a process that can be killed at any instant: by plain HTTP to one node at a
time, or with the client library. What it does and is told are lines of FILE, each written before it goes on:
that it asks for records, what it got, what it is about to say of them, what was answered. PLAN is JSON: `by`,
`"http"` or `"client"`; `seed`; `poisoned`, [remainder, modulus] of the numbers that it refuses for ever; the
chances of `nack`, `release` and `extend`. `tests.checkers.channels` reads the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from laminar.aio import Job

# Longer than a node waits for records and for its leaders.
ANSWER_S = 12.0
WAIT_MS = 2_000
MOST_JOBS = (1, 8, 100)
# A node is left for another after this number of requests, too, so that all of them take some.
REQUESTS_OF_A_NODE = 40
TRIES = 4


class Asker:
    """One connection to one of the nodes; to another one after a failure."""

    def __init__(self, urls: list[str], rng: random.Random) -> None:
        self._urls = urls
        self._rng = rng
        self._connection: http.client.HTTPConnection | None = None
        self._left = 0

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and document of the answer. Raises `OSError` or `HTTPException` if none came."""
        if self._connection is None or self._left <= 0:
            self.turn_away()
            node = urlsplit(self._rng.choice(self._urls))
            self._connection = http.client.HTTPConnection(str(node.hostname), node.port, timeout=ANSWER_S)
            self._left = REQUESTS_OF_A_NODE
        self._left -= 1
        try:
            self._connection.request(
                "POST", path, json.dumps(body), headers={"Content-Type": "application/json"}
            )
            answer = self._connection.getresponse()
            document: dict[str, Any] = json.loads(answer.read())
        except Exception:
            self.turn_away()
            raise
        if answer.status != 200:
            self.turn_away()
        return answer.status, document

    def turn_away(self) -> None:
        """Ask another node next."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Notes:
    """The lines of one consumer's file."""

    def __init__(self, file: str) -> None:
        # Unbuffered: what was written is there when the process is killed.
        self._file = open(file, "ab", buffering=0)  # noqa: SIM115 - the process ends with it
        self._numbers = 0

    def begin(self, what: str, **told: Any) -> int:
        """Note a request that is about to be sent; return its number."""
        self._numbers += 1
        self.write(what, self._numbers, **told)
        return self._numbers

    def write(self, what: str, number: int, **told: Any) -> None:
        """Write a line about a request."""
        line = {"what": what, "number": number, **told, "at": time.monotonic_ns() // 1_000}
        self._file.write(json.dumps(line).encode() + b"\n")


class Plan:
    """What a consumer does with records."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.by = plan["by"]
        self.rng = random.Random(plan["seed"])
        self._remainder, self._modulus = plan["poisoned"]
        self._chances = plan

    def wanted(self) -> int:
        """Return how many records to ask for."""
        return self.rng.randint(1, self.rng.choice(MOST_JOBS))

    def verdict(self, value: str) -> str:
        """Return what becomes of a record: `poisoned`, `nack`, `release`, `extend` (and ack) or `ack`."""
        if int(value.split()[-1]) % self._modulus == self._remainder:
            return "poisoned"
        chance = self.rng.random()
        for verb in ("nack", "release", "extend"):
            if chance < self._chances[verb]:
                return verb
            chance -= self._chances[verb]
        return "ack"


class Consumer:
    """Asks for records by HTTP, and says what became of them."""

    def __init__(self, urls: list[str], path: str, notes: Notes, plan: Plan) -> None:
        self._asker = Asker(urls, plan.rng)
        self._path = path
        self._notes = notes
        self._plan = plan

    def _ask(self, what: str, path: str, body: dict[str, Any], **told: Any) -> dict[str, Any] | None:
        """Return the answer; None if it is a refusal, or none came."""
        number = self._notes.begin(what, **told)
        try:
            status, answer = self._asker.post(self._path + path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._notes.write("failed", number, outcome="unknown", error=repr(error)[:200])
            return None
        if status != 200:
            # Without a word about its outcome it may have been carried out.
            outcome = answer.get("outcome") or "unknown"
            self._notes.write("failed", number, outcome=outcome, error=f"{status} {answer.get('code')}")
            return None
        if what == "asks":
            jobs = [
                [
                    job["partition"],
                    job["offset"],
                    int(job["token"].rpartition(":")[2]),
                    job["attempt"],
                    job.get("key") or "",
                    str(job["value"]).rstrip(),
                    job.get("tag") or "",
                ]
                for job in answer["jobs"]
            ]
            self._notes.write("got", number, jobs=jobs)
        else:
            self._notes.write("told", number, late=answer["late"])
        return answer

    def go_on(self) -> None:
        """For ever."""
        while True:
            body = {"max": self._plan.wanted(), "wait_ms": WAIT_MS}
            answer = self._ask("asks", "/receive", body)
            if answer is None:
                time.sleep(0.2)
            elif answer["jobs"]:
                self._work_off(answer["jobs"])

    def _work_off(self, jobs: list[dict[str, Any]]) -> None:
        said: dict[str, list[Any]] = {"ack": [], "nack": [], "release": []}
        extend = []
        for job in jobs:
            token, verdict = job["token"], self._plan.verdict(job["value"])
            if verdict == "poisoned":
                said["nack"].append({"token": token, "reason": "poisoned"})
            elif verdict == "nack":
                said["nack"].append({"token": token, "delay_ms": self._plan.rng.randint(0, 300)})
            elif verdict == "release":
                said["release"].append(token)
            else:
                if verdict == "extend":
                    extend.append({"token": token})
                said["ack"].append(token)
        if extend:
            self._say({"extend": extend})
        time.sleep(self._plan.rng.uniform(0.0, 0.02))
        self._say({**said, "ack": ranged(said["ack"])})

    def _say(self, said: dict[str, Any]) -> None:
        """Say it again while it is not known to be done: it may have been, and then that is the answer."""
        for _ in range(TRIES):
            if self._ask("says", "/acks", said, said=said) is not None:
                return
            time.sleep(self._plan.rng.uniform(0.05, 0.5))


async def work(urls: list[str], topic: str, name: str, notes: Notes, plan: Plan) -> None:
    """Do the same with the client library, for ever."""
    import laminar  # a consumer by HTTP starts without it

    async with laminar.aio.connect(urls, timeout=ANSWER_S) as client:
        channel = None
        while channel is None:  # it may begin while no node can tell it of the channel
            with contextlib.suppress(laminar.Unavailable, laminar.TimedOut, laminar.OutcomeUnknown):
                channel = await client.topic(topic).channel(name)
        while True:
            number = notes.begin("asks")
            try:
                jobs = await channel.receive_batch(plan.wanted(), wait=WAIT_MS / 1_000)
            except laminar.Error as error:
                notes.write(
                    "failed", number, outcome=error.outcome or "unknown", error=f"client {error.code}"
                )
                await asyncio.sleep(0.2)
                continue
            notes.write("got", number, jobs=[_told(job) for job in jobs])
            verdicts = [(job, plan.verdict(job.text)) for job in jobs]
            await _say(notes, "extend", [job for job, verdict in verdicts if verdict == "extend"])
            await asyncio.sleep(plan.rng.uniform(0.0, 0.02))
            by_verb: dict[str, list[Job[bytes]]] = {"ack": [], "nack": [], "release": []}
            for job, verdict in verdicts:
                by_verb[{"poisoned": "nack", "extend": "ack"}.get(verdict, verdict)].append(job)
            await asyncio.gather(*(_say(notes, verb, those) for verb, those in by_verb.items()))


def _told(job: Job[bytes]) -> list[Any]:
    delivery = int(job.token.rpartition(":")[2])
    key = job.key.decode() if job.key else ""
    return [job.partition, job.offset, delivery, job.attempt, key, job.text.rstrip(), job.tag or ""]


async def _say(notes: Notes, verb: str, jobs: list[Job[bytes]]) -> None:
    """Say the same of all, each by itself: the client puts them together."""
    from laminar import Error, Late

    if not jobs:
        return
    number = notes.begin("says", said={verb: [job.token for job in jobs]})
    failures = await asyncio.gather(*(getattr(job, verb)() for job in jobs), return_exceptions=True)
    late, unknown = [], []
    for job, failure in zip(jobs, failures, strict=True):
        if isinstance(failure, Late) and verb == "ack":
            late.append(job.token)
        elif isinstance(failure, Error):
            # Late is also what the client has sent twice, as the first answer was lost.
            unknown.append(job.token)
        elif failure is not None:
            raise failure
    notes.write("told", number, late=late, unknown=unknown)


def ranged(tokens: list[str]) -> list[str]:
    """Return the same with one token for records that follow each other in one delivery."""
    found: list[tuple[str, int, int, str]] = []
    for token in tokens:
        partition, offset, delivery = token.split(":")
        last = found[-1] if found else None
        if last is not None and (last[0], last[2] + 1, last[3]) == (partition, int(offset), delivery):
            found[-1] = (partition, last[1], int(offset), delivery)
        else:
            found.append((partition, int(offset), int(offset), delivery))
    return [
        f"{partition}:{first}:{delivery}" if first == last else f"{partition}:{first}-{last}:{delivery}"
        for partition, first, last, delivery in found
    ]


def main(arguments: list[str]) -> None:
    """For ever."""
    urls, topic, channel, file, given = arguments
    notes, plan = Notes(file), Plan(json.loads(given))
    if plan.by == "client":
        asyncio.run(work(urls.split(","), topic, channel, notes, plan))
    Consumer(urls.split(","), f"/v1/topics/{topic}/channels/{channel}", notes, plan).go_on()


if __name__ == "__main__":
    main(sys.argv[1:])
