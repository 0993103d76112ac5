"""Who reads which partition of a topic: the pure half of a subscription.

Every member of a group hears the same list of live members and computes the same assignment from it, by
rendezvous hashing in whole numbers: each member draws a number for each partition, and the highest draw has
it; so when a member comes or goes, only what it wins or loses moves. `moves` says what one member does about
it. It is no more than a wish: a member reads what it *owns* in the partition's log, and takes from another
only what that one gave back, or what it left when it died. So a wrong or old list costs time, never a record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from struct import Struct

import mmh3

_U32 = Struct("<I")


def reader_of(topic: str, partition: int, members: Iterable[str]) -> str:
    """The member that is to read a partition; of `members` at least one. The order does not matter."""
    # 64 bits of mmh3 (x64, seed 0) of topic, 0, partition (u32, little-endian), member. A tie: lower name.
    place = topic.encode() + b"\0" + _U32.pack(partition)
    drawn = ((mmh3.mmh3_x64_128_utupledigest(place + name.encode(), 0)[0], name) for name in sorted(members))
    return max(drawn, key=lambda each: each[0])[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The live members, as their leader said; `forming`: there may be more that it has not heard of yet."""

    members: frozenset[str]
    forming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A partition of the group's cursor: the next offset wanted, None before the first; and whose it is."""

    position: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What a member does next: `give_up` partitions, `claim` others from who is named, and look again."""

    give_up: frozenset[int]
    claim: Mapping[int, str]
    waits: bool


def wanted(me: str, topic: str, partitions: int, roster: Roster) -> frozenset[int]:
    """The partitions that `me` is to read."""
    members = roster.members | {me}
    return frozenset(each for each in range(partitions) if reader_of(topic, each, members) == me)


def moves(
    me: str,
    *,
    held: Collection[int],
    wants: Collection[int],
    places: Mapping[int, Place],
    roster: Roster,
) -> Moves:
    """What `me`, who owns `held`, does to own `wants`.

    While the roster forms, nobody is taken for dead and nothing is given up: members keep what they have."""
    claim: dict[int, str] = {}
    waits = False
    for partition in sorted(set(wants) - set(held)):
        owner = places.get(partition, Place()).owner
        if owner in ("", me) or (owner not in roster.members and not roster.forming):
            claim[partition] = owner
        else:
            # Its owner gives it back when it has committed, or its session ends.
            waits = True
    give_up: frozenset[int] = frozenset() if roster.forming else frozenset(set(held) - set(wants))
    return Moves(give_up=give_up, claim=claim, waits=waits)
