"""Messages that are not meant for this replica."""

from __future__ import annotations

import pytest

from raft import AnyMessage
from raft.messages import Append, Heartbeat, Vote
from tests.raft.harness import CLUSTER, GROUP, Network, head

STRAYS: list[tuple[str, AnyMessage]] = [
    ("identity", Append(b"other cluster...", GROUP, 1, 2, 0, 1, 0, 0, 0, 0)),
    ("identity", Append(CLUSTER, b"deleted group...", 1, 2, 0, 1, 0, 0, 0, 0)),
    ("identity", Append(CLUSTER, GROUP, 1, 3, 0, 1, 0, 0, 0, 0)),
    ("identity", Append(CLUSTER, GROUP, 2, 2, 0, 1, 0, 0, 0, 0)),
    ("term_ahead", Heartbeat(CLUSTER, GROUP, 1, 2, 0, 2**32 + 2, 0, 1)),
    ("term_ahead", Vote(CLUSTER, GROUP, 3, 2, 0, 2**62 - 1, 2**62 - 1, 2**62 - 1)),
    ("malformed", Append(CLUSTER, GROUP, 1, 2, 0, 1, 0, 0, 0, 5)),
    ("second_leader", Append(CLUSTER, GROUP, 3, 2, 0, 1, 0, 0, 0, 0)),
]


@pytest.mark.parametrize(("reason", "stray"), STRAYS)
def test_what_is_not_meant_for_us_is_dropped_and_counted(reason: str, stray: AnyMessage) -> None:
    """Of another cluster, group or replica; and what no leader of ours would say."""
    follower = Network()[2]
    follower.receive((Heartbeat(*head(1, 2, 1), 0, 1), ()), now_ms=0)

    ready = follower.receive((stray, ()), now_ms=0)

    assert not ready.messages and not ready.messages_after_sync
    assert follower.core.dropped == {reason: 1}
