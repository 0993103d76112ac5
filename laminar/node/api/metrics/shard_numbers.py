"""The numbers of one shard for `/metrics`: sums by topic, consumer and channel, computed in slices.

There are too many partitions for series of their own. A counter of a topic grows by what its partitions'
counters gained since the last look (one pass over all replicas), so it does not fall when a partition leaves
this shard. What a partition gains between the last look and its end is not counted.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from laminar import __version__
from laminar.compiled import described
from laminar.node.api.cluster.health import Watch, in_sync_of
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import in_slices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import Role, role_name

MOST_CONSUMERS: Final = 5_000
"""The most consumers of a node that have metrics; the others are only counted."""

Stored = tuple[list[int], float]


class TopicNumbers(msgspec.Struct, array_like=True, gc=False):
    """The sums of a topic's replicas here, in the order of `names.OF_TOPICS`; then fields for consumers."""

    append_records: int = 0
    append_bytes: int = 0
    fetch_records: int = 0
    fetch_bytes: int = 0
    log_bytes: int = 0
    leads: int = 0
    route: int = 0
    staged_batches: int = 0
    staged_bytes: int = 0
    unread: int = 0
    """The number of records in the partitions led here."""
    most_unread: int = 0
    """The same of the partition with the most records."""
    oldest_s: float = 0.0
    """The age of the oldest of these records."""
    retention_s: float = 0.0
    """The topic's retention by age, in seconds; 0 if there is none."""


class ConsumerNumbers(msgspec.Struct, array_like=True, gc=False):
    """A consumer's sums over the partitions led here in which it has a position.

    `held` is the number of all records in these partitions.
    """

    lag: int = 0
    most_lag: int = 0
    oldest_s: float = 0.0
    overtaken: int = 0
    held: int = 0


class PartitionNumbers(msgspec.Struct, array_like=True, gc=False):
    """The numbers of a replica, in the order of `names.OF_PARTITIONS`, and of its consumers."""

    number: int
    leads: bool
    has_failed: bool
    start_offset: int
    end_offset: int
    log_bytes: int
    append_records: int
    append_bytes: int
    fetch_bytes: int
    staged_batches: int
    consumers: dict[str, tuple[int, int]]
    """By name the lag and the number of overtaken records, if this node leads the partition."""


class ProcessNumbers(msgspec.Struct):
    """The numbers of one process; those of a controller are only `role`, `parts` and `histograms`."""

    role: str
    parts: dict[str, dict[str, Any]]
    histograms: dict[str, Stored] = {}
    requests: list[tuple[str, int, list[int], float]] = []
    """Of each operation and status: the histogram's counts, and the sum of durations."""
    states: dict[str, int] = {}
    undrained: int = 0
    topics: dict[str, TopicNumbers] = {}
    consumers: list[tuple[str, str, ConsumerNumbers]] = []
    consumers_left_out: int = 0
    channels: list[tuple[Any, ...]] = []
    channel_counts: list[tuple[Any, ...]] = []
    refused: dict[str, int] = {}
    routes: dict[str, Any] = {}
    version: str = __version__
    python: str = platform.python_version()
    modules: str = described()


_Counters = tuple[int, int, int, int]
_NONE: Final[_Counters] = (0, 0, 0, 0)


def label_of(role: Role) -> str:
    """Return the value of the label `process` for a process: ``controller``, ``shard-0``."""
    return role_name(role).replace(" ", "-")


