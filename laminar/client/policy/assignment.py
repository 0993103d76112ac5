"""The assignment of a topic's partitions to the members of a group, as pure functions.

Every member receives the same list of live members and computes the same assignment from it, by rendezvous
hashing (Thaler and Ravishankar, 1998): for each partition the member with the highest hash reads it. So when
a member joins or leaves, only the partitions that it gains or loses move. `moves` says which steps one member
takes towards the assignment. The assignment alone does not allow reading: a member reads only partitions that
it *owns* according to their logs, and claims a partition only if its owner released it or died. So a wrong or
old list of members costs time, but no record is lost or read by two members at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from struct import Struct

import mmh3

REWIND = "~"
"""The owner of a cursor that is being rewound begins with this."""

_U32 = Struct("<I")


def reader_of(topic: str, partition: int, members: Iterable[str]) -> str:
    """Return the member that is to read a partition.

    `members` has at least one; their order does not matter.
    """
    # The hash: 64 bits of mmh3 (x64, seed 0) over topic, a zero byte, partition (u32, little-endian), member.
    # If two are equal, the lower name wins.
    place = topic.encode() + b"\0" + _U32.pack(partition)
    drawn = ((mmh3.mmh3_x64_128_utupledigest(place + name.encode(), 0)[0], name) for name in sorted(members))
    return max(drawn, key=lambda each: each[0])[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Live members of the group, as its leader reported them.

    `forming` says that the leader may not know all live members yet.
    """

    live: frozenset[str]
    forming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A partition's entry in the group's cursor.

    `position` is the next offset to read, None before the first commit; `owner` is "" if no member owns it.
    """

    position: int | None = None
    owner: str = ""

    @property
    def rewound(self) -> bool:
        """Whether a rewind owns the partition: no member may read or commit it until the rewind has ended."""
        return self.owner.startswith(REWIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The group's cursor in all partitions, as the cluster described it.

    `places` has the entry of each partition that has one. `numbers` are all partitions of the topic; it is
    empty if there is no such cursor. `ends` has the final end offsets of partitions that take no more
    records. `waits_for` are partitions that may not be read yet, because the cursor has not reached the ends
    of those that they replaced.
    """

    places: Mapping[int, Place] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()
    ends: Mapping[int, int] = field(default_factory=dict)
    waits_for: frozenset[int] = frozenset()

    def place(self, partition: int) -> Place:
        """Return the cursor's entry of a partition; an empty one if it has none."""
        return self.places.get(partition, Place())

    def is_drained(self, partition: int) -> bool:
        """Return whether the partition has ended, and all of it is acknowledged."""
        end, position = self.ends.get(partition), self.place(partition).position
        return end is not None and position is not None and position >= end

    def readable(self, partitions: Iterable[int]) -> frozenset[int]:
        """Return those of `partitions` that a member may read: not finished, waiting or being rewound."""
        return frozenset(
            each
            for each in partitions
            if each not in self.waits_for and not self.is_drained(each) and not self.place(each).rewound
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The next steps of one member.

    `release` are partitions to release. `claim` has partitions to claim, each with its expected owner: "" for
    none, or a member that died. With `waits` another member has to release a partition first, so the steps
    are to be computed again soon.
    """

    release: frozenset[int]
    claim: Mapping[int, str]
    waits: bool


def wanted(me: str, topic: str, partitions: Iterable[int], members: Members) -> frozenset[int]:
    """Return those of these partitions that are assigned to `me`, which counts as live."""
    live = members.live | {me}
    return frozenset(each for each in partitions if reader_of(topic, each, live) == me)


def moves(
    me: str,
    *,
    held: Collection[int],
    wants: Collection[int],
    places: Mapping[int, Place],
    members: Members,
) -> Assignment:
    """Return the next steps of the member `me`, which owns `held` and is assigned `wants`.

    While the list of members is forming, no member counts as dead and no partition is released: members keep
    what they own.
    """
    claim: dict[int, str] = {}
    waits = False
    for partition in sorted(set(wants) - set(held)):
        place = places.get(partition, Place())
        owner = place.owner
        if place.rewound:
            waits = True
        elif owner in ("", me) or (owner not in members.live and not members.forming):
            claim[partition] = owner
        else:
            # Its live owner releases it after its last commit, or its session expires.
            waits = True
    release: frozenset[int] = frozenset() if members.forming else frozenset(set(held) - set(wants))
    return Assignment(release=release, claim=claim, waits=waits)
