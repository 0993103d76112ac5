"""What a page of another site can reach on a node: nothing that changes or shows anything."""

from __future__ import annotations

import httpx
import pytest

from tests.node.api.asking import Partition, problem

EVIL = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/topics/{topic}/records"),
        ("POST", "/v1/topics/{topic}/partitions/0/records"),
        ("POST", "/v1/topics/{topic}/partitions/0/recover?accept_loss=true"),
        ("POST", "/v1/producers"),
        ("POST", "/v1/sinks/a-sink"),
        ("GET", "/v1/topics/{topic}/partitions/0/records"),
        ("DELETE", "/v1/topics/{topic}"),
        ("PUT", "/v1/topics/another"),
    ],
)
def test_a_page_of_another_site_is_refused(
    partition: Partition, http: httpx.Client, method: str, path: str
) -> None:
    """By its origin, and after its name was made to resolve to the node's address."""
    path = path.format(topic=partition.topic)

    answer = http.request(method, path, content=b"x" if method == "POST" else None, headers=EVIL)
    problem(answer, 403, "cross_site", field="origin", value="https://evil.example")
    answer = http.request(method, path, headers={"Host": "rebind.evil.example:7070"})
    problem(answer, 421, "wrong_host", field="host", value="rebind.evil.example:7070")

    assert [] == partition.records()


def test_a_body_that_a_page_can_send_without_asking_is_refused(
    partition: Partition, http: httpx.Client
) -> None:
    """Browsers that send no `Origin` with a form are kept out by the type of its body."""
    for kind in ("text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=x"):
        problem(partition.post(b"x", kind), 415, "unsupported_media_type", field="content-type", value=kind)
        answer = http.post("/v1/producers", content=b'{"name": "p"}', headers={"Content-Type": kind})
        problem(answer, 415, "unsupported_media_type", field="content-type")

    assert [] == partition.records()


def test_the_nodes_own_pages_and_programs_are_served(partition: Partition, api_url: str) -> None:
    """A page of the node itself, and a program that names the node localhost."""
    own = partition.post(b"x", headers={"Origin": api_url, "Sec-Fetch-Site": "same-origin"})
    named = partition.post(b"y", headers={"Host": "localhost:7070"})

    assert (201, 201) == (own.status_code, named.status_code)
    assert ["x", "y"] == partition.values()


def test_no_answer_is_guessed_to_be_of_another_type(partition: Partition) -> None:
    """A record that holds a page is not shown as one."""
    partition.append("<script>alert(1)</script>")

    for answer in (
        partition.fetch(),
        partition.http.get(f"{partition.path}/records/0"),
        partition.http.get("/x"),
    ):
        assert "nosniff" == answer.headers["x-content-type-options"]
