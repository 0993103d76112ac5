"""The JSON documents of requests and answers, as structs: what handlers read and write, and OpenAPI says.

Limits and descriptions stand beside the members. A member of a request that has a default may be left out;
every member of an answer is always there, unless its type has `UnsetType`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.names import TOPIC_PATTERN
from laminar.http.api.parameters import GROUP_PATTERN, ID_PATTERN, MAX_EPOCH, MAX_NUMBER, OFFSET_LIMIT
from laminar.wire.channels import MAX_DELAY_MS, MAX_NAMED, MAX_TIMEOUT_MS, ChannelSettings

MAX_PARTITIONS: Final = 4096
MAX_REPLICAS: Final = 7
MAX_OWNER: Final = 200
# Most characters of a pin's reason, and of a zone.
MAX_REASON: Final = 200
MAX_WEIGHT: Final = 1000
MAX_FINGERPRINT: Final = 200
# The largest number of stages of a batch in one partition, and of partitions that one batch may change.
MAX_STAGES: Final = 262_144
LOGICAL_PARTITIONS: Final = 65_536
# Most parts into which a partition is split by its records, and the longest time that a change may wait.
MAX_INTO: Final = 64
MAX_ROUTE_WAIT_MS: Final = 24 * 3_600_000
MAX_PARTS: Final = 16_384
SHORTEST_SESSION_MS: Final = 2_000
LONGEST_SESSION_MS: Final = 60_000

# The value of a stored setting. A newer node may have stored a setting that this node does not know.
Setting = int | str

_Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
_Id = Annotated[str, Meta(pattern=f"^{ID_PATTERN}$")]
_Count = Annotated[int, Meta(ge=0)]
_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
_Route = Annotated[int, Meta(description="Version of the key route.")]
_Settings = Annotated[dict[str, Setting], Meta(description="As TopicSettings.")]


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A document of a request: an unknown member is refused."""


class Answer(msgspec.Struct):
    """A document of an answer."""


# -- topics and partitions -------------------------------------------------------------------------------

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
_RetentionBytes = Annotated[
    int,
    Meta(ge=0, le=MAX_NUMBER, description="Sealed segments beyond this size are deleted. Not set: no bound."),
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


class TopicSettingsPatch(Request):
    """A merge patch of a topic's settings (RFC 7396): null removes a setting."""

    min_replicas: _MinReplicas | UnsetType | None = UNSET
    flush: _Flush | UnsetType | None = UNSET
    flush_interval_ms: _FlushIntervalMs | UnsetType | None = UNSET
    flush_interval_records: _FlushIntervalRecords | UnsetType | None = UNSET
    retention_ms: _RetentionMs | UnsetType | None = UNSET
    retention_bytes: _RetentionBytes | UnsetType | None = UNSET
    order: _Order | UnsetType | None = UNSET
    split_bytes_per_s: _SplitBytesPerS | UnsetType | None = UNSET


class NewTopic(Request):
    """A topic that is to be created."""

    partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | None,
        Meta(description="null: the node's `default_replicas`."),
    ] = None
    settings: TopicSettings = field(default_factory=TopicSettings)
    allow_fewer_replicas: bool = False


class TopicPatch(Request):
    """A change of a topic; without `replicas` their number stays."""

    settings: TopicSettingsPatch = field(default_factory=TopicSettingsPatch)
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | UnsetType = UNSET
    allow_fewer_replicas: bool = False


class Topic(Answer):
    """A topic."""

    topic: str
    partitions: int
    replicas: int
    replicas_placed: _Count
    settings: _Settings
    route: _Route
    state: Literal["creating", "live"]
    created: _Time
    version: int


class TopicPage(Answer):
    """A page of the list of topics; `next` is there if there are more."""

    topics: list[Topic]
    next: str | UnsetType = UNSET


class DeletedTopic(Answer):
    """A topic that was deleted."""

    topic: str
    state: Literal["deleted"] = field(default="deleted")


