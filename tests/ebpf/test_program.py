"""What the program answers to packets that are made by hand: the kernel runs it, no network is involved."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpf.kernel import XDP_PASS, XDP_REDIRECT, Refused, TestRun, load_program, possible_cpus
from ebpf.layout import CONTROLLER_ROW, NodePlan, Passed, Rule
from ebpf.shared import Shared, maps_of
from ebpf.toolchain import Compiled
from router import owner_shard, partition_hash, shard_of_source_port
from tests.ebpf import packets
from tests.ebpf.packets import TCP, UDP, append, ethernet, frame, ipv4, ipv6, tcp, udp

RANDOM_PACKETS = 100_000
V4, V6 = "10.0.0.1", "fd00::1"
SHARDS = 8
ROWS = (*range(SHARDS), CONTROLLER_ROW)

Look = Callable[[bytes], tuple[int, dict[tuple[int, Rule], int], dict[Passed, int]]]


def plan(host: str, *, controller_cpu: int | None = 0) -> NodePlan:
    """A node on this address, its shards on this machine's CPUs in turn."""
    return NodePlan(
        host=host,
        shared_port=7070,
        own_ports=range(7071, 7071 + SHARDS),
        append_port=7070,
        gossip_port=7170,
        shard_cpus=[shard % possible_cpus() for shard in range(SHARDS)],
        controller_cpu=controller_cpu,
    )


@pytest.fixture
def shared(compiled: Compiled) -> Iterator[Shared]:
    """The program's maps, as two nodes would fill them: one on an IPv4 address, one on an IPv6 address."""
    maps = maps_of({name: os.dup(fd) for name, fd in compiled.maps.items()})
    shared = Shared(folder=Path(os.devnull), link=os.open(os.devnull, os.O_RDONLY), **maps)
    for slot, host in enumerate((V4, V6)):
        shared.fill(slot, plan(host))
    yield shared
    for slot in range(2):
        shared.forget(slot)
    shared.close()


@pytest.fixture
def look(program: int, shared: Shared) -> Look:
    """Shows the program a frame: its action, who it was for, and why it passed."""
    run = TestRun(program)

    def look(packet: bytes) -> tuple[int, dict[tuple[int, Rule], int], dict[Passed, int]]:
        before = [shared.counts(slot, ROWS) for slot in range(2)], shared.passed_counts()
        action, after = run(packet)
        assert packet == after
        steered: Counter[tuple[int, Rule]] = Counter()
        for slot in range(2):
            for key, counts in shared.counts(slot, ROWS).items():
                steered[key] += sum(counts) - sum(before[0][slot].get(key, (0, 0)))
        passed = {
            reason: count - before[1][reason]
            for reason, count in shared.passed_counts().items()
            if count != before[1][reason]
        }
        return action, {key: count for key, count in steered.items() if count}, passed

    return look


def addressed(payload: bytes, protocol: int) -> Iterator[bytes]:
    """The payload in every kind of packet that the program understands."""
    v4, v6 = ipv4(payload, protocol, V4), ipv6(payload, protocol, V6)
    yield frame(v4)
    yield frame(v6)
    yield frame(v4, tags=(packets.VLAN,))
    yield frame(v6, tags=(packets.VLAN_OUTER, packets.VLAN))
    for words in (1, 5, 10):
        yield frame(ipv4(payload, protocol, V4, options=b"\1" * 4 * words))
    for kind in (packets.HOP_BY_HOP, packets.ROUTING, packets.DESTINATION):
        for eights in (0, 3):
            extension = kind, bytes([eights]) + bytes(6 + 8 * eights)
            yield frame(ipv6(payload, protocol, V6, extensions=(extension,)))
    several = (
        (packets.HOP_BY_HOP, b"\0" + bytes(6)),
        (packets.DESTINATION, b"\1" + bytes(14)),
        (packets.AUTHENTICATION, b"\4" + bytes(22)),
    )
    yield frame(ipv6(payload, protocol, V6, extensions=several))
    yield frame(v4) + bytes(10)  # short packets are padded on the wire


def for_whom(
    row: int, rule: Rule, result: tuple[int, dict[tuple[int, Rule], int], dict[Passed, int]]
) -> bool:
    """Whether the packet was steered to the row, by the rule, and counted once."""
    action, steered, passed = result
    return action in (XDP_PASS, XDP_REDIRECT) and ({(row, rule): 1}, {}) == (steered, passed)


