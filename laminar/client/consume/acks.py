"""The collector of jobs' outcomes: it joins those of 5 ms, and sends each leader one request.

If no request is under way, an outcome is sent at the end of the loop's turn, so that a single one does not
wait. A request that got no answer is sent again: a repeated acknowledgement changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from laminar.client.errors import Error, Late
from laminar.client.net.session import Session
from laminar.wire.channels import MAX_NAMED, Named, parse_token, token

COLLECT_S = 0.005


class Said(NamedTuple):
    """A consumer's report of the outcome of one job; `verb` is ack, nack, release or extend."""

    verb: str
    partition: int
    offset: int
    delivery: int
    delay_ms: int | None = None
    reason: str = ""
    timeout_ms: int | None = None

    @property
    def place(self) -> tuple[int, int, int]:
        """Partition, number of the delivery, and offset: they identify the job in an answer."""
        return self.partition, self.delivery, self.offset


class Acks:
    """The collector of outcomes for one channel; `path` is the path of the channel's resource."""

    def __init__(self, session: Session, topic: str, path: str) -> None:
        self.session = session
        self.loop = session.loop
        self.channel = unquote(path.rpartition("/")[2])
        self._topic = topic
        self._path = path
        self._collected: dict[tuple[int, int, int], tuple[Said, asyncio.Future[None]]] = {}
        self._timer: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def say(self, said: Said) -> None:
        """Report an outcome; return when it is committed. Raises `Late`, or an `Error` if no answer comes."""
        if said.place in self._collected:
            self._send()  # an answer names records, not what was said of them: one thing each
        future: asyncio.Future[None] = self.loop.create_future()
        self._collected[said.place] = said, future
        if len(self._collected) >= MAX_NAMED:
            self._send()
        elif self._timer is None and self._tasks:
            self._timer = self.loop.call_later(COLLECT_S, self._send)
        elif self._timer is None:
            self._timer = self.loop.call_soon(self._send)
        await future

    async def settle(self, said: Sequence[dict[str, Any] | str], verb: str) -> tuple[int, list[str]]:
        """Report one outcome for all tokens; return how many were changed, and the tokens that are late."""
        done, late = 0, []
        for start in range(0, len(said), MAX_NAMED):
            answer = await self._post({verb: said[start : start + MAX_NAMED]}, None)
            done += int(answer["done"])
            late += [str(each) for each in answer["late"]]
        return done, late

    def _send(self) -> None:
        """Send the collected outcomes: one request to each leader, in tasks of their own."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        collected, self._collected = self._collected, {}
        places = self.session.topic_map_nowait(self._topic)
        by_leader: dict[str | None, list[tuple[Said, asyncio.Future[None]]]] = defaultdict(list)
        for said, future in collected.values():
            by_leader[None if places is None else places.leader(said.partition)].append((said, future))
        for leader, part in by_leader.items():
            self._begin(leader, part)

    def _begin(self, leader: str | None, part: list[tuple[Said, asyncio.Future[None]]]) -> None:
        task = self.loop.create_task(self._ask(leader, part))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, leader: str | None, part: list[tuple[Said, asyncio.Future[None]]]) -> None:
        try:
            answer = await self._post(_body(said for said, _ in part), leader)
        except Exception as error:  # noqa: BLE001  # raised in those that wait, which would else wait for ever
            partitions = {said.partition for said, _ in part}
            if isinstance(error, Error) and error.code == "invalid" and len(partitions) > 1:
                # One of the partitions is gone by now: the others are not to suffer.
                for partition in partitions:
                    self._begin(leader, [each for each in part if each[0].partition == partition])
                return
            for _, future in part:
                if not future.done():
                    future.set_exception(error)
            return
        late = set(_places(map(str, answer["late"])))
        for said, future in part:
            if future.done():
                continue
            if said.place in late:
                future.set_exception(_late(self._topic, said))
            else:
                future.set_result(None)

    async def _post(self, body: dict[str, Any], leader: str | None) -> dict[str, Any]:
        answer = await self.session.call(
            "POST",
            f"{self._path}/acks",
            body=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            first=leader,
        )
        found: dict[str, Any] = answer.json()
        return found


def _body(said: Iterable[Said]) -> dict[str, Any]:
    """Return the body of a request; one token names a run of records with the same outcome."""
    body: dict[str, list[Any]] = {}
    for same, text in _tokens(said):
        item: Any = text
        if same.verb == "nack":
            item = {"token": text, "delay_ms": same.delay_ms, "reason": same.reason}
        elif same.verb == "extend":
            item = {"token": text, "timeout_ms": same.timeout_ms}
        body.setdefault(same.verb, []).append(item)
    return body


def _tokens(said: Iterable[Said]) -> Iterator[tuple[Said, str]]:
    """Yield, for each run of neighbouring records with the same outcome, its first one and its token."""

    def what(each: Said) -> tuple[Any, ...]:
        return (
            each.verb,
            each.partition,
            each.delivery,
            -1 if each.delay_ms is None else each.delay_ms,
            each.reason,
            each.timeout_ms or 0,
        )

    for _, group in groupby(sorted(said, key=lambda each: (what(each), each.offset)), key=what):
        run = list(group)
        first = 0
        for at in range(1, len(run) + 1):
            if at < len(run) and run[at].offset == run[at - 1].offset + 1:
                continue
            each = run[first]
            last = run[at - 1].offset
            text = token(each.partition, each.offset, each.delivery)
            if last > each.offset:
                text = f"{each.partition}:{each.offset}-{last}:{each.delivery}"
            yield each, text
            first = at


def _places(tokens: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    named: Named
    for named in map(parse_token, tokens):
        for offset in range(named.first, named.end):
            yield named.partition, named.delivery, offset


def _late(topic: str, said: Said) -> Late:
    return Late(
        f"{said.verb} of {topic}/{said.partition} at {said.offset} came too late: the delivery is over",
        code="late",
        field="token",
        value=token(said.partition, said.offset, said.delivery),
        outcome="not_applied",
    )
