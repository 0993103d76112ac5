"""The client of a cluster, for programs with an event loop; `laminar.aio.connect` returns it."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload
from urllib.parse import quote, urlencode

import msgspec

from laminar.client.codecs import Codec
from laminar.client.descriptions import SinkInfo
from laminar.client.errors import AlreadyExists, ConfigError
from laminar.client.net.endpoints import Endpoints, resolve
from laminar.client.net.session import Session, topic_path
from laminar.client.produce.producer import DEFAULT_BUFFER_BYTES
from laminar.client.topic import Topic
from laminar.client.trace import RecordTrace, trace_of
from laminar.client.transact.sinks import DEFAULT_STAGE_BYTES, Sink, Transaction
from laminar.http.api.deadlines import CLIENT_TOTAL_S
from laminar.http.protocol.answer import Answer

T = TypeVar("T")


class Client:
    """A client of one cluster, for one event loop; open it with ``async with``.

    It opens connections to the cluster's nodes as they are needed.
    """

    def __init__(
        self, endpoints: Endpoints, *, timeout: float, seed: int | None = None, shared_port: bool = False
    ) -> None:
        self._endpoints = endpoints
        self._shared_port = shared_port
        self._timeout = timeout
        self._seed = seed
        self._session: Session | None = None
        self._topics: dict[str, Topic[Any]] = {}
        self._sinks: dict[str, Sink] = {}

    def __repr__(self) -> str:
        return f"<Client {', '.join(self._endpoints.urls)} ({self._endpoints.origin})>"

    async def __aenter__(self) -> Client:
        if self._session is not None:
            raise ConfigError("the client is open already", code="already_open")
        self._session = Session(
            self._endpoints,
            timeout_s=self._timeout,
            rng=random.Random(self._seed),
            shared_port=self._shared_port,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Idempotent.

        An append that has no receipt yet fails: with `OutcomeUnknown` if it was sent, else `Unavailable`.
        """
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> Session:
        """The session that makes this client's requests; not a stable interface."""
        if self._session is None or self._session.closed:
            raise ConfigError("the client is not open", code="not_open", hint="`async with connect(...)`")
        return self._session

    @overload
    def topic(self, name: str) -> Topic[bytes]: ...
    @overload
    def topic(self, name: str, codec: Codec[T]) -> Topic[T]: ...
    def topic(self, name: str, codec: Codec[Any] | None = None) -> Topic[Any]:
        """Return a topic by name, without a request: whether it exists is not checked."""
        if codec is not None:
            return Topic(self.session, name, codec)
        known = self._topics.get(name)
        if known is None:
            known = self._topics[name] = Topic(self.session, name, None)
        return known

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replicas: int | None = None,
        settings: Mapping[str, Any] | None = None,
        allow_fewer_replicas: bool = False,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> Topic[bytes]:
        """Create a topic. Settings that are None take the server's defaults.

        With `allow_fewer_replicas` it is created with as many replicas as there are nodes now, and gets the
        rest when nodes join.

        Raises:
            Unavailable: (`too_few_nodes`) fewer nodes are alive than replicas are wanted.
            AlreadyExists: the topic exists with another configuration; or it exists, and `exist_ok` is false.
        """
        wanted: dict[str, Any] = {}
        if partitions is not None:
            wanted["partitions"] = partitions
        if replicas is not None:
            wanted["replicas"] = replicas
        if settings:
            wanted["settings"] = dict(settings)
        if allow_fewer_replicas:
            wanted["allow_fewer_replicas"] = True
        session = self.session
        retries_before = session.retries
        answer = await session.call(
            "PUT",
            topic_path(name),
            body=msgspec.json.encode(wanted),
            headers={"Content-Type": "application/json"},
            timeout_s=timeout,
        )
        # After a retry, 200 may be the answer to our own creation, whose first answer was lost.
        if answer.status == 200 and not exist_ok and session.retries == retries_before:
            raise AlreadyExists(f"topic {name!r} exists", code="exists", status=200, field="name", value=name)
        return self.topic(name)

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and all its records.

        Raises:
            NotFound: there is no such topic.
        """
        await self.topic(name).delete(timeout=timeout)

    async def topics(self, prefix: str = "") -> list[str]:
        """Return the names of all topics that begin with `prefix`, sorted."""
        names: list[str] = []
        after = ""
        while True:
            answer = await self.session.get_json(
                f"/v1/topics?limit=1000&prefix={quote(prefix, safe='')}"
                + (f"&after={quote(after, safe='')}" if after else "")
            )
            names += [str(each["topic"] if isinstance(each, dict) else each) for each in answer["topics"]]
            after = answer.get("next") or ""
            if not after:
                return sorted(names)

    def sink(self, name: str) -> Sink:
        """Return a sink (a named sequence of batches, each committed whole and once), without a request.

        Each call with the same name returns the same object. So all parts of the program that use this client
        share one epoch of the sink, the number by which the cluster refuses its earlier writers.
        """
        known = self._sinks.get(name)
        if known is None:
            known = self._sinks[name] = Sink(self.session, name)
        return known

    async def sinks(self, prefix: str = "") -> list[SinkInfo]:
        """Return the descriptions of all sinks whose names begin with `prefix`, sorted by name."""
        found: list[SinkInfo] = []
        after = ""
        while True:
            query = urlencode({"limit": 1000, "prefix": prefix, "after": after})
            answer = await self.session.get_json(f"/v1/sinks?{query}")
            found += map(SinkInfo.from_answer, answer["sinks"])
            after = answer.get("next") or ""
            if not after:
                return found

    def transaction(
        self,
        sink: str,
        number: int,
        *,
        epoch: int | None = None,
        batch_bytes: int = DEFAULT_STAGE_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        timeout: float | None = None,
    ) -> Transaction:
        """Return a transaction: a block of appends and acknowledgements, committed whole or not at all.

        ``async with client.transaction("orders", 7) as tx: tx.append(topic, value)`` writes batch 7 of the
        sink ``orders``. A sink is a name under which the cluster remembers the last committed batch number.
        The end of the block commits the batch, over any topics and partitions. If this number, or a higher
        one, was committed before, nothing is appended (`Transaction.already`): so a program that does not
        know whether its batch was committed repeats it with the same number.

        One client at a time writes a sink. The first transaction of a client begins a new *epoch* of the
        sink, by which earlier clients are refused: their next commit raises `Fenced`. With `epoch` the
        transaction begins none, and uses the one of this number, which `Sink.begin` began, perhaps in another
        process. `timeout` in seconds is the deadline of each request.
        """
        return Transaction(
            self.sink(sink),
            number,
            epoch=epoch,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            timeout=timeout,
        )

    async def trace(
        self,
        *,
        record: str | None = None,
        trace_id: str | None = None,
        key: str | None = None,
        limit: int = 10_000,
        timeout: float | None = None,
    ) -> RecordTrace:
        """Return the trace events of records (their appends, deliveries and outcomes), by time.

        The records are chosen by exactly one of `record`, `trace_id` and `key`.

        `record` is ``"TOPIC/PARTITION/OFFSET"``, or ``"TOPIC/ID"`` of a delayed one; `trace_id` is 32
        hexadecimal digits; `key` is a key, in all topics. At most `limit` events are returned.

        Raises:
            ConfigError: not exactly one of the three is given.
            NotFound: there is no such topic or partition.
        """
        return await trace_of(
            self.session, record=record, trace_id=trace_id, key=key, limit=limit, timeout_s=timeout
        )

    async def cluster(self) -> dict[str, Any]:
        """Return the answer of ``GET /v1/cluster``: nodes, shards and their URLs."""
        found: dict[str, Any] = await self.session.get_json("/v1/cluster")
        self.session.learn_nodes([node["url"] for node in found.get("nodes", ()) if node.get("url")])
        return found

    async def health(self) -> dict[str, Any]:
        """Return the answer of ``GET /v1/health``: the problems of the cluster, and remedies."""
        found: dict[str, Any] = await self.session.get_json("/v1/health")
        return found

    async def request_json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send a request to any resource of the HTTP interface, and return the decoded JSON of its answer.

        `body` is sent as JSON; None sends no body. `headers` are further ones, such as If-Match. A request
        with a method other than GET, HEAD, PUT and DELETE is not repeated if its connection is lost.

        Raises:
            Error: the answer is an error, or no answer came in time.
        """
        answer = await self.session.call(
            method,
            path,
            body=b"" if body is None else msgspec.json.encode(body),
            headers=dict(headers or {}) | ({} if body is None else {"Content-Type": "application/json"}),
            repeatable=method in ("GET", "HEAD", "PUT", "DELETE"),
            timeout_s=timeout,
        )
        return answer.json()

    async def ask_node(self, url: str, path: str, *, timeout: float = 3.0) -> Answer:
        """Return the answer of the node at `url`, and no other, to a GET request, whatever its status.

        Raises:
            Unavailable: the node does not answer within `timeout` seconds.
            Untrusted: the node's certificate is not accepted.
        """
        return await self.session.ask_node(url, path, timeout_s=timeout)

    def statistics(self) -> dict[str, Any]:
        """Return counts: retries, redirects, connections opened, reads by node, batches sent again."""
        session = self.session
        return {
            "retries": session.retries,
            "redirects": session.redirects,
            "connections_opened": session.pool.opened,
            "reads_by_node": dict(session.reads_by_node),
            "resent_batches": session.resent_batches(),
        }


