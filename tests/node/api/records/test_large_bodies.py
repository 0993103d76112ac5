"""Which bodies a node decodes in a thread, by the operation of their request."""

from __future__ import annotations

from typing import cast

import pytest

from laminar.batch import build
from laminar.batch.header import BATCH_TYPE
from laminar.http.protocol.messages import Connection, Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.app import Api, body_takes_long
from tests.mutation import NeedsPureBuild

PLAIN = bytes(build([b"x" * 1000] * 500))
SEVERAL = PLAIN + bytes(build([b"x"]))
RECORDS = "/v1/topics/t/partitions/0/records"


def post(target: str, kind: str, body: bytes) -> Request:
    method = "POST" if target.endswith("s") else "PUT"
    head = RequestHead(method, target, {"content-type": kind, "content-length": str(len(body))})
    return Request(head, body, cast(Connection, None))


@pytest.mark.parametrize(
    ("target", "kind", "body", "long"),
    [
        (RECORDS, BATCH_TYPE, PLAIN, False),
        (RECORDS, BATCH_TYPE, SEVERAL, True),
        (RECORDS, f"{BATCH_TYPE}; a=b", PLAIN, False),
        ("/v1/sinks/s/batches/1/stages", BATCH_TYPE, PLAIN, False),
        ("/v1/sinks/s/batches/1/stages", BATCH_TYPE, SEVERAL, True),
        (RECORDS, "application/json", PLAIN, True),
        ("/v1/topics/t/records", BATCH_TYPE, PLAIN, True),
        ("/v1/sinks/s/batches/1", "application/json", PLAIN, False),
    ],
)
def test_a_body_of_records_is_decoded_in_a_thread_if_that_takes_long(
    target: str, kind: str, body: bytes, long: bool
) -> None:
    """What a producer sends, one batch of plain values, is decoded at once; so is what has no records."""
    assert long is body_takes_long(post(target, kind, body))


def test_a_shard_is_asked_that() -> None:
    """It looks at the request alone."""
    try:
        api = Api.__new__(Api)
    except TypeError as error:
        raise NeedsPureBuild("a compiled Api has its services") from error

    assert [False, True] == [api.parses_long(post(RECORDS, BATCH_TYPE, body)) for body in (PLAIN, SEVERAL)]
