"""The source's options: the Kafka source's names wherever they mean the same. Pure.

Spark hands options over with lower-cased names. An unknown one is an error with a suggestion, so that a
misspelt ``maxOffsetsPerTriger`` does not become a query without a limit. ``docs/spark.md`` has the list.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from laminar.spark.read.offsets import AT_LATEST, EARLIEST, LATEST, OffsetSpec, Partition, parse_offsets

# Columns of the Kafka source, then `tag` and `traceId`, which only this source has; types in Spark's words. A
# query has `DEFAULT_COLUMNS` unless it names others.
COLUMNS: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
    "tag": "string",
    "traceId": "binary",
}
DEFAULT_COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")

# Each option, and the kind of query that takes it: "both", "stream" or "batch".
OPTIONS: Final = {
    "subscribe": "both",
    "subscribePattern": "both",
    "assign": "both",
    "laminar.endpoints": "both",
    "laminar.token": "both",
    "laminar.tokenFile": "both",
    "laminar.ca": "both",
    "laminar.certificate": "both",
    "laminar.key": "both",
    "laminar.timeoutMs": "both",
    "startingOffsets": "both",
    "startingTimestamp": "both",
    "startingOffsetsByTimestamp": "both",
    "startingOffsetsByTimestampStrategy": "both",
    "endingOffsets": "batch",
    "endingTimestamp": "batch",
    "endingOffsetsByTimestamp": "batch",
    "failOnDataLoss": "both",
    "largeRecords": "both",
    "maxOffsetsPerTrigger": "stream",
    "maxBytesPerTrigger": "stream",
    "minOffsetsPerTrigger": "stream",
    "maxTriggerDelay": "stream",
    "pollTimeoutMs": "stream",
    "cursor": "stream",
    "minPartitions": "both",
    "maxRecordsPerPartition": "both",
    "maxBytesPerPartition": "both",
    "pushdown": "batch",
    "replica": "batch",
    "includeHeaders": "both",
    "columns": "both",
    "tag": "both",
    "gcFreeze": "both",
}
# The options that name what to read; exactly one is given.
SUBJECTS: Final = ("subscribe", "subscribePattern", "assign")
# Options of the Kafka source that do not exist here, by their lower-cased names, and what to use instead.
_KAFKA_WORDS: Final = {
    "kafka.bootstrap.servers": "laminar.endpoints",
    "kafka.group.id": "cursor",
    "groupidprefix": None,
    "kafkaconsumer.polltimeoutms": "laminar.timeoutMs",
    "fetchoffset.numretries": "laminar.timeoutMs",
    "fetchoffset.retryintervalms": "laminar.timeoutMs",
}

# As much as Spark reads of a file in one task by default.
MAX_BYTES_PER_PARTITION: Final = 128 << 20

_SIZE: Final = re.compile(r"(\d+)\s*(?:([kmg])b?)?")
_UNITS_BITS: Final = {None: 0, "k": 10, "m": 20, "g": 30}
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?")
_UNITS_MS: Final = {
    "ms": 1,
    None: 1,
    "s": 1_000,
    "m": 60_000,
    "min": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a query, checked. Exactly one of `topics`, `pattern` and `assigned` is given.

    None means no limit, or that the option was not given. `start_beyond_is_error` says whether a start time
    after all records of a partition is an error; else the query starts at its end.
    """

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[Partition, ...] = ()
    endpoints: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca: str | None = field(default=None, repr=False)
    certificate: str | None = None
    key: str | None = None
    timeout_ms: int = 120_000
    start: OffsetSpec = AT_LATEST
    end: OffsetSpec = AT_LATEST
    start_beyond_is_error: bool = True
    fail_on_data_loss: bool = True
    large_records: str = "error"
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 15 * 60_000
    poll_timeout_ms: int = 250
    cursor: str | None = None
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_bytes_per_partition: int = MAX_BYTES_PER_PARTITION
    pushdown: bool = False
    replica: int | None = None
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    tag: str | None = None
    gc_freeze: bool = True

    @property
    def schema(self) -> str:
        """The selected columns as Spark's DDL."""
        return ", ".join(f"{name} {COLUMNS[name]}" for name in self.columns)


