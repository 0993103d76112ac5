"""The session of a client: it sends all requests, and chooses the node for each attempt.

A `Session` owns the connections, the map of each topic (its leaders and replicas), and for each partition the
offset up to which this client has seen it. The public classes use `call` and `fetch` for all their requests;
a session itself knows no cursors and builds no batches.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from laminar.batch import BATCH_TYPE, HEADER_SIZE
from laminar.batch.header import fields
from laminar.client.errors import (
    Error,
    NotFound,
    OutcomeUnknown,
    TimedOut,
    Unavailable,
    client_closed,
    untrusted,
)
from laminar.client.net.attempts import Attempts, now_ms
from laminar.client.net.authorization import Authorization
from laminar.client.net.endpoints import Endpoints, trust_in
from laminar.client.net.pool import Pool
from laminar.client.net.shared_port import SharedPorts
from laminar.client.policy.routing import Balancer, SessionOffsets, TopicMap, readers
from laminar.http.api.deadlines import CLIENT_ATTEMPT_S, CLIENT_LEADER_WAIT_S
from laminar.http.client.connection import head_bytes
from laminar.http.protocol.answer import Answer, Buffer, ConnectionFailed, Target, TlsFailed

_log = logging.getLogger("laminar.client")

CONNECT_TIMEOUT_S = 2.0
# How long to wait for a replica that is asked for its first or end offset, as no leader is known.
REPLICA_TIMEOUT_S = 2.0
# How long the node that is asked for a map waits for replicas that do not answer it; and how much longer the
# client waits for that node before it asks another one.
MAP_WAIT_MS = 500
MAP_PATIENCE_S = 1.0
# A node whose connection was abandoned because it did not answer is not tried again before this time has
# passed, even if another node names it as leader.
SILENT_MS = 1_000

_BASE_OFFSET = fields("base_offset")


def start_query(start: int | str) -> str:
    """Return the query parameter for a fetch's start: an offset, earliest, latest, or epoch ms as text."""
    if isinstance(start, int) or start in ("earliest", "latest"):
        return f"offset={start}"
    return f"since={start}"


def skipped_ranges(answer: Answer) -> list[tuple[int, int]]:
    """Return the ranges of damaged records that a fetch with ``on_damage=skip`` left out.

    Each is (first offset, offset after the last).

    They lie before the answer's first batch. If it has no batch, the next fetch continues after them.
    """
    ranges = answer.headers.get("laminar-skipped-offsets")  # as in "3-4,7-7"
    ends = [each.split("-") for each in ranges.split(",")] if ranges else []
    return [(int(first), int(last) + 1) for first, last in ends]


def skipped_end(answer: Answer) -> int:
    """Return the offset after the last of `skipped_ranges`; 0 if there are none."""
    return max((past for _, past in skipped_ranges(answer)), default=0)


def _first_offset(body: Buffer) -> int | None:
    """Return what the first header in `body` says of its first record's offset; None if there is none.

    Who splits the body into batches verifies their headers.
    """
    return _BASE_OFFSET.unpack_from(body)[0] if len(body) >= HEADER_SIZE else None


def topic_path(topic: str) -> str:
    """Return the path of a topic's resource."""
    return f"/v1/topics/{quote(topic, safe='')}"


class Closable(Protocol):
    """A sender that is registered with a session (`Session.opened`), which ends it when it is closed."""

    @property
    def resent(self) -> int:
        """Number of times a batch was sent again."""

    async def end(self, error: Error) -> None:
        """Stop sending; records without a receipt fail with `error`."""


