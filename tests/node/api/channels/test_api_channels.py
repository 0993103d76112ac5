"""Channels as resources: created once, changed only by who has seen them, open when the answer says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from laminar.http.api.openapi import openapi_document
from laminar.wire.channels import MAX_CHANNELS
from tests.node.api.asking import Partition, problem

NewTopic = Callable[..., str]


def path_of(topic: str, name: str = "c") -> str:
    return f"/v1/topics/{topic}/channels/{name}"


def create(http: httpx.Client, topic: str, name: str = "c", **settings: Any) -> dict[str, Any]:
    answer = http.put(path_of(topic, name), json={"settings": settings})
    assert answer.status_code in (200, 201), answer.text
    described: dict[str, Any] = answer.json()
    return described


def settled(channel: dict[str, Any]) -> dict[str, Any]:
    """The description without what depends on the time of the question."""
    partitions = {n: {**each, "oldest_age_ms": 0} for n, each in channel["partitions"].items()}
    return {**channel, "oldest_age_ms": 0, "partitions": partitions}


def test_create_answers_201_with_location_then_200_for_the_same(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    """PUT is idempotent; each answer describes the channel and carries its ETag."""
    topic = new_topic(3)
    path, wish = path_of(topic), {"settings": {"order": "key", "timeout_ms": 30_000}}

    first = http.put(path, json=wish)
    second = http.put(path, json=wish)
    shown = http.get(path)

    assert (201, path) == (first.status_code, first.headers["location"])
    assert 200 == second.status_code
    assert settled(first.json()) == settled(second.json()) == settled(shown.json())
    assert 1 == len({each.headers["etag"] for each in (first, second, shown)})
    assert {"order": "key"} == shown.json()["settings"], "what has its default is left out"
    assert f'"{shown.json()["version"]}"' == shown.headers["etag"]


def test_after_201_it_is_open_in_all_partitions(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(8)
    made = create(http, topic)

    assert ([], []) == (made["opening"], made["unanswered"])
    assert [made["version"]] * 8 == [each["version"] for each in made["partitions"].values()]


def test_where_it_begins_is_as_its_settings_say(http: httpx.Client, partition: Partition) -> None:
    for value in "abc":
        partition.append(value)
    early = create(http, partition.topic, "early")
    late = create(http, partition.topic, "late", start="latest")
    partition.append("d")
    early, late = (http.get(path_of(partition.topic, name)).json() for name in ("early", "late"))

    assert (0, 4, 4) == tuple(early["partitions"]["0"][name] for name in ("next", "end", "depth"))
    assert (3, 4, 1) == tuple(late["partitions"]["0"][name] for name in ("next", "end", "depth"))
    assert (4, 1) == (early["depth"], late["depth"])
    assert early["oldest_age_ms"] >= late["oldest_age_ms"] >= 0
    assert (0, 0, 0, 0, False) == tuple(early[name] for name in ("out", "aside", "dead", "lost", "blocked"))


def test_its_places_may_be_times_as_text(http: httpx.Client, new_topic: NewTopic) -> None:
    """The catalog keeps milliseconds; `now` is the time of the first creation."""
    topic = new_topic()
    made = create(http, topic, start="2026-01-31T13:00:00.5+01:00", until="2026-01-31T12:00:01Z")
    assert {"start": 1_769_860_800_500, "until": 1_769_860_801_000} == made["settings"]
    same = {"start": 1_769_860_800_500, "until": "1769860801000"}
    assert 200 == http.put(path_of(topic), json={"settings": same}).status_code

    first = create(http, topic, "replay", until="now")
    time.sleep(0.002)
    again = http.put(path_of(topic, "replay"), json={"settings": {"until": "now"}})

    assert (200, first["settings"]) == (again.status_code, again.json()["settings"])
    for other in ({"until": "now", "order": "key"}, {"until": 7}, {}):
        refused = http.put(path_of(topic, "replay"), json={"settings": other})
        problem(refused, 409, "already_exists")
    problem(
        http.put(path_of(topic), json={"settings": same | {"until": "now", "order": "key"}}),
        409,
        "already_exists",
    )


def test_it_begins_where_a_cursor_stands(http: httpx.Client, new_topic: NewTopic) -> None:
    """In each partition by itself; where the cursor is not, with the earliest record."""
    topic = new_topic(3)
    for number in range(3):
        Partition(http, topic, number).append(*"abcd")
    cursor = f"/v1/topics/{topic}/cursors/billing"
    assert 200 == http.put(cursor, json={"positions": {"0": 3, "1": 4}}).status_code
    made = create(http, topic, start={"cursor": "billing"})
    assert 200 == http.put(cursor, json={"positions": {"0": 1}}).status_code

    assert {"start": {"cursor": "billing"}} == made["settings"]
    assert [3, 4, 0] == [each["next"] for each in made["partitions"].values()]
    jobs = http.post(f"{path_of(topic)}/receive", json={"max": 10}).json()["jobs"]
    jobs += http.post(f"{path_of(topic)}/receive", json={"max": 10}).json()["jobs"]
    assert ["a", "b", "c", "d", "d"] == sorted(job["value"] for job in jobs)

    # The same again is the same channel, also when the cursor is gone; it never begins elsewhere.
    assert 204 == http.delete(cursor).status_code
    assert made["id"] == create(http, topic, start={"cursor": "billing"})["id"]
    other = http.put(path_of(topic), json={"settings": {"start": {"cursor": "others"}}})
    problem(other, 409, "already_exists", field="settings.start", limit={"cursor": "billing"})
    change = {"settings": {"start": {"cursor": "others"}}}
    etag = {"If-Match": f'"{made["version"]}"'}
    refused = http.patch(path_of(topic), json=change, headers=etag)
    problem(refused, 422, "invalid", field="settings.start", limit={"cursor": "billing"})


def test_a_cursor_that_is_nowhere_is_refused(http: httpx.Client, new_topic: NewTopic) -> None:
    """A name with a mistake in it would give out all records."""
    topic = new_topic(2)
    refused = http.put(path_of(topic), json={"settings": {"start": {"cursor": "biling"}}})

    problem(refused, 404, "no_such_cursor", field="settings.start.cursor", value="biling")
    assert [] == http.get(f"/v1/topics/{topic}/channels").json()["channels"]


def test_an_empty_channel_has_no_oldest_record(http: httpx.Client, new_topic: NewTopic) -> None:
    made = create(http, new_topic())

    assert made["oldest_age_ms"] is None and made["partitions"]["0"]["oldest_age_ms"] is None


def test_create_with_other_settings_is_409_and_names_each_that_differs(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    topic = new_topic()
    create(http, topic, order="key")
    refused = http.put(path_of(topic), json={"settings": {"max_attempts": 3}})

    said = problem(refused, 409, "already_exists", field="settings.max_attempts", value=3, limit="default")
    assert "max_attempts is default, not 3" in said["detail"] and "order is key" in said["detail"]
    assert {"order": "key"} == http.get(path_of(topic)).json()["settings"]


def test_of_equal_creations_that_race_one_is_the_first(api_url: str, new_topic: NewTopic) -> None:
    """One 201, the rest 200, all of one channel."""
    path = f"{api_url}{path_of(new_topic(2))}"

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: httpx.put(path, json={}, timeout=60, trust_env=False), range(4)))

    assert [200, 200, 200, 201] == sorted(answer.status_code for answer in answers)
    assert 1 == len({answer.json()["id"] for answer in answers})


TIMES = (
    *("2026-01-31T12:00:00Z", "2026-01-31t12:00:00.123456789z", "2026-01-31 12:00:60+01:00"),
    *("1970-01-01T00:00:00Z", "1769860801000", "0"),
)
NO_TIMES = (
    *("2026-01-31T12:00:00", "2026-01-31", "2026-13-31T12:00:00Z", "2026-01-31T24:00:00Z", "-1h", ""),
    *("2026-01-31T12:00:00+24:00", "2026-01-31T12:00:00.Z", "2026-01-31T12:00:61Z", "1" * 16, "middle"),
)
NO_PLACES: tuple[Any, ...] = (
    *NO_TIMES,
    "1969-01-01T00:00:00Z",
    "-5",
    -1,
    1.5,
    True,
    [],
    {},
    253_402_300_800_000,
)


def validator_of(schema: str, member: str) -> Draft202012Validator:
    """What the OpenAPI document says of a member of a request."""
    document = openapi_document()
    found = document["components"]["schemas"][schema]["properties"][member]
    return Draft202012Validator(found | {"components": document["components"]})


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        (
            "start",
            (*TIMES, 0, 1_769_860_801_000, "earliest", "latest", {"cursor": "readers"}),
            (*NO_PLACES, "now", None, {"cursor": "a b"}, {"cursor": "readers", "at": 1}, {"cursor": 1}),
        ),
        (
            "until",
            (*TIMES, 0, 1_769_860_801_000, "now", None),
            (*NO_PLACES, "earliest", "latest", {"cursor": "readers"}),
        ),
    ],
)
def test_the_described_places_are_those_that_are_taken(
    http: httpx.Client, partition: Partition, name: str, taken: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    """Each form by the OpenAPI document, and by the handler."""
    described = validator_of("ChannelSettings", name)
    http.put(f"/v1/topics/{partition.topic}/cursors/readers", json={"positions": {"0": 0}})
    for number, value in enumerate(taken):
        assert described.is_valid(value), value
        settings = {"until": value} if name == "until" else {"start": value}
        answer = http.put(path_of(partition.topic, f"{name}-{number}"), json={"settings": settings})
        assert 201 == answer.status_code, (value, answer.text)
    for value in refused:
        assert not described.is_valid(value), value
        answer = http.put(path_of(partition.topic, "refused"), json={"settings": {name: value}})
        assert problem(answer, 422, "invalid")["field"].startswith(f"settings.{name}"), value


def test_the_described_places_of_a_seek_are_those_that_are_taken(
    http: httpx.Client, partition: Partition
) -> None:
    """A place before 1970 is one, as everything is after it; a number is none."""
    described, create_at = validator_of("Position", "at"), path_of(partition.topic)
    create(http, partition.topic)
    for value in (*TIMES, "1969-01-01T00:00:00Z", "-5", "earliest", "latest"):
        assert described.is_valid(value), value
        answer = http.put(f"{create_at}/position", json={"at": value})
        assert 200 == answer.status_code, (value, answer.text)
    for refused in (*NO_TIMES, "now", "0000-01-01T00:00:00Z", None, 0, True, {"cursor": "readers"}):
        assert not described.is_valid(refused), refused
        answer = http.put(f"{create_at}/position", json={"at": refused})
        assert "at" == problem(answer, 422, "invalid")["field"], refused


@pytest.mark.parametrize(
    ("settings", "field", "value", "limit"),
    [
        ({"timeout_ms": 999}, "settings.timeout_ms", 999, 1000),
        ({"max_attempts": -1}, "settings.max_attempts", -1, 0),
        ({"order": "fifo"}, "settings.order", "fifo", "key, none"),
        ({"start": "middle"}, "settings.start", "middle", 'earliest, latest, a time, {"cursor": NAME}'),
        ({"start": "2026-01-31T12:00:00"}, "settings.start", "2026-01-31T12:00:00", None),
        ({"start": 1.5}, "settings.start", 1.5, 'earliest, latest, a time, {"cursor": NAME}'),
        ({"until": "latest"}, "settings.until", "latest", "now, a time"),
        ({"until": True}, "settings.until", True, "now, a time"),
        ({"start": {"cursor": "a b"}}, "settings.start.cursor", "a b", "^[A-Za-z0-9._-]{1,200}$"),
        ({"start": {"cursr": "a"}}, "settings.start.cursr", "a", "cursor"),
        ({"filter": {"tag": ["a"]}}, "settings.filter.tag", "['a']", "tags, headers"),
        ({"filter": {"tags": ["x" * 1000] * 5}}, "settings", None, 4096),
        ({"colour": 1}, "settings.colour", 1, None),
    ],
)
def test_what_is_no_setting_is_422_and_names_the_field_and_its_limit(
    http: httpx.Client,
    new_topic: NewTopic,
    settings: dict[str, Any],
    field: str,
    value: object,
    limit: object,
) -> None:
    topic = new_topic()
    refused = http.put(path_of(topic), json={"settings": settings})

    said = problem(refused, 422, "invalid", field=field)
    assert value is None or value == said["value"]
    assert limit is None or limit == said["limit"]
    assert [] == http.get(f"/v1/topics/{topic}/channels").json()["channels"]


@pytest.mark.parametrize(
    ("settings", "field", "value", "limit"),
    [
        ({"on_dead": "park"}, "settings.on_dead", "park", "order=key"),
        ({"retry_ms": 900_001}, "settings.retry_max_ms", 900_000, 900_001),
        ({"retry_ms": 5, "retry_max_ms": 4}, "settings.retry_max_ms", 4, 5),
        ({"start": 8, "until": 7}, "settings.until", 7, 8),
        ({"start": "latest", "until": 7}, "settings.until", 7, "latest"),
    ],
)
def test_settings_of_which_one_makes_another_mean_nothing_are_refused(
    http: httpx.Client,
    new_topic: NewTopic,
    settings: dict[str, Any],
    field: str,
    value: object,
    limit: object,
) -> None:
    """At the creation, and in a change; what an earlier program took may be changed otherwise."""
    topic = new_topic()
    refused = http.put(path_of(topic), json={"settings": settings})
    problem(refused, 422, "invalid", field=field, value=value, limit=limit)
    if "until" not in settings:
        create(http, topic)
        changed = http.patch(path_of(topic), json={"settings": settings}, headers={"If-Match": "*"})
        problem(changed, 422, "invalid", field=field, value=value, limit=limit)


def test_a_filter_that_takes_all_is_none(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic()
    assert {} == create(http, topic, filter={})["settings"]
    equal: list[dict[str, Any]] = [{}, {"filter": None}, {"filter": {"tags": []}}]
    for same in equal:
        assert 200 == http.put(path_of(topic), json={"settings": same}).status_code
    patched = http.patch(path_of(topic), json={"settings": {"filter": {}}}, headers={"If-Match": "*"})
    assert {} == patched.json()["settings"]


def test_names_are_those_of_topics(http: httpx.Client, new_topic: NewTopic) -> None:
    for name in ("a%20b", "%2e", "a" * 201):
        problem(http.put(path_of(new_topic(), name), json={}), 422, "invalid", field="channel")


def test_a_change_needs_the_etag_and_reaches_all_partitions(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic(3)
    path, made = path_of(topic), create(http, topic, retry_ms=5)
    etag = {"If-Match": f'"{made["version"]}"'}

    problem(http.patch(path, json={"settings": {"paused": True}}), 428, "if_match_required")
    patched = http.patch(path, json={"settings": {"paused": True, "retry_ms": None}}, headers=etag)
    late = http.patch(path, json={"settings": {"paused": False}}, headers=etag)

    assert 200 == patched.status_code, patched.text
    now = patched.json()
    assert ({"paused": True}, made["id"]) == (now["settings"], now["id"])
    assert [now["version"]] * 3 == [each["version"] for each in now["partitions"].values()]
    problem(late, 412, "precondition_failed", field="if-match", limit=f'"{now["version"]}"')
    same = http.patch(path, json={}, headers={"If-Match": "*"})
    assert now["version"] == same.json()["version"], "nothing changed"


@pytest.mark.parametrize(("name", "value"), [("start", "latest"), ("until", 7), ("order", "key")])
def test_where_it_begins_and_ends_and_its_order_never_change(
    http: httpx.Client, new_topic: NewTopic, name: str, value: object
) -> None:
    path = path_of(new_topic())
    http.put(path, json={})
    refused = http.patch(path, json={"settings": {name: value}}, headers={"If-Match": "*"})

    problem(refused, 422, "invalid", field=f"settings.{name}", value=value)
    assert {} == http.get(path).json()["settings"]


def test_a_name_that_is_no_setting_is_refused_with_null_as_well(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    path = path_of(new_topic())
    http.put(path, json={})
    refused = http.patch(path, json={"settings": {"max_attemps": None}}, headers={"If-Match": "*"})

    problem(refused, 422, "invalid", field="settings.max_attemps")


def test_a_change_beyond_the_limits_names_the_field(http: httpx.Client, new_topic: NewTopic) -> None:
    path = path_of(new_topic())
    http.put(path, json={})
    refused = http.patch(path, json={"settings": {"retry_ms": -1}}, headers={"If-Match": "*"})

    problem(refused, 422, "invalid", field="settings.retry_ms", value=-1, limit=0)


def test_a_channel_that_is_deleted_is_gone_and_made_again_begins_again(
    http: httpx.Client, partition: Partition
) -> None:
    path = path_of(partition.topic)
    partition.append("a")
    first = create(http, partition.topic, start="latest")
    other = http.delete(path, headers={"If-Match": '"1"'})
    deleted = http.delete(path)
    gone = http.delete(path)
    partition.append("b")
    second = create(http, partition.topic, start="latest")

    problem(other, 412, "precondition_failed")
    assert 204 == deleted.status_code
    problem(gone, 404, "no_such_channel", field="channel", value="c")
    assert first["id"] < second["id"]
    assert (1, 2) == tuple(each["partitions"]["0"]["next"] for each in (first, second))


def test_what_is_not_there_is_404(http: httpx.Client, new_topic: NewTopic) -> None:
    topic = new_topic()

    problem(http.get(path_of(topic)), 404, "no_such_channel", field="channel", value="c")
    problem(http.patch(path_of(topic), json={}, headers={"If-Match": "*"}), 404, "no_such_channel")
    problem(http.put(path_of("nowhere"), json={}), 404, "no_such_topic", field="topic")
    problem(http.get("/v1/topics/nowhere/channels"), 404, "no_such_topic")


def test_a_topic_of_the_system_has_no_channels(http: httpx.Client) -> None:
    http.post("/v1/sinks/s-channels")

    problem(http.put(path_of("_transactions"), json={}), 422, "invalid", field="topic")


def test_a_list_has_pages_of_names_and_sums(http: httpx.Client, partition: Partition) -> None:
    partition.append("a")
    for name in ("b1", "b2", "a"):
        create(http, partition.topic, name)
    target = f"/v1/topics/{partition.topic}/channels"
    page = http.get(target, params={"limit": 2})
    rest = http.get(page.links["next"]["url"]).json()
    some = http.get(target, params={"prefix": "b"}).json()

    assert ["a", "b1"] == [each["channel"] for each in page.json()["channels"]] and "b1" == page.json()[
        "next"
    ]
    assert ["b2"] == [each["channel"] for each in rest["channels"]] and "next" not in rest
    assert [("b1", 1), ("b2", 1)] == [(each["channel"], each["depth"]) for each in some["channels"]]
    assert all("partitions" not in each for each in some["channels"])


def test_one_channel_too_many_is_429_and_a_deletion_makes_room(
    http: httpx.Client, new_topic: NewTopic
) -> None:
    topic = new_topic()
    for number in range(MAX_CHANNELS):
        create(http, topic, f"c{number}")
    refused = http.put(path_of(topic, "more"), json={})

    problem(refused, 429, "quota", field="channels", value=MAX_CHANNELS + 1, limit=MAX_CHANNELS)
    assert 204 == http.delete(path_of(topic, "c0")).status_code
    assert 201 == http.put(path_of(topic, "more"), json={}).status_code
