"""Appends to a topic while its route changes: each record is appended once, and no client sees a change."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from laminar.http.api.append_body import ENVELOPE_LINES_TYPE
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import OFF_LOOP_BYTES
from laminar.node.api.common.leader_call import RetryPolicy
from laminar.node.api.records import topic_append
from laminar.node.partition import producer_progress
from laminar.wire.key_route import LOGICAL_PARTITIONS, logical_of_key
from membership.requests import CloseChange
from tests.membership.routes import begin, do, made, under_way
from tests.node.api.records.routed import Routed, opened, problem_of

HOUR_MS = 3_600_000
KEYS = [b"key-%d" % number for number in range(64)]


def lines(*records: tuple[str, bytes | None]) -> bytes:
    """Records as a body: each a value and its key."""
    return b"".join(
        json.dumps({"value": value, "key": None if key is None else key.decode()}).encode() + b"\n"
        for value, key in records
    )


def key_in(first: int, end: int, number: int = 0) -> bytes:
    """Return a key of the logical partitions from `first` to before `end`."""
    found = (key for key in map(b"k%d".__mod__, count()) if first <= logical_of_key(key) < end)
    return next(islice(found, number, None))


HALF = LOGICAL_PARTITIONS // 2
LOW, MIDDLE, HIGH = key_in(0, 10_000), key_in(10_000, HALF), key_in(HALF, LOGICAL_PARTITIONS)


def answered(answer: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(bytes(answer.body))
    return document


def placed(answer: Any) -> list[tuple[int, int, int]]:
    """Where the records are: (partition, offset, count)."""
    return sorted((each["partition"], each["offset"], each["count"]) for each in answered(answer)["placed"])


def replayed(answer: Any) -> bool:
    return ("Laminar-Replayed", "1") in answer.headers


async def send(routed: Routed, body: bytes, query: str = "", **headers: str) -> Any:
    return await routed.append_to_topic(body, query, content_type=ENVELOPE_LINES_TYPE, **headers)


async def until_it_waits(routed: Routed, asked: asyncio.Future[Any]) -> None:
    """Return when a request waits for a route; raise its problem if it has ended instead."""
    waits = asyncio.ensure_future(routed.services.waited_for.wait())
    done, _ = await asyncio.wait((waits, asked), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    if waits not in done:
        waits.cancel()
        raise AssertionError(f"it does not wait: {asked}") from (asked.exception() if done else None)


# -- requests without a key --------------------------------------------------------------------


async def test_a_thousand_records_of_which_one_partition_ends_in_the_middle(tmp_path: Path) -> None:
    """The others' parts keep their receipts; the part of the ended one is cut again."""
    async with opened(tmp_path, partitions=3) as routed:
        await send(routed, lines(*((f"before {number}", KEYS[number % 64]) for number in range(300))))
        change = await routed.begin(1, cuts=(30_000,))
        sealing = asyncio.ensure_future(routed.seal(change, 1))
        records = [(f"{number}", KEYS[number % 64]) for number in range(1_000)]

        asked = asyncio.ensure_future(send(routed, lines(*records)))
        await sealing
        await until_it_waits(routed, asked)
        assert not asked.done()
        await routed.report(change, 1)
        await routed.open(change)
        routed.show()
        answer = await asked

        assert 1_000 == answered(answer)["appended"]
        assert {0, 2, 3, 4} == {number for number, _, _ in placed(answer)}
        assert ("Laminar-Route", "1") in answer.headers
        found = await routed.values()
        for key in KEYS:
            mine = [value.encode() for value, of in records if of == key]
            holders = [each for each in found.values() if mine[0] in each]
            assert 1 == len(holders)
            assert mine == [value for value in holders[0] if value in mine], "in order, each once"
        assert 1_300 == sum(map(len, found.values()))


