"""Rules of gossip's encoding: what is said arrives, and nothing else gets in."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from swimprotocol.packet import Ack, Gossip, Packet, Ping, PingReq, Source
from swimprotocol.status import Status

from membership.gossip.packets import (
    Datagram,
    PacketError,
    address_text,
    decode,
    encode,
    numeric_address,
    update_size,
)

SOURCE = Source("n1", b"12345678")
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
numbers = st.integers(0, (1 << 62) - 1)
gossips = st.builds(
    Gossip,
    st.just(SOURCE),
    names,
    numbers,
    st.sampled_from([Status.ONLINE, Status.SUSPECT, Status.OFFLINE]),
    st.none()
    | st.dictionaries(names.filter(lambda key: key != "address"), st.binary(max_size=40), max_size=3),
)
packets: st.SearchStrategy[Packet] = (
    st.just(Ping(SOURCE)) | st.just(Ack(SOURCE)) | st.builds(PingReq, st.just(SOURCE), names) | gossips
)
datagrams = st.builds(Datagram, packets, numbers, st.booleans(), st.lists(gossips, max_size=4).map(tuple))


@given(datagrams)
def test_what_is_encoded_is_decoded(datagram: Datagram) -> None:
    """Whole; a part of it or more than it is refused."""
    data = encode(datagram)

    assert datagram == decode(data)
    for wrong in (data[:-1], data[: len(data) // 2], data + b"\0"):
        with pytest.raises(PacketError):
            decode(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    """Nothing else is raised."""
    try:
        decode(data)
    except PacketError:
        pass


@given(datagrams, gossips)
def test_an_update_adds_its_size(datagram: Datagram, update: Gossip) -> None:
    """So the core knows what fits."""
    more = Datagram(datagram.packet, datagram.probe, datagram.wants_all, (*datagram.updates, update))

    assert len(encode(datagram)) + update_size(update) == len(encode(more))


def test_pickles_are_not_read() -> None:
    """swim-protocol's own encoding is pickle; here it is noise."""
    with pytest.raises(PacketError):
        decode(pickle.dumps(Ping(SOURCE)))


@pytest.mark.parametrize(
    "wire",
    [
        [5, "n", b"", 0, "", False, []],  # no such kind
        [4, "n", b"", 0, "", False, []],  # gossip about nobody
        [1, "", b"", 0, "", False, []],  # nobody's ping
        [1, "n", b"", -1, "", False, []],
        [1, "n", b"", 1 << 62, "", False, []],
        [1, "n", b"", 0, "", False, [["m", 1, 4, None]]],  # no such status
        [1, "n", b"", 0, "", False, [["m", 1 << 62, 1, None]]],  # a clock that would leave no room to refute
        [1, "n", b"", 0, "", False, [["m", 1, 1, {"address": b"example.org:1"}]]],
        [1, "n", b"", 0, "", False, [["m", 1, 1, {"address": b"\xff\xfe"}]]],
    ],
)
def test_what_makes_no_sense_is_refused(wire: list[object]) -> None:
    """Types and bounds are checked before the core sees anything; a host name among them (it would be
    looked up).
    """
    with pytest.raises(PacketError):
        decode(msgspec.msgpack.encode(wire))


def test_addresses_are_numeric() -> None:
    """A name must be resolved first, where the wait can be awaited and the failure caught."""
    assert numeric_address("127.0.0.1:80").port == 80
    assert numeric_address("[::1]:80").host == "::1"
    assert address_text("::1", 80) == "[::1]:80"
    for wrong in ("localhost:80", "::1:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "1.2.3.4:x", ""):
        with pytest.raises(ValueError):
            numeric_address(wrong)
