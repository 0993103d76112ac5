"""Consumers of a channel, on a node in the test's loop: jobs are received, said something of, and worked."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

import laminar
from laminar.client.consume.channel import Channel
from laminar.client.consume.jobs import Job
from laminar.client.errors import Late
from laminar.client.topic import Topic

# It ends what hangs, and judges nothing.
WAIT_S = 60.0


@pytest.fixture
async def topic(tmp_path: Path) -> AsyncIterator[Topic[bytes]]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        yield await node.client.create_topic("t", partitions=2)


async def fill(topic: Topic[bytes], count: int, *, keys: int = 7) -> None:
    async with topic.producer() as producer:
        for number in range(count):
            producer.send(b"%d" % number, key=f"k{number % keys}")


async def taken(channel: Channel[bytes], count: int) -> list[Job[bytes]]:
    jobs: list[Job[bytes]] = []
    async with asyncio.timeout(WAIT_S):
        while len(jobs) < count:
            jobs += await channel.receive_batch(count - len(jobs), wait=5)
    return jobs


async def test_a_channel_is_made_or_taken(topic: Topic[bytes]) -> None:
    with pytest.raises(laminar.NotFound):
        await topic.channel("c")
    made = await topic.channel("c", order="key", exist_ok=True)
    same = await topic.channel("c", order="key", exist_ok=True)
    with pytest.raises(laminar.AlreadyExists):
        await topic.channel("c", order="key")
    with pytest.raises(laminar.AlreadyExists, match="order is key, not default"):
        await topic.channel("c", exist_ok=True)

    assert {"order": "key"} == made.settings == (await topic.channel("c")).settings
    assert (await made.describe()).id == (await same.describe()).id


async def test_a_job_has_what_its_record_has(topic: Topic[bytes]) -> None:
    channel = await topic.channel("c", exist_ok=True)
    put = await topic.append(b"v", key="k", tag="t", headers={"h": b"1"}, timestamp_ms=5, partition=1)

    (job,) = await taken(channel, 1)

    assert (1, put.offset, b"v", b"k", "t", {"h": b"1"}, 5, 1, 0) == (
        *(job.partition, job.offset, job.value, job.key, job.tag, job.headers, job.timestamp),
        *(job.attempt, job.floor),
    )
    assert job.token == f"1:{put.offset}:{job.fence[1]}" and 1 == job.fence[0]
    await job.ack()
    await job.ack()  # as after an answer that was lost
    described = await channel.describe()
    assert (0, 0, 0) == (described.depth, described.out, described.aside)


async def test_what_is_nacked_and_released_comes_again(topic: Topic[bytes]) -> None:
    """A nack counts as an attempt, a release doesn't; the last attempt leaves a dead record."""
    channel = await topic.channel("c", max_attempts=2, retry_ms=60_000)
    await topic.append(b"v")
    (job,) = await taken(channel, 1)
    await job.release()
    (job,) = await taken(channel, 1)
    await job.nack(delay=0, reason="no luck")
    (again,) = await taken(channel, 1)
    await again.nack(reason="\ud800" + "x" * 300)

    (dead,) = await channel.dead()
    assert (1, 2) == (job.attempt, again.attempt)
    assert (again.offset, 2, False, "?" + "x" * 199) == (
        *(dead.offset, dead.attempts, dead.waits_for_key, dead.reason),
    )
    assert (None, None, False) == (dead.key, dead.tag, dead.unreadable)
    assert again.fence > job.fence
    assert [dead] == await channel.dead(reason="?x")
    assert [] == await channel.dead(key="k & t", tag="t") == await channel.dead(reason="no luck")
    assert 1 == await channel.replay([dead])
    (job,) = await taken(channel, 1)
    assert 1 == job.attempt
    await job.nack(delay=30)
    (waiting,) = await channel.aside()
    assert waiting.offset == job.offset
    assert [] == await channel.dead() and 0 == await channel.drop("all")
    assert {0, 1} == set(await channel.seek("latest", drop=True))
    assert [] == await channel.aside(limit=5)
    with pytest.raises(laminar.ConfigError):
        await channel.drop("0:1:1")


async def test_what_is_late_says_so_and_changes_nothing(topic: Topic[bytes]) -> None:
    """Two consumers: the first one's time is over, and the second has the job."""
    first, second = await topic.channel("c", exist_ok=True), await topic.channel("c")
    await topic.append(b"v")
    (job,) = await first.receive_batch(1, timeout=1)
    (again,) = await taken(second, 1)

    for say in (job.ack, job.nack, job.release, job.extend):
        with pytest.raises(laminar.Late, match="is over") as late:
            await say()
        assert ("late", job.token) == (late.value.code, late.value.value)
    assert 2 == again.attempt
    settled = await second.settle(ack=[job.token], release=[again.token])
    assert (1, (job.token,)) == settled


