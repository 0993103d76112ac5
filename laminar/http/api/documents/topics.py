"""Documents of topics and their settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.shared import (
    MAX_PARTITIONS,
    MAX_REPLICAS,
    Answer,
    Count,
    Request,
    RouteVersion,
    Setting,
    Time,
)
from laminar.http.api.parameters import MAX_NUMBER
from laminar.wire.trace import TRACED

_Settings = Annotated[dict[str, Setting], Meta(description="As TopicSettings.")]

_MinReplicas = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_REPLICAS,
        description="An append is refused while fewer replicas are in sync, and acknowledged when that "
        "many have it. Not set: a majority has it.",
    ),
]
_Flush = Annotated[
    Literal["commit", "interval"],
    Meta(description="An append is acknowledged: `commit`, on disk; `interval`, written, and synced later."),
]
_FlushIntervalMs = Annotated[
    int, Meta(ge=10, le=60_000, description="With `interval`: synced within this time. Not set: 500.")
]
_FlushIntervalRecords = Annotated[
    int,
    Meta(ge=1, le=100_000_000, description="With `interval`: synced after this many records at the latest."),
]
_Order = Annotated[
    Literal["strict", "weak"],
    Meta(
        description="When partitions split, merge or move: `strict` keeps the order of each key, `weak` does "
        "not, and waits for less. Not set: `strict`."
    ),
]
_SplitBytesPerS = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_NUMBER,
        description="A partition to which more is appended in each of ten minutes is split. Not set: never.",
    ),
]
_RetentionMs = Annotated[
    int, Meta(ge=1, le=MAX_NUMBER, description="Sealed segments are deleted at this age. Not set: never.")
]
_Trace = Annotated[
    str,
    Meta(
        pattern=TRACED,
        description="Which records have events in the trace: `all`, those whose `traceparent` is `sampled`, "
        "or a share, such as `0.01`. Not set: `off`.",
    ),
]
_RetentionBytes = Annotated[
    int,
    Meta(ge=0, le=MAX_NUMBER, description="Sealed segments beyond this size are deleted. Not set: no bound."),
]
_INDEX_TERM = "(key|trace_id|header:[^,\\x00-\\x1f]{1,100})"
_Index = Annotated[
    str,
    Meta(
        pattern=f"^({_INDEX_TERM}(,{_INDEX_TERM}){{0,3}})?\\Z",
        max_length=500,
        description="What searches find by an index: at most 4 of `key`, `trace_id`, `header:NAME`, with "
        "commas. Empty: nothing. Not set: `key,trace_id`.",
    ),
]
_Importing = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{32}$",
        description="Id of the import that fills the topic: requests without it in `Laminar-Import` are "
        "answered 503 `being_created`. Set only when the topic is created; removed, it is open.",
    ),
]


class TopicSettings(Request):
    """Settings of a topic; a setting that is left out has its default."""

    min_replicas: _MinReplicas | UnsetType = UNSET
    flush: _Flush | UnsetType = UNSET
    flush_interval_ms: _FlushIntervalMs | UnsetType = UNSET
    flush_interval_records: _FlushIntervalRecords | UnsetType = UNSET
    retention_ms: _RetentionMs | UnsetType = UNSET
    retention_bytes: _RetentionBytes | UnsetType = UNSET
    order: _Order | UnsetType = UNSET
    split_bytes_per_s: _SplitBytesPerS | UnsetType = UNSET
    index: _Index | UnsetType = UNSET
    importing: _Importing | UnsetType = UNSET
    trace: _Trace | UnsetType = UNSET


class TopicSettingsPatch(Request):
    """Changes of a topic's settings, as a merge patch (RFC 7396): null sets the default."""

    min_replicas: _MinReplicas | UnsetType | None = UNSET
    flush: _Flush | UnsetType | None = UNSET
    flush_interval_ms: _FlushIntervalMs | UnsetType | None = UNSET
    flush_interval_records: _FlushIntervalRecords | UnsetType | None = UNSET
    retention_ms: _RetentionMs | UnsetType | None = UNSET
    retention_bytes: _RetentionBytes | UnsetType | None = UNSET
    order: _Order | UnsetType | None = UNSET
    split_bytes_per_s: _SplitBytesPerS | UnsetType | None = UNSET
    index: _Index | UnsetType | None = UNSET
    importing: UnsetType | None = UNSET
    trace: _Trace | UnsetType | None = UNSET


class NewTopic(Request):
    """Request to create a topic."""

    partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | None,
        Meta(description="null: the node's `default_replicas`."),
    ] = None
    settings: TopicSettings = field(default_factory=TopicSettings)
    allow_fewer_replicas: bool = False


class TopicPatch(Request):
    """Request to change a topic; if `replicas` is left out, the number of replicas stays."""

    settings: TopicSettingsPatch = field(default_factory=TopicSettingsPatch)
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | UnsetType = UNSET
    allow_fewer_replicas: bool = False


class TopicSums(Answer):
    """Sums over the partitions of a topic, counted at their leaders only; some seconds old.

    `appended_records` counts all records ever appended. The counts of bytes appended and fetched begin with
    the start of the present leaders' processes, and may fall when another process becomes leader. `complete`
    is false while a partition has no leader that answers; all sums are too small then.
    """

    records: Count
    bytes: Count
    appended_records: Count
    appended_bytes: Count
    fetched_bytes: Count
    complete: bool


class Topic(Answer):
    """A topic; `stats` is there only in a list of topics, if it was requested with the sums."""

    topic: str
    partitions: int
    replicas: int
    replicas_placed: Count
    settings: _Settings
    route: RouteVersion
    state: Literal["creating", "live"]
    created: Time
    version: int
    stats: TopicSums | UnsetType = UNSET


class TopicPage(Answer):
    """A page of the list of topics, with `next` if there are more; `total` counts the topics of all pages.

    `silent` names the nodes that did not report all partitions they lead, if the request asked for `stats` or
    `having=cursors`.
    """

    topics: list[Topic]
    total: int
    next: str | UnsetType = UNSET
    silent: list[str] | UnsetType = UNSET


class DeletedTopic(Answer):
    """The answer to the deletion of a topic."""

    topic: str
    state: Literal["deleted"] = field(default="deleted")
