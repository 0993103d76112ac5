"""A copy of the catalog follows by deltas, and notices when it missed one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from membership.catalog_delta import CatalogDelta, VersionGap, changed_by, delta_between
from membership.records import CatalogState, Tombstone
from tests.membership.nodes import node, state_of

KEYS = st.sampled_from("abcdefgh")


def travelled(delta: CatalogDelta) -> CatalogDelta:
    """Return the delta as another process decodes it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=CatalogDelta)


def varied(state: CatalogState, change: tuple[str, str, bool]) -> CatalogState:
    """Return the next state: a record of one table put or removed under a key."""
    table, key, put = change
    records = {
        "nodes": replace(node(key), http_port=state.version),
        "topics": replace(state_of("a").topics["t"], name=key, version=state.version),
        "partitions": replace(state_of("a").partitions["t/0"], topic=key, version=state.version),
        "tombstones": Tombstone(key, 0, key.encode() * 16, [], state.version, state.version),
    }
    after = dict(getattr(state, table))
    if put:
        after[key] = records[table]
    else:
        after.pop(key, None)
    stores = [*state.removed_stores, key.encode()] if not put and table == "nodes" else state.removed_stores
    return replace(
        state,
        version=state.version + 1,
        next_replica_id=state.next_replica_id + put,
        removed_stores=stores,
        **{table: after},
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(["nodes", "topics", "partitions", "tombstones"]), KEYS, st.booleans()),
        max_size=30,
    ),
    st.data(),
)
def test_a_copy_that_follows_in_any_steps_is_the_state(
    changes: list[tuple[str, str, bool]], data: st.DataObject
) -> None:
    """Also where one delta covers several changes."""
    state = copy = sent = state_of(*"abc")
    for change in changes:
        state = varied(state, change)
        if data.draw(st.booleans()):
            copy = changed_by(copy, travelled(delta_between(sent, state)))
            sent = state
            assert copy == state
    assert changed_by(copy, travelled(delta_between(sent, state))) == state


def test_a_delta_holds_what_changed_and_nothing_else() -> None:
    before = state_of(*"abc")
    after = replace(before, version=11, nodes=before.nodes | {"d": node("d")})
    delta = delta_between(before, after)
    assert delta.nodes == {"d": node("d")}
    assert not delta.topics and not delta.partitions and not delta.tombstones
    assert changed_by(before, delta).partitions is before.partitions


def test_a_delta_of_another_version_is_refused() -> None:
    """A copy that missed one, or that has seen more."""
    before = state_of(*"abc")
    after = replace(before, version=12)
    delta = delta_between(replace(before, version=11), after)
    for copy in (before, after):
        with pytest.raises(VersionGap, match="11"):
            changed_by(copy, delta)
