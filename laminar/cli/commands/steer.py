"""`laminar steer`: the packets that XDP in the kernel sends to the owning shards, and its requirements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from laminar.cli.exit_codes import EXIT_DONE, EXIT_FAILED
from laminar.cli.options import AS_TABLE, Listing

if TYPE_CHECKING:
    from ebpf.layout import Place, Rule
    from ebpf.requirements import Requirement
    from ebpf.status import InterfaceStatus, NodeStatus


def status(*, listing: Listing = AS_TABLE) -> None:
    """Show which packets XDP steers to which shards of this machine, and how many. Needs root."""
    from ebpf.status import status as ask
    from laminar.cli.errors import Failed
    from laminar.cli.output import show, show_json

    try:
        found = ask()
    except PermissionError as error:
        raise Failed(f"{error.filename or 'the bpf file system'} can't be read: run it as root") from None
    if listing.format == "json":
        show_json([interface_document(each) for each in found])
        return
    rows = [row for each in found for row in interface_rows(each)]
    show(
        rows,
        listing,
        columns=("interface", "mode", "pid", "steered", "to", "cpu", "packets"),
        name="interface",
    )


def interface_rows(found: InterfaceStatus) -> list[dict[str, Any]]:
    """Return the table's lines for one network interface.

    There is a line for each address whose packets XDP steers, or one line with the reason why none are.
    """
    interface = found.interface
    base = {"interface": interface.name, "mode": interface.xdp_mode or "-"}
    if not found.ours:
        other = f"nothing: the program {found.program or interface.xdp_program} is not Laminar's"
        return [base | {"steered": other if interface.xdp_program else "nothing"}]
    rows = [base | each for node in found.nodes for each in node_rows(node)]
    passed = [
        base | {"steered": "nothing", "to": f"passed: {reason.name.lower()}", "packets": count}
        for reason, count in found.passed.items()
        if count
    ]
    return rows + passed


def node_rows(node: NodeStatus) -> list[dict[str, Any]]:
    """Return what is steered for one node: address, process, CPU, packets so far."""
    from ebpf.layout import CONTROLLER_ROW, Rule

    rows = []
    for place, target in node.targets:
        if target.rule in (Rule.OWN_TCP, Rule.GOSSIP_UDP):
            wanted: Iterable[int] = [target.row]
        else:
            wanted = range(target.shards)
        for row in wanted:
            rows.append(
                {
                    "pid": str(node.pid) if node.alive else f"{node.pid} (gone)",
                    "steered": f"{kind_of(target.rule)} {address_of(place)}",
                    "to": "controller" if row == CONTROLLER_ROW else f"shard {row}",
                    "cpu": str(target.cpus.get(row, "-")),
                    "packets": sum(node.counts.get((row, target.rule), (0, 0))),
                }
            )
    return rows


def kind_of(rule: Rule) -> str:
    """Return the kind of a steering rule in one word."""
    from ebpf.layout import Rule

    names = {
        Rule.SHARED_TCP: "tcp",
        Rule.OWN_TCP: "tcp",
        Rule.APPEND_UDP: "append",
        Rule.GOSSIP_UDP: "gossip",
    }
    return names[rule]


def address_of(place: Place) -> str:
    """Return address and port, without the protocol."""
    return str(place).partition(" ")[2]


def interface_document(found: InterfaceStatus) -> dict[str, Any]:
    """Return all that is known about one interface, as a JSON document."""
    from ebpf.layout import CONTROLLER_ROW

    def name_of(row: int) -> str:
        return "controller" if row == CONTROLLER_ROW else f"shard {row}"

    return {
        "interface": found.interface.name,
        "mode": found.interface.xdp_mode or None,
        "program": found.program or None,
        "program_id": found.interface.xdp_program or None,
        "ours": found.ours,
        "passed": {reason.name.lower(): count for reason, count in found.passed.items()},
        "nodes": [
            {
                "pid": node.pid,
                "alive": node.alive,
                "addresses": [str(place) for place, _ in node.targets],
                "packets": [
                    {
                        "to": name_of(row),
                        "rule": rule.name.lower(),
                        "redirected": moved,
                        "already_there": stayed,
                    }
                    for (row, rule), (moved, stayed) in node.counts.items()
                ],
            }
            for node in found.nodes
        ],
    }


def check(*, listing: Listing = AS_TABLE) -> int:
    """Show whether this machine can steer packets by XDP, and what is missing. Exit code 1 if it cannot."""
    from ebpf.loader import try_loading
    from ebpf.requirements import requirements
    from laminar.cli.errors import complain
    from laminar.cli.output import show

    found = requirements()
    log = ""
    if all(each.met for each in found):
        tried, log = try_loading()
        found.append(tried)
    show(
        [requirement_row(each) for each in found], listing, columns=("needed", "met", "found"), name="needed"
    )
    if log:
        complain(log)
    return EXIT_DONE if all(each.met for each in found) else EXIT_FAILED


def requirement_row(found: Requirement) -> dict[str, Any]:
    """Return one requirement of XDP steering as a row."""
    return {
        "needed": found.name,
        "met": found.met,
        "found": found.found if found.met else found.reason,
        "package": found.package or None,
    }
