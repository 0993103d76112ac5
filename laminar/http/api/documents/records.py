"""Documents of records: receipts of appends, fetches, offsets, digests, deletions."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.delayed import DelayedId
from laminar.http.api.documents.shared import Answer, Count, Epoch, Id, RouteVersion, Time


class Placed(Answer):
    """The part of an append that one partition stored: `count` records from `offset` on."""

    partition: Count
    offset: Count
    count: Count


class Durability(Answer):
    """The durability of an append when it was acknowledged.

    At least a majority of the partition's `replicas` had it, `synced` to disk or only written: that depends
    on `flush`, the topic's flush policy.
    """

    replicas: Count
    synced: bool
    flush: Annotated[str, Meta(extra_json_schema={"enum": ["commit", "interval"]})]


class Appended(Answer):
    """The receipt of an append; `scheduled` has the ids of the records with a delay, in order."""

    appended: Count
    placed: list[Placed]
    durable: Durability
    scheduled: list[DelayedId] | UnsetType = UNSET


class Accepted(Answer):
    """The answer to an append with `ack=accepted`, which is sent before the records are durable.

    They get the `offset`, provided that the leader of `term` commits them; up to offset `committed` the
    partition is committed already.
    """

    durable: bool
    partition: Count
    offset: Count
    count: Count
    term: Count
    route: RouteVersion
    committed: Count
    when_durable: Durability


class FetchedRecord(Answer):
    """A record: its value is in `value` if it is text, else in `value_base64`.

    Of a record larger than a batch there is only the length, `value_bytes`.
    """

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
    """The records of a fetch, and the offset from which to fetch next."""

    records: list[FetchedRecord]
    next_offset: Count


class DeletedRecords(Answer):
    """The records before an offset that were deleted, or with `dry_run` would be.

    They are `deleted` records, from `from_offset` up to, not including, `start_offset`. `rounded_down` tells
    that this is less than was requested, because only whole batches are deleted. `held_back_by` names nodes
    whose replicas still have to read these records.
    """

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
    """An offset of a partition, the append time of its batch (null: none), and the partition's bounds."""

    offset: Count
    timestamp: Time | None
    start_offset: Count
    end_offset: Count


class SealedSegment(Answer):
    """A sealed segment (a file of the log to which nothing is added), and the SHA-256 of its bytes."""

    first_index: Count
    last_index: Count
    digest: str


class Digest(Answer):
    """The SHA-256 of a replica's log from `start_index` to `to_index`, to be compared between replicas."""

    node: str
    committed_index: Count
    last_index: Count
    term: Count
    to_index: Count
    start_index: Count
    digest: str
    segments: list[SealedSegment]


class ProducerProgress(Answer):
    """The progress of a producer in a partition: the last sequence numbers received and committed (-1: none).

    `checkpoint` is the highest number that the producer's program gave to a record (0: none), and `floor` is
    such a number up to which all records are durable in all partitions. `sealed` tells that the partition
    accepts no more records, so this progress is final.
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
    """The receipt of one part of an upload, which is stored now."""

    upload: str
    part: Count
    size_bytes: Count