class CatchUpProgress(Answer):
    """Progress of a replica whose log is rebuilt from whole segments."""

    received_bytes: _Count
    source_bytes: _Count


class ReplicaStatus(Answer):
    """A replica of a partition; what is null was not reported by its node."""

    node: str
    url: str | None
    role: Literal["leader", "follower"]
    reachable: bool
    in_sync: bool
    reason: str
    state: Literal["made", "joining", "catching_up", "failed", "lost"]
    catch_up: CatchUpProgress | None
    recovering: bool | None
    abandoned: bool | None
    end_offset: _Count | None
    lag: int | None


class Leader(Answer):
    """The replica that leads a partition."""

    node: str
    url: str | None


class DamagedOffsets(Answer):
    """A range of offsets that are damaged on a node; a control entry has none."""

    node: str
    first_offset: _Count
    next_offset: _Count


class LeavingReplica(Answer):
    """A replica that was replaced and is still a member of the group."""

    node: str
    why: str


class Partition(Answer):
    """A partition; what is null is not known at the moment."""

    partition: _Count
    id: _Id
    state: Literal["creating", "live"]
    leader: Leader | None
    term: _Count | None
    start_offset: _Count | None
    end_offset: _Count | None
    bytes: _Count | None
    damaged: list[DamagedOffsets]
    replicas: list[ReplicaStatus]
    leaving: list[LeavingReplica]
    status: Annotated[
        Literal["waiting", "open", "sealing", "sealed"],
        Meta(description="Whether it takes records: not yet, yes, until a moment ago, or no more."),
    ]
    start: Annotated[int, Meta(description="The first of its logical partitions.")] = field(name="from")
    to: Annotated[int, Meta(description="The logical partition after its last.")]
    inputs: Annotated[list[_Count], Meta(description="The partitions that it follows.")]
    outputs: Annotated[list[_Count], Meta(description="The partitions that follow it.")]
    drained_by: list[str] | UnsetType = UNSET
    """Of one that has ended, if its leader answers: the cursors at its end."""
    not_drained_by: dict[str, _Count] | UnsetType = UNSET
    """The same for those that are not, and their positions."""


class KeyRange(Answer):
    """The logical partitions from `from` to before `to`, and the partition that has them."""

    start: _Count = field(name="from")
    to: _Count
    partition: _Count


class Partitions(Answer):
    """The partitions of a topic, the key ranges of its route, and how many it was created with.

    Their numbers may have gaps.
    """

    topic: str
    route: _Route
    partitions: list[Partition]
    ranges: list[KeyRange]
    created_with: _Count


class KeyRoute(Answer):
    """A version of the key route of a topic."""

    version: _Route
    logical_partitions: int
    ranges: list[KeyRange]


class RouteInput(Answer):
    """A partition that a change of a route ends, and its key range.

    `end` is its final end offset, and `sealed` the time of its end; null until its leader has reported them.
    A partition that is `reclaimed` has no records any more.
    """

    partition: _Count
    start: _Count = field(name="from")
    to: _Count
    end: _Count | None
    sealed: _Time | None
    reclaimed: bool


class RouteChange(Answer):
    """A change of a topic's route: `inputs` end, and `outputs` follow over the same keys.

    `version` is that of the route that it makes. `preparing`, it can be cancelled; `closing`, its inputs end;
    `done`, its route is current. With `strict` order a consumer reads the inputs to their ends before it
    reads an output.
    """

    id: _Count
    version: _Route
    order: Literal["strict", "weak"]
    state: Literal["preparing", "closing", "done"]
    begun: _Time
    wait_ms: _Count
    inputs: list[RouteInput]
    outputs: list[KeyRange]
    waits_for: Annotated[
        list[str] | UnsetType,
        Meta(description="What it waits for, as text for people; in the answers about one change."),
    ] = UNSET


