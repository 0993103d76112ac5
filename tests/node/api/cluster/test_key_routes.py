"""What `GET /v1/topics/{topic}/routes` says of changes."""

from __future__ import annotations

from laminar.node.api.cluster.key_routes import change_document
from membership.requests import ReclaimPartition
from tests.membership.routes import begin, do, topic, under_way, with_topic
from tests.node.routes.test_lineage import seal_all


def test_a_change_is_told_from_its_begin_to_the_reclaim_of_its_inputs() -> None:
    state, _ = do(with_topic(2), begin(0, cuts=(10_000,)))
    told = change_document(topic(state), under_way(state))
    assert (told.state, told.version, told.order) == ("preparing", 1, "strict")
    assert [(each.partition, each.start, each.to, each.end) for each in told.inputs] == [(0, 0, 32_768, None)]
    assert [(each.partition, each.start, each.to) for each in told.outputs] == [
        (2, 0, 10_000),
        (3, 10_000, 32_768),
    ]
    state = seal_all(state)
    done = (topic(state).changes or [])[0]
    told = change_document(topic(state), done)
    assert told.state == "done" and told.inputs[0].sealed is not None
    assert (told.inputs[0].end, told.inputs[0].reclaimed) == (0, False)
    state, _ = do(state, ReclaimPartition("t", 0, state.partitions["t/0"].group, 9))
    told = change_document(topic(state), done)
    assert told.inputs[0].reclaimed and told.inputs[0].end == 0
