"""The manifest of a backup: the list of its files and records, and the checks of it.

A manifest may come from a disk to which others can write. So it is refused unless every file name in it has
the form that an export uses, and every range of offsets follows the one before.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from laminar.client.errors import Error
from laminar.http.api.documents.shared import MAX_PARTITIONS
from laminar.http.api.names import TOPIC_PATTERN

FORMAT = 1
MANIFEST = "manifest.json"
VALUE = ".value"
Form = Literal["batch", "jsonl", "csv", "parquet"]
ENDINGS: dict[Form, str] = {"batch": ".batches", "jsonl": ".jsonl", "csv": ".csv", "parquet": ".parquet"}
"""By form the ending of the files that have records."""
MOST_MANIFEST_BYTES = 1 << 30
HIGHEST_PARTITION = 10**9
# As `OFFSET_LIMIT` of the API.
HIGHEST_OFFSET = 10**16

_NAME = re.compile(
    r"(0|[1-9][0-9]{0,8})/([0-9]{20})(?:\.(?:batches|value)|(?:-[0-9a-f]{8})?\.(?:jsonl|csv|parquet))\Z",
    re.ASCII,
)
_CURSOR = re.compile(rf"{TOPIC_PATTERN}\Z", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)


class LastBatch(msgspec.Struct, frozen=True):
    """The last batch of a partition in a backup: an export compares it with the log before it continues."""

    base_offset: int
    index: int
    term: int
    header_crc32c: str
    """8 hexadecimal digits."""


class BatchFile(msgspec.Struct, frozen=True):
    """A file with the records from `first_offset` to before `next_offset`.

    In the form `batch` it has the batches as stored, one after the other; for other forms see `forms`.
    """

    name: str
    bytes: int
    sha256: str
    first_offset: int
    next_offset: int


class ValueFile(msgspec.Struct, frozen=True):
    """A file with the value of one record that is larger than a batch."""

    name: str
    bytes: int
    sha256: str
    offset: int


class PartitionBackup(msgspec.Struct, frozen=True):
    """The backup of one partition: its records from `start_offset` to before `end_offset`.

    `id` identifies the partition over the life of the cluster; a topic created again gets other ids.
    """

    partition: int
    id: str
    start_offset: int
    end_offset: int
    last_batch: LastBatch | None
    files: list[BatchFile]
    values: list[ValueFile]


class Manifest(msgspec.Struct, frozen=True):
    """The description of a topic and of all files of its backup.

    `routes` is the answer of `GET /v1/topics/{topic}/routes`; `cursors` has positions by name and partition.
    `export` is the export that wrote the manifest, 8 hexadecimal digits, where a lock cannot keep out others.
    `channels` are the names of the topic's channels, `delayed` is the number of delayed records that were
    pending: these are mentioned for the operator, but not in the backup.
    """

    format: int
    topic: str
    created_with: int
    replicas: int
    settings: dict[str, int | str]
    routes: dict[str, Any]
    cursors: dict[str, dict[str, int]]
    channels: list[str]
    delayed: int
    partitions: list[PartitionBackup]
    form: Form = "batch"
    export: str = ""

    @property
    def records(self) -> int:
        """The number of records in the backup."""
        return sum(each.end_offset - each.start_offset for each in self.partitions)

    @property
    def bytes(self) -> int:
        """The bytes of all files of the backup, without the manifest."""
        batches = sum(file.bytes for each in self.partitions for file in each.files)
        return batches + sum(file.bytes for each in self.partitions for file in each.values)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented JSON; equal manifests give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in `data`, checked; `where` names it in errors.

    Raises:
        Error: (`damaged`) `data` is not a manifest, or a name or a range in it is wrong; (`unsupported`) it
            has a newer format.
    """
    try:
        found = msgspec.json.decode(data)
        number = found.get("format") if isinstance(found, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise Error(
                f"{where} has a newer format than this program knows",
                code="unsupported",
                field="format",
                value=number,
                limit=FORMAT,
            )
        manifest = msgspec.convert(found, Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise wrong(where, "format", str(error), FORMAT) from None
    if manifest.format != FORMAT:
        raise wrong(where, "format", manifest.format, FORMAT)
    if not 1 <= manifest.created_with <= MAX_PARTITIONS:
        raise wrong(where, "created_with", manifest.created_with, f"1 to {MAX_PARTITIONS}")
    numbers = [each.partition for each in manifest.partitions]
    if numbers != sorted(set(numbers)):
        raise wrong(where, "partitions", numbers[:20], "rising numbers")
    for each in manifest.partitions:
        _check_partition(each, where, ENDINGS[manifest.form])
    # A cursor that cannot be set would be found when all else is imported, and the topic never be opened.
    ends = {str(each.partition): each.end_offset for each in manifest.partitions}
    for cursor, positions in manifest.cursors.items():
        if _CURSOR.match(cursor) is None:
            raise wrong(where, "cursors", cursor, TOPIC_PATTERN)
        for number, position in positions.items():
            if not 0 <= position <= ends.get(number, -1):
                raise wrong(where, f"cursors.{cursor}.{number}", position, "an offset in a partition of it")
    return manifest


def records_name(partition: int, offset: int, ending: str, *, export: str = "") -> str:
    """Return the name of the file of records that begins at an offset.

    `export` are 8 hexadecimal digits that tell the files of one export from those of others, or "".
    """
    return f"{partition}/{offset:020d}{export and f'-{export}'}{ending}"


def value_name(partition: int, offset: int) -> str:
    """Return the name of the file with the value of the record at an offset."""
    return f"{partition}/{offset:020d}{VALUE}"


def name_parts(name: str) -> tuple[int, int, str] | None:
    """Return partition, offset and ending of a file's name; None for a name that no backup has."""
    found = _NAME.match(name)
    return None if found is None else (int(found[1]), int(found[2]), name[name.index(".") :])


def _check_partition(each: PartitionBackup, where: str, ending: str) -> None:
    place = f"partitions.{each.partition}"
    if not 0 <= each.partition < HIGHEST_PARTITION:
        raise wrong(where, place, each.partition, f"below {HIGHEST_PARTITION}")
    if not 0 <= each.start_offset <= each.end_offset < HIGHEST_OFFSET:
        raise wrong(where, f"{place}.end_offset", each.end_offset, f"{each.start_offset} or more")
    after = each.start_offset
    for file in each.files:
        if name_parts(file.name) != (each.partition, file.first_offset, ending):
            raise wrong(where, f"{place}.files.name", file.name, f"PARTITION/OFFSET{ending}")
        if file.first_offset != after or file.next_offset <= after:
            raise wrong(where, f"{place}.files.first_offset", file.first_offset, after)
        _check_file(file, where, place)
        after = file.next_offset
    if after != each.end_offset:
        raise wrong(where, f"{place}.end_offset", each.end_offset, after)
    offset = each.start_offset - 1
    for value in each.values:
        if value.name != value_name(each.partition, value.offset):
            raise wrong(where, f"{place}.values.name", value.name, "PARTITION/OFFSET.value")
        if not offset < value.offset < each.end_offset:
            raise wrong(where, f"{place}.values.offset", value.offset, "a rising offset of its records")
        _check_file(value, where, place)
        offset = value.offset


def _check_file(file: BatchFile | ValueFile, where: str, place: str) -> None:
    if name_parts(file.name) is None:
        raise wrong(where, f"{place}.name", file.name, "PARTITION/OFFSET and an ending")
    if file.bytes < 1 or _SHA256.match(file.sha256) is None:
        raise wrong(where, f"{place}.sha256", file.sha256, "64 hexadecimal digits, of a file with bytes")


def wrong(where: str, field: str, value: object, limit: object) -> Error:
    """Return the error (`damaged`) for a backup whose `field` has `value` where `limit` is expected."""
    return Error(
        f"{where} is damaged, or was changed: {field} is {value!r}, not {limit!r}",
        code="damaged",
        field=field,
        value=value,
        limit=limit,
    )
