"""The client without a loop: what `laminar.connect` returns.

Thin wrappers around the async face, run by a `Portal`; `tests/client/test_sync.py` holds each
class to the methods and parameters of its twin. Two things are more than a wrapper, because a
thread hop per record would cost more than the record: `Producer.send` fills the outbox in the
caller's thread, under a lock, and `Reader` crosses over once for all batches that are ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload

from laminar.client import client as aio_client
from laminar.client import producer as aio_producer
from laminar.client import reader as aio_reader
from laminar.client import topic as aio_topic
from laminar.client.codecs import Codec, not_bytes
from laminar.client.decisions_lane import Pending
from laminar.client.decisions_window import Outbox
from laminar.client.errors import ConfigError, Error
from laminar.client.fetching import FETCH_BYTES, READ_AHEAD_BYTES, OnExpired
from laminar.client.portal import Portal, wait_until
from laminar.client.producer import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_BUFFER_BYTES,
    Key,
    produce_error,
    put_record,
)
from laminar.client.reader import Start
from laminar.client.records import CursorInfo, PartitionInfo, ReadBatch, Receipt, Record, TopicInfo, Trimmed
from laminar.client.sender import Sender
from laminar.client.sinks import DEFAULT_STAGE_BYTES
from laminar.client.subscription import HANDOVER_S, SESSION_S, Mode
from laminar.client.sync_datagrams import Datagrams
from laminar.client.sync_sinks import Sink, Transaction
from laminar.client.sync_subscription import Subscription
from laminar.client.sync_values import Value
from laminar.client.uploads import PART_BYTES, joined_chunks_of

if TYPE_CHECKING:
    import datetime

    import pandas
    import polars
    import pyarrow

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Readable(Protocol):
    """A binary file, as far as it is read."""

    def read(self, size: int, /) -> bytes: ...


class Delivery:
    """One record on its way. May be ignored: the producer's end reports what failed."""

    __slots__ = ("_pending", "_position")

    def __init__(self, pending: Pending, position: int) -> None:
        self._pending = pending
        self._position = position

    def done(self) -> bool:
        return self._pending.settled

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the receipt, or raise why there is none; TimeoutError after `timeout` seconds."""
        pending = self._pending
        if not pending.settled:
            settled = threading.Event()
            pending.when_settled(settled.set)
            if timeout is None:
                wait_until(settled.wait)
            elif not settled.wait(timeout):
                raise TimeoutError(f"no receipt of a record for partition {pending.partition} yet")
        return pending.receipt(self._position)


class Producer(Generic[T_in]):
    """A stream of records into a topic, in order per partition and never doubled.

    Leaving its block waits for every receipt, or raises `ProduceError`. `send` may be called from
    several threads; each thread's records keep their order.
    """

    def __init__(
        self, portal: Portal, topic: aio_topic.Topic[T_in], *, buffer_bytes: int, **options: Any
    ) -> None:
        self._portal = portal
        self._topic = topic
        self._options = options
        self._buffer_bytes = buffer_bytes
        self._encode = None if topic.codec is None else topic.codec.encode
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)
        self._sender: Sender | None = None
        self._outbox: Outbox | None = None

    def __enter__(self) -> Self:
        sender = self._portal.run(
            lambda: self._topic.open_sender(stop_on_failure=True, guard=self._lock, **self._options)
        )
        sender.on_progress = self._on_progress
        self._outbox = sender.outbox
        self._sender = sender
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._portal.run(lambda: self._close())

    async def _close(self) -> None:
        assert self._sender is not None
        self._sender.close(Error("the producer's block ended before the record was sent", code="closed"))

    def send(
        self,
        value: T_in,
        key: Key = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        number: int | None = None,
    ) -> Delivery:
        """Put a record on its way; waits only for room. Raises what stopped its partition.

        `number` is the user's, of a producer with a name: from 1, higher than that of the record before. A
        record that an earlier run of the same name made durable is not sent: its receipt has the offset -1.
        """
        outbox = self._outbox
        sender = self._sender
        if outbox is None or sender is None or sender.closed:
            raise ConfigError("send outside of `with topic.producer()`", code="not_open")
        raw: Any = value if self._encode is None else self._encode(value)
        if type(raw) is not bytes and (wrong := not_bytes(raw)) is not None:
            raise wrong
        if isinstance(key, str):
            key = key.encode()
        with self._lock:
            if outbox.buffered_bytes >= self._buffer_bytes:
                self._until(lambda: outbox.buffered_bytes < self._buffer_bytes or sender.closed)
            plain = partition is None and tag is None and headers is None and timestamp_ms is None
            if plain and number is None and outbox.numbers is None:
                pending = outbox.put(raw, key, outbox.sticky if key is None else outbox.lane_of(key))
            else:
                pending = put_record(
                    outbox,
                    raw,
                    key,
                    tag=tag,
                    headers=headers,
                    timestamp_ms=timestamp_ms,
                    partition=partition,
                    number=number,
                )
            position = len(pending.values) - 1
        sender.wake_from_thread()
        return Delivery(pending, position)

    def send_all(self, records: Iterable[tuple[Key, T_in]]) -> int:
        """Send every (key, value); returns how many."""
        count = 0
        for key, value in records:
            self.send(value, key)
            count += 1
        return count

    def has_room(self) -> bool:
        """Whether `send` would not wait."""
        return self._outbox is not None and self._outbox.buffered_bytes < self._buffer_bytes

    def room(self) -> None:
        """Wait until the buffer has room for more; `send` does so by itself."""
        with self._lock:
            self._until(self.has_room)

    def wait(self) -> None:
        """Wait for the receipts of all that was sent so far; `ProduceError` if some will not come."""
        outbox, sender = self._outbox, self._sender
        assert outbox is not None and sender is not None, "wait outside of the producer's block"
        with self._lock, sender.hurry():
            self._until(lambda: outbox.buffered_bytes == 0)
            failure = produce_error(outbox, self._topic.name)
        if failure is not None:
            raise failure

    def durable(self) -> None:
        """`wait`, by the name of what is waited for: nothing that was sent can be lost any more."""
        self.wait()

    def accepted(self) -> None:
        """Wait until a leader has all that was sent so far; `ProduceError` if some will not get there.

        This is no receipt: a leader that dies may lose it. Then this producer, which keeps it until it is
        durable, sends it again. Without a name the two are one: see `wait`.
        """
        outbox = self._outbox
        assert outbox is not None, "accepted outside of the producer's block"
        with self._lock:
            self._until(outbox.all_accepted)
            failure = produce_error(outbox, self._topic.name)
        if failure is not None:
            raise failure

    @property
    def checkpoint(self) -> int:
        """The highest number that everything up to it is durable, in all partitions; 0: none."""
        with self._lock:
            return 0 if self._outbox is None else self._outbox.checkpoint()

    @property
    def resumed_at(self) -> int:
        """The checkpoint as this producer found it: its source may go on behind it. 0: from the start."""
        return 0 if self._outbox is None or self._outbox.numbers is None else self._outbox.numbers.resumed_at

    def statistics(self) -> dict[str, int]:
        """Bytes waiting; batches taken and taken again since the producer began."""
        return aio_producer.outbox_statistics(self._outbox)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for progress until this holds; the lock is held."""
        wait_until(lambda seconds: self._progress.wait_for(condition, seconds))

    def _on_progress(self) -> None:
        with self._lock:
            self._progress.notify_all()


