"""The parameters of requests, in paths, queries and headers, each with its type and limits.

Each route names the parameters that it reads (`routes`). The OpenAPI document, the check for unknown
parameters, and the refusal of headers that a route does not support are made from these rows. The handlers
check the same limits: they import them from here.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from laminar.http.api.names import TOPIC_PATTERN
from laminar.wire.delayed import ID_TEXT, MAX_DELAY_MS

# Largest values of numbers in requests. Offsets fit into a JSON number without loss (RFC 8259, section 6).
OFFSET_LIMIT: Final = 2**53
MAX_NUMBER: Final = 2**53 - 1
MAX_EPOCH: Final = 2**32 - 1
# What a fetch may ask for.
MAX_FETCH_BYTES: Final = 32 * 1024 * 1024
MAX_FETCH_RECORDS: Final = 1_000_000
MAX_WAIT_MS: Final = 30_000
# A description of partitions asks other nodes, and waits no longer for them.
MAX_DESCRIBE_WAIT_MS: Final = 2_000
MAX_PAGE: Final = 1000
# From the year 1 to the year 9999.
LONGEST_MS: Final = 315_537_897_600_000
MAX_UPLOAD_PARTS: Final = 50_000
MAX_LOGICAL: Final = 65_535
GROUP_PATTERN: Final = r"[A-Za-z0-9._-]{1,90}"
ID_PATTERN: Final = r"[0-9a-f]{32}"


class Parameter(NamedTuple):
    """A parameter of requests: `place` is ``query``, ``path`` or ``header``; `schema` is a JSON Schema."""

    name: str
    schema: dict[str, Any]
    description: str
    place: str = "query"
    required: bool = False


def whole(minimum: int, maximum: int) -> dict[str, Any]:
    """Return the JSON Schema of a whole number from `minimum` to `maximum`, both included."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def matching(pattern: str) -> dict[str, Any]:
    """Return the JSON Schema of a text that matches `pattern` as a whole."""
    return {"type": "string", "pattern": f"^(?:{pattern})$"}


def one_of(*values: str) -> dict[str, Any]:
    """Return the JSON Schema of a text that is one of `values`."""
    return {"type": "string", "enum": list(values)}


def _path(name: str, schema: dict[str, Any], description: str) -> Parameter:
    return Parameter(name, schema, description, "path", required=True)


def _header(name: str, schema: dict[str, Any], description: str) -> Parameter:
    return Parameter(name, schema, description, "header")


def needed(parameter: Parameter) -> Parameter:
    """Return a copy of `parameter` that is required, for a route that refuses requests without it."""
    return parameter._replace(required=True)


TEXT: Final = {"type": "string"}
TIME: Final = {
    "type": "string",
    "description": "RFC 3339 with an offset from UTC, or milliseconds since 1970.",
}
FLAG: Final = one_of("true", "false")
_NAME: Final = matching(rf"(?!\.{{1,2}}$){TOPIC_PATTERN}")

# The parameters in path templates, by name.
PATH: Final = {
    row.name: row
    for row in (
        _path("topic", _NAME, "Name of the topic."),
        _path("partition", whole(0, 999_999_999), "Number of the partition, from 0."),
        _path("offset", whole(0, OFFSET_LIMIT - 1), "Offset of the record."),
        _path("producer", matching(ID_PATTERN), "Id of the producer."),
        _path("upload", _NAME, "Name of the upload, which the client chooses."),
        _path("part", whole(0, MAX_UPLOAD_PARTS - 1), "Number of the part, from 0."),
        _path("cursor", _NAME, "Name of the cursor."),
        _path("channel", _NAME, "Name of the channel."),
        _path("delayed", matching(ID_TEXT), "Id of the delayed record."),
        _path("group", matching(rf"(?!\.{{1,2}}$){GROUP_PATTERN}"), "Name of the group."),
        _path("member", matching(rf"(?!\.{{1,2}}$){GROUP_PATTERN}"), "Name of the member of the group."),
        _path("sink", _NAME, "Name of the sink."),
        _path("number", whole(0, MAX_NUMBER), "Number of the batch of the sink."),
        _path("version", whole(0, MAX_NUMBER), "Version of the key route."),
        _path("node", TEXT, "Name of the node."),
        _path("operation", TEXT, "Id of the operation."),
        _path("token", matching("[0-9a-f]{16}"), "Id of the token, which is a part of its text."),
        _path("file", matching(r"[A-Za-z0-9.-]{1,60}"), "Name of a file of the console."),
        _path("principal", matching(rf"{TOPIC_PATTERN}|\*"), "Name of the principal, or `*`."),
    )
}

