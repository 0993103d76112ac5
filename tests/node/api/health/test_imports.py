"""Which topics are closed for an import that has stopped."""

from __future__ import annotations

import pytest

from laminar.node.api.health.imports import FIRST_MS, QUIET_MS, SeenImports, merge_ages, stopped_import
from laminar.node.runtime.boot import Role
from laminar.node.runtime.cluster_view import View, ViewMessage
from membership.records import CatalogState, TopicRecord

IMPORT, OTHER = "1" * 32, "2" * 32
CREATED_MS = 1_000_000


def view_of(*records: TopicRecord) -> View:
    def unix_name(role: Role) -> str:
        raise AssertionError(role)

    view = View(node="n1", unix_name=unix_name)
    catalog = CatalogState(version=1, topics={each.name: each for each in records})
    view.message = ViewMessage(b"", catalog, {})
    return view


def closed(name: str) -> TopicRecord:
    return TopicRecord(name, 1, 1, {"importing": IMPORT}, CREATED_MS, 1)


def opened(name: str) -> TopicRecord:
    return TopicRecord(name, 1, 1, {}, CREATED_MS, 2)


def test_only_requests_of_the_import_that_is_under_way_are_noted() -> None:
    """So what is remembered is never more than the topics that are being imported."""
    now_ms = 0
    view = view_of(closed("t"), opened("u"))
    seen = SeenImports(view, lambda: now_ms)
    for topic, said in (("t", OTHER), ("u", IMPORT), ("missing", IMPORT)):
        seen.note(topic, said)
    assert {} == seen.ages_ms()

    seen.note("t", IMPORT)
    now_ms += 7
    assert {"t": 7} == seen.ages_ms()

    view.message = view_of(opened("t")).message
    assert {} == seen.ages_ms()
    view.message = view_of(closed("t")).message
    assert {} == seen.ages_ms()


@pytest.mark.parametrize(
    ("age_ms", "old_ms", "is_stopped"),
    [
        (QUIET_MS - 1, QUIET_MS, False),
        (QUIET_MS, QUIET_MS, True),
        (None, FIRST_MS - 1, False),
        (None, FIRST_MS, True),
    ],
)
def test_an_import_has_stopped_when_no_node_was_asked_for_long(
    age_ms: int | None, old_ms: int, is_stopped: bool
) -> None:
    found = list(stopped_import(closed("t"), age_ms, now_ms=CREATED_MS + old_ms))

    assert is_stopped == bool(found)
    assert all(("import_stopped", "t", "t") == (each.code, each.subject, each.topic) for each in found)
    assert [] == list(stopped_import(opened("t"), age_ms, now_ms=CREATED_MS + old_ms))


def test_the_node_that_was_asked_last_counts() -> None:
    ages = {"t": 5, "u": 9}

    merge_ages(ages, {"t": 7, "u": 1, "v": 3})

    assert {"t": 5, "u": 1, "v": 3} == ages
