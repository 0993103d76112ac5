"""What Python writes into the program's maps is what C reads there."""

from __future__ import annotations

import re
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpf import layout
from ebpf.layout import MAX_SHARDS, NO_CPU, ROWS, TCP, UDP, NodePlan, Passed, Place, Rule, Target
from ebpf.toolchain import SOURCE_FOLDER


def defines() -> dict[str, int]:
    """The numbers that the C source defines."""
    text = "".join((SOURCE_FOLDER / name).read_text() for name in ("steer.c", "ownership.h"))
    found = re.findall(r"^#define (\w+) (0x[0-9a-f]+|\d+)u?$", text, re.MULTILINE)
    return {name: int(value, 0) for name, value in found}


def test_numbers_are_those_of_the_c_source() -> None:
    """Slots, shards, rules and reasons have one number on both sides."""
    found = defines()

    assert (found["SLOTS"], found["NO_CPU"]) == (layout.SLOTS, NO_CPU)
    assert found["LAMINAR_MAX_SHARDS"] == MAX_SHARDS == ROWS - 1
    assert {f"RULE_{rule.name}": rule.value for rule in Rule} == {
        k: v for k, v in found.items() if "RULE_" in k
    }
    reasons = {f"PASSED_{reason.name}": reason.value for reason in Passed}
    assert reasons == {k: v for k, v in found.items() if k.startswith("PASSED_")}
    assert (found["RULES"], found["REASONS"]) == (len(Rule), len(Passed))
    assert found["APPEND_MAGIC"].to_bytes(4, "big") == layout.APPEND_MAGIC


@given(st.ip_addresses(), st.integers(0, 65535), st.sampled_from((TCP, UDP)))
def test_a_place_is_read_back(address: object, port: int, protocol: int) -> None:
    """IPv4 and IPv6, also ::ffff:0:0/96, which stands for IPv4."""
    place = Place(ip_address(str(address)), port, protocol)
    mapped = getattr(place.address, "ipv4_mapped", None)

    assert Place(mapped or place.address, port, protocol) == Place.unpack(place.pack())


def test_a_target_is_read_back() -> None:
    """With processes that are not pinned, too."""
    target = Target(rule=Rule.OWN_TCP, slot=15, row=2, shards=3, cpus={0: 4, 2: 511})

    assert target == Target.unpack(target.pack())


def test_a_plan_names_every_address_of_the_node_once() -> None:
    """Shared port, own ports, the port for appends, gossip; the controller's only if it has a CPU."""
    plan = NodePlan(
        host="10.1.0.1",
        shared_port=70,
        own_ports=(71, 72),
        append_port=70,
        gossip_port=170,
        shard_cpus=(2, 3),
    )
    address = ip_address("10.1.0.1")

    assert {
        Place(address, 70, TCP): (Rule.SHARED_TCP, 0),
        Place(address, 71, TCP): (Rule.OWN_TCP, 0),
        Place(address, 72, TCP): (Rule.OWN_TCP, 1),
        Place(address, 70, UDP): (Rule.APPEND_UDP, 0),
    } == {place: (target.rule, target.row) for place, target in plan.targets(0)}


@pytest.mark.parametrize("slot", [0, 7, 15])
def test_counters_of_a_slot_are_its_own(slot: int) -> None:
    """Every counter of a slot lies in its range, and there is no other in it."""
    numbers = {
        layout.counter(slot=slot, row=row, rule=rule, already_there=there)
        for row in range(ROWS)
        for rule in Rule
        for there in (False, True)
    }

    assert numbers == set(layout.counters_of(slot))
