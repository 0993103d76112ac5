"""A partition's appends, its door and its state, over real storage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.batch import Batch, Header, build
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.append_batcher import BATCH_BYTES
from laminar.node.partition.receipts import Receipt
from tests.node.alone import lone_partition, values


def produced(sequence: int, *payload: bytes, epoch: int = 0) -> tuple[bytearray, Header]:
    frame = build(list(payload), producer_id=b"p" * 16, producer_epoch=epoch, sequence=sequence)
    return frame, Header.unpack(frame)


async def test_pitfall_52_requests_of_one_turn_share_a_batch_and_each_gets_its_own_offsets(
    tmp_path: Path,
) -> None:
    """A thousand single records are not a thousand Raft entries; one bad member fails alone."""
    async with lone_partition(tmp_path) as partition:
        before = partition.log.last_index
        bad = Records([b"x"], timestamps=[1 << 62])  # no time that a reader could write down
        knocks = [partition.appends.append_records(Records([b"%d" % n])) for n in range(50)]
        refused = partition.appends.append_records(bad)
        knocks += [partition.appends.append_records(Records([b"a", b"b"])) for _ in range(25)]

        receipts = await asyncio.gather(*knocks)

        assert [*range(50), *range(50, 100, 2)] == [receipt.offset for receipt in receipts]
        with pytest.raises(Problem) as problem:
            await refused
        assert ("invalid", "not_applied") == (problem.value.code, problem.value.outcome)
        assert [b"%d" % n for n in range(50)] + [b"a", b"b"] * 25 == await values(partition)
        # All in one turn; the bad one made the joined batch fall apart into its members once.
        good = [partition.appends.append_records(Records([b"%d" % n])) for n in range(50)]
        entries = partition.log.last_index
        await asyncio.gather(*good)
        assert partition.log.last_index == entries + 1, "fifty requests of one turn made one entry"
        assert before < entries


async def test_requests_of_the_next_pass_of_the_loop_share_the_entry_too(tmp_path: Path) -> None:
    """A client that takes longer for each request, as with TLS, makes no more entries for that."""
    async with lone_partition(tmp_path) as partition:
        entries = partition.log.last_index
        asked = [partition.appends.append_records(Records([b"a"]))]
        await asyncio.sleep(0)
        asked.append(partition.appends.append_records(Records([b"b"])))
        assert entries == partition.log.last_index, "proposed before the turn ends"
        await asyncio.sleep(0)
        assert entries + 1 == partition.log.last_index, "not proposed where the turn ends"

        assert [0, 1] == [receipt.offset for receipt in await asyncio.gather(*asked)]
        assert entries + 1 == partition.log.last_index, "two requests made two entries"
        assert [b"a", b"b"] == await values(partition)


async def test_whatever_goes_wrong_with_a_batch_every_append_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the batch that fails, and those after it, which no other event would resolve."""
    async with lone_partition(tmp_path) as partition:

        def broken(*arguments: object, **named: object) -> None:
            raise ArithmeticError("ours")

        for place, outcome in (
            ("laminar.node.partition.append_batcher.join", "not_applied"),
            ("laminar.node.consensus.replica.Replica.stamped", "unknown"),
            ("laminar.node.consensus.driver.Driver.propose", "unknown"),
        ):
            with monkeypatch.context() as patch:
                asked = [partition.appends.append_records(Records([b"x" * BATCH_BYTES])) for _ in range(4)]
                patch.setattr(place, broken)
                answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
            for answer in answers:
                assert isinstance(answer, Problem), answer
                assert ("internal_error", outcome) == (answer.code, answer.outcome)
                assert "ours" in answer.detail
            assert any(record.name == "laminar.append" and record.exc_info for record in caplog.records)
            caplog.clear()
        before = partition.log.last_index
        assert Receipt(0, 0, 1) == await partition.appends.append_records(Records([b"again"]))
        assert before + 1 == partition.log.last_index
        assert [b"again"] == await values(partition)


async def test_a_retry_gets_the_first_receipt_and_appends_nothing(tmp_path: Path) -> None:
    """Also while the first try is not committed yet."""
    async with lone_partition(tmp_path) as partition:
        first = partition.appends.append_frame(*produced(0, b"a", b"b"))
        retry_at_once = partition.appends.append_frame(*produced(0, b"a", b"b"))
        assert Receipt(0, 0, 2) == await first
        assert Receipt(0, 0, 2, duplicate=True) == await retry_at_once
        assert Receipt(0, 0, 2, duplicate=True) == await partition.appends.append_frame(
            *produced(0, b"a", b"b")
        )
        assert [b"a", b"b"] == await values(partition)


