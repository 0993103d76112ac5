"""What a writer stages, decided without a socket: which records in which stage, and in which order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.client.errors import ConfigError, Error, Sealed
from laminar.client.policy.partition_queue import Pending, padded
from laminar.client.policy.staging import MAX_FIRST_STAGE, Epoch, Row, Stages, joined
from laminar.client.records import Staged, StagedPart
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route


def stages(*, batch_bytes: int = 100, buffer_bytes: int = 1_000, first_stage: int = 0) -> Stages:
    """With topic `t` of four partitions."""
    made = Stages(first_stage=first_stage, batch_bytes=batch_bytes, buffer_bytes=buffer_bytes)
    made.know("t", Route.even(4))
    return made


def taken(made: Stages) -> list[tuple[str, Pending]]:
    found = []
    while (each := made.take()) is not None:
        found.append(each)
    return found


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=200),
    known_after=st.integers(0, 200),
    first_stage=st.integers(0, MAX_FIRST_STAGE),
)
def test_every_record_is_in_one_stage_and_numbers_rise_with_the_order_of_records(
    rows: list[tuple[int, int]], known_after: int, first_stage: int
) -> None:
    """Also of those that came before the partitions were known; what is full goes out at once."""
    made = Stages(first_stage=first_stage, batch_bytes=100, buffer_bytes=500)
    found: list[tuple[str, Pending]] = []
    for number, (partition, size) in enumerate(rows):
        if number == known_after:
            made.know("t", Route.even(4))
        made.put("t", Row(b"%d " % number + b"x" * size, None, partition))
        found += taken(made)
    if known_after >= len(rows):
        made.know("t", Route.even(4))
    made.close_all()
    found += taken(made)

    for partition in range(4):
        mine = [pending for _, pending in found if pending.partition == partition]
        assert sorted({pending.sequence for pending in mine}) == [pending.sequence for pending in mine]
        numbers = [int(value.split()[0]) for pending in mine for value in pending.values]
        assert [number for number, (where, _) in enumerate(rows) if where == partition] == numbers
    for topic, pending in found:
        made.staged(topic, pending)
    assert 0 == made.buffered_bytes
    result = made.result("s", 1, 2)
    assert len(rows) == result.records
    assert len(found) == sum(len(part.stages) for part in result.parts)
    assert all(0 <= stage < 2**53 for part in result.parts for stage in part.stages)


def test_a_full_buffer_sends_the_largest_open_stage_first() -> None:
    """Else many partitions, none of them full, would wait for each other for ever."""
    made = stages(batch_bytes=1_000, buffer_bytes=300)
    for partition, size in ((0, 50), (1, 120), (2, 90)):
        assert not made.put("t", Row(b"x" * size, None, partition))
    assert made.take() is None

    assert made.put("t", Row(b"x" * 40, None, 3))
    assert [1, 2, 0, 3] == [pending.partition for _, pending in taken(made)]


def test_records_without_a_key_go_on_in_the_next_partition_once_a_stage_is_full() -> None:
    """So a few are one stage, and many are spread."""
    made = stages(first_stage=2)
    for _ in range(8):
        made.put("t", Row(b"x" * 40, None, None))
    made.close_all()

    assert [2, 3, 0, 1] == [pending.partition for _, pending in taken(made)]


def test_stages_go_to_the_partitions_that_the_route_names() -> None:
    """By key or spread; another number is refused, however small it is."""
    made = Stages(first_stage=1, batch_bytes=100, buffer_bytes=1_000)
    route = Route(3, [0, 60_000, LOGICAL_PARTITIONS], [8, 3])
    made.know("t", route)
    for _ in range(4):
        made.put("t", Row(b"x" * 90, None, None))
    made.put("t", Row(b"x", b"key", None))
    made.close_all()

    assert [3, 8, 3, 8, route.partition_of_key(b"key")] == [pending.partition for _, pending in taken(made)]
    with pytest.raises(ConfigError, match="no partition 0: it has 2, the last is 8"):
        made.put("t", Row(b"x", None, 0))


def test_what_is_put_after_a_drop_is_all_there_is() -> None:
    """Nothing of before, staged or not, is in the result."""
    made = stages()
    made.put("t", Row(b"x" * 200, None, 0))
    for topic, pending in taken(made):
        made.staged(topic, pending)
    made.put("t", Row(b"y", None, 1))
    made.drop()

    assert Staged("s", 1, 1, (), 0) == made.result("s", 1, 1)
    assert 0 == made.buffered_bytes


@pytest.mark.parametrize(
    ("row", "code"),
    [(Row(b"x", None, 4), "no_partition"), (Row(bytes(8 << 20) + b"x", None, 0), "too_large")],
)
def test_a_record_that_fits_nowhere_is_refused_by_name(row: Row, code: str) -> None:
    made = stages()
    with pytest.raises(Error) as caught:
        made.put("t", row)
    assert (code, True) == (caught.value.code, caught.value.limit is not None)
    assert 0 == made.buffered_bytes


def test_one_commit_joins_what_writers_staged_by_partition() -> None:
    """Each partition once, its stages in rising order."""
    first = Staged("s", 1, 2, (StagedPart("a", 0, (5, 7)), StagedPart("a", 1, (6,))), 3)
    second = Staged("s", 1, 2, (StagedPart("a", 0, (1,)), StagedPart("b", 0, (5,))), 2)

    assert [
        StagedPart("a", 0, (1, 5, 7)),
        StagedPart("a", 1, (6,)),
        StagedPart("b", 0, (5,)),
    ] == joined([first, second], sink="s", number=1, epoch=2)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (Staged("r", 1, 2, (), 0), "sink"),
        (Staged("s", 2, 2, (), 0), "number"),
        (Staged("s", 1, 1, (), 0), "epoch"),
        (Staged("s", 1, 2, (StagedPart("a", 0, (5,)),), 1), "stages"),
    ],
)
def test_what_belongs_elsewhere_or_is_given_twice_is_not_committed(other: Staged, field: str) -> None:
    one = Staged("s", 1, 2, (StagedPart("a", 0, (5,)),), 1)
    with pytest.raises(ConfigError) as caught:
        joined([one, other], sink="s", number=1, epoch=2)
    assert field == caught.value.field


def test_an_epoch_that_heard_of_a_newer_one_is_over_until_its_user_begins() -> None:
    own = Epoch()
    own.observe_epoch(7)
    assert not own.begun and not own.newer
    own.began(8, committed=3)
    own.over(4)
    own.observe_epoch(8)
    assert [8, 4, 0] == [own.number, own.committed, own.newer]
    own.observe_epoch(9)
    assert [8, 4, 9] == [own.number, own.committed, own.newer]
    own.began(10, committed=5)
    assert (10, 5, 0, False) == (own.number, own.committed, own.newer, own.doubtful)


@given(seed=st.integers(0, 2**32), max_rows=st.integers(1, 120))
def test_what_ended_partitions_did_not_take_is_cut_anew_in_order(seed: int, max_rows: int) -> None:
    """Whenever the answers come: in each partition the records of a key rise with the stages' numbers."""
    rng = random.Random(seed)
    made = stages(batch_bytes=60)
    routes = [
        Route(1, [0, 8_000, 16_384, 32_768, 49_152, LOGICAL_PARTITIONS], [4, 5, 1, 2, 3]),
        Route(2, [0, 16_384, 32_768, LOGICAL_PARTITIONS], [6, 1, 7]),
        Route(3, [0, LOGICAL_PARTITIONS], [8]),
    ]
    now = Route.even(4)
    flying: list[Pending] = []
    staged: list[Pending] = []
    left = [(rng.choice([b"a", b"b", b"c", b"d", b"e"]), number) for number in range(max_rows)]
    puts = len(left)
    closed = False
    for _ in range(5_000):
        action = rng.choice(["put", "put", "take", "take", "answer", "answer", "change", "renew"])
        if action == "put" and left:
            key, number = left.pop(0)
            trace = number.to_bytes(16) if number % 2 else None
            made.put("t", Row(b"%b %d" % (key, number), key, None, f"tag {number}", trace_id=trace))
        elif action == "put" and not closed:
            closed = True
            made.close_all()
        elif action == "take" and (found := made.take()) is not None:
            flying.append(found[1])
        elif action == "answer" and flying:
            pending = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.5 and pending.partition in now:
                flying.append(pending)  # later
                continue
            if pending.partition in now:
                made.staged("t", pending)
                staged.append(pending)
            else:
                made.refused("t", pending)
        elif action == "change" and routes and rng.random() < 0.5:
            # A partition is not sealed over what is staged there.
            if all(each.partition in routes[0] or each.partition not in now for each in staged):
                now = routes.pop(0)
        elif action == "renew" and made.waits_for_route("t"):
            made.renew("t", now)
        if closed and made.buffered_bytes == 0:
            break
    else:
        raise AssertionError("no end")
    records = [value for pending in staged for value in pending.values]
    assert puts == len(set(records)) == len(records)
    for partition in {pending.partition for pending in staged}:
        mine = sorted(
            (each for each in staged if each.partition == partition), key=lambda each: each.sequence
        )
        last: dict[bytes, int] = {}
        for pending in mine:
            assert pending.tags is not None
            traces = padded(pending.trace_ids, len(pending.values)) or [None] * len(pending.values)
            for placed, value, tag, trace in zip(
                pending.keys, pending.values, pending.tags, traces, strict=True
            ):
                number = int(value.split()[1])
                assert placed is not None and partition == now.partition_of_key(placed)
                assert last.get(placed, -1) < number and f"tag {number}" == tag
                assert trace == (number.to_bytes(16) if number % 2 else None)
                last[placed] = number


def test_a_row_for_an_ended_partition_that_the_caller_named_is_refused() -> None:
    made = stages()
    made.put("t", Row(b"named", b"k", 0))
    made.close_all()
    ((_, pending),) = taken(made)
    made.refused("t", pending)
    with pytest.raises(Sealed):
        made.renew("t", Route(1, [0, 16_384, 32_768, 49_152, LOGICAL_PARTITIONS], [4, 1, 2, 3]))
