"""Topics as resources: created once, changed only by who has seen them, listed in pages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.node.api.asking import Partition, problem

_numbers = itertools.count()


def fresh() -> str:
    return f"fresh-{next(_numbers)}"


def test_create_answers_201_with_location_then_200_for_the_same(http: httpx.Client) -> None:
    """PUT is idempotent; both answers describe the topic and carry its ETag."""
    path = f"/v1/topics/{fresh()}"
    wish: dict[str, Any] = {
        "partitions": 3,
        "replicas": 2,
        "settings": {"min_replicas": 1},
        "allow_fewer_replicas": True,
    }

    first = http.put(path, json=wish)
    second = http.put(path, json=wish)

    assert (201, path) == (first.status_code, first.headers["location"])
    assert 200 == second.status_code
    assert first.json() == second.json() == http.get(path).json()
    assert first.headers["etag"] == second.headers["etag"] == http.get(path).headers["etag"]
    described = first.json()
    del wish["allow_fewer_replicas"]
    assert wish == {name: described[name] for name in wish}
    assert ("live", 1) == (described["state"], described["replicas_placed"])
    assert described["created"].endswith("Z")


def test_create_with_other_settings_is_409(http: httpx.Client) -> None:
    """What exists is not changed by PUT."""
    path = f"/v1/topics/{fresh()}"
    assert 201 == http.put(path, json={"partitions": 2}).status_code

    refused = http.put(path, json={"partitions": 3})
    with_setting = http.put(path, json={"partitions": 2, "settings": {"retention_ms": 5}})

    problem(refused, 409, "already_exists", field="partitions", value=3, limit=2, outcome="not_applied")
    problem(with_setting, 409, "already_exists", field="settings.retention_ms", value=5, limit="not set")
    assert 2 == http.get(path).json()["partitions"]


def test_of_equal_creations_that_race_one_is_the_first(http: httpx.Client, api_url: str) -> None:
    """One 201, the rest 200, all with the same ETag."""
    path = f"{api_url}/v1/topics/{fresh()}"

    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: httpx.put(path, json={"partitions": 2}, timeout=60, trust_env=False), range(4))
        )

    assert [200, 200, 200, 201] == sorted(answer.status_code for answer in answers)
    assert 1 == len({answer.headers["etag"] for answer in answers})


def test_a_new_topic_is_usable_at_once(http: httpx.Client) -> None:
    """After 201 every partition has a leader: no append needs a second try."""
    topic = fresh()
    assert 201 == http.put(f"/v1/topics/{topic}", json={"partitions": 8}).status_code

    for number in range(8):
        assert 201 == http.post(f"/v1/topics/{topic}/partitions/{number}/records", content=b"x").status_code


WRONG_WISHES: list[tuple[bytes, int, str, str]] = [
    (b"{", 400, "malformed", "body"),
    (b"\xff", 400, "malformed", "body"),
    (b'{"settings":{"flush":"\xed\xa0\x80"}}', 400, "malformed", "body"),
    (b'{"x":' + b"[" * 100_000, 400, "malformed", "body"),
    (b"[]", 422, "invalid", "body"),
    (b"null", 422, "invalid", "body"),
    (b'{"partitions":0}', 422, "invalid", "partitions"),
    (b'{"partitions":4097}', 422, "invalid", "partitions"),
    (b'{"partitions":"2"}', 422, "invalid", "partitions"),
    (b'{"partitions":1.5}', 422, "invalid", "partitions"),
    (b'{"partitions":true}', 422, "invalid", "partitions"),
    (b'{"partitions":99999999999999999999999999}', 422, "invalid", "partitions"),
    (b'{"replicas":0}', 422, "invalid", "replicas"),
    (b'{"replicas":8}', 422, "invalid", "replicas"),
    (b'{"shards":8}', 422, "invalid", "shards"),
    (b'{"settings":{"colour":"red"}}', 422, "invalid", "settings.colour"),
    (b'{"settings":{"flush":"never"}}', 422, "invalid", "settings.flush"),
    (b'{"settings":{"flush_interval_ms":9}}', 422, "invalid", "settings.flush_interval_ms"),
    (b'{"settings":{"flush_interval_ms":60001}}', 422, "invalid", "settings.flush_interval_ms"),
    (b'{"settings":{"flush_interval_records":0}}', 422, "invalid", "settings.flush_interval_records"),
    (b'{"settings":{"flush":1}}', 422, "invalid", "settings.flush"),
    (b'{"settings":{"min_replicas":"1"}}', 422, "invalid", "settings.min_replicas"),
    (b'{"settings":{"min_replicas":0}}', 422, "invalid", "settings.min_replicas"),
    (b'{"settings":{"min_replicas":-1}}', 422, "invalid", "settings.min_replicas"),
    (b'{"settings":{"min_replicas":99999999999999999999999999}}', 422, "invalid", "settings.min_replicas"),
]


@pytest.mark.parametrize(("body", "status", "code", "field"), WRONG_WISHES)
def test_a_wrong_wish_is_named(http: httpx.Client, body: bytes, status: int, code: str, field: str) -> None:
    """400 where it can't be read, 422 where a value isn't allowed; nothing is created."""
    path = f"/v1/topics/{fresh()}"

    problem(http.put(path, content=body), status, code, field=field, outcome="not_applied")

    problem(http.get(path), 404, "no_such_topic")


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "%C3%A9", "%2E%2E", "%2E", "x" * 201, "a*b", "%00"])
def test_a_name_that_may_not_be_one_is_422(http: httpx.Client, name: str) -> None:
    """For every method."""
    for method in ("GET", "PUT", "DELETE"):
        problem(http.request(method, f"/v1/topics/{name}"), 422, "invalid", field="topic")


def test_the_longest_name_is_allowed(http: httpx.Client) -> None:
    """200 characters of all allowed kinds, and files under that name."""
    name = (f"{next(_numbers)}-Az09._-" + "x" * 200)[:200]

    assert 201 == http.put(f"/v1/topics/{name}").status_code
    assert 201 == Partition(http, name).post(b"x").status_code


def test_a_topic_is_never_created_silently_with_fewer_replicas(http: httpx.Client) -> None:
    """Refused with what is wanted and what there is; allowed, the answer says how many it has."""
    path = f"/v1/topics/{fresh()}"

    refused = http.put(path, json={"replicas": 3})
    allowed = http.put(path, json={"replicas": 3, "allow_fewer_replicas": True})

    problem(refused, 503, "too_few_nodes", field="replicas", value=3, limit=1, outcome="not_applied")
    assert (201, 3, 1) == (allowed.status_code, allowed.json()["replicas"], allowed.json()["replicas_placed"])


def test_min_replicas_is_never_more_than_the_replicas(http: httpx.Client) -> None:
    """Asked, when the topic is created; placed, when it is changed; and there must be nodes for so many."""
    path = f"/v1/topics/{fresh()}"
    two = {"settings": {"min_replicas": 2}}

    problem(http.put(path, json=two), 422, "invalid", field="settings.min_replicas", value=2, limit=1)
    few = http.put(path, json=two | {"replicas": 2, "allow_fewer_replicas": True})
    problem(few, 503, "too_few_nodes", field="settings.min_replicas", value=2, limit=1)
    made = http.put(path, json={"replicas": 2, "allow_fewer_replicas": True})
    changed = http.patch(path, json=two, headers={"If-Match": made.headers["etag"]})
    problem(changed, 422, "invalid", field="settings.min_replicas", value=2, limit=1)


def test_get_is_304_for_who_has_the_state_already(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """If-None-Match with the ETag, alone or among others."""
    path = f"/v1/topics/{new_topic()}"
    etag = http.get(path).headers["etag"]

    for given in (etag, f'"0", {etag}', "*"):
        answer = http.get(path, headers={"If-None-Match": given})
        assert (304, b"") == (answer.status_code, answer.content)
    assert 200 == http.get(path, headers={"If-None-Match": '"0"'}).status_code


@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_changes_need_if_match(http: httpx.Client, new_topic: Callable[..., str], method: str) -> None:
    """428 without, 412 with another state's ETag, 404 for no topic; and nothing happens."""
    path = f"/v1/topics/{new_topic()}"
    before = http.get(path).json()

    problem(http.request(method, path), 428, "if_match_required", field="if-match")
    for wrong in ('"0"', 'W/"1"', "nonsense", '"999999999999999999999999"', '""'):
        answer = http.request(method, path, headers={"If-Match": wrong})
        problem(answer, 412, "precondition_failed", field="if-match", outcome="not_applied")
    absent = http.request(method, "/v1/topics/nowhere", headers={"If-Match": "*"})
    problem(absent, 404, "no_such_topic", field="topic")

    assert before == http.get(path).json()


