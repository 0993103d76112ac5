"""Transactions by the client, on a real node: committed whole, once, in order, or not at all."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator

import pytest

import laminar
from laminar.aio import Client
from laminar.client.transact import sinks
from laminar.testing.nodes import serve


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One node of two shards; each test has topics and sinks of its own."""
    with serve(shards=2) as found:
        yield found


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with laminar.aio.connect(url) as opened:
        yield opened


async def values(client: Client, topic: str) -> list[list[bytes]]:
    """By partition, in the order of offsets, which are dense."""
    found: list[list[bytes]] = [[] for _ in await client.topic(topic).partitions()]
    async with client.topic(topic).read() as records:
        async for record in records:
            assert record.offset == len(found[record.partition])
            found[record.partition].append(record.raw)
    return found


async def test_a_block_commits_all_it_appended_and_nothing_is_seen_before(client: Client) -> None:
    """Over two topics; keys lie where a producer puts them; tags, headers and times are kept."""
    await client.create_topic("a", partitions=4)
    await client.create_topic("b", partitions=2)
    expected = await client.topic("a").append(b"plain", key="k")

    async with client.transaction("whole", 0) as tx:
        tx.append("a", b"1", key="k", tag="new", headers={"h": b"x"}, timestamp_ms=1_000)
        tx.append(client.topic("b", laminar.json()), {"n": 2}, partition=1)
        tx.append("a", b"3", key="k")
        assert 1 == sum(map(len, await values(client, "a")))

    assert "applied" == tx.result
    assert [b"plain", b"1", b"3"] == (await values(client, "a"))[expected.partition]
    assert [[], [b'{"n":2}']] == await values(client, "b")
    async with client.topic("a").read({expected.partition: 1}, partitions=[expected.partition]) as records:
        record = await anext(aiter(records))
    assert ("new", {"h": b"x"}, 1_000) == (record.tag, record.headers, record.timestamp)


async def test_workers_stage_under_an_epoch_that_begins_with_the_commit(client: Client) -> None:
    """It begins if nobody else began since it was read; who stages and is late is refused."""
    await client.create_topic("later")
    sink = client.sink("later")
    early, late = sink.stage(0, epoch=1), sink.stage(0, epoch=2)
    async with early, late:
        early.append("later", b"early")
        late.append("later", b"late")

    assert 1 == await sink.begin(epoch=1)
    with pytest.raises(laminar.Fenced):
        await sink.begin(epoch=1)
    assert "applied" == await sink.commit(0, [early.staged], epoch=1)
    assert 2 == await client.sink("later").begin(epoch=2)
    with pytest.raises(laminar.Fenced):
        await sink.begin(epoch=1)
    with pytest.raises(laminar.Error) as wrong:
        await sink.begin(epoch=4)

    assert ("epoch", 4, 2) == (wrong.value.field, int(wrong.value.value), int(wrong.value.limit))
    assert [[b"early"]] == await values(client, "later")


