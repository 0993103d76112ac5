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

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""


class Topic(Generic[T]):
    """A topic by name; made by ``client.topic(name)`` without I/O. ``T`` is the type of its values."""

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

        Of any length, in the memory of a few parts; no reader sees any of it before all of it is durable. It
        is bytes, whatever the topic's codec; what ends within `part_bytes` is an ordinary record. `timeout`
        in seconds is how long a part may go without its answer, over all retries. When this raises nothing is
        appended, except for `OutcomeUnknown`.
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

        Appends that run at the same time are joined into batches. A record is never appended twice, whatever
        happens.

        Raises:
            OutcomeUnknown: the deadline passed without a receipt.
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
        """Return a producer: batches of up to `batch_bytes`, up to `window` of a partition in flight.

        A record is sent as soon as its partition has nothing in flight, or a batch is full. `timeout` in
        seconds is how long a record may go without its receipt, over all retries.

        With a `name`, this producer is the only one of that name: the one before is refused from now on
        (`Fenced`), and the numbers given to `send` let this one continue where that one ended, without
        doubling a record. Its batches are accepted before they are durable, and kept here until they are.
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
        """Return a sender of small batches by datagram, for a program that keeps no connection.

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
        """Return a reader of the records from `start`, or from the position of `cursor`, to the present end.

        `start`: ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or ``{partition: offset}``. With `follow` it
        continues for ever. `from_leader` reads only from leaders; without it any replica answers that has all
        that this client has seen. `read_ahead_bytes` is per partition. Where retention trimmed records that
        were to be read, `OffsetExpired` names the cursor; with ``on_expired="earliest"`` reading continues
        with what is left. Where records are damaged on all replicas, or their producer wrote them so that
        they cannot be read, reading fails; with ``on_damage="skip"`` it continues after them, and
        `Reader.skipped` names what was left out.
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
        """Return the value of one record, of any length, as a stream.

        ``with topic.open(0, 812) as value``. For records whose `large_bytes` is not None there is no
        other way; for any it works. `timeout` in seconds is for each piece. Reading raises `NotFound` where
        there is no such record (yet), `OffsetExpired` where it was trimmed.
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
        """Return the topic's records as a member of a group: one member at a time reads a partition.

        ``mode="broadcast"``: by every member, each under its own name (`member`). A new group begins at
        `start`: ``"earliest"``, ``"latest"`` or a time. A member that is silent for `session` seconds (2 to
        60, the same for all members) counts as dead, and others continue from what it committed. A member
        that is to hand a partition over may take `handover` seconds to commit the records that it was given
        of it. `on_damage` as for `read`.
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
        """Return the names of all cursors."""
        return self._portal.run(lambda: self._twin.cursors())

    def describe_cursors(self) -> list[CursorInfo]:
        """Return all cursors, by name: positions, lag, owners."""
        return self._portal.run(lambda: self._twin.describe_cursors())

    def describe_cursor(self, name: str) -> CursorInfo:
        """Return a cursor's positions, lag and owners. Raises `NotFound` if there is none."""
        return self._portal.run(lambda: self._twin.describe_cursor(name))

    def cursor(self, name: str) -> dict[int, int]:
        """Return a cursor's committed positions by partition; {} if there is none."""
        return self._portal.run(lambda: self._twin.cursor(name))

    def set_cursor(self, name: str, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Move a cursor. With `force` it is taken from its owners, whose next commit is refused.

        Raises:
            PreconditionFailed: it was moved meanwhile.
            Fenced: a member owns it.
        """
        self._portal.run(lambda: self._twin.set_cursor(name, positions, force=force))

    def delete_cursor(self, name: str) -> None:
        """Delete a cursor."""
        self._portal.run(lambda: self._twin.delete_cursor(name))

    def describe(self) -> TopicInfo:
        """Return the topic's description."""
        return self._portal.run(lambda: self._twin.describe())

    def partitions(self) -> list[PartitionInfo]:
        """Return the partitions with their leaders, replicas and offsets."""
        return self._portal.run(lambda: self._twin.partitions())

    def offsets(self, at: str = "latest") -> dict[int, int]:
        """Return the offset in each partition at ``"earliest"``, ``"latest"`` or a time."""
        return self._portal.run(lambda: self._twin.offsets(at))

    def delete_before(
        self, offset: int, *, partition: int = 0, dry_run: bool = False, timeout: float | None = None
    ) -> Trimmed:
        """Remove a partition's records before `offset`, for ever; whole batches only, so perhaps a few fewer.

        With `dry_run` nothing happens but the answer. Repeating it does no harm.
        """
        return self._portal.run(
            lambda: self._twin.delete_before(offset, partition=partition, dry_run=dry_run, timeout=timeout)
        )

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records. Raises `NotFound` if it is gone."""
        self._portal.run(lambda: self._twin.delete(timeout=timeout))
