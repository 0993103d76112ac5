"""The wire format of gossip: swim-protocol's packets, encoded with msgspec instead of pickle.

A datagram is one packet, followed by the updates about members that ride on it. In contrast to
swim-protocol's own encoding, decoding can't run code, every field has a type and a bound, and only numeric
addresses are accepted. `gossip` signs and sends datagrams, `swim` interprets packets.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from swimprotocol.address import Address, AddressParser
from swimprotocol.packet import Ack, Gossip, Packet, Ping, PingReq, Source
from swimprotocol.status import Status

ADDRESS = "address"
"""The key of a member's metadata that holds its own ``host:port``."""

LEFT = "left"
"""The metadata key that marks an `OFFLINE` status which the member announced itself, as it left."""


class PacketError(ValueError):
    """The bytes are not a datagram of this protocol."""


@dataclass(frozen=True, slots=True)
class Datagram:
    """One packet with the updates that ride on it.

    `probe` is the number of a ping, which its ack repeats (0: no answer is awaited). `wants_all` asks for the
    whole member list: the sender knows no member yet.
    """

    packet: Packet
    probe: int = 0
    wants_all: bool = False
    updates: tuple[Gossip, ...] = ()


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Update(msgspec.Struct, array_like=True, frozen=True):
    name: _Name
    clock: _Number
    status: int
    metadata: dict[str, bytes] | None


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    kind: int
    name: _Name
    validity: bytes
    probe: _Number
    target: str
    wants_all: bool
    updates: list[_Update]


_PING, _PING_REQ, _ACK, _GOSSIP = 1, 2, 3, 4
_STATUS_NUMBERS = {Status.ONLINE: 1, Status.SUSPECT: 2, Status.OFFLINE: 3}
_STATUSES = {number: status for status, number in _STATUS_NUMBERS.items()}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Wire)


def encode(datagram: Datagram) -> bytes:
    """Return the datagram's bytes, without a signature."""
    packet, updates, target = datagram.packet, datagram.updates, ""
    if isinstance(packet, Gossip):
        kind, updates = _GOSSIP, (packet, *updates)
    elif isinstance(packet, PingReq):
        kind, target = _PING_REQ, packet.target
    elif isinstance(packet, Ping):
        kind = _PING
    else:
        assert isinstance(packet, Ack), packet
        kind = _ACK
    source = packet.source
    wire = _Wire(
        kind,
        source.name,
        source.validity,
        datagram.probe,
        target,
        datagram.wants_all,
        [_update(update) for update in updates],
    )
    return _encoder.encode(wire)


def decode(data: bytes | memoryview) -> Datagram:
    """Decode and check the bytes of one gossip datagram.

    Raises:
        PacketError: `encode` did not make these bytes.
    """
    try:
        wire = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PacketError(str(error)) from error
    source = Source(wire.name, wire.validity)
    updates = tuple(_gossip(update, source) for update in wire.updates)
    packet: Packet
    if wire.kind == _PING:
        packet = Ping(source)
    elif wire.kind == _PING_REQ:
        packet = PingReq(source, wire.target)
    elif wire.kind == _ACK:
        packet = Ack(source)
    elif wire.kind == _GOSSIP and updates:
        packet, updates = updates[0], updates[1:]
    else:
        raise PacketError(f"kind {wire.kind} with {len(updates)} updates")
    return Datagram(packet, wire.probe, wire.wants_all, updates)


def update_size(update: Gossip) -> int:
    """Return how many bytes the update adds to a datagram."""
    return len(_encoder.encode(_update(update)))


def _update(update: Gossip) -> _Update:
    metadata = None if update.metadata is None else dict(update.metadata)
    return _Update(update.name, update.clock, _STATUS_NUMBERS[update.status], metadata)


def _gossip(update: _Update, source: Source) -> Gossip:
    status = _STATUSES.get(update.status)
    if status is None:
        raise PacketError(f"status {update.status}")
    if update.metadata is not None and ADDRESS in update.metadata:
        try:
            numeric_address(address_of(update.metadata))
        except ValueError as error:
            raise PacketError(f"address of {update.name!r}: {error}") from error
    return Gossip(source, update.name, update.clock, status, update.metadata)


def address_of(metadata: Mapping[str, bytes]) -> str:
    """Return the ``host:port`` in a member's metadata, or "" when there is none."""
    return metadata.get(ADDRESS, b"").decode("ascii", "replace")


@lru_cache(maxsize=1_024)  # every datagram has addresses of members, and these rarely change
def numeric_address(text: str) -> Address:
    """Return host and port of ``host:port`` with a numeric host (IPv6 in brackets).

    Raises:
        ValueError: it is a host name. A lookup may block or fail, so it belongs where it can be awaited.
    """
    address = AddressParser().parse(text)
    host = address.host
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"an IPv6 address must be in brackets: {text!r}")
    ipaddress.ip_address(host)
    if not 0 < address.port < 1 << 16:
        raise ValueError(f"port {address.port}")
    return Address(host, address.port)


def address_text(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
