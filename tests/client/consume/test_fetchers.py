"""What a read must not do: lose, skip, repeat or invent a record, whatever its replicas answer meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import laminar
from laminar import aio
from laminar.batch import BatchError, build
from tests.client.conftest import FakeAnswer, problem
from tests.node.attacks.test_batches import poisoned

TEN = [b"%d" % number for number in range(10)]


async def _append(topic: Any, values: list[bytes]) -> None:
    for value in values:
        await topic.append(value, partition=0)


async def _read(topic: Any, *start: Any, **how: Any) -> list[bytes]:
    return [record.raw async for record in topic.read(*start, partitions=[0], **how)]


async def test_the_leader_may_change_and_replicas_lag_between_two_pages(cluster: Any) -> None:
    """Each page comes from another leader's time, and from replicas that know less than the first answer."""
    partition = None

    def change(node: int, partition: Any, query: dict[str, str]) -> None:
        partition.leader = (partition.leader + 1) % 3
        partition.lag = {partition.leader: 0, (partition.leader + 1) % 3: 3, (partition.leader + 2) % 3: 1}

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = change
        partition = cluster.topics["t"][0]
        for _ in range(5):
            assert TEN == await _read(topic, fetch_bytes=300)
    assert partition.end == 10


@pytest.mark.parametrize("start", ["earliest", {0: 0}], ids=str)
async def test_what_is_trimmed_between_two_pages_is_an_error_or_named(cluster: Any, start: Any) -> None:
    """The rest of a trimmed page is never passed over without a word."""
    fetches = 0

    def trim(node: int, partition: Any, query: dict[str, str]) -> None:
        nonlocal fetches
        fetches += 1
        if fetches == 2:
            partition.start = 6

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = trim
        with pytest.raises(laminar.OffsetExpired) as caught:
            await _read(topic, start, fetch_bytes=300)
        position = caught.value.fields["position"]
        fetches, cluster.topics["t"][0].start = 0, 0
        reader = topic.read(start, partitions=[0], fetch_bytes=300, on_expired="earliest")
        values = [record.raw async for record in reader]

    assert 0 < position < 6 == caught.value.limit
    assert (TEN[:position] + TEN[6:], [(0, position, 6)]) == (values, reader.skipped)


