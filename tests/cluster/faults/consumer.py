"""`python -m tests.cluster.faults.consumer URLS TOPIC CHANNEL FILE PLAN`: one consumer of a channel.

It speaks plain HTTP to one node at a time, for ever: a process that can be killed at any instant. What it
does and is told are lines of FILE, each written before it goes on: that it asks for records, what it got,
what it is about to say of them, what was answered. PLAN is JSON: `seed`; `poisoned`, [remainder, modulus] of
the numbers that it refuses for ever; the chances of `nack`, `release` and `extend`. `tests.checkers.channels`
reads the files.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from typing import Any
from urllib.parse import urlsplit

# Longer than a node waits for records and for its leaders.
ANSWER_S = 12.0
WAIT_MS = 2_000
MOST_JOBS = (1, 8, 100)
# A node is left for another after so many requests, too, so that all of them take some.
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


class Consumer:
    """Asks for records, and says what became of them."""

    def __init__(self, urls: list[str], topic: str, channel: str, file: str, plan: dict[str, Any]) -> None:
        self._rng = random.Random(plan["seed"])
        self._asker = Asker(urls, self._rng)
        self._path = f"/v1/topics/{topic}/channels/{channel}"
        self._plan = plan
        # Unbuffered: what was written is there when the process is killed.
        self._file = open(file, "ab", buffering=0)  # noqa: SIM115 - the process ends with it
        self._numbers = 0

    def _note(self, **line: Any) -> None:
        self._file.write(json.dumps({**line, "at": time.monotonic_ns() // 1_000}).encode() + b"\n")

    def _ask(self, what: str, path: str, body: dict[str, Any], **told: Any) -> dict[str, Any] | None:
        """Return the answer; None if it is a refusal, or none came."""
        self._numbers += 1
        number = self._numbers
        self._note(what=what, number=number, **told)
        try:
            status, answer = self._asker.post(self._path + path, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note(what="failed", number=number, outcome="unknown", error=repr(error)[:200])
            return None
        if status != 200:
            # Without a word about its outcome it may have been carried out.
            outcome = answer.get("outcome") or "unknown"
            self._note(what="failed", number=number, outcome=outcome, error=f"{status} {answer.get('code')}")
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
            self._note(what="got", number=number, jobs=jobs)
        else:
            self._note(what="told", number=number, done=answer["done"], late=answer["late"])
        return answer

    def go_on(self) -> None:
        """For ever."""
        while True:
            body = {"max": self._rng.randint(1, self._rng.choice(MOST_JOBS)), "wait_ms": WAIT_MS}
            answer = self._ask("asks", "/receive", body)
            if answer is None:
                time.sleep(0.2)
            elif answer["jobs"]:
                self._work_off(answer["jobs"])

    def _work_off(self, jobs: list[dict[str, Any]]) -> None:
        ack, nack, release, extend = [], [], [], []
        remainder, modulus = self._plan["poisoned"]
        for job in jobs:
            token, chance = job["token"], self._rng.random()
            if int(str(job["value"]).split()[-1]) % modulus == remainder:
                nack.append({"token": token, "reason": "poisoned"})
            elif chance < self._plan["nack"]:
                nack.append({"token": token, "delay_ms": self._rng.randint(0, 300)})
            elif chance < self._plan["nack"] + self._plan["release"]:
                release.append(token)
            else:
                if chance > 1 - self._plan["extend"]:
                    extend.append({"token": token})
                ack.append(token)
        if extend:
            self._say({"extend": extend})
        time.sleep(self._rng.uniform(0.0, 0.02))
        self._say({"ack": ranged(ack), "nack": nack, "release": release})

    def _say(self, said: dict[str, Any]) -> None:
        """Say it again while it is not known to be done: it may have been, and then that is the answer."""
        for _ in range(TRIES):
            if self._ask("says", "/acks", said, said=said) is not None:
                return
            time.sleep(self._rng.uniform(0.05, 0.5))


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


if __name__ == "__main__":
    urls, topic, channel, file, plan = sys.argv[1:6]
    Consumer(urls.split(","), topic, channel, file, json.loads(plan)).go_on()
