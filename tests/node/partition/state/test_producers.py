"""The producer table is a function of the log: whatever was truncated leaves no trace in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Header, build
from laminar.http.api.problems import Problem
from laminar.node.partition.producer_progress import fence
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state import producers as module
from laminar.node.partition.state.producers import Place, Producers, Refused
from tests.node.alone import lone_partition
from tests.node.entries import stamped

ONE, TWO = b"1" * 16, b"2" * 16


def header(
    index: int, producer: bytes, sequence: int, *, epoch: int = 0, count: int = 2, time_ms: int = 1000
) -> Header:
    frame = build([b"v"] * count, producer_id=producer, producer_epoch=epoch, sequence=sequence)
    return Header.unpack(stamped(frame, index, base_offset=index * 10, time_ms=time_ms))


def test_the_next_number_is_taken_and_a_number_seen_before_is_recognised() -> None:
    """A retry gets the place of the first try, whichever of the remembered batches it is."""
    table = Producers()
    assert table.check(ONE, 0, 0) is None
    table.appended(header(1, ONE, 0))
    table.appended(header(2, ONE, 1))

    assert table.check(ONE, 0, 2) is None
    assert table.check(ONE, 0, 0) == Place(1, 10, 2, 0)
    assert table.check(ONE, 0, 1) == Place(2, 20, 2, 1)


def test_a_gap_is_refused_with_the_number_that_is_expected() -> None:
    """Batches in flight arrive at a new leader out of order: the later one must wait for the earlier."""
    table = Producers()
    table.appended(header(1, ONE, 0))

    assert table.check(ONE, 0, 2) == Refused("out_of_sequence", 1)


def test_a_producer_that_is_not_remembered_is_not_told_that_it_lacks_a_number() -> None:
    """Whatever it sends may have been taken before it was forgotten."""
    assert Producers().check(ONE, 0, 1) == Refused("unknown_producer", 0)


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_zero() -> None:
    """Whoever took the newer epoch has shut the older one out."""
    table = Producers()
    table.appended(header(1, ONE, 0, epoch=1))

    assert table.check(ONE, 0, 1) == Refused("fenced", 1)
    assert table.check(ONE, 2, 0) is None
    assert table.check(ONE, 2, 5) == Refused("out_of_sequence", 0)


def test_a_number_older_than_what_is_remembered_is_refused() -> None:
    """Its receipt is forgotten, so there is no answer but no."""
    table = Producers()
    last = module.REMEMBERED_BATCHES + 3
    for sequence in range(last):
        table.appended(header(sequence + 1, ONE, sequence))

    assert isinstance(table.check(ONE, 0, 0), Refused)
    assert isinstance(table.check(ONE, 0, 3), Place)


def test_idle_producers_are_forgotten_by_time_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expiry counts append times, so replicas agree on it; a truncation brings the forgotten back."""
    monkeypatch.setattr(module, "IDLE_MS", 5_000)
    table = Producers()
    table.appended(header(1, ONE, 0, time_ms=1_000))
    table.appended(header(2, TWO, 0, time_ms=6_001))
    assert table.snapshot() == [(TWO, 0, 1)]

    table.truncated(2)

    assert table.snapshot() == [(ONE, 0, 1)]


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was silent longest goes first."""
    monkeypatch.setattr(module, "MAX_PRODUCERS", 3)
    table = Producers()
    for number in range(5):
        table.appended(header(number + 1, bytes([number + 1]) * 16, 0))

    assert [producer[0] for producer, _, _ in table.snapshot()] == [3, 4, 5]


Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "truncate", "commit"]), st.integers(0, 3), st.integers(1, 4)),
        max_size=60,
    )
)
def test_truncation_leaves_what_a_rebuild_from_the_log_would_give(steps: list[Step]) -> None:
    """After any history of appends, truncations and commits the table equals one made from the log alone."""
    table = Producers()
    log: list[Header] = []
    committed = 0
    for kind, who, amount in steps:
        if kind == "append":
            producer = bytes([who + 1]) * 16
            known = {p: (e, s) for p, e, s in table.snapshot()}
            epoch, sequence = known.get(producer, (0, 0))
            entry = header(len(log) + 1, producer, sequence, epoch=epoch, time_ms=1_000 * len(log))
            log.append(entry)
            table.appended(entry)
        elif kind == "truncate" and len(log) - amount >= committed:
            del log[len(log) - amount :]
            table.truncated(len(log) + 1)
        elif kind == "commit":
            committed = max(committed, min(len(log), committed + amount))
            table.committed(committed)

    rebuilt = Producers()
    for entry in log:
        rebuilt.appended(entry)
    assert rebuilt.snapshot() == table.snapshot()


async def test_a_crowd_of_new_producers_makes_no_retry_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none that only fences: who comes last is refused, and may come again."""
    monkeypatch.setattr(module, "MAX_PRODUCERS", 3)
    async with lone_partition(tmp_path) as partition:

        def put(producer: bytes, sequence: int) -> asyncio.Future[Receipt]:
            frame = build([b"x"], producer_id=producer * 16, sequence=sequence)
            return partition.appends.append_frame(frame, Header.unpack(frame))

        for producer in (b"v", b"a", b"b"):
            await put(producer, 0)
        for _ in range(3):
            with pytest.raises(Problem) as crowded:
                put(b"n", 0)
            assert ("quota", "not_applied", "producer_id", 3) == (
                crowded.value.code,
                crowded.value.outcome,
                crowded.value.field,
                crowded.value.limit,
            )
            with pytest.raises(Problem, match="quota"):
                await fence(partition, b"m" * 16, 1)
        assert Receipt(0, 0, 1, duplicate=True) == await put(b"v", 0)
        assert 3 == (await put(b"v", 1)).offset

        wall_ms = partition.replica.wall_ms()
        partition.replica.wall_ms = lambda: wall_ms + module.KEPT_MS + 1000
        assert 4 == (await put(b"n", 0)).offset
        # It pushed out `a`, whose next batch, or a retry of one, is not taken for that of a new producer.
        for sequence in (1, 2):
            with pytest.raises(Problem) as forgotten:
                put(b"a", sequence)
            assert ("unknown_producer", "unknown") == (forgotten.value.code, forgotten.value.outcome)
        assert 5 == (await put(b"n", 1)).offset