def test_connections_to_the_shared_port_go_by_their_source_port(look: Look) -> None:
    """As the router says, whatever stands between the Ethernet header and TCP."""
    for source in (1, 2, 3, 40_000, 40_001, 40_002, 65_535):
        row = shard_of_source_port(source, SHARDS)
        for packet in addressed(tcp(source, 7070, b"GET"), TCP):
            assert for_whom(row, Rule.SHARED_TCP, look(packet))


def test_connections_to_a_shards_own_port_go_to_it(look: Look) -> None:
    """From whatever port."""
    for shard in range(SHARDS):
        for packet in addressed(tcp(random.Random(shard).randrange(1 << 16), 7071 + shard), TCP):
            assert for_whom(shard, Rule.OWN_TCP, look(packet))


def test_appends_go_to_the_shard_that_owns_the_partition(look: Look) -> None:
    """By the hash in the datagram, computed as `router` does."""
    for number in range(32):
        key = partition_hash("flights", number)
        for packet in addressed(udp(5000, 7070, append(key, b"rest")), UDP):
            assert for_whom(owner_shard(key, SHARDS), Rule.APPEND_UDP, look(packet))


def test_gossip_goes_to_the_controller(look: Look) -> None:
    """Which has no shard's number."""
    for packet in addressed(udp(7170, 7170, b"anything"), UDP):
        assert for_whom(CONTROLLER_ROW, Rule.GOSSIP_UDP, look(packet))


def test_a_packet_for_another_cpu_is_redirected(look: Look) -> None:
    """And one that is there already is not: both are counted, for the shard."""
    if possible_cpus() == 1:
        pytest.skip("one CPU: nothing to redirect to")
    os.sched_setaffinity(0, cpus := os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, {0})
        here, there = (look(frame(ipv4(tcp(5000, 7071 + shard), TCP, V4)))[0] for shard in (0, 1))
    finally:
        os.sched_setaffinity(0, cpus)

    assert (XDP_PASS, XDP_REDIRECT) == (here, there)


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (ethernet(bytes(28), packets.ARP), Passed.NOT_IP),
        (ethernet(ipv4(tcp(1, 7070), TCP, V4), packets.IPV4, tags=(packets.VLAN,) * 3), Passed.NOT_IP),
        (frame(ipv4(tcp(1, 7070), TCP, V4, fragment=0x2000)), Passed.FRAGMENT),
        (frame(ipv4(tcp(1, 7070), TCP, V4, fragment=0x00B9)), Passed.FRAGMENT),
        (frame(ipv6(tcp(1, 7070), TCP, V6, extensions=((packets.FRAGMENT, bytes(7)),))), Passed.FRAGMENT),
        (frame(ipv4(bytes(8), packets.ICMP, V4)), Passed.OTHER_PROTOCOL),
        (frame(ipv6(tcp(1, 7070), TCP, V6, extensions=((135, bytes(7)),))), Passed.OTHER_PROTOCOL),
        (frame(ipv4(tcp(1, 7070), TCP, "10.0.0.2")), Passed.NOT_OURS),
        (frame(ipv4(tcp(1, 7069), TCP, V4)), Passed.NOT_OURS),
        (frame(ipv4(udp(1, 7071, b"x"), UDP, V4)), Passed.NOT_OURS),
        (frame(ipv6(tcp(1, 7170), TCP, V6)), Passed.NOT_OURS),
        (frame(ipv4(udp(1, 7070, b"LMU1\0\0\0"), UDP, V4)), Passed.NO_HASH),
        (frame(ipv4(udp(1, 7070, b"LMU2\0\0\0\0"), UDP, V4)), Passed.NO_HASH),
        (frame(ipv4(udp(1, 7070, append(1), length=15), UDP, V4)), Passed.NO_HASH),
        (frame(ipv4(udp(1, 7070, append(1), length=17), UDP, V4)), Passed.MALFORMED),
        (frame(ipv4(udp(1, 7070, append(1), length=7), UDP, V4)), Passed.MALFORMED),
        (frame(ipv4(tcp(1, 7070), TCP, V4)[:-1]), Passed.MALFORMED),
        (frame(ipv6(tcp(1, 7070), TCP, V6)[:-1]), Passed.MALFORMED),
        (frame(b"\x44" + ipv4(tcp(1, 7070), TCP, V4)[1:]), Passed.MALFORMED),
        (frame(b"\x4f" + ipv4(tcp(1, 7070)[:12], TCP, V4)[1:]), Passed.MALFORMED),
        (ethernet(ipv4(tcp(1, 7070), TCP, V4), packets.IPV6), Passed.MALFORMED),
        (frame(ipv6(tcp(1, 7070), TCP, V6, extensions=((0, b"\xff" + bytes(6)),))), Passed.MALFORMED),
        (packets.ETHERNET + b"\x08\x00", Passed.MALFORMED),
    ],
    ids=lambda value: value.name if isinstance(value, Passed) else "",
)
def test_what_is_not_for_a_shard_passes_untouched(look: Look, packet: bytes, reason: Passed) -> None:
    """And is counted by its reason."""
    assert (XDP_PASS, {}, {reason: 1}) == look(packet)