async def test_gaps_and_old_epochs_are_refused(tmp_path: Path) -> None:
    """The problem names the field, what came and what was expected."""
    async with lone_partition(tmp_path) as partition:
        with pytest.raises(Problem) as gap:
            partition.appends.append_frame(*produced(3, b"x"))
        assert ("unknown_producer", "unknown") == (gap.value.code, gap.value.outcome)
        await partition.appends.append_frame(*produced(0, b"x", epoch=2))
        with pytest.raises(Problem) as gap:
            partition.appends.append_frame(*produced(3, b"x", epoch=2))
        with pytest.raises(Problem) as old:
            partition.appends.append_frame(*produced(1, b"x", epoch=1))

        assert ("out_of_sequence", "sequence", 3, 1) == (
            gap.value.code,
            gap.value.field,
            gap.value.value,
            gap.value.limit,
        )
        assert ("fenced", "producer_epoch", 1, 2) == (
            old.value.code,
            old.value.field,
            old.value.value,
            old.value.limit,
        )


async def test_state_is_made_again_from_the_log(tmp_path: Path) -> None:
    """After a restart the same retries are recognised and the same cursors stand."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_frame(*produced(0, b"a"))
        await partition.appends.append_frame(*produced(1, b"b"))
        await partition.cursor_commands.set("c", 1, expected=None, check=False, owner="me", now_ms=5)
        table = partition.producers.snapshot()

    async with lone_partition(tmp_path) as partition:
        assert table == partition.producers.snapshot()
        assert Receipt(0, 1, 1, duplicate=True) == await partition.appends.append_frame(*produced(1, b"b"))
        cursor = partition.cursor_commands.get("c")
        assert cursor is not None and (1, 5, "me") == (cursor.position, cursor.changed_ms, cursor.owner)
        assert [b"a", b"b"] == await values(partition)


async def test_a_cursor_is_compared_and_set(tmp_path: Path) -> None:
    """Of two that expect the same position one is refused; a retry of what went through is not."""
    async with lone_partition(tmp_path) as partition:
        await partition.appends.append_records(Records([b"x"] * 10))
        await partition.cursor_commands.set("c", 4, expected=None, check=True, owner="", now_ms=1)
        with pytest.raises(Problem) as race:
            partition.cursor_commands.set("c", 6, expected=None, check=True, owner="", now_ms=1)
        await partition.cursor_commands.set("c", 4, expected=None, check=True, owner="", now_ms=1)
        with pytest.raises(Problem) as beyond:
            partition.cursor_commands.set("c", 11, expected=4, check=True, owner="", now_ms=1)

        assert ("precondition_failed", 4) == (race.value.code, race.value.limit)
        assert ("offset_beyond_end", 11, 10) == (beyond.value.code, beyond.value.value, beyond.value.limit)


async def test_a_replica_that_does_not_lead_takes_nothing(tmp_path: Path) -> None:
    """With two more voters who never answer it cannot win; appends are refused, surely not applied."""
    three = ConfigurationRecord(voters=((1, "here"), (2, "there"), (3, "elsewhere")))
    async with lone_partition(tmp_path, voters=three) as partition:
        assert not partition.leads
        with pytest.raises(Problem) as problem:
            await partition.appends.append_records(Records([b"x"]))

        assert ("not_leader", "not_applied") == (problem.value.code, problem.value.outcome)
        assert 0 == partition.end_offset


async def test_a_fetch_waits_for_what_comes_next(tmp_path: Path) -> None:
    """A waiting reader is woken by the commit; without one it is told when its time is over."""
    async with lone_partition(tmp_path) as partition:
        assert not await partition.reader.wait_past(0, 0.01)
        waiting = asyncio.create_task(partition.reader.wait_past(0, 30))
        await asyncio.sleep(0)
        await partition.appends.append_records(Records([b"x"]))

        assert await waiting
        assert 1 == partition.end_offset == await partition.reader.confirmed_end()


async def test_whoever_wants_few_records_is_not_read_many(tmp_path: Path) -> None:
    """A megabyte of batches is not fetched for one record; and whatever stands between, that one is found."""
    async with lone_partition(tmp_path) as partition:
        for number in range(50):
            await partition.appends.append_records(Records([b"%d" % number]))

        for offset in range(50):
            few = await partition.reader.frames(offset, max_bytes=1 << 20, before=offset + 1)
            assert b"%d" % offset == Batch(few[0]).values[0]
            assert len(few) <= 2
        assert 50 == len(await partition.reader.frames(0, max_bytes=1 << 20, before=1000))
