"""The client without a loop: what `laminar.connect` returns.

Each class of this folder calls its asynchronous twin through a `Portal`. The methods below a comment
``# generated from ...`` are written by `python -m tests.sync_face` (docs/decisions/0019). Producer, reader,
subscription and stager have more methods written by hand: a change of threads for each record would cost more
than the record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from laminar.client import client as aio_client
from laminar.client.codecs import Codec
from laminar.client.descriptions import SinkInfo
from laminar.client.produce.producer import DEFAULT_BUFFER_BYTES
from laminar.client.sync.portal import Portal
from laminar.client.sync.sinks import Sink, Transaction
from laminar.client.sync.topic import Topic
from laminar.client.trace import RecordTrace
from laminar.client.transact.sinks import DEFAULT_STAGE_BYTES
from laminar.http.api.deadlines import CLIENT_TOTAL_S
from laminar.http.protocol.answer import Answer

T = TypeVar("T")


class Client:
    """A cluster. Use it as ``with laminar.connect(...) as client``, or call `close`."""

    def __init__(self, client: aio_client.Client) -> None:
        self._twin = client
        self._started: Portal | None = None

    def _open(self) -> Portal:
        # Opened by the first use, so that a notebook needs no `with`.
        if self._started is None:
            portal = Portal()
            try:
                portal.run(lambda: self._twin.__aenter__())
            except BaseException:
                portal.close()
                raise
            self._started = portal
        return self._started

    @property
    def _portal(self) -> Portal:
        return self._open()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every connection and the thread that serves them. Idempotent.

        Calls of other threads that are under way raise an error whose `outcome` is ``"unknown"``.
        """
        if self._started is not None:
            self._started.close(lambda: self._twin.close())

    @overload
    def topic(self, name: str) -> Topic[bytes]: ...
    @overload
    def topic(self, name: str, codec: Codec[T]) -> Topic[T]: ...
    def topic(self, name: str, codec: Codec[Any] | None = None) -> Topic[Any]:
        """Return a topic by name, without a request: whether it exists is not checked."""
        portal = self._open()
        return Topic(portal, self._twin.topic(name) if codec is None else self._twin.topic(name, codec))

    def statistics(self) -> dict[str, Any]:
        """Return counts since the opening: retries, redirects, connections, reads by node, resent batches."""
        self._open()
        return self._twin.statistics()

    # generated from laminar.client.client.Client, without session

    def __repr__(self) -> str:
        return repr(self._twin)

    def create_topic(
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
        return Topic(
            self._portal,
            self._portal.run(
                lambda: self._twin.create_topic(
                    name,
                    partitions=partitions,
                    replicas=replicas,
                    settings=settings,
                    allow_fewer_replicas=allow_fewer_replicas,
                    exist_ok=exist_ok,
                    timeout=timeout,
                )
            ),
        )

    def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and all its records.

        Raises:
            NotFound: there is no such topic.
        """
        self._portal.run(lambda: self._twin.delete_topic(name, timeout=timeout))

    def topics(self, prefix: str = "") -> list[str]:
        """Return the names of all topics that begin with `prefix`, sorted."""
        return self._portal.run(lambda: self._twin.topics(prefix))

    def sink(self, name: str) -> Sink:
        """Return a sink (a named sequence of batches, each committed whole and once), without a request.

        Each call with the same name returns the same object. So all parts of the program that use this client
        share one epoch of the sink, the number by which the cluster refuses its earlier writers.
        """
        return Sink(self._portal, self._twin.sink(name))

    def sinks(self, prefix: str = "") -> list[SinkInfo]:
        """Return the descriptions of all sinks whose names begin with `prefix`, sorted by name."""
        return self._portal.run(lambda: self._twin.sinks(prefix))

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

        ``with client.transaction("orders", 7) as tx: tx.append(topic, value)`` writes batch 7 of the
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
            self._portal,
            self._twin.transaction(
                sink, number, epoch=epoch, batch_bytes=batch_bytes, buffer_bytes=buffer_bytes, timeout=timeout
            ),
        )

    def trace(
        self,
        *,
        record: str | None = None,
        trace_id: str | None = None,
        key: str | None = None,
        limit: int = 10000,
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
        return self._portal.run(
            lambda: self._twin.trace(record=record, trace_id=trace_id, key=key, limit=limit, timeout=timeout)
        )

    def cluster(self) -> dict[str, Any]:
        """Return the answer of ``GET /v1/cluster``: nodes, shards and their URLs."""
        return self._portal.run(lambda: self._twin.cluster())

    def health(self) -> dict[str, Any]:
        """Return the answer of ``GET /v1/health``: the problems of the cluster, and remedies."""
        return self._portal.run(lambda: self._twin.health())

    def request_json(
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
        return self._portal.run(
            lambda: self._twin.request_json(method, path, body, headers=headers, timeout=timeout)
        )

    def ask_node(self, url: str, path: str, *, timeout: float = 3.0) -> Answer:
        """Return the answer of the node at `url`, and no other, to a GET request, whatever its status.

        Raises:
            Unavailable: the node does not answer within `timeout` seconds.
            Untrusted: the node's certificate is not accepted.
        """
        return self._portal.run(lambda: self._twin.ask_node(url, path, timeout=timeout))


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

    None means ``LAMINAR_URL``, else the command line's current context, else port 7070 of this machine.
    Nothing is opened before the first use. `timeout` in seconds is the deadline of each call, over all its
    retries. With `shared_port` the client connects only to the port that all shards of a node share, not to
    the shards' own ports: it selects the shard by the source port of the connection.

    `token` proves who the client is; a `token_file` has it, and is read again when it changes. None means
    ``LAMINAR_TOKEN``, ``LAMINAR_TOKEN_FILE`` or the context's, with the URL found there. `ca` is a file with
    the CA of the cluster's certificates, or its PEM text; None means ``LAMINAR_CA``, else the system's CAs.
    `certificate` proves who the client is in place of a token: a PEM file, with its `key` in the same or in
    another; None means ``LAMINAR_CERTIFICATE`` and ``LAMINAR_KEY``. Files that change are read again.

    Raises:
        ConfigError: an argument, or what stands for it, cannot be used.
    """
    twin = aio_client.connect(
        url,
        token=token,
        token_file=token_file,
        ca=ca,
        certificate=certificate,
        key=key,
        timeout=timeout,
        shared_port=shared_port,
    )
    return Client(twin)
