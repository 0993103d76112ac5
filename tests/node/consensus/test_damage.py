"""Damage in a replica's log while its group goes on: nobody ends, and what is repaired is sent."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.log import DamagedRange
from tests.node.trio import batch, send, trio


@pytest.mark.parametrize("cold", [True, False])
async def test_pitfall_39_a_leader_with_damage_goes_on_and_sends_what_was_repaired(cold: bool) -> None:
    """A follower wants an entry whose bytes rotted at the leader, cached or not. The leader's process lives,
    appends are committed, and with the bytes of the third replica the follower catches up.
    """
    async with trio(heals=False) as cluster:
        leader = await cluster.leader()
        away, other = cluster.followers(leader)
        await away.kill()
        for number in range(5):
            await send(leader, batch(number, b"value" * 100))
        await leader.storage.checkpoint()
        leader.forget_recent()
        log = leader.partition.log
        index = log.last_index - 4  # the first that the follower lacks
        segment = log.segment_of(index)
        leader.disk.rot(segment.file.path, log.index_entry(index).position + 200, 4)
        leader.disk.cold = cold

        refused = 0
        read_nowait = log.read_nowait

        def counted(first_index: int, last_index: int, *, max_bytes: int) -> Any:
            nonlocal refused
            try:
                return read_nowait(first_index, last_index, max_bytes=max_bytes)
            except DamagedRange:
                refused += 1
                raise

        log.read_nowait = counted  # to know that the driver has met the damage
        await away.start()
        await cluster.until(lambda: bool(log.quarantine), what="damage found")
        await away.kill()
        await away.start()
        await cluster.until(lambda: refused > 1 or bool(leader.failures), what="damage met again")
        await send(leader, batch(5, b"meanwhile"))
        assert not leader.failures and leader.partition.leads
        [damage] = log.quarantine
        assert (index, log.term(index)) == (damage.first_index, damage.term)

        [frame] = await other.partition.log.read(index, index, max_bytes=1)
        await log.repair(index, frame)
        await cluster.settled()
        leader.disk.cold = False
        cluster.check_equal()
        assert 6 == len(away.values())