class NewRoute(Request):
    """A change of a topic's route that is to begin: `inputs` are replaced by new partitions over their keys.

    One input is split at each of the logical partitions in `cuts`, or at such that its newest records are
    divided `into` that many parts; without either it moves to one new partition. Several inputs, which must
    be neighbours, are merged to one.
    """

    after: Annotated[int, Meta(ge=0, le=MAX_NUMBER, description="Version of the route that it replaces.")]
    inputs: Annotated[
        list[Annotated[int, Meta(ge=0, le=MAX_NUMBER)]], Meta(min_length=1, max_length=MAX_PARTITIONS)
    ]
    cuts: Annotated[
        list[Annotated[int, Meta(ge=1, le=LOGICAL_PARTITIONS - 1)]], Meta(max_length=MAX_PARTITIONS - 1)
    ] = []
    into: Annotated[int, Meta(ge=2, le=MAX_INTO)] | UnsetType = UNSET
    wait_ms: Annotated[
        int,
        Meta(ge=0, le=MAX_ROUTE_WAIT_MS, description="Cancelled if its inputs cannot be ended by then."),
    ] = 60_000
    abandon: Annotated[
        bool, Meta(description="Drop, then, uploads and unprepared stages that are in its way.")
    ] = False
    force: Annotated[
        bool, Meta(description="Only with weak order: open the outputs though an input has no leader.")
    ] = False
    avoid: Annotated[
        list[Annotated[str, Meta(max_length=200)]],
        Meta(max_length=1000, description="Nodes that are to hold no replica of an output."),
    ] = []


class KeyRoutes(Answer):
    """The present key route of a topic, its changes that are done, oldest first, and the one under way."""

    topic: str
    routes: list[KeyRoute]
    changes: list[RouteChange]
    change: RouteChange | None


class LossReport(Answer):
    """What accepting a loss means, or meant (docs/protocol.md#accepted-losses-and-trimming)."""

    topic: str
    partition: _Count
    accept_loss: bool
    answering: list[str]
    recovering: list[str]
    absent: list[str]
    abandoned: list[str]
    goes_on_from: str
    committed_offset: _Count
    kept_offset: _Count
    accepted: list[str]


# -- records ---------------------------------------------------------------------------------------------


class Placed(Answer):
    """Records of an append that a partition took."""

    partition: _Count
    offset: _Count
    count: _Count


class Durability(Answer):
    """How durable an append is."""

    replicas: _Count
    synced: bool
    flush: Annotated[str, Meta(extra_json_schema={"enum": ["commit", "interval"]})]


class Appended(Answer):
    """The receipt of an append."""

    appended: _Count
    placed: list[Placed]
    durable: Durability


class Accepted(Answer):
    """The answer to an append with `ack=accepted`: not durable yet."""

    durable: bool
    partition: _Count
    offset: _Count
    count: _Count
    term: _Count
    route: _Route
    committed: _Count
    when_durable: Durability


class FetchedRecord(Answer):
    """A record: text as `value`, other bytes as `value_base64`; of a large record the length alone."""

    offset: _Count | UnsetType = UNSET
    timestamp: _Time | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    value: str | UnsetType = UNSET
    value_base64: str | UnsetType = UNSET
    value_bytes: _Count | UnsetType = UNSET
    tag: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET


class FetchedRecords(Answer):
    """Records of a fetch, and the offset to continue from."""

    records: list[FetchedRecord]
    next_offset: _Count


class DeletedRecords(Answer):
    """What a deletion of records removed, or would remove."""

    topic: str
    partition: _Count
    before: _Count
    dry_run: bool
    deleted: _Count
    from_offset: _Count
    start_offset: _Count
    rounded_down: bool
    held_back_by: list[str]


class Offsets(Answer):
    """An offset of a partition, with the time of its batch if there is one, and the partition's bounds."""

    offset: _Count
    timestamp: _Time | None
    start_offset: _Count
    end_offset: _Count


class SealedSegment(Answer):
    """A sealed segment and its SHA-256."""

    first_index: _Count
    last_index: _Count
    digest: str


