"""A node that asks for no token, and pages of other sites in Chromium: none reads or changes anything.

`tests/node/api/test_api_web_pages.py` has the same requests without a browser. Skipped as `test_browser.py`.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.console.test_browser import BROWSER, browser_or_skip

SCRIPT = Path(__file__).with_name("other_site.py")
TARGET = "/v1/topics/t/records"
PAGE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\nConnection: close\r\n\r\n"
    b"<title>evil</title>\n"
)
SECONDS = 120


class Site:
    """A site on the loopback: its page for `/`; all else it passes on, as it is, to a node if it has one.

    With a node it is what a browser has after DNS rebinding: the page's own host leads there.
    """

    def __init__(self, node: tuple[str, int] | None) -> None:
        self._node = node
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.answers: list[int] = []
        """The statuses that the node answered with."""
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def close(self) -> None:
        """Stop, and wait for all that is under way."""
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for thread in self._threads:
            thread.join(SECONDS)

    def _begin(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            self._begin(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """Answer one request; the browser makes a connection for each."""
        client.settimeout(SECONDS)
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                got = client.recv(65536)
                if not got:
                    return  # one that Chromium opened in advance
                head += got
            if self._node is None or head.startswith(b"GET / "):
                client.sendall(PAGE)
                return
            head, _, body = head.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            while length is not None and len(body) < int(length[1]):
                body += client.recv(65536)
            head = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"\r\nConnection: close", head)
            with socket.create_connection(self._node, SECONDS) as node:
                node.sendall(head + b"\r\n\r\n" + body)
                answer = b""
                while got := node.recv(65536):
                    answer += got
            self.answers.append(int(answer.split(b" ", 2)[1]))
            client.sendall(answer)


@contextmanager
def site(node: tuple[str, int] | None) -> Iterator[Site]:
    """A site that is closed at the end."""
    served = Site(node)
    try:
        yield served
    finally:
        served.close()


class Tried(NamedTuple):
    """What the pages tried. `rebound` has the statuses with which the node answered the page of that name."""

    ended: dict[str, dict[str, object]]
    """By page how each attempt ended."""
    after: dict[str, tuple[set[str], int]]
    """By page what was in the node after it: its topics, and records of `t`."""
    asked: dict[str, int]
    """By page how many requests the node had by then."""
    rebound: list[int]


def requests_of(http: httpx.Client) -> int:
    """Return how many requests the node has had."""
    counted = re.findall(r"^laminar_http_requests_total\S* (\d+)", http.get("/metrics").text, re.MULTILINE)
    assert counted
    return sum(map(int, counted))


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    """The three pages, one after the other."""
    program = browser_or_skip()
    with (
        LocalCluster(tmp_path_factory.mktemp("node"), nodes=1, shards=1) as cluster,
        httpx.Client(base_url=cluster.urls[0], trust_env=False, timeout=SECONDS) as http,
    ):
        member = cluster.members[0]
        http.put("/v1/topics/t", json={"partitions": 1}).raise_for_status()
        with site(None) as other, site((member.host, member.port)) as rebound:
            found = Tried({}, {}, {"": requests_of(http)}, rebound.answers)
            pages = (f"http://evil.example:{other.port}/", f"http://rebound.example:{rebound.port}/")
            command: list[str | Path] = [
                BROWSER / "bin" / "python",
                SCRIPT,
                program,
                *pages,
                cluster.urls[0],
                TARGET,
            ]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as script:
                assert script.stdin is not None and script.stdout is not None
                for line in script.stdout:
                    said = json.loads(line)
                    found.ended[said["page"]] = said["ended"]
                    topics = {each["topic"] for each in http.get("/v1/topics").json()["topics"]}
                    records = http.get("/v1/topics/t/partitions/0/records")
                    found.after[said["page"]] = topics, records.text.count("evil")
                    found.asked[said["page"]] = requests_of(http)
                    print(file=script.stdin, flush=True)
            yield found


def test_a_page_of_another_site_reaches_nothing(tried: Tried) -> None:
    """What it may send without asking is refused, and what it asks for first; it reads no answer."""
    ended = tried.ended["other site"]
    told = {name for name in ended if name.startswith(("form", "beacon"))}  # they never learn how it ended
    assert {"sent"} == {ended[name] for name in told} and len(told) == 4
    assert {"failed"} == {how for name, how in ended.items() if name not in told}
    sent = len([name for name in ended if name.startswith(("cors", "no-cors"))]) + len(told)
    assert tried.asked["other site"] - tried.asked[""] >= sent
    assert ({"t"}, 0) == tried.after["other site"]


def test_a_page_whose_host_leads_to_the_node_reaches_nothing(tried: Tried) -> None:
    """All that it asks is of its own origin, so the browser keeps nothing back: the node refuses its name."""
    ended = tried.ended["rebound"]
    assert {421} == {how for name, how in ended.items() if not name.startswith(("form", "beacon", "socket"))}
    assert {421} == set(tried.rebound) and len(tried.rebound) >= len(ended) - 1
    assert ({"t"}, 0) == tried.after["rebound"]


def test_the_same_attempts_of_the_nodes_own_page_succeed(tried: Tried) -> None:
    """So the others' would have reached something."""
    ended = tried.ended["own"]
    good = {"cors no type", "preflight bytes", "preflight JSON", "preflight key", "PUT", "DELETE", "read"}
    assert not {name: ended[name] for name in good if ended[name] not in (200, 201, 202, 204)}
    assert {"evil"} == tried.after["own"][0]
