"""Why a partition is not PySyncObj's Raft: two of its faults, shown on the version that is installed.

``python benches/consensus/evidence_pysyncobj.py`` drives one real `SyncObj` through a transport that hands
it messages and keeps its answers; no network. It ends 0 when both faults show, so the day it ends 1,
`docs/decisions/0003` is due for another look. What we do use of PySyncObj are its replicated objects (in
`membership`), over a group of our own.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from typing import Any

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

COMMAND = b"\x00"  # PySyncObj's type byte of an ordinary command


class Hand(Transport):  # type: ignore[misc]  # pysyncobj has no types
    """A transport held in the hand: `deliver` gives a message, `sent` keeps every answer."""

    def __init__(self) -> None:
        super().__init__(None, None, [])
        self.sent: list[dict[str, Any]] = []

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        self.sent.append(message)
        return True

    def deliver(self, node: Node, message: dict[str, Any]) -> None:
        self._onMessageReceived(node, message)


def member(cluster: int, *, election_s: float) -> tuple[SyncObj, Hand, list[Node]]:
    """One member of a cluster, its transport, and its peers."""
    peers = [Node(f"peer-{number}") for number in range(1, cluster)]
    hand = Hand()
    settings = SyncObjConf(
        autoTick=False,
        dynamicMembershipChange=False,
        raftMinTimeout=election_s,
        raftMaxTimeout=election_s * 1.2,
        appendEntriesPeriod=election_s / 10,
        connectionTimeout=election_s * 2,
    )
    return SyncObj(Node("self"), peers, settings, transport=hand), hand, peers


def log_of(node: SyncObj) -> list[int]:
    """The indexes in its log."""
    log = node._SyncObj__raftLog
    return [log[place][1] for place in range(len(log))]


def append(*, after: tuple[int, int], entries: list[tuple[bytes, int, int]], commit: int) -> dict[str, Any]:
    """An append_entries message of term 1, as PySyncObj's leader writes it."""
    return {
        "type": "append_entries",
        "term": 1,
        "commit_index": commit,
        "prevLogIdx": after[0],
        "prevLogTerm": after[1],
        "entries": entries,
    }


def old_append_cuts_acknowledged_entries() -> bool:
    """A duplicate of an old append, whose entries all match, removes the entries behind them."""
    node, hand, (leader, _) = member(3, election_s=60)
    first = append(after=(1, 0), entries=[(COMMAND + b"a", 2, 1)], commit=1)
    second = append(after=(2, 1), entries=[(COMMAND + b"b", 3, 1)], commit=1)
    hand.deliver(leader, first)
    hand.deliver(leader, second)
    before, told = log_of(node), hand.sent[-1]
    hand.deliver(leader, first)
    after = log_of(node)
    node.destroy()

    print("1. an append delivered twice")
    print(f"   log {before}; the follower told the leader success={told['success']} up to 3")
    print(f"   the first append arrives once more; log {after}")
    return before == [1, 2, 3] and bool(told["success"]) and after == [1, 2]


def one_vote_counts_twice() -> bool:
    """An answer to a request for votes that arrives twice makes a leader with two of five."""
    node, hand, peers = member(5, election_s=0.05)
    for peer in peers:
        hand._onNodeConnected(peer)
    give_up = time.monotonic() + 10
    while not any(message["type"] == "request_vote" for message in hand.sent):
        assert time.monotonic() < give_up, "it never asked for votes"
        node.doTick(0.01)
    term = hand.sent[-1]["term"]
    for _ in range(2):
        hand.deliver(peers[0], {"type": "response_vote", "term": term})
    leads = bool(node._isLeader())
    node.destroy()

    print("2. one vote answer delivered twice, in a cluster of five")
    print(f"   leader: {leads}, with the votes of itself and peer-1")
    return leads


def main() -> int:
    print(f"pysyncobj {version('pysyncobj')}")
    shown = [old_append_cuts_acknowledged_entries(), one_vote_counts_twice()]
    print("both faults show" if all(shown) else f"NOT shown any more: {shown}")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
