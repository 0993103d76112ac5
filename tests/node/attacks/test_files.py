"""A node that may open few files: connections and partitions take none that its logs need."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from laminar.node.shard.http_ports import max_connections
from laminar.testing import nodes
from tests.node.api.asking import problem, unless_overloaded
from tests.node.attacks.victim import Victim, victim

FILES = 256
LIMITED = ("/bin/sh", "-c", f'ulimit -n {FILES} && exec "$@"', "sh")


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    """A node whose processes may open 256 files each, and open them often: segments are small."""
    monkeypatch.setattr(nodes, "SERVER", [*LIMITED, *nodes.SERVER])
    with victim(segment_size_bytes=1 << 20, journal_file_bytes=1 << 20, max_partitions=700) as node:
        yield node


def test_half_of_the_files_is_for_logs() -> None:
    """And three eighths for connections, up to the usual limit."""
    assert (96, 384, 10_000) == (max_connections(256), max_connections(1024), max_connections(1 << 20))


def test_connections_take_no_files_that_logs_need(few_files: Victim) -> None:
    """Five times as many as there are files: those beyond the limit are closed, new segments are begun."""
    url = few_files.http.base_url
    with contextlib.ExitStack() as opened:
        for number in range(5 * FILES):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((url.host, url.port))
            if number % 256 == 0:
                append(few_files.http, 300_000)
        for _ in range(10):
            append(few_files.http, 300_000)

    assert few_files.unharmed()


def append(http: httpx.Client, size: int) -> None:
    """So that journal files and segments are begun."""
    path = "/v1/topics/innocent/partitions/0/records"
    answer = unless_overloaded(lambda: http.post(path, content=b"x" * size))
    assert 201 == answer.status_code, answer.text


def test_partitions_are_bounded_and_keep_no_file_each(few_files: Victim) -> None:
    """More partitions than files; and no more than the setting allows, in all topics together."""
    http = few_files.http
    made = http.put("/v1/topics/huge", json={"partitions": 600})
    assert 201 == made.status_code, made.text
    for number in range(0, 600, 2):
        http.post(f"/v1/topics/huge/partitions/{number}/records", content=b"x")

    refused = http.put("/v1/topics/more", json={"partitions": 200})
    problem(refused, 429, "quota", field="partitions", value=801, limit=700)
    assert 200 == http.put("/v1/topics/huge", json={"partitions": 600}).status_code
    assert few_files.unharmed()
