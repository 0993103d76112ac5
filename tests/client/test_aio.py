"""The async face over real sockets, against nodes that fail on order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import laminar
from laminar import aio


async def test_an_append_returns_where_the_record_lies(cluster: Any) -> None:
    """A receipt names partition and offset; the same key goes to the same partition."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        first = await topic.append(b"a", key="SFO")
        second = await topic.append(b"b", key="SFO")

    assert (first.partition, first.offset) == (second.partition, 0)
    assert (second.offset, second.replicas, second.synced) == (1, 3, True)


async def test_a_producer_delivers_everything_in_order(cluster: Any) -> None:
    """What one producer sends to a key is read back in the order of sending, once."""
    async with aio.connect(cluster.urls[0]) as client:
        topic = client.topic("t")
        async with topic.producer(batch_bytes=500) as producer:
            for number in range(2_000):
                producer.send(b"%d" % number, key=b"k%d" % (number % 7))
        read: dict[bytes | None, list[int]] = {}
        async for record in topic.read():
            read.setdefault(record.key, []).append(int(record.text))

    assert {b"k%d" % k: list(range(k, 2_000, 7)) for k in range(7)} == read


FAULTS = ["drop", "lose", "refuse", "move", "unknown"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_neither_loses_nor_doubles_nor_reorders(cluster: Any, fault: str) -> None:
    """Whatever happens to some appends of a pipeline, the log holds the stream as sent."""
    cluster.append_faults.extend([None, fault, None, None, None, fault, fault])
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        async with topic.producer(batch_bytes=300) as producer:
            deliveries = [producer.send(b"%04d" % n, partition=1) for n in range(600)]
        offsets = [delivery.result().offset for delivery in deliveries]
        statistics = client.statistics()

    assert [b"%04d" % n for n in range(600)] == cluster.values("t", 1)
    assert list(range(600)) == offsets
    assert statistics["resent_batches"] > 0


async def test_a_redirect_is_followed_and_remembered(cluster: Any) -> None:
    """Row S9: an append at a node that does not lead goes on to the leader it names."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await topic.append(b"a", partition=0)
        cluster.topics["t"][0].leader = 2
        receipt = await topic.append(b"b", partition=0)
        before = len(cluster.requests)
        await topic.append(b"c", partition=0)

    assert 1 == receipt.offset
    assert [2] == [node for node, _, _ in cluster.requests[before:]]


async def test_appends_at_the_same_time_share_batches(cluster: Any) -> None:
    """256 appends in flight are a few requests, not 256."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        receipts = await asyncio.gather(*(topic.append(b"%d" % n, partition=0) for n in range(256)))

    assert set(range(256)) == {receipt.offset for receipt in receipts}
    assert sum(method == "POST" for _, method, _ in cluster.requests) < 10


async def test_a_rejected_append_fails_alone(cluster: Any) -> None:
    """One append's lasting error does not stop the appends behind it, and they are not doubled."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await topic.append(b"0", partition=0)
        cluster.append_faults.append("reject")
        with pytest.raises(laminar.Error, match="not this one") as caught:
            await topic.append(b"1", partition=0)
        await topic.append(b"2", partition=0)

    assert "not_applied" == caught.value.outcome
    assert [b"0", b"2"] == cluster.values("t", 0)


async def test_a_producer_reports_everything_undelivered(cluster: Any) -> None:
    """After a lasting failure the block raises, naming every record without a receipt, in order."""
    cluster.append_faults.append("reject")
    with pytest.raises(laminar.ProduceError) as caught:
        async with aio.connect(cluster.urls) as client, client.topic("t").producer() as producer:
            for number in range(3):
                producer.send(b"%d" % number, partition=0)

    assert [b"0", b"1", b"2"] == [each.value for each in caught.value.undelivered]
    assert [] == cluster.values("t", 0)


async def test_a_time_out_says_what_it_waited_for(cluster: Any) -> None:
    """Without a leader the deadline ends an append, and the message names the partition."""
    async with aio.connect(cluster.urls, timeout=0.3) as client:
        assert client._session is not None
        await client._session.topic_map("t", timeout_s=30)
        cluster.leaderless = True
        with pytest.raises(TimeoutError, match=r"t/2: no receipt within 0\.3 s") as caught:
            await client.topic("t").append(b"x", partition=2)

    assert isinstance(caught.value, laminar.TimedOut)


async def test_an_unreachable_cluster_is_a_time_out_too() -> None:
    """Nobody listens: TimedOut, with the last refusal in the message."""
    async with aio.connect("http://127.0.0.1:9", timeout=0.2) as client:
        with pytest.raises(laminar.TimedOut, match="GET /v1/topics/t was not answered within"):
            await client.topic("t").describe()


async def test_a_leader_that_dies_is_left_behind(cluster: Any) -> None:
    """Killing a node in the middle of a stream loses and doubles nothing."""
    async with aio.connect(cluster.urls) as client:
        async with client.topic("t").producer(batch_bytes=400) as producer:
            for number in range(900):
                producer.send(b"%d" % number, partition=1)
                if number == 300:
                    await producer.wait()
                    cluster.kill(1)

    assert [b"%d" % n for n in range(900)] == cluster.values("t", 1)


async def test_a_leader_that_falls_silent_is_left_once_another_leads(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its connections and answers nobody: the stream goes on elsewhere, once and in order."""
    monkeypatch.setattr("laminar.client.produce.leader_watchdog.PATIENCE_MS", 50)
    async with aio.connect(cluster.urls) as client, client.topic("t").producer(batch_bytes=400) as producer:
        for number in range(300):
            producer.send(b"%d" % number, partition=1)
        await producer.wait()
        cluster.silent.add(1)
        for number in range(300, 900):
            producer.send(b"%d" % number, partition=1)
        cluster.topics["t"][1].leader = 2
        async with asyncio.timeout(60):
            await producer.wait()
        # What it was sent before it fell silent it deals with now; by then all of it is known.
        cluster.silent.clear()

    assert [b"%d" % n for n in range(900)] == cluster.values("t", 1)


async def test_a_leader_that_takes_its_time_is_waited_for(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody else leads nothing is sent twice, however often the others are asked."""
    monkeypatch.setattr("laminar.client.produce.leader_watchdog.PATIENCE_MS", 20)
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await topic.append(b"0", partition=1)
        cluster.silent.add(1)
        appending = asyncio.create_task(topic.append(b"1", partition=1))
        asked = [(0, "/v1/topics/t/partitions?wait_ms=150"), (2, "/v1/topics/t/partitions?wait_ms=150")]
        await _until(lambda: all(_requests(cluster).count(each) > 1 for each in asked))
        cluster.silent.clear()
        receipt = await appending
        statistics = client.statistics()

    assert (1, 0) == (receipt.offset, statistics["resent_batches"])


@pytest.mark.parametrize("producer", [True, False])
async def test_closing_says_what_becomes_of_an_append_that_was_sent(cluster: Any, producer: bool) -> None:
    """It may be appended, so it is not one to repeat: as with datagrams."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await topic.append(b"0", partition=1)
        cluster.silent.add(1)
        sent = len(_requests(cluster))
        path = "/v1/topics/t/partitions/1/records"
        if producer:
            appending: asyncio.Future[Any] = asyncio.ensure_future(topic.append(b"1", partition=1))
        else:
            session = client._session
            assert session is not None
            appending = asyncio.ensure_future(session.call("POST", path, body=b"1", timeout_s=30))
        await _until(lambda: path in [target for _, target in _requests(cluster)[sent:]])
        await client.close()

        with pytest.raises(laminar.OutcomeUnknown) as caught:
            await appending
        cluster.silent.clear()

    assert "unknown" == caught.value.outcome


async def _until(told: Callable[[], bool]) -> None:
    """The fake nodes are on another loop, and another thread."""
    async with asyncio.timeout(60):
        while not told():  # noqa: ASYNC110  # for that reason
            await asyncio.sleep(0.005)


def _requests(cluster: Any) -> list[tuple[int, str]]:
    return [(node, target) for node, _, target in cluster.requests]


async def test_nobody_is_sent_to_a_leader_that_was_left_for_its_silence(cluster: Any) -> None:
    """A node that has not noticed yet still names it; soon it names another."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        assert client._session is not None
        places = await client._session.topic_map("t")
        places.learn_leader(0, cluster.urls[2])
        client._session.left_silent(cluster.urls[0])
        appending = asyncio.create_task(topic.append(b"x", partition=0))
        records = "/v1/topics/t/partitions/0/records"
        await _until(lambda: _requests(cluster).count((2, records)) >= 3)
        cluster.topics["t"][0].leader = 1
        receipt = await appending

    assert 0 == receipt.offset
    assert (0, records) not in _requests(cluster)


async def test_reads_are_spread_and_never_go_back(cluster: Any) -> None:
    """Every replica serves, but none that is behind what this client has seen."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(30):
            await topic.append(b"%d" % number, partition=0)
        cluster.topics["t"][0].lag[1] = 5
        for _ in range(10):
            values = [r.raw async for r in topic.read(partitions=[0], fetch_bytes=1000)]
            assert [b"%d" % n for n in range(30)] == values
        served = client.statistics()["reads_by_node"]

    assert {"n0", "n2"} == set(served)


@pytest.mark.parametrize("hole", [4, 5, 6, 7])
async def test_a_replica_that_passes_over_records_is_not_believed(cluster: Any, hole: int) -> None:
    """Its answer begins, or goes on, after the offset asked for: another replica is asked."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(10):
            await topic.append(b"%d" % number, partition=0)
        cluster.holes.add((1, hole))
        for _ in range(10):
            values = [r.raw async for r in topic.read(partitions=[0], fetch_bytes=1_000)]
            assert [b"%d" % n for n in range(10)] == values
    assert any(node == 1 and "/records?" in target for node, target in _requests(cluster))


async def test_a_read_is_one_request_where_one_answer_holds_all(cluster: Any) -> None:
    """The leader's answer to the first fetch says where the partition begins and ends."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(3):
            await topic.append(b"%d" % number, partition=0)
        before = len(cluster.requests)
        earliest = [r.raw async for r in topic.read(partitions=[0])]
        latest = [r.raw async for r in topic.read("latest", partitions=[0])]
        named = [r.raw async for r in topic.read({0: 1}, partitions=[0])]

    assert ([b"0", b"1", b"2"], [], [b"1", b"2"]) == (earliest, latest, named)
    assert 3 == len(cluster.requests) - before


async def test_a_leader_that_passes_over_records_is_not_believed_of_where_they_begin(cluster: Any) -> None:
    """Its first batch lies after the offset that it says it began at: other replicas are asked."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(10):
            await topic.append(b"%d" % number, partition=0)
        client.session.timeout_s = 6.0
        cluster.holes.add((0, 0))
        values = [r.raw async for r in topic.read(partitions=[0])]

    assert [b"%d" % n for n in range(10)] == values


async def test_a_read_of_records_that_every_replica_passes_over_says_which(cluster: Any) -> None:
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(10):
            await topic.append(b"%d" % number, partition=0)
        client.session.timeout_s = 3.0
        cluster.holes |= {(node, 4) for node in range(3)}
        values = []
        with pytest.raises(laminar.TimedOut, match="answered 5 for 4"):
            async for record in topic.read(partitions=[0]):
                values.append(record.raw)

    assert [b"%d" % n for n in range(4)] == values


async def test_a_read_ends_where_the_topic_ended(cluster: Any) -> None:
    """Without follow, what is appended during the read is not part of it, even within a batch's frame."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        await asyncio.gather(*(topic.append(b"%d" % n, partition=0) for n in range(10)))
        values = []
        async for record in topic.read({0: 4}, partitions=[0]):
            values.append(record.raw)
            await topic.append(b"more", partition=0)

    assert [b"%d" % n for n in range(4, 10)] == values


async def test_a_followed_topic_goes_on(cluster: Any) -> None:
    """follow=True yields what is appended later."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        async with topic.read(follow=True, partitions=[3]) as records:
            stream = aiter(records)
            waiting = asyncio.ensure_future(anext(stream))
            await topic.append(b"later", partition=3)
            record = await waiting

    assert (b"later", 3, 0) == (record.value, record.partition, record.offset)


async def test_a_cursor_resumes_behind_what_was_handled(cluster: Any) -> None:
    """A clean exit commits what the loop has seen; the next reader goes on from there."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(5):
            await topic.append(b"%d" % number, partition=0)
        async with topic.read(cursor="billing", partitions=[0]) as records:
            async for record in records:
                if record.raw == b"2":
                    break
        left = [r.raw async for r in topic.read(cursor="billing", partitions=[0])]
        committed = await topic.cursor("billing")

    assert [b"3", b"4"] == left
    assert 3 == committed[0]


@pytest.mark.parametrize("follow", [False, True])
async def test_a_loop_that_breaks_off_is_gone_on_with_by_the_next(cluster: Any, follow: bool) -> None:
    """In the middle of a batch, too, and whatever way the next records are asked for."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for _ in range(2):
            async with topic.producer() as producer:
                for number in range(10):
                    producer.send(b"%d" % number, partition=0)
        seen = []
        async with topic.read(partitions=[0], follow=follow) as records:
            for wanted in (1, 3, 8, 9):
                async for record in records:
                    seen.append(record.offset)
                    if len(seen) == wanted:
                        break
            assert 9 == records.positions[0]
            batch = await records.next_batch()
            assert batch is not None
            seen += batch.offsets
            async for record in records:
                seen.append(record.offset)
                if len(seen) == 19:
                    break
            stale = aiter(records)
            seen.append((await anext(stale)).offset)
            await topic.append(b"more", partition=0)
            if follow:
                seen.append((await anext(stale)).offset)

    assert list(range(20 + follow)) == seen


async def test_a_cursor_moved_by_another_is_not_overwritten(cluster: Any) -> None:
    """commit is compare-and-set on the positions that were read."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(3):
            await topic.append(b"%d" % number, partition=0)
        await topic.set_cursor("c", {0: 1})
        reader = topic.read(cursor="c", partitions=[0])
        with pytest.raises(laminar.PreconditionFailed):
            async with reader as records:
                async for _ in records:
                    cluster.cursors[("t", "c")] = {"0": 2}


async def test_expired_offsets_are_an_error(cluster: Any) -> None:
    """A start that retention gave up raises OffsetExpired with the fields of the answer."""
    async with aio.connect(cluster.urls) as client:
        topic = client.topic("t")
        for number in range(3):
            await topic.append(b"%d" % number, partition=0)
        cluster.topics["t"][0].start = 2
        with pytest.raises(laminar.OffsetExpired) as caught:
            async for _ in topic.read({0: 0}, partitions=[0]):
                pass

        await topic.set_cursor("slow", {0: 1})
        with pytest.raises(laminar.OffsetExpired) as named:
            _ = [record async for record in topic.read(cursor="slow", partitions=[0])]
        reader = topic.read(cursor="slow", partitions=[0], on_expired="earliest")
        async with reader as records:
            left = [record.raw async for record in records]
        cluster.topics["t"][0].start = 3
        await topic.set_cursor("slow", {0: 1})
        async with topic.read(cursor="slow", partitions=[0], on_expired="earliest") as records:
            nothing = [record.raw async for record in records]
        committed = await topic.cursor("slow")

    assert {"partition": 0, "position": 0, "earliest": 2} == caught.value.fields
    assert ("cursor", "slow", 2) == (named.value.field, named.value.value, named.value.limit)
    assert "cursor 'slow'" in str(named.value) and {"partition": 0, "position": 1, "earliest": 2}.items() <= (
        named.value.fields.items()
    )
    assert ([b"2"], [], {0: 3}) == (left, nothing, committed)


class Flight(msgspec.Struct):
    origin: str
    delay: int


async def test_a_codec_makes_values_typed(cluster: Any) -> None:
    """With laminar.json(Flight) a topic takes and gives Flights."""
    async with aio.connect(cluster.urls) as client:
        flights = client.topic("t", laminar.json(Flight))
        await flights.append(Flight("SFO", 3), key="SFO", tag="AA", headers={"h": b"1"})
        record = await anext(aiter(flights.read()))

    assert (Flight("SFO", 3), b"SFO", "AA") == (record.value, record.key, record.tag)
    assert ({"h": b"1"}, {"origin": "SFO", "delay": 3}) == (dict(record.headers), record.json())


async def test_topics_are_created_described_and_deleted(cluster: Any) -> None:
    """create_topic is strict unless exist_ok; another shape is always AlreadyExists."""
    async with aio.connect(cluster.urls) as client:
        await client.create_topic("new", partitions=2)
        await client.create_topic("new", partitions=2, exist_ok=True)
        with pytest.raises(laminar.AlreadyExists):
            await client.create_topic("new", partitions=2)
        with pytest.raises(laminar.AlreadyExists):
            await client.create_topic("new", partitions=3, exist_ok=True)
        described = await client.topic("new").describe()
        names = await client.topics()
        await client.delete_topic("new")
        with pytest.raises(laminar.NotFound):
            await client.topic("new").describe()

    assert (2, ["new", "t"]) == (described.partitions, names)


async def test_a_record_over_the_limit_is_refused_before_it_is_sent(cluster: Any) -> None:
    """`too_large` at once, naming the limit; what was sent before is not touched."""
    async with aio.connect(cluster.urls) as client, client.topic("t").producer() as producer:
        producer.send(b"small", partition=0)
        with pytest.raises(laminar.Error, match="over the limit of 8388608"):
            producer.send(bytes((8 << 20) + 1), partition=0)

    assert [b"small"] == cluster.values("t", 0)


async def test_the_buffer_has_an_end(cluster: Any) -> None:
    """A producer that never awaits is told, with the way out; one that awaits room goes on."""
    async with aio.connect(cluster.urls) as client:
        async with client.topic("t").producer(buffer_bytes=10_000) as producer:
            with pytest.raises(laminar.Overloaded, match="room"):
                for _ in range(100):
                    producer.send(bytes(1000))
            await producer.room()
            await producer.send_all((None, bytes(1000)) for _ in range(100))
            assert producer.statistics()["buffered_bytes"] <= 12_000


async def test_a_value_that_is_not_bytes_is_refused_where_it_is_given(cluster: Any) -> None:
    """At once, by its type's name; the records beside it in the batch are delivered."""
    async with aio.connect(cluster.urls) as client:
        topic: Any = await client.create_topic("bytes", partitions=1)
        with pytest.raises(TypeError, match="not str"):
            await topic.append("text")
        async with topic.producer() as producer:
            producer.send(b"one")
            with pytest.raises(TypeError, match="not int"):
                producer.send(2)
            producer.send(b"three")

        assert [b"one", b"three"] == [record.value async for record in topic.read()]


async def test_a_start_in_a_partition_that_is_not_there_is_refused(cluster: Any) -> None:
    """By name: read from the earliest instead, it would look as if all had been seen."""
    async with aio.connect(cluster.urls) as client:
        topic = await client.create_topic("two", partitions=2)
        with pytest.raises(laminar.ConfigError) as refused:
            [record async for record in topic.read({7: 0})]

    assert ("no_partition", 7, 1) == (refused.value.code, refused.value.value, refused.value.limit)
