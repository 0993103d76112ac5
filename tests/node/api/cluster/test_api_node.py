"""The node itself over HTTP: health, limits, metrics, documents, and what holds for every route."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from itertools import count
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from laminar.http.api.problems import LISTED
from laminar.http.api.routes import ROUTES, Route
from tests.node.api.asking import Partition, fresh_metrics, problem, until

_NUMBERS = count(1)
_METHODS = ("GET", "PUT", "PATCH", "POST", "DELETE", "OPTIONS", "TRACE")


def known_methods(template: str) -> set[str]:
    """What a path knows."""
    methods = {route.method for route in ROUTES if route.template == template}
    return methods | {"HEAD"} if "GET" in methods else methods


@pytest.fixture(scope="module")
def filled(http: httpx.Client) -> dict[str, str]:
    """Something for each parameter of a path, for requests that change nothing."""
    return fill(http, "filled")


@pytest.fixture
def filled_to_change(http: httpx.Client) -> Iterator[dict[str, str]]:
    """The same for one request that may change it. The node is undrained afterwards: others use it, too."""
    known = fill(http, f"filled-{next(_NUMBERS)}")
    yield known
    assert 200 == http.post(f"/v1/admin/nodes/{known['node']}/undrain").status_code
    http.delete(f"/v1/topics/{known['topic']}", headers={"If-Match": "*"})


def fill(http: httpx.Client, topic: str) -> dict[str, str]:
    """Make a topic, and something for each parameter of a path."""
    assert 201 == http.put(f"/v1/topics/{topic}", json={"partitions": 2}).status_code
    Partition(http, topic).append("a", "b")
    # A change of the route waits for this upload.
    http.put(f"/v1/topics/{topic}/partitions/1/uploads/held/parts/0", content=b"part")
    change = {"after": 0, "inputs": [1], "wait_ms": 3_600_000}
    assert 202 == http.post(f"/v1/topics/{topic}/routes", json=change).status_code
    http.put(f"/v1/topics/{topic}/cursors/reader", json={"positions": {"0": 1}})
    assert 201 == http.put(f"/v1/topics/{topic}/channels/jobs", json={}).status_code
    later = http.post(f"/v1/topics/{topic}/partitions/0/records", params={"delay_ms": 10**9}, content=b"d")
    http.post("/v1/sinks/driver")
    http.put(f"/v1/topics/{topic}/groups/readers/members/one")
    producer = http.post("/v1/producers").json()["producer"]
    Partition(http, topic).post(b"c", headers={"Laminar-Producer": producer, "Laminar-Sequence": "0"})
    (node,) = http.get("/v1/nodes").json()["nodes"]
    # More replicas than there are nodes are an operation that goes on.
    more = {"replicas": 3, "allow_fewer_replicas": True}
    assert 200 == http.patch(f"/v1/topics/{topic}", json=more, headers={"If-Match": "*"}).status_code
    grants = [{"role": "read", "prefix": topic}]
    token = http.post("/v1/admin/tokens", json={"name": "filled", "grants": grants}).json()["id"]
    return {
        "token": token,
        "principal": "filled",
        "file": "main.js",
        "sink": "driver",
        "number": "0",
        "topic": topic,
        "partition": "0",
        "offset": "0",
        "version": "1",
        "cursor": "reader",
        "channel": "jobs",
        "producer": producer,
        "group": "readers",
        "member": "one",
        "node": node["node"],
        "upload": "dump",
        "part": "0",
        "operation": f"replicas:{topic}",
        "delayed": later.json()["scheduled"][0],
    }


# -- every route -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described(http: httpx.Client) -> dict[str, Any]:
    paths: dict[str, Any] = http.get("/openapi.json").json()["paths"]
    return paths


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.template}")
def test_every_route_is_served_and_described(
    http: httpx.Client, request: pytest.FixtureRequest, described: dict[str, Any], route: Route
) -> None:
    """None answers with a bug or as unknown; HEAD is GET without its body; each is in /openapi.json."""
    # A member's session is over after half a minute.
    is_shared = route.method == "GET" and "{group}" not in route.template
    filled = request.getfixturevalue("filled" if is_shared else "filled_to_change")
    path = route.template.format(**filled) + ("?key=a" if route.operation == "trace" else "")

    answer = http.request(route.method, path, headers={"If-Match": "*"} if route.method == "DELETE" else {})

    assert answer.status_code < 500, answer.text
    assert answer.status_code not in (404, 405), answer.text
    if route.method == "GET":
        status = 308 if route.operation == "console_moved" else 200
        assert status == answer.status_code, answer.text
        looks: list[httpx.Response] = [answer]

        def head_is_alike() -> bool:
            """What an answer tells, and its version, may change between two looks."""
            looks[:] = [looks[-1], http.head(path), http.get(path)]
            assert (status, b"") == (looks[1].status_code, looks[1].content)
            before, head, _ = (
                {n: v for n, v in each.headers.items() if n not in ("date", "content-length")}
                for each in looks
            )
            first, size, last = (int(each.headers["content-length"]) for each in looks)
            between = min(first, last) <= size <= max(first, last)
            return before == head and (between or route.operation in ("metrics", "node_bundle"))

        until(head_is_alike, lambda: [each.headers for each in looks])
    if not route.template.startswith("/docs/"):
        assert route.operation == described[route.template][route.method.lower()]["operationId"]


@pytest.mark.parametrize("template", sorted({route.template for route in ROUTES}))
def test_a_method_that_a_path_does_not_know_is_405(
    http: httpx.Client, filled: dict[str, str], template: str
) -> None:
    """`Allow` lists those it knows, HEAD among them where GET is."""
    path = template.format(**filled)
    known = known_methods(template)

    for method in set(_METHODS) - known:
        answer = http.request(method, path)
        problem(answer, 405, "method_not_allowed", field="method", value=method)
        assert known == set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/topics/", "/v2/topics", "/v1/topics/t/records/", "//v1/topics", "/livez/x"],
)
def test_a_path_that_is_not_there_is_404(http: httpx.Client, path: str) -> None:
    """Also one with a slash behind it."""
    problem(http.get(f"http://{http.base_url.netloc.decode()}{path}"), 404, "not_found", field="path")


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {value for name, value in attrs if name == "id" and value}


def test_the_type_of_every_problem_leads_to_its_explanation(http: httpx.Client) -> None:
    """/docs/errors#CODE is an anchor of the page that is there."""
    page = http.get("/docs/errors")
    assert 200 == page.status_code
    anchors = _Anchors()
    anchors.feed(page.text)

    assert set(LISTED) <= anchors.found


