"""The export of a topic: the batches of each partition as they are stored, then a manifest.

An export continues where the backup ends, whether an earlier export was killed or completed last week: so
backups are incremental. First it compares the backup's last batch with the topic. So it finds out that the
log has lost that batch, or that the topic was created again, before anything is written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from laminar.batch import Batch, Buffer, Header, split_headers
from laminar.batch.header import verify_body
from laminar.batch.large_record import checksum_of, size_of
from laminar.checksum import crc32c
from laminar.client.backup.contents import plain_bytes
from laminar.client.backup.files import READ_BYTES, frames_of, manifest_of
from laminar.client.backup.forms import Sink, check_form, encode, open_sink
from laminar.client.backup.manifest import (
    ENDINGS,
    FORMAT,
    BatchFile,
    Form,
    LastBatch,
    Manifest,
    PartitionBackup,
    ValueFile,
    value_name,
    wrong,
)
from laminar.client.backup.manifest import encode as encode_manifest
from laminar.client.backup.parallel import for_each, in_thread
from laminar.client.backup.place import Place
from laminar.client.consume.large_values import Value
from laminar.client.errors import ConfigError, Error, OffsetExpired, Unavailable
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.lineage import Lineage

FILE_BYTES = 256 << 20
FETCH_BYTES = 4 << 20
MOST_PENDING = 64 << 20
"""Bytes of a partition that are gathered in memory at most, but for one batch more."""
PAGE = 1000
YEAR_MS = 365 * 24 * 3_600_000
OPENED_RETRY_S = 0.2


@dataclass(slots=True)
class Exported:
    """The progress of an export: new records, and the bytes and files written for them."""

    records: int = 0
    bytes: int = 0
    files: int = 0


@dataclass(slots=True)
class _Held:
    """The part of one partition that the backup has already; `id` is the partition's id, "" if none yet."""

    partition: int
    id: str = ""
    start: int | None = None
    end: int = 0
    last: LastBatch | None = None
    files: list[BatchFile] = field(default_factory=list)
    values: list[ValueFile] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class _Bounds:
    partition: int
    id: str
    start: int
    end: int


async def export_topic(
    session: Session,
    topic: str,
    place: Place,
    *,
    form: Form = "batch",
    file_bytes: int | None = None,
    progress: Callable[[Exported], None] = lambda done: None,
) -> tuple[Manifest, Exported]:
    """Add the topic's new records to the backup at `place`; return its manifest and the progress.

    Raises:
        Error: (`gap`) retention has removed records that the backup lacks; (`diverged`) the topic is no
            longer the one that the backup was taken from; (`damaged`) records cannot be read, or files have
            other content than was written. The manifest is then unchanged. Else as `Session.call`.
        OSError: the folder, or that of temporary files, cannot be written.
    """
    check_form(form)
    try:
        await in_thread(place.begin)
        known = await in_thread(manifest_of, place)
        _check_known(known, place, topic, form)
        export = _Export(session, topic, place, form, file_bytes or FILE_BYTES, progress)
        manifest = await export.run(known)
        is_known = known is not None and msgspec.structs.replace(manifest, export=known.export) == known
        if not is_known or place.has_dropped:
            await in_thread(place.put_manifest, encode_manifest(manifest))
        return manifest, export.done
    finally:
        place.end()


def _check_known(known: Manifest | None, place: Place, topic: str, form: Form) -> None:
    """Refuse to add to a backup of another topic, or in another form."""
    if known is not None and known.topic != topic:
        raise ConfigError(
            f"{place} is a backup of topic {known.topic!r}",
            code="another_topic",
            field="to",
            value=str(place),
            limit=known.topic,
        )
    if known is not None and known.form != form:
        raise ConfigError(
            f"{place} is a backup of form {known.form}",
            code="another_form",
            field="format",
            value=form,
            limit=known.form,
        )