def test_patch_merges_settings_and_makes_a_new_etag(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """A null takes a setting away; who has the old ETag is refused."""
    path = f"/v1/topics/{new_topic()}"
    first = http.get(path).headers["etag"]

    set_ = http.patch(path, json={"settings": {"min_replicas": 1}}, headers={"If-Match": first})
    late = http.patch(path, json={"settings": {"min_replicas": 1}}, headers={"If-Match": first})
    second = set_.headers["etag"]
    unset = http.patch(path, json={"settings": {"min_replicas": None}}, headers={"If-Match": second})

    assert (200, {"min_replicas": 1}) == (set_.status_code, set_.json()["settings"])
    assert first != second
    problem(late, 412, "precondition_failed", value=first, limit=second)
    assert (200, {}) == (unset.status_code, unset.json()["settings"])
    assert unset.json() == http.get(path).json()


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"partitions": 5}, "partitions"),
        ({"settings": {"colour": 1}}, "settings.colour"),
        ({"settings": {"min_replicas": 0}}, "settings.min_replicas"),
        ({"settings": []}, "settings"),
    ],
)
def test_a_wrong_patch_is_named(
    http: httpx.Client, new_topic: Callable[..., str], patch: dict[str, Any], field: str
) -> None:
    """And changes nothing: the ETag stays."""
    path = f"/v1/topics/{new_topic()}"
    etag = http.get(path).headers["etag"]

    problem(http.patch(path, json=patch, headers={"If-Match": "*"}), 422, "invalid", field=field)

    assert etag == http.get(path).headers["etag"]


