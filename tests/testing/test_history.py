"""The checkers: each kind of damage is found and named, and nothing else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.testing.history import Read, Sent, check_history, check_replicas


def history(keys: int = 3, per_key: int = 4) -> tuple[list[Sent], list[Read]]:
    """A sound run: keys round robin over two partitions, numbered per key."""
    sent: list[Sent] = []
    ends = [0, 0]
    for number in range(per_key):
        for key in range(keys):
            partition = key % 2
            sent.append(Sent(f"K{key}", number, partition, ends[partition]))
            ends[partition] += 1
    return sent, [Read(each.partition, each.offset, each.key, each.number) for each in sent]


def test_a_sound_history_has_no_violations() -> None:
    sent, read = history()

    assert [] == check_history(sent, read, uncertain=[])


def test_a_missing_record_is_named() -> None:
    sent, read = history()
    gone = read.pop(5)

    (violation,) = check_history(sent, read)
    assert ("lost", gone.key, gone.number) == (violation.kind, violation.key, violation.number)
    assert str(violation).startswith("lost: record 1 of key K2 was acknowledged at partition 0 offset")


def test_a_doubled_record_is_named() -> None:
    """A second copy at the end of the partition: a duplicate, with both places."""
    sent, read = history()
    twice = read[0]
    read.append(twice._replace(offset=100))

    violations = check_history(sent, read)
    assert {"duplicate", "reordered"} == {each.kind for each in violations}
    assert all((twice.key, twice.number) == (each.key, each.number) for each in violations)
    assert "offset 100 and before at partition 0 offset 0" in violations[0].message


def test_two_swapped_records_are_named() -> None:
    """Each lies where the other was acknowledged, and the later one's key is out of order."""
    sent, read = history()
    first, second = (i for i, each in enumerate(read) if each.key == "K0" and each.number in (1, 2))
    a, b = read[first], read[second]
    read[first] = a._replace(number=b.number)
    read[second] = b._replace(number=a.number)

    violations = check_history(sent, read)
    moved = {(each.key, each.number) for each in violations if each.kind == "moved"}
    reordered = [(each.key, each.number) for each in violations if each.kind == "reordered"]
    assert {("K0", 1), ("K0", 2)} == moved
    assert [("K0", 1)] == reordered


def test_a_reader_that_goes_back_is_named() -> None:
    sent, read = history(keys=1)
    read[1], read[2] = read[2], read[1]

    (violation,) = check_history(sent, read)
    assert ("offsets", 1) == (violation.kind, violation.offset)


def test_two_records_at_one_place_are_named() -> None:
    sent, read = history(keys=1)
    read.append(read[-1]._replace(number=9))

    kinds = [each.kind for each in check_history(sent, read)]
    assert ["conflict", "offsets"] == kinds


def test_a_key_in_two_partitions_is_named() -> None:
    sent, read = history(keys=1)
    read[3] = read[3]._replace(partition=1)

    kinds = {each.kind for each in check_history(sent, read)}
    assert {"moved", "scattered"} == kinds


def test_what_nobody_sent_is_named_and_the_uncertain_is_not() -> None:
    sent, read = history(keys=1)
    read += [Read(0, 4, "K0", 4), Read(0, 5, "K0", 5)]

    (violation,) = check_history(sent, read, uncertain=[("K0", 4)])
    assert ("unknown", 5) == (violation.kind, violation.number)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_any_single_loss_is_found(keys: int, per_key: int, data: st.DataObject) -> None:
    """Whichever record is taken away, exactly that one is reported."""
    sent, read = history(keys, per_key)
    gone = read.pop(data.draw(st.integers(0, len(read) - 1)))

    (violation,) = check_history(sent, read)
    assert (gone.key, gone.number) == (violation.key, violation.number)


def test_a_replica_that_differs_is_named() -> None:
    digests = {0: {"a": "1" * 64, "b": "1" * 64, "c": "2" * 64}, 1: {"a": "3", "b": "3", "c": "3"}}

    (violation,) = check_replicas(digests)
    assert (0, "c") == (violation.partition, violation.node)
    assert "partition 0 on node c has digest 2222222222222222, unlike a, b" == violation.message


def test_without_a_majority_every_replica_is_named() -> None:
    assert ["a", "b"] == [each.node for each in check_replicas({4: {"a": "1", "b": "2"}})]
    assert [] == check_replicas({4: {"a": "1"}, 5: {}})
