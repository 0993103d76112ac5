"""Cursors: positions that a consumer keeps here, moved by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.node.api.asking import Partition, problem


@pytest.fixture
def topic(http: httpx.Client, new_topic: Callable[..., str]) -> str:
    """Three partitions with 5, 2 and 0 records."""
    name = new_topic(3)
    Partition(http, name, 0).append(*"abcde")
    Partition(http, name, 1).append(*"fg")
    return name


@pytest.fixture
def path(topic: str) -> str:
    """A cursor that is not there yet."""
    return f"/v1/topics/{topic}/cursors/reader"


def positions(http: httpx.Client, path: str) -> dict[str, int]:
    found: dict[str, int] = http.get(path).json()["positions"]
    return found


def test_a_cursor_is_made_by_its_first_put_and_tells_its_lag(
    http: httpx.Client, topic: str, path: str
) -> None:
    """Lag by partition and in all; PUT tells of the partitions it set, GET of all, unread ones as well."""
    assert 404 == http.get(path).status_code

    made = http.put(path, json={"positions": {"0": 3, "1": 0}, "owner": "me"})

    assert 200 == made.status_code, made.text
    document = http.get(path).json()
    assert {"0": 2, "1": 2} == made.json()["lag"]
    assert made.json() | {"lag": document["lag"]} == document
    assert {
        "topic": topic,
        "cursor": "reader",
        "positions": {"0": 3, "1": 0},
        "lag": {"0": 2, "1": 2, "2": 0},
        "total_lag": 4,
        "overtaken": False,
        "overtaken_by": {},
        "owners": {"0": "me", "1": "me"},
    } == {name: document[name] for name in document if name != "changed"}
    assert document["changed"].endswith("Z")
    Partition(http, topic, 0).append("more")
    assert 5 == http.get(path).json()["total_lag"]


def test_a_put_moves_only_the_positions_it_names(http: httpx.Client, path: str) -> None:
    """Forwards and, to read again, backwards."""
    http.put(path, json={"positions": {"0": 3, "1": 1}})

    http.put(path, json={"positions": {"0": 1}})

    assert {"0": 1, "1": 1} == positions(http, path)


def test_compare_and_set_moves_only_what_stands_where_expected(http: httpx.Client, path: str) -> None:
    """null expects no position yet; 412 says where it stands; a retry of what went through is no loss."""
    assert 200 == http.put(path, json={"positions": {"0": 1}, "expected": {"0": None}}).status_code
    assert 200 == http.put(path, json={"positions": {"0": 2}, "expected": {"0": 1}}).status_code
    assert 200 == http.put(path, json={"positions": {"0": 2}, "expected": {"0": 1}}).status_code

    late = http.put(path, json={"positions": {"0": 3}, "expected": {"0": 1}})
    taken = http.put(path, json={"positions": {"0": 3}, "expected": {"0": None}})

    problem(late, 412, "precondition_failed", field="expected.0", value=1, limit=2, outcome="not_applied")
    problem(taken, 412, "precondition_failed", field="expected.0", limit=2)
    assert {"0": 2} == positions(http, path)


def test_of_those_who_race_from_one_position_one_wins(http: httpx.Client, api_url: str, path: str) -> None:
    """Each wants another target: exactly one gets it."""
    http.put(path, json={"positions": {"0": 0}})

    def move(target: int) -> int:
        body = {"positions": {"0": target}, "expected": {"0": 0}}
        return httpx.put(f"{api_url}{path}", json=body, timeout=60, trust_env=False).status_code

    with ThreadPoolExecutor(5) as pool:
        statuses = list(pool.map(move, range(1, 6)))

    assert [200, 412, 412, 412, 412] == sorted(statuses)
    assert {"0": 1 + statuses.index(200)} == positions(http, path)


def test_what_has_an_owner_is_moved_by_its_owner_alone(http: httpx.Client, path: str) -> None:
    """409 names the owner; he may hand it on, give it back, and somebody may take it who names him."""

    def put(position: int, **more: str) -> httpx.Response:
        return http.put(path, json={"positions": {"0": position}, **more})

    assert 200 == put(1, owner="a", expected_owner="").status_code
    problem(put(2, owner="b"), 409, "fenced", field="owner", value="b", limit="a", outcome="not_applied")
    problem(put(2), 409, "fenced", limit="a")
    problem(put(2, owner="b", expected_owner=""), 409, "fenced", field="expected_owner", limit="a")
    assert {"0": 1} == positions(http, path)
    assert 200 == put(2, owner="a", expected_owner="a").status_code
    assert 200 == put(2, expected_owner="a").status_code
    assert {} == http.get(path).json()["owners"]
    problem(put(3, owner="a", expected_owner="a"), 409, "fenced", limit="")
    assert 200 == put(3, owner="b").status_code
    assert 200 == put(3, owner="c", expected_owner="b").status_code
    assert {"0": "c"} == http.get(path).json()["owners"]
    assert 204 == http.delete(path).status_code
    problem(put(3, owner="c", expected_owner="c"), 409, "fenced", limit="")


def test_of_those_who_claim_at_once_one_owns(http: httpx.Client, api_url: str, path: str) -> None:
    """Each takes it from nobody: exactly one gets it, and the others can't move it."""

    def claim(member: int) -> int:
        body = {"positions": {"0": 0}, "expected": {"0": None}, "owner": f"m{member}", "expected_owner": ""}
        return httpx.put(f"{api_url}{path}", json=body, timeout=60, trust_env=False).status_code

    with ThreadPoolExecutor(5) as pool:
        statuses = list(pool.map(claim, range(5)))

    assert [200, 409, 409, 409, 409] == sorted(statuses)
    owner = f"m{statuses.index(200)}"
    assert {"0": owner} == http.get(path).json()["owners"]
    for member in range(5):
        moved = http.put(path, json={"positions": {"0": 1}, "owner": f"m{member}"})
        assert (moved.status_code == 200) == (f"m{member}" == owner)


