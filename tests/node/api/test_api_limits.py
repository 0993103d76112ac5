"""What is too large or too slow is refused or waits alone: others go on, and nothing is left of it."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from laminar.batch import build
from laminar.testing.nodes import serve
from tests.node.api.asking import BATCH, ENVELOPE_LINES, MAX_APPEND_BYTES, NDJSON, Partition, problem, until


class Raw:
    """A client that sends what a test likes, when it likes."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        assert at.hostname is not None and at.port is not None
        self.socket = socket.create_connection((at.hostname, at.port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, object]]:
        """Status and JSON body of the next answer."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        assert found is not None, head
        while len(body) < int(found[1]):
            body += self._more()
        document: dict[str, object] = json.loads(body)
        return int(head.split()[1]), document

    def _more(self) -> bytes:
        more = self.socket.recv(65536)
        assert more, "closed without an answer"
        return more

    def close(self) -> None:
        self.socket.close()


def post_head(partition: Partition, *fields: str) -> bytes:
    lines = [f"POST {partition.path}/records HTTP/1.1", "Host: localhost", *fields, "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("chunked", [False, True], ids=["of known length", "chunked"])
def test_b13_a_body_that_trickles_in_holds_nobody_up(
    api_url: str, partition: Partition, chunked: bool
) -> None:
    """While it comes byte by byte others append to the partition and read; it gets the offset that is next
    when it is whole. (In laminarmq a slow body holds the log's write lock.)
    """
    slow = Raw(api_url)
    field = "Transfer-Encoding: chunked" if chunked else "Content-Length: 5"
    slow.send(post_head(partition, field))
    for offset, byte in enumerate(b"slow"):
        slow.send(b"1\r\n%c\r\n" % byte if chunked else b"%c" % byte)

        assert offset == partition.append(f"quick {offset}")
        assert [f"quick {number}" for number in range(offset + 1)] == partition.values()

    slow.send(b"1\r\n!\r\n0\r\n\r\n" if chunked else b"!")

    status, receipt = slow.answer()
    slow.close()
    assert (201, [{"partition": 0, "offset": 4, "count": 1}]) == (status, receipt["placed"])
    assert "slow!" == partition.values(offset=4)[0]


def test_b13_a_client_that_goes_away_in_its_body_leaves_nothing(
    api_url: str, http: httpx.Client, partition: Partition
) -> None:
    """Neither a record nor bytes that are counted as waiting."""
    gone = Raw(api_url)
    gone.send(post_head(partition, "Content-Length: 1000000") + b"x" * 500_000)
    partition.append("a")
    gone.close()

    assert 1 == partition.append("b")
    assert ["a", "b"] == partition.values()
    assert_nothing_waits(http)


def assert_nothing_waits(http: httpx.Client) -> None:
    """No body is counted as on its way. Asked until it is so: a connection's end is noticed a turn later."""
    waiting: list[str] = []

    def nothing() -> bool:
        metrics = http.get("/metrics").text
        waiting[:] = re.findall(r"^laminar_http_reserved_bytes\{.*\} (\S+)$", metrics, re.MULTILINE)
        return 2 == len(waiting) and not any(map(float, waiting))

    until(nothing, lambda: f"body bytes of each of two shards are still reserved: {waiting}")


def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(api_url: str, partition: Partition) -> None:
    """By the length its next chunk announces, long before its end; nothing of it was parsed or appended."""
    client = Raw(api_url)
    client.send(post_head(partition, "Transfer-Encoding: chunked"))
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    for _ in range(MAX_APPEND_BYTES // 65536):
        client.send(piece)
    client.send(b"1\r\n")

    status, document = client.answer()
    client.close()

    assert (413, "too_large", "not_applied") == (status, document["code"], document["outcome"])
    assert ("body", MAX_APPEND_BYTES + 1, MAX_APPEND_BYTES) == (
        document["field"],
        document["value"],
        document["limit"],
    )
    assert 0 == partition.append("first")


def large_by_head(partition: Partition) -> httpx.Response:
    return partition.post(b"x" * (MAX_APPEND_BYTES + 1))


def damaged(partition: Partition) -> httpx.Response:
    frame = build([b"value"])
    frame[-1] ^= 1
    return partition.post(bytes(frame), BATCH)


def second_damaged(partition: Partition) -> httpx.Response:
    broken = build([b"second"])
    broken[140] ^= 1
    return partition.post(bytes(build([b"first"]) + broken), BATCH)


def fenced(partition: Partition) -> httpx.Response:
    return partition.post(bytes(produced(0, epoch=1)), BATCH)


def gap(partition: Partition) -> httpx.Response:
    return partition.post(bytes(produced(9, epoch=2)), BATCH)


def elsewhere(partition: Partition) -> httpx.Response:
    return partition.post(b"x", headers={"If-Match": '"99"'})


def no_json(partition: Partition) -> httpx.Response:
    return partition.post(b'{"a": 1}\n{"a": \n', NDJSON)


def bad_line(partition: Partition) -> httpx.Response:
    return partition.post(b'{"value": "good"}\n{"value": "b", "timestamp": "noon"}\n', ENVELOPE_LINES)


def passed_on(partition: Partition) -> httpx.Response:
    """Marked as passed on by another shard, to one that may not lead it: never passed on again."""
    return partition.post(b"x" * (MAX_APPEND_BYTES + 1), headers={"Laminar-Forwarded": "1"})


def produced(sequence: int, *, epoch: int) -> bytearray:
    return build([b"value"], producer_id=b"p" * 16, producer_epoch=epoch, sequence=sequence)


REFUSED: list[tuple[Callable[[Partition], httpx.Response], int, str]] = [
    (large_by_head, 413, "too_large"),
    (damaged, 400, "bad_checksum"),
    (second_damaged, 400, "bad_checksum"),
    (fenced, 409, "fenced"),
    (gap, 409, "out_of_sequence"),
    (elsewhere, 412, "precondition_failed"),
    (no_json, 400, "malformed"),
    (bad_line, 422, "invalid"),
    (passed_on, 413, "too_large"),
]


@pytest.mark.parametrize(
    ("send", "status", "code"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_refused_append_leaves_no_trace(
    http: httpx.Client,
    partition: Partition,
    send: Callable[[Partition], httpx.Response],
    status: int,
    code: str,
) -> None:
    """Offsets stay dense, the log has no byte more, nothing waits; the next append finds all as it was."""
    assert 201 == partition.post(bytes(produced(0, epoch=2)), BATCH).status_code
    size = http.get(partition.path).json()["bytes"]

    document = problem(send(partition), status, code)

    assert "not_applied" == document["outcome"]
    assert document.get("field") is not None, "it says what was wrong"
    described = http.get(partition.path).json()
    assert (size, 1) == (described["bytes"], described["end_offset"])
    assert_nothing_waits(http)
    assert 1 == partition.append("next")
    assert ["value", "next"] == partition.values()


def test_more_records_than_one_request_may_have_are_named_with_value_and_limit(
    http: httpx.Client, partition: Partition
) -> None:
    """In whatever form they come; none is taken."""
    limit = http.get("/v1/limits").json()["max_records"]
    lines = b"1\n" * (limit + 1)
    assert len(lines) <= MAX_APPEND_BYTES

    for body, kind in ((lines, NDJSON), (bytes(build([b""] * (limit + 1))), BATCH)):
        refused = problem(partition.post(body, kind), 413, "too_large", value=limit + 1, limit=limit)
        assert refused["field"]

    assert 0 == partition.append("next")


def test_a_body_that_unfolds_to_more_than_the_limit_is_refused(
    http: httpx.Client, partition: Partition
) -> None:
    """A few kilobytes of gzip that stand for megabytes."""
    bomb = gzip.compress(b"x" * (MAX_APPEND_BYTES + 1))

    refused = problem(
        partition.post(bomb, headers={"Content-Encoding": "gzip"}),
        413,
        "too_large",
        limit=MAX_APPEND_BYTES,
    )

    assert refused["field"]
    assert_nothing_waits(http)
    assert 0 == partition.append("next")


def test_unfinished_uploads_hold_no_more_than_the_nodes_setting() -> None:
    """413 for one that is larger alone, 429 for one beside others; both name value and limit, and nothing is
    taken. What is dropped makes room.
    """
    limit = 1 << 20
    with serve(settings={"max_upload_bytes": limit}) as url:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            http.put("/v1/topics/t", json={"partitions": 1, "replicas": 1})
            path = "/v1/topics/t/partitions/0/uploads"

            def put(name: str, part: int) -> httpx.Response:
                return http.put(f"{path}/{name}/parts/{part}", content=b"x" * 700_000)

            assert limit == http.get("/v1/limits").json()["max_upload_bytes_of_partition"]
            assert 201 == put("one", 0).status_code
            problem(put("one", 1), 413, "too_large", field="upload_bytes", limit=limit)
            problem(put("two", 0), 429, "quota", field="upload_bytes", limit=limit)
            assert 204 == http.delete(f"{path}/one").status_code
            assert 201 == put("two", 0).status_code
