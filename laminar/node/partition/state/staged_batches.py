"""The table of staged batches: entries in the log without offsets, of transactions and large records.

A *stage* is a batch of records in an entry of its own, replicated and checksummed like any other, but
invisible to readers. Stages belong to a batch of a *sink*, under an epoch of the sink. A *prepare* entry
promises that they are kept until the sink's coordinator decides about them. A *publish* entry names them and
gives them their offsets, all at once: from then on readers see the records at the place of the publish, and
the stages are kept as long as the publish is. A decision names its prepare by the prepare's index. So stages
that late or repeated requests stage and prepare again, under the same epoch, are not taken for the decided
ones.

The last published batch of each sink is remembered, so that a repeated publish is answered like the first
one. For a single-use sink it is forgotten when the coordinator confirms that the sink has no open decision.

An *upload* works in the same way for a large record: its stages are parts of the value, without records, and
its publish takes one offset. An upload belongs to one partition, whose leader decides alone, without a
prepare. Published uploads are remembered for a while, so that a repeated publish is recognised.

Like the table of producers this one is a function of the log: changed when an entry is appended, rolled back
when the entry is truncated. It knows one partition only; the coordinator knows which batches are decided and
for which partitions (docs/consensus.md#transactions). What the entries contain is in `staging_entries`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec

from laminar.batch import HEADER_SIZE, Buffer, Header, Kind
from laminar.node.partition.state.sinks import FIRST_ONCE_EPOCH
from laminar.node.partition.state.staging_entries import (
    LargeRecord,
    PrepareOperation,
    PrepareRecord,
    PublishRecord,
    prepare_record,
    publish_record,
)

# Most ranges of entries (from the first stage to its publish) in which the log must not begin. When there are
# more, neighbours are joined in pairs: the log can begin at fewer places then, but still at hundreds.
MAX_NAMED = 1024
# Published uploads that are remembered, by count and by age in the log.
MAX_UPLOADS = 1_000
UPLOAD_AGE_MS = 24 * 3_600_000
# Most publishes of single-use sinks that a partition remembers. At this number no batch of such a sink is
# prepared until some are forgotten. The bound is needed because each `log_start` entry contains all of them.
MAX_PUBLISHED_ONCE = 100_000


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One staged entry: its index in the log, its number within its batch, and values from its header.

    `records` is the number of its records; 0 means that it is a part of an upload. `size_bytes` is the size
    of the whole frame.
    """

    index: int
    number: int
    records: int
    size_bytes: int
    tag_mask: int
    append_time_ms: int
    body_crc: int

    @property
    def body_bytes(self) -> int:
        """Size of the entry's body in bytes."""
        return self.size_bytes - HEADER_SIZE


# The sink's id (16 bytes), the number of its batch, and the epoch under which it was staged.
BatchKey: TypeAlias = tuple[bytes, int, int]


def upload_key(upload: bytes) -> BatchKey:
    """Return the batch key of the upload with this id (16 bytes): epoch 0 tells it from batches of sinks."""
    return (upload, 0, 0)


class StagedBatch(msgspec.Struct, frozen=True, array_like=True):
    """An open batch in the form stored in snapshots and `log_start` entries.

    It has the batch's stages in order, and the data of its `prepare` entry if it is prepared.

    `prepared_ms` and `prepare_index` are the append time and the index of the `prepare` entry.
    """

    stages: tuple[Stage, ...]
    prepared: bool = False
    # Both are 0 if the batch is not prepared, and in tables of older versions, which did not store them.
    prepared_ms: int = 0
    prepare_index: int = 0