class _Export:
    """One run."""

    def __init__(
        self,
        session: Session,
        topic: str,
        place: Place,
        form: Form,
        file_bytes: int,
        progress: Callable[[Exported], None],
    ) -> None:
        self._session = session
        self._topic = topic
        self._path = topic_path(topic)
        self._place = place
        self._form = form
        self._file_bytes = file_bytes
        self._progress = progress
        self.done = Exported()

    async def run(self, known: Manifest | None) -> Manifest:
        session = self._session
        about = await self._about()
        # Before the ends: no cursor is behind the records that are exported.
        cursors = await self._cursors()
        routes = await session.get_json(f"{self._path}/routes")
        partitions = await session.get_json(f"{self._path}/partitions")
        # Of a change that was done since the routes were read the outputs are for the next export.
        numbers = Lineage.from_answer(routes).partitions
        listed = {
            each["partition"]: each["id"] for each in partitions["partitions"] if each["partition"] in numbers
        }
        before = {} if known is None else {each.partition: each for each in known.partitions}
        held = await for_each(sorted(listed), lambda number: self._held(number, before.get(number)))
        bounds = await for_each(sorted(listed), lambda number: self._bounds(number, listed[number]))
        now = list(zip(held, bounds, strict=True))
        for have, there in now:
            await self._check(have, there)
        exported = await for_each(now, lambda pair: self._partition(*pair))
        # Partitions that were reclaimed since stay in the backup.
        gone = [each for number, each in before.items() if number not in listed]
        ends = {each.partition: each.end_offset for each in (*exported, *gone)}
        return Manifest(
            format=FORMAT,
            topic=self._topic,
            created_with=partitions["created_with"],
            replicas=about["replicas"],
            settings=about["settings"],
            routes=routes,
            cursors={
                name: {number: min(at, ends[int(number)]) for number, at in at.items() if int(number) in ends}
                for name, at in cursors.items()
            },
            channels=await self._channels(),
            delayed=await self._delayed(),
            partitions=sorted((*exported, *gone), key=lambda each: each.partition),
            form=self._form,
            export="" if self._form == "batch" else self._place.export,
        )

    async def _about(self) -> dict[str, Any]:
        """Return the topic's description; wait while it says that the topic is being imported."""
        deadline = self._session.loop.time() + self._session.timeout_s
        while True:
            about: dict[str, Any] = await self._session.get_json(self._path)
            if "importing" not in about["settings"]:
                return about
            if self._session.loop.time() > deadline:
                raise Unavailable(
                    f"topic {self._topic!r} is being imported", code="being_created", retriable=True
                )
            await asyncio.sleep(OPENED_RETRY_S)

    # -- what there is ---------------------------------------------------------------------

    async def _cursors(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        after = ""
        while True:
            target = f"{self._path}/cursors?limit={PAGE}&after={quote(after, safe='')}"
            page = await self._session.get_json(target)
            found |= {each["cursor"]: each["positions"] for each in page["cursors"]}
            after = page.get("next") or ""
            if not after:
                return found

    async def _channels(self) -> list[str]:
        answer = await self._session.get_json(f"{self._path}/channels")
        return sorted(each["channel"] for each in answer["channels"])

    async def _delayed(self) -> int:
        answer = await self._session.get_json(f"{self._path}/delayed?bucket_ms={YEAR_MS}")
        return sum(each["records"] for each in answer["buckets"])

    async def _bounds(self, partition: int, id_: str) -> _Bounds:
        start, end = [
            await self._session.offset_at(self._topic, partition, at, id_=id_, leader_only=True)
            for at in ("earliest", "latest")
        ]
        return _Bounds(partition, id_, start, end)

    async def _held(self, partition: int, known: PartitionBackup | None) -> _Held:
        """Return what the backup has of a partition: in the manifest, and in files of a killed export."""
        held = _Held(partition)
        if known is not None:
            held.id, held.start, held.end = known.id, known.start_offset, known.end_offset
            held.last = known.last_batch
            held.files, held.values = list(known.files), list(known.values)
            self._check_there(known)
        listed = {file.name for file in held.files}
        for offset, name in self._place.names(partition, ENDINGS[self._form]):
            if name in listed:
                continue
            is_shared = self._place.export != ""
            below = held.end if is_shared else 0 if known is None else known.end_offset
            if offset < below and (self._form == "batch" or not is_shared):
                continue
            if self._form != "batch":  # its records can't be compared with the topic's: written again
                self._place.drop(name)
                continue
            if held.start is None:
                held.start = held.end = offset
            if offset != held.end and is_shared:
                continue  # of another export, which began elsewhere
            if offset != held.end:
                raise wrong(self._place.path_of(name), "first_offset", offset, held.end)
            await in_thread(self._take, held, name)
        return held

    def _check_there(self, known: PartitionBackup) -> None:
        """Check that the files exist in the sizes of the manifest; only an import reads their contents."""
        for name, size in [
            *((file.name, file.bytes) for file in known.files),
            *((value.name, value.bytes) for value in known.values),
        ]:
            found = self._place.size_of(name)
            if found != size:
                raise wrong(self._place.path_of(name), "bytes", "missing" if found is None else found, size)

    def _take(self, held: _Held, name: str) -> None:
        """Add a complete file to `held`, which a killed export wrote and no manifest names yet."""
        digest, size, first = hashlib.sha256(), 0, held.end
        for frame, header in frames_of(self._place, name, at=held.end):
            digest.update(frame)
            size += len(frame)
            batch = Batch(frame, verified=True)
            if batch.is_large:
                held.values.append(self._value_file(held.partition, batch))
            held.end, held.last = header.next_offset, _last(header)
        if held.end == first:
            raise wrong(self._place.path_of(name), "bytes", size, "batches")
        held.files.append(BatchFile(name, size, digest.hexdigest(), first, held.end))

    def _value_file(self, partition: int, stub: Batch) -> ValueFile:
        """Return the entry of the file with a large record's value. Raises `Error` if the file is wrong."""
        name = value_name(partition, stub.base_offset)
        where = self._place.path_of(name)
        digest, size, checksum = hashlib.sha256(), 0, 0
        try:
            with self._place.open(name) as file:
                while data := file.read(READ_BYTES):
                    digest.update(data)
                    size += len(data)
                    checksum = crc32c(data, checksum)
        except FileNotFoundError:
            raise wrong(where, "file", "missing", f"{size_of(stub)} bytes") from None
        if (size, checksum) != (size_of(stub), checksum_of(stub)):
            raise wrong(where, "crc32c", f"{checksum:08x}", f"{checksum_of(stub):08x}")
        return ValueFile(name, size, digest.hexdigest(), stub.base_offset)

    # -- whether it is the same topic ------------------------------------------------------

    async def _check(self, held: _Held, now: _Bounds) -> None:
        """Check that the backup's records of a partition can be continued with the topic's present ones.

        Raises:
            Error: (`diverged`) it is another topic, or its log lost the last batch; (`gap`) records after the
                backup's last one were removed.
        """
        if held.start is None:
            return
        place = f"{self._topic}/{now.partition}"
        if held.id and held.id != now.id:
            raise _diverged(place, held.end, f"it was deleted, and made again: its id is {now.id}", held.id)
        if now.end < held.end:
            raise _diverged(place, held.end, f"the partition ends at {now.end}", held.end)
        if now.start > held.end:
            raise Error(
                f"{place}: records {held.end} to {now.start - 1} were removed before they were exported",
                code="gap",
                field="partition",
                value=now.partition,
                limit=now.start,
                hint="a backup in a new place begins with what is there now",
            )
        last = held.last
        if last is None or last.base_offset < now.start:
            return  # the last batch is trimmed there, as all before it
        frames = split_headers((await self._fetch(now, last.base_offset, 1)).body)
        found = _last(frames[0][1]) if frames else None
        if found != last:
            said = "nothing" if found is None else f"entry {found.index} of term {found.term}"
            raise _diverged(
                place,
                held.end,
                f"offset {last.base_offset} is {said} there, and entry {last.index} of term {last.term} here",
                last.index,
            )

    # -- records ---------------------------------------------------------------------------

    async def _fetch(self, now: _Bounds, offset: int, max_bytes: int) -> Any:
        return await self._session.fetch(
            self._topic,
            now.partition,
            offset=offset,
            max_bytes=max_bytes,
            at_least=offset + 1,
            narrowed={"id": now.id},
        )

    async def _partition(self, held: _Held, now: _Bounds) -> PartitionBackup:
        """Write the records of a partition that the backup lacks, up to the end offset in `now`."""
        if held.start is None:
            held.start = held.end = now.start
        held.id = now.id
        files = _Files(self._place, held, self._form, self._file_bytes)
        try:
            while held.end < now.end:
                try:
                    body = (await self._fetch(now, held.end, FETCH_BYTES)).body
                except OffsetExpired as error:
                    raise Error(
                        f"{self._topic}/{now.partition}: records from {held.end} on were removed meanwhile",
                        code="gap",
                        field="partition",
                        value=now.partition,
                        limit=error.limit,
                    ) from None
                for frame, header in _checked(body):
                    if held.end >= now.end:
                        break
                    if header.base_offset != held.end:
                        raise Error(
                            f"{self._topic}/{now.partition}: {header.base_offset} came for {held.end}",
                            code="gap",
                            field="offset",
                            value=header.base_offset,
                            limit=held.end,
                        )
                    batch = Batch(frame, verified=True)
                    if batch.is_large:
                        held.values.append(await self._value(now, batch))
                    await files.add(batch)
                    self.done.records += header.count
                    self.done.bytes += len(frame)
                await files.flush()
                self._progress(self.done)
            await files.finish()
        finally:
            files.discard()
        self.done.files += files.finished
        return PartitionBackup(
            partition=now.partition,
            id=now.id,
            start_offset=held.start,
            end_offset=held.end,
            last_batch=held.last,
            files=held.files,
            values=held.values,
        )

    async def _value(self, now: _Bounds, stub: Batch) -> ValueFile:
        """Write the value of a large record to a file of its own, before the batch of its stub is written."""
        name = value_name(now.partition, stub.base_offset)
        if self._place.size_of(name) is not None:  # of an export that was killed
            return await in_thread(self._value_file, now.partition, stub)
        writer = self._place.writer(name)
        try:
            value = Value(
                self._session, self._topic, now.partition, stub.base_offset, timeout_s=None, id_=now.id
            )
            async with value:
                async for chunk in value:  # its end is checked against length and checksum
                    await in_thread(writer.write, chunk)
                    self.done.bytes += len(chunk)
                    self._progress(self.done)
            digest = await in_thread(writer.finish)
        finally:
            writer.discard()
        self.done.files += 1
        return ValueFile(name, writer.bytes, digest, stub.base_offset)


class _Files:
    """The writer of one partition's files of records; batches are collected between writes."""

    def __init__(self, place: Place, held: _Held, form: Form, file_bytes: int) -> None:
        self._place = place
        self._held = held
        self._form = form
        self._file_bytes = file_bytes
        self._sink: Sink | None = None
        self._first = 0
        self._name = ""
        self._parts: list[Buffer] = []
        self._pending = 0
        self._size = 0
        self.finished = 0

    async def add(self, batch: Batch) -> None:
        """Add a batch to the present file, or to a new one if the present one would become too large."""
        part = encode(self._form, batch)
        if self._sink is not None and self._size + len(part) > self._file_bytes:
            await self.finish()
        if self._sink is None:
            self._first, self._size = self._held.end, 0
            self._name = self._place.new_name(self._held.partition, self._first, ENDINGS[self._form])
            self._sink = open_sink(self._form, self._place.writer(self._name))
        self._parts.append(part)
        self._size += len(part)
        # A table of batches takes what they are decompressed.
        self._pending += plain_bytes(batch) if self._form == "parquet" else len(part)
        self._held.end, self._held.last = batch.next_offset, _last(batch.header)
        if self._pending >= MOST_PENDING:
            await self.flush()

    async def flush(self, *, is_end: bool = False) -> None:
        """Write the collected batches, if they are enough for a write in this form or `is_end` is true."""
        sink = self._sink
        if sink is not None and self._parts and (is_end or self._pending >= sink.least_bytes):
            parts, self._parts, self._pending = self._parts, [], 0
            await in_thread(sink.write, parts)

    async def finish(self) -> None:
        """Complete the present file, if there is one: it gets its name, and its entry in the manifest."""
        await self.flush(is_end=True)
        sink, self._sink = self._sink, None
        if sink is None:
            return
        try:
            digest = await in_thread(sink.finish)
        finally:
            sink.discard()
        self._held.files.append(BatchFile(self._name, sink.bytes, digest, self._first, self._held.end))
        self.finished += 1

    def discard(self) -> None:
        """Remove the present file, which is incomplete, if there is one."""
        if self._sink is not None:
            self._sink.discard()


def _checked(body: Buffer) -> list[tuple[memoryview, Header]]:
    """Return the batches in the body of an answer, with their headers; their checksums are verified."""
    frames = split_headers(body)
    for frame, header in frames:
        verify_body(frame, header)
    return frames


def _last(header: Header) -> LastBatch:
    return LastBatch(header.base_offset, header.index, header.term, f"{header.header_crc:08x}")


def _diverged(place: str, end: int, why: str, limit: object) -> Error:
    return Error(
        f"{place}: the backup up to offset {end} is not of this topic any more: {why}",
        code="diverged",
        field="partition",
        value=place,
        limit=limit,
        hint="keep that backup, and begin another in a new place",
    )