def parse(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Return the options of a query.

    With `streaming` None options of either kind of query are accepted: Spark asks for the schema before it
    is known which kind it will be.

    Raises:
        ValueError: for an option that is wrong or unknown, or that only the other kind of query takes; the
            message names the option.
    """
    options = Given(given, streaming, OPTIONS)
    topics, pattern, assigned = _subject(options)
    default_start = "earliest" if streaming is False else "latest"
    strategy = options.word("startingOffsetsByTimestampStrategy", "error", ("error", "latest"))
    start = _offset_spec(
        options, "starting", default_start, barred=None if streaming is not False else "latest"
    )
    end = _offset_spec(options, "ending", "latest", barred="earliest")
    return Options(
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        endpoints=endpoints_of(options.get("laminar.endpoints")),
        token=options.get("laminar.token"),
        token_file=options.get("laminar.tokenFile"),
        ca=options.get("laminar.ca"),
        certificate=options.get("laminar.certificate"),
        key=options.get("laminar.key"),
        timeout_ms=options.number("laminar.timeoutMs", 120_000),
        start=start,
        end=end,
        start_beyond_is_error=strategy == "error",
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        large_records=options.word("largeRecords", "error", ("error", "null", "fetch")),
        max_offsets_per_trigger=options.optional_number("maxOffsetsPerTrigger"),
        max_bytes_per_trigger=options.size_bytes("maxBytesPerTrigger"),
        min_offsets_per_trigger=options.optional_number("minOffsetsPerTrigger"),
        max_trigger_delay_ms=options.duration_ms("maxTriggerDelay", 15 * 60_000),
        poll_timeout_ms=options.number("pollTimeoutMs", 250, least=0),
        cursor=options.text("cursor"),
        min_partitions=options.optional_number("minPartitions"),
        max_records_per_partition=options.optional_number("maxRecordsPerPartition"),
        max_bytes_per_partition=options.size_bytes("maxBytesPerPartition") or MAX_BYTES_PER_PARTITION,
        pushdown=options.flag("pushdown", False),
        replica=options.optional_number("replica", least=0),
        columns=_columns(options),
        tag=options.text("tag"),
        gc_freeze=options.flag("gcFreeze", True),
    )


# Spark asks this source for the schema when a catalog table is created, but does not pass the table's options
# to a reader.
_NO_TABLES: Final = (
    "Spark passes the options of a catalog table to no Python source: use CREATE TEMPORARY VIEW name"
    " USING laminar OPTIONS (...) to read, and df.write.format('laminar') to write"
)


class Given:
    """The options that were given, with typed getters that take a name as `table` spells it.

    `table` has each option and the kind of query that takes it, as `OPTIONS` has; the options of the sink
    are another table.

    Raises:
        ValueError: for an unknown option, and for one that this kind of query does not take.
    """

    def __init__(self, given: Mapping[str, str], streaming: bool | None, table: Mapping[str, str]) -> None:
        self._table = table
        self._values: dict[str, str] = {}
        if any(key.lower() == "provider" for key in given):
            raise ValueError(_NO_TABLES)
        by_lower = {name.lower(): name for name in table}
        for key, value in given.items():
            name = by_lower.get(key.lower())
            if name is None:
                raise ValueError(_unknown(key, by_lower))
            where = table[name]
            if where != "both" and streaming is not None and (where == "stream") is not streaming:
                raise ValueError(f"option {name} is not supported in a {'stream' if streaming else 'batch'}")
            self._values[name] = value

    @property
    def is_empty(self) -> bool:
        """Whether no option was given."""
        return not self._values

    def get(self, name: str) -> str | None:
        """Return the option's text; None if it was not given."""
        assert name in self._table, f"{name} is not in the table of options"
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """Return the option's text; None if it was not given.

        Raises:
            ValueError: when it is empty.
        """
        found = self.get(name)
        if found == "":
            raise ValueError(f"option {name} is empty")
        return found

    def number(self, name: str, default: int, *, least: int = 1) -> int:
        """Return the option as an integer; `default` if it was not given.

        Raises:
            ValueError: when it is not one, or is below `least`.
        """
        found = self.optional_number(name, least=least)
        return default if found is None else found

    def optional_number(self, name: str, *, least: int = 1) -> int | None:
        """Return the option as an integer; None if it was not given.

        Raises:
            ValueError: when it is not one, or is below `least`.
        """
        text = self.get(name)
        if text is None:
            return None
        if not text.strip().isdecimal() or int(text) < least:
            raise ValueError(f"option {name} must be a number of at least {least}, not {text!r}")
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        """Return an option that is true or false; `default` if it was not given.

        Raises:
            ValueError: when it is neither.
        """
        return self.word(name, str(default).lower(), ("true", "false")) == "true"

    def word(self, name: str, default: str, words: tuple[str, ...]) -> str:
        """Return an option that must be one of `words`, in lower case; `default` if it was not given.

        Raises:
            ValueError: when it is another word.
        """
        text = (self.get(name) or default).strip().lower()
        if text not in words:
            raise ValueError(f"option {name} must be one of {', '.join(words)}, not {text!r}")
        return text

    def size_bytes(self, name: str) -> int | None:
        """Return a size, as 64m, in bytes; None if it was not given.

        Raises:
            ValueError: when it is not a size, or is 0.
        """
        text = self.get(name)
        if text is None:
            return None
        found = _SIZE.fullmatch(text.strip().lower())
        if found is None or int(found[1]) == 0:
            raise ValueError(f"option {name} must be a size like 500000, 64m or 1g, not {text!r}")
        return int(found[1]) << _UNITS_BITS[found[2]]

    def duration_ms(self, name: str, default_ms: int) -> int:
        """Return a duration, as 30s, in milliseconds; `default_ms` if it was not given.

        Raises:
            ValueError: when it is not a duration.
        """
        text = self.get(name)
        if text is None:
            return default_ms
        found = _DURATION.fullmatch(text.strip().lower())
        if found is None:
            raise ValueError(f"option {name} must be a duration like 500ms, 30s or 15m, not {text!r}")
        return int(found[1]) * _UNITS_MS[found[2]]


def _unknown(key: str, by_lower: Mapping[str, str]) -> str:
    if key.lower().startswith("kafka.") or key.lower() in _KAFKA_WORDS:
        ours = _KAFKA_WORDS.get(key.lower())
        return f"option {key} belongs to the Kafka source" + (f"; use {ours} here" if ours else "")
    near = difflib.get_close_matches(key.lower(), by_lower, n=1)
    return f"there is no option {key}" + (f"; did you mean {by_lower[near[0]]}?" if near else "")


def _subject(options: Given) -> tuple[tuple[str, ...], str | None, tuple[Partition, ...]]:
    """Return (topics, pattern, partitions), of which exactly one is given.

    Raises:
        ValueError: when none or several are given, or the one is wrong.
    """
    if len([way for way in SUBJECTS if options.get(way) is not None]) != 1:
        hint = f". {_NO_TABLES}" if options.is_empty else ""
        raise ValueError(f"give exactly one of the options {', '.join(SUBJECTS)}{hint}")
    subscribed, pattern, assigned = map(options.get, SUBJECTS)
    if subscribed is not None:
        topics = tuple(sorted({name.strip() for name in subscribed.split(",") if name.strip()}))
        if not topics:
            raise ValueError("option subscribe names no topic")
        return topics, None, ()
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"option subscribePattern: {pattern!r}: {error}") from None
        return (), pattern, ()
    assert assigned is not None
    try:
        named = json.loads(assigned)
        partitions = sorted({(str(topic), int(number)) for topic, many in named.items() for number in many})
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f'option assign must be JSON like {{"topic": [0, 1]}}, not {assigned!r}') from None
    if not partitions:
        raise ValueError("option assign names no partition")
    return (), None, tuple(partitions)


