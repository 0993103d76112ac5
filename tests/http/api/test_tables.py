"""The tables of errors and routes, and the documents made of them."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.http.api.names import check_name
from laminar.http.api.openapi import docs_page, openapi_document
from laminar.http.api.problem_response import problem_response
from laminar.http.api.problems import CODES, LISTED, PROBLEM_TYPE, Problem, code_of_status
from laminar.http.api.roles import (
    ADMIN,
    ADMIN_OF_ALL,
    ANY,
    DESCRIBE,
    METRICS,
    PUBLIC,
    READ,
    WRITE,
    WRITE_SINK,
    WRITE_STAGE,
)
from laminar.http.api.routes import ROUTES, check_query, match

ROOT = Path(__file__).parents[3]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("code", CODES)
def test_a_problem_survives_the_wire(code: str) -> None:
    """All members come back, and a retriable one says when."""
    problem = Problem(code, "what", field="f", value="v" * 1000, limit=3, hint="do")
    back = Problem.decode(problem.encode(), status=problem.status)

    assert problem.document() == back.document()
    assert CODES[code].retriable == (problem.retry_after_ms is not None)
    assert len(problem.value) < 250


def test_every_problem_that_is_raised_has_a_code_of_the_table() -> None:
    """One of another code would be answered as a defect of the server."""
    raised = {
        (node.args[0].value, str(path.relative_to(ROOT)))
        for path in (ROOT / "laminar").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Problem"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }

    assert len(raised) > 150
    assert [each for each in raised if each[0] not in CODES] == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"<html>bad gateway", 502, "outcome_unknown"),
        (b"", 404, "not_found"),
        (b"[1]", 418, "malformed"),
        (b'{"code":"newer","detail":"d","status":503}', 503, "overloaded"),
        (b'{"code":7,"hint":[],"retry_after_ms":"x"}', 599, "internal_error"),
        (b"\xff", 429, "quota"),
    ],
)
def test_an_answer_of_somebody_else_becomes_the_nearest_problem(body: bytes, status: int, code: str) -> None:
    """A proxy's page, a newer server's code."""
    problem = Problem.decode(body, status=status)

    assert (code, status) == (problem.code, problem.status)


@given(st.binary(max_size=60), st.integers(400, 599))
def test_no_answer_fails_to_be_a_problem(body: bytes, status: int) -> None:
    """The client must not fail at the failure."""
    assert Problem.decode(body, status=status).code in CODES
    assert code_of_status(status) in CODES


def test_a_problem_is_answered_as_rfc_9457_says() -> None:
    """With its type, its headers, and `Retry-After` in whole seconds."""
    problem = Problem("overloaded", "memory", field="bytes", retry_after_ms=1001, headers=[("A", "b")])
    response = problem_response(problem)

    assert 503 == response.status
    assert [("A", "b"), ("Retry-After", "2")] == response.headers
    assert b"application/problem+json" in response.header_block
    assert isinstance(response.body, bytes)
    assert {
        "type": "/docs/errors#overloaded",
        "title": "A resource of the node is exhausted",
        "status": 503,
        "detail": "memory",
        "code": "overloaded",
        "field": "bytes",
        "retry_after_ms": 1001,
        "outcome": "not_applied",
    } == json.loads(response.body)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.template}")
def test_every_route_is_found(route: object) -> None:
    """By its own template filled in; a GET by HEAD too."""
    method, template, operation = route[:3]  # type: ignore[index]
    numbers = {
        "partition": "3",
        "offset": "812",
        "version": "0",
        "number": "7",
        "part": "9",
        "delayed": "0.5.7",
        "token": "0123456789abcdef",
        "principal": "*",
        "file": "main.js",
    }
    path, params = template, {}
    names = (
        "topic partition version offset cursor channel node sink number producer group member upload part"
        " operation delayed token principal file"
    )
    for name in names.split():
        if f"{{{name}}}" in template:
            params[name] = numbers.get(name, "a.b-C_9")
            path = path.replace(f"{{{name}}}", params[name])

    assert (operation, params) == match(method, path)
    if method == "GET":
        assert (operation, params) == match("HEAD", path)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", "not_found"),
        ("GET", "/v1", "not_found"),
        ("GET", "/v1/topics/", "not_found"),
        ("GET", "/v1/topics/a/", "not_found"),
        ("GET", "/v1/topics//partitions", "not_found"),
        ("GET", "/v2/topics", "not_found"),
        ("GET", "/V1/topics", "not_found"),
        ("GET", "/v1/topics/a/b/c/d/e/f", "not_found"),
        ("POST", "/v1/topics/a", "method_not_allowed"),
        ("PROPFIND", "/v1/topics", "method_not_allowed"),
        ("GET", "/v1/topics/a%2Fb", "invalid"),
        ("GET", "/v1/topics/a%20b", "invalid"),
        ("GET", "/v1/topics/..", "invalid"),
        ("GET", "/v1/topics/%2e", "invalid"),
        ("GET", "/v1/topics/" + "a" * 201, "invalid"),
        ("GET", "/v1/topics/é", "invalid"),
        ("GET", "/v1/topics/a%0A", "invalid"),
        ("GET", "/v1/topics/a/partitions/x", "invalid"),
        ("GET", "/v1/topics/a/partitions/-1", "invalid"),
        ("GET", "/v1/topics/a/partitions/01", "invalid"),
        ("GET", "/v1/topics/a/partitions/٣", "invalid"),
        ("GET", "/v1/topics/a/partitions/" + "9" * 17, "invalid"),
        ("GET", "/%ff", "malformed"),
    ],
)
def test_what_is_no_route_is_refused(method: str, path: str, code: str) -> None:
    """404, 405 with Allow, or a name that could never be one."""
    with pytest.raises(Problem) as refused:
        match(method, path)

    assert code == refused.value.code


def test_a_wrong_method_is_told_the_right_ones() -> None:
    """HEAD wherever GET is."""
    with pytest.raises(Problem) as refused:
        match("BREW", "/v1/topics/a")

    assert [("Allow", "DELETE, GET, HEAD, PATCH, PUT")] == refused.value.headers


def test_a_query_parameter_that_nobody_reads_is_refused() -> None:
    """`?ofset=3` would else read from the start; the answer lists what there is."""
    check_query("offsets", {"at": "latest"})
    with pytest.raises(Problem) as refused:
        check_query("offsets", {"at": "latest", "reed": "leader"})

    assert ("reed", "leader", "at, id, read") == (
        refused.value.field,
        refused.value.value,
        refused.value.limit,
    )


@given(st.text(), st.text())
def test_no_path_raises_anything_but_a_problem(method: str, path: str) -> None:
    """Whatever comes is answered."""
    for start in ("/", "/v1/topics/"):
        try:
            match(method, start + path)
        except Problem:
            pass


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\n", "ä", "a" * 201])
def test_names_are_checked_wherever_they_come_from(name: str) -> None:
    """In a body as in a path."""
    with pytest.raises(Problem):
        check_name(name, field="topic")


def test_openapi_has_every_operation_and_code() -> None:
    """And is JSON."""
    document = json.loads(json.dumps(openapi_document()))
    operations = [operation for path in document["paths"].values() for operation in path.values()]

    assert sorted({route.operation for route in ROUTES}) == sorted(
        found["operationId"] for found in operations
    )
    assert (
        sorted(LISTED) == document["components"]["schemas"]["ProblemDocument"]["properties"]["code"]["enum"]
    )
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                assert parameter["in"] != "path" or f"{{{parameter['name']}}}" in path


def test_openapi_says_of_each_route_who_may_ask_and_how_others_are_refused() -> None:
    """By the table of routes, for a client that is made of the document."""
    document = openapi_document()
    schemes = document["components"]["securitySchemes"]
    assert {"token": ("http", "bearer"), "certificate": ("mutualTLS", None)} == {
        name: (scheme["type"], scheme.get("scheme")) for name, scheme in schemes.items()
    }
    for route in ROUTES:
        if route.template.startswith("/docs/"):
            continue
        found = document["paths"][route.template][route.method.lower()]
        refusals = {status for status in found["responses"] if status in ("401", "403", "429")}
        if route.needs == PUBLIC:
            assert ([], {"403", "429"}) == (found["security"], refusals)
            assert "Needs no token." == found["description"]
            continue
        assert {"401", "403", "429"} == refusals
        assert [["token"], ["certificate"]] == [list(each) for each in found["security"]]
        for each in found["security"]:
            (roles,) = each.values()
            if route.needs.what in ("any", "describe"):
                assert [] == roles  # one of several is enough
            else:
                assert [route.needs.what] == roles and roles[0] in found["description"]
        assert all(name in found["description"] for name in (*route.needs.named_by, "Needs"))
    for name in ("Unauthorized", "Forbidden", "TooMuch"):
        assert [PROBLEM_TYPE] == list(document["components"]["responses"][name]["content"])


def test_the_page_has_an_anchor_for_every_code_and_loads_nothing() -> None:
    """`type` of a problem leads there."""
    anchors: list[str] = []
    loaded: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found = dict(attrs)
            if found.get("id"):
                anchors.append(str(found["id"]))
            if tag in ("script", "link", "img", "iframe") or "src" in found:
                loaded.append(tag)

    Reader().feed(docs_page())

    assert set(LISTED) <= set(anchors)
    assert not (set(CODES) - set(LISTED)) & set(anchors)
    assert [] == loaded


def test_the_protocol_document_names_every_code_and_route() -> None:
    """docs/protocol.md is written by hand; this keeps it whole."""
    names = [*LISTED, *[route.template for route in ROUTES]]

    assert [] == [name for name in names if f"`{name}`" not in PROTOCOL]


NEEDED = {
    PUBLIC: "nothing",
    ANY: "a token",
    DESCRIBE: "read, write or admin on the topic",
    READ: "read on the topic",
    WRITE: "write on the topic",
    WRITE_SINK: "write on the sink",
    WRITE_STAGE: "write on the sink and the topic",
    ADMIN: "admin on the topic",
    ADMIN_OF_ALL: "admin on everything",
    METRICS: "metrics",
}


def test_the_page_on_security_says_what_each_operation_needs() -> None:
    """Its table is written by hand."""
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| (`[a-z_`, ]+`) \|$", page, re.MULTILINE)
    listed = [(name, what) for what, names in rows for name in re.findall(r"`([a-z_]+)`", names)]

    assert {route.operation: NEEDED[route.needs] for route in ROUTES} == dict(listed)
    assert len(listed) == len(dict(listed))
