"""The table of idempotency keys is a function of the log, and a partition takes each request once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.batch import Batch, Header, build
from laminar.batch.header import set_producer
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state import idempotency_keys as module
from laminar.node.partition.state.idempotency_keys import IdempotencyKeys, KeyEntry
from raft.messages import AppendAnswer
from tests.node.alone import lone_partition
from tests.node.entries import stamped
from tests.node.trio import send, trio


def keyed(key: bytes, content: int, *values: bytes) -> bytearray:
    """The batch of a request with a key."""
    frame = build(list(values))
    set_producer(frame, producer_id=key * 16, epoch=0, sequence=content, keyed=True)
    return frame


def header(index: int, key: bytes | None, *, content: int = 7, time_ms: int = 1000) -> Header:
    frame = build([b"v"]) if key is None else keyed(key, content, b"v")
    return Header.unpack(stamped(frame, index, base_offset=index * 10, time_ms=time_ms))


def put(partition: Partition, frame: bytearray) -> asyncio.Future[Receipt]:
    return partition.appends.append_frame(frame, Header.unpack(frame))


def test_keys_are_forgotten_by_time_in_the_log_and_come_back_with_a_truncation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expiry counts append times, so replicas agree on it; any batch of records moves the time on."""
    monkeypatch.setattr(module, "AGE_MS", 5_000)
    table = IdempotencyKeys()
    table.appended(header(1, b"a", time_ms=1_000))
    table.appended(header(2, b"b", time_ms=1_001))
    table.appended(header(3, None, time_ms=6_001))
    assert [KeyEntry(b"b" * 16, 7, 2, 20, 1, 1_001)] == table.stored()
    assert [1, 2] == [entry.index for entry in table.stored_at(2)]

    table.truncated(3)
    assert [1, 2] == [entry.index for entry in table.stored()]


def test_of_too_many_keys_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is bounded, whatever clients do."""
    monkeypatch.setattr(module, "MAX_KEYS", 3)
    table = IdempotencyKeys()
    for index in range(1, 7):
        table.appended(header(index, bytes([index])))
    assert [4, 5, 6] == [entry.index for entry in table.stored()]


async def test_a_crowd_of_new_keys_makes_no_retry_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes last is refused, and may come again; who was there before is recognised."""
    monkeypatch.setattr(module, "MAX_KEYS", 3)
    async with lone_partition(tmp_path) as partition:
        first = await put(partition, keyed(b"v", 1, b"victim's"))
        for number in range(2):
            await put(partition, keyed(bytes([number]), 1, b"x"))
        with pytest.raises(Problem) as crowded:
            put(partition, keyed(b"n", 1, b"x"))
        assert ("quota", "not_applied", "idempotency-key", 3) == (
            crowded.value.code,
            crowded.value.outcome,
            crowded.value.field,
            crowded.value.limit,
        )
        assert crowded.value.retry_after_ms is not None and crowded.value.retry_after_ms > 0
        assert Receipt(0, first.offset, 1, duplicate=True) == await put(
            partition, keyed(b"v", 1, b"victim's")
        )
        assert 3 == partition.end_offset

        # When the oldest is past its time, the next one takes its place.
        wall_ms = partition.replica.wall_ms()
        partition.replica.wall_ms = lambda: wall_ms + module.KEPT_MS + 1000
        assert 3 == (await put(partition, keyed(b"n", 1, b"x"))).offset


async def test_a_key_that_may_have_been_forgotten_is_not_appended_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its client says when it was made. One that is remembered is recognised, however old it is."""
    monkeypatch.setattr(module, "MAX_KEYS", 3)
    async with lone_partition(tmp_path) as partition:
        first_ms = partition.replica.wall_ms()

        def put_made(key: bytes, made_ms: int) -> asyncio.Future[Receipt]:
            frame = keyed(key, 1, b"x")
            return partition.appends.append_frame(frame, Header.unpack(frame), key_made_ms=made_ms)

        with pytest.raises(Problem) as too_old:
            put_made(b"v", first_ms - module.AGE_MS - 10_000)
        assert ("key_expired", "unknown") == (too_old.value.code, too_old.value.outcome)
        await put_made(b"v", first_ms - 10_000)
        later_ms = first_ms + module.KEPT_MS + 10_000
        partition.replica.wall_ms = lambda: later_ms
        for number in range(3):
            await put_made(bytes([number]), later_ms)

        with pytest.raises(Problem) as forgotten:
            put_made(b"v", first_ms - 10_000)
        assert ("key_expired", "laminar-key-time") == (forgotten.value.code, forgotten.value.field)
        assert 4 == partition.end_offset
        assert (await put_made(bytes([0]), first_ms - 10_000)).duplicate


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 6), st.integers(0, 3)),
            st.tuples(st.just("cut"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("commit"), st.integers(0, 3), st.just(0)),
        ),
        max_size=40,
    )
)
def test_pitfall_40_the_table_is_that_of_the_entries_that_are_left(
    script: list[tuple[str, int, int]],
) -> None:
    """Whatever was appended and cut: keys of what is gone are unknown, those they displaced are back."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MAX_KEYS", 3)
        patched.setattr(module, "AGE_MS", 4)
        table, log, committed, time_ms = IdempotencyKeys(), list[Header](), 0, 0
        for what, number, later_ms in script:
            if what == "append":
                time_ms = (log[-1].append_time_ms if log else 0) + later_ms
                key = bytes([number])
                known = table.get(key * 16) is not None
                log.append(header(len(log) + 1, None if number == 0 or known else key, time_ms=time_ms))
                table.appended(log[-1])
            elif what == "cut":
                del log[max(len(log) - number, committed) :]
                table.truncated(len(log) + 1)
            else:
                committed = max(committed, len(log) - number)
                table.committed(committed)
            again = IdempotencyKeys()
            for each in log:
                again.appended(each)
            assert again.stored() == table.stored()
            before = IdempotencyKeys()
            for each in log[:committed]:
                before.appended(each)
            assert before.stored() == table.stored_at(committed)


