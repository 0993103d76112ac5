"""The deletion of records, without a server: what the route does with the copies that channels have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from laminar.http.protocol.messages import Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.delete_records import DeleteRecordsRoute
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.partition.partition import Partition
from laminar.wire.channels import ChannelSettings
from tests.node.channels.carrying import CHANNEL, carrying
from tests.node.services import Services, exchange


class Deletion:
    """The route of one partition, whose log nothing keeps."""

    def __init__(self, partition: Partition) -> None:
        services, asking = Services([partition], elsewhere=["here"]), exchange()
        leaders = LeaderCall(services, Locator(services, asking))
        fetch = FetchRoutes(services, asking, leaders, TopicLookup(services.view))
        self._route = DeleteRecordsRoute(services, fetch, trimmable_index=lambda _, index: index)

    async def deleted(self, query: str) -> int:
        """Ask for a deletion; return how many records of the log it took."""
        connection: Any = None
        request = Request(RequestHead("DELETE", f"/x?{query}", {}), b"", connection)
        answer = await self._route.records(request, "t", "0")
        assert isinstance(answer.body, bytes) and answer.status == 200
        return int(msgspec.json.decode(answer.body)["deleted"])


async def test_copies_of_records_that_the_log_has_no_more_are_deleted(tmp_path: Path) -> None:
    """The log begins after them, so nothing of it goes. A dry run deletes no copy either."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0)) as held:
        channel = held.partition.state.channels.by_id[CHANNEL]
        moved = [(await held.failed(text))[0] for text in (b"private", b"other")]
        await held.fill(5)
        assert moved[-1] < await held.trimmed()
        deletion = Deletion(held.partition)

        assert 0 == await deletion.deleted(f"before={moved[0] + 1}&dry_run=true")
        assert (moved, 0) == (list(channel.aside), channel.lost)

        assert 0 == await deletion.deleted(f"before={moved[0] + 1}")
        assert (moved[1:], 1) == (list(channel.aside), channel.lost)
