"""Requests that a web page of another site may have made, by their heads alone."""

from __future__ import annotations

import pytest

from laminar.http.api.cross_site import Sites, check_body_type
from laminar.http.api.problems import Problem
from laminar.http.api.routes import ROUTES, Body, Route
from laminar.http.protocol.request_head import RequestHead, parse_request_head

SITES = Sites(["node1", "db1.example.net", ".pods.example.net"], ["https://ui.example.net"])


def head_of(method: str = "GET", length: int = 0, **headers: str) -> RequestHead:
    """A head with these headers."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {length}"] if length else []
    return parse_request_head("\r\n".join([f"{method} / HTTP/1.1", *lines, "", ""]).encode())


def refusal(head: RequestHead) -> tuple[str, int, str | None]:
    with pytest.raises(Problem) as caught:
        SITES.check(head)
    return caught.value.code, caught.value.status, caught.value.field


OWN = [
    *(
        "localhost",
        "localhost:7070",
        "LOCALHOST:7070",
        "node1",
        "Node1:80",
        "node1.:80",
        "db1.example.net:7070",
    ),
    *("127.0.0.1:7070", "10.1.2.3", "[::1]:7070", "[::1]", "a.pods.example.net", "a.b.pods.example.net:1"),
]


@pytest.mark.parametrize("host", OWN)
def test_own_names_and_addresses_are_served(host: str) -> None:
    """With or without a port, in any case."""
    SITES.check(head_of(Host=host))


STRANGE = [
    *(
        "evil.example",
        "node1.evil.example:7070",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "pods.example.net",
    ),
    *("evilpods.example.net", "2130706433", "0x7f.1", "[::1].evil", "[evil.example]", ":7070"),
]


@pytest.mark.parametrize("host", STRANGE)
def test_another_name_is_refused(host: str) -> None:
    """A page whose own name was made to resolve to this server sends that name."""
    assert ("wrong_host", 421, "host") == refusal(head_of(Host=host))


def test_a_request_without_a_name_is_served() -> None:
    """HTTP/1.0 has none; no browser sends it so."""
    SITES.check(head_of(Host=""))
    SITES.check(parse_request_head(b"GET / HTTP/1.0\r\n\r\n"))


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "", "localhost:7070"),
        *("file://localhost:7070", "https://ui.example.net.evil.example", "https://ui.example.net:8443"),
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    """Another port of the same machine is another origin."""
    assert ("cross_site", 403, "origin") == refusal(head_of("POST", Host="localhost:7070", Origin=origin))


@pytest.mark.parametrize(
    "origin", ["http://localhost:7070", "https://LOCALHOST:7070", "https://ui.example.net"]
)
def test_own_and_listed_origins_are_served(origin: str) -> None:
    """A listed one also where the browser calls it cross-site."""
    SITES.check(head_of("POST", Host="localhost:7070", Origin=origin, Sec_Fetch_Site="cross-site"))


def test_a_cross_site_read_is_refused() -> None:
    """An image's address sends no `Origin`."""
    head = head_of(Host="localhost:7070", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")

    assert ("cross_site", 403, "sec-fetch-site") == refusal(head)
    for site in ("same-origin", "none", "same-site"):
        SITES.check(head_of(Host="localhost:7070", Sec_Fetch_Site=site))


def taken(operation: str, method: str, kind: str | None, length: int = 5) -> bool:
    head = head_of(method, length, Host="a", **({} if kind is None else {"Content_Type": kind}))
    try:
        check_body_type(head, operation)
    except Problem as problem:
        assert (415, "content-type") == (problem.status, problem.field)
        return False
    return True


JSON_TYPES = ["application/json", "application/json; charset=utf-8", "application/merge-patch+json"]
PAGE_TYPES = ["text/plain", "text/plain;charset=UTF-8", "TEXT/PLAIN", "multipart/form-data; boundary=x"]


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.body is Body.JSON], ids=lambda r: r.operation
)
def test_documents_have_a_json_type(route: Route) -> None:
    """What a page may POST without asking is refused; `curl -X PUT -d` works."""
    name, method = route.operation, route.method

    assert all(taken(name, method, kind) for kind in JSON_TYPES)
    assert not any(taken(name, method, kind) for kind in [*PAGE_TYPES, "application/octet-stream"])
    assert (method != "POST") == taken(name, method, "application/x-www-form-urlencoded")
    assert taken(name, method, None)
    assert taken(name, method, "text/plain", length=0)


@pytest.mark.parametrize("operation", ["append_to_topic", "append_to_partition", "stage", "publish_upload"])
def test_records_have_any_type_but_what_a_page_may_send(operation: str) -> None:
    """`curl -d` works: a form's type comes with `Origin` from every browser that has tabs."""
    kinds = [
        None,
        "application/x-www-form-urlencoded",
        "application/octet-stream",
        "image/png",
        "x",
        *JSON_TYPES,
    ]

    assert all(taken(operation, "POST", kind) for kind in kinds)
    assert not any(taken(operation, "POST", kind) for kind in PAGE_TYPES)