def _offset_spec(options: Given, side: str, default: str, *, barred: str | None) -> OffsetSpec:
    """Return where the query starts or ends, by the options whose names begin with `side`.

    ``...Timestamp`` takes precedence over ``...OffsetsByTimestamp``, which takes precedence over
    ``...Offsets``. `barred` is "latest" or "earliest" where that is not permitted, else None.

    Raises:
        ValueError: for a wrong option, and for a barred start or end.
    """
    timestamp = options.optional_number(f"{side}Timestamp", least=0)
    if timestamp is not None:
        return OffsetSpec("timestamp", time_ms=timestamp)
    option = f"{side}OffsetsByTimestamp"
    by_time = options.get(option)
    if by_time is not None:
        return OffsetSpec("timestamps", values=parse_offsets(by_time, option=option, names={}))
    option = f"{side}Offsets"
    text = (options.get(option) or default).strip()
    if text.lower() in ("earliest", "latest"):
        if text.lower() == barred:
            raise ValueError(f"option {option} of a batch cannot be {barred}")
        return OffsetSpec(text.lower())
    values = parse_offsets(text, option=option, names={"latest": LATEST, "earliest": EARLIEST})
    wrong = {"latest": LATEST, "earliest": EARLIEST}.get(barred or "")
    if wrong is not None and wrong in values.values():
        raise ValueError(f"option {option} of a batch cannot be {barred} ({wrong}) for any partition")
    return OffsetSpec("offsets", values=values)


def endpoints_of(text: str | None) -> tuple[str, ...]:
    """Return the URLs of a comma-separated list; ``host:port`` alone becomes an HTTP URL."""
    urls = [url.strip() for url in (text or "").split(",") if url.strip()]
    return tuple(url if ":/" in url or url.startswith("unix:") else f"http://{url}" for url in urls)


def _columns(options: Given) -> tuple[str, ...]:
    named = options.get("columns")
    if named is None:
        extra = ("headers",) if options.flag("includeHeaders", False) else ()
        return DEFAULT_COLUMNS + extra
    by_lower = {name.lower(): name for name in COLUMNS}
    names = [name.strip() for name in named.split(",") if name.strip()]
    unknown = [name for name in names if name.lower() not in by_lower]
    if unknown or not names:
        raise ValueError(
            f"option columns: there is no column {unknown[0] if unknown else ''!r}; use {', '.join(COLUMNS)}"
        )
    return tuple(by_lower[name.lower()] for name in names)
