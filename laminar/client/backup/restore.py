"""The import of a backup: a topic is created, filled, compared with the backup, and only then opened.

Until then, only requests with the import's id may use the topic. The id is derived from the manifest, and
each batch has a sequence number and names the offset that it must get. So an import that was killed can be
run again and continues where it ended; a late request of the killed run appends nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any
from urllib.parse import quote

import msgspec

from laminar.batch import BATCH_TYPE, Batch, split_headers
from laminar.batch.header import HEADER_SIZE, verify_body
from laminar.batch.large_record import checksum_of
from laminar.client.backup.contents import Part, bare_stub, check, parts_of
from laminar.client.backup.files import manifest_bytes
from laminar.client.backup.lineage import changes_of, whole_of
from laminar.client.backup.manifest import MANIFEST, Manifest, PartitionBackup, decode
from laminar.client.backup.parallel import for_each, in_thread
from laminar.client.backup.place import Place
from laminar.client.consume.large_values import Value
from laminar.client.errors import AlreadyExists, Error, NotFound
from laminar.client.net.session import Session, topic_path
from laminar.client.policy.lineage import Lineage
from laminar.client.produce.uploads import PART_BYTES, part_bytes
from laminar.client.route_changes import change_route, routes_from, routes_of, until_done

REQUEST_BYTES = 1 << 20
FETCH_BYTES = 4 << 20
START_WAIT_S = 30.0
START_RETRY_S = 0.2
ROUTE_WAIT_S = 60.0
# Set when the topic is opened: they could delete or move records while it is filled, or have the trace say
# that they were appended. And all of it is to be synced, whatever the topic asks of its appends.
SET_LAST = (
    *("retention_ms", "retention_bytes", "split_bytes_per_s"),
    *("flush", "flush_interval_ms", "flush_interval_records", "trace"),
)


@dataclass(slots=True)
class Imported:
    """The progress of an import: records sent, and records compared."""

    records: int = 0
    compared: int = 0


def plan_import(place: Place, topic: str | None) -> tuple[Manifest, str, str]:
    """Check a whole backup; return its manifest, the name of the topic to create, and the import's id.

    Raises:
        Error: (`damaged`) the backup differs from what an export wrote; (`unsupported`) its form is not
            `batch`, or not all splits and merges of its topic are known.
    """
    data = manifest_bytes(place)
    where = place.path_of(MANIFEST)
    manifest = decode(data, where=where)
    if manifest.form != "batch":
        raise Error(
            f"{place} has records as text: only batches are imported",
            code="unsupported",
            field="form",
            value=manifest.form,
            limit="batch",
            hint="`laminar produce` appends lines",
        )
    changes_of(manifest, where=where)
    whole = whole_of(manifest, where=where)
    check(place, manifest)
    name = manifest.topic if topic is None else topic
    return whole, name, hashlib.sha256(data + b"\0" + name.encode()).hexdigest()[:32]


async def exists(session: Session, topic: str) -> dict[str, Any] | None:
    """Return a topic's description; None if there is no such topic. Raises as `Session.call`."""
    try:
        found: dict[str, Any] = await session.get_json(topic_path(topic))
    except NotFound:
        return None
    return found


async def import_topic(
    session: Session,
    place: Place,
    manifest: Manifest,
    topic: str,
    import_id: str,
    *,
    replicas: int | None = None,
    progress: Callable[[Imported], None] = lambda done: None,
) -> Imported:
    """Create and fill `topic` from the backup at `place`; continue an import that was killed.

    `manifest` and `import_id` are results of `plan_import`. All requests of the session carry the import's id
    from now on.

    Raises:
        AlreadyExists: there is a topic of that name, and it is not being imported from this backup.
        Error: (`digests_differ`) the topic differs from the backup, and stays closed; else as `Session.call`.
    """
    restore = _Import(session, place, manifest, topic, import_id, progress)
    await restore.run(replicas)
    return restore.done


