"""A range is read whole or raises, whatever replicas answer; scripted, as no node gives such answers."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from laminar.batch import build, stamp
from laminar.client.errors import OffsetExpired, Unavailable
from laminar.http.protocol.answer import Answer
from laminar.spark.read.cluster import (
    EMPTY_ANSWERS,
    EVERYTHING,
    FETCH_BYTES,
    LEAST_FETCH_BYTES,
    Cluster,
    Projection,
)
from laminar.spark.read.loss import DataLoss
from laminar.spark.read.plan import Range

WANTED = Range("t", 0, 10, 20)


def frame(base_offset: int, count: int) -> bytes:
    made = build([b"%d" % offset for offset in range(base_offset, base_offset + count)])
    stamp(
        made,
        index=base_offset + 1,
        term=1,
        prev_term=1,
        base_offset=base_offset,
        append_time_ms=1_700_000_000_000,
        committed_index=0,
    )
    return bytes(made)


class Scripted(Cluster):
    """A cluster that gives these answers, one after the other, and notes the offsets it was asked for."""

    def __init__(self, *answers: bytes | Answer | Exception, earliest: int = 0) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.earliest = earliest
        self._record_bytes = {}

    def _fetch(self, wanted: Range, offset: int, columns: Projection, replica: int | None) -> Future[Answer]:
        self.asked.append(offset)
        coming: Future[Answer] = Future()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            coming.set_exception(answer)
        else:
            coming.set_result(answer if isinstance(answer, Answer) else Answer(200, {}, answer))
        return coming

    def _earliest(self, wanted: Range) -> int:
        return self.earliest

    def values(self, *, fail_on_data_loss: bool = True, columns: Projection = EVERYTHING) -> list[int]:
        pieces = self.read(WANTED, fail_on_data_loss=fail_on_data_loss, columns=columns)
        return [int(value) for batch, first, stop in pieces for value in batch.values[first:stop]]


def expired() -> OffsetExpired:
    return OffsetExpired("gone", code="offset_expired", status=410)


def test_batches_that_reach_over_the_ends_are_cut() -> None:
    """A batch may begin before the range and end after it; what is outside is another task's."""
    script = Scripted(frame(7, 5) + frame(12, 3), frame(15, 9) + frame(24, 5))

    assert list(range(10, 20)) == script.values()
    assert [10, 15] == script.asked


def test_nothing_is_asked_for_after_the_end() -> None:
    """The fetch ahead is of this range only."""
    script = Scripted(frame(10, 10))

    assert list(range(10, 20)) == script.values()
    assert [10] == script.asked


def test_a_hole_is_an_error() -> None:
    """Records that no replica answered with are never skipped."""
    with pytest.raises(DataLoss, match=r"t/0: .* answered 13 for 12"):
        Scripted(frame(10, 2) + frame(13, 7)).values()


def test_answers_without_records_are_an_error_in_the_end() -> None:
    """A replica that should have them and sends none is asked again, some times."""
    assert list(range(10, 20)) == Scripted(b"", frame(10, 4), b"", frame(14, 6)).values()
    with pytest.raises(Unavailable, match="no records at 10"):
        Scripted(*[b""] * EMPTY_ANSWERS).values()


def test_with_a_tag_batches_may_be_left_out() -> None:
    """The node says how far it looked: reading goes on there, and ends where the range does."""

    def looked_to(offset: int, *frames: bytes) -> Answer:
        return Answer(200, {"laminar-next-offset": str(offset)}, b"".join(frames))

    script = Scripted(looked_to(14, frame(8, 3), frame(12, 1)), looked_to(17), looked_to(25, frame(18, 5)))

    assert [10, 12, 18, 19] == script.values(columns=Projection(tag="red"))
    assert [10, 14, 17] == script.asked
    with pytest.raises(Unavailable, match="no records at 14"):
        Scripted(looked_to(14), *[looked_to(14)] * EMPTY_ANSWERS).values(columns=Projection(tag="red"))


def test_retention_during_the_read_is_an_error_that_names_what_is_gone() -> None:
    """Partition and offsets, and what to do about it."""
    with pytest.raises(DataLoss, match=r"t/0: 14 to 16\. .*failOnDataLoss"):
        Scripted(frame(10, 4), expired(), earliest=17).values()


def test_without_fail_on_data_loss_what_is_left_is_read() -> None:
    """From the first record that is still there; nothing at all if that is after the range."""
    script = Scripted(frame(10, 4), expired(), frame(17, 3), earliest=17)

    assert [10, 11, 12, 13, 17, 18, 19] == script.values(fail_on_data_loss=False)
    assert [] == Scripted(expired(), earliest=99).values(fail_on_data_loss=False)


def test_a_reader_that_stops_early_leaves_nothing_under_way() -> None:
    """`LIMIT` ends a task in the middle: the fetch ahead is given up."""
    script = Scripted(frame(10, 4))
    ahead: Future[Answer] = Future()
    first = script._fetch(WANTED, 10, EVERYTHING, None)
    script._fetch = lambda wanted, offset, columns, replica: (  # type: ignore[method-assign]
        first if offset == 10 else ahead
    )
    pieces = script.read(WANTED)

    next(pieces)
    pieces.close()  # type: ignore[attr-defined]  # it is a generator

    assert ahead.cancelled()


def test_a_small_range_asks_for_little() -> None:
    """By the weight of the records seen so far; unknown records get a whole fetch."""
    script = Scripted(frame(10, 10))

    assert FETCH_BYTES == script._fetch_bytes(WANTED, 10)
    script.values()
    assert LEAST_FETCH_BYTES == script._fetch_bytes(WANTED, 10)
    assert FETCH_BYTES == script._fetch_bytes(Range("t", 0, 0, 10**9), 0)