LISTING: Final = (
    Parameter("prefix", TEXT, "Return only names that begin with this."),
    Parameter("limit", whole(1, MAX_PAGE) | {"default": 100}, "Return at most this many names."),
    Parameter("after", TEXT, "Return names after this one: `next` of the page before."),
)
TOPIC_SORTS: Final = ("name", "records", "bytes", "appended_records", "appended_bytes", "fetched_bytes")
TOPIC_HAVING: Final = ("channels", "cursors")
TOPIC_LISTING: Final = (
    *LISTING,
    Parameter("contains", TEXT, "Return only names with this in them, in small or capital letters."),
    Parameter("sort", one_of(*TOPIC_SORTS), "Sort by name, or by a sum, the largest first."),
    Parameter("stats", FLAG, "With sums over each topic's partitions, which may be 10 s old."),
    Parameter("having", one_of(*TOPIC_HAVING), "Only topics that have some; for cursors it may be 10 s old."),
)
READY_REPLICAS: Final = Parameter(
    "replicas", one_of("any", "current"), "`current`: 503 also while replicas of the node have not caught up."
)
METRICS_DETAIL: Final = (
    Parameter("detail", one_of("none", "partitions"), "`partitions`: those of a topic, in place of sums."),
    Parameter("topic", _NAME, "The topic whose partitions are shown."),
)
JOB_LISTING: Final = (
    LISTING[1],
    Parameter("after", TEXT, "Return records after this place: `next` of the page before."),
    Parameter("key", TEXT, "Return only records with this key."),
    Parameter("tag", TEXT, "Return only records with this tag."),
    Parameter("reason", TEXT, "Return only records with this text in their reason."),
)
HISTORY: Final = (
    Parameter("after", TEXT, "Go on where the answer before ended: its `after`."),
    Parameter(
        "read",
        one_of("leader", "replica"),
        "`leader` (default): as a majority confirms it; `replica`: as any replica knows it.",
    ),
)
TRACE: Final = (
    Parameter("record", TEXT, "Of this record: `TOPIC/PARTITION/OFFSET`; of a delayed one `TOPIC/ID`."),
    Parameter("trace_id", matching(ID_PATTERN), "Of the records with this trace id."),
    Parameter("key", TEXT, "Of the records with this key, of all topics."),
    Parameter("after", TEXT, "Go on where the answer before ended: its `after`."),
    Parameter("limit", whole(1, 1_000) | {"default": 100}, "Return at most this many events."),
)
DELAYED_LISTING: Final = (
    LISTING[1],
    Parameter("after", TEXT, "Return records after this one: `next` of the page before."),
    Parameter("from", TIME, "Return records that are due at this time or later."),
    Parameter("to", TIME, "Return records that are due before this time."),
    Parameter("key", TEXT, "Return only records with this key."),
    Parameter("bucket_ms", whole(1, LONGEST_MS), "Count the records by spans of this length instead."),
)
_ID: Final = Parameter("id", matching(ID_PATTERN), "Refuse with 410 if the partition has another id.")
WAIT: Final = Parameter("wait_ms", whole(0, MAX_WAIT_MS) | {"default": 0}, "Wait up to this long.")
EPOCH: Final = Parameter("epoch", whole(0, MAX_EPOCH), "Epoch of the producer or sink.")

