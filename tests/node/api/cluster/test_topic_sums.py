"""Sums of topics, gathered from nodes of this program and of an older one."""

from __future__ import annotations

from typing import Any

from laminar.node.api.cluster.topic_sums import TopicSumsRoute
from tests.node.services import Services, exchange

ROW = (1, 2, 300, 2, 300, 0)


async def test_a_node_of_an_older_program_is_named_as_it_does_not_tell_which_topics_have_cursors() -> None:
    """Its sums count. So do those of a node of which a shard is silent, which is named in both lists."""
    answers: dict[str, Any] = {
        "newest": ({"t": ROW, "u": ROW}, True, ["u"]),
        "older": ({"t": ROW, "v": ROW}, True),
        "partly": ({"w": ROW}, False, ["w"]),
    }

    async def node_sums(node: str, payload: bytes) -> Any:
        return answers[node]

    services = Services(elsewhere=answers)
    sums = await TopicSumsRoute(services, exchange(node_sums=node_sums)).of_cluster()  # type: ignore[arg-type]  # the others are not used

    assert {"t": (2, 4, 600, 4, 600, 0), "u": ROW, "v": ROW, "w": ROW} == sums.by_topic
    assert {"u", "w"} == sums.with_cursors
    assert ["partly"] == sums.silent
    assert ["older", "partly"] == sums.silent_on_cursors