async def test_a_key_is_taken_once_and_known_after_a_restart_and_a_new_start(tmp_path: Path) -> None:
    """The first receipt for the same content, a refusal for another, however old the log has become."""
    async with lone_partition(tmp_path) as partition:
        standing = partition.appends.append_records(Records([b"door"]))
        first = put(partition, keyed(b"k", 1, b"a", b"b"))
        with pytest.raises(Problem) as running:
            put(partition, keyed(b"k", 1, b"a", b"b"))
        assert ("in_progress", "unknown", 100) == (
            running.value.code,
            running.value.outcome,
            running.value.retry_after_ms,
        )
        assert (Receipt(0, 0, 1), Receipt(0, 1, 2)) == (await standing, await first)
        assert Receipt(0, 1, 2, duplicate=True) == await put(partition, keyed(b"k", 1, b"a", b"b"))
        # The same hash as a producer's id is another thing.
        own = build([b"c"], producer_id=b"k" * 16)
        assert Receipt(0, 3, 1) == await put(partition, own)

    async with lone_partition(tmp_path) as partition:
        await partition.reader.wait_past(3, 60.0)
        with pytest.raises(Problem) as other:
            put(partition, keyed(b"k", 2, b"c"))
        assert ("idempotency_key_reused", "not_applied") == (other.value.code, other.value.outcome)
        assert "1 to 2" in other.value.detail
        assert Receipt(0, 1, 2, duplicate=True) == await put(partition, keyed(b"k", 1, b"a", b"b"))
        await partition.appends.append_records(Records([b"x"]))
        await partition.start_mover.propose(partition.committed_index)
        assert partition.start_offset == partition.end_offset == 5

    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        assert Receipt(0, 1, 2, duplicate=True) == await put(partition, keyed(b"k", 1, b"a", b"b"))
        assert 5 == partition.end_offset


async def test_pitfall_40_a_key_is_known_to_the_next_leader_and_not_if_its_entry_was_cut() -> None:
    """What was appended and not answered is found again, what is cut is not: once in both cases."""
    async with trio(seed=40) as cluster:
        first = await cluster.leader()
        cluster.wire = lambda sender, receiver, channel, messages: (
            None if any(isinstance(message, AppendAnswer) for message in messages) else 0
        )
        pending = [send(first, keyed(b"k", 1, b"a"))]
        last = first.partition.log.last_index
        others = cluster.followers(first)
        await cluster.until(
            lambda: all(other.partition.log.last_index == last for other in others), what="both hold it"
        )
        cluster.cut_off(first.node)
        pending.append(send(first, keyed(b"l", 1, b"lost")))
        second = await cluster.leader(among=[other.node for other in others])
        with pytest.raises(Problem) as reused:
            send(second, keyed(b"k", 2, b"another"))
        assert "idempotency_key_reused" == reused.value.code
        again = await send(second, keyed(b"k", 1, b"a"))
        assert (0, 1, True) == (again.offset, again.count, again.duplicate)

        cluster.heal()
        await cluster.settled()
        cluster.check_equal()
        taken = await send(second, keyed(b"l", 2, b"anew"))
        assert (1, False) == (taken.offset, taken.duplicate), "nothing is left of what was cut"
        await cluster.settled()
        cluster.check_equal()
        assert {(b"a", b"anew")} == {tuple(member.values()) for member in cluster.alive}
        for each in pending:
            if each.done() and not each.cancelled():
                each.exception()


def test_a_batch_appended_with_a_key_is_whole() -> None:
    """The body is as it was built; the head says whose it is, and holds its checksum."""
    frame = keyed(b"k", 2**63 - 1, b"a", b"b")
    batch = Batch(frame)
    assert (b"k" * 16, 2**63 - 1) == (batch.header.producer_id, batch.header.sequence)
    assert [b"a", b"b"] == [bytes(value) for value in batch.values]
