"""Messages that no honest replica sends: whatever is in them, a core raises nothing and can still speak."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raft import AnyMessage, Entry, encode
from raft.messages import NUMBER_LIMIT, Append
from tests.raft.harness import CLUSTER, GROUP, Network
from tests.raft.test_messages import KINDS

NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, NUMBER_LIMIT - 1), st.just(2**32), st.just(2**62 - 1))


@st.composite
def forged(draw: st.DrawFn) -> tuple[AnyMessage, tuple[Entry, ...]]:
    """To replica 2, in the name of another."""
    kind: Any = draw(st.sampled_from(KINDS))
    fixed: dict[str, Any] = {"cluster": CLUSTER, "group": GROUP, "receiver": 2, "incarnation": 0}
    fixed["sender"] = draw(st.sampled_from((1, 3, 4)))
    entries: tuple[Entry, ...] = ()
    for field in msgspec.structs.fields(kind):
        if field.name not in fixed:
            fixed[field.name] = draw(st.booleans() if field.type is bool else NUMBERS)
    if kind is Append:
        fixed["entry_count"] = draw(st.integers(0, 2))
        first = fixed["prev_index"] + draw(st.integers(0, 1))
        entries = tuple(
            Entry(first + place, draw(NUMBERS), b"forged", 128) for place in range(draw(st.integers(0, 2)))
        )
    return kind(**fixed), entries


@pytest.mark.parametrize("role", ["follower", "leader"])
@given(packets=st.lists(forged(), max_size=6))
def test_a_core_raises_nothing_and_what_it_says_can_be_sent(
    role: str, packets: list[tuple[AnyMessage, tuple[Entry, ...]]]
) -> None:
    """The election after them too: its term fits the wire and the disk."""
    network = Network()
    network.elect(2 if role == "leader" else 1)
    network.settle()
    victim = network[2]

    for packet in packets:
        ready = victim.receive(packet, now_ms=0)
        encode([*ready.messages, *ready.messages_after_sync, *(each.message for each in ready.appends)])
    for now_ms in range(0, 60_000, 3_000):
        victim.core.expire(now_ms=now_ms)
        ready = victim.perform()
        encode([*ready.messages, *ready.messages_after_sync, *(each.message for each in ready.appends)])
    assert victim.core.term < NUMBER_LIMIT
