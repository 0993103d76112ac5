"""The rules of channels, looked at from outside: each committed entry, and each answer to a consumer.

`ChannelRules` follows each channel of each partition by the committed entries alone, with code of its own. It
checks every change against what it knows: what was appended, what consumers asked for, and when. At any time
the tables of replicas must be what it holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from laminar.batch import Batch, Buffer, Header, Kind, as_due
from laminar.node.consensus.log_start import LogStartRecord, log_start_record
from laminar.node.partition.state.channel_changes import (
    TIME_OUT,
    Acknowledged,
    Change,
    Closed,
    Copied,
    Deleted,
    Failed,
    GivenOut,
    Opened,
    Retried,
    Sought,
    channel_changes,
)
from laminar.node.partition.state.channels import NO_KEY, Aside, Copy, Out, Why, key_hash
from laminar.node.partition.state.pins import Pinned, PinsEnded
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.node.partition.state.staging_entries import publish_record
from laminar.wire.channels import ChannelSettings
from tests.sim.pin_rules import PinnedHere, PinRules
from tests.sim.watch import Group, Watch
from tests.sim.world import World

DAY_MS = 86_400_000

# A delivery as its consumer names it: channel, partition, offset, number.
Token = tuple[str, int, int, int]


@dataclass(slots=True)
class Record:
    """What a channel may look at of a record."""

    key: bytes | None
    tag: str | None
    headers: dict[str, bytes]


@dataclass(slots=True)
class Log:
    """What was committed to one partition."""

    number: int
    start: int = 0
    records: list[Record] = field(default_factory=list)
    # By id: the channels that are open here.
    channels: dict[int, Known] = field(default_factory=dict)
    # By offset: the last copy of a record that is open.
    copies: dict[int, Copy] = field(default_factory=dict)
    # What batches of sinks have pinned here.
    pins: dict[BatchKey, PinnedHere] = field(default_factory=dict)

    def forget_copies(self) -> None:
        """Forget the copies of what has ended in all channels."""
        for offset in list(self.copies):
            if not any(offset in known.out or offset in known.aside for known in self.channels.values()):
                del self.copies[offset]


@dataclass(slots=True)
class Known:
    """One channel in one partition."""

    id: int
    name: str
    version: int
    settings: ChannelSettings
    next: int
    # Where it began.
    first: int
    lost: int = 0
    out: dict[int, Out] = field(default_factory=dict)
    aside: dict[int, Aside] = field(default_factory=dict)
    # By offset: the batch that is to acknowledge what is out.
    pins: dict[int, BatchKey] = field(default_factory=dict)
    # By offset: the term in which it was given out, or put aside, and when its leader took that entry.
    since: dict[int, tuple[int, float]] = field(default_factory=dict)
    # Offsets that ended once, however.
    ended: set[int] = field(default_factory=set)

    def end(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.out.pop(offset, None)
            self.pins.pop(offset, None)
            self.aside.pop(offset, None)
            self.ended.add(offset)

    def has_ended(self, offset: int) -> bool:
        """Whether a record ended once here, or was before the channel's beginning."""
        return offset in self.ended or offset < self.first

    def holds_key(self, offset: int) -> bool:
        """Whether later records of its key wait for one that is aside."""
        return self.aside[offset].why is not Why.DEAD or self.settings.on_dead == "park"

    def is_worked_off(self, end: int) -> bool:
        return (
            self.next >= end
            and not self.out
            and all(aside.why is Why.DEAD and not self.holds_key(at) for at, aside in self.aside.items())
        )


@dataclass(slots=True)
class Asked:
    """What consumers and people have asked for, whether or not they were answered."""

    acks: set[Token] = field(default_factory=set)
    releases: set[Token] = field(default_factory=set)
    # With the delays in ms that were named.
    nacks: dict[Token, set[int | None]] = field(default_factory=lambda: defaultdict(set))
    # By channel.
    seeks: set[str] = field(default_factory=set)
    replays: set[str] = field(default_factory=set)
    drops: set[str] = field(default_factory=set)
    # By partition: the highest offset before which records were to be deleted.
    trims: Counter[int] = field(default_factory=Counter)


