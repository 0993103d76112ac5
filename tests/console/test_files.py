"""The console as a server sends it: its headers, its files, and the routes that its modules name."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from laminar.console.files import POLICY, console_files
from laminar.http.api.openapi import openapi_document
from laminar.testing.nodes import serve

ROOT = Path(__file__).parents[2]
VENDORED = "preact-htm.js"
VENDORED_SHA256 = "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7"

OWN = sorted(name for name in console_files() if name != VENDORED)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve() as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        yield client


def test_files_are_sent_with_their_policy_whole_or_compressed(http: httpx.Client) -> None:
    """With an ETag of the form in which they are sent, by which a browser asks again."""
    assert "text/html; charset=utf-8" == http.get("/console/").headers["content-type"]
    for name, file in console_files().items():
        for coding, digest in (("identity", file.digest), ("gzip", f"{file.digest}-gz")):
            answer = http.get(f"/console/{name}", headers={"Accept-Encoding": coding})
            assert 200 == answer.status_code, name
            assert [POLICY] == answer.headers.get_list("content-security-policy"), name
            assert f'"{digest}"' == answer.headers["etag"]
            assert coding == answer.headers.get("content-encoding", "identity")
            assert "no-cache" == answer.headers["cache-control"]
            assert file.media_type == answer.headers["content-type"]
            assert file.body == answer.content, name
            again = {"Accept-Encoding": coding, "If-None-Match": answer.headers["etag"]}
            answer = http.get(f"/console/{name}", headers=again)
            assert (304, b"") == (answer.status_code, answer.content)
        assert file.body == gzip.decompress(file.gzipped)


def test_gzip_is_not_sent_to_who_refuses_it(http: httpx.Client) -> None:
    for accepted in ("", "gzip;q=0", "br, gzip; q=0.000"):
        answer = http.get("/console/main.js", headers={"Accept-Encoding": accepted})
        assert "content-encoding" not in answer.headers, accepted


@pytest.mark.parametrize("name", ["nothing.js", "..", "%2e%2e%2ffiles.py", "files.py", "a/b", "web/main.js"])
def test_nothing_else_is_a_file_of_the_console(http: httpx.Client, name: str) -> None:
    assert 404 == http.get(f"/console/{name}").status_code


def test_the_address_without_its_slash_leads_there(http: httpx.Client) -> None:
    """By a relative address, which is right behind a proxy as well."""
    answer = http.get("/console")

    assert (308, "console/") == (answer.status_code, answer.headers["location"])


def test_all_other_answers_are_no_pages(http: httpx.Client) -> None:
    """Whatever a record holds, no browser runs it as a page of the node."""
    http.put("/v1/topics/page", json={}).raise_for_status()
    made = http.post("/v1/topics/page/records", content=b"<script>alert(1)</script>")
    records = "/v1/topics/page/partitions/0/records"
    answers = [
        made,
        http.get(f"{records}/0"),
        http.get(records),
        http.get("/no/such/path"),
        http.get("/livez"),
    ]
    answers += [http.head(records), http.get("/v1/topics", headers={"Origin": "https://evil.example"})]

    for answer in answers:
        assert ["default-src 'none'; sandbox"] == answer.headers.get_list("content-security-policy")
    for answer in [*answers, http.get("/console/"), http.get("/docs")]:
        assert "nosniff" == answer.headers["x-content-type-options"]
        assert "no-referrer" == answer.headers["referrer-policy"]
        assert "same-origin" == answer.headers["cross-origin-resource-policy"]
    assert "attachment" == http.get(f"{records}/0").headers["content-disposition"]


def test_the_documentation_may_use_its_own_style_alone(http: httpx.Client) -> None:
    policy = http.get("/docs").headers["content-security-policy"]
    (style,) = re.findall("<style>(.*?)</style>", http.get("/docs").text)

    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    digest = hashlib.sha256(style.encode()).digest()
    assert base64.b64encode(digest).decode() in policy


def test_a_link_to_the_console_may_be_followed_from_anywhere(http: httpx.Client) -> None:
    """But no page of another site may frame it, load a file of it, or reach more than it."""
    from_afar = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}

    assert 200 == http.get("/console/", headers=from_afar).status_code
    assert 403 == http.get("/v1/topics", headers=from_afar).status_code
    assert 403 == http.get("/consoles", headers=from_afar).status_code
    assert 403 == http.get("/console/", headers=from_afar | {"Sec-Fetch-Dest": "iframe"}).status_code
    loaded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
    assert 403 == http.get("/console/main.js", headers=loaded).status_code


def test_without_the_setting_there_is_no_console() -> None:
    with (
        serve(settings={"console": "off"}) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        for path in ("/console", "/console/", "/console/main.js"):
            assert 404 == client.get(path).status_code


def test_the_vendored_file_is_the_one_of_the_notice() -> None:
    """Unchanged, and its licences are beside it."""
    notice = (ROOT / "NOTICE").read_text()
    licences = ROOT / "laminar/console/licences"

    assert VENDORED_SHA256 == hashlib.sha256(console_files()[VENDORED].body).hexdigest()
    assert VENDORED_SHA256 in notice
    assert "Apache License" in (licences / "htm.txt").read_text()
    assert "The MIT License" in (licences / "preact.txt").read_text()


@pytest.mark.parametrize("name", OWN)
def test_no_file_names_another_host_or_writes_markup(name: str) -> None:
    text = console_files()[name].body.decode()

    found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text))
    assert found <= {"http://www.w3.org"}, "a name space of SVG is no address"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
    )
    assert not re.search(r"dangerouslySetInnerHTML|document\.cookie|\sstyle=", text)


def test_modules_load_only_what_is_there() -> None:
    for name in OWN:
        text = console_files()[name].body.decode()
        for other in re.findall(r'from "\./([^"]+)"|(?:src|href)="([\w.-]+\.(?:js|css|svg))"', text):
            assert "".join(other) in console_files(), f"{name} loads {other}"


def called() -> set[str]:
    """Each method and path that a module calls."""
    found = set()
    for name in OWN:
        text = console_files()[name].body.decode()
        found |= {f"GET {path}" for path in re.findall(r'\bget(?:Tagged|Bytes)?\(\s*"(/[^"]+)"', text)}
        found |= {" ".join(call) for call in re.findall(r'\bsend\(\s*"(\w+)", "([^"]+)"', text)}
        paths = set(re.findall(r'"(/(?:v1|readyz|livez|metrics)[^"]*)"', text))
        assert paths <= {call.partition(" ")[2] for call in found}, f"{name} names a path apart from a call"
    return found


def test_each_route_that_the_modules_call_is_public() -> None:
    """It is in the OpenAPI document, as any program finds it."""
    described = {
        f"{method.upper()} {path}"
        for path, methods in openapi_document()["paths"].items()
        for method in methods
    }

    assert len(called()) > 30
    assert set() == called() - described
