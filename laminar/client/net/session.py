"""The client's calls: the loop around the decisions, and the maps they are made with.

A `Session` owns the connections, the map of each topic and what was seen of it. `call` and
`fetch` perform what `policy.retry` says until an answer is good or the deadline passes. It is
apart from the faces, which only shape arguments and results.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit

from laminar.batch import BATCH_TYPE, Header
from laminar.client.errors import Error, NotFound, OutcomeUnknown, TimedOut, Unavailable, from_problem
from laminar.client.net.endpoints import Endpoints
from laminar.client.net.pool import Pool
from laminar.client.net.shared_port import SharedPorts
from laminar.client.policy.retry import Backoff, Step, Verdict, judge_answer, judge_loss
from laminar.client.policy.routing import Balancer, Seen, TopicMap, readers
from laminar.http.client.connection import head_bytes
from laminar.http.protocol.answer import Answer, Buffer, ConnectionFailed, Target

_log = logging.getLogger("laminar.client")

ATTEMPT_TIMEOUT_S = 10.0
# An attempt that ends so close to its call's deadline was cut off by it.
CUT_OFF_S = 0.05
# With less time left no other try begins: it would be cut off, and nobody could tell what it did.
LEAST_TRY_S = 0.005
CONNECT_TIMEOUT_S = 2.0
# Who wants to know where a partition begins or ends asks its replicas when no leader was found for so long,
# which is longer than an election; and waits so long for each.
LEADER_PATIENCE_S = 5.0
REPLICA_TIMEOUT_S = 2.0
# For so long the node that is asked for a map waits for replicas that do not answer it; and how much longer
# we wait for the node itself before another is asked.
MAP_WAIT_MS = 500
MAP_PATIENCE_S = 1.0
# One that was given up for its silence is not tried again for so long, whoever names it as leader.
SILENT_MS = 1_000


def _first_offset(body: Buffer) -> int | None:
    """The offset of the first record of some batches; None where there is none."""
    return Header.unpack(body).base_offset if body else None


def now_ms() -> int:
    """The monotonic clock, in whole milliseconds."""
    return time.monotonic_ns() // 1_000_000


def topic_path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def retry_after_ms(answer: Answer, problem: Mapping[str, Any]) -> int | None:
    """The pause a server asked for: its problem document is exact, the header in whole seconds."""
    exact = problem.get("retry_after_ms")
    if isinstance(exact, int):
        return exact
    header = answer.headers.get("retry-after", "")
    return int(header) * 1000 if header.isdecimal() else None


def origin_of(location: str) -> str:
    """The node a ``Location`` leads to: its URL without the path."""
    if location.startswith(("http://", "https://")):
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc}"
    return location


def judged(answer: Answer, *, repeatable: bool, redirects: int) -> tuple[Verdict, dict[str, Any]]:
    """The verdict on an answer, and its problem document ({} if it was good)."""
    if 200 <= answer.status < 300:
        problem: dict[str, Any] = {}
    else:
        body = answer.json()
        problem = body if isinstance(body, dict) else {}
    verdict = judge_answer(
        status=answer.status,
        code=problem.get("code"),
        location=answer.headers.get("location"),
        retry_after_ms=retry_after_ms(answer, problem),
        repeatable=repeatable,
        redirects=redirects,
        outcome=problem.get("outcome"),
    )
    return verdict, problem


class Closable(Protocol):
    """A sender that works on a session, and ends with it."""

    @property
    def resent(self) -> int:
        """Number of times a batch was sent again."""

    async def end(self, error: Error) -> None:
        """Stop sending; what has no receipt fails with `error`."""


class Session:
    """One client's state on its event loop. `close` ends it; nothing works afterwards."""

    def __init__(
        self, endpoints: Endpoints, *, timeout_s: float, rng: random.Random, shared_port: bool = False
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoints = endpoints
        self.timeout_s = timeout_s
        self.rng = rng
        places = SharedPorts(endpoints.urls, ask=self._ask_cluster, now_ms=now_ms) if shared_port else None
        self.pool = Pool(self.loop, connect_timeout_s=CONNECT_TIMEOUT_S, idle_s=20.0, shared_ports=places)
        self.balancer = Balancer()
        self.seen = Seen()
        self.closed = False
        self.retries = 0
        self.redirects = 0
        self._silent_until_ms: dict[str, int] = {}
        self.reads_by_node: dict[str, int] = {}
        self._closables: set[Closable] = set()
        self._resent_before = 0
        self._nodes: list[str] = list(endpoints.urls)
        self._maps: dict[str, TopicMap] = {}
        self._refreshing: dict[str, asyncio.Task[TopicMap]] = {}
        # Of each node's URL its authority, and what all requests to it carry.
        self._heads: dict[str, tuple[str, dict[str, str]]] = {}

    # -- plain calls ---------------------------------------------------------------------------

    def head(self, url: str, method: str, target: str, headers: Mapping[str, str]) -> bytes:
        """A request's head for the node at `url`."""
        known = self._heads.get(url)
        if known is None:
            common = {"Laminar-Redirect": "1"}
            # Not to every node that an answer or a redirect leads to.
            if self.endpoints.token and self.endpoints.may_hear_token(url):
                common["Authorization"] = f"Bearer {self.endpoints.token}"
            known = self._heads[url] = (Target.of(url).authority, common)
        authority, common = known
        return head_bytes(method, target, authority, {**common, **headers})

    def learn_nodes(self, urls: Sequence[str]) -> None:
        """More nodes to ask than those that `connect` was given."""
        for url in urls:
            if url and url.rstrip("/") not in self._nodes:
                self._nodes.append(url.rstrip("/"))

    async def _ask_cluster(self, url: str) -> Answer:
        return await self.pool.ask(url, self.head(url, "GET", "/v1/cluster", {}), timeout_s=CONNECT_TIMEOUT_S)

    async def call(
        self,
        method: str,
        target: str,
        *,
        body: Buffer = b"",
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
        timeout_s: float | None = None,
        accept: Sequence[int] = (),
        first: str | None = None,
        among: Sequence[str] = (),
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
    ) -> Answer:
        """A request any node can answer, repeated until one did; statuses in `accept` are returned too.

        `first` is the node to begin with, if it matters; then those in `among` are asked, and all others only
        after them. One that does not answer for `attempt_timeout_s` is left for the next.

        Raises the `Error` the answer stands for, `TimedOut` or `OutcomeUnknown` at the deadline. What it
        says as `outcome` is of all tries: of a change that an earlier one may have made it is unknown.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(rng=self.rng)
        sent_headers = dict(headers or {})
        if body or method in ("PUT", "POST", "PATCH"):
            sent_headers["Content-Length"] = str(len(body))
        changes = method not in ("GET", "HEAD")
        maybe_applied = False
        redirects = 0
        url = first
        last = ""
        while True:
            if self.closed:
                raise Unavailable("the client was closed", code="client_closed")
            if url is None:
                url = self._any_node(among)
            assert url is not None, "a session without nodes"
            left_s = deadline - time.monotonic()
            if left_s <= (LEAST_TRY_S if last else 0):
                told = last or "nothing was tried"
                raise self._overdue(f"{method} {target}", timeout_s, told, maybe_applied and changes)
            answer: Answer | None = None
            self.balancer.started(url)
            try:
                answer = await self.pool.ask(
                    url,
                    self.head(url, method, target, sent_headers),
                    (body,) if body else (),
                    timeout_s=min(left_s, attempt_timeout_s),
                    bodyless=method == "HEAD",
                )
            except ConnectionFailed as failure:
                last = str(failure)
                verdict = judge_loss(sent=failure.sent, repeatable=repeatable)
                self.balancer.failed(url, now_ms=now_ms())
                problem: dict[str, Any] = {}
            except BaseException:
                self.balancer.finished(url, latency_us=None)
                raise
            else:
                self.balancer.finished(url, latency_us=None)
                if answer.status in accept:
                    return answer
                verdict, problem = judged(answer, repeatable=repeatable, redirects=redirects)
                last = str(problem.get("detail") or f"{url} answered {answer.status}")
                if verdict.avoid:
                    self.balancer.failed(url, now_ms=now_ms(), started=False)
            if verdict.step is Step.DONE:
                assert answer is not None
                return answer
            maybe_applied |= verdict.maybe_applied
            if verdict.step is Step.FAIL:
                if answer is not None:
                    error = from_problem(answer.status, problem, asked=f"{method} {target}")
                    if maybe_applied and changes:
                        error.outcome = "unknown"  # what the answer says is true of the last try alone
                    raise error
                raise OutcomeUnknown(f"{method} {target}: {last}", code="outcome_unknown", outcome="unknown")
            url = await self._pause(verdict, backoff, deadline)
            redirects = redirects + 1 if verdict.step is Step.FOLLOW else 0

    def _any_node(self, among: Sequence[str]) -> str | None:
        """The node to ask next: one in `among` that has not failed lately, else whichever is known."""
        resting = set(self.balancer.resting(now_ms=now_ms()))
        awake = [url for url in among if url not in resting]
        return self.balancer.choose(awake or self._nodes, now_ms=now_ms())

    async def _pause(self, verdict: Verdict, backoff: Backoff, deadline: float) -> str | None:
        """Wait as the verdict says; returns the URL it leads to, if any."""
        if verdict.step is Step.FOLLOW:
            self.redirects += 1
            assert verdict.location is not None
            return origin_of(verdict.location)
        self.retries += 1
        wait_s = max(backoff.next_ms(), verdict.wait_ms) / 1000
        await asyncio.sleep(max(0.0, min(wait_s, deadline - time.monotonic())))
        return origin_of(verdict.location) if verdict.location else None

    def _overdue(self, what: str, timeout_s: float, last: str, maybe_applied: bool) -> Error:
        message = f"{what} was not answered within {timeout_s:g} s; last: {last}"
        if maybe_applied:
            return OutcomeUnknown(message, code="outcome_unknown", outcome="unknown")
        return TimedOut(message, code="timed_out", retriable=True, outcome="not_applied")

    async def get_json(self, target: str, *, timeout_s: float | None = None) -> Any:
        return (await self.call("GET", target, timeout_s=timeout_s)).json()

    # -- maps ----------------------------------------------------------------------------------

    async def topic_map(self, topic: str, *, timeout_s: float | None = None) -> TopicMap:
        """The places of `topic`'s partitions; asked for again when it proved stale."""
        known = self._maps.get(topic)
        if known is not None and not known.stale:
            if known.aged(now_ms=now_ms()):
                self._refreshed(topic, timeout_s)
            return known
        return await asyncio.shield(self._refreshed(topic, timeout_s))

    def _refreshed(self, topic: str, timeout_s: float | None) -> asyncio.Task[TopicMap]:
        """The one refresh of `topic`'s map that is under way; begun if there is none."""
        refreshing = self._refreshing.get(topic)
        if refreshing is None:
            refreshing = self._refreshing[topic] = self.loop.create_task(self._refresh(topic, timeout_s))
            refreshing.add_done_callback(lambda done: self._refresh_ended(topic, done))
        return refreshing

    def _refresh_ended(self, topic: str, done: asyncio.Task[TopicMap]) -> None:
        self._refreshing.pop(topic, None)
        if not done.cancelled():
            done.exception()  # who waits for it gets it; in the background the old map serves on

    def topic_map_nowait(self, topic: str) -> TopicMap | None:
        """The map as it is, stale or not."""
        return self._maps.get(topic)

    async def _refresh(self, topic: str, timeout_s: float | None) -> TopicMap:
        resting = self.balancer.resting(now_ms=now_ms())
        return await self.map_by_others(topic, avoid=resting, wait_ms=MAP_WAIT_MS, timeout_s=timeout_s)

    async def map_by_others(
        self, topic: str, *, avoid: Iterable[str], wait_ms: int, timeout_s: float | None = None
    ) -> TopicMap:
        """A new map of `topic`, told by another node than those at `avoid`, if one can; see MAP_WAIT_MS."""
        known = self._maps.get(topic)
        answer = await self.call(
            "GET",
            f"{topic_path(topic)}/partitions?wait_ms={wait_ms}",
            timeout_s=timeout_s,
            among=known.elsewhere(avoid) if known is not None else (),
            attempt_timeout_s=wait_ms / 1000 + MAP_PATIENCE_S,
        )
        fresh = TopicMap.from_answer(answer.json(), now_ms=now_ms())
        self._maps[topic] = fresh
        for place in fresh.places:
            self.learn_nodes([replica.url for replica in place.replicas])
        return fresh

    def forget_topic(self, topic: str) -> None:
        self._maps.pop(topic, None)
        self.seen.forget(topic)

    # -- reads ---------------------------------------------------------------------------------

    async def fetch(
        self,
        topic: str,
        partition: int,
        *,
        offset: int,
        max_bytes: int,
        wait_ms: int = 0,
        at_least: int = 0,
        from_leader: bool = False,
        only: int | None = None,
        timeout_s: float | None = None,
        narrowed: Mapping[str, str | int] | None = None,
    ) -> Answer:
        """Frames from `offset` on, from the replica that has least to do and is not behind.

        A good answer may hold no frames; its first one holds the record at `offset`. `at_least` is an end
        the caller knows of. With `only` no other replica than that one is asked, as `readers` numbers them.
        `narrowed` are parameters that leave out something: ``to``, ``tag``, ``fields``. Raises
        `OffsetExpired`, or as `call` does.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s + wait_ms / 1000
        backoff = Backoff(rng=self.rng)
        min_offset = max(self.seen.next_offset(topic, partition), offset, at_least)
        target = (
            f"{topic_path(topic)}/partitions/{partition}/records?offset={offset}&max_bytes={max_bytes}"
            f"&wait_ms={wait_ms}&read={'leader' if from_leader else 'replica'}"
        )
        if min_offset and not from_leader:
            target += f"&min_offset={min_offset}"
        if narrowed:
            target += f"&{urlencode(narrowed)}"
        what = f"reading {topic}/{partition} at {offset}"
        redirects = 0
        behind: set[str] = set()
        url: str | None = None
        last = nobody = "no replica is known"
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimedOut(
                    f"{what} was not answered within {timeout_s:g} s; last: {last}", code="timed_out"
                )
            if url is None:
                places = await self.topic_map(topic, timeout_s=left_s)
                leader = places.leader(partition)
                urls = readers(places.replicas(partition), leader, from_leader=from_leader, only=only)
                ahead = [each for each in urls if each not in behind]
                # Nobody known: any node passes the request on.
                anybody = self._nodes if only is None else ()
                url = self.balancer.choose(ahead or urls or anybody, now_ms=now_ms())
                if url is None:
                    raise NotFound(f"{what}: there is no replica {only}", code="no_such_replica", value=only)
            assert url is not None, "a session without nodes"
            started = time.perf_counter()
            self.balancer.started(url)
            answer: Answer | None = None
            problem: dict[str, Any] = {}
            try:
                answer = await self.pool.ask(
                    url,
                    self.head(url, "GET", target, {"Accept": BATCH_TYPE}),
                    timeout_s=min(left_s, ATTEMPT_TIMEOUT_S + wait_ms / 1000),
                )
            except ConnectionFailed as failure:
                # A try that our own deadline cut off says less than an answer before it.
                if last is nobody or time.monotonic() < deadline - CUT_OFF_S:
                    last = str(failure)
                verdict = judge_loss(sent=failure.sent, repeatable=True)
                self.balancer.failed(url, now_ms=now_ms())
            except BaseException:
                self.balancer.finished(url, latency_us=None)
                raise
            else:
                latency_us = None if wait_ms else (time.perf_counter() - started) * 1e6
                self.balancer.finished(url, latency_us=latency_us)
                verdict, problem = judged(answer, repeatable=True, redirects=redirects)
                last = str(problem.get("detail") or f"{url} answered {answer.status}")
                if verdict.avoid:
                    self.balancer.failed(url, now_ms=now_ms(), started=False)
            if verdict.step is Step.DONE:
                assert answer is not None
                node = answer.headers.get("laminar-node", url)
                first = None if narrowed else _first_offset(answer.body)
                if first is not None and first > offset:
                    # Records are missing there, and it has not said so: another replica has them.
                    last = f"{node} answered {first} for {offset}"
                    self.balancer.failed(url, now_ms=now_ms(), started=False)
                    url = await self._pause(Verdict(step=Step.RETRY), backoff, deadline)
                    continue
                self.reads_by_node[node] = self.reads_by_node.get(node, 0) + 1
                return answer
            if verdict.step is Step.FAIL:
                assert answer is not None, "a read may always be repeated"
                raise from_problem(answer.status, problem, asked=what)
            known = self._maps.get(topic)
            if verdict.stale and known is not None:
                known.stale = True
            if problem.get("code") == "replica_lagging" and url not in behind:
                # Another replica may be further; only when all are behind is there a reason to wait.
                behind.add(url)
                url = None
                continue
            url = await self._pause(verdict, backoff, deadline)
            redirects = redirects + 1 if verdict.step is Step.FOLLOW else 0
            if only is not None:
                url = None  # wherever it led

    async def offset_at(
        self,
        topic: str,
        partition: int,
        at: str,
        *,
        id_: str = "",
        leader_only: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """The offset at ``earliest``, ``latest`` or an epoch time in ms, as the partition's leader has it.

        Where no leader is found within `LEADER_PATIENCE_S`, as the replica has it that knows most, unless
        `leader_only`: what is committed is read on with a majority gone. That may be less than all there is,
        and is logged. With `id_`, of the partition of this id only: `NotFound` where that is no more.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        places = await self.topic_map(topic, timeout_s=timeout_s)
        target = f"{topic_path(topic)}/partitions/{partition}/offsets?at={at}" + (f"&id={id_}" if id_ else "")
        left_s = max(0.0, deadline - time.monotonic())
        patience_s = left_s if leader_only else min(LEADER_PATIENCE_S, left_s / 2)
        try:
            answer = await self.call("GET", target, timeout_s=patience_s, first=places.leader(partition))
        except (TimedOut, OutcomeUnknown, Unavailable):
            if leader_only:
                raise
            found = await self._offset_of_replicas(topic, partition, target, deadline=deadline)
            if found is not None:
                return found
            left_s = max(0.0, deadline - time.monotonic())
            answer = await self.call("GET", target, timeout_s=left_s, first=places.leader(partition))
        return int(answer.json()["offset"])

    async def _offset_of_replicas(
        self, topic: str, partition: int, target: str, *, deadline: float
    ) -> int | None:
        """The offset by the word of the replica that is furthest; None if no replica answers, or a leader
        does meanwhile.
        """
        left_s = max(0.0, deadline - time.monotonic())
        places = await self.map_by_others(topic, avoid=(), wait_ms=MAP_WAIT_MS, timeout_s=left_s)
        if places.leader(partition) is not None:
            return None

        async def ask(url: str) -> tuple[int, int] | None:
            head = self.head(url, "GET", f"{target}&read=replica", {"Laminar-Local": "1"})
            left_s = max(0.0, deadline - time.monotonic())
            try:
                answer = await self.pool.ask(url, head, timeout_s=min(left_s, REPLICA_TIMEOUT_S))
            except ConnectionFailed:
                return None
            told = answer.json() if answer.status == 200 else None
            return (int(told["end_offset"]), int(told["offset"])) if told is not None else None

        urls = [replica.url for replica in places.places[partition].replicas]
        answers = [told for told in await asyncio.gather(*map(ask, urls)) if told is not None]
        if not answers:
            return None
        _log.warning("%s/%d has no leader: reading what its replicas know to be committed", topic, partition)
        return max(answers)[1]

    # -- those who do not answer -----------------------------------------------------------------

    def left_silent(self, url: str) -> None:
        """`url` was given up because it did not answer, and others lead."""
        self._silent_until_ms[url] = now_ms() + SILENT_MS

    def is_silent(self, url: str) -> bool:
        """Whether `url` was given up a moment ago."""
        return now_ms() < self._silent_until_ms.get(url, 0)

    # -- appends -------------------------------------------------------------------------------

    async def leader_connection(self, topic: str, partition: int) -> str:
        """The URL to append to, with a connection open to it in the pool.

        Raises ConnectionFailed (not sent), or `Error` if the topic is gone.
        """
        places = await self.topic_map(topic)
        if partition >= len(places.places):
            raise Unavailable(f"{topic}/{partition} is not known", code="no_leader", retriable=True)
        url = places.leader(partition)
        if url is None:
            # Any node knows the leader as soon as there is one, and redirects us; a replica knows it first.
            places.stale = True
            replicas = readers(places.replicas(partition), None, from_leader=False)
            url = self.balancer.choose(replicas or self._nodes, now_ms=now_ms())
        assert url is not None, "a session without nodes"
        try:
            await self.pool.shared(url)
        except ConnectionFailed:
            self.balancer.failed(url, now_ms=now_ms(), started=False)
            places.forget_leader(partition, url)
            raise
        return url

    def resent_batches(self) -> int:
        """Return how often a batch was sent again, by all senders of this session."""
        return self._resent_before + sum(each.resent for each in self._closables)

    def opened(self, sender: Closable) -> None:
        """End `sender` when the session is closed, and count what it sends again."""
        self._closables.add(sender)

    def ended(self, sender: Closable) -> None:
        """Forget a sender, but not what it counted. Idempotent."""
        if sender in self._closables:
            self._closables.remove(sender)
            self._resent_before += sender.resent

    async def close(self) -> None:
        """Fail what is under way and drop the connections. Idempotent."""
        self.closed = True
        gone = Unavailable("the client was closed", code="client_closed")
        await asyncio.gather(*(each.end(gone) for each in list(self._closables)))
        for task in list(self._refreshing.values()):
            task.cancel()
        await self.pool.close()
