"""The network interfaces of this process's namespace: their addresses, and what is attached to them.

The kernel is asked by netlink, so no tool has to be installed. Source: linux/rtnetlink.h, linux/if_link.h,
linux/if_addr.h.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from struct import Struct

_RTM_GETLINK, _RTM_GETADDR = 18, 22
_DUMP_REQUEST = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_HEADER = Struct("=IHHII")
_LINK = Struct("=BxHiII")
_ADDRESS = Struct("=BBBBI")
_ATTRIBUTE = Struct("=HH")
_NESTED = 0x3FFF  # the two highest bits of an attribute's type are flags
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_XDP = 3, 18, 43
_INFO_KIND = 1
_XDP_ATTACHED, _XDP_PROGRAM = 2, 4
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_FLAG_UP, _FLAG_LOOPBACK = 0x1, 0x8
_MODES = {1: "native", 2: "generic", 3: "offloaded", 4: "several"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface and its addresses, as they were at the call that returned it."""

    index: int
    name: str
    up: bool
    loopback: bool
    kind: str
    """`veth`, `bridge`, ...; empty for a physical device."""
    xdp_mode: str
    """How an XDP program is attached: `native`, `generic`, `offloaded`, `several`; empty if none is."""
    xdp_program: int
    """The program's id; 0 if there is none."""
    addresses: tuple[IPv4Address | IPv6Address, ...]


def interfaces() -> list[Interface]:
    """Return all interfaces of this process's network namespace, sorted by index."""
    addresses: dict[int, list[IPv4Address | IPv6Address]] = {}
    for payload in _dump(_RTM_GETADDR, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        index = _ADDRESS.unpack_from(payload)[4]
        found = dict(_attributes(payload[_ADDRESS.size :]))
        raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)  # IPv6 has only the second
        if raw is not None:
            addresses.setdefault(index, []).append(ip_address(raw))
    links = []
    for payload in _dump(_RTM_GETLINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        _, _, index, flags, _ = _LINK.unpack_from(payload)
        found = dict(_attributes(payload[_LINK.size :]))
        xdp = dict(_attributes(found.get(_IFLA_XDP, b"")))
        info = dict(_attributes(found.get(_IFLA_LINKINFO, b"")))
        program = xdp.get(_XDP_PROGRAM, bytes(4))
        links.append(
            Interface(
                index=index,
                name=_text(found[_IFLA_IFNAME]),
                up=bool(flags & _FLAG_UP),
                loopback=bool(flags & _FLAG_LOOPBACK),
                kind=_text(info.get(_INFO_KIND, b"")),
                xdp_mode=_MODES.get(xdp.get(_XDP_ATTACHED, b"\0")[0], ""),
                xdp_program=int.from_bytes(program, sys.byteorder),
                addresses=tuple(addresses.get(index, ())),
            )
        )
    return sorted(links, key=lambda link: link.index)


def interfaces_of(host: str) -> list[Interface]:
    """Return the interfaces on which packets to the address `host` arrive.

    For 0.0.0.0 and :: these are all interfaces that are up and have an address of that IP version. Loopback
    and bridges are left out; the members of a bridge see its packets first.
    """
    address = ip_address(host)
    found = interfaces()
    if address.is_unspecified:
        return [
            link
            for link in found
            if link.up
            and not link.loopback
            and link.kind != "bridge"
            and any(each.version == address.version for each in link.addresses)
        ]
    if address.is_loopback:
        return [link for link in found if link.loopback and link.up]
    return [link for link in found if address in link.addresses]


def network_namespace() -> int:
    """Return the inode number of this process's network namespace, which identifies it.

    An interface's index is unique only within one namespace.
    """
    return os.stat("/proc/self/ns/net").st_ino


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _dump(kind: int, request: bytes) -> Iterator[bytes]:
    """Yield the payload of every message in the kernel's answer to a dump request.

    Raises:
        OSError: the kernel refused the request.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.bind((0, 0))
        sock.send(_HEADER.pack(_HEADER.size + len(request), kind, _DUMP_REQUEST, 1, 0) + request)
        while True:
            datagram = sock.recv(1 << 17)
            while datagram:
                size, answer, _, _, _ = _HEADER.unpack_from(datagram)
                payload, datagram = datagram[_HEADER.size : size], datagram[_aligned(size) :]
                if answer == _DONE:
                    return
                if answer == _ERROR:
                    code = -int.from_bytes(payload[:4], sys.byteorder, signed=True)
                    raise OSError(code, f"netlink: {os.strerror(code)}")
                yield payload


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        if size < _ATTRIBUTE.size:
            return
        yield kind & _NESTED, data[_ATTRIBUTE.size : size]
        data = data[_aligned(size) :]


def _aligned(size: int) -> int:
    return (size + 3) & ~3
