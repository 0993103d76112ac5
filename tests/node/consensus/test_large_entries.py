"""Entries that no frame carries: none is taken any more, one in an older log reaches the followers."""

from __future__ import annotations

import pytest

from tests.node.trio import batch, send, trio


async def test_an_entry_larger_than_a_frame_reaches_the_followers_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its leader is not ended by it, nor the next one; what comes after it is committed."""
    monkeypatch.setattr("laminar.node.transport.link.MAX_FRAME_BYTES", 64 << 10)
    async with trio() as cluster:
        leader = await cluster.leader()
        behind = cluster.followers(leader)[0]
        await behind.kill()
        await send(leader, batch(0, b"x" * 300_000))
        await behind.start()
        await cluster.settled()
        await leader.kill()

        again = await cluster.leader()
        await send(again, batch(0, b"y", producer=b"q" * 16))

        assert [300_000, 1] == [len(value) for value in again.values()]
        cluster.check_equal()