def test_a_node_on_every_address_is_found_by_any(look: Look, shared: Shared) -> None:
    """0.0.0.0 stands for IPv4 only, :: for IPv6 only, and a node on one address comes before."""
    everywhere = NodePlan(
        host="0.0.0.0", shared_port=9000, own_ports=(9001,), gossip_port=9100, shard_cpus=(0,)
    )
    shared.fill(0, everywhere)

    assert for_whom(0, Rule.OWN_TCP, look(frame(ipv4(tcp(5, 9001), TCP, "192.0.2.7"))))
    assert {Passed.NOT_OURS: 1} == look(frame(ipv6(tcp(5, 9001), TCP, "fd00::7")))[2]


def test_a_process_that_is_not_pinned_gets_its_packets_where_they_come_in(look: Look, shared: Shared) -> None:
    """Without a controller's CPU gossip passes like anybody else's."""
    shared.fill(0, plan(V4, controller_cpu=None))

    assert (XDP_PASS, {}, {Passed.NOT_OURS: 1}) == look(frame(ipv4(udp(1, 7170, b"x"), UDP, V4)))


def test_a_slot_that_is_filled_again_has_fresh_counters(look: Look, shared: Shared) -> None:
    """A node that comes after another finds nothing of it."""
    look(frame(ipv4(tcp(1, 7071), TCP, V4)))
    assert shared.counts(0)

    shared.fill(0, NodePlan(host=V4, shared_port=1, own_ports=(2,), gossip_port=3, shard_cpus=(0,)))

    assert {} == shared.counts(0)
    assert {1, 2} == {place.port for place, target in shared.entries() if target.slot == 0}


def broken(rng: random.Random, whole: list[bytes]) -> bytes:
    """A packet that went wrong: cut, with bytes changed, longer than it should be, or no packet at all."""
    packet = bytearray(rng.choice(whole))
    match rng.randrange(4):
        case 0:
            del packet[rng.randrange(14, len(packet)) :]
        case 1:
            for _ in range(rng.randint(1, 4)):
                packet[rng.randrange(12, len(packet))] = rng.randrange(256)
        case 2:
            packet[12:] = rng.randbytes(rng.randint(2, 1400))
        case _:
            at = rng.randrange(14, len(packet))
            packet[at:at] = rng.randbytes(rng.randint(1, 64))
    return bytes(packet)


def test_no_packet_is_dropped_or_changed(program: int, shared: Shared) -> None:
    """100,000 broken ones: each passes or goes on at a CPU, and is counted exactly once."""
    rng = random.Random(20)
    run = TestRun(program)
    payloads = [
        (tcp(4321, 7070), TCP),
        (tcp(1, 7072), TCP),
        (udp(9, 7070, append(77)), UDP),
        (udp(9, 7170, b""), UDP),
    ]
    whole = [packet for payload, protocol in payloads for packet in addressed(payload, protocol)]
    before = sum(shared.passed_counts().values())

    for _ in range(RANDOM_PACKETS):
        packet = broken(rng, whole)
        action, after = run(packet)
        assert action in (XDP_PASS, XDP_REDIRECT), packet.hex()
        assert packet == after

    steered = sum(sum(counts) for slot in range(2) for counts in shared.counts(slot).values())
    passed = sum(shared.passed_counts().values()) - before
    assert RANDOM_PACKETS == steered + passed
    assert steered > 1000
    assert all(shared.passed_counts()[reason] for reason in Passed if reason is not Passed.NO_CPU)


def test_the_verifiers_log_is_shown_when_it_refuses(needs_xdp: None) -> None:
    """A program that reads behind its packet's end: the reason is in the log."""
    reads_beyond = bytes.fromhex("6112000000000000 7120000000000000 9500000000000000".replace(" ", ""))

    with pytest.raises(Refused) as refused:
        load_program(reads_beyond, name="bad")

    assert "invalid access to packet" in refused.value.log