def test_openapi_describes_every_route_with_its_parameters(http: httpx.Client) -> None:
    """And nothing that isn't there; every reference leads somewhere; ids are unique."""
    document = http.get("/openapi.json").json()

    assert document["openapi"].startswith("3.1")
    described = {
        (method.upper(), path, operation["operationId"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    expected = {(r.method, r.template, r.operation) for r in ROUTES if not r.template.startswith("/docs/")}
    assert expected == described
    assert len(described) == len({operation for _, _, operation in described})
    for path, operations in document["paths"].items():
        for operation in operations.values():
            names = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert set(re.findall(r"\{(\w+)\}", path)) == names
            assert operation["responses"]
    for reference in re.findall(r'"\$ref":"#/([^"]+)"', http.get("/openapi.json").text.replace(" ", "")):
        found: Any = document
        for step in reference.split("/"):
            found = found[step]


# -- the node ----------------------------------------------------------------------------------------------


def test_version_and_limits_are_told(http: httpx.Client) -> None:
    """Every limit is a positive number; the version is the package's."""
    from laminar import __version__

    version = http.get("/v1/version").json()
    limits = http.get("/v1/limits").json()

    assert (__version__, "v1") == (version["version"], version["api"])
    assert all(isinstance(limit, int) and limit > 0 for limit in limits.values())


def test_the_limits_told_are_those_enforced(http: httpx.Client, partition: Partition) -> None:
    """Each is allowed, and one more is refused with that limit. Bodies and records: see the appends."""
    limits = http.get("/v1/limits").json()
    for name, field in (
        ("max_fetch_bytes", "max_bytes"),
        ("max_fetch_records", "limit"),
        ("max_wait_ms", "wait_ms"),
    ):
        if field != "wait_ms":
            assert 200 == partition.fetch(**{field: limits[name]}).status_code
        refused = partition.fetch(**{field: limits[name] + 1})
        problem(refused, 422, "invalid", field=field, value=limits[name] + 1, limit=limits[name])
    for name in ("partitions", "replicas"):
        limit = limits[f"max_{name}"]
        problem(
            http.put("/v1/topics/too-many", json={name: limit + 1}), 422, "invalid", field=name, limit=limit
        )
    key, tag = limits["max_key_bytes"], limits["max_tag_bytes"]
    envelope = "application/vnd.laminar.records+ndjson"
    for name, limit in (("key", key), ("tag", tag)):
        assert 201 == partition.post(f'{{"value":"","{name}":"{"x" * limit}"}}', envelope).status_code
        refused = partition.post(f'{{"value":"","{name}":"{"x" * (limit + 1)}"}}', envelope)
        problem(refused, 413, "too_large", value=limit + 1, limit=limit)
    target = f"/livez?{'x' * (limits['max_target_bytes'] - len('/livez?'))}"
    assert 414 != http.get(target).status_code
    problem(http.get(target + "x"), 414, "target_too_long", field="target", limit=limits["max_target_bytes"])
    fields = [(f"x-{number}", "1") for number in range(limits["max_head_fields"] + 1)]
    problem(http.get("/livez", headers=fields), 431, "headers_too_large", limit=limits["max_head_fields"])
    big = {"x": "y" * limits["max_head_bytes"]}
    problem(http.get("/livez", headers=big), 431, "headers_too_large", limit=limits["max_head_bytes"])


def test_the_cluster_names_nodes_and_shards(http: httpx.Client, api_url: str) -> None:
    """With the URL of each shard's own port, which answers as that shard."""
    cluster = http.get("/v1/cluster").json()

    (node,) = cluster["nodes"]
    assert (api_url, True, "alive") == (node["url"], node["alive"], node["status"])
    assert 32 == len(cluster["cluster_id"])
    assert node["node"] == cluster["catalog_leader"]
    assert cluster["insecure"] is False
    assert [0, 1] == [shard["shard"] for shard in node["shards"]]
    for shard in node["shards"]:
        told = httpx.get(f"{shard['url']}/livez", timeout=60, trust_env=False).json()
        assert (node["node"], shard["shard"]) == (told["node"], told["shard"])
    assert [node] == http.get("/v1/nodes").json()["nodes"]
    assert node == http.get(f"/v1/nodes/{node['node']}").json()
    problem(http.get("/v1/nodes/nobody"), 404, "no_such_node", field="node", value="nobody")


def test_the_cluster_waits_for_its_next_version(http: httpx.Client, api_url: str) -> None:
    """304 when nothing changes in time; a change is told at once."""
    version = http.get("/v1/cluster").json()["version"]
    assert 200 == http.get(f"/v1/cluster?after={version - 1}&wait_ms=20000").status_code

    deadline = time.monotonic() + 120
    while True:
        begun = time.monotonic()
        nothing = http.get(f"/v1/cluster?after={version}&wait_ms=300")
        waited = time.monotonic() - begun
        if nothing.status_code != 200:
            break
        # What tests before this one did is still followed, by the choice of leaders among others.
        assert time.monotonic() < deadline, "the version changes all the time"
        version = nothing.json()["version"]
    with ThreadPoolExecutor(1) as pool:
        url = f"{api_url}/v1/cluster?after={version}&wait_ms=20000"
        waiting = pool.submit(httpx.get, url, timeout=60, trust_env=False)
        http.put("/v1/topics/news")
        changed = waiting.result(60)

    assert (304, b"") == (nothing.status_code, nothing.content)
    assert 0.25 < waited < 60
    assert changed.json()["version"] > version
    for wrong in ("after=x", "after=-1", "wait_ms=30001", "wait_ms=1e3", "after=0&wait_ms=%201"):
        field = wrong.rsplit("=", 1)[0].rsplit("&", 1)[-1]
        problem(http.get(f"/v1/cluster?{wrong}"), 422, "invalid", field=field)


def test_metrics_parse_and_hold_what_happened(http: httpx.Client, partition: Partition) -> None:
    """Prometheus' own parser reads them; every process of the node is there, whichever answers."""

    def scrape() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(answer.text):
            assert family.name.startswith("laminar_") and family.documentation
            for sample in family.samples:
                place = (sample.name, frozenset(sample.labels.items()))
                assert place not in found and math.isfinite(sample.value) and sample.value >= 0, sample
                found[place] = sample.value
        return found

    where = frozenset({("topic", partition.topic)})
    partition.append("a", "b", "c")
    http.put(f"/v1/topics/{partition.topic}/cursors/c", json={"positions": {"0": 1}})
    partition.fetch()
    appended = ("laminar_append_records_total", where)
    until(lambda: appended in scrape())  # an answer that was costly is kept for up to 5 s
    first = scrape()
    up = [f'laminar_process_up{{process="{role}"}} 1' for role in ("controller", "shard-0", "shard-1")]

    def all_are_up() -> bool:
        second = httpx.get(f"{http.base_url}/metrics", timeout=60, trust_env=False).text
        return all(each in second for each in up)

    for _ in range(4):  # several connections: either shard may answer
        partition.append("d")
        until(all_are_up)
    until(lambda: scrape()[appended] >= 7)
    after = scrape()
    assert (3, 7) == (first[appended], after[appended])
    assert 1 == first[("laminar_leaders", where)]
    assert 2 == first[("laminar_consumer_lag_records", where | {("consumer", "c")})]
    assert first[("laminar_fetch_bytes_total", where)] > 0 and first[("laminar_log_bytes", where)] > 0
    assert 3 == first[("laminar_fetch_records_total", where)]
    roles = {"controller", "shard-0", "shard-1"}
    assert roles == {dict(labels)["process"] for name, labels in after if name == "laminar_process_up"}
    for name in ("laminar_http_requests_total", "laminar_raft_syncs_total", "laminar_raft_leading"):
        assert {"shard-0", "shard-1"} <= {dict(labels)["process"] for n, labels in after if n == name}, name
    for role in ("shard-0", "shard-1"):
        for name in ("laminar_http_requests_total", "laminar_raft_syncs_total"):
            place = (name, frozenset({("process", role)}))
            assert after[place] >= first[place]


def test_metrics_have_the_whole_lag_where_a_cursor_was_never_committed(
    http: httpx.Client, new_topic: Callable[..., str]
) -> None:
    """A consumer that was never given some partitions is not up to date there. Each series stands alone."""
    topic = new_topic(partitions=2)
    for number in (0, 1):
        Partition(http, topic, number).append("a", "b", "c")
    http.put(f"/v1/topics/{topic}/cursors/c", json={"positions": {"0": 1}})
    families = text_string_to_metric_families(fresh_metrics(http))
    lags = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if "_lag_records" in sample.name and sample.labels["topic"] == topic
    }

    assert {"laminar_consumer_lag_records": 5, "laminar_consumer_lag_records_max": 3} == lags
