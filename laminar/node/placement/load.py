"""The load of nodes and partitions, and the score by which nodes are compared.

A *measure* is one kind of load, such as bytes stored or appended. A node's *share* of a measure is its load
per unit of weight, divided by that of all nodes together: 1 is fair. Its *score* is the largest of its
shares, and not their sum: the measure with the largest share is the one that the node runs out of first. A
sum would need a price of one measure in another, and would hide a full disk under an idle processor. `SMALL`
is added to both sides of the division, so a cluster with next to no load has no score that differs from 1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import astuple

_MI = float(1 << 20)

HOTTEST = 64
"""Most partitions of one report."""

Measure = Literal[
    "appended_bytes_per_s", "written_bytes_per_s", "read_bytes_per_s", "requests_per_s", "stored_bytes"
]


class Load(msgspec.Struct, frozen=True):
    """The load of one partition on a node, or of the whole node. Rates are averages over about a minute."""

    appended_bytes_per_s: float = 0.0
    """Bytes appended to the partitions that the node leads: it checks them, and sends them to the others."""
    written_bytes_per_s: float = 0.0
    """Bytes written to the logs of all replicas, led here or not."""
    read_bytes_per_s: float = 0.0
    requests_per_s: float = 0.0
    """Batches appended as leader, and reads that were answered."""
    stored_bytes: float = 0.0

    def __add__(self, other: Load) -> Load:
        """Return the sum of both loads."""
        return Load(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Load) -> Load:
        """Return this load less the other one."""
        return Load(*map(operator.sub, astuple(self), astuple(other)))

    @property
    def of_leader(self) -> Load:
        """The part of the load that moves to another node if that becomes the leader."""
        return Load(
            appended_bytes_per_s=self.appended_bytes_per_s,
            read_bytes_per_s=self.read_bytes_per_s,
            requests_per_s=self.requests_per_s,
        )


MEASURES: tuple[Measure, ...] = (
    "appended_bytes_per_s",
    "written_bytes_per_s",
    "read_bytes_per_s",
    "requests_per_s",
    "stored_bytes",
)

SMALL = Load(4 * _MI, 4 * _MI, 4 * _MI, 200.0, 1024 * _MI)
"""Loads of a node, for a weight of 1, that are small: they are added to each side of the division."""

_SMALL: tuple[float, ...] = astuple(SMALL)

_NOUNS: dict[Measure, str] = {
    "appended_bytes_per_s": "appended bytes",
    "written_bytes_per_s": "written bytes",
    "read_bytes_per_s": "read bytes",
    "requests_per_s": "requests",
    "stored_bytes": "stored bytes",
}


class PartitionLoad(msgspec.Struct, frozen=True):
    """The load of one replica; `partition` is "topic/number"."""

    partition: str
    leads: bool
    load: Load


class LoadReport(msgspec.Struct, frozen=True):
    """The load that a node has measured: its whole load, and its hottest partitions, at most `HOTTEST`.

    The partitions that are not named have little: each at most 1/`HOTTEST` of the sum that `hottest`
    compares.
    """

    node: str
    total: Load
    partitions: list[PartitionLoad] = []
    disk_is_low: bool = False


class Score(NamedTuple):
    """A node's score: the largest of its shares (1 is fair), and the measure that it is a share of."""

    value: float
    measure: Measure


class Scores:
    """Computes scores of nodes from their shares of one total load; a move between nodes keeps that total."""

    def __init__(self, totals: Mapping[str, Load], weights: Mapping[str, float]) -> None:
        """Compare the nodes in `totals`; each has a positive weight."""
        self._weights = weights
        weight = sum(weights[node] for node in totals) or 1.0
        sums = astuple(sum(totals.values(), Load()))
        self._fair = [each / weight + small for each, small in zip(sums, _SMALL, strict=True)]

    def shares(self, node: str, load: Load) -> list[float]:
        """Return the node's share of each of `MEASURES`, if it had this load."""
        weight = self._weights[node]
        return [
            (float(value) / weight + small) / fair
            for value, small, fair in zip(astuple(load), _SMALL, self._fair, strict=True)
        ]

    def of(self, node: str, load: Load) -> Score:
        """Return the node's score, if it had this load."""
        shares = self.shares(node, load)
        value = max(shares)
        return Score(value, MEASURES[shares.index(value)])


def hottest(partitions: Iterable[PartitionLoad], total: Load) -> list[PartitionLoad]:
    """Return the `HOTTEST` partitions of a node, by their largest part of its total, the hottest first."""

    def part(each: PartitionLoad) -> float:
        return max(
            float(value / (whole + small))
            for value, whole, small in zip(astuple(each.load), astuple(total), _SMALL, strict=True)
        )

    return sorted(partitions, key=lambda each: (-part(each), each.partition))[:HOTTEST]


def merged(node: str, reports: Sequence[LoadReport]) -> LoadReport:
    """Return the report of a whole node, merged from the reports of its shards."""
    total = sum((each.total for each in reports), Load())
    partitions = [partition for each in reports for partition in each.partitions]
    return LoadReport(
        node, total, hottest(partitions, total), disk_is_low=any(each.disk_is_low for each in reports)
    )


def amount(load: Load, measure: Measure) -> str:
    """Return the amount of one measure in a load, as text: "3.2 MiB/s of appended bytes"."""
    value: float = getattr(load, measure)
    if measure == "requests_per_s":
        return f"{value:.0f} {_NOUNS[measure]}/s"
    unit = "MiB" if measure == "stored_bytes" else "MiB/s"
    return f"{value / _MI:.1f} {unit} of {_NOUNS[measure]}"