class Digest(Answer):
    """The SHA-256 of a replica's committed log from `start_index` to `to_index`."""

    node: str
    committed_index: _Count
    last_index: _Count
    term: _Count
    to_index: _Count
    start_index: _Count
    digest: str
    segments: list[SealedSegment]


class ProducerProgress(Answer):
    """The progress of a producer in a partition; `sequence` is not durable yet, `committed_sequence` is.

    `sealed`: the partition takes no more records, so this is the producer's last word there.
    """

    topic: str
    partition: _Count
    producer: _Id
    epoch: _Epoch
    sequence: Annotated[int, Meta(ge=-1)]
    committed_sequence: Annotated[int, Meta(ge=-1)]
    checkpoint: _Count
    floor: _Count
    sealed: bool = False


class UploadedPart(Answer):
    """A part of an upload that is stored."""

    upload: str
    part: _Count
    size_bytes: _Count


# -- cursors ---------------------------------------------------------------------------------------------

_Owner = Annotated[str, Meta(max_length=MAX_OWNER)]
# Checked by the handler, whose refusal names the partition.
_Position = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": OFFSET_LIMIT - 1})]


_Positions = Annotated[dict[str, _Position], Meta(max_length=MAX_PARTITIONS)]


class CursorChange(Request):
    """A change of a cursor: `positions` by partition number, or `begin`, or `rewind`.

    `begin` and `rewind` name a place: `earliest`, `latest` or a time. `begin` sets the cursor where it is not
    set yet; `rewind` sets it in all partitions, or those that it names, also where it is owned.
    """

    positions: _Positions | UnsetType = UNSET
    expected: dict[str, _Position | None] | None = None
    owner: _Owner = ""
    expected_owner: _Owner | None = None
    begin: str | UnsetType = UNSET
    rewind: str | _Positions | UnsetType = UNSET


class Cursor(Answer):
    """A cursor: by partition its position, its lag and its owner."""

    topic: str
    cursor: str
    positions: dict[str, _Count]
    lag: dict[str, _Count]
    total_lag: _Count
    overtaken: bool
    overtaken_by: dict[str, _Count]
    owners: dict[str, str]
    changed: _Time
    ends: dict[str, _Count] | UnsetType = UNSET
    """The final ends of the partitions that take no more records; left out if there are none."""
    waits_for: dict[str, dict[str, _Count]] | UnsetType = UNSET
    """By partition those before it, with their ends, that are to be acknowledged before it is read."""


class CursorPage(Answer):
    """A page of the list of a topic's cursors; `next` is there if there are more."""

    topic: str
    cursors: list[Cursor]
    next: str | UnsetType = UNSET


# -- channels --------------------------------------------------------------------------------------------

_ChannelSettings = Annotated[
    dict[str, Any], Meta(description="As ChannelSettings, without those that have their default.")
]


class NewChannel(Request):
    """A channel that is to be created."""

    settings: ChannelSettings = field(default_factory=ChannelSettings)


class ChannelPatch(Request):
    """A merge patch of a channel's settings (RFC 7396): null sets the default."""

    settings: Annotated[dict[str, Any], Meta(description="As ChannelSettings, or null.")] = {}


class ChannelPartition(Answer):
    """Where a channel stands in one partition.

    `version`: of the settings in force. `next`: the first record that was never given out; `end`: the
    partition's end offset. `depth`: at most that many records are to be given out yet. `aside`: records that
    wait for their next attempt. `lost`: records that were trimmed before they were done. `oldest_age_ms`:
    since the oldest record was appended that is neither done nor dead; null: there is none. `blocked`: too
    many are out or aside for new ones.
    """

    version: _Count
    next: _Count
    end: _Count
    depth: _Count
    out: _Count
    aside: _Count
    dead: _Count
    lost: _Count
    oldest_age_ms: _Count | None
    blocked: bool


