"""Documents of records: receipts of appends, fetches, offsets, digests, deletions."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.delayed import DelayedId
from laminar.http.api.documents.shared import Answer, Count, Epoch, Id, RouteVersion, Time


class Placed(Answer):
    """The part of an append that one partition stored."""

    partition: Count
    offset: Count
    count: Count


class Durability(Answer):
    """The durability of an append when it was acknowledged."""

    replicas: Count
    synced: bool
    flush: Annotated[str, Meta(extra_json_schema={"enum": ["commit", "interval"]})]


class Appended(Answer):
    """The receipt of an append; `scheduled` has the ids of delayed records, in order."""

    appended: Count
    placed: list[Placed]
    durable: Durability
    scheduled: list[DelayedId] | UnsetType = UNSET


class Accepted(Answer):
    """The answer to an append with `ack=accepted`: not durable yet."""

    durable: bool
    partition: Count
    offset: Count
    count: Count
    term: Count
    route: RouteVersion
    committed: Count
    when_durable: Durability


class FetchedRecord(Answer):
    """A record: its value as `value` if it is text, else `value_base64`; of a large one only the length."""

    offset: Count | UnsetType = UNSET
    timestamp: Time | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    value_bytes: Count | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET
    deliver_at: Time | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET


class FetchedRecords(Answer):
    """Records of a fetch, and the offset to continue from."""

    records: list[FetchedRecord]
    next_offset: Count


class DeletedRecords(Answer):
    """The records that a deletion removed, or would remove."""

    topic: str
    partition: Count
    before: Count
    dry_run: bool
    deleted: Count
    from_offset: Count
    start_offset: Count
    rounded_down: bool
    held_back_by: list[str]


class Offsets(Answer):
    """An offset of a partition, the time of its batch if it has one, and the partition's bounds."""

    offset: Count
    timestamp: Time | None
    start_offset: Count
    end_offset: Count


class SealedSegment(Answer):
    """A sealed segment and its SHA-256."""

    first_index: Count
    last_index: Count
    digest: str


class Digest(Answer):
    """The SHA-256 of a replica's committed log from `start_index` to `to_index`."""

    node: str
    committed_index: Count
    last_index: Count
    term: Count
    to_index: Count
    start_index: Count
    digest: str
    segments: list[SealedSegment]


class ProducerProgress(Answer):
    """The progress of a producer in a partition: the last sequence numbers received and committed.

    `sealed` tells that the partition accepts no more records, so this progress is final.
    """

    topic: str
    partition: Count
    producer: Id
    epoch: Epoch
    sequence: Annotated[int, Meta(ge=-1)]
    committed_sequence: Annotated[int, Meta(ge=-1)]
    checkpoint: Count
    floor: Count
    sealed: bool = False


class UploadedPart(Answer):
    """A part of an upload that is stored."""

    upload: str
    part: Count
    size_bytes: Count
