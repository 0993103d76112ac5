"""What a node says of a topic that its copy of the catalog does not name."""

from __future__ import annotations

import pytest

from laminar.http.api.problems import Problem
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.runtime.cluster_view import View, ViewMessage
from tests.membership.routes import with_topic


def lookup(*, confirmed: bool) -> TopicLookup:
    view = View(node="a", unix_name=str)
    view.message = ViewMessage(b"c" * 16, with_topic(2), {}, confirmed=confirmed)
    return TopicLookup(view)


def test_a_node_that_has_heard_from_the_catalog_says_404() -> None:
    topics = lookup(confirmed=True)
    assert topics.record("t").name == "t"
    with pytest.raises(Problem, match="no topic") as refused:
        topics.record("other")
    assert refused.value.code == "no_such_topic"
    with pytest.raises(Problem) as refused:
        topics.partition_record("t", "2")
    assert refused.value.code == "no_such_partition"


def test_a_node_that_has_not_may_have_an_old_catalog_and_says_503() -> None:
    """The topic may have been made since; a producer would give its records up for a 404."""
    topics = lookup(confirmed=False)
    assert topics.record("t").name == "t"
    for ask in (lambda: topics.record("other"), lambda: topics.partition_record("t", "2")):
        with pytest.raises(Problem) as refused:
            ask()
        assert (refused.value.code, refused.value.status) == ("not_ready", 503)
    with pytest.raises(Problem) as refused:
        topics.partition_record("t", "x")
    assert refused.value.code == "no_such_partition"
