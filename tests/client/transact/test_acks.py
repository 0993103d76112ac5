"""Transactions that acknowledge the jobs they were made from: all or nothing, on a real node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import laminar
from laminar.aio import Client
from laminar.client.consume.channel import Channel
from laminar.client.consume.jobs import Job
from laminar.client.net.session import Session
from laminar.client.policy import staging
from laminar.client.transact import sinks
from laminar.testing.nodes import serve
from membership.catalog import CODE_VERSION

WAIT_S = 60.0


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        await node.client.create_topic("orders", partitions=2)
        await node.client.create_topic("bills", partitions=2)
        yield node.client


async def jobs_of(channel: Channel[bytes], count: int) -> list[Job[bytes]]:
    jobs: list[Job[bytes]] = []
    async with asyncio.timeout(WAIT_S):
        while len(jobs) < count:
            jobs += await channel.receive_batch(count - len(jobs), wait=5)
    return jobs


async def bills(client: Client) -> list[bytes]:
    async with client.topic("bills").read() as records:
        return sorted([record.raw async for record in records])


async def test_jobs_end_with_the_records_that_were_made_of_them(client: Client) -> None:
    """In a block all or nothing: after an exception they are as they were, and may be acknowledged."""
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    for number in range(6):
        await orders.append(b"%d" % number, key=f"k{number}")
    jobs = await jobs_of(channel, 6)
    assert {job.channel for job in jobs} == {"billing"}

    async with client.transaction("billing", 0) as tx:
        for job in jobs[:4]:
            tx.append("bills", b"bill " + job.raw, key=job.key)
            await tx.ack(job)
    assert "applied" == tx.result
    assert sorted(b"bill " + job.raw for job in jobs[:4]) == await bills(client)
    await jobs[0].ack()  # done: it may be said again
    with pytest.raises(laminar.Late):
        await jobs[1].nack()

    with pytest.raises(ZeroDivisionError):
        async with client.transaction("billing", 1) as tx:
            await tx.ack(*jobs[4:])
            raise ZeroDivisionError
    assert 2 == (await channel.describe()).out
    async with client.transaction("billing", 1) as tx:
        await tx.ack(*jobs[4:])
    assert (0, 0) == ((await channel.describe()).out, (await channel.describe()).depth)
    assert 4 == len(await bills(client)), "a batch may have jobs only"


async def test_a_batch_with_a_job_that_is_late_is_not_written(client: Client) -> None:
    """Its other jobs come again, or are acknowledged with the next batch of the sink."""
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    for number in range(8):
        await orders.append(b"%d" % number, key=f"k{number}")
    jobs = await jobs_of(channel, 8)
    late = next(job for job in jobs if job.partition == 0)
    rest = [job for job in jobs if job.partition == 1]
    await late.nack(delay=600)

    with pytest.raises(laminar.Late) as error:
        async with client.transaction("billing", 0) as tx:
            tx.append("bills", b"bill")
            await tx.ack(late, *rest)
    assert ("late", late.token, "not_applied") == (error.value.code, error.value.value, error.value.outcome)
    assert [] == await bills(client)
    async with client.transaction("billing", 0) as tx:
        tx.append("bills", b"bill")
        await tx.ack(*rest)
    assert [b"bill"] == await bills(client)
    assert len(jobs) - len(rest) - 1 == (await channel.describe()).out


async def test_a_number_that_was_committed_before_takes_no_jobs(client: Client) -> None:
    """Its records are not written again: who acknowledged the jobs would lose them."""
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    async with client.transaction("billing", 0):
        pass
    await orders.append(b"a")
    (job,) = await jobs_of(channel, 1)
    with pytest.raises(laminar.Error) as error:
        async with client.transaction("billing", 0) as tx:
            tx.append("bills", b"bill")
            await tx.ack(job)
    assert "already_committed" == error.value.code
    assert 1 == (await channel.describe()).out
    await job.ack()


async def test_workers_stage_and_their_driver_commits(client: Client) -> None:
    """What each acknowledged goes with what it staged; a large commit is made in several requests."""
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    for number in range(4):
        await orders.append(b"%d" % number, partition=number % 2)
    jobs = await jobs_of(channel, 4)
    sink = client.sink("billing")
    await sink.begin()
    staged = []
    for job in jobs:
        async with sink.stage(0) as stager:
            stager.append("orders", b"again " + job.raw, partition=0)
            await stager.ack(job)
        staged.append(stager.staged)
    assert 4 == sum(len(tokens) for each in staged for part in each.parts for _, tokens in part.acks)
    assert "applied" == await sink.commit(0, staged)
    assert (0, 4) == ((await channel.describe()).out, (await channel.describe()).depth)


async def test_older_nodes_may_be_asked_to_commit_what_acknowledges_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse a field that they do not know, also while nodes are being upgraded."""
    asked: list[bytes] = []
    call = Session.call

    async def noted(session: Session, method: str, path: str, **more: Any) -> Any:
        asked.append(more.get("body") or b"")
        return await call(session, method, path, **more)

    monkeypatch.setattr(Session, "call", noted)
    for number, most in enumerate((sinks.ONE_REQUEST_BYTES, 0)):
        monkeypatch.setattr(sinks, "ONE_REQUEST_BYTES", most)
        async with client.transaction("billing", number) as tx:
            tx.append("bills", b"bill")
        assert b'"epoch"' in asked[-1]
    assert not [body for body in asked if b'"acks"' in body]


async def test_no_job_is_acknowledged_before_all_programs_know_pins(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator of an older program would commit the records without the jobs, which come again."""
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    await orders.append(b"a")
    (job,) = await jobs_of(channel, 1)
    monkeypatch.setattr("laminar.node.api.transactions.acks.PINS_SINCE", CODE_VERSION + 1)
    sink = client.sink("billing")
    await sink.begin()
    async with sink.stage(0) as stager:
        stager.append("bills", b"bill")
        await stager.ack(job)
    with pytest.raises(laminar.Error) as error:
        await sink.commit(0, [stager.staged], timeout=60.0)
    assert ("not_enabled", "not_applied") == (error.value.code, error.value.outcome)
    assert [] == await bills(client)
    assert 0 == (await channel.describe()).pinned


async def test_more_jobs_than_a_batch_may_have_are_refused_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_ACKS", 1)
    orders = client.topic("orders")
    channel = await orders.channel("billing", exist_ok=True)
    await orders.append(b"a")
    await orders.append(b"b")
    jobs = await jobs_of(channel, 2)
    with pytest.raises(laminar.Error) as error:
        async with client.transaction("billing", 0) as tx:
            await tx.ack(*jobs)
    assert ("acks", 2, 1) == (error.value.field, error.value.value, error.value.limit)


# -- without a loop ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sync_client() -> Iterator[laminar.Client]:
    with serve() as url, laminar.connect(url) as found:
        yield found


def test_jobs_end_with_the_records_without_a_loop(sync_client: laminar.Client) -> None:
    """Of a worker with threads, too."""
    orders = sync_client.create_topic("orders")
    sync_client.create_topic("bills")
    channel = orders.channel("billing", exist_ok=True)
    for number in range(3):
        orders.append(b"%d" % number)
    for number, job in enumerate(channel.receive(1)):
        with sync_client.transaction("billing", number) as tx:
            tx.append("bills", b"bill " + job.raw)
            tx.ack(job)
        assert "applied" == tx.result
        if number == 2:
            break
    assert [b"bill 0", b"bill 1", b"bill 2"] == [each.raw for each in sync_client.topic("bills").read()]
    assert 0 == channel.describe().depth
