"""JSON bodies: what does not fit is refused with the field, its value and its limit."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.common.json_body import json_body


class Limited(msgspec.Struct, forbid_unknown_fields=True):
    """A document with each kind of limit."""

    between: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    least: Annotated[int, msgspec.Meta(ge=1)] | None = None
    text: Annotated[str, msgspec.Meta(max_length=3)] = ""
    one_of: Literal["commit", "interval"] = "commit"
    ids: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None


def request_of(body: bytes) -> Request:
    """Return a request of which only the body is read."""
    nobody: Any = None
    return Request(RequestHead("POST", "/x", {}), body, nobody)


@pytest.mark.parametrize(
    ("body", "detail", "limit"),
    [
        (b'{"between": 100000}', "between must be between 1 and 4096", 4096),
        (b'{"between": 0}', "between must be between 1 and 4096", 1),
        (b'{"least": 0}', "least must be at least 1", 1),
        (b'{"text": "four"}', "text must have at most 3 characters", 3),
        (b'{"ids": []}', "ids must have at least 1 items", 1),
        (b'{"between": "many"}', "between must be a whole number, not a text", 4096),
        (b'{"least": true}', "least must be a whole number or null, not true or false", None),
        (b'{"one_of": "never"}', "one_of must be one of commit, interval", "commit, interval"),
        (b"[1]", "the body must be an object, not a list", "between, least, text, one_of, ids"),
        (b'{"other": 1}', "there is no field other", "between, least, text, one_of, ids"),
    ],
)
def test_a_fault_is_named_in_a_sentence(body: bytes, detail: str, limit: int | str | None) -> None:
    """The detail names the field and what it must be; the bound that is broken is the limit."""
    with pytest.raises(Problem) as refused:
        json_body(request_of(body), Limited)

    document = refused.value.document()
    assert (detail, limit) == (document["detail"], document.get("limit"))