async def test_a_start_that_is_trimmed_before_its_records_are_read_is_resolved_again(cluster: Any) -> None:
    """The leader found `earliest`, and retention removed it in the same request."""

    def expired(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        if query["offset"] != "earliest":
            return None
        partition.start = 4
        return problem(410, "offset_expired", earliest=4)

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = expired
        assert TEN[4:] == await _read(topic)


async def test_a_position_past_the_end_reads_nothing_and_stays(cluster: Any) -> None:
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        reader = topic.read({0: 50}, partitions=[0])
        values = [record async for record in reader]

    assert ([], {0: 50}, {0: 10}) == (values, reader.positions, reader.ends)


async def test_records_that_are_damaged_at_the_leader_are_read_from_another_replica(cluster: Any) -> None:
    def damaged(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        return problem(503, "damaged", limit=10) if query["read"] == "leader" else None

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = damaged
        assert TEN == await _read(topic)


async def test_damage_at_the_leader_does_not_end_a_read_at_the_end_that_a_replica_knows(cluster: Any) -> None:
    """Where its answer said damaged, a leader that is lost then is waited for: it knows what is committed."""
    partition = cluster.topics["t"][0]

    def damaged(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        if query["read"] != "leader":
            return None
        cluster.leaderless = True
        return problem(503, "damaged", limit=10)

    async def elect() -> None:
        def asked() -> bool:
            return any("/offsets" in each[2] and "=replica" not in each[2] for each in cluster.requests)

        while not asked():  # noqa: ASYNC110  # the cluster is on another loop
            await asyncio.sleep(0.005)
        cluster.leaderless, partition.lag = False, {}

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        partition.lag = dict.fromkeys(range(3), 2)
        cluster.on_fetch = damaged
        electing = asyncio.create_task(elect())
        assert TEN == await _read(topic)
        await electing


async def test_an_answer_that_breaks_off_is_asked_for_again(cluster: Any) -> None:
    """Half of a body is no answer, also where it would end between two batches."""
    fetches = 0

    def cut(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        nonlocal fetches
        fetches += 1
        if fetches % 2 == 0:
            return None
        headers = {"Laminar-Offset": "0", "Laminar-End-Offset": "10", "Cut": "yes"}
        return 200, headers, b"".join(partition.frames)

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = cut
        assert TEN == await _read(topic)
    assert 2 == fetches


async def test_a_read_that_could_not_begin_is_not_at_its_end(cluster: Any) -> None:
    """Asked again, the same reader hands out all, instead of ending as if there were nothing."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        reader = topic.read(partitions=[0])
        patient_s, client.session.timeout_s = client.session.timeout_s, 0.2
        cluster.silent |= {0, 1, 2}
        with pytest.raises(laminar.TimedOut):
            _ = [record async for record in reader]
        cluster.silent.clear()
        client.session.timeout_s = patient_s
        values = [record.raw async for record in reader]

    assert TEN == values


async def test_skipping_damage_does_not_skip_what_one_replica_merely_lacks(cluster: Any) -> None:
    """A hole before an unreadable batch: its records come from another replica; only the batch is left."""
    partition = cluster.topics["t"][0]
    partition.append(build([b"0"]))
    partition.append(build([b"1"]))
    partition.append(poisoned()["zstd"])
    partition.append(build([b"3"]))
    cluster.holes = {(0, 1), (1, 1)}
    async with aio.connect(cluster.urls) as client:
        for _ in range(6):
            reader = client.topic("t").read(partitions=[0], on_damage="skip", fetch_bytes=1)
            values = [record.raw async for record in reader]
            assert ([b"0", b"1", b"3"], [(0, 2, 3)]) == (values, reader.skipped)

        with pytest.raises(BatchError):
            await _read(client.topic("t"))


async def test_what_lies_past_the_end_is_neither_read_nor_called_skipped(cluster: Any) -> None:
    """The leader's answer may hold more than the end that it confirmed; a cursor must not pass that."""
    partition = cluster.topics["t"][0]
    partition.append(build([b"0"]))
    partition.append(poisoned()["zstd"])

    def more(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        headers = {"Laminar-Offset": "0", "Laminar-End-Offset": "1"}
        return 200, headers, b"".join(partition.frames)

    cluster.on_fetch = more
    async with aio.connect(cluster.urls) as client:
        reader = client.topic("t").read(partitions=[0], on_damage="skip")
        values = [record.raw async for record in reader]

    assert ([b"0"], [], {0: 1}) == (values, reader.skipped, reader.positions)


async def test_a_batch_that_comes_twice_is_handed_out_once(cluster: Any) -> None:
    def twice(node: int, partition: Any, query: dict[str, str]) -> FakeAnswer | None:
        headers = {"Laminar-Offset": "0", "Laminar-End-Offset": "10"}
        return 200, headers, b"".join(partition.frames[:4] + partition.frames[2:])

    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await _append(topic, TEN)
        cluster.on_fetch = twice
        assert TEN == await _read(topic)
        assert TEN == await _read(topic, on_damage="skip")


async def test_a_reader_that_follows_ends_with_its_client(cluster: Any) -> None:
    """It would ask a closed client again and again, without a pause in which anything else could run."""
    async with aio.connect(cluster.urls) as client:
        reader = client.topic("t").read(follow=True)

        async def read() -> None:
            async for _ in reader:
                pass

        reading = asyncio.create_task(read())
        while not any("wait_ms=10000" in target for _, _, target in cluster.requests):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(laminar.Unavailable):
        await reading