async def test_a_route_that_never_comes_is_not_waited_for_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, and nothing was appended; if a part was, the outcome of the whole is unknown."""
    monkeypatch.setattr(topic_append, "ROUTE_WAIT_S", 0.1)
    async with opened(tmp_path, partitions=2) as routed:
        change = await routed.begin(0, cuts=(10_000,))
        await routed.seal(change, 0)

        async with asyncio.timeout(60):
            one = await problem_of(send(routed, lines(("low", LOW))))
            both = await problem_of(send(routed, lines(("low", LOW), ("high", HIGH))))

        assert ("changing", 503, "not_applied") == (one.code, one.status, one.outcome)
        assert one.retry_after_ms
        assert ("outcome_unknown", "unknown") == (both.code, both.outcome)
        assert "durable in t all the same: 1: 0 to 0" in both.detail
        assert {1: [b"high"]} == await routed.values()


async def test_an_output_that_is_not_open_yet_is_waited_for(tmp_path: Path) -> None:
    """Its leader's view is behind that of the node which is asked."""
    async with opened(tmp_path) as routed:
        change = await routed.begin(0, cuts=(10_000,))
        await routed.seal(change, 0)
        await routed.report(change, 0)
        routed.show()

        asked = asyncio.ensure_future(send(routed, lines(("low", LOW), ("middle", MIDDLE))))
        await until_it_waits(routed, asked)
        await routed.open(change)

        assert [(1, 0, 1), (2, 0, 1)] == placed(await asked)


async def test_records_are_cut_again_as_often_as_the_route_changes(tmp_path: Path) -> None:
    """A seal that names a later route than the next: only that one is good enough."""
    async with opened(tmp_path) as routed:
        shown = routed.state
        await routed.change(0, cuts=(10_000, 20_000))
        await routed.change(2, 3)
        await routed.change(4, cuts=(15_000,))
        newest = routed.state
        routed.services.show(shown)

        asked = asyncio.ensure_future(send(routed, lines(("low", LOW), ("middle", MIDDLE), ("none", None))))
        await until_it_waits(routed, asked)
        routed.services.show(newest)

        assert 3 == answered(await asked)["appended"]
        found = await routed.values()
        assert [b"low", b"middle", b"none"] == sorted(value for each in found.values() for value in each)
        assert found.keys() <= {1, 5, 6}


async def test_only_so_much_waits_for_a_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of clients that are gone; what is beyond that is refused at once, and nothing is left counted."""
    monkeypatch.setattr(topic_append, "MOST_WAITING_BYTES", 60)
    monkeypatch.setattr(topic_append, "ROUTE_WAIT_S", 3_600.0)
    async with opened(tmp_path, partitions=2) as routed:
        change = await routed.begin(0, cuts=(10_000,))
        await routed.seal(change, 0)
        waiting = asyncio.ensure_future(send(routed, lines(("x" * 40, LOW))))
        await until_it_waits(routed, waiting)

        async with asyncio.timeout(60):
            refused = await problem_of(send(routed, lines(("y" * 40, LOW))))
            beside = await send(routed, lines(("z" * 80, HIGH)))
        await routed.report(change, 0)
        await routed.open(change)
        routed.show()

        assert ("changing", "not_applied") == (refused.code, refused.outcome)
        assert [(1, 0, 1)] == placed(beside)
        assert [(2, 0, 1)] == placed(await waiting)
        assert 0 == routed.to_topic._waiting_bytes


async def test_the_topic_may_go_while_it_is_waited_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as routed:
        change = await routed.begin(0)
        await routed.seal(change, 0)
        asked = asyncio.ensure_future(problem_of(send(routed, lines(("low", LOW)))))
        await until_it_waits(routed, asked)

        routed.state = routed.state.__class__()
        routed.show()

        assert "no_such_topic" == (await asked).code


async def test_another_failure_is_answered_at_once(tmp_path: Path) -> None:
    """What is refused for another reason waits for no route."""
    async with opened(tmp_path, partitions=2) as routed:
        change = await routed.begin(0)
        await routed.seal(change, 0)
        routed[1].appends.refusal = lambda: Problem("disk_full", outcome="not_applied")

        full = await problem_of(send(routed, lines(("low", LOW), ("high", HIGH))))

        assert ("disk_full", "not_applied") == (full.code, full.outcome)
        assert {} == await routed.values()


# -- requests with a key -----------------------------------------------------------------------


async def test_a_request_that_is_sent_again_is_found_where_it_lies(tmp_path: Path) -> None:
    """Over a split, a merge and a move; records without a key of their own, and all at one logical place."""
    async with opened(tmp_path, partitions=2) as routed:
        body = lines(("low", LOW), ("middle", MIDDLE), ("high", HIGH), ("none", None))
        first = await send(routed, body, idempotency_key="one")
        there = await send(routed, body, "?logical=5", idempotency_key="two")
        before = await routed.values()
        for inputs, cuts in (((0,), (10_000,)), ((3, 1), ()), ((2,), ())):
            await routed.change(*inputs, cuts=cuts)

            again = await send(routed, body, idempotency_key="one")
            twice = await send(routed, body, "?logical=5", idempotency_key="two")

            assert replayed(again) and placed(first) == placed(again)
            assert replayed(twice) and placed(there) == placed(twice)
            assert before == await routed.values()


async def test_only_what_is_nowhere_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the first attempt was refused; of the second, after a split, another; then all is merged."""
    async with opened(tmp_path, partitions=2) as routed:
        body = lines(("low", LOW), ("middle", MIDDLE), ("high", HIGH))
        routed[0].appends.refusal = full
        assert "unknown" == (await problem_of(send(routed, body, idempotency_key="one"))).outcome
        await routed.change(0, cuts=(10_000,))
        routed[3].appends.refusal = full
        assert "unknown" == (await problem_of(send(routed, body, idempotency_key="one"))).outcome
        assert {1: [b"high"], 2: [b"low"]} == await routed.values()
        await routed.change(2, 3)
        await routed.change(4, 1)

        whole = await send(routed, body, idempotency_key="one")
        again = await send(routed, body, idempotency_key="one")

        assert [(1, 0, 1), (2, 0, 1), (5, 0, 1)] == placed(whole) == placed(again)
        assert {1: [b"high"], 2: [b"low"], 5: [b"middle"]} == await routed.values()