class Reader(Generic[T]):
    """Records of a topic: ``for record in reader``, or ``batches()``, or ``to_arrow()``."""

    def __init__(self, portal: Portal, reader: aio_reader.Reader[T]) -> None:
        self._portal = portal
        self._reader = reader

    def __enter__(self) -> Self:
        self._portal.run(lambda: self._reader.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.run(lambda: self._reader.__aexit__(kind, error, trace))

    @property
    def positions(self) -> dict[int, int]:
        """By partition, the offset behind the last record handed out."""
        return self._reader.positions

    @property
    def ends(self) -> dict[int, int]:
        """By partition, where a reader that does not follow ends; filled when it begins."""
        return self._reader.ends

    def __iter__(self) -> Iterator[Record[T]]:
        positions = self._reader.positions
        for batch in self._take_batches():
            partition = batch.partition
            for record in batch.records():
                positions[partition] = record.offset + 1
                yield record

    def batches(self) -> Iterator[ReadBatch[T]]:
        """The records batch-wise, without an object per record."""
        for batch in self._take_batches():
            self._reader.positions[batch.partition] = batch.next_offset
            yield batch

    def next_batch(self) -> ReadBatch[T] | None:
        """The next batch, None at the end. Its records count as handed out."""
        return self._portal.run(lambda: self._reader.next_batch())

    def _take_batches(self) -> Iterator[ReadBatch[T]]:
        try:
            while batches := self._portal.run(lambda: self._reader.take_ready()):
                yield from batches
        finally:
            # Who breaks off and never comes back leaves nobody fetching.
            if not self._portal.loop.is_closed():
                self.pause()

    def commit(self) -> None:
        """Commit the cursor at the records handed out so far."""
        self._portal.run(lambda: self._reader.commit())

    def commit_at(self, positions: Mapping[int, int]) -> None:
        """Commit the cursor at `positions`: by partition, the next offset wanted."""
        self._portal.run(lambda: self._reader.commit_at(positions))

    def to_arrow(self) -> pyarrow.Table:
        """Everything to the end as one table: offset, timestamp, key, value, tag, partition."""
        return self._portal.run(lambda: self._reader.to_arrow())

    def to_polars(self) -> polars.DataFrame:
        return self._portal.run(lambda: self._reader.to_polars())

    def to_pandas(self) -> pandas.DataFrame:
        return self._portal.run(lambda: self._reader.to_pandas())

    def pause(self) -> None:
        """Stop fetching until the next batch is asked for: that begins behind the records handed out."""
        self._portal.run(lambda: self._reader.pause())

    def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._portal.run(lambda: self._reader.close())


class Topic(Generic[T]):
    """A topic by name; made by ``client.topic(name)`` without I/O. ``T`` is what its values are."""

    def __init__(self, portal: Portal, topic: aio_topic.Topic[T]) -> None:
        self._portal = portal
        self._topic = topic
        self.name = topic.name
        self.codec = topic.codec

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"

    def append(
        self,
        value: T,
        key: Key = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; durable as the topic promises when this returns, and never doubled."""
        return self._portal.run(
            lambda: self._topic.append(
                value,
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                timeout=timeout,
            )
        )

    def append_stream(
        self,
        source: Iterable[bytes] | Readable,
        key: Key = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        part_bytes: int = PART_BYTES,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record whose value is all that `source` gives: a binary file, or chunks of bytes.

        Of any length, in the memory of a few parts; nobody sees anything of it before all is durable. It is
        bytes, whatever the topic's codec; what ends within `part_bytes` is an ordinary record. `timeout` in
        seconds is how long a part may go without its answer, over all retries. When this raises nothing is
        appended, but for `OutcomeUnknown`.
        """
        run = self._portal.run
        upload = run(
            lambda: self._topic.begin_upload(
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                part_bytes=part_bytes,
                timeout=timeout,
            )
        )
        try:
            for chunk in joined_chunks_of(source):
                run(partial(upload.write, chunk))
            return run(upload.finish)
        except BaseException:
            run(upload.abort)
            raise

    def producer(
        self,
        *,
        name: str | None = None,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        window: int = 4,
        timeout: float | None = None,
    ) -> Producer[T]:
        """A stream of records: batches of up to `batch_bytes`, up to `window` of a partition in flight.

        With a `name`, who has it is the only one: the one before is refused from now on (`Fenced`), and the
        numbers that are given to `send` let this one go on where that one ended, without doubling a record.
        """
        return Producer(
            self._portal,
            self._topic,
            buffer_bytes=buffer_bytes,
            batch_bytes=batch_bytes,
            window=window,
            timeout=timeout,
            name=name,
        )

    def read(
        self,
        start: Start = "earliest",
        *,
        follow: bool = False,
        cursor: str | None = None,
        partitions: Iterable[int] | None = None,
        from_leader: bool = False,
        timeout: float | None = None,
        on_expired: OnExpired = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Reader[T]:
        """Records from `start`, or from where `cursor` was committed, to the end as it is now.

        `start`: ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or ``{partition: offset}``. With
        `follow` it goes on for ever. Where retention gave up what was to be read, `OffsetExpired` names the
        cursor, or with ``on_expired="earliest"`` it goes on with what is left.
        """
        reader = self._topic.read(
            start,
            follow=follow,
            cursor=cursor,
            partitions=partitions,
            from_leader=from_leader,
            timeout=timeout,
            on_expired=on_expired,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
        )
        return Reader(self._portal, reader)

    def datagrams(
        self, *, secret: str | None = None, partitions: int | None = None, timeout: float | None = None
    ) -> Datagrams[T]:
        """Appends of small batches by datagram, for a program that keeps no connection.

        `secret` is the cluster's, ``LAMINAR_SECRET`` if left out; a cluster without one needs none. With the
        number of `partitions` nothing is asked over HTTP at all. `timeout` in seconds is that of each append.
        """
        datagrams = self._topic.datagrams(secret=secret, partitions=partitions, timeout=timeout)
        return Datagrams(self._portal, datagrams)

    def open(self, partition: int, offset: int, *, timeout: float | None = None) -> Value:
        """The value of one record as a stream: ``with topic.open(0, 812) as value``. Of any length.

        For records whose `large_bytes` is not None there is no other way; for any it works. `timeout` in
        seconds is for each piece. `NotFound` where there is no such record (yet), `OffsetExpired` where it
        is gone.
        """
        return Value(self._portal, self._topic.open(partition, offset, timeout=timeout))

    def subscribe(
        self,
        group: str,
        mode: Mode = "clustering",
        member: str | None = None,
        *,
        start: str | datetime.datetime = "earliest",
        session: float = SESSION_S,
        handover: float = HANDOVER_S,
        on_expired: OnExpired = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Subscription[T]:
        """Records as a member of a group, for ever: each partition is read by one member at a time.

        ``mode="broadcast"``: by every member, each under its own name (`member`). A new group begins at
        `start`: ``"earliest"``, ``"latest"`` or a time. Who is silent for `session` seconds (2 to 60, for all
        members the same) is taken for dead, and others read on from what it committed. Who is to hand a
        partition over may take `handover` seconds to commit what it was given of it.
        """
        subscription = self._topic.subscribe(
            group,
            mode,
            member,
            start=start,
            session=session,
            handover=handover,
            on_expired=on_expired,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
        )
        return Subscription(self._portal, subscription)

    def cursors(self) -> list[str]:
        """The names of all cursors."""
        return self._portal.run(lambda: self._topic.cursors())

    def describe_cursors(self) -> list[CursorInfo]:
        """All cursors, by name: positions, lag, owners."""
        return self._portal.run(lambda: self._topic.describe_cursors())

    def describe_cursor(self, name: str) -> CursorInfo:
        """A cursor's positions, lag and owners; NotFound if there is none."""
        return self._portal.run(lambda: self._topic.describe_cursor(name))

    def cursor(self, name: str) -> dict[int, int]:
        """A cursor's committed positions by partition; {} if there is none."""
        return self._portal.run(lambda: self._topic.cursor(name))

    def set_cursor(self, name: str, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Move a cursor; `PreconditionFailed` if it was moved meanwhile, `Fenced` if a member owns it.

        With `force` it is taken from its owners, who are told at their next commit.
        """
        self._portal.run(lambda: self._topic.set_cursor(name, positions, force=force))

    def delete_cursor(self, name: str) -> None:
        self._portal.run(lambda: self._topic.delete_cursor(name))

    def describe(self) -> TopicInfo:
        return self._portal.run(lambda: self._topic.describe())

    def partitions(self) -> list[PartitionInfo]:
        return self._portal.run(lambda: self._topic.partitions())

    def offsets(self, at: str = "latest") -> dict[int, int]:
        """The offset in each partition at ``"earliest"``, ``"latest"`` or a time."""
        return self._portal.run(lambda: self._topic.offsets(at))

    def delete_before(
        self, offset: int, *, partition: int = 0, dry_run: bool = False, timeout: float | None = None
    ) -> Trimmed:
        """Give up a partition's records before `offset`, for ever; whole batches only, so perhaps a few less.

        With `dry_run` nothing happens but the answer. Doing it twice does no harm.
        """
        return self._portal.run(
            lambda: self._topic.delete_before(offset, partition=partition, dry_run=dry_run, timeout=timeout)
        )

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records, as it is now; NotFound if it is gone."""
        self._portal.run(lambda: self._topic.delete(timeout=timeout))


class Client:
    """A cluster. Use it as ``with laminar.connect(...) as client``, or call `close`."""

    def __init__(self, client: aio_client.Client) -> None:
        self._client = client
        self._started: Portal | None = None

    def __repr__(self) -> str:
        return repr(self._client)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Portal:
        # Opened by the first use, so that a notebook needs no `with`.
        if self._started is None:
            self._started = Portal()
            self._started.run(lambda: self._client.__aenter__())
        return self._started

    def close(self) -> None:
        """End every connection and the thread behind them. Idempotent."""
        if self._started is not None and not self._started.loop.is_closed():
            self._started.run(lambda: self._client.close())
            self._started.close()

    @overload
    def topic(self, name: str) -> Topic[bytes]: ...
    @overload
    def topic(self, name: str, codec: Codec[T]) -> Topic[T]: ...
    def topic(self, name: str, codec: Codec[Any] | None = None) -> Topic[Any]:
        """A topic by name, without asking whether it is there."""
        portal = self._open()
        if codec is not None:
            return Topic(portal, self._client.topic(name, codec))
        return Topic(portal, self._client.topic(name))

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replicas: int | None = None,
        settings: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> Topic[bytes]:
        """Make a topic; what is None is the server's default.

        `AlreadyExists` if it is there with other figures, or at all without `exist_ok`.
        """
        self._open().run(
            lambda: self._client.create_topic(
                name,
                partitions=partitions,
                replicas=replicas,
                settings=settings,
                exist_ok=exist_ok,
                timeout=timeout,
            )
        )
        return self.topic(name)

    def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        self._open().run(lambda: self._client.delete_topic(name, timeout=timeout))

    def topics(self, prefix: str = "") -> list[str]:
        """The names of all topics that begin with `prefix`, sorted."""
        return self._open().run(lambda: self._client.topics(prefix))

    def sink(self, name: str) -> Sink:
        """A sink by name, without asking anything; this client has one epoch of it."""
        portal = self._open()
        return Sink(portal, self._client.sink(name))

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
        """Batch `number` of `sink`: ``with client.transaction("s", 7) as tx: tx.append(topic, value)``.

        It is committed whole when the block ends, over any topics and partitions, and once, however often it
        is tried: a number that was committed is skipped (`Transaction.already`).
        """
        portal = self._open()
        transaction = self._client.transaction(
            sink,
            number,
            epoch=epoch,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            timeout=timeout,
        )
        return Transaction(portal, transaction)

    def cluster(self) -> dict[str, Any]:
        """``GET /v1/cluster``: nodes, shards and their URLs."""
        return self._open().run(lambda: self._client.cluster())

    def request_json(self, method: str, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """Any other resource of the HTTP interface: JSON in, JSON out, errors as `Error`."""
        return self._open().run(lambda: self._client.request_json(method, path, body, timeout=timeout))

    def statistics(self) -> dict[str, Any]:
        """Retries, redirects, connections and reads by node since the client was opened."""
        self._open()
        return self._client.statistics()


def connect(
    url: str | Sequence[str] | None = None,
    *,
    token: str | None = None,
    timeout: float = aio_client.DEFAULT_TIMEOUT_S,
    shared_port: bool = False,
) -> Client:
    """A client for the cluster at `url`: a URL, a list of them, or None.

    None means ``LAMINAR_URL``, else the command line's current context, else port 7070 here. Nothing
    is opened before the first use. `timeout` in seconds is each call's deadline over all retries.
    With `shared_port` no other port of a node is used: the source port that a connection is bound to
    leads to the shard that it is for.
    """
    return Client(aio_client.connect(url, token=token, timeout=timeout, shared_port=shared_port))