class Session:
    """One client's connections, maps of topics and senders, on its event loop.

    After `close` every call fails.

    Raises:
        ConfigError: the token file or the CA file cannot be used.
    """

    def __init__(
        self, endpoints: Endpoints, *, timeout_s: float, rng: random.Random, shared_port: bool = False
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoints = endpoints
        self.timeout_s = timeout_s
        self.rng = rng
        places = SharedPorts(endpoints.urls, ask=self._ask_cluster, now_ms=now_ms) if shared_port else None
        self.authorization = Authorization(endpoints)
        self.pool = Pool(
            self.loop,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            idle_s=20.0,
            shared_ports=places,
            trust=trust_in(endpoints.ca, endpoints.certificate, endpoints.key),
            tls_only=endpoints.tls_only,
        )
        self.balancer = Balancer()
        self.seen = SessionOffsets()
        self.closed = False
        self.retries = 0
        self.redirects = 0
        # By topic, the version of its route that the last answer to an append or a fetch named. It goes back
        # a little with a node that lags, and for good when the topic is created again.
        self.routes: dict[str, int] = {}
        self._silent_until_ms: dict[str, int] = {}
        self.reads_by_node: dict[str, int] = {}
        self._closables: set[Closable] = set()
        self._resent_before = 0
        self._nodes: list[str] = list(endpoints.urls)
        self._maps: dict[str, TopicMap] = {}
        self._refreshing: dict[str, asyncio.Task[TopicMap]] = {}
        # By the URL of a node: the value of the Host header, and the headers of all requests to that node.
        self._heads: dict[str, tuple[str, dict[str, str]]] = {}
        self._heads_version = (0, False)
        self._passed_on = False
        # The id of the import that all requests of this session belong to; empty: of none.
        self.import_id = ""

    # -- plain calls ---------------------------------------------------------------------------

    def head(self, url: str, method: str, target: str, headers: Mapping[str, str]) -> bytes:
        """Return the head of an HTTP request to the node at `url`, with the token if it may get it."""
        version = self.heads_version
        if version != self._heads_version:
            self._heads.clear()
            self._heads_version = version
        known = self._heads.get(url)
        if known is None:
            common = {} if self._passed_on else {"Laminar-Redirect": "1"}
            if self.import_id:
                common["Laminar-Import"] = self.import_id
            # The token is not sent to every node that an answer or a redirect names.
            proof = self.authorization.header(url)
            if proof is not None:
                common["Authorization"] = proof
            known = self._heads[url] = (Target.of(url).authority, common)
        authority, common = known
        return head_bytes(method, target, authority, {**common, **headers})

    @property
    def heads_version(self) -> tuple[int, bool]:
        """A value that changes when heads returned by `head` are out of date, such as with a new token."""
        return self.authorization.look(), self._passed_on

    def may_ask(self, url: str) -> bool:
        """Return whether the node at `url` may be asked; if not, other nodes are asked to forward to it.

        A node may not be asked if it may not get the client's token.
        """
        if self.authorization.may_ask(url):
            return True
        if not self._passed_on:
            self._passed_on = True
            _log.warning(
                "the token is not sent to %s, as no URL that was given has this host; other nodes pass "
                "requests on, which is slower: give the URLs of all nodes, or https with the cluster's CA",
                url,
            )
        return False

    def learn_nodes(self, urls: Sequence[str]) -> None:
        """Add nodes to those that `connect` was given: requests may be sent to them too.

        Nodes that may not have the client's token are left out.
        """
        for url in urls:
            if url and url.rstrip("/") not in self._nodes and self.may_ask(url):
                self._nodes.append(url.rstrip("/"))

    def knows_another_node(self, urls: Collection[str]) -> bool:
        """Return whether this client knows a node whose URL is not in `urls`."""
        return any(url not in urls for url in self._nodes)

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
        attempt_timeout_s: float = CLIENT_ATTEMPT_S,
    ) -> Answer:
        """Send a request that any node can answer; repeat it until an answer is final, and return the answer.

        An answer with an error status is returned only if the status is in `accept`. The first attempt goes
        to `first`, if it is given; later ones to the nodes of `among` that have not failed lately, else to
        any known node. After `attempt_timeout_s` without an answer the next node is asked. `repeatable` says
        that a second application changes nothing.

        Raises:
            Error: the final answer is an error. The `outcome` of the error is unknown if an earlier attempt
                may have made the change.
            TimedOut: the deadline passed, and nothing can have changed.
            OutcomeUnknown: the deadline passed or the connection was lost, and something may have changed.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        sent_headers = dict(headers or {})
        if body or method in ("PUT", "POST", "PATCH"):
            sent_headers["Content-Length"] = str(len(body))
        attempts = Attempts(
            self,
            f"{method} {target}",
            timeout_s=timeout_s,
            deadline=time.monotonic() + timeout_s,
            changes=method not in ("GET", "HEAD"),
            repeatable=repeatable,
        )
        url = first
        while True:
            url = url or self._any_node(among)
            assert url is not None, "a session without nodes"
            answer = await attempts.send(
                url,
                self.head(url, method, target, sent_headers),
                body,
                timeout_s=attempt_timeout_s,
                bodyless=method == "HEAD",
                accept=accept,
            )
            if answer is not None:
                return answer
            url = await attempts.pause()

    async def ask_node(self, url: str, target: str, *, timeout_s: float) -> Answer:
        """Return the answer of the node at `url`, and no other, to a GET request, whatever its status.

        Raises:
            Unavailable: the node does not answer in time.
            Untrusted: the node's certificate is not accepted.
        """
        try:
            return await self.pool.ask(url, self.head(url, "GET", target, {}), timeout_s=timeout_s)
        except TlsFailed as failure:
            raise untrusted(failure) from None
        except ConnectionFailed as failure:
            raise Unavailable(str(failure), code="no_answer", retriable=True) from None

    def _any_node(self, among: Sequence[str]) -> str | None:
        """Return the node to ask next: one in `among` that has not failed lately, else any known node."""
        avoided = set(self.balancer.avoided(now_ms=now_ms()))
        preferred = [url for url in among if url not in avoided and self.may_ask(url)]
        return self.balancer.choose(preferred or self._nodes, now_ms=now_ms())

    async def get_json(self, target: str, *, timeout_s: float | None = None) -> Any:
        """Send a GET request by `call`; return the decoded JSON of the answer."""
        return (await self.call("GET", target, timeout_s=timeout_s)).json()

    # -- maps ----------------------------------------------------------------------------------

    async def topic_map(self, topic: str, *, timeout_s: float | None = None) -> TopicMap:
        """Return the map of a topic (leaders and replicas); request it if it is unknown or proved wrong."""
        known = self._maps.get(topic)
        if known is not None and not known.stale:
            if known.aged(now_ms=now_ms()):
                self._refreshed(topic, timeout_s)
            return known
        return await asyncio.shield(self._refreshed(topic, timeout_s))

    def _refreshed(self, topic: str, timeout_s: float | None) -> asyncio.Task[TopicMap]:
        """Return the task that requests `topic`'s map; begin one if none is under way."""
        refreshing = self._refreshing.get(topic)
        if refreshing is None:
            refreshing = self._refreshing[topic] = self.loop.create_task(self._refresh(topic, timeout_s))
            refreshing.add_done_callback(lambda done: self._refresh_ended(topic, done))
        return refreshing

    def _refresh_ended(self, topic: str, done: asyncio.Task[TopicMap]) -> None:
        self._refreshing.pop(topic, None)
        if not done.cancelled():
            done.exception()  # raised in the callers that wait; after a background refresh the old map stays

    def topic_map_nowait(self, topic: str) -> TopicMap | None:
        """Return the map of a topic as it is, perhaps out of date; None if it was never requested."""
        return self._maps.get(topic)

    async def _refresh(self, topic: str, timeout_s: float | None) -> TopicMap:
        avoided = self.balancer.avoided(now_ms=now_ms())
        return await self.map_by_others(topic, avoid=avoided, wait_ms=MAP_WAIT_MS, timeout_s=timeout_s)

    async def map_by_others(
        self, topic: str, *, avoid: Iterable[str], wait_ms: int, timeout_s: float | None = None
    ) -> TopicMap:
        """Request a new map of `topic`, store it and return it; prefer nodes other than those of `avoid`.

        `wait_ms` is how long the asked node waits for replicas that do not answer it.
        """
        known = self._maps.get(topic)
        answer = await self.call(
            "GET",
            f"{topic_path(topic)}/partitions?wait_ms={wait_ms}",
            timeout_s=timeout_s,
            among=known.elsewhere(avoid) if known is not None else (),
            attempt_timeout_s=wait_ms / 1000 + MAP_PATIENCE_S,
        )
        fresh = TopicMap.from_answer(answer.json(), now_ms=now_ms())
        fresh.forget_leaders(lambda url: not self.may_ask(url))
        self._maps[topic] = fresh
        for place in fresh.places.values():
            self.learn_nodes([replica.url for replica in place.replicas])
        return fresh

    def learn_route(self, topic: str, answer: Answer) -> int:
        """Note the version of the topic's route in an answer's headers; return it, 0 if there is none."""
        named = answer.headers.get("laminar-route", "")
        if not named.isdecimal():
            return 0
        version = self.routes[topic] = int(named)
        return version

    def forget_topic(self, topic: str) -> None:
        """Forget the map of a deleted topic, and the offsets up to which its partitions were seen."""
        self._maps.pop(topic, None)
        self.routes.pop(topic, None)
        self.seen.forget(topic)

    # -- reads ---------------------------------------------------------------------------------

    async def fetch(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | str,
        max_bytes: int,
        wait_ms: int = 0,
        at_least: int = 0,
        from_leader: bool = False,
        only: int | None = None,
        timeout_s: float | None = None,
        narrowed: Mapping[str, str | int] | None = None,
    ) -> Answer:
        """Fetch batches from `offset` on; return an answer whose body is frames, perhaps none.

        The first frame contains the record at `offset`, or the first one after damaged records that are left
        out (`skipped_end`). With a ``tag`` it is the first that may have a record with the tag. The request
        goes to the least busy replica. A replica answers only once it has all records that this client has
        seen, and all before `at_least`.

        With `from_leader` only the leader is asked, and `offset` may also be a text for `start_query`. With
        `only` no replica is asked but the one with this number, as `readers` counts them. `wait_ms` is how
        long the replica waits for records if it has none yet. `narrowed` has further query parameters that
        reduce the answer: ``to``, ``tag``, ``fields``, ``on_damage``.

        Raises:
            OffsetExpired: the record at `offset` was trimmed.
            NotFound: there is no such topic, or no replica with the number `only`.
            Error: as `call` does.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        assert from_leader or isinstance(offset, int), f"a replica cannot tell where {offset} is"
        target = (
            f"{topic_path(topic)}/partitions/{partition}/records?{start_query(offset)}&max_bytes={max_bytes}"
            f"&wait_ms={wait_ms}&read={'leader' if from_leader else 'replica'}"
        )
        if isinstance(offset, int) and not from_leader:
            min_offset = max(self.seen.next_offset(topic, partition), offset, at_least)
            target += f"&min_offset={min_offset}" if min_offset else ""
        if narrowed:
            target += f"&{urlencode(narrowed)}"
        attempts = Attempts(
            self,
            f"reading {topic}/{partition} at {offset}",
            timeout_s=timeout_s,
            deadline=time.monotonic() + timeout_s + wait_ms / 1000,
            changes=False,
            repeatable=True,
        )
        behind: set[str] = set()
        url: str | None = None
        while True:
            if url is None:
                places = await self.topic_map(topic, timeout_s=attempts.left_s())
                leader = places.leader(partition)
                urls = readers(places.replicas(partition), leader, from_leader=from_leader, only=only)
                if only is None:
                    urls = list(filter(self.may_ask, urls))
                ahead = [each for each in urls if each not in behind]
                # If no replica is known, any node is asked: it forwards the request.
                others = self._nodes if only is None else ()
                url = self.balancer.choose(ahead or urls or others, now_ms=now_ms())
                if url is None:
                    raise NotFound(
                        f"{topic}/{partition}: there is no replica {only}", code="no_such_replica", value=only
                    )
            answer = await attempts.send(
                url,
                self.head(url, "GET", target, {"Accept": BATCH_TYPE}),
                timeout_s=CLIENT_ATTEMPT_S + wait_ms / 1000,
                measured=not wait_ms,
            )
            if answer is not None:
                self.learn_route(topic, answer)
                node = answer.headers.get("laminar-node", url)
                begins = offset if isinstance(offset, int) else int(answer.headers["laminar-offset"])
                begins = max(begins, skipped_end(answer))
                # With a tag the answer begins at the first batch that may have it, which may be a later one.
                found = None if "tag" in (narrowed or ()) else _first_offset(answer.body)
                if found is None or found <= begins:
                    self.reads_by_node[node] = self.reads_by_node.get(node, 0) + 1
                    return answer
                # That node has left out records without reporting them: ask another replica.
                attempts.reject(url, f"{node} answered {found} for {begins}")
            known = self._maps.get(topic)
            if attempts.verdict.stale and known is not None:
                known.stale = True
            if attempts.problem.get("code") == "replica_lagging" and url not in behind:
                # Another replica may have more: ask it at once. There is a pause only when all of them lag.
                behind.add(url)
                url = None
                continue
            url = await attempts.pause()
            if only is not None:
                url = None  # redirects are not followed: only this replica may answer

    async def offset_at(
        self,
        topic: str,
        partition: int,
        at: str,
        *,
        id_: str = "",
        leader_only: bool = False,
        patience_s: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Ask the leader for the offset at `at`: ``earliest``, ``latest`` or epoch milliseconds as text.

        If no leader answers within `patience_s` (`leader_patience_s` if left out), the answer of the replica
        with the largest committed end is returned, unless `leader_only`. So committed records can be read
        while a majority is gone. That end may be before the real one; a warning is logged. With `id_`, only
        the partition with this id is asked, not one of a topic that was created again under the same name.

        Raises:
            NotFound: there is no partition with that id any more.
            Error: as `call` does.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        places = await self.topic_map(topic, timeout_s=timeout_s)
        target = f"{topic_path(topic)}/partitions/{partition}/offsets?at={at}" + (f"&id={id_}" if id_ else "")
        left_s = max(0.0, deadline - time.monotonic())
        if patience_s is None:
            patience_s = left_s if leader_only else self.leader_patience_s(left_s)
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

    def leader_patience_s(self, timeout_s: float) -> float:
        """Return how long a call with this timeout waits for a leader before it asks the other replicas."""
        return min(CLIENT_LEADER_WAIT_S, timeout_s / 2)

    async def _offset_of_replicas(
        self, topic: str, partition: int, target: str, *, deadline: float
    ) -> int | None:
        """Return the offset that the replica with the largest committed end reports.

        Return None if no replica answers, or if there is a leader by now.
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
            found = answer.json() if answer.status == 200 else None
            return (int(found["end_offset"]), int(found["offset"])) if found is not None else None

        urls = [replica.url for replica in places.replicas(partition)]
        answers = [found for found in await asyncio.gather(*map(ask, urls)) if found is not None]
        if not answers:
            return None
        _log.warning("%s/%d has no leader: reading what its replicas know to be committed", topic, partition)
        return max(answers)[1]

    # -- nodes that do not answer ----------------------------------------------------------------

    def left_silent(self, url: str) -> None:
        """Note that the connection to `url` was abandoned: it did not answer, and another node leads."""
        self._silent_until_ms[url] = now_ms() + SILENT_MS

    def is_silent(self, url: str) -> bool:
        """Return whether `left_silent` was called for `url` less than `SILENT_MS` ago."""
        return now_ms() < self._silent_until_ms.get(url, 0)

    # -- appends -------------------------------------------------------------------------------

    async def leader_connection(self, topic: str, partition: int) -> str:
        """Open a connection for appends to a partition, shared in the pool; return the URL of the node.

        It is the leader; while no leader is known, a replica or any node, which redirects to the leader.

        Raises:
            ConnectionFailed: (`sent` is false) the connection could not be opened.
            Unavailable: (``no_leader``) the topic's map does not have the partition.
            Error: the map cannot be requested, for example because the topic is gone.
        """
        places = await self.topic_map(topic)
        if partition not in places.places:
            places.stale = True  # it may be newer than the map
            raise Unavailable(f"{topic}/{partition} is not known", code="no_leader", retriable=True)
        url = places.leader(partition)
        if url is None:
            # Any node redirects us to the leader as soon as there is one. A replica learns of it first.
            places.stale = True
            replicas = readers(places.replicas(partition), None, from_leader=False)
            replicas = list(filter(self.may_ask, replicas))
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
        """Register a sender, which `close` will end; `resent_batches` counts the batches it sends again."""
        self._closables.add(sender)

    def ended(self, sender: Closable) -> None:
        """Remove a sender that has ended; `resent_batches` keeps its count. Idempotent."""
        if sender in self._closables:
            self._closables.remove(sender)
            self._resent_before += sender.resent

    async def close(self) -> None:
        """End all senders, fail the requests under way and drop the connections. Idempotent."""
        self.closed = True
        gone = client_closed(maybe_applied=False)
        await asyncio.gather(*(each.end(gone) for each in list(self._closables)))
        for task in list(self._refreshing.values()):
            task.cancel()
        await self.pool.close()
