"""Producers, sinks, and the batches that sinks commit."""

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
    """A producer that is to begin: `name`, if any, is written as a topic's."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOPIC_PATTERN}$"})] | None = None


class Producer(Answer):
    """A producer's id and epoch."""

    producer: Id
    epoch: Epoch
    name: str | None


class Sink(Answer):
    """A sink; `committed` is the number of the last batch that was decided."""

    sink: str
    epoch: Epoch
    committed: Number | None
    publishing: bool
    fingerprint: str | None
    once: bool
    deleting: bool
    changed: Time


class SinkPage(Answer):
    """A page of the list of sinks; `next` is there if there are more."""

    sinks: list[Sink]
    next: str | UnsetType = UNSET


class Staged(Answer):
    """A stage that is stored."""

    topic: str
    partition: Count
    stage: Number
    count: Count


class Prepare(Request):
    """Stages of a batch in one partition that are to be kept for its commit."""

    epoch: Epoch
    topic: str
    partition: Number
    stages: Annotated[list[Number], Meta(min_length=1, max_length=MAX_STAGES)]


class Prepared(Answer):
    """How many stages of a batch are kept in a partition."""

    topic: str
    partition: Count
    prepared: Count


class CommitAcks(Request):
    """Jobs of one channel that a batch acknowledges, in one partition."""

    channel: str
    tokens: Annotated[list[str], Meta(min_length=1, max_length=MAX_ACKS)]


class CommitPart(Request):
    """What a batch commits in one partition: its stages, or how many were prepared; and acknowledgements."""

    topic: str
    partition: Number
    stages: list[Number] = field(default_factory=list)
    prepared: Number = 0
    acks: Annotated[list[CommitAcks], Meta(max_length=MAX_CHANNELS)] = field(default_factory=list)


class Commit(Request):
    """A commit of a batch; `fingerprint` tells this batch from others."""

    epoch: Epoch
    parts: Annotated[list[CommitPart], Meta(max_length=MAX_PARTS)]
    fingerprint: Annotated[str, Meta(max_length=MAX_FINGERPRINT)] = ""


class Committed(Answer):
    """The outcome of a commit."""

    sink: str
    number: Number
    result: Literal["applied", "already"]
