"""The demo's verifier: a sound history passes, and each fault is found and named."""

from __future__ import annotations

import pytest

from examples.demo import checks
from examples.demo.flights import Delay, Flights, load
from laminar.testing.history import Read, Sent

# Flight 1 to 6, their airports, and where each was acknowledged.
ORIGINS = ["SFO", "SEA", "SFO", "SFO", "SEA", "DEN"]
PLACES = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]


def sent() -> list[Sent]:
    """Every flight acknowledged."""
    return [
        Sent(origin, number, *place)
        for number, (origin, place) in enumerate(zip(ORIGINS, PLACES, strict=True), start=1)
    ]


def read() -> list[Read]:
    """Every flight read, once, where it was acknowledged."""
    return [Read(each.partition, each.offset, each.key, each.number) for each in sent()]


def faults(history: list[Read], *, acknowledged: list[Sent] | None = None) -> list[str]:
    findings = checks.check_flights(sent() if acknowledged is None else acknowledged, history, flights=6)
    return [fault for finding in findings for fault in finding.faults]


def test_a_sound_history_holds() -> None:
    """Nothing missing, nothing doubled, nothing swapped: three claims, no fault."""
    findings = checks.check_flights(sent(), read(), flights=6)

    assert [True, True, True] == [finding.held for finding in findings]
    assert all(line.startswith("ok ") for finding in findings for line in finding.lines())


def test_a_missing_flight_is_named() -> None:
    """Flight 3, acknowledged and not read, is named with its airport and place."""
    history = [each for each in read() if each.number != 3]

    assert ["lost: record 3 of key SFO was acknowledged at partition 0 offset 1 and is not there"] == faults(
        history
    )


def test_a_doubled_flight_is_named() -> None:
    """Flight 5 is there a second time, behind the others: named with both places."""
    history = [*read(), Read(1, 2, "SEA", 5)]

    assert [
        "duplicate: record 5 of key SEA was read at partition 1 offset 2 and before at partition 1 offset 1"
    ] == faults(history)


def test_two_swapped_flights_are_named() -> None:
    """Flights 3 and 4 of one airport changed places: both are elsewhere, and out of order."""
    history = read()
    history[2], history[3] = Read(0, 1, "SFO", 4), Read(0, 2, "SFO", 3)

    found = faults(history)

    assert 3 == len(found)
    assert any(fault.startswith("moved: record 3 of key SFO") for fault in found)
    assert any(fault.startswith("moved: record 4 of key SFO") for fault in found)
    assert any(fault.startswith("reordered: record 3 of key SFO") for fault in found)


def test_swapped_in_sending_too_is_still_out_of_order() -> None:
    """Receipts that agree with the wrong order do not make it right: the file's order counts."""
    acknowledged = sent()
    acknowledged[2], acknowledged[3] = Sent("SFO", 3, 0, 2), Sent("SFO", 4, 0, 1)
    history = sorted(Read(each.partition, each.offset, each.key, each.number) for each in acknowledged)

    (fault,) = faults(history, acknowledged=acknowledged)

    assert fault.startswith("reordered: record 3 of key SFO")


def test_a_record_that_is_no_flight_is_named() -> None:
    """What was never sent must not be there."""
    found = faults([*read(), Read(1, 2, "SEA", 0)])

    assert "unknown: partition 1 offset 2 holds record 0 of key SEA, which was never sent" == found[0]


def test_a_flight_without_a_receipt_is_counted() -> None:
    """The claim is about all flights of the file, not about those that happened to be acknowledged."""
    finding, *_ = checks.check_flights(sent()[:-1], read()[:-1], flights=6)

    assert ["1 have no receipt"] == list(finding.faults)


def test_a_replica_whose_bytes_differ_is_named() -> None:
    """Node and partition are named; a replica that gave no digest too."""
    same = {"node-1": "aa", "node-2": "aa", "node-3": "aa"}

    assert checks.check_digests({0: same, 1: same}, replicas=3).held
    (fault,) = checks.check_digests({0: same, 1: same | {"node-2": "bb"}}, replicas=3).faults
    assert fault.startswith("replica_differs: partition 1 on node node-2 has digest bb")
    (fault,) = checks.check_digests({0: same, 1: {"node-1": "aa", "node-3": "aa"}}, replicas=3).faults
    assert "partition 1 has a digest from 2 replicas only: node-1, node-3" == fault


def test_reads_from_one_replica_alone_are_not_balanced() -> None:
    """One partition that two replicas served is the least."""
    assert not checks.check_balance({0: {"node-1": 9}, 1: {"node-2": 9}}).held
    assert checks.check_balance({0: {"node-1": 9}, 1: {"node-2": 5, "node-3": 4}}).held


def test_a_kill_that_hit_nothing_proves_nothing() -> None:
    """Without an append that was sent again the check fails."""
    assert not checks.check_retries(0, kills=4).held
    assert "7 appends were sent again after one kill of a node" == checks.check_retries(7, kills=1).claim


def test_a_result_of_spark_that_differs_is_named() -> None:
    """A group that is missing, one too many, or of another sum."""
    expected = {("SFO", "2001/01"): Delay(2, 10), ("SEA", "2001/01"): Delay(1, 3)}
    found = {("SFO", "2001/01"): Delay(2, 11), ("DEN", "2001/01"): Delay(1, 3)}

    assert checks.check_delays(expected, expected, batches=5).held
    assert not checks.check_delays(expected, expected, batches=1).held
    named = checks.check_delays(found, expected, batches=5).faults
    assert ["DEN", "SEA", "SFO"] == [fault.split()[0] for fault in named]


def test_processes_left_over_are_named() -> None:
    """Each pid."""
    assert checks.check_leftovers([]).held
    assert ["process 12 is alive", "process 13 is alive"] == list(checks.check_leftovers([12, 13]).faults)


def test_of_thousands_of_faults_the_first_are_shown() -> None:
    """The rest is counted."""
    lines = checks.Finding("all is well", [str(number) for number in range(1_010)]).lines()

    assert "BROKEN all is well" == lines[0]
    assert "  and 1,000 more" == lines[-1]
    assert 12 == len(lines)


@pytest.fixture(scope="module")
def flights() -> Flights:
    return load(None)


def test_the_file_is_what_the_demo_says(flights: Flights) -> None:
    """20,000 flights, each line another, and the means are those of a slow, plain count."""
    delays = flights.delays()
    seattle = [each.delay for each in flights.flights if (each.origin, each.month) == ("SEA", "2001/02")]

    assert 20_000 == len(flights) == len(flights.numbers()) == sum(each.flights for each in delays.values())
    assert Delay(len(seattle), sum(seattle)) == delays["SEA", "2001/02"]
