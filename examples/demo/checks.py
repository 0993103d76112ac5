"""The demo's checks, as pure functions of what was observed.

Each check takes observations and returns `Finding` objects. A finding is a claim with the faults that refute
it. The checks compare the observations as they are: none is corrected, left out, or merged with an equal one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from examples.demo.flights import Delays
from laminar.testing.history import Read, Sent, Violation, check_history, check_replicas

# A broken run may have thousands of faults. The first ones show of which kind they are.
SHOWN_FAULTS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim, and the faults that refute it. Without faults the claim held."""

    claim: str
    faults: Sequence[str] = ()

    @property
    def held(self) -> bool:
        """Whether no fault refutes the claim."""
        return not self.faults

    def lines(self) -> list[str]:
        """Return the lines to print: the claim, then its first `SHOWN_FAULTS` faults."""
        shown = [f"  {fault}" for fault in self.faults[:SHOWN_FAULTS]]
        if len(self.faults) > SHOWN_FAULTS:
            shown.append(f"  and {len(self.faults) - SHOWN_FAULTS:,} more")
        return [f"{'ok    ' if self.held else 'BROKEN'} {self.claim}", *shown]


def check_flights(sent: Sequence[Sent], read: Sequence[Read], *, flights: int) -> list[Finding]:
    """Check that all flights were acknowledged and read exactly once, each airport's in the file's order."""
    violations = check_history(sent, read, uncertain=())
    airports = len({each.key for each in sent})
    unsent = [] if len(sent) == flights else [f"{flights - len(sent):,} have no receipt"]
    return [
        Finding(f"all {flights:,} flights were acknowledged", unsent),
        Finding(
            f"all {len(sent):,} acknowledged flights were read back exactly once, nothing else was",
            _of(violations, "lost", "moved", "duplicate", "conflict", "unknown"),
        ),
        Finding(
            f"the flights of each of {airports} airports are in one partition, in the order of the file",
            _of(violations, "reordered", "scattered", "offsets"),
        ),
    ]


def _of(violations: Sequence[Violation], *kinds: str) -> list[str]:
    return [str(violation) for violation in violations if violation.kind in kinds]


def check_digests(digests: Mapping[int, Mapping[str, str]], *, replicas: int) -> Finding:
    """Check that each partition's committed log has the same bytes on every replica.

    `digests` is partition -> node -> digest.
    """
    faults = [str(violation) for violation in check_replicas(digests)]
    faults += [
        f"partition {partition} has a digest from {len(by_node)} replicas only: {', '.join(sorted(by_node))}"
        for partition, by_node in sorted(digests.items())
        if len(by_node) != replicas
    ]
    return Finding(f"the {replicas} replicas of each of {len(digests)} partitions are byte-identical", faults)


def check_balance(served_by: Mapping[int, Mapping[str, int]]) -> Finding:
    """Check that the replicas of at least one partition shared its reads.

    `served_by` is partition -> node -> number of batches.
    """
    shared = [partition for partition, by_node in served_by.items() if len(by_node) >= 2]
    claim = f"{len(shared)} of {len(served_by)} partitions were read from two replicas or more"
    return Finding(claim, [] if shared else ["every partition was read from one replica alone"])


def check_retries(retried: int, *, kills: int) -> Finding:
    """Check that an append was sent again: otherwise none was under way at a kill, which proves nothing."""
    times = "one kill" if kills == 1 else f"{kills} kills"
    claim = f"{retried:,} appends were sent again after {times} of a node"
    return Finding(claim, [] if retried else ["nothing was under way when the node died"])


def check_delays(found: Delays, expected: Delays, *, batches: int) -> Finding:
    """Check that Spark's groups, counts and sums are those computed from the file, over several batches."""
    faults = []
    for airport, month in sorted(found.keys() | expected.keys()):
        theirs, ours = found.get((airport, month)), expected.get((airport, month))
        if theirs != ours:
            faults.append(f"{airport} in {month}: Spark has {theirs}, the file has {ours}")
    claim = f"Spark's {len(found)} means by airport and month ({batches} micro-batches) equal the file's own"
    if batches < 2:
        faults.append(f"the stream came in {batches} micro-batch")
    return Finding(claim, faults)


def check_leftovers(pids: Collection[int]) -> Finding:
    """Check that no process that the demo started is alive; `pids` are those that are."""
    return Finding("no process is left over", [f"process {pid} is alive" for pid in pids])
