"""The sink's options and columns, checked: those of Kafka's sink where they mean the same. Pure.

What nobody knows is an error, as in the source. ``docs/spark.md`` has the list.
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

# Each option: "both", "stream" or "batch", where it means something.
SINK_OPTIONS: Final = {
    "topic": "both",
    "laminar.endpoints": "both",
    "laminar.token": "both",
    "laminar.timeoutMs": "both",
    "includeHeaders": "both",
    "txnAppId": "batch",
    "txnVersion": "batch",
    "gcFreeze": "both",
}
_HEADERS: Final = "array<struct<key:string,value:binary>>"
# Each column that can be written, and the types it may have, in Spark's words.
SINK_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (_HEADERS,),
    "tag": ("string",),
    "timestamp": ("timestamp",),
}
# What Spark itself adds to the options of a stream.
_SPARKS_OWN: Final = ("checkpointlocation", "queryname", "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """What was asked for. `transaction` is (sink, number) of a batch that must not be written twice;
    `checkpoint` is where Spark keeps that of a stream, if an option said so.
    """

    topic: str | None = None
    endpoints: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    timeout_ms: int = 120_000
    transaction: tuple[str, int] | None = None
    checkpoint: str | None = None
    gc_freeze: bool = True


def parse_sink(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """The options of a sink. Raises ValueError, which names the option."""
    by_lower = {name.lower(): value for name, value in given.items()}
    own = {name: value for name, value in given.items() if not (streaming and name.lower() in _SPARKS_OWN)}
    options = Given(own, streaming, SINK_OPTIONS)
    options.flag("includeHeaders", True)
    application = options.get("txnAppId")
    version = options.optional_number("txnVersion", least=0)
    if (application is None) is not (version is None):
        missing = "txnAppId" if application is None else "txnVersion"
        raise ValueError(f"option {missing} is missing: txnAppId and txnVersion are given together")
    if application is not None and not re.fullmatch(TOPIC_PATTERN, application):
        raise ValueError(f"option txnAppId: {application!r} is no name of a sink ({TOPIC_PATTERN})")
    topic = options.get("topic")
    if topic is not None and not topic.strip():
        raise ValueError("option topic is empty")
    return SinkOptions(
        topic=topic,
        endpoints=endpoints_of(options.get("laminar.endpoints")),
        token=options.get("laminar.token"),
        timeout_ms=options.number("laminar.timeoutMs", 120_000),
        checkpoint=by_lower.get("checkpointlocation") if streaming else None,
        transaction=None if application is None or version is None else (application, version),
        gc_freeze=options.flag("gcFreeze", True),
    )


def check_sink_schema(schema: StructType, *, topic: str | None) -> dict[str, int]:
    """The position of each column, by its proper name. ValueError names the one that is wrong or missing."""
    positions: dict[str, int] = {}
    for position, column in enumerate(schema.fields):
        name = column.name.lower()
        if name not in SINK_COLUMNS:
            raise ValueError(
                f"column {column.name} can not be written; a record has {', '.join(SINK_COLUMNS)}:"
                " select those, and put the rest into value (to_json, for instance)"
            )
        if name in positions:
            raise ValueError(f"column {name} is there twice")
        given = column.dataType.simpleString()
        if given not in SINK_COLUMNS[name]:
            raise ValueError(f"column {name} is {' or '.join(SINK_COLUMNS[name])}, not {given}")
        positions[name] = position
    if "value" not in positions:
        raise ValueError("column value is missing")
    if topic is None and "topic" not in positions:
        raise ValueError(
            "column topic is missing, and so is the option topic: one of them says where to write"
        )
    return positions
