"""Channels in the catalog: what each command compares and sets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from laminar.wire import channels
from membership import catalog_rules, route_rules
from membership import channel_rules as rules
from membership.catalog import Catalog, NotEnabled
from membership.catalog_delta import CatalogDelta, changed_by, delta_between
from membership.records import CatalogState, ChannelRecord, TopicRecord
from membership.requests import (
    BeginChange,
    CancelChange,
    ChangeChannel,
    ChangeRoute,
    ChannelStep,
    CreateChannel,
    CreateTopic,
    DeleteChannel,
    DeleteTopic,
    MarkMade,
    RegisterNode,
    Result,
    UpdateChannel,
)
from membership.tables import encoded
from tests.membership.test_catalog import Group, node

MADE = ("created", "updated", "deleted")


def do(state: CatalogState, step: ChannelStep) -> tuple[CatalogState, Result]:
    """Perform a step as the log has it; a change makes the next version, of topic and catalog."""
    request = msgspec.json.decode(msgspec.json.encode(ChangeChannel(step)), type=ChangeChannel)
    after, result = rules.change_channel(state, request)
    assert (result.outcome in MADE) == (after is not state) and after.version == result.version
    if after is not state:
        assert state.version + 1 == after.version == after.topics[step.topic].version
        assert result.topic is after.topics[step.topic]
    return after, result


def with_topic(name: str = "t") -> CatalogState:
    state, _ = catalog_rules.register_node(CatalogState(), RegisterNode(node("a")))
    request = CreateTopic(name, 1, 1, {}, [b"g" * 16], [["a"]], 1)
    state, result = catalog_rules.create_topic(state, request)
    assert result.outcome == "created"
    return state


def with_channel(**settings: Any) -> CatalogState:
    state, result = do(with_topic(), CreateChannel("t", "c", settings))
    assert result.outcome == "created"
    return state


def channel_of(state: CatalogState, name: str = "c") -> ChannelRecord:
    found = state.topics["t"].channels
    assert found is not None
    return found[name]


def test_a_channel_is_made_once_and_another_one_under_its_name_is_refused() -> None:
    state = with_channel(order="key")
    again, same = do(state, CreateChannel("t", "c", {"order": "key"}))
    _, other = do(state, CreateChannel("t", "c", {}))

    assert again is state and "exists" == same.outcome
    assert "already_exists" == other.outcome and other.topic is state.topics["t"]
    assert ChannelRecord(state.version, state.version, {"order": "key"}, 1) == channel_of(state)


def test_a_change_names_the_version_that_it_changes() -> None:
    before = with_channel(order="key")
    version = channel_of(before).version
    state, result = do(before, UpdateChannel("t", "c", version, {"order": "key", "paused": True}))
    _, late = do(state, UpdateChannel("t", "c", version, {"order": "key"}))
    _, same = do(state, UpdateChannel("t", "c", state.version, {"order": "key", "paused": True}))
    _, absent = do(state, UpdateChannel("t", "d", version, {}))

    assert ("updated", "conflict", "unchanged", "absent") == (
        result.outcome,
        late.outcome,
        same.outcome,
        absent.outcome,
    )
    known = channel_of(state)
    assert (version, state.version, True) == (known.id, known.version, known.settings["paused"])
    assert absent.topic is state.topics["t"], "the topic is there, the channel is not"


@pytest.mark.parametrize("name", ["start", "until", "order"])
@pytest.mark.parametrize(("before", "wanted"), [(None, 1), (1, 2), (1, None)])
def test_where_a_channel_begins_and_ends_and_its_order_never_change(
    name: str, before: int | None, wanted: int | None
) -> None:
    state = with_channel(**({} if before is None else {name: before}))
    settings = {} if wanted is None else {name: wanted}
    after, result = do(state, UpdateChannel("t", "c", state.version, settings))

    assert after is state and "invalid" == result.outcome and name in result.detail


def test_a_channel_that_is_deleted_and_made_again_is_another_one() -> None:
    state = with_channel()
    first = channel_of(state).id
    state, deleted = do(state, DeleteChannel("t", "c", first))
    assert "deleted" == deleted.outcome and state.topics["t"].channels is None
    _, repeated = do(state, DeleteChannel("t", "c", first))
    state, made = do(state, CreateChannel("t", "c", {}))
    _, late = do(state, DeleteChannel("t", "c", first))

    assert ("absent", "created", "conflict") == (repeated.outcome, made.outcome, late.outcome)
    assert first < channel_of(state).id


def test_a_channel_knows_which_partitions_took_no_records_before_it() -> None:
    """The outputs of a change that is under way, and all that are made later."""
    state = with_topic()
    begun = BeginChange("t", 0, [0], [9], [b"h" * 16, b"i" * 16], [["a"], ["a"]], "strict", 1, 1)
    state, _ = catalog_rules.mark_made(state, MarkMade("a", b"a" * 16, [b"g" * 16]))
    under_way, changed = route_rules.change_route(state, ChangeRoute(begun))
    assert "created" == changed.outcome, changed
    during, _ = do(under_way, CreateChannel("t", "c", {}))
    change = under_way.topics["t"].change
    assert change is not None
    cancelled, _ = route_rules.change_route(under_way, ChangeRoute(CancelChange("t", change.id, 1)))
    after, _ = do(cancelled, CreateChannel("t", "c", {}))

    assert (1, 3) == (channel_of(during).whole_from, channel_of(after).whole_from)


def test_what_cannot_be_a_channel_is_refused() -> None:
    system = with_topic("_transactions")
    state = with_topic()
    long = {"filter": {"tags": ["x" * 500] * 10}}

    assert "invalid" == do(system, CreateChannel("_transactions", "c", {}))[1].outcome
    assert "invalid" == do(state, CreateChannel("t", "", {}))[1].outcome
    assert "invalid" == do(state, CreateChannel("t", "c", long))[1].outcome
    assert "absent" == do(state, CreateChannel("x", "c", {}))[1].outcome
    state = with_channel()
    assert "invalid" == do(state, UpdateChannel("t", "c", state.version, long))[1].outcome


def test_a_topic_has_no_more_channels_than_its_limit_and_a_retry_of_the_last_is_none() -> None:
    state = with_topic()
    for number in range(rules.MAX_CHANNELS):
        state, result = do(state, CreateChannel("t", f"c{number}", {}))
        assert "created" == result.outcome

    assert "quota" == do(state, CreateChannel("t", "more", {}))[1].outcome
    assert "exists" == do(state, CreateChannel("t", "c0", {}))[1].outcome
    state, _ = do(state, DeleteChannel("t", "c0", channel_of(state, "c0").id))
    assert "created" == do(state, CreateChannel("t", "more", {}))[1].outcome


def test_all_topics_together_have_no_more_channels_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_CHANNELS", 3)
    state = with_topic()
    request = CreateTopic("u", 1, 1, {}, [b"h" * 16], [["a"]], 1)
    state, _ = catalog_rules.create_topic(state, request)
    for number in range(3):
        state, _ = do(state, CreateChannel("tu"[number % 2], f"c{number}", {}))

    assert "quota" == do(state, CreateChannel("u", "more", {}))[1].outcome
    state, deleted = catalog_rules.delete_topic(state, DeleteTopic("t", 1))
    assert "deleted" == deleted.outcome
    assert "created" == do(state, CreateChannel("u", "more", {}))[1].outcome


def test_a_copy_of_the_catalog_follows_by_what_changed() -> None:
    before = with_topic()
    after, _ = do(before, CreateChannel("t", "c", {"paused": True, "filter": {"tags": ["a"]}}))
    delta = msgspec.msgpack.decode(encoded(delta_between(before, after)), type=CatalogDelta)

    assert changed_by(before, delta) == after
    assert msgspec.msgpack.decode(encoded(after), type=CatalogState) == after


def test_a_topic_without_channels_is_encoded_as_before() -> None:
    """So a node of an older program that applies the same commands has the same bytes."""
    record = TopicRecord("t", 1, 1, {}, 1, 1)

    assert b"channels" not in msgspec.msgpack.encode(record)


async def test_no_channel_is_proposed_before_every_program_knows_it() -> None:
    """An older program would stop at the command."""
    own = Group(apply_first=True)
    own.catalogs = [Catalog(own)]
    for version in (0, 1, 2, 3):
        if version:
            await own.catalogs[0].enable(version)
        proposed = len(own.log)
        with pytest.raises(NotEnabled) as refused:
            await own.catalogs[0].change_channel(CreateChannel("t", "c", {}))
        assert (4, proposed) == (refused.value.needed, len(own.log))
    await own.catalogs[0].enable(4)
    assert "absent" == (await own.catalogs[0].change_channel(CreateChannel("t", "c", {}))).outcome


def test_the_limit_of_a_topic_is_the_one_that_clients_know() -> None:
    assert channels.MAX_CHANNELS == rules.MAX_CHANNELS


def test_what_never_changes_is_what_clients_take_for_fixed() -> None:
    given = channels.settings_of({"start": "latest", "until": 7, "order": "key", "paused": True})

    assert given.fixed() == tuple(channels.stored(given)[name] for name in rules.FIXED)
