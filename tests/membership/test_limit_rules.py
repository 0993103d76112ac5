"""The rules of limits: compared and set; what is made in the catalog counts for the owner of the topic."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from laminar.cli.commands.admin.limit import NAMES
from laminar.http.api.documents import access as documents
from membership import catalog_rules, channel_rules
from membership import limit_rules as rules
from membership.catalog_delta import changed_by, delta_between
from membership.records import CatalogState, ChannelRecord, NodeRecord
from membership.requests import ChangeChannel, ChangeLimits, CreateChannel, CreateTopic, DeleteTopic, Result

NODE = NodeRecord("a", b"s" * 16, "127.0.0.1", 1, [2], [3], 7070, 1)


def limited(**limits: int) -> CatalogState:
    """A state in which `billing` has these limits."""
    state = CatalogState(nodes={"a": NODE})
    after, result = rules.change_limits(state, ChangeLimits("billing", limits, 0))
    assert "created" == result.outcome
    return after


def create(
    state: CatalogState, name: str, *, owner: str = "billing", partitions: int = 1, **more: Any
) -> tuple[CatalogState, Result]:
    """State and result after the creation of a topic."""
    groups = [f"{name}{number}".encode().ljust(16, b"g") for number in range(partitions)]
    return catalog_rules.create_topic(
        state, CreateTopic(name, partitions, 1, {}, groups, [["a"]] * partitions, 1, owner), **more
    )


def test_limits_are_compared_and_set() -> None:
    """A second operator who has not seen the first one's change is refused; a retry is not."""
    made = limited(topics=3)

    assert ({"topics": 3}, 1) == (made.limits["billing"].limits, made.limits["billing"].version)
    assert "unchanged" == rules.change_limits(made, ChangeLimits("billing", {"topics": 3}, 0))[1].outcome
    assert "conflict" == rules.change_limits(made, ChangeLimits("billing", {"topics": 4}, 0))[1].outcome
    after, result = rules.change_limits(made, ChangeLimits("billing", {"sinks": 1}, 1))
    assert ("updated", {"sinks": 1}) == (result.outcome, after.limits["billing"].limits)
    gone, result = rules.change_limits(after, ChangeLimits("billing", {}, 2))
    assert ("deleted", 0, 3) == (result.outcome, len(gone.limits), gone.version)
    assert "unchanged" == rules.change_limits(gone, ChangeLimits("billing", {}, 2))[1].outcome


@pytest.mark.parametrize(
    "wrong",
    [
        ChangeLimits("", {"topics": 1}, 0),
        ChangeLimits("b c", {"topics": 1}, 0),
        ChangeLimits("**", {"topics": 1}, 0),
        ChangeLimits("b", {"topic": 1}, 0),
        ChangeLimits("b", {"topics": 0}, 0),
        ChangeLimits("b", {"topics": 2**53}, 0),
    ],
)
def test_what_is_no_limit_is_refused(wrong: ChangeLimits) -> None:
    """Also where a node sends what its own check lets through."""
    state = CatalogState()
    after, result = rules.change_limits(state, wrong)
    assert (state, "invalid") == (after, result.outcome)


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has all of them in memory."""
    monkeypatch.setattr(rules, "MOST_LIMITS", 1)
    made = limited(topics=1)
    assert "quota" == rules.change_limits(made, ChangeLimits("other", {"topics": 1}, 0))[1].outcome
    assert "updated" == rules.change_limits(made, ChangeLimits("billing", {"topics": 2}, 1))[1].outcome


def test_topics_and_partitions_count_for_their_owner() -> None:
    """Until they are deleted; what exists already is no second one, others have their own count."""
    state = limited(topics=2, partitions=3)
    state, _ = create(state, "one", partitions=2)
    _, result = create(state, "two", partitions=2)

    assert ("quota", "partitions", 4, 3) == (result.outcome, result.what, result.value, result.limit)
    state, _ = create(state, "two")
    _, result = create(state, "three")
    assert ("quota", "topics", 3, 2) == (result.outcome, result.what, result.value, result.limit)
    assert "principal 'billing' would have 3 topics, and may have 2" == result.detail
    assert "exists" == create(state, "two")[1].outcome
    assert "created" == create(state, "three", owner="other")[1].outcome
    assert "created" == create(state, "three", owner="")[1].outcome
    state, _ = catalog_rules.delete_topic(state, DeleteTopic("one", 1))
    assert "created" == create(state, "three")[1].outcome


def test_the_limits_of_all_hold_for_who_has_none() -> None:
    """As a whole: who has a record of its own is not bound by the others'."""
    state, _ = rules.change_limits(limited(sinks=1), ChangeLimits("*", {"topics": 1}, 0))
    for owner, outcome in (("billing", "created"), ("other", "quota")):
        state, _ = create(state, f"{owner}-1", owner=owner)
        assert outcome == create(state, f"{owner}-2", owner=owner)[1].outcome


def test_channels_count_for_the_owner_of_their_topic() -> None:
    """Whoever makes them."""
    state, _ = create(limited(channels=1), "one")
    state, _ = create(state, "two")
    state, result = channel_rules.change_channel(state, ChangeChannel(CreateChannel("one", "c", {})))
    assert "created" == result.outcome
    _, result = channel_rules.change_channel(state, ChangeChannel(CreateChannel("two", "c", {})))
    assert ("quota", "channels", 2, 1) == (result.outcome, result.what, result.value, result.limit)
    assert isinstance((state.topics["one"].channels or {})["c"], ChannelRecord)


def test_before_the_code_version_a_topic_has_no_owner() -> None:
    """An older node would not keep it, and then their states would differ."""
    state, result = create(limited(topics=1), "one", enabled=rules.LIMITS_SINCE - 1)
    assert ("created", "") == (result.outcome, state.topics["one"].owner)


def test_limits_travel_with_the_view() -> None:
    """As a delta; the table is the same object while none changes."""
    before = CatalogState(nodes={"a": NODE})
    made = limited(topics=3)
    copy = changed_by(before, delta_between(before, made))
    assert made.limits == copy.limits
    other, _ = create(made, "one", owner="other")
    assert copy.limits is changed_by(copy, delta_between(made, other)).limits


def test_all_know_the_same_names() -> None:
    """The documents, the command line, the rules."""
    fields = [list(kind.__struct_fields__) for kind in (documents.NewLimits, documents.Limits)]
    assert [list(rules.LIMITS)] * 3 == [*fields, list(NAMES)]
    assert (
        rules.HIGHEST_LIMIT
        == msgspec.json.schema(documents.NewLimits)["$defs"]["NewLimits"]["properties"]["topics"]["anyOf"][0][
            "maximum"
        ]
    )
