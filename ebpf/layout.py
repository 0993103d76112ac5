"""The contents of the program's maps, as bytes: the same structs and numbers as in `steer.c`.

Each node that shares the program has a *slot*, a number. Each process of a node that receives packets has a
*row* in it: a shard the row of its number, the controller `CONTROLLER_ROW`. This module only computes;
`ebpf.kernel` makes the system calls. A test compares the numbers with the C source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from struct import Struct

SLOTS = 16
"""The largest number of nodes of one host that can share the program."""
MAX_SHARDS = 127
"""The largest number of shards of a node that can be steered."""
CONTROLLER_ROW = MAX_SHARDS
ROWS = MAX_SHARDS + 1
NO_CPU = 0xFFFF
APPEND_MAGIC = b"LMU1"
TCP, UDP = 6, 17


class Rule(IntEnum):
    """The kind of a packet, by its destination port: which rule chooses the CPU."""

    SHARED_TCP = 0
    """To the shard that `router.shard_of_source_port` names."""
    OWN_TCP = 1
    """To the shard whose port it is."""
    APPEND_UDP = 2
    """To the shard that `router.owner_shard` names for the partition hash in the datagram."""
    GOSSIP_UDP = 3
    """To the controller."""


class Passed(IntEnum):
    """The reasons for which the program passes a packet on without redirecting it."""

    NOT_IP = 0
    MALFORMED = 1
    FRAGMENT = 2
    OTHER_PROTOCOL = 3
    NOT_OURS = 4
    NO_HASH = 5
    NO_CPU = 6


PLACE = Struct("!16sHBx")
"""`struct place`: address, port, protocol, in the packet's byte order."""
_TARGET = Struct(f"@4I{ROWS}H")
TARGET_BYTES = _TARGET.size


@dataclass(frozen=True, slots=True)
class Place:
    """A destination (address, port, protocol) of packets to be steered. `protocol` is `TCP` or `UDP`.

    The addresses 0.0.0.0 and :: stand for any address of their IP version.
    """

    address: IPv4Address | IPv6Address
    port: int
    protocol: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{'tcp' if self.protocol == TCP else 'udp'} {host}:{self.port}"

    def pack(self) -> bytes:
        """Return the bytes of `struct place`: this destination's key in the map `targets`."""
        mapped = self.address.packed
        if self.address.version == 4:
            mapped = bytes(10) + b"\xff\xff" + mapped
        return PLACE.pack(mapped, self.port, self.protocol)

    @classmethod
    def unpack(cls, key: bytes) -> Place:
        """Return the destination from a key of the map, the reverse of `pack`."""
        packed, port, protocol = PLACE.unpack(key)
        address = IPv6Address(packed)
        return cls(address.ipv4_mapped or address, port, protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The steering of packets to one destination: the value in the BPF map `targets`."""

    rule: Rule
    slot: int
    row: int = 0
    """For `OWN_TCP` the shard, for `GOSSIP_UDP` `CONTROLLER_ROW`; other rules compute the row."""
    shards: int
    cpus: Mapping[int, int]
    """The CPU of each row; the process of a row that is not here is not pinned to a CPU."""

    def pack(self) -> bytes:
        """Return the bytes of `struct target`: this target's value in the map `targets`."""
        assert 0 <= self.slot < SLOTS, self.slot
        assert 0 < self.shards <= MAX_SHARDS, self.shards
        return _TARGET.pack(
            *(self.rule, self.slot, self.row, self.shards),
            *(self.cpus.get(row, NO_CPU) for row in range(ROWS)),
        )

    @classmethod
    def unpack(cls, value: bytes) -> Target:
        """Return the target from a value of the map, the reverse of `pack`."""
        rule, slot, row, shards, *cpus = _TARGET.unpack(value)
        pinned = {at: cpu for at, cpu in enumerate(cpus) if cpu != NO_CPU}
        return cls(rule=Rule(rule), slot=slot, row=row, shards=shards, cpus=pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The steering that one node asks for: its address and ports, and the CPUs of its processes."""

    host: str
    """The address that the node binds, as a numeric text."""
    shared_port: int
    own_ports: Sequence[int]
    """The port of each shard, in the order of the shards."""
    gossip_port: int
    append_port: int = 0
    """The UDP port of appends; 0 if there is none."""
    shard_cpus: Sequence[int]
    """The CPU of each shard, in the order of the shards."""
    controller_cpu: int | None = None

    def targets(self, slot: int) -> Iterator[tuple[Place, Target]]:
        """Yield the entries (key, value) of the map `targets` for this node in slot `slot`."""
        address, shards = ip_address(self.host), len(self.shard_cpus)
        assert len(self.own_ports) == shards, (len(self.own_ports), shards)
        cpus = dict(enumerate(self.shard_cpus))
        if self.controller_cpu is not None:
            cpus[CONTROLLER_ROW] = self.controller_cpu

        def target(rule: Rule, row: int = 0) -> Target:
            return Target(rule=rule, slot=slot, row=row, shards=shards, cpus=cpus)

        yield Place(address, self.shared_port, TCP), target(Rule.SHARED_TCP)
        for shard, port in enumerate(self.own_ports):
            yield Place(address, port, TCP), target(Rule.OWN_TCP, shard)
        if self.append_port:
            yield Place(address, self.append_port, UDP), target(Rule.APPEND_UDP)
        if self.controller_cpu is not None:
            yield Place(address, self.gossip_port, UDP), target(Rule.GOSSIP_UDP, CONTROLLER_ROW)


def counter(*, slot: int, row: int, rule: Rule, already_there: bool) -> int:
    """Return the index in the map `steered` of one counter of packets.

    `already_there` chooses between packets that were on the right CPU already and those redirected to it.
    """
    return ((slot * ROWS + row) * len(Rule) + rule) * 2 + already_there


def counters_of(slot: int) -> range:
    """Return the indices in the map `steered` of all counters of one slot."""
    size = ROWS * len(Rule) * 2
    return range(slot * size, (slot + 1) * size)
