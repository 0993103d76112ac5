"""`laminar steer`: what it says of this machine, whatever that can."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import ip_address

from ebpf.interfaces import Interface
from ebpf.layout import CONTROLLER_ROW, NodePlan, Passed, Rule
from ebpf.requirements import Requirement, first_unmet, requirements
from ebpf.status import InterfaceStatus, NodeStatus
from laminar.cli.commands.steer import interface_document, interface_rows, requirement_row
from tests.cli.conftest import Command as Laminar

LO = Interface(
    index=1,
    name="lo",
    up=True,
    loopback=True,
    kind="",
    xdp_mode="generic",
    xdp_program=7,
    addresses=(ip_address("127.0.0.1"),),
)
PLAN = NodePlan(
    host="127.0.0.1",
    shared_port=70,
    own_ports=(71, 72),
    append_port=70,
    gossip_port=170,
    shard_cpus=(2, 3),
    controller_cpu=1,
)
NODE = NodeStatus(
    slot=0,
    pid=55,
    alive=True,
    targets=list(PLAN.targets(0)),
    counts={
        (0, Rule.SHARED_TCP): (5, 2),
        (1, Rule.OWN_TCP): (3, 0),
        (CONTROLLER_ROW, Rule.GOSSIP_UDP): (0, 9),
    },
)
OURS = InterfaceStatus(
    interface=LO,
    program="laminar_steer",
    ours=True,
    nodes=[NODE],
    passed={Passed.NOT_IP: 4, Passed.NO_CPU: 0},
)


def test_check_says_what_is_there_and_what_is_not(laminar: Laminar) -> None:
    """A line for each thing that is needed; the exit code says whether anything lacks."""
    page = laminar("steer", "check", "--json")

    rows = json.loads(page.text)
    assert [each.name for each in requirements()] == [
        row["needed"] for row in rows if row["needed"] != "program"
    ]
    assert all(row["met"] for row in rows) == (page.code == 0)
    assert first_unmet() is None or page.code == 1


def test_what_is_missing_is_named_with_its_package() -> None:
    """As one would type it."""
    bcc = Requirement(name="BCC", met=False, found="BCC is not installed", package="python3-bpfcc")

    assert "BCC is not installed (Debian: apt-get install python3-bpfcc)" == requirement_row(bcc)["found"]


def test_status_is_a_line_for_each_thing_that_is_steered() -> None:
    """By address and shard; then what passed."""
    rows = [
        (row["pid"], row["steered"], row["to"], row["cpu"], row["packets"])
        for row in interface_rows(OURS)
        if "pid" in row
    ]

    assert [
        ("55", "tcp 127.0.0.1:70", "shard 0", "2", 7),
        ("55", "tcp 127.0.0.1:70", "shard 1", "3", 0),
        ("55", "tcp 127.0.0.1:71", "shard 0", "2", 0),
        ("55", "tcp 127.0.0.1:72", "shard 1", "3", 3),
        ("55", "append 127.0.0.1:70", "shard 0", "2", 0),
        ("55", "append 127.0.0.1:70", "shard 1", "3", 0),
        ("55", "gossip 127.0.0.1:170", "controller", "1", 9),
    ] == rows
    assert [("passed: not_ip", 4)] == [
        (row["to"], row["packets"]) for row in interface_rows(OURS) if "pid" not in row
    ]


def test_status_tells_a_foreign_program_from_none() -> None:
    """Neither is ours."""
    foreign = InterfaceStatus(interface=LO, program="theirs", ours=False)
    none = InterfaceStatus(interface=replace(LO, xdp_mode="", xdp_program=0), program="", ours=False)

    assert ["nothing: the program theirs is not Laminar's"] == [
        row["steered"] for row in interface_rows(foreign)
    ]
    assert ["nothing"] == [row["steered"] for row in interface_rows(none)]


def test_status_for_programs_has_every_counter() -> None:
    """Redirected and already there apart."""
    document = interface_document(OURS)

    assert {"to": "shard 0", "rule": "shared_tcp", "redirected": 5, "already_there": 2} in (
        document["nodes"][0]["packets"]
    )
    assert ("lo", "generic", True) == (document["interface"], document["mode"], document["ours"])


def test_status_lists_the_interfaces_of_this_machine(laminar: Laminar) -> None:
    """Also where nothing can be steered."""
    assert "lo" in laminar("steer", "status", "-o", "names").text.split()
