"""Precedence: SWIM's rules to choose between two claims about a member, as values and functions.

A claim is swim-protocol's `Gossip`: a member's name, its clock, a status, and its metadata. Probing and
dissemination are in `swim`, so that both can be read and tested alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swimprotocol.packet import Gossip
from swimprotocol.status import Status

from membership.gossip.packets import LEFT, address_of

SEVERITY = {Status.ONLINE: 0, Status.SUSPECT: 1, Status.OFFLINE: 2}


@dataclass(slots=True)
class Peer:
    """Another member, as this one knows it: the claim about it that is in force, always with metadata.

    If the claim is suspect or offline, `until_ms` is the time at which its next status is due.
    """

    claim: Gossip
    until_ms: int | None = None
    """For a suspect: when it counts as offline. For an offline member: when it is forgotten."""

    @property
    def address(self) -> str:
        """Its ``host:port``, as the member announced it."""
        return address_of(self.claim.metadata or {})

    @property
    def available(self) -> bool:
        """Whether the member is online or suspect, so that probing it makes sense."""
        return bool(self.claim.status & Status.AVAILABLE)


def newer(update: Gossip, known: Gossip) -> bool:
    """Return whether `update` replaces `known`: by a higher clock, or a worse status at the same clock."""
    return (update.clock, SEVERITY[update.status]) > (known.clock, SEVERITY[known.status])


def follow(update: Gossip, known: Gossip) -> Gossip:
    """Return the claim that is in force after a newer `update`, completed with the metadata of `known`.

    That is the update, with one exception: an online member that another member claims to be offline only
    becomes suspect, so that it can refute the claim. Without that, the two sides of a network partition would
    declare each other's members offline when they meet. A member's own announcement that it leaves counts at
    once.
    """
    assert newer(update, known), (update, known)
    metadata = known.metadata or {}
    if update.status != Status.OFFLINE:
        return update if update.metadata else replace(update, metadata=metadata)
    if update.metadata and LEFT in update.metadata:
        return replace(update, metadata={**metadata, LEFT: b""})
    # Only this rule of swim-protocol's `transition` is used: online to offline becomes suspect. Its other
    # rule, offline to suspect stays offline, would be wrong when the update's higher clock is of a newer
    # incarnation.
    return replace(update, status=known.status.transition(Status.OFFLINE), metadata=metadata)


def doubts(peer: Peer | None) -> list[Gossip]:
    """Return our claim to send to the peer itself, so that it can refute the claim; none if it is online.

    The claim's metadata is left out, because the peer itself has announced it.
    """
    if peer is None or peer.claim.status == Status.ONLINE:
        return []
    return [replace(peer.claim, metadata=None)]


def spread(claim: Gossip) -> Gossip:
    """Return the claim as it is sent to others: the address of an offline member is left out."""
    if claim.status != Status.OFFLINE or not claim.metadata:
        return claim
    return replace(claim, metadata={LEFT: b""} if LEFT in claim.metadata else None)