def test_what_fails_in_one_partition_says_which_were_moved(http: httpx.Client, path: str) -> None:
    """Partitions compare and set each for itself."""
    http.put(path, json={"positions": {"0": 1, "1": 1}})

    answer = http.put(path, json={"positions": {"0": 2, "1": 2}, "expected": {"0": 1, "1": 0}})

    document = problem(answer, 412, "precondition_failed", field="expected.1", value=0, limit=1)
    assert "partitions 0" in document["detail"]
    assert {"0": 2, "1": 1} == positions(http, path)


WRONG_CHANGES: list[tuple[Any, int, str, str]] = [
    (b"{", 400, "malformed", "body"),
    (b"\xff", 400, "malformed", "body"),
    (b'{"positions":{"0":1},"owner":"\xff"}', 400, "malformed", "body"),
    ({}, 422, "invalid", "positions"),
    ({"positions": {}}, 422, "invalid", "positions"),
    ({"positions": []}, 422, "invalid", "positions"),
    ({"positions": {"0": "1"}}, 422, "invalid", "positions[...]"),
    ({"positions": {"0": -1}}, 422, "invalid", "positions.0"),
    ({"positions": {"0": 2**53}}, 422, "invalid", "positions.0"),
    ({"positions": {"1": 2**70}}, 422, "invalid", "positions.1"),
    ({"positions": {"00": 1}}, 422, "invalid", "positions"),
    ({"positions": {"x": 1}}, 422, "invalid", "positions"),
    ({"positions": {"٠": 1}}, 422, "invalid", "positions"),
    ({"positions": {"0": 1}, "expected": {"1": 0}}, 422, "invalid", "expected"),
    ({"positions": {"0": 1}, "expected": {"0": 2**70}}, 422, "invalid", "expected.0"),
    ({"positions": {"0": 1}, "owner": "x" * 201}, 422, "invalid", "owner"),
    ({"positions": {"0": 1}, "expected_owner": "x" * 201}, 422, "invalid", "expected_owner"),
    ({"positions": {"0": 1}, "expected_owner": 1}, 422, "invalid", "expected_owner"),
    ({"positions": {"0": 1}, "force": True}, 422, "invalid", "force"),
    ({"positions": {"3": 1}}, 404, "no_such_partition", "partition"),
    ({"positions": {"0": 6}}, 416, "offset_beyond_end", "positions.0"),
]