class ChannelRules:
    """The channels of one topic in one world."""

    def __init__(self, world: World, watch: Watch, topic: str) -> None:
        self.world = world
        self.watch = watch
        self.topic = topic
        self.logs: dict[int, Log] = {}
        self.asked = Asked()
        self.happened: Counter[str] = Counter()
        self.pins = PinRules(watch.ledger, self.happened)
        # By delivery: how often it was given out (twice only by two channels of one name), and the attempt.
        self._given: Counter[Token] = Counter()
        self._attempts: dict[Token, set[int]] = defaultdict(set)
        self._answered: Counter[Token] = Counter()
        # Released by nobody's wish: who asked was gone.
        self._returned: set[Token] = set()
        # By delivery: when more time was asked for that was granted.
        self._extended: dict[Token, float] = {}
        # By channel and partition: those that are not open any more.
        self._past: dict[tuple[str, int], list[Known]] = defaultdict(list)
        # By partition's name, entry and term: when its leader took it.
        self._taken_s: dict[tuple[str, int, int], float] = {}
        watch.on_entry = self._taken
        watch.on_committed.append(self._committed)

    def log(self, number: int) -> Log:
        return self.logs.setdefault(number, Log(number))

    # -- the log -----------------------------------------------------------------------------

    def _taken(self, what: str, group: str, header: Header) -> None:
        if what == "taken" and header.kind == Kind.CHANNEL:
            self._taken_s[group, header.index, header.term] = self.world.loop.time()

    def _committed(self, group: Group, header: Header, frame: Buffer) -> None:
        topic, _, number = group.name.rpartition("/")
        if topic != self.topic:
            return
        log = self.log(int(number))
        if header.kind == Kind.DATA and header.count:
            self._append(log, Batch(frame))
        elif header.kind == Kind.PUBLISH and (due := publish_record(frame).due) is not None:
            self._append(log, Batch(as_due(due.frame, publish=header)))
        elif header.kind == Kind.LOG_START:
            self._begin_at(log, log_start_record(frame), header)
            log.forget_copies()
        elif header.kind == Kind.CHANNEL:
            taken_s = self._taken_s[group.name, header.index, header.term]
            for change in channel_changes(frame):
                if isinstance(change, Copied):
                    self._copied(log, change, header)
                elif isinstance(change, Deleted):
                    self._deleted(log, change)
                else:
                    self._change(log, change, header, taken_s)
            log.forget_copies()

    @staticmethod
    def _append(log: Log, batch: Batch) -> None:
        keys, tags, headers = batch.keys, batch.tags, batch.headers
        for at in range(batch.next_offset - batch.base_offset):
            key = keys[at] if keys else None
            log.records.append(
                Record(
                    None if key is None else bytes(key),
                    tags[at] if tags else None,
                    {name: bytes(value) for name, value in (headers[at] or {}).items()} if headers else {},
                )
            )

    def _copied(self, log: Log, change: Copied, header: Header) -> None:
        """A copy is the record; what has ended in all channels has none."""
        who = f"{self.topic}/{log.number}: entry {header.index} copies"
        batch = Batch(change.frame)
        keys, tags = batch.keys, batch.tags
        headers = batch.headers
        for row, (offset, time_ms) in enumerate(zip(_summed(change.offsets), change.times, strict=True)):
            record = log.records[offset]
            key = keys[row] if keys else None
            assert (None if key is None else bytes(key)) == record.key, f"{who} {offset}: {key!r}"
            assert (tags[row] if tags else None) == record.tag, f"{who} {offset}"
            fields = {name: bytes(value) for name, value in headers[row].items()} if headers else {}
            assert fields == record.headers, f"{who} {offset}: {fields}"
            self.happened["copied again" if offset in log.copies else "copied"] += 1
            log.copies[offset] = Copy(header.index, row, change.size, time_ms)

    def _deleted(self, log: Log, change: Deleted) -> None:
        assert change.before <= self.asked.trims[log.number], f"nobody deletes what is before {change.before}"
        for known in log.channels.values():
            gone = [
                each for each in (*known.out, *known.aside) if each < change.before and each in log.copies
            ]
            known.end(gone)
            known.lost += len(gone)
            self.happened["copies deleted"] += len(gone)

    def _begin_at(self, log: Log, record: LogStartRecord, header: Header) -> None:
        """The log begins elsewhere from now on."""
        start = record.offset
        by_hand = start <= self.asked.trims[log.number]
        log.start = max(log.start, start)
        for known in log.channels.values():
            who = f"{self.topic}/{log.number} begins at {start} by entry {header.index}: {known.name}"
            copied = {offset for offset, copy in log.copies.items() if copy.entry > record.index}
            before = {offset for offset in (*known.out, *known.aside) if offset < start}
            gone = before - copied
            self.happened["passed by the start"] += len(before & copied)
            unread = range(known.next, max(known.next, start))
            if not by_hand:
                assert not gone, f"{who} has {sorted(gone)} open"
                assert not unread or known.settings.hold_ms < DAY_MS, f"{who} has not read {unread}"
            if gone or unread:
                self.happened["channels that lost records"] += 1
                known.end(gone)
                known.ended.update(unread)
                known.lost += len(gone) + len(unread)
                known.next = max(known.next, start)

    def _change(self, log: Log, change: Change, header: Header, taken_s: float) -> None:
        if isinstance(change, PinsEnded):
            self.pins.ended(log, change, header, taken_s)
            return
        known = log.channels.get(change.channel)
        who = f"{self.topic}/{log.number}: entry {header.index}: {change}"
        if isinstance(change, Opened):
            self._opened(log, known, change, who)
            return
        assert known is not None, f"{who}: it is not open"
        who += f" ({known.name})"
        if isinstance(change, GivenOut):
            self._gave_out(log, known, change, header, taken_s, who)
        elif isinstance(change, Acknowledged):
            self._acknowledged(log, known, change, who)
        elif isinstance(change, Failed):
            self._failed(log, known, change, header, taken_s, who)
        elif isinstance(change, Sought):
            self._sought(log, known, change, header, taken_s, who)
        elif isinstance(change, Retried):
            self._retried(known, change, header, taken_s, who)
        elif isinstance(change, Pinned):
            self.pins.pinned(log, known, change, _runs(change.runs), header)
        else:
            assert isinstance(change, Closed)
            topic = self.watch.routes.newest.topics[self.topic]
            wanted = [each.id for each in (topic.channels or {}).values()]
            assert known.id not in wanted, f"{who}, and the catalog has it"
            self.pins.taken(log, known, known.out)
            self._past[known.name, log.number].append(log.channels.pop(known.id))
            self.happened["channels closed"] += 1

    def _opened(self, log: Log, known: Known | None, change: Opened, who: str) -> None:
        if known is not None:
            if change.version > known.version:
                known.version, known.settings = change.version, change.settings
                self.happened["channels set"] += 1
            return
        assert change.next <= len(log.records), f"{who}: the partition ends at {len(log.records)}"
        if change.settings.start == "earliest":
            assert change.next <= log.start, f"{who}: the partition begins at {log.start}"
        log.channels[change.channel] = Known(
            change.channel, change.name, change.version, change.settings, change.next, change.next
        )
        self.happened["channels opened"] += 1

    def _gave_out(
        self, log: Log, known: Known, change: GivenOut, header: Header, taken_s: float, who: str
    ) -> None:
        settings, first = known.settings, known.next
        again, fresh = list(_summed(change.again)), list(_runs(change.fresh))
        busy = dict(zip(_summed(change.busy[::2]), change.busy[1::2], strict=True))
        is_ordered = settings.order == "key"
        if again or fresh:
            assert not settings.paused, f"{who}: it is paused"
            count = len(known.out) + len(again) + len(fresh)
            assert count <= settings.max_in_flight, f"{who}: {count} are out, of {settings.max_in_flight}"
        for offset in again:
            aside = known.aside.get(offset)
            assert aside is not None and aside.why is not Why.DEAD, f"{who}: {offset} is {aside}"
            attempt = aside.attempts + 1
            assert not settings.max_attempts or attempt <= settings.max_attempts, f"{who}: attempt {attempt}"
            self.happened["given out again"] += 1
        assert first <= change.next <= len(log.records), f"{who}: {first} was next, of {len(log.records)}"
        wanted = [
            offset
            for offset in range(first, change.next)
            if settings.filter is None
            or settings.filter.takes(log.records[offset].tag, log.records[offset].headers)
        ]
        assert sorted((*fresh, *busy)) == wanted, f"{who}: from {first} on it has {wanted}"
        for offset in (*again, *fresh):
            assert offset >= log.start or offset in log.copies, f"{who}: the log begins at {log.start}"
            self.happened["given out of a copy"] += offset < log.start
        keys = {offset: key_hash(log.records[offset].key) if is_ordered else NO_KEY for offset in wanted}
        assert change.keys == ([keys[offset] for offset in fresh] if is_ordered else []), who
        assert busy == {offset: keys[offset] for offset in busy}, who
        if is_ordered:
            self._check_order(known, again, {offset: keys[offset] for offset in fresh}, busy, who)
        for offset in again:
            aside = known.aside.pop(offset)
            known.out[offset] = Out(header.index, aside.attempts + 1, change.timeout_ms, aside.key)
        for offset in fresh:
            known.out[offset] = Out(header.index, 1, change.timeout_ms, keys[offset])
        for offset, key in busy.items():
            known.aside[offset] = Aside(0, 0, 0, key, Why.BUSY)
            self.happened["waited for their key"] += 1
        known.ended.update(set(range(first, change.next)).difference(wanted))
        known.next = change.next
        for offset in (*again, *fresh):
            token = (known.name, log.number, offset, header.index)
            self._given[token] += 1
            self._attempts[token].add(known.out[offset].attempt)
            known.since[offset] = (header.term, taken_s)
        self.happened["given out"] += len(again) + len(fresh)

    @staticmethod
    def _check_order(
        known: Known, again: Sequence[int], fresh: dict[int, int], busy: dict[int, int], who: str
    ) -> None:
        """Of a key one record is out, and none before it waits."""
        given = {offset: known.aside[offset].key for offset in again} | fresh
        keys = [key for key in given.values() if key != NO_KEY]
        doubled = {key for key in keys if keys.count(key) > 1}
        assert not doubled, f"{who}: two of a key are given out"
        taken = {out.key: offset for offset, out in known.out.items()}
        waiting: dict[int, list[int]] = defaultdict(list)
        for offset, aside in known.aside.items():
            if known.holds_key(offset):
                waiting[aside.key].append(offset)
        for offset, key in given.items():
            if key == NO_KEY:
                continue
            assert key not in taken, f"{who}: {offset}, and {taken[key]} of its key is out"
            before = min((each for each in waiting[key] if each < offset), default=None)
            assert before is None, f"{who}: {offset}, and {before} of its key waits"
        for offset, key in busy.items():
            held = key in taken or waiting[key] or any(k == key and o < offset for o, k in given.items())
            assert held or any(k == key and o < offset for o, k in busy.items()), f"{who}: {offset} is free"

    def _acknowledged(self, log: Log, known: Known, change: Acknowledged, who: str) -> None:
        offsets = list(_runs(change.runs))
        for offset in offsets:
            out, aside = known.out.get(offset), known.aside.get(offset)
            assert offset not in known.pins, f"{who}: {offset} is pinned for {known.pins[offset]}"
            if out is not None:
                token = (known.name, log.number, offset, out.delivery)
                assert token in self.asked.acks, f"{who}: {offset} is {out}, which nobody acknowledged"
            else:
                assert aside is not None and aside.why is Why.DEAD, f"{who}: {offset} is {aside}"
                assert known.name in self.asked.drops, f"{who}: nobody drops dead records"
                self.happened["dead records dropped"] += 1
        known.end(offsets)
        self.happened["acknowledged"] += len(offsets)

    def _failed(
        self, log: Log, known: Known, change: Failed, header: Header, taken_s: float, who: str
    ) -> None:
        settings, items = known.settings, change.items
        for offset, delay_ms, counts in zip(_summed(items[::3]), items[1::3], items[2::3], strict=True):
            out = known.out.pop(offset, None)
            assert out is not None, f"{who}: {offset} is not out"
            assert offset not in known.pins, f"{who}: {offset} is pinned for {known.pins[offset]}"
            token = (known.name, log.number, offset, out.delivery)
            if change.reason == TIME_OUT:
                assert counts, f"{who}: a time-out does not count"
                self._check_time(token, out, known.since[offset][1], taken_s, who)
                delays: set[int | None] = {None}
                self.happened["time-outs"] += 1
            elif not counts:
                delays = {0}
                if token not in self.asked.releases:
                    assert not self._answered[token], f"{who}: {offset} is with a consumer"
                    self._returned.add(token)
                    self.happened["returned, as who asked was gone"] += 1
            else:
                delays = self.asked.nacks[token] | ({None} if change.reason == "damaged" else set())
                assert delays, f"{who}: nobody refused {offset}, {out}"
            dies = bool(counts and settings.max_attempts and out.attempt >= settings.max_attempts)
            assert (delay_ms == -1) == dies, f"{who}: {offset} is {out}"
            if not dies:
                named = {settings.retry_delay_ms(out.attempt) if delay is None else delay for delay in delays}
                assert delay_ms in named, f"{who}: {offset} comes again in {delay_ms} ms, not {named}"
            attempts, time_ms = out.attempt - (not counts), header.append_time_ms
            known.aside[offset] = (
                Aside(attempts, time_ms, 0, out.key, Why.DEAD, change.reason)
                if dies
                else Aside(attempts, time_ms + delay_ms, delay_ms, out.key, Why.RETRY, change.reason)
            )
            known.since[offset] = (header.term, taken_s)
            self.happened["died"] += dies
            self.happened["failed"] += 1

    def _check_time(self, token: Token, out: Out, since_s: float, taken_s: float, who: str) -> None:
        """Check that a consumer had all its time, of a clock that nobody steps."""
        had_s, time_s = taken_s - since_s, out.timeout_ms / 1000
        assert had_s > time_s - 0.001, f"{who}: {token} had {had_s} s of {time_s} s"
        if token in self._extended:
            had_s = taken_s - self._extended[token]
            assert had_s > time_s - 0.001, f"{who}: {token} was extended, and had {had_s} s of {time_s} s"

    def _sought(
        self, log: Log, known: Known, change: Sought, header: Header, taken_s: float, who: str
    ) -> None:
        assert known.name in self.asked.seeks, f"{who}: nobody moved it"
        out, known.out = known.out, {}
        self.pins.taken(log, known, out)
        for offset in list(known.aside):
            dropped = change.drop and known.aside[offset].why is not Why.DEAD
            if offset >= change.next or dropped:
                del known.aside[offset]
                known.ended.add(offset)
        for offset, each in out.items():
            if offset < change.next and not change.drop:
                known.aside[offset] = Aside(each.attempt - 1, header.append_time_ms, 0, each.key, Why.RETRY)
                known.since[offset] = (header.term, taken_s)
            else:
                known.ended.add(offset)
        known.ended.update(range(known.next, change.next))
        self.happened["moved back" if change.next < known.next else "moved on"] += 1
        known.next = change.next

    def _retried(self, known: Known, change: Retried, header: Header, taken_s: float, who: str) -> None:
        assert known.name in self.asked.replays, f"{who}: nobody replays dead records"
        items = change.items
        for offset, delay_ms in zip(_summed(items[::2]), items[1::2], strict=True):
            aside = known.aside.get(offset)
            assert aside is not None and aside.why is Why.DEAD, f"{who}: {offset} is {aside}"
            due_ms = header.append_time_ms + delay_ms
            known.aside[offset] = Aside(0, due_ms, delay_ms, aside.key, Why.RETRY, aside.reason)
            known.since[offset] = (header.term, taken_s)
            self.happened["dead records given out again"] += 1

    # -- answers -----------------------------------------------------------------------------

    def given(self, token: Token, attempt: int, value: bytes, values: Sequence[bytes]) -> None:
        """Check a record that a consumer was given; `values` are those of the partition."""
        offset = token[2]
        assert attempt in self._attempts[token], f"{token}, attempt {attempt}: {self._attempts[token]}"
        self._answered[token] += 1
        assert self._answered[token] <= self._given[token], f"{token} is given twice"
        assert token not in self._returned, f"{token} is given, and was released"
        assert values[offset] == value, f"{token}: {value!r}, not {values[offset]!r}"

    def settled(self, verb: str, token: Token, *, late: bool, asked_s: float) -> None:
        """Check what a consumer was told about a record of which it said something."""
        name, number, offset, delivery = token
        present = [each for each in self.log(number).channels.values() if each.name == name]
        out = [each for each in present if each.out.get(offset, Out(0, 0, 0, 0)).delivery == delivery]
        if late:
            assert not out or len(present) > 1 or self.pins.was_pinned(token), (
                f"{verb} {token} is late, and it is out"
            )
            self.happened["late"] += 1
        elif verb == "extend":
            self._extended[token] = max(asked_s, self._extended.get(token, 0.0))
        else:
            assert not out, f"{verb} {token} is said to be done, and it is out"
            ever = (*present, *self._past[name, number])
            if verb == "ack":
                assert any(each.has_ended(offset) for each in ever), f"{token} is said to be done, and is not"
            self.happened["done"] += 1

    def committed_with(self, token: Token, asked_s: float) -> None:
        """Check a record whose batch is said to be committed: it is done, unless a person took it away."""
        if not self.pins.was_taken(token):
            self.settled("ack", token, late=False, asked_s=asked_s)

    # -- tables ------------------------------------------------------------------------------

    def check_tables(self) -> None:
        """Compare the tables of the replicas that have heard of all that is committed."""
        for number, log in self.logs.items():
            for machine, partition in self.watch.partitions(self.topic, number):
                index = partition.committed_index
                if index != len(self.watch.groups[partition.replica.group].entries):
                    continue
                if partition.state.left_out:
                    continue  # an entry has rotted, and is not fetched again yet
                who = f"{self.topic}/{number}@{machine.node}, entry {index}"
                held = {each.channel: each for each in partition.state.channels.stored_at(index)}
                assert held.keys() == log.channels.keys(), f"{who}: {held.keys()}, not {log.channels.keys()}"
                for known in log.channels.values():
                    each = held[known.id]
                    head = (each.name, each.version, each.settings, each.next, each.lost)
                    wanted = (known.name, known.version, known.settings, known.next, known.lost)
                    assert head == wanted, f"{who}: {head}, not {wanted}"
                    out = {each.out[at]: Out(*each.out[at + 1 : at + 5]) for at in range(0, len(each.out), 5)}
                    assert out == known.out, f"{who}: {known.name}: out are {out}, not {known.out}"
                    asides = {
                        each.aside[at]: Aside(*each.aside[at + 1 : at + 7])
                        for at in range(0, len(each.aside), 7)
                    }
                    assert asides == known.aside, f"{who}: {known.name}: {asides}, not {known.aside}"
                    copies = {
                        each.copies[at]: Copy(*each.copies[at + 1 : at + 5])
                        for at in range(0, len(each.copies), 5)
                    }
                    open_here = known.out.keys() | known.aside.keys()
                    wanted_copies = {at: copy for at, copy in log.copies.items() if at in open_here}
                    assert copies == wanted_copies, f"{who}: {known.name}: {copies}, not {wanted_copies}"
                pins = {
                    each.batch: (each.entry, {channel: set(_runs(runs)) for channel, runs in each.parts})
                    for each in partition.state.channels.stored_pins_at(index)
                }
                wanted_pins = self.pins.stored(log)
                assert pins == wanted_pins, f"{who}: pins are {pins}, not {wanted_pins}"
                self.happened["tables compared"] += 1

    def open_channels(self) -> list[str]:
        """Return what keeps the end of a world waiting: channels that are not worked off, or not closed."""
        topic = self.watch.routes.newest.topics[self.topic]
        wanted = {each.id: name for name, each in (topic.channels or {}).items()}
        found = []
        for number, log in sorted(self.logs.items()):
            if log.channels.keys() != wanted.keys():
                found.append(f"{number} has {sorted(log.channels)}, wanted are {wanted}")
            for known in log.channels.values():
                if not known.is_worked_off(len(log.records)):
                    found.append(
                        f"{number} {known.name}: next {known.next} of {len(log.records)}, "
                        f"out {known.out}, aside {known.aside}, {known.settings}"
                    )
        return found


def _summed(distances: Iterable[int]) -> Iterator[int]:
    at = 0
    for distance in distances:
        at += distance
        yield at


def _runs(spaced: Sequence[int]) -> Iterator[int]:
    end = 0
    for distance, count in zip(spaced[::2], spaced[1::2], strict=True):
        yield from range(end + distance, end + distance + count)
        end += distance + count
