"""Documents of producers, sinks, and the batches that sinks commit."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.shared import Answer, Count, Epoch, Id, Number, Request, Time
from laminar.http.api.names import TOPIC_PATTERN
from laminar.wire.channels import MAX_ACKS, MAX_CHANNELS

MAX_FINGERPRINT: Final = 200
# The largest number of stages of a batch in one partition, and of partitions that one batch may change.
MAX_STAGES: Final = 262_144
MAX_PARTS: Final = 16_384


class NewProducer(Request):
    """Request to start a producer. `name` is optional and follows the rule for topic names."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOPIC_PATTERN}$"})] | None = None


class Producer(Answer):
    """A producer's id, and the epoch of this start: batches of an older epoch are refused from now on."""

    producer: Id
    epoch: Epoch
    name: str | None


class Sink(Answer):
    """A sink (a named sequence of batches, each committed once).

    `committed` is the number of the last batch whose commit was decided, and `publishing` tells that its
    records are still getting their offsets. A sink that was begun with `once` commits a single batch.
    """

    sink: str
    epoch: Epoch
    committed: Number | None
    publishing: bool
    fingerprint: str | None
    once: bool
    deleting: bool
    changed: Time


class SinkPage(Answer):
    """A page of the list of sinks; it has `next` if there are more."""

    sinks: list[Sink]
    next: str | UnsetType = UNSET


class Staged(Answer):
    """The receipt of a stage: `count` records are stored for a batch, and shown when it is committed."""

    topic: str
    partition: Count
    stage: Number
    count: Count


class Prepare(Request):
    """Request to prepare stages of a batch in one partition: it keeps them until the batch is decided."""

    epoch: Epoch
    topic: str
    partition: Number
    stages: Annotated[list[Number], Meta(min_length=1, max_length=MAX_STAGES)]


class Prepared(Answer):
    """The number of stages of a batch that a partition has prepared."""

    topic: str
    partition: Count
    prepared: Count


class CommitAcks(Request):
    """Jobs of one channel in one partition that a batch acknowledges."""

    channel: str
    tokens: Annotated[list[str], Meta(min_length=1, max_length=MAX_ACKS)]


class CommitPart(Request):
    """The part of a batch in one partition: the records to show, and the jobs to acknowledge.

    The records are those of `stages`, or of as many stages as were `prepared`.
    """

    topic: str
    partition: Number
    stages: list[Number] = field(default_factory=list)
    prepared: Number = 0
    acks: Annotated[list[CommitAcks], Meta(max_length=MAX_CHANNELS)] = field(default_factory=list)


class Commit(Request):
    """Request to commit a batch; `fingerprint` identifies the batch's content."""

    epoch: Epoch
    parts: Annotated[list[CommitPart], Meta(max_length=MAX_PARTS)]
    fingerprint: Annotated[str, Meta(max_length=MAX_FINGERPRINT)] = ""


class Committed(Answer):
    """The outcome of a commit: `already` if the batch had been committed before."""

    sink: str
    number: Number
    result: Literal["applied", "already"]
