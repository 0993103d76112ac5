"""A topic on an event loop: append, produce, read, subscribe, cursors, channels, search, splits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from laminar.client.codecs import Codec
from laminar.client.consume.channel import Channel
from laminar.client.consume.channel_settings import (
    channel_path,
    channels_of,
    create_channel,
    delete_channel,
    describe_channel,
    set_channel,
)
from laminar.client.consume.cursors import CursorState, cursor_path, cursors_of, rewind_cursor
from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, OnDamage, OnExpired
from laminar.client.consume.group.membership import Mode
from laminar.client.consume.group.subscription import HANDOVER_S, SESSION_S, Subscription
from laminar.client.consume.large_values import Value
from laminar.client.consume.reader import Reader, Start, start_parameter
from laminar.client.consume.row_filter import row_filter
from laminar.client.delayed import DelayedCount, DelayedQuestions, DelayedRecord, DelayedState, asked_of
from laminar.client.delivery_time import Delay, DeliverAt, delivery_time_ms
from laminar.client.descriptions import ChannelInfo, CursorInfo, PartitionInfo, RouteInfo, TopicInfo, Trimmed
from laminar.client.errors import ConfigError
from laminar.client.history import RecordHistory, history_of
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.routing import newest_route
from laminar.client.produce.datagrams import Datagrams
from laminar.client.produce.producer import (
    DEFAULT_BATCH_BYTES,
    DEFAULT_BUFFER_BYTES,
    Guard,
    Producer,
)
from laminar.client.produce.sender import Sender
from laminar.client.produce.topic_appends import TopicAppends
from laminar.client.produce.uploads import PART_BYTES, chunks_of
from laminar.client.records import Receipt, identity
from laminar.client.route_changes import (
    cancel_route,
    change_route,
    logical_cuts,
    route_from,
    routes_of,
    until_done,
)
from laminar.client.search import VALUE_BYTES, Place, Search, asked_for
from laminar.client.trace_id import TraceId, trace_id_bytes

if TYPE_CHECKING:
    import datetime

T = TypeVar("T")


class Topic(Generic[T]):
    """A topic by name; made by ``client.topic(name)`` without I/O. ``T`` is the type of its values."""

    def __init__(self, session: Session, name: str, codec: Codec[T] | None) -> None:
        self.name = name
        self.codec = codec
        self.appends = TopicAppends(session, name)
        self._session = session

    def __repr__(self) -> str:
        return f"<Topic {self.name}>"

    # -- writing -------------------------------------------------------------------------------

    async def append(
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

        Readers get the record later if `delay` (seconds or a `timedelta`) or `deliver_at` (a `datetime` or
        milliseconds since the epoch) is given. Then the receipt has the record's id, `scheduled`, and no
        offset; if the time has passed when the record arrives, it is appended at once. A delay counts from
        this call, by this machine's clock.

        Raises:
            ConfigError: both `delay` and `deliver_at` are given, or an argument is malformed.
            OutcomeUnknown: the deadline passed without a receipt.
        """
        raw: Any = value if self.codec is None else self.codec.encode(value)
        timed = delay is not None or deliver_at is not None
        deliver_at_ms = delivery_time_ms(delay, deliver_at) if timed else None
        return await self.appends.append(
            raw,
            key,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            partition=partition,
            timeout=timeout,
            trace_id=trace_id_bytes(trace_id),
            deliver_at_ms=deliver_at_ms,
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
        """Return a producer, which sends records in order: up to `window` batches of a partition in flight.

        A batch of `batch_bytes` is sent when it is full, a smaller one at once if its partition has nothing
        in flight. `timeout` in seconds is how long a record may be without its receipt, over all retries.

        With a `name`, this producer is the only one of that name: an earlier one is refused from now on
        (`Fenced`). The program numbers its records (`number` of `send`), so that a later run continues after
        the last durable one and appends no record twice. Leaders accept the batches of a named producer
        before these are durable; the producer keeps the records until they are.
        """

        async def begin(guard: Guard | None) -> Sender:
            return await self.appends.open_sender(
                guard=guard,
                stop_on_failure=True,
                batch_bytes=batch_bytes,
                window=window,
                timeout=timeout,
                name=name,
            )

        return Producer(
            begin,
            topic=self.name,
            encode=None if self.codec is None else self.codec.encode,
            buffer_bytes=buffer_bytes,
        )

    def datagrams(
        self, *, secret: str | None = None, partitions: int | None = None, timeout: float | None = None
    ) -> Datagrams[T]:
        """Return a sender of small batches by UDP datagram, for a program that keeps no connection.

        `secret` is the cluster's secret, ``LAMINAR_SECRET`` if left out; a cluster without a secret needs
        none. `partitions` is the number of the topic's partitions: if it is given, no request is sent over
        HTTP. `timeout` in seconds is that of each append.
        """
        return Datagrams(
            self._session, self.name, self.codec, secret=secret, partitions=partitions, timeout=timeout
        )

    async def append_stream(
        self,
        source: AsyncIterable[bytes],
        key: str | bytes | None = None,
        *,
        tag: str | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp_ms: int | None = None,
        trace_id: TraceId | None = None,
        partition: int | None = None,
        part_bytes: int = PART_BYTES,
        timeout: float | None = None,
    ) -> Receipt:
        """Append one record whose value is all bytes of `source`: an async iterable, or a stream with `read`.

        The value may have any length; only a few parts of it are held in memory. No reader sees the record
        before all of it is durable. The topic's codec is not used. A value of at most `part_bytes` becomes an
        ordinary record. `timeout` in seconds is how long a part may be without its answer, over all retries.
        If this raises `OutcomeUnknown`, the record may be appended or not; after any other error it is not.
        """
        upload = await self.appends.begin_upload(
            key,
            tag=tag,
            headers=headers,
            timestamp_ms=timestamp_ms,
            trace_id=trace_id,
            partition=partition,
            part_bytes=part_bytes,
            timeout=timeout,
        )
        try:
            async for chunk in chunks_of(source):
                await upload.write(chunk)
            return await upload.finish()
        except BaseException:
            await upload.abort()
            raise

    # -- reading -------------------------------------------------------------------------------

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
        replica that has all that this client has seen. `read_ahead_bytes` limits what is buffered of each
        partition, `fetch_bytes` each request; `timeout` in seconds is the deadline of each request.

        With `tag` only records with this tag are read, with `headers` only those with all of these headers.
        Records that are left out count as read: positions, and so the cursor, move past them. Nodes
        leave out most batches without the tag; the exact comparison is done in the client.

        If records were trimmed before they were read, `OffsetExpired` is raised; with
        ``on_expired="earliest"`` reading continues with the records that are left. If records are damaged on
        all replicas, or their producer wrote a batch that cannot be decoded, reading fails; with
        ``on_damage="skip"`` it continues after them. `Reader.skipped` has the ranges that were left out.
        """
        decode: Any = identity if self.codec is None else self.codec.decode
        return Reader(
            self._session,
            self.name,
            start=start,
            follow=follow,
            cursor=cursor,
            partitions=partitions,
            from_leader=from_leader,
            decode=decode,
            timeout_s=timeout,
            on_expired=on_expired,
            on_damage=on_damage,
            keep=row_filter(tag, headers),
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
        )

    def open(self, partition: int, offset: int, *, timeout: float | None = None) -> Value:
        """Return the value of one record, of any length, as a stream.

        ``async with topic.open(0, 812) as value``. It is the only way to read the value of a large record
        (`Record.large_bytes` is not None), and works for any other too. `timeout` in seconds is for each
        piece. Opening raises `NotFound` if there is no such record (yet), `OffsetExpired` if it was trimmed.
        """
        return Value(self._session, self.name, partition, offset, timeout_s=timeout)

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
        positions. A member that has to release a partition has up to `handover` seconds to commit the records
        of it that the program was given. `on_expired` and `on_damage` are those of `read`.

        `tag` and `headers` choose records as in `read`. All members must use the same filter: each record
        goes to one member only, so no member reads a record that this one leaves out. Records that are left
        out are committed together with those before them, and once a second if there are no others to commit.

        A split or another change of the topic's partitions ends some of them, and new ones take their keys.
        The group reads the new partitions only once all records of the ended ones are committed. So that a
        program that commits rarely does not stop there, the subscription commits the rest of an ended
        partition itself if the program was given all of it and has then waited `session` seconds for another
        record. With ``commit_ends=False`` it does not: then the program must call `commit`.
        """
        decode: Any = identity if self.codec is None else self.codec.decode
        return Subscription(
            self._session,
            self.name,
            group=group,
            mode=mode,
            member=member,
            start=start_parameter(start, now_ms=time.time_ns() // 1_000_000),
            decode=decode,
            session_s=session,
            handover_s=handover,
            on_expired=on_expired,
            on_damage=on_damage,
            keep=row_filter(tag, headers),
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
            commit_ends=commit_ends,
        )

    async def cursors(self) -> list[str]:
        """Return the names of the topic's cursors, sorted."""
        return [each.cursor for each in await self.describe_cursors()]

    async def describe_cursors(self) -> list[CursorInfo]:
        """Return the descriptions of all cursors of the topic, sorted by name."""
        return await cursors_of(self._session, self.name)

    async def describe_cursor(self, name: str) -> CursorInfo:
        """Return a cursor's positions, lag and owners. Raises `NotFound` if there is none."""
        return CursorInfo.from_answer(await self._session.get_json(cursor_path(self.name, name)))

    async def cursor(self, name: str) -> dict[int, int]:
        """Return a cursor's committed positions by partition; {} if there is none."""
        return await CursorState(self._session, self.name, name).load()

    async def set_cursor(self, name: str, positions: Mapping[int, int], *, force: bool = False) -> None:
        """Move a cursor to `positions`, by partition the next offset to read; create it if there is none.

        With `force`, partitions are also taken from the members that own them: their next commit is refused.

        Raises:
            PreconditionFailed: another client moved the cursor meanwhile.
            Fenced: a member of a group owns one of the partitions.
        """
        state = CursorState(self._session, self.name, name)
        await state.load()
        await state.commit(positions, force=force)

    async def rewind_cursor(self, name: str, to: str | Mapping[int, int]) -> CursorInfo:
        """Move a cursor, also in partitions that members of its group own; return its new description.

        `to` is ``"earliest"``, ``"latest"`` or a time as `offsets` takes it, for all partitions; or positions
        by partition, and the cursor stays as it is in all others. Use it, not `set_cursor`, to move a cursor
        back over a split, merge or move of partitions: `set_cursor` cannot move it off the end of a partition
        that has ended. If this call fails, repeat it: members read nothing before it has succeeded.
        """
        if isinstance(to, str):
            to = start_parameter(to, now_ms=time.time_ns() // 1_000_000)
        return await rewind_cursor(self._session, self.name, name, to)

    async def delete_cursor(self, name: str) -> None:
        """Delete a cursor; do nothing if there is none."""
        await CursorState(self._session, self.name, name).delete()

    # -- channels ------------------------------------------------------------------------------

    async def channel(self, name: str, *, exist_ok: bool = False, **settings: Any) -> Channel[T]:
        """Return a channel, to receive its jobs. With settings, or `exist_ok`, the channel is created.

        ``await topic.channel("billing")`` returns an existing channel. With ``order="key"`` or other settings
        (those of docs/channels.md) a channel is created; if `exist_ok` is true, a channel that exists with
        these settings is returned.

        Raises:
            NotFound: there is no such channel, and neither settings nor `exist_ok` were given.
            AlreadyExists: the channel exists with other settings; or it exists, and `exist_ok` is false.
        """
        if settings or exist_ok:
            info = await self.create_channel(name, settings=settings, exist_ok=exist_ok)
        else:
            info = await self.describe_channel(name)
        decode: Any = identity if self.codec is None else self.codec.decode
        return Channel(self._session, self.name, channel_path(self.name, name), info, decode=decode)

    async def create_channel(
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
        return await create_channel(
            self._session, self.name, name, settings or {}, exist_ok=exist_ok, timeout_s=timeout
        )

    async def channels(self) -> list[ChannelInfo]:
        """Return the descriptions of all channels of the topic, sorted by name."""
        return await channels_of(self._session, self.name)

    async def describe_channel(self, name: str) -> ChannelInfo:
        """Return a channel's settings and progress. Raises `NotFound` if there is none."""
        return await describe_channel(self._session, self.name, name)

    async def set_channel(
        self, name: str, settings: Mapping[str, Any], *, version: int | None = None
    ) -> ChannelInfo:
        """Change the given settings of a channel, a value of None to its default; return the new description.

        Raises:
            NotFound: there is no such channel.
            PreconditionFailed: the channel's version is not `version`; or, without `version`, other clients
                changed the channel during each of several attempts.
        """
        return await set_channel(self._session, self.name, name, settings, version=version)

    async def delete_channel(self, name: str) -> None:
        """Delete a channel, and what it knows of each record; do nothing if there is no such channel."""
        await delete_channel(self._session, self.name, name)

    # -- searches ----------------------------------------------------------------------------

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
        """Return a search for the records that meet all given conditions: ``async for record in ...``.

        `contains` is a text that the value contains. `json` is a path in a JSON value and what is found
        there: ``("flight.from", "ORY")``. `start` and `end` are ``"earliest"``, ``"latest"``, times of
        append, or offsets by partition. Records of one partition come in order of their offsets, or backwards
        if `newest` is true; partitions are interleaved. The first `value_bytes` of each value are returned.
        The `Search` also reports its progress, and the ranges that it could not search.
        """
        asked = asked_for(
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
            value_bytes=value_bytes,
        )
        return Search(self._session, self.name, asked, limit=limit)

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
        """Return a search without end: over records as they are appended, from now on or from `start`.

        It follows all partitions over one connection, also new ones. The conditions are those of `search`.
        """
        asked = asked_for(
            key=key,
            tag=tag,
            headers=headers,
            contains=contains,
            json=json,
            partitions=partitions,
            start=start,
            value_bytes=value_bytes,
            follow=True,
        )
        return Search(self._session, self.name, asked, limit=limit)

    async def history(self, partition: int, offset: int, *, timeout: float | None = None) -> RecordHistory:
        """Return the history of a record from the partition's log: its append, deliveries and outcomes.

        Raises:
            NotFound: there is no such record yet.
        """
        return await history_of(self._session, self.name, partition, offset, timeout_s=timeout)

    # -- delayed records ---------------------------------------------------------------------

    async def delayed(self, id: str) -> DelayedState:
        """Return the state of a delayed record, by the id in its receipt.

        Raises:
            NotFound: no delayed record of the topic has this id.
            OffsetExpired: (``ended``) the record was published or cancelled some time ago: which of the two
                is no longer known.
        """
        return await DelayedQuestions(self._session, self.name).ask(id)

    async def cancel_delayed(self, id: str, *, timeout: float | None = None) -> DelayedState:
        """Cancel a delayed record; return its state: ``cancelled``, or ``published`` if it was too late.

        The call may be repeated. It raises the errors of `delayed`.
        """
        return await DelayedQuestions(self._session, self.name).cancel(id, timeout_s=timeout)

    async def move_delayed(
        self, id: str, *, deliver_at: DeliverAt | Literal["now"], timeout: float | None = None
    ) -> DelayedState:
        """Change the time of a delayed record (``"now"`` publishes it); return its state.

        A record that was published or cancelled before stays as it is. The call may be repeated. It raises
        the errors of `delayed`.
        """
        return await DelayedQuestions(self._session, self.name).move(id, deliver_at, timeout_s=timeout)

    async def list_delayed(
        self,
        *,
        start: DeliverAt | None = None,
        end: DeliverAt | None = None,
        key: str | bytes | None = None,
    ) -> AsyncIterator[DelayedRecord]:
        """Yield the pending delayed records, by time: of `key`, if given, from `start` to before `end`."""
        after: str | None = None
        while True:
            found, after = await self.page_of_delayed(asked_of(start, end, key), after)
            for each in found:
                yield each
            if after is None:
                return

    async def page_of_delayed(
        self, asked: Mapping[str, str], after: str | None
    ) -> tuple[list[DelayedRecord], str | None]:
        """Return a page of `list_delayed`, and the `after` of the next page; None at the end."""
        return await DelayedQuestions(self._session, self.name).page(asked, after)

    async def count_delayed(
        self,
        *,
        bucket: Delay | None = None,
        start: DeliverAt | None = None,
        end: DeliverAt | None = None,
    ) -> list[DelayedCount]:
        """Count the pending delayed records by spans of time, each `bucket` long (seconds, or a `timedelta`).

        Without `bucket` the result has one count of all records. Spans without records are left out.

        Raises:
            Error: (``invalid``) records are pending in more than 10,000 spans.
        """
        return await DelayedQuestions(self._session, self.name).count(asked_of(start, end), bucket)

    # -- describing ----------------------------------------------------------------------------

    async def describe(self) -> TopicInfo:
        """Return the topic's description: partitions, replicas, settings."""
        return TopicInfo.from_answer(await self._session.get_json(topic_path(self.name)))

    async def partitions(self) -> list[PartitionInfo]:
        """Return the partitions with their leaders, replicas and offsets."""
        answer = await self._session.get_json(f"{topic_path(self.name)}/partitions")
        rows = [PartitionInfo.from_answer(row) for row in answer["partitions"]]
        return sorted(rows, key=lambda row: row.partition)

    async def partition_of(self, key: str | bytes) -> int:
        """Return the number of the partition to which records of this key are appended now."""
        answer = await self._session.get_json(f"{topic_path(self.name)}/routes")
        return newest_route(answer).partition_of_key(key)

    async def route(self) -> RouteInfo:
        """Return the route of the topic: which partition takes which keys, and where earlier ones ended."""
        return RouteInfo.from_answer(await routes_of(self._session, self.name))

    async def split(
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
        """Split a partition into new ones by key; return the topic's new route when the split is done.

        Keys are hashed to 65,536 *logical partitions*, and each partition holds a range of these. `at` says
        where a new partition begins: at one or several logical partitions, or at that of a key (text or
        bytes). Without `at` the partition is cut `into` parts that divide its newest records evenly.

        `wait` is how many seconds the change may wait for open transactions and uploads in the partition;
        after that it is cancelled or, with `abandon`, drops them. With `force` the new partitions take
        records although the old one has no leader: allowed only if the topic's `order` is weak. Nodes in
        `avoid` get no replica of the new partitions. With `detach` the call returns once the change has
        begun.

        Raises:
            Error: (``route_cancelled``) the change was cancelled; (``in_progress``) another change of the
                topic's route is under way.
        """
        cuts = [at] if isinstance(at, int) else logical_cuts(at)
        return await self._change(
            [partition],
            cuts=cuts,
            into=None if cuts else into,
            avoid=avoid,
            wait=wait,
            abandon=abandon,
            force=force,
            detach=detach,
        )

    async def merge(
        self,
        partitions: Sequence[int],
        *,
        avoid: Sequence[str] = (),
        wait: float = 60.0,
        abandon: bool = False,
        force: bool = False,
        detach: bool = False,
    ) -> RouteInfo:
        """Merge partitions with neighbouring key ranges into one; other arguments are those of `split`."""
        if len(partitions) < 2:  # a change of one is a move
            raise ConfigError(
                "name two partitions or more", code="invalid", field="partitions", value=list(partitions)
            )
        return await self._change(
            list(partitions), avoid=avoid, wait=wait, abandon=abandon, force=force, detach=detach
        )

    async def move(
        self,
        partition: int,
        *,
        avoid: Sequence[str] = (),
        wait: float = 60.0,
        abandon: bool = False,
        force: bool = False,
        detach: bool = False,
    ) -> RouteInfo:
        """Replace a partition by a new one, which takes new records of its keys, for example on other nodes.

        Records of the old partition stay where they are until they are read and reclaimed. Nodes in `avoid`
        get no replica of the new partition. The other arguments and the result are those of `split`.
        """
        return await self._change(
            [partition], avoid=avoid, wait=wait, abandon=abandon, force=force, detach=detach
        )

    async def _change(self, inputs: Sequence[int], *, wait: float, detach: bool, **change: Any) -> RouteInfo:
        version = await change_route(self._session, self.name, inputs, wait=wait, **change)
        if detach:
            return await route_from(self._session, self.name, version, begun=True)
        return await self.wait_for_route(version, wait=wait)

    async def wait_for_route(
        self,
        version: int,
        *,
        wait: float = 60.0,
        progress: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> RouteInfo:
        """Wait for the end of a split, merge or move that was begun with `detach`; return the new route.

        `version` is the version of the new route (`RouteInfo.changing`), `wait` that of the call which began
        the change. Until the change ends, `progress` is called each second with its description (the answer
        of ``GET /v1/topics/{topic}/routes/{version}``), on the client's loop: it must not block.

        Raises:
            Error: (``route_cancelled``) the change was cancelled; the message says what it waited for.
            TimedOut: the change was not done a minute after `wait` seconds; it goes on.
        """
        return await until_done(self._session, self.name, version, wait=wait, progress=progress)

    async def cancel_change(self) -> int | None:
        """Cancel the split, merge or move that is under way; return the version of its new route.

        Return None if no change is under way.

        Raises:
            Error: (``in_progress``) it is too late: the partitions that the change replaces are ending.
        """
        return await cancel_route(self._session, self.name)

    async def reclaim(self, partition: int) -> Trimmed:
        """Delete a partition that has ended, with its records. Cursors continue in its successors.

        The cluster does it by itself a week after the partition's end, when retention has removed its
        records.

        Raises:
            NotDrained: cursors or channels have not acknowledged all of its records: ``limit`` names them.
            Error: (``invalid``) the partition has not ended, or partitions that it replaced are to be
                reclaimed first.
        """
        answer = await self._session.call("DELETE", f"{topic_path(self.name)}/partitions/{partition}")
        known = self._session.topic_map_nowait(self.name)
        if known is not None:
            known.stale = True
        return Trimmed.from_answer(answer.json())

    async def offsets(self, at: str = "latest") -> dict[int, int]:
        """Return an offset by partition: that of the first record at or after `at`.

        `at` is ``"earliest"`` (the first offset that is kept), ``"latest"`` (the end offset), ``"-1h"`` or a
        time.
        """
        place = start_parameter(at, now_ms=time.time_ns() // 1_000_000)
        partitions = (await self._session.topic_map(self.name)).numbers
        found = await asyncio.gather(
            *(self._session.offset_at(self.name, partition, place) for partition in partitions)
        )
        return dict(zip(partitions, found, strict=True))

    async def delete_before(
        self, offset: int, *, partition: int = 0, dry_run: bool = False, timeout: float | None = None
    ) -> Trimmed:
        """Remove a partition's records before `offset` for good; only whole batches, so a few may be kept.

        With `dry_run` nothing is removed, and the result says what would be. The call may be repeated.
        """
        places = await self._session.topic_map(self.name, timeout_s=timeout)
        answer = await self._session.call(
            "DELETE",
            f"{topic_path(self.name)}/partitions/{partition}/records"
            f"?before={offset}&dry_run={'true' if dry_run else 'false'}",
            timeout_s=timeout,
            first=places.leader(partition) if 0 <= partition < len(places.places) else None,
        )
        return Trimmed.from_answer(answer.json())

    async def delete(self, *, timeout: float | None = None) -> None:
        """Delete the topic and all its records. Raises `NotFound` if there is no such topic."""
        description = await self._session.call("GET", topic_path(self.name), timeout_s=timeout)
        headers = {"If-Match": description.headers["etag"]} if "etag" in description.headers else {}
        await self._session.call(
            "DELETE", topic_path(self.name), headers=headers, accept=(404,), timeout_s=timeout
        )
        self._session.forget_topic(self.name)
        self.appends.forget()