def test_topics_are_listed_in_pages(http: httpx.Client) -> None:
    """`next` and Link lead through all of them, each once, in order of their names."""
    names = sorted(f"page-{number:02d}" for number in range(7))
    for name in names:
        assert 201 == http.put(f"/v1/topics/{name}").status_code

    found: list[list[str]] = []
    target: str | None = "/v1/topics?prefix=page-&limit=3"
    while target is not None:
        answer = http.get(target)
        found.append([topic["topic"] for topic in answer.json()["topics"]])
        assert len(names) == answer.json()["total"]
        link = answer.links.get("next")
        target = link["url"] if link else None
        assert (target is not None) == ("next" in answer.json())
        if target is not None:
            query = {
                name: [value]
                for name, value in (("prefix", "page-"), ("limit", "3"), ("after", found[-1][-1]))
            }
            assert query == parse_qs(urlsplit(target).query)

    assert [names[:3], names[3:6], names[6:]] == found
    assert ["page-05", "page-06"] == [
        topic["topic"] for topic in http.get("/v1/topics?prefix=page-&after=page-04").json()["topics"]
    ]
    assert {"topics": [], "total": 0} == http.get("/v1/topics?prefix=none%26such").json()


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1_0", "%201", "+1", "%D9%A1", "9" * 5000, ""])
def test_a_wrong_page_size_is_422(http: httpx.Client, limit: str) -> None:
    """Numbers are plain decimal digits."""
    problem(http.get(f"/v1/topics?limit={limit}"), 422, "invalid", field="limit", limit=1000)