class ShardNumbers:
    """Computes the values of one shard's metrics, which `/metrics` of its node adds up."""

    def __init__(
        self,
        services: HostServices,
        watch: Watch,
        topics: TopicLookup,
        *,
        parts: Mapping[str, Callable[[], Mapping[str, int]]],
        refused: Callable[[], Mapping[str, int]],
        requests: Callable[[], list[tuple[str, int, list[int], float]]],
    ) -> None:
        """Create it.

        `parts` return further statistics by part, `refused` the refusals by principal, `requests` the
        durations of requests.
        """
        self._services = services
        self._watch = watch
        self._topics = topics
        self._parts = parts
        self._refused = refused
        self._requests = requests
        # By log id: the counters of each replica at the last look, and, for replicas without consumers, the
        # other numbers of that look.
        self._last: dict[int, _Counters] = {}
        self._quiet: dict[int, _Found] = {}
        self._awake = services.watched(lambda partition: False)
        # By topic: the sums of what these counters have gained since the start.
        self._gained: dict[str, list[int]] = {}
        # Consumers in the order in which they were first seen: the records that each has lost so far, and by
        # partition the number that it lacked at the last look.
        self._seen: dict[tuple[str, str], int] = {}
        self._overtaken: dict[tuple[bytes, str], int] = {}

    async def look(self) -> ProcessNumbers:
        """Return the present numbers of this shard, after a look at all its replicas."""
        services = self._services
        found = services.statistics()
        parts = found | {name: dict(make()) for name, make in self._parts.items()}
        parts["node"] = found["node"] | self._watch.statistics()
        numbers = ProcessNumbers(
            label_of(services.number),
            parts,
            histograms=services.histograms(),
            requests=self._requests(),
            channel_counts=[*services.deliveries.counts.rows()],
            refused=dict(self._refused()),
        )
        for partition in self._awake():
            self._quiet.pop(partition.log.log_id, None)
        look = _Look(numbers, self._topics, services, self._quiet, services.failed_logs())
        counters: dict[int, _Counters] = {}
        overtaken: dict[tuple[bytes, str], int] = {}

        last, gained_by = self._last, self._gained

        def add(partition: Partition) -> None:
            log_id = partition.log.log_id
            now = counters[log_id] = _counters(partition)
            before = last.get(log_id)
            if now != before:
                topic = partition.topic
                gained = gained_by.get(topic)
                if gained is None:
                    gained = gained_by[topic] = [0, 0, 0, 0]
                for place, (count, known) in enumerate(zip(now, before or _NONE, strict=True)):
                    gained[place] += count - known if count >= known else count  # it was opened again
            for name, lacking in look.add(partition):
                key, group = (partition.topic, name), partition.replica.group
                more = max(0, lacking - self._overtaken.get((group, name), 0))
                self._seen[key] = self._seen.get(key, 0) + more
                overtaken[group, name] = lacking

        await in_slices(list(services.partitions.values()), add, clock=services.clock)
        self._last, self._overtaken, self._quiet = counters, overtaken, look.quiet
        self._gained = {name: gained for name, gained in self._gained.items() if name in numbers.topics}
        for name, gained in self._gained.items():
            row = numbers.topics[name]
            row.append_records, row.append_bytes, row.fetch_records, row.fetch_bytes = gained
        self._list_consumers(numbers, look.consumers)
        return numbers

    def _list_consumers(
        self, numbers: ProcessNumbers, consumers: dict[tuple[str, str], ConsumerNumbers]
    ) -> None:
        self._seen = {key: lost for key, lost in self._seen.items() if key in consumers}
        for key in consumers:
            self._seen.setdefault(key, 0)
        for (topic, name), lost in self._seen.items():
            if len(numbers.consumers) < MOST_CONSUMERS:
                row = consumers[topic, name]
                row.overtaken = lost
                numbers.consumers.append((topic, name, row))
        numbers.consumers_left_out = len(self._seen) - len(numbers.consumers)

    async def of_partitions(self, topic: str) -> list[PartitionNumbers]:
        """Return the numbers of this shard's replicas of a topic."""
        found: list[PartitionNumbers] = []

        def add(partition: Partition) -> None:
            if partition.topic == topic:
                found.append(_of_partition(partition))

        await in_slices(list(self._services.partitions.values()), add, clock=self._services.clock)
        return found


class _OfTopic(NamedTuple):
    """The sums of a topic, and the number of replicas that it asks for; 0 if it is not in the view."""

    row: TopicNumbers
    replicas: int
    min_replicas: int


class _Found(NamedTuple):
    """The numbers of a replica that cannot change while its group is quiesced."""

    has_leader: bool
    status: str
    """The status of the partition; empty if it is led elsewhere."""
    in_sync: int = 0
    staged_batches: int = 0
    staged_bytes: int = 0
    unread: int = 0


def _found_of(partition: Partition) -> _Found:
    context = partition.context
    replica, state = context.replica, context.state
    core = replica.core
    if not core.is_leader or replica.failure is not None or state.left_out:
        return _Found(bool(core.leader_id), "")
    stages, voters = state.stages, len(core.configuration.voters)
    return _Found(
        True,
        state.succession.status,
        1 if voters == 1 else len(in_sync_of(partition)),
        len(stages),
        stages.size_bytes if stages else 0,
        context.end_offset - context.start_offset,
    )


