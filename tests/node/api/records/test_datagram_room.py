"""What a shard drops of the datagrams that are proved, and that an embedded node takes them at all."""

from __future__ import annotations

from pathlib import Path

import pytest

import laminar
from laminar.client.errors import OutcomeUnknown
from laminar.http.api.limits import Limits
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records import datagrams as served
from tests.node.services import Services, exchange


async def test_what_finds_no_room_is_dropped_and_taken_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit nothing is answered; who asks again when there is room gets the receipt."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        topic = await node.client.create_topic("t", partitions=1)
        async with laminar.aio.connect(node.url) as client, client.topic("t").datagrams() as datagrams:
            assert 0 == (await datagrams.append(b"first")).offset
            with monkeypatch.context() as full:
                full.setattr(served, "MOST_WAITING", 0)
                with pytest.raises(OutcomeUnknown):
                    await datagrams.append(b"no room", timeout=0.5)
            assert 1 == (await datagrams.append(b"second")).offset
        figures = bytes((await node.client.session.call("GET", "/metrics")).body).decode()
        found = [record.value async for record in topic.read()]

    dropped = next(
        line for line in figures.splitlines() if line.startswith("laminar_datagrams_dropped_total{")
    )
    assert float(dropped.rsplit(" ", 1)[1]) >= 1
    assert [b"first", b"second"] == found


async def test_one_principal_leaves_room_for_the_others() -> None:
    """Its requests may wait for a partition without a majority; others' find room beside them."""
    services = Services([])
    datagrams = served.Datagrams(
        services, Locator(services, exchange()), TopicLookup(services.view), sock=None, limits=Limits()
    )

    def fill(principal: str) -> int:
        """Have requests of a principal wait until it has no more room; return how many do."""
        while datagrams._waiting < served.MOST_WAITING and datagrams._has_room(principal):
            datagrams._waiting += 1
            datagrams._waiting_of[principal] += 1
        return datagrams._waiting_of[principal]

    first, second = fill("first"), fill("second")
    assert 0.8 == pytest.approx(first / served.MOST_WAITING, abs=0.01)
    assert 0.16 == pytest.approx(second / served.MOST_WAITING, abs=0.01)
    assert datagrams._has_room("third") and not datagrams._has_room("first")
    assert datagrams._has_room(""), "a node that asks for no principal shares nothing"