async def test_a_commit_that_is_too_large_for_one_request_is_made_in_several(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names, and no more; and a block that is tried again after it is skipped, as ever."""
    monkeypatch.setattr(sinks, "ONE_REQUEST_BYTES", 0)
    await client.create_topic("prepared", partitions=20)
    for _ in range(2):
        async with client.transaction("prepared", 0) as tx:
            for partition in range(20):
                tx.append("prepared", b"%d" % partition, partition=partition)
    assert "already" == tx.result
    sink = client.sink("prepared")
    async with sink.stage(1, epoch=sink.epoch) as left_out, sink.stage(1, epoch=sink.epoch) as counts:
        left_out.append("prepared", b"left out", partition=0)
        counts.append("prepared", b"counts", partition=0)
    again = [await sink.commit(1, [counts.staged], fingerprint="f") for _ in range(2)]

    assert ["applied", "already"] == again and "f" == (await sink.describe()).fingerprint
    assert [[b"0", b"counts"], *([b"%d" % number] for number in range(1, 20))] == await values(
        client, "prepared"
    )


async def test_an_exception_leaves_nothing_and_the_number_stays_free(client: Client) -> None:
    """Even of what was staged already, also once the same number is committed with other records."""
    await client.create_topic("c", partitions=2)
    with pytest.raises(ZeroDivisionError):
        async with client.transaction("broken", 0, batch_bytes=1_000) as tx:
            for number in range(100):
                tx.append("c", b"%0100d" % number, partition=number % 2)
            await tx.append_all("c", ((None, b"x" * 1_000) for _ in range(50)))
            raise ZeroDivisionError

    async with client.transaction("broken", 0) as tx:
        tx.append("c", b"only", partition=0)

    assert "applied" == tx.result
    assert [[b"only"], []] == await values(client, "c")


async def test_a_number_that_was_committed_is_skipped(client: Client) -> None:
    """By the same client, and by one that begins anew: it learns so before anything is sent."""
    await client.create_topic("d")
    for expected in ("applied", "already"):
        async with client.transaction("once", 5) as tx:
            assert (expected == "already") is tx.already
            tx.append("d", b"five")
        assert expected == tx.result
    async with laminar.aio.connect(client.session.endpoints.urls) as other:
        async with other.transaction("once", 5) as tx:
            assert tx.already
            tx.append("d", b"five")
        assert "already" == tx.result
        assert 5 == other.sink("once").committed

    assert [[b"five"]] == await values(client, "d")


async def test_pitfall_41_an_older_driver_is_fenced_and_stays_so(client: Client) -> None:
    """Also in its later blocks, before it sends anything; only its user takes the sink back."""
    await client.create_topic("e")
    async with client.transaction("fenced", 0) as tx:
        tx.append("e", b"0")
    async with laminar.aio.connect(client.session.endpoints.urls) as newer:
        await newer.sink("fenced").begin()
        for _ in range(2):
            with pytest.raises(laminar.Fenced) as caught:
                async with client.transaction("fenced", 1) as tx:
                    tx.append("e", b"of the older")
            assert (1, 2) == (caught.value.value, caught.value.limit)
        async with newer.transaction("fenced", 1) as tx:
            tx.append("e", b"1")
    assert 3 == await client.sink("fenced").begin()
    async with client.transaction("fenced", 2) as tx:
        tx.append("e", b"2")

    assert [[b"0", b"1", b"2"]] == await values(client, "e")


async def test_pitfall_41_drivers_that_take_over_at_any_moment_commit_each_number_once(
    client: Client, url: str
) -> None:
    """Four of them, each beginning anew all the time: numbers are dense, whole, and of one driver each."""
    await client.create_topic("k", partitions=2)

    async def drive(name: int) -> int:
        applied = 0
        async with laminar.aio.connect(url) as own:
            sink = own.sink("contended")
            for _ in range(12):
                await sink.begin()
                number = 0 if sink.committed is None else sink.committed + 1
                try:
                    async with own.transaction("contended", number) as tx:
                        for place in range(6):
                            tx.append("k", b"%d %d %d" % (number, name, place), partition=place % 2)
                except laminar.Fenced:
                    continue
                applied += tx.result == "applied"
        return applied

    applied = sum(await asyncio.gather(*(drive(name) for name in range(4))))
    assert 12 == await drive(4), "nobody was there to fence it"
    applied += 12
    committed = (await client.sink("contended").describe()).committed
    assert committed is not None and applied == committed + 1
    found = [[tuple(map(int, raw.split())) for raw in each] for each in await values(client, "k")]
    who = {number: name for number, name, _ in found[0]}
    assert list(range(applied)) == list(who)
    for partition in (0, 1):
        places = range(partition, 6, 2)
        assert [(number, who[number], place) for number in who for place in places] == found[partition]


async def test_workers_stage_and_the_driver_commits_what_counts(client: Client, url: str) -> None:
    """References travel pickled; of several attempts only those that are named are seen, all of each."""
    await client.create_topic("f", partitions=3)
    sink = client.sink("job")
    epoch = await sink.begin()
    staged = []
    for _ in range(3):
        async with laminar.aio.connect(url) as worker:
            async with worker.sink("job").stage(0, epoch=epoch, batch_bytes=500) as stager:
                for number in range(90):
                    stager.append("f", b"%03d" % number, partition=number % 3)
        staged.append(pickle.loads(pickle.dumps(stager.staged)))
    assert [90, 90, 90] == [each.records for each in staged]
    assert [[], [], []] == await values(client, "f")

    with pytest.raises(laminar.ConfigError, match="twice"):
        await sink.commit(0, [staged[0], staged[0]])
    assert "applied" == await sink.commit(0, [staged[0], staged[2]])
    assert "already" == await sink.commit(0, [staged[1]])
    assert 0 == sink.committed
    for partition, found in enumerate(await values(client, "f")):
        once = [b"%03d" % number for number in range(partition, 90, 3)]
        assert sorted(once * 2) == sorted(found)
        # Each worker's records are in their order, one worker's behind the other's.
        assert once * 2 == found


async def test_a_large_batch_is_staged_in_bounded_memory_and_in_order(client: Client) -> None:
    """Much more than the buffer, over partitions that alone never fill a stage."""
    await client.create_topic("g", partitions=8)
    async with client.transaction("large", 0, batch_bytes=100_000, buffer_bytes=200_000) as tx:
        most = 0
        for number in range(20_000):
            tx.append("g", b"%0100d" % number, key=b"%d" % (number % 50))
            if not tx.has_room():
                await tx.room()
            most = max(most, tx.sender.stages.buffered_bytes)
    assert most <= 200_200

    last: dict[bytes | None, int] = {}
    count = 0
    async with client.topic("g").read() as records:
        async for record in records:
            assert last.get(record.key, -1) < int(record.raw)
            last[record.key] = int(record.raw)
            count += 1
    assert 20_000 == count


async def test_a_topic_that_is_not_there_fails_the_block_and_the_next_one_works(client: Client) -> None:
    """The error names the topic; nothing of the batch is seen."""
    await client.create_topic("h")
    with pytest.raises(laminar.NotFound, match="nowhere"):
        async with client.transaction("missing", 0) as tx:
            tx.append("h", b"lost")
            tx.append("nowhere", b"x")
    async with client.transaction("missing", 0) as tx:
        tx.append("h", b"kept")

    assert [[b"kept"]] == await values(client, "h")


async def test_after_a_commit_that_failed_the_number_can_be_tried_again(client: Client) -> None:
    """What the failed one prepared is in the way of its own epoch: the client begins the next by itself."""
    await client.create_topic("i", partitions=2)
    sink = client.sink("retried")
    epoch = await sink.begin()
    async with sink.stage(0) as stager:
        stager.append("i", b"first", partition=0)
        stager.append("i", b"first", partition=1)
    staged = stager.staged
    torn = staged._replace(parts=(staged.parts[0], staged.parts[1]._replace(stages=(7,))))
    with pytest.raises(laminar.Error) as caught:
        await sink.commit(0, [torn])
    assert "no_stage" == caught.value.code
    async with client.transaction("retried", 0) as tx:
        tx.append("i", b"second", partition=0)
    assert ("applied", epoch + 1) == (tx.result, sink.epoch)
    assert [[b"second"], []] == await values(client, "i")


async def test_an_empty_block_commits_its_number(client: Client) -> None:
    """A driver whose batch has no records goes on all the same."""
    async with client.transaction("empty", 3) as tx:
        pass
    assert ("applied", 3) == (tx.result, (await client.sink("empty").describe()).committed)


async def test_a_sink_that_was_begun_once_stays_one_when_a_block_begins_it_anew(client: Client) -> None:
    """As after a commit of unknown outcome; whoever says `begin` without makes it one that is kept."""
    await client.create_topic("once")
    sink = client.sink("made-up")
    first = await sink.begin(once=True)
    assert first > 1 << 31
    async with sink.stage(0) as stager:
        stager.append("once", b"1")
    sink._epoch.doubtful = True
    async with client.transaction("made-up", 0) as tx:
        tx.append("once", b"2")
    assert ("applied", first + 1) == (tx.result, sink.epoch)
    assert [[b"2"]] == await values(client, "once")

    again = laminar.aio.Sink(client.session, "made-up")
    assert first + 2 == await again.begin()
    assert 0 == again.committed


def test_the_sync_face_commits_skips_and_rolls_back(url: str) -> None:
    """With a buffer much smaller than what is appended, `append` waits for room by itself."""
    with laminar.connect(url) as client:
        topic = client.create_topic("j", partitions=2)
        with client.transaction("sync", 0, batch_bytes=2_000, buffer_bytes=4_000) as tx:
            for number in range(5_000):
                tx.append(topic, b"%d" % number, partition=number % 2)
        assert "applied" == tx.result
        with pytest.raises(ZeroDivisionError), client.transaction("sync", 1) as tx:
            tx.append("j", b"no", partition=0)
            raise ZeroDivisionError
        with client.transaction("sync", 0) as tx:
            assert tx.already
        with client.sink("sync").stage(1) as stager:
            assert 2 == stager.append_all("j", [("a", b"x"), ("b", b"y")])
        assert "applied" == client.sink("sync").commit(1, [stager.staged])
        found: dict[int, list[bytes]] = {0: [], 1: []}
        for record in topic.read():
            found[record.partition].append(record.raw)

    late = found[0][2_500:] + found[1][2_500:]
    assert {b"x", b"y"} == set(late)
    assert [[b"%d" % n for n in range(p, 5_000, 2)] for p in (0, 1)] == [found[p][:2_500] for p in (0, 1)]
