"""The results of the job `stats` as plain values, from which its JSON and its chart are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.spark.pipelines.size_histogram import Bin


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in bytes of the values, or of the keys, of `count` records; `total` is their sum.

    `absent` is the number of further records: those without a key, or those whose value is stored apart. The
    other fields are None if `count` is 0.
    """

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
    """The load of one partition: its records, their bytes, its share of all records, first and last time."""

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
    """Records over time, in buckets of `width_ms` of which the first begins at `since_ms`.

    `before` and `after` count records outside of the buckets: 0, unless up to 1 % of the records at an end
    have times far from all others. The mean is over all buckets, the peak is that of the fullest; both are
    None if all records have the same time.
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
        """Return ``records`` or ``bytes`` of all partitions, by bucket."""
        columns = [getattr(each, what) for each in self.partitions]
        return [sum(column) for column in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key and its records. `share` is of records with a key. `partition` is None if it is in several."""

    key: str
    records: int
    share: float
    bytes: int
    partition: int | None
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The number of records of the key at this rank, and the share of all keys up to it.

    Rank 1 is the most frequent key. The share is of the records that have a key.
    """

    rank: int
    records: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys by frequency.

    `ranks` has the ranks that are powers of two, and the last one. `top_percent_keys` is the number of keys
    that are the most frequent 1 %, at least one if there are keys; `top_percent_share` is their share of the
    records with a key.
    """

    distinct: int
    keyless_records: int
    in_several_partitions: int
    top_percent_keys: int
    top_percent_share: float | None
    top: list[Key]
    ranks: list[Rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tag, its records, and their share of all records."""

    tag: str
    records: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Tags by frequency."""

    distinct: int
    untagged_records: int
    top: list[Tag]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The stats of a topic. Bytes are those of keys and values as appended, without values stored apart.

    `largest_over_mean` divides the records of the largest partition by the mean of all partitions, the empty
    ones included. Times are of the column `timestamp`: the producer's, else that of the append. An empty
    topic has None where there is no value.
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
