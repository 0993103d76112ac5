"""Nodes come, share one program, go in order or are killed; and somebody else's program stays where it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpf import kernel
from ebpf.interfaces import Interface, interfaces, interfaces_of, network_namespace
from ebpf.layout import NodePlan, Passed
from ebpf.loader import PROGRAM_NAME, Membership, NotSteered, join
from ebpf.shared import FOLDER, locked
from ebpf.status import InterfaceStatus, status
from ebpf.toolchain import digest
from tests.ebpf.conftest import Network

JOINER = Path(__file__).with_name("joiner.py")
PASSES = bytes.fromhex("b7000000020000009500000000000000")  # r0 = XDP_PASS; exit

Killable = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def network(new_network: Callable[[], Network], compiled_once: None) -> Iterator[Network]:
    """A network of this test's own; the test runs in it."""
    network = new_network()
    with network.inside():
        yield network


@pytest.fixture
def killable(network: Network) -> Iterator[Killable]:
    """Starts a node's share in a process of its own, and waits until it is steered."""
    started: list[subprocess.Popen[str]] = []

    def start(host: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, JOINER, host, "7070"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("joined")
        return process

    yield start
    for process in started:
        process.communicate(timeout=60)  # its standard input ends, so it leaves


def plan(host: str) -> NodePlan:
    return NodePlan(host=host, shared_port=7070, own_ports=(7071,), gossip_port=7170, shard_cpus=(0,))


def loopback() -> Interface:
    return interfaces_of("127.0.0.1")[0]


def enter(host: str) -> Membership:
    return join(loopback(), plan(host), pid=os.getpid())


def seen() -> InterfaceStatus:
    """What `laminar steer status` would say of the loopback."""
    return next(each for each in status() if each.interface.loopback)


def hosts(found: InterfaceStatus) -> list[str]:
    return sorted({str(place.address) for node in found.nodes for place, _ in node.targets})


def folders() -> list[Path]:
    return list(FOLDER.glob(f"{network_namespace()}-*"))


def test_nodes_share_one_program_and_the_last_one_detaches_it(network: Network) -> None:
    """The second attaches nothing; the first to go takes only its own ports with it."""
    first = enter("127.0.0.1")
    program = seen().interface.xdp_program
    second = enter("127.0.0.2")

    assert (program, PROGRAM_NAME) == (seen().interface.xdp_program, seen().program)
    assert ["127.0.0.1", "127.0.0.2"] == hosts(seen())

    first.leave()
    assert program == seen().interface.xdp_program
    assert ["127.0.0.2"] == hosts(seen())

    second.leave()
    assert 0 == seen().interface.xdp_program
    assert [] == folders()


def test_a_killed_nodes_program_is_known_and_made_anew(killable: Killable) -> None:
    """There is one program afterwards, another one, with counters from zero and nothing of the dead node."""
    dead = killable("127.0.0.1")
    with locked():  # else a node of another test, in another network, may remove what is left
        dead.kill()
        dead.wait()
        left = seen()
    assert left.ours
    assert [False] == [node.alive for node in left.nodes]

    heir = enter("127.0.0.2")
    found = seen()

    assert found.interface.xdp_program not in (0, left.interface.xdp_program)
    assert [(os.getpid(), True)] == [(node.pid, node.alive) for node in found.nodes]
    assert ["127.0.0.2"] == hosts(found)
    assert dict.fromkeys(Passed, 0) == found.passed
    heir.leave()


def test_a_killed_node_is_forgotten_while_others_go_on(killable: Killable) -> None:
    """Its ports are steered no more as soon as anybody comes or goes; the program stays."""
    alive = enter("127.0.0.1")
    dead = killable("127.0.0.2")
    program = seen().interface.xdp_program
    dead.kill()
    dead.wait()

    killable("127.0.0.3")

    assert ["127.0.0.1", "127.0.0.3"] == hosts(seen())
    assert program == seen().interface.xdp_program
    alive.leave()


def test_somebody_elses_program_is_not_replaced(network: Network) -> None:
    """The reason names it, and it stays."""
    foreign = kernel.load_program(PASSES, name="theirs")
    link = kernel.attach(foreign, loopback().index, flags=kernel.XDP_SKB_MODE)
    before = seen()
    assert (False, "theirs") == (before.ours, before.program)

    with pytest.raises(NotSteered) as refused:
        enter("127.0.0.1")

    number = before.interface.xdp_program
    assert f"lo has another XDP program (id {number}, theirs): it is not replaced" == str(refused.value)
    assert number == seen().interface.xdp_program
    assert [] == folders()
    os.close(link)
    os.close(foreign)


def test_nobody_else_can_replace_ours(network: Network) -> None:
    """The kernel refuses it while our link is there."""
    membership = enter("127.0.0.1")
    foreign = kernel.load_program(PASSES, name="theirs")

    with pytest.raises(OSError, match="busy"):
        kernel.attach(foreign, loopback().index, flags=kernel.XDP_SKB_MODE)

    os.close(foreign)
    membership.leave()


def test_files_in_the_shared_folder_do_not_hinder_a_node(network: Network) -> None:
    """What somebody pinned there stays; only one that has the name of this interface's folder is refused."""
    with locked():
        taken = FOLDER / f"{network_namespace()}-{loopback().index}-{digest()}"
    stray = FOLDER / f"{network_namespace()}-stray"
    foreign = kernel.load_program(PASSES, name="theirs")
    try:
        kernel.pin(foreign, str(stray))
        enter("127.0.0.1").leave()
        assert [stray] == folders()
        kernel.pin(foreign, str(taken))
        with pytest.raises(NotSteered, match="is a file, not the folder of a program"):
            enter("127.0.0.1")
    finally:
        os.close(foreign)
        stray.unlink()
        taken.unlink(missing_ok=True)


def test_what_is_left_of_a_network_that_is_gone_is_removed(
    new_network: Callable[[], Network], compiled_once: None
) -> None:
    """Its interfaces went with it, and so did the program; the next node of the host removes the rest."""
    gone = new_network()
    with gone.inside():
        number = network_namespace()
        process = subprocess.Popen(
            [sys.executable, JOINER, "127.0.0.1", "7070"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline()
    with locked():  # else a node of another test may be the next one
        process.kill()
        process.communicate()
        assert list(FOLDER.glob(f"{number}-*"))

    with new_network().inside():
        enter("127.0.0.1").leave()

    assert [] == list(FOLDER.glob(f"{number}-*"))


def test_a_netlink_question_shows_what_is_attached(network: Network) -> None:
    """An interface that is down has no program and no address."""
    network.ip("link add wire0 type veth peer name wire1")
    network.ip("address add 192.0.2.1/24 dev wire0")

    found = {each.name: each for each in interfaces()}

    assert ("veth", False, 0, "") == (
        *(found["wire0"].kind, found["wire0"].up),
        *(found["wire0"].xdp_program, found["wire0"].xdp_mode),
    )
    assert ["192.0.2.1"] == [str(address) for address in found["wire0"].addresses]
    assert ["wire0"] == [each.name for each in interfaces_of("192.0.2.1")]
    assert [] == interfaces_of("0.0.0.0")
    network.ip("link set wire0 up")
    assert ["wire0"] == [each.name for each in interfaces_of("0.0.0.0")]
    assert [] == interfaces_of("192.0.2.77")
