"""Whose word on consensus a process hears (docs/consensus.md#a-folder-that-goes-back)."""

from __future__ import annotations

import pytest

from laminar.node.runtime.peer_admission import PeerAdmission, encode_history
from laminar.node.transport.connections import Peer
from membership.boot_history import BootRecord


def admission(told: BootRecord) -> PeerAdmission:
    """Of a process that has heard of node b's start `told` from the catalog."""
    return PeerAdmission(
        "a", knows=lambda node: True, known_boot=lambda node: told, known_store=lambda node: b"store"
    )


FIRST, SECOND, OTHER = BootRecord(1, b"1"), BootRecord(2, b"2"), BootRecord(2, b"x")


def greets(*lives: BootRecord, role: int = 1, store: bytes = b"") -> Peer:
    return Peer("b", role, b"nonce%d" % role, encode_history(lives), store)


def test_a_copy_older_than_a_life_that_greeted_is_not_heard() -> None:
    """The catalog has not heard of the second start yet; but this process has, and may have promised it
    something.
    """
    process = admission(FIRST)
    assert process.admits(greets(FIRST))
    assert process.admits(greets(FIRST, SECOND))

    assert not process.admits(greets(FIRST, OTHER))
    assert not process.admits(greets(FIRST))
    assert process.admits(greets(FIRST, SECOND, role=2))
    assert process.admits(greets(FIRST, SECOND, BootRecord(3, b"3")))


@pytest.mark.parametrize("told", [SECOND, OTHER])
def test_one_that_is_not_heard_leaves_nothing(told: BootRecord) -> None:
    """Else a copy that was refused once would bar the folder that it was a copy of."""
    process = admission(told)
    assert not process.admits(greets(FIRST))
    assert not process.admits(greets(FIRST, BootRecord(2, b"no"), BootRecord(3, b"3")))

    assert process.admits(greets(FIRST, told))


def test_a_former_folder_of_a_node_says_nothing_about_the_present_one() -> None:
    """A node was removed from the cluster, and its name is used again by an empty folder."""
    boots, stores = {"b": SECOND}, {"b": b"old"}
    process = PeerAdmission("a", knows=lambda node: True, known_boot=boots.get, known_store=stores.get)
    assert process.admits(greets(FIRST, SECOND))

    anew = BootRecord(1, b"anew")
    assert not process.admits(greets(anew))  # the catalog has not named it yet: it may be a copy
    boots["b"], stores["b"] = anew, b"new"
    assert process.admits(greets(anew))
    assert not process.admits(greets(FIRST, SECOND))


def test_the_last_message_of_a_removed_node_bars_no_folder_that_comes_after_it() -> None:
    """It arrives when the catalog has removed the node, and has none of that name."""
    boots, stores = {"b": SECOND}, {"b": b"old"}
    process = PeerAdmission("a", knows=lambda node: True, known_boot=boots.get, known_store=stores.get)
    assert process.admits(greets(FIRST, SECOND))
    del boots["b"], stores["b"]
    assert process.admits(greets(FIRST, SECOND))

    boots["b"], stores["b"] = BootRecord(1, b"next"), b"new"
    assert process.admits(greets(BootRecord(1, b"next")))


def test_a_removed_node_that_is_started_again_bars_no_folder_that_has_its_name() -> None:
    """Its host was gone, the node was removed, and another host has its name; then the old one comes back.
    Its starts are other ones and more, so nothing contradicts the one that the catalog has.
    """
    next_one = BootRecord(1, b"next")
    process = PeerAdmission(
        "a",
        knows=lambda node: True,
        known_boot=lambda node: next_one,
        known_store=lambda node: b"new",
        is_removed=lambda store: store == b"old",
    )
    assert process.admits(greets(next_one, store=b"new"))
    assert not process.admits(greets(SECOND, BootRecord(3, b"3"), store=b"old"))

    assert process.admits(greets(next_one, store=b"new"))
    assert process.admits(greets(next_one))  # of an older program, which does not say which folder it has


def test_a_folder_that_came_after_the_one_known_is_heard_and_guarded() -> None:
    """This copy of the catalog is old, and has a former folder of the node's name."""
    boots, stores = {"b": SECOND}, {"b": b"old"}
    process = PeerAdmission("a", knows=lambda node: True, known_boot=boots.get, known_store=stores.get)
    next_one, later = BootRecord(1, b"next"), BootRecord(2, b"later")
    assert process.admits(greets(next_one, later, store=b"new"))
    assert not process.admits(greets(next_one, BootRecord(2, b"copy"), store=b"new"))

    boots["b"], stores["b"] = next_one, b"new"
    assert not process.admits(greets(next_one, BootRecord(2, b"copy"), store=b"new"))
    assert not process.admits(greets(next_one))  # an older program, on the same folder
    assert process.admits(greets(next_one, later, store=b"new"))


def test_a_node_that_is_known_no_more_is_not_heard() -> None:
    """Also over a connection of before."""
    nodes = {"b"}
    process = PeerAdmission(
        "a", knows=nodes.__contains__, known_boot=lambda node: None, known_store=lambda node: None
    )
    peer = greets(FIRST)
    assert process.admits(peer) and process.admits(peer)
    nodes.clear()
    assert not process.admits(peer)
    nodes.add("b")

    assert process.admits(peer)