class OpenBatch:
    """The stages of one unpublished batch or upload in this partition, in order of their entries.

    A prepared batch is never dropped for its age. `prepared_ms` is the append time of its prepare,
    `prepare_index` the prepare's index.

    An object never changes: `with_stage` returns a new one. Both share one list of stages, and each object
    uses the first `count` elements; so adding a stage takes the same time however many there are. Further
    elements of the list belong to a later object, or were truncated from the log.
    """

    __slots__ = ("_all", "_places", "count", "prepare_index", "prepared", "prepared_ms", "size_bytes")

    def __init__(
        self,
        stages: Iterable[Stage] = (),
        *,
        prepared: bool = False,
        prepared_ms: int = 0,
        prepare_index: int = 0,
    ) -> None:
        self._all = list(stages)
        # The position of each number in the list.
        self._places = {stage.number: place for place, stage in enumerate(self._all)}
        self.count = len(self._all)
        self.prepared = prepared
        self.prepared_ms = prepared_ms
        self.prepare_index = prepare_index
        self.size_bytes = sum(stage.size_bytes for stage in self._all)

    @property
    def stages(self) -> list[Stage]:
        """All stages, as a new list."""
        return self._all[: self.count]

    @property
    def first(self) -> Stage:
        """The first stage."""
        return self._all[0]

    @property
    def last(self) -> Stage:
        """The last stage."""
        return self._all[self.count - 1]

    def get(self, number: int) -> Stage | None:
        """Return the stage with this number, if there is one."""
        place = self._places.get(number)
        return None if place is None or place >= self.count else self._all[place]

    def with_stage(self, stage: Stage) -> OpenBatch:
        """Return a new batch with one more stage. Call it only on the batch as of the log's end.

        Elements of the shared list that remained from truncated entries are removed.
        """
        while len(self._all) > self.count:
            self._places.pop(self._all.pop().number, None)
        self._all.append(stage)
        self._places[stage.number] = self.count
        made = OpenBatch.__new__(OpenBatch)
        made._all, made._places = self._all, self._places
        made.count = self.count + 1
        made.prepared, made.prepared_ms, made.prepare_index = (
            self.prepared,
            self.prepared_ms,
            self.prepare_index,
        )
        made.size_bytes = self.size_bytes + stage.size_bytes
        return made

    def stored(self) -> StagedBatch:
        """Return the batch in the form in which snapshots and `log_start` entries have it."""
        return StagedBatch(tuple(self.stages), self.prepared, self.prepared_ms, self.prepare_index)


class Published(msgspec.Struct, frozen=True, array_like=True):
    """The last batch of a sink that was published in this partition.

    `index` is the index of the `publish` entry, `offset` its first offset, `count` the number of its records,
    `time_ms` its append time.
    """

    number: int
    epoch: int
    index: int
    offset: int
    count: int
    # 0 in tables of older versions, which did not store it.
    time_ms: int = 0


class PublishedUpload(msgspec.Struct, frozen=True, array_like=True):
    """An upload that was published.

    `index` and `time_ms` are the index and append time of its publish, `offset` is its record's offset.
    `parts` is the number of parts; `size_bytes` and `crc32c` are those of the record's value.
    """

    index: int
    time_ms: int
    offset: int
    parts: int
    size_bytes: int
    crc32c: int


class StoredStages(msgspec.Struct, frozen=True, array_like=True):
    """The whole table, as snapshots and `log_start` entries have it.

    `open` are the unpublished batches. `named` holds pairs (index of a publish, lowest index of its stages or
    of those of a range joined with it); the log must not begin between the two.
    """

    open: list[tuple[BatchKey, StagedBatch]] = []
    published: list[tuple[bytes, Published]] = []
    named: list[tuple[int, int]] = []
    uploads: list[tuple[bytes, PublishedUpload]] = []


class _Tables(NamedTuple):
    """The parts of the table of staged batches, as of the log's end."""

    open: dict[BatchKey, OpenBatch]
    published: dict[bytes, Published]
    """By sink, its last publish; without single-use sinks."""
    named: dict[int, int]
    """By index of a publish, the lowest index of the stages that it names; in order of the publishes."""
    uploads: dict[bytes, PublishedUpload]
    published_once: dict[bytes, Published]
    """By single-use sink, its last publish; in order of the publishes."""


class _Table(IntEnum):
    """The positions of the parts in `_Tables`."""

    OPEN = 0
    PUBLISHED = 1
    NAMED = 2
    UPLOADS = 3
    PUBLISHED_ONCE = 4