FETCH: Final = (
    Parameter(
        "offset",
        {"anyOf": [{"type": "string", "enum": ["earliest", "latest"]}, whole(0, OFFSET_LIMIT - 1)]},
        "Begin here; `earliest` if not given.",
    ),
    Parameter("since", TIME, "Begin at the first batch that was appended at this time or later."),
    Parameter("to", whole(0, OFFSET_LIMIT), "End before this offset."),
    Parameter("limit", whole(1, MAX_FETCH_RECORDS), "Return at most this many records."),
    Parameter("max_bytes", whole(1, MAX_FETCH_BYTES) | {"default": 1 << 20}, "Read about this many bytes."),
    WAIT,
    Parameter("tag", TEXT, "Return only records with this tag."),
    Parameter("read", one_of("replica", "leader"), "`leader` confirms the end with a majority."),
    Parameter("min_offset", whole(0, OFFSET_LIMIT), "Refuse a replica that ends before this offset."),
    Parameter("fields", TEXT, "Return only these members or columns, separated by commas."),
    Parameter("on_damage", one_of("fail", "skip"), "`skip` continues after damaged records."),
    _ID,
)
RECORD: Final = (
    Parameter("key", TEXT, "Key of the record."),
    Parameter("tag", TEXT, "Tag of the record."),
    Parameter("timestamp", TIME, "Time of the record."),
    Parameter("trace_id", matching(ID_PATTERN), "Trace id of the record."),
    Parameter("key_from", TEXT, "JSON pointer to the key in each record (RFC 6901)."),
    Parameter("tag_from", TEXT, "JSON pointer to the tag in each record."),
)
DELAY: Final = (
    Parameter("deliver_at", TIME, "Readers get the record at this time."),
    Parameter("delay_ms", whole(0, MAX_DELAY_MS), "Readers get the record after this time."),
)
RECORD_HEADERS: Final = (
    _header("Laminar-Tag", TEXT, "Tag of the record, percent-encoded."),
    _header("traceparent", TEXT, "W3C Trace Context: the trace of records that name none of their own."),
)
LOGICAL: Final = Parameter("logical", whole(0, MAX_LOGICAL), "Logical partition that chooses the partition.")
ACK: Final = Parameter("ack", one_of("committed", "accepted"), "`accepted`: answer 202 before it is durable.")
BEFORE: Final = Parameter("before", whole(0, OFFSET_LIMIT), "Delete the records before this offset.")
DRY_RUN: Final = Parameter("dry_run", FLAG, "Report what would be deleted, and delete nothing.")
ACCEPT_LOSS: Final = Parameter("accept_loss", FLAG, "Accept the loss; without it, report what would be lost.")
EMPTY: Final = Parameter("empty", FLAG, "Where no copy is left, go on without any record.")
READ_REPLICA: Final = Parameter(
    "read", one_of("replica", "leader"), "`leader` asks a majority of the catalog."
)
DESCRIBE_WAIT: Final = Parameter(
    "wait_ms", whole(0, MAX_DESCRIBE_WAIT_MS), "Return as soon as all leaders are known, or after this long."
)
OFFSETS: Final = (
    Parameter("at", TIME, "`earliest`, `latest`, or a time."),
    Parameter("read", one_of("leader", "replica"), "`leader` confirms the answer with a majority."),
    _ID,
)
ONE_RECORD: Final = (_ID,)
SEQUENCE: Final = Parameter("sequence", whole(0, MAX_NUMBER), "Sequence of the batch that is waited for.")
UPLOAD: Final = (
    Parameter("parts", whole(1, MAX_UPLOAD_PARTS), "How many parts were uploaded.", required=True),
    Parameter("size_bytes", whole(1, MAX_NUMBER), "Bytes of all parts together.", required=True),
    Parameter("crc32c", matching("[0-9a-f]{8}"), "CRC-32C of all bytes.", required=True),
)
TO_INDEX: Final = Parameter(
    "to_index",
    {"anyOf": [{"type": "string", "enum": ["committed"]}, whole(0, MAX_NUMBER)]},
    "Digest up to this log index; `committed` if not given.",
)
SINK_EPOCH: Final = Parameter("epoch", whole(1, MAX_EPOCH), "Begin this epoch or nothing.")
ONCE: Final = Parameter("once", FLAG, "The sink is for a single batch, and may be forgotten.")
STAGE: Final = (
    Parameter("topic", _NAME, "Topic to stage for.", required=True),
    Parameter("partition", whole(0, 999_999_999), "Partition to stage for.", required=True),
    Parameter("stage", whole(0, MAX_NUMBER), "Number of the stage, which the client chooses.", required=True),
    needed(EPOCH),
)
AFTER_VERSION: Final = Parameter(
    "after", whole(0, OFFSET_LIMIT), "Wait for a version after this one, else 304."
)

IF_MATCH: Final = _header("If-Match", TEXT, "ETag of the state that is changed; `*` for any.")
IF_MATCH_OFFSET: Final = _header("If-Match", TEXT, "Append only at this offset, in quotes.")
IF_NONE_MATCH: Final = _header("If-None-Match", TEXT, "ETag that is known already: 304 if it is the same.")
RANGE: Final = _header("Range", TEXT, "One range of bytes of a large value: `bytes=0-1023`.")
IF_RANGE: Final = _header("If-Range", TEXT, "Answer with all of the value unless its ETag is this.")
# Headers that make a request safe to repeat. Routes that do not name them refuse requests with them.
KEY: Final = _header("Idempotency-Key", matching("[!-~]{1,255}"), "Name of the request: done once.")
KEY_TIME: Final = _header("Laminar-Key-Time", TIME, "When the idempotency key was made.")
PRODUCER: Final = _header("Laminar-Producer", matching("[0-9a-fA-F]{32}"), "Id of the producer.")
PRODUCER_EPOCH: Final = _header("Laminar-Epoch", whole(0, MAX_EPOCH), "Epoch of the producer.")
PRODUCER_SEQUENCE: Final = _header("Laminar-Sequence", whole(0, 2**63 - 1), "Sequence of the batch.")
ROUTE: Final = _header(
    "Laminar-Route",
    whole(0, MAX_NUMBER),
    "Version of the route by which the partition of the keys was chosen.",
)
IMPORT: Final = _header(
    "Laminar-Import", matching("[0-9a-f]{32}"), "Id of the import that fills the topic: only it may use it."
)
GUARANTEES: Final = (KEY, KEY_TIME, PRODUCER, PRODUCER_EPOCH, PRODUCER_SEQUENCE)