def connect(
    url: str | Sequence[str] | None = None,
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    timeout: float = CLIENT_TOTAL_S,
    shared_port: bool = False,
) -> Client:
    """Return a client for the cluster at `url`: a URL, a list of them, or None.

    None means ``LAMINAR_URL``, else the command line's current context, else port 7070 of this machine. There
    is no I/O, and no event loop is needed, before ``async with``. `timeout` in seconds is the deadline of
    each call, over all its retries. With `shared_port` the client connects only to the port that all shards
    of a node share, not to the shards' own ports: it selects the shard by the source port of the connection.

    `token` proves who the client is; `token_file` is a file that contains the token. If both are None:
    ``LAMINAR_TOKEN``, ``LAMINAR_TOKEN_FILE`` or the context's, with the URL found there. `ca` is a file with
    the CA of the cluster's certificates, or its PEM text; None means ``LAMINAR_CA``, else the system's CAs.
    `certificate` proves who the client is in place of a token: a PEM file, with its `key` in the same or in
    another; None means ``LAMINAR_CERTIFICATE`` and ``LAMINAR_KEY``. Files that change are read again.

    Raises:
        ConfigError: an argument, or the environment variable used in its place, is wrong.
    """
    if timeout <= 0:
        raise ConfigError(f"timeout={timeout}", code="bad_timeout", field="timeout", value=timeout)
    endpoints = resolve(url, token, token_file=token_file, ca=ca, certificate=certificate, key=key)
    return Client(endpoints, timeout=timeout, shared_port=shared_port)
