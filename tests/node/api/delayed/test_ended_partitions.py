"""What is said of the delayed records of a partition that has ended, over real logs and without a server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from laminar.batch import Header, build
from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.delayed.records import DelayedRoutes
from laminar.node.api.delayed.steps import DelayedSteps
from laminar.node.delay.publisher import State
from laminar.node.delay.publishers import Publishers
from laminar.node.partition.state.delayed_records import CANCELLED
from laminar.wire.delayed import DelayedId, id_of
from membership.requests import ReclaimPartition
from tests.membership.routes import do
from tests.node.api.records.routed import Routed, opened
from tests.node.services import exchange


class Asked:
    """The routes of delayed records of a shard with these partitions."""

    def __init__(self, routed: Routed) -> None:
        """Begin without publishers."""
        leaders = LeaderCall(routed.services, Locator(routed.services, exchange()))
        self.publishers = Publishers()
        self._routes = DelayedRoutes(routed.services, routed.topics, DelayedSteps(self.publishers, leaders))
        self._topics = routed.topics

    async def state(self, named: DelayedId, due_ms: int | None = None) -> str:
        """Return what is said of a record, after it was given a time."""
        return (await self._routes._ask(self._topics.record("t"), named, due_ms)).state


async def test_it_is_not_said_what_became_of_a_record_that_a_reclaimed_partition_had(tmp_path: Path) -> None:
    """It may have been cancelled there, and those that follow do not know it: `published` is a guess."""
    async with opened(tmp_path) as routed:
        asked = Asked(routed)
        due_ms = time.time_ns() // 1_000_000 + 3_600_000
        frame = build([b"cancelled", b"left"], delivery_times=[due_ms] * 2)
        receipt = await routed[0].appends.append_frame(frame, Header.unpack(frame))
        assert receipt.delayed is not None
        first, second = (id_of(receipt.delayed + row, due_ms) for row in range(2))
        assert await asked.state(first, CANCELLED) == State.PENDING.value
        assert await asked.state(first) == State.CANCELLED.value

        await routed.change(0, cuts=(30_000,))
        assert await asked.state(first) == State.CANCELLED.value
        reclaim = ReclaimPartition("t", 0, routed.state.partitions["t/0"].group, 9)
        routed.state, result = do(routed.state, reclaim)
        assert result.ok
        routed.show()

        for named in (first, second):
            with pytest.raises(Problem) as refused:
                await asked.state(named)
            assert ("delayed_record_ended", "id", str(named)) == (
                refused.value.code,
                refused.value.field,
                refused.value.value,
            )
        asked.publishers.stop()