async def test_an_extension_gives_the_time_again(topic: Topic[bytes]) -> None:
    """As long as no more than its time passes between two of them, nobody else gets the job."""
    channel = await topic.channel("c", exist_ok=True)
    await topic.append(b"v")
    begun_s = said_s = time.monotonic()
    (job,) = await channel.receive_batch(1, timeout=2)
    while time.monotonic() < begun_s + 3.0:
        asked_s = time.monotonic()
        again = await channel.receive_batch(1, wait=0.3, timeout=2)
        if again:  # also while its receiver stood still: that begins anew
            assert time.monotonic() >= said_s + 2.0
            (job,), begun_s, said_s = again, asked_s, asked_s
        asked_s = time.monotonic()
        try:
            await job.extend()
        except Late:
            assert time.monotonic() >= said_s + 2.0
            begun_s = time.monotonic()
        else:
            said_s = asked_s
    await job.extend(60)
    assert not job.half_over
    await job.ack()


async def extended(job: Job[bytes]) -> None:
    """Extend a job that may be acknowledged meanwhile."""
    with suppress(Late):
        await job.extend()


async def test_what_is_said_at_the_same_time_goes_in_one_request(topic: Topic[bytes]) -> None:
    """Also of records in many runs, and of a job of which two things are said."""
    channel = await topic.channel("c", exist_ok=True)
    await fill(topic, 500)
    jobs = await taken(channel, 500)
    session = channel.source.session
    before = sum(load.requests for load in session.balancer.loads.values())

    await asyncio.gather(
        *(job.ack() if number % 3 else job.nack(delay=60) for number, job in enumerate(jobs[1:])),
        extended(jobs[0]),
        jobs[0].ack(),
    )

    asked = sum(load.requests for load in session.balancer.loads.values()) - before
    described = await channel.describe()
    assert (167, 0, 167) == (described.depth, described.out, described.aside)
    assert asked <= 4, asked


async def test_a_pause_of_zero_is_not_the_pause_of_the_channel(topic: Topic[bytes]) -> None:
    """Said at the same time of jobs that follow each other, in either order."""
    channel = await topic.channel("c", retry_ms=3_600_000, retry_max_ms=3_600_000)
    for number in range(4):
        await topic.append(b"%d" % number, partition=1)
    jobs = await taken(channel, 4)

    await asyncio.gather(*(job.nack(delay=None if job.offset in (0, 3) else 0) for job in jobs))

    assert [b"1", b"2"] == sorted(job.value for job in await taken(channel, 2))
    assert [0, 3] == [each.offset for each in await channel.aside()]


async def test_a_loop_ends_when_it_is_closed_and_gives_back_what_it_has_not_yielded(
    topic: Topic[bytes],
) -> None:
    channel, other = await topic.channel("c", exist_ok=True), await topic.channel("c")
    await fill(topic, 20)
    async with aclosing(channel.receive(20)) as jobs:
        async for job in jobs:
            await job.ack()
            break
    left = await taken(other, 19)
    assert {1} == {job.attempt for job in left}
    await asyncio.gather(*(job.ack() for job in left))

    async def loop() -> int:
        return len([job async for job in channel.receive()])

    waiting = asyncio.create_task(loop())
    await asyncio.wait({waiting}, timeout=0.2)
    channel.close()
    assert 0 == await asyncio.wait_for(waiting, WAIT_S)


async def test_a_slow_loop_yields_no_job_whose_time_is_over(topic: Topic[bytes]) -> None:
    """Jobs that wait in it for their turn are extended before they are yielded."""
    channel = await topic.channel("c", timeout_ms=8_000)
    for number in range(3):
        await topic.append(b"%d" % number, partition=0)
    seen: list[tuple[bytes, int]] = []
    async with asyncio.timeout(WAIT_S):
        async for job in channel.receive():
            await asyncio.sleep(2.8)
            await job.ack()
            seen.append((job.value, job.attempt))
            if len(seen) == 3:
                break

    assert [(b"%d" % number, 1) for number in range(3)] == seen


async def test_a_large_record_is_read_as_a_stream(topic: Topic[bytes]) -> None:
    channel = await topic.channel("c", exist_ok=True)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100_000

    await topic.append_stream(pieces(), part_bytes=1 << 20)
    (job,) = await taken(channel, 1)

    assert 2_000_000 == job.large_bytes and b"" == job.value
    async with job.open() as value:
        assert b"x" * 2_000_000 == await value.read()
    await job.ack()


# -- work ----------------------------------------------------------------------------------------


async def until(done: asyncio.Event, working: asyncio.Task[None]) -> None:
    """Cancel the work once it is done."""
    await asyncio.wait(
        {working, ended := asyncio.create_task(done.wait())}, timeout=WAIT_S, return_when="FIRST_COMPLETED"
    )
    ended.cancel()
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    assert done.is_set()


