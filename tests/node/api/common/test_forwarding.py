"""A request on its way to another shard: who asks goes along, and what proved it stays behind."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from laminar.http.protocol.messages import Request
from laminar.http.protocol.request_head import RequestHead
from laminar.node.access.principals import ANYONE, Principal, principal_of
from laminar.node.api.common.forwarding import FORWARDED, Forwarder, decode_passed, encode_passed
from laminar.node.transport.transport import Peer

HEADERS = {
    "host": "x",
    "authorization": "Bearer lam_secret",
    "laminar-principal": "admin",
    "content-type": "text/plain",
}


def request(principal: Principal | None, address: str = "") -> Request:
    """A request whose head was checked; None: by a node that asks for no token."""
    head = RequestHead("POST", "/v1/topics/t/records", dict(HEADERS))
    head.memo = SimpleNamespace(principal=principal)
    return Request(head, bytearray(b"x"), Forwarder(Peer("here", 1, b"n" * 16), address))


@pytest.mark.parametrize("principal", [None, Principal("billing")])
def test_the_clients_address_goes_along(principal: Principal | None) -> None:
    """Also of a request that is passed on twice; a decoder of an older program ignores it."""
    passed = decode_passed(encode_passed(request(principal, "10.0.0.7")))

    assert ("10.0.0.7", "" if principal is None else "billing") == (passed.address, passed.principal)


@pytest.mark.parametrize("principal", [None, ANYONE, Principal("billing")])
def test_the_principal_goes_along_and_its_token_does_not(principal: Principal | None) -> None:
    """No header says who asks; an open node sends what older programs know, and no more."""
    payload = encode_passed(request(principal))
    passed = decode_passed(payload)
    named = principal is not None and principal is not ANYONE

    assert ("billing" if named else "") == passed.principal
    assert (5 if named else 4) == len(msgspec.msgpack.decode(payload))
    kept = {name: text for name, text in HEADERS.items() if name != "authorization"}
    assert kept | {FORWARDED: "1"} == passed.headers
    assert principal_of(request(principal)).name == (principal or ANYONE).name