def full() -> Problem:
    return Problem("disk_full", outcome="not_applied")


async def test_an_attempt_by_an_old_view_and_one_by_the_new_are_one_request(tmp_path: Path) -> None:
    """The first waits for its route; both find the same rest, and one of them appends it."""
    async with opened(tmp_path) as routed:
        change = await routed.begin(0, cuts=(10_000,))
        await routed.seal(change, 0)
        body = lines(("low", LOW), ("middle", MIDDLE))
        old = asyncio.ensure_future(repeated(routed, body, idempotency_key="one"))
        await until_it_waits(routed, old)
        await routed.report(change, 0)
        await routed.open(change)
        new = asyncio.ensure_future(repeated(routed, body, idempotency_key="one"))
        routed.show()

        assert placed(await old) == placed(await new) == [(1, 0, 1), (2, 0, 1)]
        assert {1: [b"low"], 2: [b"middle"]} == await routed.values()


async def repeated(routed: Routed, body: bytes, **headers: str) -> Any:
    """Send a request until it is answered, as a client does that names it."""
    while True:
        try:
            return await send(routed, body, **headers)
        except Problem as problem:
            assert problem.code in ("in_progress", "changing", "outcome_unknown", "disk_full"), problem
            await asyncio.sleep(0.001)


async def test_another_request_under_the_key_is_refused_wherever_the_first_lies(tmp_path: Path) -> None:
    """Named as its client named it."""
    async with opened(tmp_path) as routed:
        await send(routed, lines(("low", LOW)), idempotency_key="one")
        await routed.change(0, cuts=(10_000,))

        reused = await problem_of(send(routed, lines(("other", LOW)), idempotency_key="one"))

        assert ("idempotency_key_reused", "one") == (reused.code, reused.value)
        assert {0: [b"low"]} == await routed.values()


