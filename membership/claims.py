"""Claims about members, and which of two is to be believed: pure values and functions.

A claim is swim-protocol's `Gossip`: a member's name, its clock, a status, and what it says of itself. The
rules that keep a cluster of liars-by-accident together are here, apart from probing and telling (`swim`),
so that each can be read and tested alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swimprotocol.packet import Gossip
from swimprotocol.status import Status

from membership.packets import LEFT, address_of

SEVERITY = {Status.ONLINE: 0, Status.SUSPECT: 1, Status.OFFLINE: 2}


@dataclass(slots=True)
class Peer:
    """Another member: the newest claim about it (always with its metadata), and since when it holds."""

    claim: Gossip
    until_ms: int | None = None
    """suspect: when it counts as offline. offline: when it is forgotten."""

    @property
    def address(self) -> str:
        return address_of(self.claim.metadata or {})

    @property
    def available(self) -> bool:
        return bool(self.claim.status & Status.AVAILABLE)


def newer(update: Gossip, known: Gossip) -> bool:
    """Whether the update replaces what is known: a higher clock does, or a worse status at the same clock."""
    return (update.clock, SEVERITY[update.status]) > (known.clock, SEVERITY[known.status])


def follow(update: Gossip, known: Gossip) -> Gossip:
    """Return the claim that holds after a newer update: the update, unless it is a second-hand death.

    From another's word alone an online member becomes suspect at worst, so it can answer; after a partition
    the two sides would otherwise bury each other's members when they meet. A farewell counts at once.
    """
    assert newer(update, known), (update, known)
    metadata = known.metadata or {}
    if update.status != Status.OFFLINE:
        return update if update.metadata else replace(update, metadata=metadata)
    if update.metadata and LEFT in update.metadata:
        return replace(update, metadata={**metadata, LEFT: b""})
    # Only this step of swim-protocol's table. Its other one, a suspect that stays offline, forgets that a
    # higher clock is a newer life.
    return replace(update, status=known.status.transition(Status.OFFLINE), metadata=metadata)


def doubts(peer: Peer | None) -> list[Gossip]:
    """Return what the peer itself should hear, so that it can refute; its own metadata it knows."""
    if peer is None or peer.claim.status == Status.ONLINE:
        return []
    return [replace(peer.claim, metadata=None)]


def spread(claim: Gossip) -> Gossip:
    """Return the claim as it is told: nobody needs the address of one that is offline."""
    if claim.status != Status.OFFLINE or not claim.metadata:
        return claim
    return replace(claim, metadata={LEFT: b""} if LEFT in claim.metadata else None)
