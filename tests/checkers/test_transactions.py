"""Sound transactions have no violations; each anomaly, put in by hand, is named, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.checkers import Attempt, Begun, check_transactions


def attempt(number: int, *, epoch: int = 1, outcome: str = "applied", asked_us: int | None = 0) -> Attempt:
    """Two records for each of two partitions."""
    return Attempt(
        sink="s",
        number=number,
        epoch=epoch,
        parts={
            partition: [f"s {number} {epoch} {partition} {place}" for place in (0, 1)] for partition in (0, 1)
        },
        asked_us=number * 100 if asked_us == 0 else asked_us,
        outcome=outcome,  # type: ignore[arg-type]
    )


@dataclass
class Seen:
    """Three batches, the last by a newer driver; somebody's own record lies between."""

    attempts: list[Attempt] = field(
        default_factory=lambda: [
            attempt(0),
            attempt(1, outcome="unknown"),
            attempt(2, outcome="refused"),
            attempt(2, epoch=2),
        ]
    )
    begun: list[Begun] = field(
        default_factory=lambda: [
            Begun(sink="s", epoch=1, told_us=-10),
            Begun(sink="s", epoch=2, told_us=190),
        ]
    )
    read: dict[int, list[str]] = field(
        default_factory=lambda: {
            partition: [
                *(f"s 0 1 {partition} {place}" for place in (0, 1)),
                "plain",
                *(f"s 1 1 {partition} {place}" for place in (0, 1)),
                *(f"s 2 2 {partition} {place}" for place in (0, 1)),
            ]
            for partition in (0, 1)
        }
    )
    ends: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 2), (1, 3), (1, 7)])
    committed: int = 2

    def found(self) -> set[str]:
        return {
            each.kind
            for each in check_transactions(
                self.attempts,
                self.begun,
                {partition: list(enumerate(values)) for partition, values in self.read.items()},
                ends=self.ends,
                committed={"s": self.committed},
            )
        }

    def drop(self, number: int, *partitions: int) -> None:
        for partition in partitions:
            self.read[partition] = [
                each for each in self.read[partition] if not each.startswith(f"s {number} ")
            ]

    def put(self, partition: int, *values: str, at: int = 99) -> None:
        self.read[partition][at:at] = values


def test_a_sound_history_has_no_violations() -> None:
    """Nor has one whose unknown commit did not take place, when nothing came behind it."""
    seen = Seen()
    assert set() == seen.found()
    seen.drop(2, 0, 1)
    seen.drop(1, 0, 1)
    del seen.attempts[2:]
    seen.committed = 0
    seen.ends = []
    assert set() == seen.found()


def missing(seen: Seen) -> None:
    seen.drop(2, 0, 1)
    seen.committed = 1


def missing_by_the_sink(seen: Seen) -> None:
    seen.committed = 3


def left_out(seen: Seen) -> None:
    seen.drop(1, 0, 1)


def told_less_than_is_there(seen: Seen) -> None:
    seen.committed = 1


def doubled(seen: Seen) -> None:
    seen.put(1, "s 0 1 1 0", "s 0 1 1 1")


def doubled_by_two_drivers(seen: Seen) -> None:
    seen.attempts[2] = attempt(2, outcome="unknown", asked_us=150)
    for partition in (0, 1):
        seen.put(partition, *(f"s 2 1 {partition} {place}" for place in (0, 1)), at=5)


def out_of_order(seen: Seen) -> None:
    seen.read[1][3:5], seen.read[1][5:7] = seen.read[1][5:7], seen.read[1][3:5]


def out_of_order_within(seen: Seen) -> None:
    seen.read[0][3:5] = reversed(seen.read[0][3:5])


def torn_over_partitions(seen: Seen) -> None:
    seen.drop(2, 1)


def torn_in_a_partition(seen: Seen) -> None:
    del seen.read[0][4]


def torn_by_another(seen: Seen) -> None:
    seen.put(0, "plain too", at=6)


def scattered(seen: Seen) -> None:
    seen.attempts[0].parts[2] = ["s 0 1 2 0"]
    seen.read[2] = ["s 0 1 2 0", "s 0 1 2 1"]
    seen.attempts[1].parts[0].append("s 0 1 2 1")
    seen.put(0, "s 0 1 2 1", at=5)


def aborted(seen: Seen) -> None:
    seen.attempts[3].outcome = "refused"


def older_behind_newer(seen: Seen) -> None:
    seen.begun = []
    seen.attempts[1].epoch = 3


def older_asked_later(seen: Seen) -> None:
    seen.begun[1].told_us = 50


def one_epoch_twice(seen: Seen) -> None:
    seen.begun.append(Begun(sink="s", epoch=2, told_us=300))


def end_inside(seen: Seen) -> None:
    seen.ends.append((1, 4))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (missing, "lost"),
        (missing_by_the_sink, "lost"),
        (left_out, "lost"),
        (told_less_than_is_there, "unknown"),
        (doubled, "duplicate"),
        (doubled_by_two_drivers, "duplicate"),
        (out_of_order, "reordered"),
        (out_of_order_within, "reordered"),
        (torn_over_partitions, "torn"),
        (torn_in_a_partition, "torn"),
        (torn_by_another, "torn"),
        (scattered, "scattered"),
        (aborted, "aborted"),
        (older_behind_newer, "fenced"),
        (older_asked_later, "fenced"),
        (one_epoch_twice, "fenced"),
        (end_inside, "inside"),
    ],
)
def test_each_anomaly_is_named(harm: Callable[[Seen], None], kind: str) -> None:
    """One is put in, and that one is found."""
    seen = Seen()
    harm(seen)

    assert {kind} == seen.found()
