"""A disk that fails while a partition runs: nothing is said that it does not hold, and others take over."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Callable
from typing import Any

import pytest

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageClosed
from laminar.node.consensus.raft_wire import Keepalive
from laminar.node.transport.transport import Channel
from raft.messages import AnyMessage, Vote, VoteAnswer
from tests.node.trio import SETTINGS, Member, batch, send, trio


def refuse(operations: tuple[str, ...], *, where: str = "") -> Callable[[str, str], int | None]:
    """EIO for these operations on files whose path ends so."""
    return lambda operation, path: errno.EIO if operation in operations and path.endswith(where) else None


async def test_pitfall_1_no_vote_leaves_when_the_journal_fails_after_a_segment_did() -> None:
    """A disk dies in pieces. That one log has failed before does not make a failed journal harmless: the vote
    that was not written must not elect anybody.
    """
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x"))
        await cluster.settled()
        dying, candidate = cluster.followers(leader)
        dying.disk.error = refuse(("sync",), where=".log")
        await dying.storage.checkpoint()
        await cluster.until(lambda: dying.partition.log.failure is not None, what="its segment failed")
        promised: list[AnyMessage] = []

        def watched(sender: Member, receiver: Member, channel: Channel, messages: list[AnyMessage]) -> float:
            if sender is dying:
                promised.extend(each for each in messages if isinstance(each, Vote))
                promised.extend(each for each in messages if isinstance(each, VoteAnswer) and each.granted)
            return 0

        cluster.wire = watched
        dying.disk.error = refuse(("write", "sync"))
        await leader.kill()
        async with asyncio.timeout(60):
            while not dying.failures:  # noqa: ASYNC110  # a list, filled from within
                await asyncio.sleep(0.002)

        assert [StorageClosed] == [type(error) for error in dying.failures], "its process ends"
        dying.failures.clear()
        assert [] == promised
        assert not candidate.partition.leads
        await dying.kill()


async def test_what_failed_with_the_journal_is_looked_at_though_its_process_ends() -> None:
    """The first failure ends it; what else waited for the disk then is no "exception never retrieved"."""
    forgotten: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x"))
        await cluster.settled()
        leader.hold_disk()
        asked = []
        for sequence in range(1, 5):
            # Each in a turn of its own, and so each waits for the disk with a future of its own.
            syncs = leader.driver.syncs
            asked.append(send(leader, batch(sequence, b"y")))
            await cluster.until(lambda syncs=syncs: leader.driver.syncs > syncs, what="it waits")  # type: ignore[misc]
        leader.disk.error = refuse(("write", "sync"))
        leader.release_disk()
        await asyncio.gather(*asked, return_exceptions=True)
        await cluster.until(lambda: bool(leader.failures), what="its process ends")
        leader.failures.clear()
        await leader.kill()
    gc.collect()

    assert [] == forgotten


async def test_a_quiet_leader_whose_log_fails_is_replaced_at_once() -> None:
    """Its process lives and beats on for other groups, so those who rest on it are told."""
    async with trio() as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"x"))
        await cluster.until(lambda: all(m.replica.core.quiesced for m in cluster.alive), what="all quiet")
        leader.disk.error = refuse(("sync",), where=".log")
        await leader.storage.checkpoint()
        await cluster.until(lambda: leader.partition.log.failure is not None, what="its segment failed")
        # What stands for its other groups.
        beating = asyncio.ensure_future(keep_beating(leader, cluster.followers(leader)))

        with pytest.raises(Problem) as failed:
            await send(leader, batch(1, b"y"))
        async with asyncio.timeout(60):
            new = await cluster.leader(among=[member.node for member in cluster.followers(leader)])

        beating.cancel()
        assert "unknown" == failed.value.outcome
        await send(new, batch(1, b"y"))
        await leader.kill()
        await leader.start()
        await cluster.settled()
        cluster.check_equal()


async def keep_beating(sender: Member, receivers: list[Member]) -> None:
    """As a process does that has other quiet groups in common with these."""
    while True:
        for receiver in receivers:
            sender.driver._outbox.keepalive(receiver.address, Keepalive())
        await asyncio.sleep(SETTINGS.heartbeat_ms / 1000)
