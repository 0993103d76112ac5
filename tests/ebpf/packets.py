"""Packets made by hand, for the program to look at."""

from __future__ import annotations

from ipaddress import ip_address
from struct import pack

ETHERNET = b"\x02\0\0\0\0\1\x02\0\0\0\0\2"
IPV4, IPV6, ARP, VLAN, VLAN_OUTER = 0x0800, 0x86DD, 0x0806, 0x8100, 0x88A8
HOP_BY_HOP, ROUTING, FRAGMENT, AUTHENTICATION, DESTINATION, ICMP = 0, 43, 44, 51, 60, 1
TCP, UDP = 6, 17


def ethernet(payload: bytes, kind: int, *, tags: tuple[int, ...] = ()) -> bytes:
    """A frame, with VLAN tags if asked for, the outermost first."""
    types = (*tags, kind)
    head = pack("!H", types[0])
    for inner in types[1:]:
        head += pack("!HH", 42, inner)
    return ETHERNET + head + payload


def tcp(source_port: int, port: int, data: bytes = b"") -> bytes:
    """A TCP segment (SYN) without a checksum."""
    return pack("!HHIIBBHHH", source_port, port, 1, 0, 5 << 4, 2, 65535, 0, 0) + data


def udp(source_port: int, port: int, data: bytes, *, length: int | None = None) -> bytes:
    """A UDP datagram; `length` is what its header says, if not the truth."""
    return pack("!HHHH", source_port, port, 8 + len(data) if length is None else length, 0) + data


def append(partition_hash: int, rest: bytes = b"") -> bytes:
    """The first bytes of a UDP append."""
    return b"LMU1" + pack("!I", partition_hash) + rest


def ipv4(payload: bytes, protocol: int, to: str, *, options: bytes = b"", fragment: int = 0x4000) -> bytes:
    """An IPv4 packet; by default with "don't fragment" set."""
    assert len(options) % 4 == 0
    words = 5 + len(options) // 4
    total = words * 4 + len(payload)
    head = pack("!BBHHHBBH", 4 << 4 | words, 0, total, 7, fragment, 64, protocol, 0)
    return head + bytes([10, 0, 0, 9]) + ip_address(to).packed + options + payload


def ipv6(payload: bytes, protocol: int, to: str, *, extensions: tuple[tuple[int, bytes], ...] = ()) -> bytes:
    """An IPv6 packet. Extensions: (kind, content behind the byte that names the next header)."""
    kinds = [kind for kind, _ in extensions] + [protocol]
    body = b"".join(
        pack("!B", after) + content for after, (_, content) in zip(kinds[1:], extensions, strict=True)
    )
    body += payload
    head = pack("!IHBB", 6 << 28, len(body), kinds[0], 64)
    return head + ip_address("fd00::9").packed + ip_address(to).packed + body


def frame(packet: bytes, *, tags: tuple[int, ...] = ()) -> bytes:
    """The frame of an IP packet."""
    return ethernet(packet, IPV6 if packet[0] >> 4 == 6 else IPV4, tags=tags)
