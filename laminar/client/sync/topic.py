"""A topic without a loop: the twin of `laminar.client.topic`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from laminar.client import topic as aio_topic
from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, OnDamage, OnExpired
from laminar.client.consume.reader import Start
from laminar.client.consume.subscription import HANDOVER_S, SESSION_S, Mode
from laminar.client.delayed import DelayedCount, DelayedRecord, DelayedState, asked_of
from laminar.client.delivery_time import Delay, DeliverAt
from laminar.client.history import RecordHistory
from laminar.client.produce.producer import DEFAULT_BATCH_BYTES, DEFAULT_BUFFER_BYTES, Key
from laminar.client.produce.uploads import PART_BYTES, joined_chunks_of
from laminar.client.records import (
    ChannelInfo,
    CursorInfo,
    PartitionInfo,
    Receipt,
    RouteInfo,
    TopicInfo,
    Trimmed,
)
from laminar.client.search import VALUE_BYTES, Place
from laminar.client.sync.channel import Channel
from laminar.client.sync.datagrams import Datagrams
from laminar.client.sync.large_values import Value
from laminar.client.sync.portal import Portal
from laminar.client.sync.producer import Producer
from laminar.client.sync.reader import Reader
from laminar.client.sync.search import Search
from laminar.client.sync.subscription import Subscription
from laminar.client.trace_id import TraceId

if TYPE_CHECKING:
    import datetime


T = TypeVar("T")


class Readable(Protocol):
    """The part of a binary file that an upload uses."""

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
        trace_id: TraceId | None = None,
        partition: int | None = None,
        part_bytes: int = PART_BYTES,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record whose value is all bytes of `source`: a binary file, or an iterable of bytes.

        The value may have any length; only a few parts of it are held in memory. No reader sees the record
        before all of it is durable. The topic's codec is not used. A value of at most `part_bytes` becomes an
        ordinary record. `timeout` in seconds is how long a part may be without its answer, over all retries.
        If this raises, nothing is appended, except that `OutcomeUnknown` leaves it open.
        """
        run = self._portal.run
        upload = run(
            lambda: self._twin.appends.begin_upload(
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                trace_id=trace_id,
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

    def list_delayed(
        self,
        *,
        start: DeliverAt | None = None,
        end: DeliverAt | None = None,
        key: str | bytes | None = None,
    ) -> Iterator[DelayedRecord]:
        """Yield the records that are pending, in order of their times: from `start` to before `end`."""
        asked = asked_of(start, end, key)
        after: str | None = None
        while True:
            found, after = self._portal.run(partial(self._twin.page_of_delayed, asked, after))
            yield from found
            if after is None:
                return

    # generated from laminar.client.topic.Topic, without page_of_delayed

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
        trace_id: TraceId | None = None,
        delay: Delay | None = None,
        deliver_at: DeliverAt | None = None,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record; return its receipt when it is durable as the topic's settings require.

        Appends that run at the same time are joined into batches. A record is never appended twice.
        `trace_id`, 32 hexadecimal digits or 16 bytes, is kept with the record.

        With `delay`, in seconds or as a `timedelta`, or at `deliver_at`, a `datetime` or milliseconds since
        the epoch, readers get the record later. Then the receipt has the record's id, `scheduled`, and no
        offset; if the time has passed when it arrives, the record is appended at once. A delay counts from
        this call, by this machine's clock.

        Raises:
            ConfigError: both are given, or one is malformed; or `trace_id` is malformed.
            OutcomeUnknown: the deadline passed without a receipt.
        """
        return self._portal.run(
            lambda: self._twin.append(
                value,
                key,
                tag=tag,
                headers=headers,
                timestamp_ms=timestamp_ms,
                trace_id=trace_id,
                delay=delay,
                deliver_at=deliver_at,
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

        A record is sent when a batch is full, or at once if its partition has nothing in flight. `timeout` in
        seconds is how long a record may be without its receipt, over all retries.

        With a `name`, this producer is the only one of that name: an earlier one is refused from now on
        (`Fenced`). By the numbers given to `send` this producer continues where the earlier one ended, and
        appends no record twice. Leaders accept its batches before these are durable; the producer keeps the
        records until they are.
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

        `secret` is the cluster's secret, ``LAMINAR_SECRET`` if left out; a cluster without a secret needs
        none. `partitions` is the number of the topic's partitions: if it is given, no request is sent over
        HTTP. `timeout` in seconds is that of each append.
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
        tag: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        from_leader: bool = False,
        timeout: float | None = None,
        on_expired: OnExpired = "error",
        on_damage: OnDamage = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> Reader[T]:
        """Return a reader of the records from `start`, or from the position of `cursor`, to the present end.

        `start` is ``"earliest"``, ``"latest"``, ``"-1h"``, a time, or ``{partition: offset}``. With `follow`
        the reader continues for ever. With `from_leader` it reads from leaders only; without it from any
        replica that has all that this client has seen. `read_ahead_bytes` holds for each partition,
        `fetch_bytes` for each request. `timeout` in seconds is the deadline of each request.

        With `tag` only records with this tag are read, with `headers` only those with all of these. What is
        left out counts as read: positions, and so the cursor, move past it. A node sends no batch that cannot
        hold the tag; headers are compared here.

        If records were trimmed before they were read, `OffsetExpired` is raised, which names the cursor; with
        ``on_expired="earliest"`` reading continues with the records that are left. If records are damaged on
        all replicas, or their producer wrote a batch that cannot be decoded, reading fails; with
        ``on_damage="skip"`` it continues after them. `Reader.skipped` has the ranges that were left out.
        """
        return Reader(
            self._portal,
            self._twin.read(
                start,
                follow=follow,
                cursor=cursor,
                partitions=partitions,
                tag=tag,
                headers=headers,
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

        ``with topic.open(0, 812) as value``. It is the only way to read the value of a large record
        (`Record.large_bytes` is not None), and works for any other too. `timeout` in seconds is for each
        piece. Opening raises `NotFound` if there is no such record (yet), `OffsetExpired` if it was trimmed.
        """
        return Value(self._portal, self._twin.open(partition, offset, timeout=timeout))

    def subscribe(
        self,
        group: str,
        mode: Mode = "clustering",
        member: str | None = None,
        *,
        start: str | datetime.datetime = "earliest",
        tag: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        session: float = SESSION_S,
        handover: float = HANDOVER_S,
        on_expired: OnExpired = "error",
        on_damage: OnDamage = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        commit_ends: bool = True,
    ) -> Subscription[T]:
        """Return a subscription: this program reads the topic as a member of the consumer group `group`.

        Each partition is read by one member of the group at a time. With ``mode="broadcast"`` every member
        reads all partitions, with a cursor of its own under its name, `member`. A new group begins at
        `start`: ``"earliest"``, ``"latest"`` or a time. A member whose session was not renewed for `session`
        seconds (2 to 60, the same for all members) counts as dead, and others continue at its committed
        positions. A member that has to release a partition gets up to `handover` seconds to commit the
        records that it was given of it. `on_expired` and `on_damage` are those of `read`.

        `tag` and `headers` choose records as in `read`. What is left out is committed with the records before
        it, and once a second where the program has nothing to commit. Give all members the same: each record
        goes to one member, and is read by no other if that one leaves it out.

        When a partition has ended, as after a split, those that follow it are read once all of it is
        committed. If the loop's body has been given all of it, and has waited for its next record for a
        session, the subscription commits that; without `commit_ends` only `commit` does.
        """
        return Subscription(
            self._portal,
            self._twin.subscribe(
                group,
                mode,
                member,
                start=start,
                tag=tag,
                headers=headers,
                session=session,
                handover=handover,
                on_expired=on_expired,
                on_damage=on_damage,
                fetch_bytes=fetch_bytes,
                read_ahead_bytes=read_ahead_bytes,
                commit_ends=commit_ends,
            ),
        )

    def cursors(self) -> list[str]:
        """Return the names of the topic's cursors, sorted."""
        return self._portal.run(lambda: self._twin.cursors())

    def describe_cursors(self) -> list[CursorInfo]:
        """Return the descriptions of all cursors of the topic, sorted by name."""
        return self._portal.run(lambda: self._twin.describe_cursors())

    def describe_cursor(self, name: str) -> CursorInfo:
        """Return a cursor's positions, lag and owners. Raises `NotFound` if there is none."""
        return self._portal.run(lambda: self._twin.describe_cursor(name))

    def cursor(self, name: str) -> dict[int, int]:
        """Return a cursor's committed positions by partition; {} if there is none."""
        return self._portal.run(lambda: self._twin.cursor(name))

    def set_cursor(self, name: str, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Move a cursor to `positions`, by partition the next offset to read; create it if there is none.

        With `force`, partitions are also taken from the members that own them: their next commit is refused.

        Raises:
            PreconditionFailed: another client moved the cursor meanwhile.
            Fenced: a member of a group owns one of the partitions.
        """
        self._portal.run(lambda: self._twin.set_cursor(name, positions, force=force))

    def rewind_cursor(self, name: str, to: str | Mapping[int, int]) -> CursorInfo:
        """Set a cursor in all partitions, and take it from the members of its group that own them.

        `to` is ``"earliest"``, ``"latest"`` or a time as `offsets` takes it; or positions by partition, where
        the cursor stays as it is in all others. It is needed where the topic's partitions have changed: there
        `set_cursor` takes no cursor off the end of a partition that has ended. Repeat it if it fails.
        """
        return self._portal.run(lambda: self._twin.rewind_cursor(name, to))

    def delete_cursor(self, name: str) -> None:
        """Delete a cursor; do nothing if there is none."""
        self._portal.run(lambda: self._twin.delete_cursor(name))

    def channel(self, name: str, *, exist_ok: bool = False, **settings: Any) -> Channel[T]:
        """Return a channel, to receive its jobs. With settings, or `exist_ok`, it is created.

        ``topic.channel("billing")`` returns an existing one. With ``order="key"`` or other settings
        (those of docs/channels.md) it is created; with `exist_ok` an existing one with these settings is
        returned.

        Raises:
            NotFound: there is no such channel, and the call creates none.
            AlreadyExists: it exists with other settings; or it exists, and `exist_ok` is false.
        """
        return Channel(
            self._portal, self._portal.run(lambda: self._twin.channel(name, exist_ok=exist_ok, **settings))
        )

    def create_channel(
        self,
        name: str,
        *,
        settings: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> ChannelInfo:
        """Create a channel, and return when it is open in all partitions.

        `settings` are those of docs/channels.md; one that is left out has its default. `start` and `until`
        may be a `datetime`.

        Raises:
            AlreadyExists: the channel exists with other settings; or it exists, and `exist_ok` is false.
        """
        return self._portal.run(
            lambda: self._twin.create_channel(name, settings=settings, exist_ok=exist_ok, timeout=timeout)
        )

    def channels(self) -> list[ChannelInfo]:
        """Return the descriptions of all channels of the topic, sorted by name."""
        return self._portal.run(lambda: self._twin.channels())

    def describe_channel(self, name: str) -> ChannelInfo:
        """Return a channel's settings and progress. Raises `NotFound` if there is none."""
        return self._portal.run(lambda: self._twin.describe_channel(name))

    def set_channel(
        self, name: str, settings: Mapping[str, Any], *, version: int | None = None
    ) -> ChannelInfo:
        """Change settings of a channel; None sets the default, and others stay as they are.

        Raises:
            NotFound: there is no such channel.
            PreconditionFailed: the channel has not this `version`; or others changed it, again and again.
        """
        return self._portal.run(lambda: self._twin.set_channel(name, settings, version=version))

    def delete_channel(self, name: str) -> None:
        """Delete a channel and its state of each record; do nothing if there is none."""
        self._portal.run(lambda: self._twin.delete_channel(name))

    def search(
        self,
        *,
        key: str | bytes | None = None,
        trace_id: TraceId | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        contains: str | None = None,
        json: tuple[str, Any] | None = None,
        partitions: Sequence[int] | None = None,
        start: Place = "earliest",
        end: Place = "latest",
        newest: bool = False,
        limit: int | None = None,
        value_bytes: int = VALUE_BYTES,
    ) -> Search:
        """Return a search for the records that meet all given conditions: ``for record in ...``.

        `contains` is text in the value, `json` a path in it and the value there: ``("flight.from", "ORY")``.
        `start` and `end` are ends of the log, times of append, or offsets by partition. Records of a
        partition come in order, or with `newest` backwards; partitions come as they are read. Of each value
        `value_bytes` are shown. The search reports its progress, and the ranges that it could not search.
        """
        return Search(
            self._portal,
            self._twin.search(
                key=key,
                trace_id=trace_id,
                tag=tag,
                headers=headers,
                contains=contains,
                json=json,
                partitions=partitions,
                start=start,
                end=end,
                newest=newest,
                limit=limit,
                value_bytes=value_bytes,
            ),
        )

    def tail(
        self,
        *,
        key: str | bytes | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        contains: str | None = None,
        json: tuple[str, Any] | None = None,
        partitions: Sequence[int] | None = None,
        start: Place = "latest",
        limit: int | None = None,
        value_bytes: int = VALUE_BYTES,
    ) -> Search:
        """Return a search without end, over what is appended from now on, or from `start`.

        It follows all partitions on one connection, also those that are made meanwhile; the rest is as for
        `search`.
        """
        return Search(
            self._portal,
            self._twin.tail(
                key=key,
                tag=tag,
                headers=headers,
                contains=contains,
                json=json,
                partitions=partitions,
                start=start,
                limit=limit,
                value_bytes=value_bytes,
            ),
        )

    def history(self, partition: int, offset: int, *, timeout: float | None = None) -> RecordHistory:
        """Return the history of a record: its append, deliveries, retries and end, from the partition's log.

        Raises:
            NotFound: there is no such record yet.
        """
        return self._portal.run(lambda: self._twin.history(partition, offset, timeout=timeout))

    def delayed(self, id: str) -> DelayedState:
        """Return the state of a delayed record, by the id in its receipt.

        Raises:
            NotFound: no delayed record of the topic has this id.
            OffsetExpired: ``ended``, it was published or cancelled, but which of them is no longer known.
        """
        return self._portal.run(lambda: self._twin.delayed(id))

    def cancel_delayed(self, id: str, *, timeout: float | None = None) -> DelayedState:
        """Cancel a delayed record: its state is ``cancelled``, or ``published`` if it is too late.

        The answer is exact, and the call may be repeated. Raises as `delayed`.
        """
        return self._portal.run(lambda: self._twin.cancel_delayed(id, timeout=timeout))

    def move_delayed(
        self, id: str, *, deliver_at: DeliverAt | Literal["now"], timeout: float | None = None
    ) -> DelayedState:
        """Change the time of a delayed record; ``"now"`` publishes it.

        Its state is ``pending``, or what it was already. The call may be repeated. Raises as `delayed`.
        """
        return self._portal.run(lambda: self._twin.move_delayed(id, deliver_at=deliver_at, timeout=timeout))

    def count_delayed(
        self, *, bucket: Delay | None = None, start: DeliverAt | None = None, end: DeliverAt | None = None
    ) -> list[DelayedCount]:
        """Count the pending records by spans of `bucket` (seconds, or a `timedelta`); without it, all in one.

        Spans without records are left out.

        Raises:
            Error: ``invalid``, records are pending in more than 10,000 spans.
        """
        return self._portal.run(lambda: self._twin.count_delayed(bucket=bucket, start=start, end=end))

    def describe(self) -> TopicInfo:
        """Return the topic's description."""
        return self._portal.run(lambda: self._twin.describe())

    def partitions(self) -> list[PartitionInfo]:
        """Return the partitions with their leaders, replicas and offsets."""
        return self._portal.run(lambda: self._twin.partitions())

    def partition_of(self, key: str | bytes) -> int:
        """Return the partition that takes the records of a key by the topic's present route."""
        return self._portal.run(lambda: self._twin.partition_of(key))

    def route(self) -> RouteInfo:
        """Return the route of the topic: which partition holds which keys, and where others ended."""
        return self._portal.run(lambda: self._twin.route())

    def split(
        self,
        partition: int,
        at: int | str | bytes | Sequence[int] | None = None,
        *,
        into: int = 2,
        avoid: Sequence[str] = (),
        wait: float = 60.0,
        abandon: bool = False,
        force: bool = False,
        detach: bool = False,
    ) -> RouteInfo:
        """Split a partition; return the new route once it is the topic's.

        `at` is the logical partition, or several, with which a new part begins, or a key (text or bytes) with
        whose logical partition one does. Without it the partition is cut `into` parts that divide its newest
        records evenly. `wait` in seconds is how long the change may wait for stages and uploads in the
        partition before it is cancelled; with `abandon` these are dropped then. With `force` the parts take
        records though the partition has no leader: only where the topic's `order` is weak. Nodes in `avoid`
        get no replica of the parts. With `detach` return once the change has begun.

        Raises:
            Error: ``route_cancelled``; ``in_progress``, another change of the topic is under way.
        """
        return self._portal.run(
            lambda: self._twin.split(
                partition, at, into=into, avoid=avoid, wait=wait, abandon=abandon, force=force, detach=detach
            )
        )

    def merge(
        self,
        partitions: Sequence[int],
        *,
        avoid: Sequence[str] = (),
        wait: float = 60.0,
        abandon: bool = False,
        force: bool = False,
        detach: bool = False,
    ) -> RouteInfo:
        """Merge partitions that are neighbours by key range to one; the rest is as for `split`."""
        return self._portal.run(
            lambda: self._twin.merge(
                partitions, avoid=avoid, wait=wait, abandon=abandon, force=force, detach=detach
            )
        )

    def move(
        self,
        partition: int,
        *,
        avoid: Sequence[str] = (),
        wait: float = 60.0,
        abandon: bool = False,
        force: bool = False,
        detach: bool = False,
    ) -> RouteInfo:
        """Replace a partition by a new one, which takes the records of its keys from now on.

        What the partition holds stays where it is until it is read and reclaimed. With `avoid` the new one is
        on other nodes than these. The rest is as for `split`.
        """
        return self._portal.run(
            lambda: self._twin.move(
                partition, avoid=avoid, wait=wait, abandon=abandon, force=force, detach=detach
            )
        )

    def wait_for_route(
        self, version: int, *, wait: float = 60.0, progress: Callable[[Mapping[str, Any]], None] | None = None
    ) -> RouteInfo:
        """Wait for the end of a change that was begun with `detach`; return the new route.

        `version` is that of the route which the change makes, and `wait` the seconds that it may wait for its
        partitions. Until its end `progress` is called each second with its description, as the route
        ``GET /v1/topics/{topic}/routes/{version}`` gives it, on the client's loop: it must not block.

        Raises:
            Error: ``route_cancelled``, with what it waited for.
            TimedOut: a minute after `wait` it was not done; it goes on.
        """
        return self._portal.run(lambda: self._twin.wait_for_route(version, wait=wait, progress=progress))

    def cancel_change(self) -> int | None:
        """Cancel the change of the route that is under way; return the version that it would have made.

        None if no change is under way.

        Raises:
            Error: ``in_progress``, its partitions end already.
        """
        return self._portal.run(lambda: self._twin.cancel_change())

    def reclaim(self, partition: int) -> Trimmed:
        """Delete a partition that has ended, with its records. Cursors continue in its successors.

        The cluster does it by itself a week after the partition's end, when retention has removed its
        records.

        Raises:
            NotDrained: cursors are not at its end: ``limit`` has them.
            Error: ``invalid``, it takes records, or partitions before it are to be reclaimed first.
        """
        return self._portal.run(lambda: self._twin.reclaim(partition))

    def offsets(self, at: str = "latest") -> dict[int, int]:
        """Return by partition the offset at `at`: ``"earliest"``, ``"latest"`` or a time."""
        return self._portal.run(lambda: self._twin.offsets(at))

    def delete_before(
        self, offset: int, *, partition: int = 0, dry_run: bool = False, timeout: float | None = None
    ) -> Trimmed:
        """Remove a partition's records before `offset` for good; only whole batches, so a few may be kept.

        With `dry_run` nothing is removed: the result says what would be. Repeating the call does no harm.
        """
        return self._portal.run(
            lambda: self._twin.delete_before(offset, partition=partition, dry_run=dry_run, timeout=timeout)
        )

    def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records. Raises `NotFound` if there is no such topic."""
        self._portal.run(lambda: self._twin.delete(timeout=timeout))