class Channel(Answer):
    """A channel, with sums over the partitions whose leaders answered, and the oldest age.

    `opening`: the partitions where it is not open yet. `unanswered`: those whose leaders did not answer.
    `partitions` is left out in a list.
    """

    topic: str
    channel: str
    id: _Count
    version: _Count
    settings: _ChannelSettings
    depth: _Count
    out: _Count
    aside: _Count
    dead: _Count
    lost: _Count
    oldest_age_ms: _Count | None
    blocked: bool
    opening: list[int]
    unanswered: list[int]
    partitions: dict[str, ChannelPartition] | UnsetType = UNSET


class ChannelPage(Answer):
    """A page of the list of a topic's channels; `next` is there if there are more."""

    topic: str
    channels: list[Channel]
    next: str | UnsetType = UNSET


MAX_JOBS: Final = 10_000
MAX_NAMED_RECORDS: Final = MAX_JOBS
"""Most records that a request about a channel names."""
_Token = Annotated[
    str, Meta(max_length=120, description="PARTITION:OFFSET:DELIVERY, or PARTITION:FIRST-LAST:DELIVERY")
]
_Tokens = Annotated[list[_Token], Meta(max_length=MAX_NAMED)]
_Delay = Annotated[int, Meta(ge=0, le=MAX_DELAY_MS)]
_Timeout = Annotated[int, Meta(ge=1_000, le=MAX_TIMEOUT_MS)]


class Nack(Request):
    """Records that failed: tried again after `delay_ms`, or as the channel says; the attempt counts."""

    token: _Token
    delay_ms: _Delay | None = None
    reason: Annotated[str, Meta(max_length=200)] = ""


class Extension(Request):
    """Records that need more time: `timeout_ms` from now on, or as at first."""

    token: _Token
    timeout_ms: _Timeout | None = None


class Acks(Request):
    """What became of records that were given out. What is released comes again at once, and was not tried."""

    ack: _Tokens = []
    nack: Annotated[list[Nack], Meta(max_length=MAX_NAMED)] = []
    release: _Tokens = []
    extend: Annotated[list[Extension], Meta(max_length=MAX_NAMED)] = []


class Settled(Answer):
    """How many records are as was asked; and the tokens whose delivery is not out any more."""

    done: _Count
    late: list[str]


class Receive(Request):
    """A request for records of a channel: up to `max`, after up to `wait_ms`, each for `timeout_ms`.

    `settle` is carried out first.
    """

    max: Annotated[int, Meta(ge=1, le=MAX_JOBS)] = 32
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0
    timeout_ms: _Timeout | None = None
    settle: Acks | UnsetType = UNSET


class Received(Answer):
    """Records that were given out: as a fetch has them, each with its partition, token and attempt."""

    jobs: list[dict[str, Any]]
    settled: Settled | UnsetType = UNSET


class Position(Request):
    """Where a channel gives out from now on: a place in all partitions, or offsets by partition number.

    `drop`: what is out or waits to be tried again ends, except the dead.
    """

    at: str | UnsetType = UNSET
    positions: _Positions | UnsetType = UNSET
    drop: bool = False


class Positioned(Answer):
    """By partition the offset from which a channel gives out."""

    positions: dict[str, _Count]


class AsideJob(Answer):
    """A record that is aside. `at`: when it is tried again; of a dead one, when it died."""

    partition: int
    offset: _Count
    token: str
    attempts: _Count
    at: _Time
    waits_for_key: bool
    reason: str


class AsidePage(Answer):
    """A page of the records that are aside, or dead; `next` is there if there are more."""

    jobs: list[AsideJob]
    next: str | UnsetType = UNSET


class DeadChange(Request):
    """What to do with dead records: tokens, or ``all``."""

    replay: _Tokens | str | UnsetType = UNSET
    drop: _Tokens | str | UnsetType = UNSET


class DeadChanged(Answer):
    """How many of them were dead."""

    count: _Count


# -- groups ----------------------------------------------------------------------------------------------


