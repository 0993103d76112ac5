"""A topic without a loop: the twin of `laminar.client.topic`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from laminar.client import topic as aio_topic
from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, OnDamage, OnExpired
from laminar.client.consume.reader import Start
from laminar.client.consume.subscription import HANDOVER_S, SESSION_S, Mode
from laminar.client.produce.producer import DEFAULT_BATCH_BYTES, DEFAULT_BUFFER_BYTES, Key
from laminar.client.produce.uploads import PART_BYTES, joined_chunks_of
from laminar.client.records import CursorInfo, PartitionInfo, Receipt, TopicInfo, Trimmed
from laminar.client.sync.datagrams import Datagrams
from laminar.client.sync.large_values import Value
from laminar.client.sync.portal import Portal
from laminar.client.sync.producer import Producer
from laminar.client.sync.reader import Reader
from laminar.client.sync.subscription import Subscription

if TYPE_CHECKING:
    import datetime


T = TypeVar("T")


class Readable(Protocol):
    """A binary file, as far as it is read."""

    def read(self, size: int, /) -> bytes: ...


class Topic(Generic[T]):
    """A topic by name; made by ``client.topic(name)`` without I/O. ``T`` is what its values are."""

    def __init__(self, portal: Portal, topic: aio_topic.Topic[T]) -> None:
        self._portal = portal
        self._twin = topic
        self.name = topic.name
        self.codec = topic.codec

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
            lambda: self._twin.begin_upload(
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

    # generated from laminar.client.topic.Topic, without begin_upload open_sender

    def __repr__(self) -> str:
        return repr(self._twin)

    def append(
        self,
        value: T,
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; durable as the topic promises when this returns.

        Appends that run at the same time are joined into batches. Never doubled, whatever happens
        on the way; `OutcomeUnknown` if the deadline passed without a receipt.
        """
        return self._portal.run(
            lambda: self._twin.append(
                value,
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                timeout=timeout,
            )
        )

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

        A record is sent as soon as its partition has nothing in flight, or a batch is full. `timeout`
        in seconds is how long a record may go without its receipt, over all retries.

        With a `name`, who has it is the only one: the one before is refused from now on (`Fenced`), and the
        numbers that are given to `send` let this one go on where that one ended, without doubling a record.
        Its batches are accepted before they are durable, and kept here until they are.
        """
        return Producer(
            self._portal,
            self._twin.producer(
                name=name, batch_bytes=batch_bytes, buffer_bytes=buffer_bytes, window=window, timeout=timeout
            ),
        )

    def datagrams(
        self, *, secret: str | None = None, partitions: int | None = None, timeout: float | None = None
    ) -> Datagrams[T]:
        """Appends of small batches by datagram, for a program that keeps no connection.

        `secret` is the cluster's, ``LAMINAR_SECRET`` if left out; a cluster without one needs none. With the
        number of `partitions` nothing is asked over HTTP at all. `timeout` in seconds is that of each append.
        """
        return Datagrams(
            self._portal, self._twin.datagrams(secret=secret, partitions=partitions, timeout=timeout)
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
        on_damage: OnDamage = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Reader[T]:
        """Records from `start`, or from where `cursor` was committed, to the end as it is now.

        `start`: ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or ``{partition: offset}``. With
        `follow` it goes on for ever. `from_leader` reads only what is newest; without it any replica
        answers that is not behind what this client has seen. `read_ahead_bytes` is per partition.
        Where retention gave up what was to be read, `OffsetExpired` names the cursor, or with
        ``on_expired="earliest"`` it goes on with what is left. Where records are damaged on all replicas,
        or their producer wrote them so that nobody can read them, the reading fails; with
        ``on_damage="skip"`` it goes on past them, and `Reader.skipped` names what was left out.
        """
        return Reader(
            self._portal,
            self._twin.read(
                start,
                follow=follow,
                cursor=cursor,
                partitions=partitions,
                from_leader=from_leader,
                timeout=timeout,
                on_expired=on_expired,
                on_damage=on_damage,
                fetch_bytes=fetch_bytes,
                read_ahead_bytes=read_ahead_bytes,
            ),
        )

    def open(self, partition: int, offset: int, *, timeout: float | None = None) -> Value:
        """The value of one record as a stream: ``with topic.open(0, 812) as value``. Of any length.

        For records whose `large_bytes` is not None there is no other way; for any it works. `timeout` in
        seconds is for each piece. `NotFound` where there is no such record (yet), `OffsetExpired` where it
        is gone.
        """
        return Value(self._portal, self._twin.open(partition, offset, timeout=timeout))

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
        on_damage: OnDamage = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Subscription[T]:
        """Records as a member of a group, for ever: each partition is read by one member at a time.

        ``mode="broadcast"``: by every member, each under its own name (`member`). A new group begins at
        `start`: ``"earliest"``, ``"latest"`` or a time. Who is silent for `session` seconds (2 to 60, for all
        members the same) is taken for dead, and others read on from what it committed. Who is to hand a
        partition over may take `handover` seconds to commit what it was given of it.
        `on_damage` as for `read`.
        """
        return Subscription(
            self._portal,
            self._twin.subscribe(
                group,
                mode,
                member,
                start=start,
                session=session,
                handover=handover,
                on_expired=on_expired,
                on_damage=on_damage,
                fetch_bytes=fetch_bytes,
                read_ahead_bytes=read_ahead_bytes,
            ),
        )

    def cursors(self) -> list[str]:
        """The names of all cursors."""
        return self._portal.run(lambda: self._twin.cursors())

    def describe_cursors(self) -> list[CursorInfo]:
        """All cursors, by name: positions, lag, owners."""
        return self._portal.run(lambda: self._twin.describe_cursors())

    def describe_cursor(self, name: str) -> CursorInfo:
        """A cursor's positions, lag and owners; NotFound if there is none."""
        return self._portal.run(lambda: self._twin.describe_cursor(name))

    def cursor(self, name: str) -> dict[int, int]:
        """A cursor's committed positions by partition; {} if there is none."""
        return self._portal.run(lambda: self._twin.cursor(name))

    def set_cursor(self, name: str, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Move a cursor; `PreconditionFailed` if it was moved meanwhile, `Fenced` if a member owns it.

        With `force` it is taken from its owners, who are told at their next commit.
        """
        self._portal.run(lambda: self._twin.set_cursor(name, positions, force=force))

    def delete_cursor(self, name: str) -> None:
        self._portal.run(lambda: self._twin.delete_cursor(name))

    def describe(self) -> TopicInfo:
        return self._portal.run(lambda: self._twin.describe())

    def partitions(self) -> list[PartitionInfo]:
        return self._portal.run(lambda: self._twin.partitions())

    def offsets(self, at: str = "latest") -> dict[int, int]:
        """The offset in each partition at ``"earliest"``, ``"latest"`` or a time."""
        return self._portal.run(lambda: self._twin.offsets(at))

    def delete_before(
        self, offset: int, *, partition: int = 0, dry_run: bool = False, timeout: float | None = None
    ) -> Trimmed:
        """Give up a partition's records before `offset`, for ever; whole batches only, so perhaps a few less.

        With `dry_run` nothing happens but the answer. Doing it twice does no harm.
        """
        return self._portal.run(
            lambda: self._twin.delete_before(offset, partition=partition, dry_run=dry_run, timeout=timeout)
        )

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records, as it is now; NotFound if it is gone."""
        self._portal.run(lambda: self._twin.delete(timeout=timeout))
