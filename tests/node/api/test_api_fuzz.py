"""Requests of every route with values that were not meant: none is answered with a mistake of ours."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar.http.api.openapi import openapi_document
from laminar.http.api.problems import CODES
from tests.node.api.asking import ARROW, BATCH, ENVELOPE_LINES, ENVELOPES, NDJSON, PROBLEM_TYPE

TOPIC = "fuzzed"
# What may be said of a node that is well: it waits for something, or was asked while it was busy.
MAY_BE_5XX = {
    "no_leader",
    "not_leader",
    "being_created",
    "overloaded",
    "replica_lagging",
    "not_a_replica",
    "outcome_unknown",
    "not_ready",
    # One node: no topic grows.
    "too_few_nodes",
}
TYPES = [
    None,
    "application/json",
    NDJSON,
    ENVELOPES,
    ENVELOPE_LINES,
    BATCH,
    ARROW,
    "text/plain",
    "a/b",
    "",
    ";",
]
NUMBERS = ["0", "1", "00", "-1", "1e3", "9" * 15, "9" * 16, "9" * 40, "1_0", " 1", "\u0661", "0x1", "1.0", ""]
WORDS = [
    "a",
    "earliest",
    "latest",
    "committed",
    "true",
    "*",
    "..",
    "a" * 201,
    "\u00fc",
    "\x00",
    "%",
    "a/b",
    "2026-01-01",
]
HEADERS = {
    "If-Match": ["*", '"0"', '"1"', 'W/"1"', "1,2", "x", ""],
    "If-None-Match": ["*", '"0"', "x"],
    "Accept": [ARROW, BATCH, NDJSON, "text/html", "*/*;q=0", ";;,"],
    "Idempotency-Key": ["k", "a b", "k" * 256],
    "Laminar-Producer": ["0" * 32, "x", ""],
    "Laminar-Epoch": ["0", "-1", "9" * 20],
    "Laminar-Sequence": ["0", "x", "9" * 20],
    "Laminar-Tag": ["t", "%ff", "%"],
    "Laminar-Header-A": ["1", "%00"],
    "Laminar-Local": ["1"],
    "Laminar-Redirect": ["1"],
    "Range": ["bytes=0-0", "bytes=5-1", "bytes=-", "x"],
    "Content-Encoding": ["gzip", "zstd", "identity", "br"],
}
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "partitions replicas settings positions expected owner expected_owner name epoch parts topic stages "
    "weight zone nodes reason node allow_fewer_replicas allow_other_number"
).split()
documents = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4).map(json.dumps).map(str.encode)
bodies = st.binary(max_size=200) | documents | values.map(json.dumps).map(str.encode)


@st.composite
def requests(draw: st.DrawFn) -> httpx.Request:
    """A request of some route, of any query parameters, headers and body."""
    template, methods = draw(st.sampled_from(sorted(openapi_document()["paths"].items())))
    method, operation = draw(st.sampled_from(sorted(methods.items())))
    path, query = template, {}
    for parameter in operation["parameters"]:
        if parameter["in"] == "header":
            continue  # drawn from HEADERS
        name, number = parameter["name"], parameter["schema"].get("type") == "integer"
        own = {"topic": TOPIC, "partition": "0"}.get(name, "0" if number else "a")
        other = st.sampled_from(NUMBERS if number else WORDS) | st.text(max_size=10)
        value = draw(st.just(own) | st.just(own) | other)
        if parameter["in"] == "path":
            path = path.replace(
                "{" + name + "}", httpx.QueryParams({"": value or "-"}).__str__()[1:].replace("+", "%20")
            )
        elif draw(st.booleans()):
            # Nobody waits for what does not come.
            query[name] = "1" if name == "wait_ms" else value
    headers = {
        name: draw(st.sampled_from(HEADERS[name]))
        for name in draw(st.sets(st.sampled_from(sorted(HEADERS)), max_size=3))
    }
    kind = draw(st.sampled_from(TYPES))
    if kind is not None:
        headers["Content-Type"] = kind
    body = draw(bodies) if method in ("post", "put", "patch") else b""
    return httpx.Request(
        method.upper(), f"http://localhost{path}", params=query, headers=headers, content=body
    )


def test_no_request_is_answered_with_a_mistake_of_ours(http: httpx.Client) -> None:
    """Every answer from 400 on is a problem of the table; 5xx only say that something is not there yet."""
    assert http.put(f"/v1/topics/{TOPIC}", json={}).status_code in (200, 201)

    @settings(suppress_health_check=list(HealthCheck))
    @given(requests())
    def ask(request: httpx.Request) -> None:
        if request.method == "PUT" and request.url.path == f"/v1/topics/{TOPIC}":
            return
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        url = http.base_url.copy_with(raw_path=request.url.raw_path)
        answer = http.request(request.method, url, headers=headers, content=request.content)

        if answer.status_code >= 400 and request.method != "HEAD":
            assert PROBLEM_TYPE == answer.headers["content-type"], answer.text
            code = answer.json()["code"]
            assert CODES[code].status == answer.status_code
            assert answer.status_code < 500 or code in MAY_BE_5XX, answer.text

    ask()
    assert 200 == http.get("/livez").status_code