class Renewal(Request):
    """A member's next session in its group."""

    mode: Literal["clustering", "broadcast"] = "clustering"
    session_ms: Annotated[int, Meta(ge=SHORTEST_SESSION_MS, le=LONGEST_SESSION_MS)] = 6_000
    routes: bool = False
    """Whether the member goes over changes of the topic's route."""


class MemberState(msgspec.Struct, frozen=True):
    """A live member of a group."""

    member: Annotated[str, Meta(pattern=f"^{GROUP_PATTERN}$")]
    mode: str
    session_ms: int
    seen_ms_ago: _Count


class Group(Answer):
    """A group: its live members and its cursors."""

    topic: str
    group: str
    mode: str | None
    forming: bool
    members: list[MemberState]
    cursors: list[Cursor]


class RenewedMember(Answer):
    """A member whose session was renewed, and all live members."""

    topic: str
    group: str
    member: str
    mode: str
    session_ms: int
    forming: bool
    members: list[MemberState]
    route: _Count


# -- producers and sinks ---------------------------------------------------------------------------------


class NewProducer(Request):
    """A producer that is to begin: `name`, if any, is written as a topic's."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOPIC_PATTERN}$"})] | None = None


class Producer(Answer):
    """A producer's id and epoch."""

    producer: _Id
    epoch: _Epoch
    name: str | None


class Sink(Answer):
    """A sink; `committed` is the number of the last batch that was decided."""

    sink: str
    epoch: _Epoch
    committed: _Number | None
    publishing: bool
    fingerprint: str | None
    once: bool
    deleting: bool
    changed: _Time


class SinkPage(Answer):
    """A page of the list of sinks; `next` is there if there are more."""

    sinks: list[Sink]
    next: str | UnsetType = UNSET


class Staged(Answer):
    """A stage that is stored."""

    topic: str
    partition: _Count
    stage: _Number
    count: _Count


class Prepare(Request):
    """Stages of a batch in one partition that are to be kept for its commit."""

    epoch: _Epoch
    topic: str
    partition: _Number
    stages: Annotated[list[_Number], Meta(min_length=1, max_length=MAX_STAGES)]


class Prepared(Answer):
    """How many stages of a batch are kept in a partition."""

    topic: str
    partition: _Count
    prepared: _Count


class CommitPart(Request):
    """What a batch commits in one partition: its stages, or how many were prepared."""

    topic: str
    partition: _Number
    stages: list[_Number] = []
    prepared: _Number = 0


class Commit(Request):
    """A commit of a batch; `fingerprint` tells this batch from others."""

    epoch: _Epoch
    parts: Annotated[list[CommitPart], Meta(max_length=MAX_PARTS)]
    fingerprint: Annotated[str, Meta(max_length=MAX_FINGERPRINT)] = ""


class Committed(Answer):
    """The outcome of a commit."""

    sink: str
    number: _Number
    result: Literal["applied", "already"]


# -- the cluster and its nodes ---------------------------------------------------------------------------


class ShardAddress(Answer):
    """A shard of a node."""

    shard: _Count
    url: str


class Node(Answer):
    """A node.

    `start` is the number of the start of its data folder that the catalog knows of, `code_version` the
    highest code version that its program knows.
    """

    node: str
    url: str
    peer: str
    shards: list[ShardAddress]
    weight: float
    status: str
    alive: bool
    rolled_back: bool
    start: _Count
    code_version: _Count


class Nodes(Answer):
    """The nodes of the cluster."""

    nodes: list[Node]


class Cluster(Answer):
    """The cluster as the node that answers sees it; `code_version` is the one that is enabled."""

    cluster_id: str | None
    version: int
    catalog_leader: str
    insecure: bool
    code_version: _Count
    nodes: list[Node]


# -- administration --------------------------------------------------------------------------------------

_Reason = Annotated[str, Meta(min_length=1, max_length=MAX_REASON)]


