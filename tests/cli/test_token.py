"""`laminar token` and `whoami`: what they ask of the cluster, and where a token's text goes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command

TEXT = "lam_0123456789abcdef_" + "s" * 43
TOKEN = {
    "id": "0123456789abcdef",
    "name": "billing",
    "grants": [{"role": "write", "prefix": "orders"}, {"role": "metrics", "prefix": ""}],
    "created": "2026-01-31T12:00:00.000Z",
    "expires": None,
    "certificate": None,
}


class FakeTokens(ThreadingHTTPServer):
    """A node that answers what is asked of tokens, and notes it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeTokens

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/v1/version":
            asked = json.loads(body) if body else None
            self.server.asked.append((self.command, self.path, asked, self.headers.get("Authorization")))
        status, document = self._document()
        content = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _document(self) -> tuple[int, Any]:
        if self.path == "/v1/version":
            return 200, {}
        if self.server.refuses:
            code = {401: "unauthorized", 403: "forbidden"}[self.server.refuses]
            return self.server.refuses, {"code": code, "detail": "no", "field": "role", "value": "admin"}
        if self.path == "/v1/whoami":
            return 200, {"principal": "billing", "grants": TOKEN["grants"], "expires": None}
        if self.path.startswith("/v1/admin/limits"):
            limits = {"principal": "billing", "limits": {"topics": 20, "sinks": 2}, "version": 7}
            return 200, {"principals": [limits]} if self.path == "/v1/admin/limits" else limits
        if self.command == "POST":
            return 201, {**TOKEN, "token": TEXT}
        if self.command == "DELETE":
            return 204, None
        return 200, {"tokens": [TOKEN]} if self.path == "/v1/admin/tokens" else TOKEN


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTokens]:
    """The node, which is where commands lead."""
    server = FakeTokens()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("LAMINAR_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_new_token_is_all_that_is_printed(laminar: Command, tokens: FakeTokens) -> None:
    """So it can go into a file or a variable; what it permits is on standard error."""
    ran = laminar("token", "create", "billing", "--grant", "write:orders", "--grant", "metrics")

    assert (0, f"{TEXT}\n") == (ran.code, ran.text)
    assert "0123456789abcdef of billing: write:orders, metrics" in ran.err and TEXT not in ran.err
    grants = [{"role": "write", "prefix": "orders"}, {"role": "metrics", "prefix": ""}]
    assert [("POST", "/v1/admin/tokens", {"name": "billing", "grants": grants}, None)] == tokens.asked


def test_a_new_token_goes_to_a_file_of_its_owner(
    laminar: Command, tokens: FakeTokens, tmp_path: Path
) -> None:
    """Never over another one; and there is no file without a token."""
    file = tmp_path / "billing.token"
    made = laminar("token", "create", "billing", "--grant", "admin", "--expires", "90d", "--to", str(file))
    again = laminar("token", "create", "billing", "--grant", "admin", "--to", str(file))
    tokens.refuses = 403
    refused = laminar("token", "create", "billing", "--grant", "admin", "--to", str(tmp_path / "none"))

    assert (0, b"") == (made.code, made.out)
    assert (f"{TEXT}\n", 0o600) == (file.read_text(), file.stat().st_mode & 0o777)
    assert "+00:00" in tokens.asked[0][2]["expires"]
    assert 1 == again.code and "File exists" in again.err
    assert 1 == refused.code and not (tmp_path / "none").exists()
    assert 2 == len(tokens.asked)


def test_tokens_are_listed_and_shown(laminar: Command, tokens: FakeTokens) -> None:
    listed = laminar("token", "list")
    shown = laminar("token", "show", "0123456789abcdef", "--json")

    assert ["ID", "NAME", "GRANTS", "CREATED"] == listed.text.splitlines()[0].split()
    assert "write:orders, metrics" in listed.text
    assert "0123456789abcdef\n" == laminar("token", "list", "-o", "names").text
    assert [TOKEN] == json.loads(shown.out)
    assert ("GET", "/v1/admin/tokens/0123456789abcdef", None, None) in tokens.asked


def test_tokens_are_revoked(laminar: Command, tokens: FakeTokens) -> None:
    """After a question, which names whose they are."""
    asked = laminar("token", "revoke", "0123456789abcdef")
    done = laminar("token", "revoke", "0123456789abcdef", "fedcba9876543210", "--yes")

    assert 2 == asked.code and "of billing (write:orders, metrics)?" in asked.err
    assert (0, b"") == (done.code, done.out)
    assert ["0123456789abcdef", "fedcba9876543210"] == [
        path.rpartition("/")[2] for method, path, _, _ in tokens.asked if method == "DELETE"
    ]


def test_limits_are_set_one_by_one(laminar: Command, tokens: FakeTokens) -> None:
    """The others stay: what is sent is all that was there, with the change."""
    done = laminar("limit", "set", "billing", "requests_per_s=500", "sinks=none")
    removed = laminar("limit", "remove", "*")
    listed = laminar("limit", "list")

    assert (0, 0) == (done.code, removed.code), done.err + removed.err
    assert [
        ("GET", "/v1/admin/limits/billing", None, None),
        ("PUT", "/v1/admin/limits/billing", {"topics": 20, "requests_per_s": 500}, None),
        ("PUT", "/v1/admin/limits/*", {}, None),
        ("GET", "/v1/admin/limits", None, None),
    ] == tokens.asked
    assert ["PRINCIPAL", "LIMITS"] == listed.text.splitlines()[0].split()
    assert "billing    topics=20, sinks=2" in listed.text


@pytest.mark.parametrize("wrong", ["topic=3", "topics", "topics=0", "topics=-1", "topics=many", "topics=²"])
def test_what_is_no_limit_is_not_sent(laminar: Command, tokens: FakeTokens, wrong: str) -> None:
    """The message says what is."""
    ran = laminar("limit", "set", "billing", wrong)
    assert 2 == ran.code and repr(wrong) in ran.err and [] == tokens.asked


def test_whoami_says_who_asks(laminar: Command, tokens: FakeTokens, tmp_path: Path) -> None:
    """With the token of a file, of the environment or of an option; no output shows it."""
    (tmp_path / "token").write_text(TEXT)
    for more in (["--token-file", str(tmp_path / "token")], ["--token", TEXT]):
        ran = laminar("whoami", *more)
        assert 0 == ran.code and TEXT not in ran.text + ran.err
        assert ["billing", "write:orders,", "metrics"] == ran.text.splitlines()[1].split()
        assert f"Bearer {TEXT}" == tokens.asked[-1][3]
    both = laminar("whoami", "--token", TEXT, "--token-file", str(tmp_path / "token"))
    assert 2 == both.code and "not both" in both.err and TEXT not in both.err


@pytest.mark.parametrize(("status", "said"), [(401, "LAMINAR_TOKEN_FILE"), (403, "laminar whoami")])
def test_a_refusal_says_what_to_do(laminar: Command, tokens: FakeTokens, status: int, said: str) -> None:
    tokens.refuses = status
    ran = laminar("token", "list")

    assert 1 == ran.code and said in ran.err and 1 == len(ran.err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["token", "create", "billing"], "--grant"),
        (["token", "create", "billing", "--grant", "own:orders"], "roles are read, write, admin, metrics"),
        (["token", "create", "billing", "--grant", "read", "--expires", "soon"], "--expires 'soon'"),
        (["token", "revoke"], "at least one token"),
        (["token", "show", "billing"], "16 hexadecimal digits, not 'billing'"),
        (["token", "show", TEXT], "16 hexadecimal digits, not this"),
        (["whoami", "--token-file", "/none"], "/none: No such file"),
        (["whoami", "--ca", "/none.pem"], "/none.pem: No such file"),
    ],
)
def test_wrong_use_is_2(laminar: Command, tokens: FakeTokens, arguments: list[str], said: str) -> None:
    ran = laminar(*arguments)

    assert 2 == ran.code and said in ran.err and TEXT not in ran.err
    assert not tokens.asked