class _Import:
    """One run."""

    def __init__(
        self,
        session: Session,
        place: Place,
        manifest: Manifest,
        topic: str,
        import_id: str,
        progress: Callable[[Imported], None],
    ) -> None:
        self._session = session
        self._place = place
        self._manifest = manifest
        self._topic = topic
        self._path = topic_path(topic)
        self._id = import_id
        self._progress = progress
        self._producer_id = hashlib.sha256(b"import " + import_id.encode()).digest()[:16]
        self._most_bytes = 0
        self._most_records = 0
        self._route = 0
        self.done = Imported()

    async def run(self, replicas: int | None) -> None:
        manifest = self._manifest
        self._session.import_id = self._id
        limits = await self._session.get_json("/v1/limits")
        self._most_bytes = int(limits["max_body_bytes"])
        self._most_records = int(limits["max_records"])
        await self._create(manifest.replicas if replicas is None else replicas)
        await self._change_routes()
        await for_each(manifest.partitions, self._fill)
        await for_each(manifest.partitions, self._compare)
        for cursor, positions in sorted(manifest.cursors.items()):
            if positions:
                target = f"{self._path}/cursors/{quote(cursor, safe='')}"
                await self._json("PUT", target, {"positions": positions})
        await self._open()

    async def _json(
        self, method: str, target: str, document: Any, headers: dict[str, str] | None = None
    ) -> Any:
        answer = await self._session.call(
            method,
            target,
            body=msgspec.json.encode(document),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        return answer.json()

    async def _create(self, replicas: int) -> None:
        settings = {name: value for name, value in self._manifest.settings.items() if name not in SET_LAST}
        wanted = {
            "partitions": self._manifest.created_with,
            "replicas": replicas,
            "settings": {**settings, "importing": self._id},
        }
        try:
            await self._json("PUT", self._path, wanted)
        except AlreadyExists as error:
            now = (await self._session.get_json(self._path))["settings"].get("importing")
            if now == self._id:
                raise
            why = "is there" if now is None else "is being imported from another backup, or a later one"
            raise AlreadyExists(
                f"topic {self._topic!r} {why}",
                code="already_exists",
                status=error.status,
                field="topic",
                value=self._topic,
                hint="--as gives another name; `laminar topic delete` removes it",
            ) from None

    async def _change_routes(self) -> None:
        """Repeat the splits and merges of the topic, oldest first, each after its partitions are filled."""
        partitions = {each.partition: each for each in self._manifest.partitions}
        self._route = int((await routes_of(self._session, self._topic))["routes"][0]["version"])
        for change in changes_of(self._manifest, where=str(self._place)):
            if change.version > self._route:
                await for_each([partitions[number] for number in change.inputs], self._fill)
                version = await change_route(
                    self._session,
                    self._topic,
                    change.inputs,
                    cuts=change.cuts,
                    wait=ROUTE_WAIT_S,
                    abandon=False,
                    force=False,
                )
                await until_done(self._session, self._topic, version, wait=ROUTE_WAIT_S)
                self._session.forget_topic(self._topic)
                self._route = version
        lineage = Lineage.from_answer(await routes_from(self._session, self._topic, self._route))
        if lineage.partitions.keys() != partitions.keys():
            raise self._differs(
                min(partitions), f"partitions {sorted(partitions)}", sorted(lineage.partitions)
            )

    # -- a partition -----------------------------------------------------------------------

    def _parts(self, partition: PartitionBackup) -> Iterator[Part]:
        return parts_of(
            self._place,
            partition,
            producer_id=self._producer_id,
            # Some room, as the server counts a little otherwise.
            most_bytes=max(1, self._most_bytes - (64 << 10)),
            most_records=self._most_records,
        )

    async def _fill(self, partition: PartitionBackup) -> None:
        """Send the records that the new partition lacks."""
        number = partition.partition
        end = await self._session.offset_at(self._topic, number, "latest", leader_only=True)
        if end < partition.start_offset:
            await self._begin_at(partition)
            end = partition.start_offset
        parts = self._parts(partition)
        held: Part | None = None
        while True:
            request, held = await in_thread(_next_request, parts, held, end)
            if not request:
                break
            if request[0].value is not None:
                await self._upload(number, request[0])
            else:
                await self._append(number, request)
            self.done.records += request[-1].next - request[0].first
            self._progress(self.done)

    async def _begin_at(self, partition: PartitionBackup) -> int:
        """Ask the partition to begin at the backup's first offset; return its first offset after that."""
        answer = await self._session.call(
            "DELETE",
            f"{self._path}/partitions/{partition.partition}/records?before={partition.start_offset}",
            first=await self._leader(partition.partition),
        )
        return int(answer.json()["start_offset"])

    async def _append(self, number: int, parts: list[Part]) -> None:
        """Append consecutive batches at the offsets that they have in the backup."""
        headers = {"Content-Type": BATCH_TYPE, "Laminar-Route": str(self._route)}
        if not any(part.has_delivery_time for part in parts):
            headers["If-Match"] = f'"{parts[0].first}"'
        answer = await self._session.call(
            "POST",
            f"{self._path}/partitions/{number}/records",
            body=b"".join(part.frame for part in parts),
            headers=headers,
            first=await self._leader(number),
        )
        placed = answer.json()["placed"]
        found = [each["offset"] for each in placed]
        if found != [part.first for part in parts]:
            raise self._differs(number, f"offset {parts[0].first}", found[:20])

    async def _upload(self, number: int, part: Part) -> None:
        """Upload a large record. The upload's id is derived from the offset, so a repetition does no harm."""
        assert part.value is not None, "a batch is appended"
        name = hashlib.sha256(f"{self._id} {number} {part.first}".encode()).hexdigest()[:32]
        target = f"{self._path}/partitions/{number}/uploads/{name}"
        parts, size = 0, part.value.bytes
        with await in_thread(self._place.open, part.value.name) as file:
            while True:
                wanted = part_bytes(parts, PART_BYTES, self._most_bytes)
                piece = await in_thread(file.read, wanted)
                if not piece:
                    break
                leader = await self._leader(number)
                await self._session.call("PUT", f"{target}/parts/{parts}", body=piece, first=leader)
                parts += 1
        answer = await self._session.call(
            "POST",
            f"{target}?parts={parts}&size_bytes={size}&crc32c={checksum_of(Batch(part.frame)):08x}",
            body=bytes(bare_stub(part.frame)),
            headers={"Content-Type": BATCH_TYPE, "Laminar-Route": str(self._route)},
            first=await self._leader(number),
        )
        offset = int(answer.json()["placed"][0]["offset"])
        if offset != part.first:
            raise self._differs(number, f"offset {part.first}", offset)

    async def _leader(self, number: int) -> str | None:
        return (await self._session.topic_map(self._topic)).leader(number)

    # -- the end ---------------------------------------------------------------------------

    async def _compare(self, partition: PartitionBackup) -> None:
        """Read the partition back, and compare its batches and large values with the backup."""
        number = partition.partition
        deadline = asyncio.get_running_loop().time() + START_WAIT_S
        while (start := await self._begin_at(partition)) != partition.start_offset:
            # A leader that was just elected may not know yet what is committed.
            if asyncio.get_running_loop().time() > deadline:
                raise self._differs(number, f"start {partition.start_offset}", start)
            await asyncio.sleep(START_RETRY_S)
        parts = self._parts(partition)
        at = partition.start_offset
        while at < partition.end_offset:
            answer = await self._session.fetch(
                self._topic, number, offset=at, max_bytes=FETCH_BYTES, at_least=at + 1
            )
            frames = split_headers(answer.body)
            wanted: list[Part] = await in_thread(list, islice(parts, len(frames)))
            for (frame, header), part in zip_longest(frames, wanted):
                verify_body(frame, header)
                if part is None or (header.base_offset, header.next_offset) != (part.first, part.next):
                    raise self._differs(number, f"a batch at {at}", header.base_offset)
                if frame[HEADER_SIZE:] != part.body:
                    raise self._differs(number, f"the records at {at}", "others")
                if part.value is not None:
                    await self._compare_value(number, part)
                at = header.next_offset
                self.done.compared += header.count
            self._progress(self.done)
        end = await self._session.offset_at(self._topic, number, "latest", leader_only=True)
        if end != partition.end_offset or next(parts, None) is not None:
            raise self._differs(number, f"end {partition.end_offset}", end)

    async def _compare_value(self, number: int, part: Part) -> None:
        assert part.value is not None, "a batch has its values"
        digest = hashlib.sha256()
        async with Value(self._session, self._topic, number, part.first, timeout_s=None) as value:
            async for chunk in value:
                digest.update(chunk)
        if digest.hexdigest() != part.value.sha256:
            raise self._differs(number, f"the value at {part.first}", digest.hexdigest())

    def _differs(self, number: int, wanted: str, found: object) -> Error:
        return Error(
            f"{self._topic}/{number} is not what the backup has: {wanted} is missing",
            code="digests_differ",
            field="partition",
            value=found,
            limit=wanted,
            hint="the topic stays closed: delete it, and import it again",
        )

    async def _open(self) -> None:
        """Open the topic to all clients; the same request makes settings that must not apply before."""
        last = {name: value for name, value in self._manifest.settings.items() if name in SET_LAST}
        version = (await self._session.get_json(self._path))["version"]
        await self._json(
            "PATCH",
            self._path,
            {"settings": {**last, "importing": None}},
            {"If-Match": f'"{version}"'},
        )


def _next_request(parts: Iterator[Part], held: Part | None, end: int) -> tuple[list[Part], Part | None]:
    """Return the parts of the next request, and a part taken from `parts` that belongs to a later one.

    `held` is that part from the last call. Parts before offset `end` are skipped: the partition has them. A
    request is one large record, or several batches. If it is empty, no part is left.
    """
    request: list[Part] = []
    size = 0
    while True:
        part = held if held is not None else next(parts, None)
        held = None
        if part is None:
            return request, None
        if part.next <= end:
            continue
        alone = part.value is not None or part.has_delivery_time
        if request and (alone or size + part.plain_bytes > REQUEST_BYTES):
            return request, part
        request.append(part)
        size += part.plain_bytes
        if alone:
            return request, None
