"""A node as a server: versions, limits, health; and the document of every error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import Answer, Count


class Version(Answer):
    """Versions of the server, of this API and of the format of batches."""

    version: str
    api: str
    format: int


class RequestLimits(Answer):
    """The limits of requests."""

    max_body_bytes: int
    max_record_bytes: int
    max_records: int
    max_key_bytes: int
    max_tag_bytes: int
    max_headers_bytes: int
    max_head_bytes: int
    max_head_fields: int
    max_target_bytes: int
    max_fetch_bytes: int
    max_fetch_records: int
    max_wait_ms: int
    max_partitions: int
    max_replicas: int
    max_upload_parts: int
    max_stages_of_partition: int
    max_uploads_of_partition: int
    max_upload_bytes_of_partition: int


class Alive(Answer):
    """A shard that turns its event loop."""

    status: Literal["alive"]
    node: str
    shard: Count


class DiskSpace(Answer):
    """Free space of a node's disk; appends are refused below the mark, consumers below half of it."""

    free_bytes: int
    low_water_bytes: int
    appends_refused: bool
    consumers_refused: bool


class Ready(Answer):
    """A node that serves."""

    status: Literal["ready"]
    node: str
    warnings: list[str]
    disk: DiskSpace


class NotReady(Answer):
    """A node that does not serve yet."""

    status: Literal["not_ready"]
    node: str
    reasons: list[str]


class ProblemDocument(msgspec.Struct, kw_only=True):
    """An error (RFC 9457)."""

    type: Annotated[str, Meta(description="Where the code is explained.")]
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    code: str
    outcome: Annotated[
        Literal["not_applied", "unknown"],
        Meta(description="`unknown`: repeat only with the same idempotency key or sequence."),
    ]
    detail: str | UnsetType = UNSET
    hint: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    value: Any = UNSET
    limit: Any = UNSET
    retry_after_ms: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