class _Look:
    """One look (a pass over all replicas of the shard), with its sums.

    `quiet` has, by log, the numbers of replicas without consumers, which the next look uses again if they
    stay quiesced.
    """

    def __init__(
        self,
        numbers: ProcessNumbers,
        topics: TopicLookup,
        services: HostServices,
        quiet: Mapping[int, _Found],
        failed: Collection[int],
    ) -> None:
        """Begin with empty sums.

        `quiet` has the numbers of the previous look for replicas whose groups have been quiesced since.
        `failed` has the ids of logs that take no more entries.
        """
        self._quiet = quiet
        self.quiet: dict[int, _Found] = {}
        self._failed = failed
        self._numbers = numbers
        self._topics = topics
        self._view = services.view
        self._now_ms = services.clock.wall_ms()
        self._states: Counter[str] = Counter()
        numbers.states = self._states
        self._of_topics: dict[str, _OfTopic] = {}
        self.consumers: dict[tuple[str, str], ConsumerNumbers] = {}

    def add(self, partition: Partition) -> Sequence[tuple[str, int]]:
        """Add a replica; return by consumer the number of records that were trimmed before it read them.

        With many replicas this is most of the time of a scrape, and most of that is spent on cache misses. So
        it reads no field twice, and of a quiesced replica only the fields that may change all the same.
        """
        context = partition.context
        log, states = context.log, self._states
        topic = self._of_topics.get(context.topic)
        if topic is None:
            topic = self._of_topics[context.topic] = self._topic(context.topic)
        row = topic.row
        row.log_bytes += log.size_bytes
        if self._failed and log.log_id in self._failed:
            states["stopped"] += 1
        found = None if log.quarantine else self._quiet.get(log.log_id)
        if found is None:
            return self._add_awake(partition, topic)
        self.quiet[log.log_id] = found
        self._add_found(found, topic)
        return ()

    def _add_awake(self, partition: Partition, topic: _OfTopic) -> Sequence[tuple[str, int]]:
        context = partition.context
        log, replica, state = context.log, context.replica, context.state
        if log.quarantine:
            self._states["damaged"] += 1
        if replica.failure is not None and log.log_id not in self._failed:
            self._states["stopped"] += 1
        names: Sequence[str] = ()
        if state.cursors.is_used:
            names = partition.cursor_commands.names()
            for name in names:
                self.consumers.setdefault((context.topic, name), ConsumerNumbers())
        found = _found_of(partition)
        self._add_found(found, topic)
        changes = names or state.channels or state.start_is_moving or state.left_out or log.quarantine
        if not changes and replica.failure is None:
            self.quiet[log.log_id] = found
        if not found.status:
            return ()
        if state.channels:
            self._add_channels(partition, context.end_offset)
        return self._add_cursors(partition, topic.row, names) if names else ()

    def _add_found(self, found: _Found, topic: _OfTopic) -> None:
        states, row = self._states, topic.row
        if not found.status:
            if not found.has_leader:
                states["leaderless"] += 1
            return
        states[found.status] += 1
        if found.in_sync < topic.replicas:
            states["under_replicated"] += 1
        if found.in_sync < topic.min_replicas:
            states["refusing"] += 1
        row.leads += 1
        if found.staged_batches:
            row.staged_batches += found.staged_batches
            row.staged_bytes += found.staged_bytes
        if found.unread:
            row.unread += found.unread
            row.most_unread = max(row.most_unread, found.unread)

    def _topic(self, name: str) -> _OfTopic:
        row = self._numbers.topics[name] = TopicNumbers(route=self._topics.version(name))
        record = self._view.topics().get(name)
        if record is None:
            return _OfTopic(row, 0, 0)
        settings = record.settings
        row.retention_s = int(settings.get("retention_ms", 0)) / 1000
        return _OfTopic(row, record.replicas, int(settings.get("min_replicas", 1)))

    def _add_channels(self, partition: Partition, end: int) -> None:
        kept = partition.context.kept_log
        for channel in partition.state.channels.by_id.values():
            self._numbers.channels.append(
                (
                    partition.topic,
                    channel.name,
                    channel.depth(end),
                    len(channel.out),
                    len(channel.aside) - channel.dead,
                    channel.dead,
                    channel.lost,
                    0 if kept is None else kept.bytes_of(channel.id),
                )
            )

    def _add_cursors(
        self, partition: Partition, row: TopicNumbers, names: Sequence[str]
    ) -> list[tuple[str, int]]:
        commands, lacking = partition.cursor_commands, list[tuple[str, int]]()
        start, end = partition.start_offset, partition.end_offset
        is_sealed = partition.state.succession.status == "sealed"
        if end > start:
            row.oldest_s = max(row.oldest_s, self._age_s(partition, start))
        for name in names:
            cursor = commands.get(name)
            if cursor is None:
                continue
            lacking.append((name, max(0, start - cursor.position)))
            each, lag = self.consumers[partition.topic, name], max(0, end - cursor.position)
            each.held += end - start
            each.lag += lag
            each.most_lag = max(each.most_lag, lag)
            if lag:
                each.oldest_s = max(each.oldest_s, self._age_s(partition, max(start, cursor.position)))
                self._numbers.undrained += is_sealed
        return lacking

    def _age_s(self, partition: Partition, offset: int) -> float:
        """Return the age in seconds of the record at `offset`, at most; 0 if that is not known."""
        time_ms = partition.log.appended_before(offset)
        return 0.0 if not time_ms else max(0.0, (self._now_ms - time_ms) / 1000)


def _counters(partition: Partition) -> _Counters:
    appends, reader = partition.appends, partition.reader
    return appends.appended_records, appends.appended_bytes, reader.fetched_records, reader.fetched_bytes


def _of_partition(partition: Partition) -> PartitionNumbers:
    commands, leads = partition.cursor_commands, partition.leads
    start, end = partition.start_offset, partition.end_offset
    return PartitionNumbers(
        number=partition.number,
        leads=leads,
        has_failed=partition.replica.failure is not None or partition.log.failure is not None,
        start_offset=start,
        end_offset=end,
        log_bytes=partition.log.size_bytes,
        append_records=partition.appends.appended_records,
        append_bytes=partition.appends.appended_bytes,
        fetch_bytes=partition.reader.fetched_bytes,
        staged_batches=len(partition.state.stages) if leads else 0,
        consumers={
            name: (max(0, end - cursor.position), max(0, start - cursor.position))
            for name in (commands.names() if leads else ())
            if (cursor := commands.get(name)) is not None
        },
    )
