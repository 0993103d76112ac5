"""The boot history of a node's data folder, by which a cluster recognises an older copy of it.

Each start of a node adds a *boot record* to its folder, durably and before anything else: the next number,
and a random nonce. While the node runs, the tick of its newest record is advanced now and then. The catalog
keeps the newest record of each node. A node sends its history: a record that the catalog has, and all later
ones. A folder and a backup of it have the same history up to the backup, and different ones after it: they
differ in a number, in a nonce, or in the tick at which a start ended.

A node that is started many times and reaches no other node has a longer history, not a different one: a
higher number is never a fault. Three cases are not recognised: a copy that is newer than the last tick that
was sent; copies of *all* folders of a cluster; and, by a node that was cut off, a copy of a record that it
has not received. This module only compares histories. `catalog_rules` and the node decide what is sent to
whom, and what follows from a contradiction.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

KEPT = 64
"""Most records of a history. Beyond that, starts add none: no other node has received a record for that long,
so these starts can have promised nothing.
"""


class BootRecord(msgspec.Struct, frozen=True, array_like=True):
    """One start of a node: its number, a random nonce, and a tick that counts up from 0 while it runs."""

    number: int
    nonce: bytes
    tick: int = 0


def begin(history: Sequence[BootRecord], nonce: bytes) -> tuple[BootRecord, ...]:
    """Return the history with a record for a new start."""
    if len(history) >= KEPT:
        return tuple(history)
    return (*history, BootRecord(history[-1].number + 1 if history else 1, nonce))


def advance(history: Sequence[BootRecord]) -> tuple[BootRecord, ...]:
    """Return the history with the tick of its last record advanced by one."""
    return (*history[:-1], msgspec.structs.replace(history[-1], tick=history[-1].tick + 1))


def contradicts(history: Sequence[BootRecord], known: BootRecord | None) -> bool:
    """Return whether the folder with `history` is an older copy of one whose newest record was `known`.

    The tick of the history's last record is not compared: a message that the node sent before it advanced
    that tick may arrive late. An empty history contradicts every known record; None contradicts none.
    """
    if known is None:
        return False
    for record in history:
        if record.number == known.number:
            ended = record is not history[-1]
            return record.nonce != known.nonce or (ended and record.tick < known.tick)
    return not history or known.number > history[-1].number


def newer(one: BootRecord | None, other: BootRecord | None) -> BootRecord | None:
    """Return the later of two records of one node; None if neither is known."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda record: (record.number, record.tick))