class StagedBatches:
    """The table of staged batches, uploads and publishes of one partition."""

    __slots__ = ("_tables", "_undo")

    def __init__(self) -> None:
        self._tables = _Tables({}, {}, {}, {}, {})
        # (index of the entry, table, key, value before) of changes that may be rolled back.
        self._undo: deque[tuple[int, _Table, Any, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of open batches."""
        return len(self._tables.open)

    @property
    def size_bytes(self) -> int:
        """Size of the frames of all open batches in bytes."""
        return sum(batch.size_bytes for batch in self._tables.open.values())

    @property
    def prepared(self) -> bool:
        """Whether any batch is prepared."""
        return any(batch.prepared for batch in self._tables.open.values())

    def batch(self, key: BatchKey) -> OpenBatch | None:
        """Return the open batch with this key, as of the log's end."""
        return self._tables.open.get(key)

    def stage(self, key: BatchKey, number: int) -> Stage | None:
        """Return stage `number` of the open batch with this key, or None; as of the log's end."""
        batch = self._tables.open.get(key)
        return None if batch is None else batch.get(number)

    def published(self, sink: bytes) -> Published | None:
        """Return the last batch of a sink that was published here, as of the log's end."""
        return self._tables.published.get(sink) or self._tables.published_once.get(sink)

    @property
    def published_once(self) -> int:
        """Number of remembered publishes of single-use sinks."""
        return len(self._tables.published_once)

    def old_published(self, *, before_ms: int, keep: int) -> list[tuple[bytes, int]]:
        """Return (sink, index of its publish) for publishes of single-use sinks that may be forgotten.

        These are the publishes appended before `before_ms`, and the oldest ones beyond the number `keep`.
        They are in order, oldest first; at most `MAX_PUBLISHED_ONCE`.
        """
        found: list[tuple[bytes, int]] = []
        more = len(self._tables.published_once) - keep
        for sink, published in islice(self._tables.published_once.items(), MAX_PUBLISHED_ONCE):
            if len(found) >= more and published.time_ms >= before_ms:
                break
            found.append((sink, published.index))
        return found

    def upload(self, upload: bytes) -> PublishedUpload | None:
        """Return the published upload with this id, as of the log's end; None if unpublished or forgotten."""
        return self._tables.uploads.get(upload)

    def open_uploads(self) -> int:
        """Return the number of uploads that have parts here and are not published."""
        return sum(1 for batch in self._tables.open.values() if not batch.first.records)

    def open_upload_bytes(self) -> int:
        """Return the size of the frames of all unpublished uploads in bytes."""
        return sum(batch.size_bytes for batch in self._tables.open.values() if not batch.first.records)

    def idle_upload(self, *, before_ms: int) -> BatchKey | None:
        """Return the key of the smallest unpublished upload whose last part was appended before `before_ms`.

        Return None if there is none.
        """
        idle = [(size, last_ms, key) for last_ms, size, key in self.idle_uploads(before_ms=before_ms)]
        return min(idle)[2] if idle else None

    def idle_uploads(self, *, before_ms: int) -> list[tuple[int, int, BatchKey]]:
        """Return the unpublished uploads whose last part was appended before `before_ms`, longest idle first.

        Each is (append time of its last part, size in bytes, key).
        """
        return sorted(
            (batch.last.append_time_ms, batch.size_bytes, key)
            for key, batch in self._tables.open.items()
            if not batch.first.records and batch.last.append_time_ms < before_ms
        )

    def batches(self) -> Iterator[tuple[BatchKey, OpenBatch]]:
        """Return all open batches, in order of their first entries."""
        return iter(self._tables.open.items())

    def abandoned(self, *, idle_before_ms: int, begun_before_ms: int) -> list[BatchKey]:
        """Return the keys of open batches and uploads that are considered abandoned.

        A batch of a sink is abandoned if its first stage was appended before `begun_before_ms`, an upload if
        its last part was appended before `idle_before_ms`. A prepared batch is never abandoned.
        """
        return [
            key
            for key, batch in self._tables.open.items()
            if not batch.prepared
            and (
                batch.first.append_time_ms < begun_before_ms
                if batch.first.records
                else batch.last.append_time_ms < idle_before_ms
            )
        ]

    def of_sink(self, sink: bytes, *, epoch: int) -> list[BatchKey]:
        """Return the keys of the open batches of a sink under epochs up to `epoch`."""
        return [key for key in self._tables.open if key[0] == sink and key[2] <= epoch]

    def possible_start(self, index: int) -> int:
        """Return the highest index, at most `index`, of an entry after which the log may begin.

        All stages of open batches are kept, and so are the stages of each publish after that entry.
        """
        lowest = [batch.first.index for batch in self._tables.open.values()]
        limit = min([index, *(first - 1 for first in lowest)])
        # Later publishes first: the entries of one may lie before an earlier publish, which then stays, too.
        for publish, first in sorted(self._tables.named.items(), reverse=True):
            if publish > limit >= first:
                limit = first - 1
        return limit

    # -- the log's changes -----------------------------------------------------------------

    def _put(self, index: int, place: _Table, key: Any, value: Any) -> None:
        table: dict[Any, Any] = self._tables[place]
        self._undo.append((index, place, key, table.get(key)))
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply a `staged`, `prepare` or `publish` entry that is now the log's last."""
        if header.kind is Kind.STAGED:
            key = (header.producer_id, header.sequence, header.producer_epoch)
            stage = Stage(
                index=header.index,
                number=header.checkpoint,
                records=header.floor,
                size_bytes=header.frame_size,
                tag_mask=header.tag_mask,
                append_time_ms=header.append_time_ms,
                body_crc=header.body_crc,
            )
            before = self._tables.open.get(key) or OpenBatch()
            self._put(header.index, _Table.OPEN, key, before.with_stage(stage))
        elif header.kind is Kind.PREPARE:
            prepare = prepare_record(frame)
            self._prepared(header, prepare)
        elif header.kind is Kind.PUBLISH:
            record = publish_record(frame)
            if record.due is None:
                self._published(header, record)

    def _prepared(self, header: Header, prepare: PrepareRecord) -> None:
        key = (prepare.sink, prepare.number, prepare.epoch)
        batch = self._tables.open.get(key)
        if prepare.operation is PrepareOperation.FORGET:
            for old in self.of_sink(prepare.sink, epoch=prepare.epoch):
                self._put(header.index, _Table.OPEN, old, None)
            published = self.published(prepare.sink)
            if published is not None and published.epoch <= prepare.epoch:
                self._forget(header.index, prepare.sink)
        elif prepare.operation is PrepareOperation.FORGET_PUBLISHED:
            for sink, index in prepare.published:
                published = self.published(sink)
                # If the sink has published a later batch since, that one is kept.
                if published is not None and published.index == index:
                    self._forget(header.index, sink)
        elif prepare.operation is PrepareOperation.DROP:
            self._put(header.index, _Table.OPEN, key, None)
        elif batch is not None:
            wanted = set(prepare.stages)
            kept = [stage for stage in batch.stages if stage.number in wanted]
            # The leader had all of the stages when it proposed the prepare. If damage has taken one from this
            # log, the batch is dropped, so that it is never published in part.
            whole = len(kept) == len(wanted)
            after = None
            if whole and kept:
                after = OpenBatch(
                    kept, prepared=True, prepared_ms=header.append_time_ms, prepare_index=header.index
                )
            self._put(header.index, _Table.OPEN, key, after)

    def _forget(self, index: int, sink: bytes) -> None:
        for place in (_Table.PUBLISHED, _Table.PUBLISHED_ONCE):
            if sink in self._tables[place]:
                self._put(index, place, sink, None)

    def _published(self, header: Header, record: PublishRecord) -> None:
        # Drop what is staged for this batch and earlier ones under any epoch: it can't be published any more.
        for key in [key for key in self._tables.open if key[0] == record.sink and key[1] <= record.number]:
            self._put(header.index, _Table.OPEN, key, None)
        if record.large is not None:
            self._published_upload(header, record, record.large)
        else:
            published = Published(
                record.number,
                record.epoch,
                header.index,
                header.base_offset,
                header.count,
                header.append_time_ms,
            )
            self._forget(header.index, record.sink)
            table = _Table.PUBLISHED_ONCE if _is_once(published) else _Table.PUBLISHED
            self._put(header.index, table, record.sink, published)
        if record.stages:
            self._name(header.index, min(index for index, _ in record.stages))

    def _name(self, publish: int, first: int) -> None:
        """Record that the log must not begin between a publish and the first of its stages."""
        named = self._tables.named
        for earlier in list(reversed(named)):
            if earlier < first:
                break
            # The two ranges overlap, so the log may not begin between them.
            first = min(first, named[earlier])
            self._put(publish, _Table.NAMED, earlier, None)
        self._put(publish, _Table.NAMED, publish, first)
        if len(named) > MAX_NAMED:
            whole = list(named.items())
            for earlier, _ in reversed(whole):
                self._put(publish, _Table.NAMED, earlier, None)
            for at in range(0, len(whole), 2):
                pair = whole[at : at + 2]
                self._put(publish, _Table.NAMED, pair[-1][0], pair[0][1])

    def _published_upload(self, header: Header, record: PublishRecord, large: LargeRecord) -> None:
        uploads = self._tables.uploads
        now_ms = header.append_time_ms
        # Which uploads are forgotten depends only on the table and the entry: every replica does the same.
        for upload, old in sorted(uploads.items(), key=_by_index):
            if len(uploads) < MAX_UPLOADS and old.time_ms + UPLOAD_AGE_MS >= now_ms:
                break
            self._put(header.index, _Table.UPLOADS, upload, None)
        published = PublishedUpload(
            header.index, now_ms, header.base_offset, len(record.stages), large.size_bytes, large.crc32c
        )
        self._put(header.index, _Table.UPLOADS, record.sink, published)

    def started(self, index: int, start_index: int) -> None:
        """Apply `log_start` entry `index`, by which all entries up to `start_index` are trimmed."""
        for publish in [publish for publish in self._tables.named if publish <= start_index]:
            self._put(index, _Table.NAMED, publish, None)

    def truncated(self, index: int) -> None:
        """Undo the changes of entry `index` and of all after it, which were truncated from the log."""
        changed = set()
        while self._undo and self._undo[-1][0] >= index:
            _, place, key, before = self._undo.pop()
            changed.add(place)
            table: dict[Any, Any] = self._tables[place]
            if before is None:
                table.pop(key, None)
            else:
                table[key] = before
        # Items that were restored are at the end of their dicts now: sort them back into the log's order.
        if _Table.NAMED in changed:
            ordered = sorted(self._tables.named.items())
            self._tables.named.clear()
            self._tables.named.update(ordered)
        if _Table.PUBLISHED_ONCE in changed:
            in_order = sorted(self._tables.published_once.items(), key=_by_index)
            self._tables.published_once.clear()
            self._tables.published_once.update(in_order)

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        undo = self._undo
        while undo and undo[0][0] <= index:
            undo.popleft()

    # -- stored --------------------------------------------------------------------------

    def stored(self) -> StoredStages:
        """Return the whole table as of the log's end, as a value for snapshots.

        It is sorted, so that equal logs give equal results.
        """
        open_, published, named, uploads, once = self._tables
        return StoredStages(
            [(key, batch.stored()) for key, batch in sorted(open_.items(), key=itemgetter(0))],
            sorted([*published.items(), *once.items()]),
            sorted(named.items()),
            sorted(uploads.items()),
        )

    def stored_at(self, index: int) -> StoredStages:
        """Return the table as of entry `index`, which is the last committed one or a later one."""
        copy = StagedBatches()
        # Values are replaced, never changed: so the copies may be shallow.
        open_, published, named, uploads, once = self._tables
        copy._tables = _Tables(dict(open_), dict(published), dict(named), dict(uploads), dict(once))
        copy._undo = deque(self._undo)
        copy.truncated(index + 1)
        return copy.stored()

    def restore(self, stored: StoredStages) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._undo.clear()
        open_ = {key: _opened(batch) for key, batch in stored.open}
        lasting: dict[bytes, Published] = {}
        once: dict[bytes, Published] = {}
        for sink, published in sorted(stored.published, key=_by_index):
            (once if _is_once(published) else lasting)[sink] = published
        self._tables = _Tables(open_, lasting, dict(stored.named), dict(stored.uploads), once)


def _opened(batch: StagedBatch) -> OpenBatch:
    return OpenBatch(
        batch.stages,
        prepared=batch.prepared,
        prepared_ms=batch.prepared_ms,
        prepare_index=batch.prepare_index,
    )


def _is_once(published: Published) -> bool:
    """Return whether this is a publish of a single-use sink."""
    return published.epoch >= FIRST_ONCE_EPOCH


def _by_index(item: tuple[bytes, Published | PublishedUpload]) -> int:
    return item[1].index