def test_partitions_say_who_leads_and_who_lags(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """All of them, or one by its number; 404 beyond the last."""
    topic = new_topic(3)
    Partition(http, topic, 1).append("a", "b")

    listed = http.get(f"/v1/topics/{topic}/partitions").json()
    one = http.get(f"/v1/topics/{topic}/partitions/1").json()

    assert [0, 1, 2] == [partition["partition"] for partition in listed["partitions"]]
    assert listed["partitions"][1] == one
    assert (0, 2) == (one["start_offset"], one["end_offset"])
    assert one["bytes"] > 0 and one["term"] > 0 and one["damaged"] == []
    (replica,) = one["replicas"]
    assert one["leader"] == {"node": replica["node"], "url": replica["url"]}
    assert ("leader", True, True, 0) == tuple(
        replica[name] for name in ("role", "reachable", "in_sync", "lag")
    )
    problem(
        http.get(f"/v1/topics/{topic}/partitions/3"),
        *(404, "no_such_partition"),
        field="partition",
        value="3",
        limit=2,
    )


@pytest.mark.parametrize("number", ["x", "-1", "00", "1.0", "99999999999999999999", "%D9%A1"])
def test_a_partition_that_is_no_number_is_422(
    http: httpx.Client, new_topic: Callable[..., str], number: str
) -> None:
    """Reads and appends alike."""
    path = f"/v1/topics/{new_topic()}/partitions/{number}"

    problem(http.get(path), 422, "invalid", field="partition")
    problem(http.post(f"{path}/records", content=b"x"), 422, "invalid", field="partition")


def test_a_route_covers_every_logical_partition_once(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """There is one, of version 0."""
    (one,) = http.get(f"/v1/topics/{new_topic(3)}/routes").json()["routes"]

    ranges = one["ranges"]
    assert [0, *(held["to"] for held in ranges[:-1])] == [held["from"] for held in ranges]
    assert (65536, 65536) == (ranges[-1]["to"], one["logical_partitions"])
    assert [0, 1, 2] == [held["partition"] for held in ranges]


def test_a_deleted_topic_is_gone_and_its_name_is_free(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """202, then 404 everywhere; made again it is empty, and takes appends."""
    topic = new_topic(2)
    old = Partition(http, topic)
    old.append("old")
    path = f"/v1/topics/{topic}"
    etag = http.get(path).headers["etag"]

    deleted = http.delete(path, headers={"If-Match": etag})

    assert (202, "deleted") == (deleted.status_code, deleted.json()["state"])
    for target in ("", "/partitions", "/partitions/0", "/partitions/0/records", "/cursors", "/routes"):
        problem(http.get(path + target), 404, "no_such_topic", field="topic", value=topic)
    problem(old.post(b"late"), 404, "no_such_topic", outcome="not_applied")
    again = http.put(path, json={"partitions": 2})
    assert 201 == again.status_code, again.text
    assert etag != again.headers["etag"]
    assert [] == old.records(read="leader")
    assert 0 == old.append("new")
    assert ["new"] == old.values()


def test_deleting_and_making_again_in_a_row_leaves_the_last_one(http: httpx.Client) -> None:
    """A view may show both at once: the tombstone of the old replicas and the new ones to be made."""
    topic = fresh()
    path = f"/v1/topics/{topic}"

    for round_ in range(6):
        made = http.put(path, json={"partitions": 4})
        assert 201 == made.status_code, made.text
        for number in range(4):
            assert 0 == Partition(http, topic, number).append(f"round {round_}")
        if round_ < 5:
            assert 202 == http.delete(path, headers={"If-Match": "*"}).status_code

    for number in range(4):
        assert ["round 5"] == Partition(http, topic, number).values(read="leader")


def test_a_reader_who_waits_at_a_deleted_topic_is_let_go(
    http: httpx.Client, api_url: str, partition: Partition
) -> None:
    """It does not wait its time out for records that can't come."""
    with ThreadPoolExecutor(1) as pool:
        url = f"{api_url}{partition.path}/records?offset=latest&wait_ms=20000"
        waiting = pool.submit(httpx.get, url, timeout=60, trust_env=False)
        # Long enough to have arrived, as a rule; if not, it finds no topic, which is as good.
        assert 200 == partition.fetch(offset="latest", wait_ms=300).status_code
        http.delete(f"/v1/topics/{partition.topic}", headers={"If-Match": "*"})

        answer = waiting.result(60)

    assert answer.status_code in (200, 404)


def test_a_reader_of_a_partition_is_not_given_another_of_its_name(
    http: httpx.Client, partition: Partition
) -> None:
    """With its id it hears that the topic was deleted, or made anew: never the records of another."""
    topic = f"/v1/topics/{partition.topic}"
    partition.append("0", "1", "2")
    old = http.get(f"{topic}/partitions").json()["partitions"][0]["id"]
    reads = (f"{partition.path}/records", f"{partition.path}/records/0", f"{partition.path}/offsets")
    known = [http.get(path, params={"id": old}).status_code for path in reads]
    http.delete(topic, headers={"If-Match": "*"})
    deleted = [http.get(path, params={"id": old}) for path in reads]
    http.put(topic, json={})
    partition.append("3")
    described = http.get(f"{topic}/partitions", params={"read": "leader"}).json()["partitions"][0]

    assert [200, 200, 200] == known
    for answer in deleted:
        problem(answer, 404, "no_such_topic")
    for path in reads:
        problem(
            http.get(path, params={"id": old}), 410, "partition_recreated", value=old, limit=described["id"]
        )
        assert 200 == http.get(path, params={"id": described["id"]}).status_code
    assert (1, described["id"]) == (described["end_offset"], http.get(partition.path).json()["id"])
    problem(partition.fetch(id="7"), 422, "invalid", field="id", value="7")
    problem(http.get(f"{topic}/partitions", params={"read": "me"}), 422, "invalid", field="read")


def test_topics_are_found_by_a_part_of_their_name_and_sorted_by_their_sums(http: httpx.Client) -> None:
    """The largest first, page by page; each topic once, with the sums of what it has."""
    values = {"sum-A-small": 1, "sum-a-large": 5, "sum-a-empty": 0, "sum-b-large": 3}
    for name, count in values.items():
        assert 201 == http.put(f"/v1/topics/{name}", json={"partitions": 2}).status_code
        for number in range(count):
            path = f"/v1/topics/{name}/partitions/{number % 2}/records"
            assert 201 == http.post(path, content=b"x" * 100).status_code
    until_summed(http, "sum-", sum(values.values()))

    query = {"prefix": "sum-", "contains": "M-A", "sort": "records", "stats": "true", "limit": "2"}
    first = http.get("/v1/topics", params=query)
    page = first.json()
    second = http.get(first.links["next"]["url"]).json()

    assert ["sum-a-large", "sum-A-small"] == [each["topic"] for each in page["topics"]]
    assert ["sum-a-empty"] == [each["topic"] for each in second["topics"]]
    assert ("next" in page, "next" in second, []) == (True, False, page["silent"])
    stats = page["topics"][0]["stats"]
    assert (5, 5, True) == (stats["records"], stats["appended_records"], stats["complete"])
    assert stats["bytes"] > 500 and stats["appended_bytes"] > 500
    plain = http.get("/v1/topics", params={"prefix": "sum-", "contains": "LARGE"}).json()
    assert ["sum-a-large", "sum-b-large"] == [each["topic"] for each in plain["topics"]]
    assert "stats" not in plain["topics"][0] and "silent" not in plain


def test_topics_that_have_channels_or_cursors_are_listed_alone(http: httpx.Client) -> None:
    """Page by page, as the others; until the cursor is deleted."""
    for name in ("has-both", "has-channel", "has-cursor", "has-none"):
        assert 201 == http.put(f"/v1/topics/{name}", json={"partitions": 2}).status_code
    for name in ("has-both", "has-channel"):
        assert 201 == http.put(f"/v1/topics/{name}/channels/c", json={}).status_code
    for name in ("has-both", "has-cursor"):
        assert 200 == http.put(f"/v1/topics/{name}/cursors/c", json={"begin": "earliest"}).status_code

    def listed(having: str, **more: str) -> tuple[list[str], list[int], list[list[str] | None]]:
        names, totals, silent = [], [], []
        target = str(httpx.URL("/v1/topics", params={"prefix": "has-", "having": having, **more}))
        while target:
            answer = http.get(target)
            page = answer.json()
            names += [each["topic"] for each in page["topics"]]
            totals.append(page["total"])
            silent.append(page.get("silent"))
            target = answer.links.get("next", {}).get("url", "")
        return names, totals, silent

    def until_listed(having: str, expected: list[str]) -> None:
        deadline = time.monotonic() + 60
        while expected != (found := listed(having)[0]):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    assert (["has-both", "has-channel"], [2, 2], [None, None]) == listed("channels", limit="1")
    until_listed("cursors", ["has-both", "has-cursor"])
    assert (["has-both", "has-cursor"], [2, 2], [[], []]) == listed("cursors", limit="1", sort="records")
    assert 204 == http.delete("/v1/topics/has-both/cursors/c").status_code
    until_listed("cursors", ["has-cursor"])


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "age"},
        {"having": "members"},
        {"having": ""},
        {"stats": "yes"},
        {"sort": "bytes", "after": "sum-a"},
        {"sort": "bytes", "after": "-1/x"},
    ],
)
def test_a_wrong_sort_or_page_of_topics_is_refused(http: httpx.Client, query: dict[str, str]) -> None:
    field = "after" if "after" in query else next(iter(query))
    problem(http.get("/v1/topics", params=query), 422, "invalid", field=field)


def until_summed(http: httpx.Client, prefix: str, records: int) -> None:
    """Sums are some seconds old."""
    deadline = time.monotonic() + 60
    query = {"prefix": prefix, "stats": "true", "limit": "1000"}
    while True:
        listed = http.get("/v1/topics", params=query).json()["topics"]
        if records == sum(each["stats"]["records"] for each in listed):
            return
        assert time.monotonic() < deadline, listed
        time.sleep(0.1)