@pytest.mark.parametrize(("change", "status", "code", "field"), WRONG_CHANGES)
def test_a_wrong_change_is_named_and_moves_nothing(
    http: httpx.Client, path: str, change: Any, status: int, code: str, field: str
) -> None:
    """Whichever partition it is for, and whoever leads that one."""
    answer = http.put(path, content=change) if isinstance(change, bytes) else http.put(path, json=change)

    problem(answer, status, code, field=field, outcome="not_applied")
    assert 404 == http.get(path).status_code


def test_a_deleted_cursor_is_gone_and_deleting_is_idempotent(http: httpx.Client, path: str) -> None:
    """204 twice; another cursor stays; made again it expects nothing."""
    other = path.replace("reader", "other")
    for each in (path, other):
        http.put(each, json={"positions": {"0": 1, "1": 1}})

    assert [204, 204] == [http.delete(path).status_code for _ in range(2)]

    problem(http.get(path), 404, "no_such_cursor", field="cursor", value="reader")
    assert 200 == http.get(other).status_code
    assert 200 == http.put(path, json={"positions": {"0": 2}, "expected": {"0": None}}).status_code


def test_cursors_are_listed_in_pages(http: httpx.Client, topic: str) -> None:
    """By name, each as its own route shows it; `prefix`, `limit`, `after`, `next` and Link."""
    base = f"/v1/topics/{topic}/cursors"
    names = [f"c{number}" for number in range(5)]
    for number, name in enumerate(names):
        http.put(f"{base}/{name}", json={"positions": {str(number % 3): 0}})

    found: list[dict[str, Any]] = []
    target: str | None = f"{base}?limit=2"
    pages = 0
    while target is not None:
        answer = http.get(target)
        found += answer.json()["cursors"]
        assert ("next" in answer.json()) == ("next" in answer.links)
        target = answer.links["next"]["url"] if "next" in answer.links else None
        pages += 1

    assert (3, names) == (pages, [cursor["cursor"] for cursor in found])
    assert found == [http.get(f"{base}/{name}").json() for name in names]
    assert ["c3", "c4"] == [c["cursor"] for c in http.get(f"{base}?prefix=c&after=c2").json()["cursors"]]
    problem(http.get(f"{base}?limit=0"), 422, "invalid", field="limit", limit=1000)


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "%00", "x" * 201, "%2E"])
def test_a_cursor_that_may_not_be_named_so_is_422(http: httpx.Client, topic: str, name: str) -> None:
    """For every method."""
    for method in ("GET", "PUT", "DELETE"):
        problem(http.request(method, f"/v1/topics/{topic}/cursors/{name}"), 422, "invalid", field="cursor")


def test_cursors_of_no_topic_are_404(http: httpx.Client) -> None:
    """Listing, reading, moving and deleting."""
    for method, path in (("GET", ""), ("GET", "/c"), ("PUT", "/c"), ("DELETE", "/c")):
        answer = http.request(method, f"/v1/topics/nowhere/cursors{path}", json={"positions": {"0": 0}})
        problem(answer, 404, "no_such_topic", field="topic", value="nowhere")


def test_cursors_go_with_their_topic(http: httpx.Client, topic: str, path: str) -> None:
    """A topic made again under the name has none."""
    http.put(path, json={"positions": {"0": 1}})

    http.delete(f"/v1/topics/{topic}", headers={"If-Match": "*"})
    assert 201 == http.put(f"/v1/topics/{topic}", json={"partitions": 3}).status_code

    assert [] == http.get(f"/v1/topics/{topic}/cursors").json()["cursors"]
