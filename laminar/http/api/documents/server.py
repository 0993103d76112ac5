"""Documents of a node as a server: versions, limits, probes, bundles; and the document of every error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from laminar.http.api.documents.shared import Answer, Count, Time


class Version(Answer):
    """The versions of the server, of this API and of the format of batches."""

    version: str
    api: str
    format: int


class RequestLimits(Answer):
    """The limits of requests to this node: sizes in bytes, and counts."""

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
    """The answer to the liveness probe: this shard's event loop runs."""

    status: Literal["alive"]
    node: str
    shard: Count


class DiskSpace(Answer):
    """The free space of a node's disk.

    Below `low_water_bytes` appends are refused, below half of that also changes by consumers.
    """

    free_bytes: int
    low_water_bytes: int
    appends_refused: bool
    consumers_refused: bool


class Ready(Answer):
    """The answer to the readiness probe of a node that serves requests."""

    status: Literal["ready"]
    node: str
    warnings: list[str]
    disk: DiskSpace


class NotReady(Answer):
    """The answer to the readiness probe of a node that does not serve requests, with the reasons."""

    status: Literal["not_ready"]
    node: str
    reasons: list[str]


class BundleSetting(Answer):
    """A setting of a node; for one that may be a secret, `value` only tells whether it is set."""

    value: Any
    is_default: bool


class BundleProblem(Answer):
    """A problem that a node sees, by the code that `/v1/health` has for it."""

    code: str
    topic: str
    is_critical: bool
    since: Time


class BundlePartition(Answer):
    """A replica on a node, in the node's report for support.

    Of a replica that takes no part in its group, only `topic`, `partition` and `state` are known.
    """

    topic: str
    partition: Count
    state: Literal["open", "stopped", "lost", "failed"]
    leader: str = ""
    leads: bool = False
    term: Count = 0
    recovering: bool = False
    start_offset: Count = 0
    end_offset: Count = 0
    committed_index: Count = 0
    last_index: Count = 0
    bytes: Count = 0
    damaged: Count = 0


class BundleLine(Answer):
    """A line of a process's log: `text` is its template in the program, `arguments` are the values in it.

    Only values that are numbers or known names are included, so that no data of users are.
    """

    at: Time
    level: str
    logger: str
    place: str
    text: str
    arguments: list[int | float | bool | str | None]
    error: str
    frames: list[str]


class BundleProcess(Answer):
    """A process of a node: the delays of its event loop, the stacks of its threads, the end of its log."""

    process: str
    pid: Count
    loop: dict[str, float]
    last_long_turn: list[str]
    threads: list[list[str]]
    log: list[BundleLine]


class NodeBundle(Answer):
    """A node's report for support: versions, settings, states, logs; without data of records or secrets."""

    node: str
    taken_at: Time
    wall_ms: int
    versions: dict[str, Any]
    settings: dict[str, BundleSetting]
    limits: dict[str, list[int]]
    disk: DiskSpace
    problems: list[BundleProblem]
    children: list[dict[str, Any]]
    processes: list[BundleProcess]
    silent: list[str]
    partitions: list[BundlePartition]
    metrics: list[str]
    left_out: dict[str, int]


class ProblemDocument(msgspec.Struct, kw_only=True):
    """The document of an error (RFC 9457): what is wrong with a request, or why it failed."""

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