async def test_a_key_that_an_ended_partition_may_have_forgotten_is_not_taken_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition that follows has not forgotten any."""
    async with opened(tmp_path) as routed:
        await send(routed, lines(("other", LOW)), idempotency_key="other")
        await routed.change(0, cuts=(10_000,))
        now_ms = routed.services.clock.wall_ms()
        monkeypatch.setattr("laminar.node.partition.state.idempotency_keys.MAX_KEYS", 1)

        old = await problem_of(
            send(routed, lines(("low", LOW)), idempotency_key="one", laminar_key_time=str(now_ms - HOUR_MS))
        )
        new = await send(
            routed, lines(("low", LOW)), idempotency_key="two", laminar_key_time=str(now_ms + HOUR_MS)
        )

        assert ("key_expired", "unknown") == (old.code, old.outcome)
        assert [(1, 0, 1)] == placed(new)


async def test_an_ended_partition_is_asked_for_a_day_and_an_hour(tmp_path: Path) -> None:
    """Beyond that it has forgotten what it may be asked; and it may have no leader."""
    async with opened(tmp_path) as routed:
        day_ago_ms = routed.services.clock.wall_ms() - 25 * HOUR_MS
        await routed.change(0, cuts=(10_000,), time_ms=day_ago_ms - 60_000)
        await routed.change(2, time_ms=day_ago_ms + 60_000)
        asked: list[int] = []
        really = routed.to_topic._found

        async def counted(topic: str, number: int, mark: Any) -> Any:
            asked.append(number)
            return await really(topic, number, mark)

        routed.to_topic._found = counted  # type: ignore[method-assign]
        await send(routed, lines(("low", LOW), ("middle", MIDDLE)), idempotency_key="one")
        await send(routed, lines(("low", LOW)), idempotency_key="two")
        await send(routed, lines(("middle", MIDDLE)))

        assert [2] == asked, "of the ranges of its records, and only for a key"


async def test_without_the_leader_of_an_ended_partition_nothing_is_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503: the request may lie there."""
    hasty = RetryPolicy(
        attempts_s=0.1,
        pause_s=0.01,
        repeatable=True,
        conclude=topic_append._cannot_ask,
        election_wait_s=0.1,
    )
    monkeypatch.setattr(topic_append, "_LOOK_UP", hasty)
    async with opened(tmp_path) as routed:
        body = lines(("low", LOW))
        await send(routed, body, idempotency_key="one")
        await routed.change(0, cuts=(10_000,))
        away = routed.services.partitions.pop(("t", 0))

        problem = await problem_of(send(routed, body, idempotency_key="one"))

        assert ("no_leader", 503, "not_applied") == (problem.code, problem.status, problem.outcome)
        routed.services.partitions["t", 0] = away
        assert [(0, 0, 1)] == placed(await send(routed, body, idempotency_key="one"))
        assert {0: [b"low"]} == await routed.values()


async def test_what_one_partition_has_said_is_kept_while_another_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change by force is done before its input is sealed: until then nobody can say what that has."""
    monkeypatch.setattr(topic_append, "ASKED_AT_ONCE", 1)
    async with opened(tmp_path, partitions=2) as routed:
        body = lines(("low", LOW), ("high", HIGH))
        await send(routed, body, idempotency_key="one")
        await routed.change(0)
        routed.state, _ = do(routed.state, begin(1, after=1, seed=500, order="weak", force=True, cuts=()))
        change = under_way(routed.state)
        routed.state, closed = do(made(routed.state), CloseChange("t", change.id))
        assert closed.ok
        for each in change.outputs:
            await routed.add(each.number, successor_of=change.id)
        await routed.open(change)
        routed.show()

        asked = asyncio.ensure_future(send(routed, body, idempotency_key="one"))
        await until_it_waits(routed, asked)
        assert not asked.done()
        await routed.seal(change, 1)

        assert [(0, 0, 1), (1, 0, 1)] == placed(await asked)
        assert {0: [b"low"], 1: [b"high"]} == await routed.values()


async def test_a_seal_that_the_power_may_take_is_no_answer(tmp_path: Path) -> None:
    """In an `interval` log it counts when a majority has synced it: a late copy could come after its loss."""
    async with opened(tmp_path) as routed:
        await routed.sync_seldom()
        body = lines(("low", LOW))
        change = await routed.change(0, cuts=(10_000,))
        asked = asyncio.ensure_future(send(routed, body, idempotency_key="one"))
        fenced = asyncio.ensure_future(producer_progress.fence(routed[0], b"p" * 16, 1))
        await until_it_waits(routed, asked)
        assert not asked.done() and not fenced.done() and change.version == 1
        assert {} == await routed.values()

        routed[0].keep_seal()

        assert [(1, 0, 1)] == placed(await asked)
        assert await fenced is None


# -- by number ---------------------------------------------------------------------------------


async def test_an_ended_partition_answers_a_named_request_by_what_it_has(tmp_path: Path) -> None:
    """The receipt as it was, for a key and for a producer's number; else which route goes on."""
    producer = {"laminar_producer": "7" * 32, "laminar_route": "0"}
    async with opened(tmp_path) as routed:
        first = [
            await routed.append(0, b"a", idempotency_key="one"),
            await routed.append(0, b"b", laminar_sequence="0", **producer),
        ]
        change = await routed.begin(0)
        await routed.seal(change, 0)

        for _ in "sealed", "done":
            again = [
                await routed.append(0, b"a", idempotency_key="one"),
                await routed.append(0, b"b", laminar_sequence="0", **producer),
            ]
            assert [answered(each)["placed"] for each in first] == [
                answered(each)["placed"] for each in again
            ]
            for refused in (
                routed.append(0, b"c"),
                routed.append(0, b"c", idempotency_key="two"),
                routed.append(0, b"c", laminar_sequence="1", **producer),
                routed.append(0, b"c", laminar_sequence="7", **producer),
            ):
                problem = await problem_of(refused)
                assert ("sealed", 409, "not_applied", "partition", 1) == (
                    *(problem.code, problem.status, problem.outcome, problem.field, problem.limit),
                )
            if routed.topics.version("t") == 0:
                await routed.report(change, 0)
                await routed.open(change)
                routed.show()


