"""What `stats` tells of a topic, as plain values: its JSON, and what its picture is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.spark.pipelines.size_histogram import Bin


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of values, or of keys: of `count` records; `absent` have none, or one stored apart."""

    count: int
    absent: int
    total: int
    mean: float | None = None
    min: int | None = None
    p50: int | None = None
    p90: int | None = None
    p99: int | None = None
    max: int | None = None
    histogram: list[Bin] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One partition: its records, their bytes (keys and values), its share of all records, its times."""

    partition: int
    records: int
    bytes: int
    share: float
    first_ms: int | None
    last_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One partition over time: records and bytes in each bucket."""

    partition: int
    records: list[int]
    bytes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Counts in buckets of `width_ms`, the first from `since_ms`; `before` and `after` are outside of them.

    These are 0, unless up to 1 % of the records at an end have times far from all others. The mean is
    that of all buckets, the peak is the fullest; both are None if all have the same time.
    """

    since_ms: int
    width_ms: int
    buckets: int
    before: int
    after: int
    mean_per_s: float | None
    mean_bytes_per_s: float | None
    peak_per_s: float | None
    peak_ms: int
    partitions: list[Series]

    def total(self, what: str) -> list[int]:
        """``records`` or ``bytes`` of all partitions, by bucket."""
        columns = [getattr(each, what) for each in self.partitions]
        return [sum(column) for column in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key; `share` is of the records that have one. `partition` is None if it is in several."""

    key: str
    records: int
    share: float
    bytes: int
    partition: int | None
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """How many records the key of this rank has, and what share the keys up to it have together."""

    rank: int
    records: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys by their records. `ranks` are powers of two and the last; the top 1 % is one key at least."""

    distinct: int
    keyless_records: int
    in_several_partitions: int
    top_percent_keys: int
    top_percent_share: float | None
    top: list[Key]
    ranks: list[Rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    tag: str
    records: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    distinct: int
    untagged_records: int
    top: list[Tag]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a topic holds. Bytes are those of keys and values as given, without values that are stored apart.

    `largest_over_mean` compares the partition with most records with the mean of all, also of empty ones.
    Times are of the column `timestamp`: the producer's, else that of the append. Of an empty topic, what has
    no value is None.
    """

    topic: str
    records: int
    bytes: int
    first_ms: int | None
    last_ms: int | None
    values: Sizes
    key_sizes: Sizes
    rates: Rates | None
    keys: Keys
    partitions: list[Load]
    largest_over_mean: float | None
    tags: Tags
