"""Requests that are small and ask for much, and those on what is the system's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laminar.batch import build
from tests.node.attacks.test_batches import BATCH, SINK
from tests.node.attacks.victim import Victim, victim

ON_THE_SYSTEMS = [
    ("PUT", "/v1/topics/_transactions/cursors/c", '{"positions": {"0": 0}}'),
    ("DELETE", "/v1/topics/_transactions/cursors/c", None),
    ("PUT", f"/v1/topics/_transactions/partitions/0/producers/{'a' * 32}?epoch=4294967295", None),
    ("PUT", "/v1/topics/_transactions/groups/g/members/m", "{}"),
    ("DELETE", "/v1/topics/_transactions/groups/g/members/m", None),
    ("DELETE", "/v1/topics/_transactions", None),
    ("POST", "/v1/topics/_transactions/records", "x"),
]


@pytest.fixture(scope="module")
def attacked() -> Iterator[Victim]:
    with victim() as found:
        assert 200 == found.http.post(SINK, params={"epoch": 1}).status_code
        yield found


@pytest.mark.parametrize(("method", "path", "body"), ON_THE_SYSTEMS, ids=lambda value: str(value)[:60])
def test_the_systems_topic_is_read_and_changed_by_nobody(
    attacked: Victim, method: str, path: str, body: str | None
) -> None:
    """By a list of what is allowed: what is added later is refused."""
    headers = {"If-Match": "*", "Content-Type": "application/json"}
    answer = attacked.http.request(method, path, content=body, headers=headers)

    assert (422, "invalid", "topic") == (
        answer.status_code,
        answer.json()["code"],
        answer.json()["field"],
    ), answer.text
    assert 200 == attacked.http.get("/v1/topics/_transactions").status_code


def test_a_person_may_recover_what_the_systems_topic_waits_for(attacked: Victim) -> None:
    """Else a lost majority of one of its partitions would stop transactions for ever. Here nothing waits."""
    answer = attacked.http.post(
        "/v1/topics/_transactions/partitions/0/recover",
        params={"accept_loss": "true"},
        headers={"Content-Type": "application/json"},
    )

    assert (412, "precondition_failed") == (answer.status_code, answer.json()["code"]), answer.text


def test_the_head_of_one_record_is_bounded(attacked: Victim) -> None:
    """The largest key and headers that are taken, each byte of which is three when it is escaped."""
    frame = build(
        [b"value"], keys=[b"\xff" * (64 << 10)], headers=[{f"n{i:04}": b"\xff" * 10 for i in range(4000)}]
    )
    placed = attacked.http.post(
        "/v1/topics/innocent/partitions/0/records", content=bytes(frame), headers=BATCH
    )
    assert 201 == placed.status_code, placed.text

    for method in ("HEAD", "GET"):
        answer = attacked.http.request(method, placed.headers["location"])

        assert 200 == answer.status_code
        assert sum(len(name) + len(value) + 4 for name, value in answer.headers.raw) < 40 << 10
        assert len(answer.headers) < 100, "http.client of Python takes no more"
        assert "key, headers" == answer.headers["laminar-left-out"]
    (record,) = attacked.http.get(
        "/v1/topics/innocent/partitions/0/records",
        params={"offset": placed.json()["placed"][0]["offset"], "limit": 1},
    ).json()["records"]
    assert 4000 == len(record["headers_base64"])
    assert attacked.unharmed()