# -- all together ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
async def test_every_record_once_and_in_order_over_random_changes(tmp_path: Path, seed: int) -> None:
    """Clients that name their requests repeat them, at once and later; others send once."""
    rng = random.Random(seed)
    async with opened(tmp_path, partitions=2) as routed:
        going = True

        async def change() -> None:
            numbers = list(routed.topics.route(routed.topics.record("t")).ranges().items())
            at = rng.randrange(len(numbers))
            number, held = numbers[at]
            if at and rng.random() < 0.5:
                begun = await routed.begin(numbers[at - 1][0], number)
            else:
                cuts = (rng.randrange(held.start + 1, held.stop),) if len(held) > 2 else ()
                begun = await routed.begin(number, cuts=cuts)
            for each in begun.inputs:
                await asyncio.sleep(rng.random() * 0.02)
                await routed.seal(begun, each.number)
            for each in begun.inputs:
                await routed.report(begun, each.number)
            if rng.random() < 0.5:
                routed.show()
            await asyncio.sleep(rng.random() * 0.02)
            await routed.open(begun)
            routed.show()

        async def changes() -> None:
            for _ in range(6):
                await change()
                await asyncio.sleep(rng.random() * 0.05)

        async def client(name: int) -> list[tuple[str, bytes]]:
            sent: list[tuple[str, bytes]] = []
            number = 0
            while going:
                number += 1
                values = [f"{name}-{number}-{row}" for row in range(rng.randrange(1, 12))]
                records = [(value, rng.choice(KEYS)) for value in values]
                body = lines(*records)
                if name % 2:
                    await send(routed, body)
                else:
                    key = f"{name}-{number}"
                    attempts = [
                        repeated(routed, body, idempotency_key=key) for _ in range(rng.randrange(1, 3))
                    ]
                    answers = await asyncio.gather(*attempts)
                    assert 1 == len({str(placed(each)) for each in answers})
                    late.append((body, key, placed(answers[0])))
                sent += records
                await asyncio.sleep(rng.random() * 0.01)
            return sent

        late: list[tuple[bytes, str, list[tuple[int, int, int]]]] = []
        clients = [asyncio.ensure_future(client(name)) for name in range(4)]
        await changes()
        going = False
        sent = [await each for each in clients]
        before = await routed.values()
        for body, key, where in rng.sample(late, min(20, len(late))):
            assert where == placed(await send(routed, body, idempotency_key=key))

        after = await routed.values()
        assert before == after
        # An output has a higher number than its inputs: a key's records are read in this order.
        found = [value.decode() for number in sorted(after) for value in after[number]]
        assert sorted(value for each in sent for value, _ in each) == sorted(found)
        places = {value: place for place, value in enumerate(found)}
        for of_client in sent:
            for chosen in KEYS:
                mine = [places[value] for value, of in of_client if of == chosen]
                assert sorted(mine) == mine


async def test_the_keys_of_a_large_request_are_hashed_once_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop has others to serve; the hash of the idempotency key is all that it computes."""
    hashed: list[tuple[bytes | str, bool]] = []

    def hashing(key: bytes | str) -> int:
        hashed.append((key, threading.current_thread() is threading.main_thread()))
        return logical_of_key(key)

    async with opened(tmp_path, partitions=2) as routed:
        await routed.change(0, cuts=(10_000,))
        monkeypatch.setattr(topic_append, "logical_of_key", hashing)
        keys = [*(b"k%d" % number for number in range(5_000)), None]
        body = lines(*(("v" * 40, key) for key in keys))
        assert len(body) > OFF_LOOP_BYTES
        answer = await send(routed, body, idempotency_key="once")

    assert len(keys) == answered(answer)["appended"]
    there = [key for key, on_loop in hashed if not on_loop]
    assert (keys[:-1], 1) == (there, len(hashed) - len(there))
