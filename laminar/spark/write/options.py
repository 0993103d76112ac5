"""The sink's options and columns, checked: those of Kafka's sink where they mean the same. Pure.

An unknown option or column is an error, as in the source. ``docs/spark.md`` has the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from laminar.http.api.names import TOPIC_PATTERN
from laminar.spark.read.options import Given, endpoints_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Each option, and the kind of query that takes it: "both", "stream" or "batch".
SINK_OPTIONS: Final = {
    "topic": "both",
    "laminar.endpoints": "both",
    "laminar.token": "both",
    "laminar.tokenFile": "both",
    "laminar.ca": "both",
    "laminar.certificate": "both",
    "laminar.key": "both",
    "laminar.timeoutMs": "both",
    "includeHeaders": "both",
    "txnAppId": "batch",
    "txnVersion": "batch",
    "gcFreeze": "both",
}
_HEADERS: Final = "array<struct<key:string,value:binary>>"
# Each column that can be written, with its possible types in Spark's words.
SINK_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
    "tag": ("string",),
    "timestamp": ("timestamp",),
    "traceId": ("binary",),
}
_TYPES: Final = {name.lower(): types for name, types in SINK_COLUMNS.items()}
# Options that Spark itself adds to those of a stream.
_SPARKS_OWN: Final = ("checkpointlocation", "queryname", "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a write, checked.

    `transaction` is (sink, number) of a batch that must not be written twice, from ``txnAppId`` and
    ``txnVersion``; None without them, and in a stream. `checkpoint` is the folder of a stream's checkpoint,
    if an option names it.
    """

    topic: str | None = None
    endpoints: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = None
    timeout_ms: int = 120_000
    transaction: tuple[str, int] | None = None
    checkpoint: str | None = None
    gc_freeze: bool = True


def parse_sink(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Return the options of a sink.

    Raises:
        ValueError: for an option that is wrong or unknown; it names the option.
    """
    by_lower = {name.lower(): value for name, value in given.items()}
    own = {name: value for name, value in given.items() if not (streaming and name.lower() in _SPARKS_OWN)}
    options = Given(own, streaming, SINK_OPTIONS)
    options.flag("includeHeaders", True)
    application = options.get("txnAppId")
    version = options.optional_number("txnVersion", least=0)
    if (application is None) is not (version is None):
        missing = "txnAppId" if application is None else "txnVersion"
        raise ValueError(f"option {missing} is missing: give txnAppId and txnVersion together")
    if application is not None and not re.fullmatch(TOPIC_PATTERN, application):
        raise ValueError(f"option txnAppId: {application!r} is not a valid name of a sink ({TOPIC_PATTERN})")
    topic = options.get("topic")
    if topic is not None and not topic.strip():
        raise ValueError("option topic is empty")
    return SinkOptions(
        topic=topic,
        endpoints=endpoints_of(options.get("laminar.endpoints")),
        token=options.get("laminar.token"),
        token_file=options.get("laminar.tokenFile"),
        ca=options.get("laminar.ca"),
        certificate=options.get("laminar.certificate"),
        key=options.get("laminar.key"),
        timeout_ms=options.number("laminar.timeoutMs", 120_000),
        checkpoint=by_lower.get("checkpointlocation") if streaming else None,
        transaction=None if application is None or version is None else (application, version),
        gc_freeze=options.flag("gcFreeze", True),
    )


def check_sink_schema(schema: StructType, *, topic: str | None) -> dict[str, int]:
    """Return the position of each column in the schema, by the column's lower-case name.

    Raises:
        ValueError: for a column that is unknown, of another type, or missing; it names the column.
    """
    positions: dict[str, int] = {}
    for position, column in enumerate(schema.fields):
        name = column.name.lower()
        if name not in _TYPES:
            raise ValueError(
                f"column {column.name} cannot be written; a record has {', '.join(SINK_COLUMNS)}:"
                " select those, and put the rest into value, for instance by to_json"
            )
        if name in positions:
            raise ValueError(f"column {name} is given twice")
        given = column.dataType.simpleString()
        if given not in _TYPES[name]:
            raise ValueError(f"column {column.name} must be {' or '.join(_TYPES[name])}, not {given}")
        positions[name] = position
    if "value" not in positions:
        raise ValueError("column value is missing")
    if topic is None and "topic" not in positions:
        raise ValueError("there is neither a column topic nor an option topic: give one of them")
    return positions