class AdminNode(Answer):
    """A node as operators see it: what it announces, what was commanded, and what is on it.

    `version` is that of the last command, and its ETag. What is null is not known at the moment.
    """

    node: str
    url: str
    status: str
    alive: bool
    zone: str
    announced_zone: str
    set_zone: str | None
    weight: float
    announced_weight: float
    set_weight: float | None
    code_version: _Count
    draining: bool
    replicas: _Count
    leads: _Count | None
    catalog_voter: bool | None
    drain_waits_for: list[str]
    drain_blocked_by: list[str]
    safe_to_stop: bool
    version: int


class AdminNodes(Answer):
    """The nodes of the cluster as operators see them."""

    nodes: list[AdminNode]


class NodePatch(Request):
    """A merge patch of a node (RFC 7396): null makes what the node announces count again."""

    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] | UnsetType | None = UNSET
    zone: Annotated[str, Meta(max_length=MAX_REASON)] | UnsetType | None = UNSET


class RemovedNode(Answer):
    """A node that was removed from the cluster."""

    node: str
    state: Literal["removed"] = field(default="removed")


class NewPin(Request):
    """An explicit placement that is to hold from now on.

    As many nodes as the topic has replicas, unless `allow_other_number`.
    """

    nodes: Annotated[list[str], Meta(min_length=1, max_length=MAX_REPLICAS)]
    reason: _Reason
    allow_other_number: bool = False


class PlacementPin(Answer):
    """An explicit placement: these nodes hold the partition, whatever their rank is."""

    nodes: list[str]
    owner: str
    reason: str


class NewLeader(Request):
    """The node that should lead a partition."""

    node: str


class PlacedReplica(Answer):
    """A replica of a partition as the catalog records it."""

    node: str
    replica: _Count
    made: bool
    lost: bool
    abandoned: bool


class PartitionPlacement(Answer):
    """Where a partition is, and where it should be, as the catalog records it."""

    topic: str
    partition: _Count
    state: Literal["creating", "live"]
    version: int
    replicas: list[PlacedReplica]
    leaving: list[LeavingReplica]
    wanted: list[str]
    pin: PlacementPin | None
    preferred_leader: str | None
    why: str


class Operation(Answer):
    """A change that is under way: the catalog wants something that is not so yet.

    `done` of `total` are partitions of the cluster that the node does not hold (drain), partitions with as
    many replicas as asked for (replicas), nodes of the pin or of the wanted set that hold the partition
    (pin, move), or replicas (join, leave).
    """

    id: str
    kind: Literal["drain", "replicas", "pin", "move", "join", "leave"]
    what: str
    done: _Count
    total: _Count
    why: str
    blocked_by: list[str]
    cancel: str


class OperationPage(Answer):
    """A page of the list of operations; `next` is there if there are more."""

    operations: list[Operation]
    next: str | UnsetType = UNSET


class NodeLoad(Answer):
    """A node's load. Rates are averages of about a minute."""

    appended_bytes_per_s: float
    written_bytes_per_s: float
    read_bytes_per_s: float
    requests_per_s: float
    stored_bytes: float


class NodeBalance(Answer):
    """A node's load and score: the largest of its shares, that of `measure`. Null: not reported."""

    node: str
    weight: float
    score: float | None
    measure: str | None
    load: NodeLoad | None


class Balance(Answer):
    """What the balance by load would do, or with `done` did, and why; with `none`, why nothing.

    `threshold` and `hours` are the settings of the catalog's leader.
    """

    threshold: float
    hours: str
    move: Literal["none", "swap_leaders", "pin", "unpin"]
    partitions: list[str]
    because: str
    done: bool
    nodes: list[NodeBalance]


class CancelledOperation(Answer):
    """An operation whose wanted state was set back; what it had done already is undone by the planner."""

    id: str
    state: Literal["cancelled"] = field(default="cancelled")


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
    shard: _Count


class DiskSpace(Answer):
    """Free space of a node's disk; below the low-water mark appends are refused."""

    free_bytes: int
    low_water_bytes: int
    appends_refused: bool


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