async def test_work_acknowledges_retries_and_keeps_the_order_of_keys(topic: Topic[bytes]) -> None:
    """Two workers over two partitions; some jobs fail at first."""
    await fill(topic, 300)
    await topic.create_channel("c", settings={"order": "key", "retry_ms": 20})
    worked: dict[bytes | None, list[int]] = defaultdict(list)
    running: set[bytes | None] = set()
    most = 0
    done = asyncio.Event()

    async def handle(job: Job[bytes]) -> None:
        nonlocal most
        assert job.key not in running
        running.add(job.key)
        most = max(most, len(running))
        await asyncio.sleep(0.002)
        running.discard(job.key)
        number = int(job.value)
        if number % 50 == 3 and job.attempt == 1:
            raise laminar.Retry("later", delay=0.01)
        if number % 50 == 7 and job.attempt == 1:
            raise ValueError("at first it fails")
        worked[job.key].append(number)
        if sum(map(len, worked.values())) == 300:
            done.set()

    channels = [await topic.channel("c") for _ in range(2)]
    workers = [asyncio.create_task(each.work(handle, concurrency=5)) for each in channels]
    await until(done, workers[0])
    channels[1].close()
    await asyncio.wait_for(workers[1], WAIT_S)

    assert {f"k{k}".encode(): list(range(k, 300, 7)) for k in range(7)} == worked
    assert most > 3
    described = await channels[0].describe()
    assert (0, 0, 0, 0) == (described.depth, described.out, described.aside, described.dead)


async def test_jobs_that_were_taken_ahead_go_to_others_when_handlers_become_slow(topic: Topic[bytes]) -> None:
    """Quick handlers have some jobs ready; these are not kept by ones that do not return."""
    await fill(topic, 200)
    channel = await topic.channel("c", exist_ok=True)
    slow = asyncio.Event()
    handled: set[bytes] = set()

    async def handle(job: Job[bytes]) -> None:
        if len(handled) < 100:
            handled.add(job.value)
            await asyncio.sleep(0.001)
            return
        slow.set()
        await asyncio.sleep(60)

    working = asyncio.create_task(channel.work(handle, concurrency=4, drain=0.0))
    await asyncio.wait_for(slow.wait(), WAIT_S)

    jobs = await taken(await topic.channel("c"), 200 - 100 - 4)

    assert {1} == {job.attempt for job in jobs}
    assert not handled & {job.value for job in jobs}
    working.cancel()
    await asyncio.wait({working})


async def test_the_reason_of_a_failure_is_that_of_the_exception(topic: Topic[bytes]) -> None:
    channel = await topic.channel("c", max_attempts=1)
    await topic.append(b"v")
    done = asyncio.Event()

    async def handle(job: Job[bytes]) -> None:
        done.set()
        raise ValueError("no number")

    await until(done, asyncio.create_task(channel.work(handle)))

    (dead,) = await channel.dead()
    assert "ValueError: no number" == dead.reason


async def test_a_job_is_extended_while_its_handler_runs(topic: Topic[bytes]) -> None:
    channel = await topic.channel("c", timeout_ms=6_000)
    await topic.append(b"v")
    done = asyncio.Event()
    attempts = []

    async def handle(job: Job[bytes]) -> None:
        attempts.append(job.attempt)
        await asyncio.sleep(6.6)
        done.set()

    await until(done, asyncio.create_task(channel.work(handle, concurrency=2)))

    assert [1] == attempts
    described = await channel.describe()
    assert (0, 0, 0) == (described.depth, described.out, described.aside)


async def test_sigterm_lets_handlers_end_and_gives_back_what_takes_too_long(topic: Topic[bytes]) -> None:
    """The one that returns in time is acknowledged; the other's job is another consumer's at once."""
    channel = await topic.channel("c", exist_ok=True)
    await topic.append(b"quick")
    await topic.append(b"slow")
    running: set[bytes] = set()
    both = asyncio.Event()

    async def handle(job: Job[bytes]) -> None:
        running.add(job.value)
        if len(running) == 2:
            both.set()
        await asyncio.sleep(0.3 if job.value == b"quick" else 60)

    working = asyncio.create_task(channel.work(handle, drain=2.5))
    await asyncio.wait_for(both.wait(), WAIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(working, WAIT_S)

    assert signal.SIG_DFL is signal.getsignal(signal.SIGTERM)
    (job,) = await taken(channel, 1)
    assert (b"slow", 1) == (job.value, job.attempt)
    assert 1 == (await channel.describe()).out


async def test_work_fails_when_the_channel_is_deleted(topic: Topic[bytes]) -> None:
    channel = await topic.channel("c", exist_ok=True)

    async def handle(job: Job[bytes]) -> None:
        await topic.delete_channel("c")

    await topic.append(b"v")
    with pytest.raises(laminar.NotFound):
        await asyncio.wait_for(channel.work(handle), WAIT_S)
    with pytest.raises(laminar.ConfigError):
        await channel.work(handle, concurrency=0)
