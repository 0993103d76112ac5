"""Which member of a group reads which partition: the pure half of a subscription.

Every member gets the same list of live members and computes the same assignment from it, by rendezvous
hashing (Thaler and Ravishankar, 1998) in whole numbers: each member draws a number for each partition, and
the highest draw has it; so when a member comes or goes, only what it wins or loses moves. `moves` says what
one member does about it. The result is only a wish: a member reads what it *owns* in the partition's log, and
takes from another only what that one gave back, or left when it died. So a wrong or old list costs time,
never a record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from struct import Struct

import mmh3

_U32 = Struct("<I")


def reader_of(topic: str, partition: int, members: Iterable[str]) -> str:
    """Return the member that is to read a partition.

    `members` has at least one; their order does not matter.
    """
    # 64 bits of mmh3 (x64, seed 0) of topic, 0, partition (u32, little-endian), member. A tie: lower name.
    place = topic.encode() + b"\0" + _U32.pack(partition)
    drawn = ((mmh3.mmh3_x64_128_utupledigest(place + name.encode(), 0)[0], name) for name in sorted(members))
    return max(drawn, key=lambda each: each[0])[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Live members of the group, as its leader reported them.

    `forming`: there may be more that the leader does not know yet.
    """

    live: frozenset[str]
    forming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A partition of the group's cursor: the next offset wanted, None before the first; and its owner."""

    position: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Next step of one member: partitions to release (`give_up`), and to `claim` from their owners.

    `waits`: another member has to release a partition first, so the step is to be computed again soon.
    """

    give_up: frozenset[int]
    claim: Mapping[int, str]
    waits: bool


def wanted(me: str, topic: str, partitions: int, members: Members) -> frozenset[int]:
    """Return the partitions that `me` is to read."""
    live = members.live | {me}
    return frozenset(each for each in range(partitions) if reader_of(topic, each, live) == me)


def moves(
    me: str,
    *,
    held: Collection[int],
    wants: Collection[int],
    places: Mapping[int, Place],
    members: Members,
) -> Assignment:
    """Return what `me`, who owns `held`, has to do to own `wants`.

    While the list of members is forming, no member counts as dead and no partition is released: members keep
    what they have.
    """
    claim: dict[int, str] = {}
    waits = False
    for partition in sorted(set(wants) - set(held)):
        owner = places.get(partition, Place()).owner
        if owner in ("", me) or (owner not in members.live and not members.forming):
            claim[partition] = owner
        else:
            # Its owner gives it back when it has committed, or its session ends.
            waits = True
    give_up: frozenset[int] = frozenset() if members.forming else frozenset(set(held) - set(wants))
    return Assignment(give_up=give_up, claim=claim, waits=waits)
